# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What a cluster has, from its API server or from manifests, and why its pods and claims have no devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ._cel import CelJudge
from ._cluster import found_or_none
from ._kubernetes import Api, served_version
from ._manifests import documents_of, read
from ._taint_rules import PLURAL as RULES
from ._taint_rules import VERSIONS as RULE_VERSIONS
from .core.allocation.explanation import Cluster, Explainer, Explanation
from .core.errors import AcceleratorError, NotFound
from .core.planner.cuts import Cuts
from .core.planner.fleet import InvalidFleet

GROUP = "resource.k8s.io"
#: Best first.
VERSIONS = ("v1", "v1beta2", "v1beta1")
#: By kind, the list of ``Cluster`` that it belongs to.
LISTS = {
    "ResourceSlice": "slices",
    "ResourceClaim": "claims",
    "DeviceClass": "classes",
    "DeviceTaintRule": "rules",
    "Node": "nodes",
    "Pod": "pods",
    "ResourceClaimTemplate": "templates",
}
WITHOUT_NAMESPACE = ("ResourceSlice", "DeviceClass", "DeviceTaintRule", "Node")
Json = dict[str, Any]


@dataclass
class Objects:
    """Objects by kind; of two with one name the later counts."""

    found: dict[str, dict[tuple[str, str], Json]] = field(default_factory=lambda: {kind: {} for kind in LISTS})

    def add(self, kind: str, document: Json, namespace: str) -> None:
        """Add an object of one of the kinds; what does not say its namespace is of this one."""
        metadata = dict(document["metadata"])
        if kind not in WITHOUT_NAMESPACE:
            metadata.setdefault("namespace", namespace)
        self.found[kind][str(metadata.get("namespace", "")), str(metadata["name"])] = {**document, "metadata": metadata}

    def cluster(self) -> Cluster:
        """Return them as what the explanation is made of."""
        lists = {LISTS[kind]: list(objects.values()) for kind, objects in self.found.items()}
        return Cluster(**lists)

    def get(self, kind: str, namespace: str, name: str) -> Json:
        """Return an object by its name. Raises NotFound."""
        known = self.found[kind].get((namespace, name))
        if known is None:
            near = sorted(one for place, one in self.found[kind] if place == namespace)
            raise NotFound(
                f"{kind} {namespace}/{name} does not exist; in namespace {namespace} there are {', '.join(near[:8]) or 'none'}",
                hint="Correct the name or the namespace.",
            )
        return known


def ask(api: Api, objects: Objects) -> None:
    """Add what the cluster has. Raises ApiError."""
    base = f"/apis/{GROUP}/{served_version(api, GROUP, VERSIONS)}"
    paths = {
        "Node": "/api/v1/nodes",
        "Pod": "/api/v1/pods",
        "ResourceSlice": f"{base}/resourceslices",
        "ResourceClaim": f"{base}/resourceclaims",
        "ResourceClaimTemplate": f"{base}/resourceclaimtemplates",
        "DeviceClass": f"{base}/deviceclasses",
    }
    for kind, path in paths.items():
        for each in api.list_all(path, {}):
            objects.add(kind, each, "default")
    for version in RULE_VERSIONS:
        path = f"/apis/{GROUP}/{quote(version)}"
        resources = (found_or_none(api, path) or {}).get("resources") or ()
        if any(each.get("name") == RULES for each in resources):
            for each in api.list_all(f"{path}/{RULES}", {}):
                objects.add("DeviceTaintRule", each, "")
            break


def add_documents(objects: Objects, documents: Iterable[Any], namespace: str) -> list[tuple[str, str, str]]:
    """Add what of manifests is of one of the kinds; return kind, namespace and name of each. Raises AcceleratorError for what is no object."""
    added = []
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, Mapping):
            raise AcceleratorError(
                f"found {type(document).__name__} among the manifests, expected objects with kind and metadata",
                hint="Correct the manifest.",
                code="manifest-unreadable",
            )
        if isinstance(document.get("items"), list):
            added += add_documents(objects, document["items"], namespace)
            continue
        kind, metadata = str(document.get("kind")), document.get("metadata")
        if kind not in LISTS:
            continue
        if not isinstance(metadata, Mapping) or not metadata.get("name"):
            raise AcceleratorError(f"a {kind} among the manifests has no name", code="manifest-unreadable")
        objects.add(kind, dict(document), namespace)
        added.append((kind, str(metadata.get("namespace") or namespace), str(metadata["name"])))
    return added


def answers_in(path: str) -> Json:
    """Return the nodes' answers by their names that a file holds. Raises AcceleratorError."""
    found = documents_of(read(path), path)
    document = found[0] if len(found) == 1 else None
    if isinstance(document, dict) and isinstance(document.get("nodes"), dict):
        document = document["nodes"]
    if not isinstance(document, dict) or not all(each is None or isinstance(each, dict) for each in document.values()):
        raise InvalidFleet(
            f"{path} holds no answers of nodes",
            hint="Expected is a mapping from nodes' names to what the module accelerator_report has answered there.",
        )
    return document


def explainer_of(objects: Objects, nodes: Mapping[str, Any] | None = None) -> Explainer:
    """Return who explains a cluster; what ``nodes`` have answered says how their devices can be cut. Raises NoCel."""
    cluster, judge = objects.cluster(), CelJudge()
    cuts = Cuts(nodes, judge, claims=cluster.claims, slices=cluster.slices) if nodes is not None else None
    return Explainer(cluster, judge, cuts)


def explanations(
    objects: Objects,
    *,
    pods: Sequence[str] = (),
    claims: Sequence[str] = (),
    manifests: Sequence[tuple[str, str, str]] = (),
    namespace: str = "",
    nodes: Mapping[str, Any] | None = None,
) -> list[Explanation]:
    """Explain the pods and claims that are named, or those among manifests, or all that wait. Raises NotFound, NoCel, Malformed.

    Names may have their namespace before them, with a slash; ``namespace`` is that of those without, and the only one that is looked at of all that wait.
    ``nodes`` are what nodes have answered, by their names.
    """
    explainer = explainer_of(objects, nodes)
    named = [("Pod", *_split(each, namespace)) for each in pods]
    named += [("ResourceClaim", *_split(each, namespace)) for each in claims]
    if not named and manifests:
        named = [each for each in manifests if each[0] == "Pod"]
        used = {
            (place, str(entry.get("resourceClaimName")))
            for _kind, place, name in named
            for entry in objects.get("Pod", place, name)["spec"].get("resourceClaims") or ()
        }
        named += [each for each in manifests if each[0] == "ResourceClaim" and each[1:] not in used]
        found = (
            [_of_template(objects, each) for each in manifests if each[0] == "ResourceClaimTemplate"]
            if not named
            else []
        )
        return [*(_one(explainer, objects, each) for each in named), *(explainer.claim(each) for each in found)]
    if named:
        return [_one(explainer, objects, each) for each in named]
    return [each for each in explainer.waiting() if namespace in ("", each.namespace)]


def _one(explainer: Explainer, objects: Objects, named: tuple[str, str, str]) -> Explanation:
    found = objects.get(*named)
    return explainer.pod(found) if named[0] == "Pod" else explainer.claim(found)


def _of_template(objects: Objects, named: tuple[str, str, str]) -> Json:
    """A claim as it would be made from a template."""
    template = objects.get(*named)
    return {"metadata": template["metadata"], "spec": (template.get("spec") or {}).get("spec") or {}}


def _split(name: str, namespace: str) -> tuple[str, str]:
    place, slash, own = name.partition("/")
    return (place, own) if slash else (namespace or "default", name)
