# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read cluster objects from the API server or from manifests, and explain why pods and claims have no devices."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .._kubernetes.client import Api, ApiError, first_serving, served_version, without_managed_fields
from .._kubernetes.manifest_files import documents_of, read
from .._kubernetes.taint_rules import PLURAL as RULES
from .._kubernetes.taint_rules import VERSIONS as RULE_VERSIONS
from ..core.allocation.changes import NOTHING
from ..core.allocation.explanation import BLOCKED, Cluster, Explainer, Explanation
from ..core.allocation.objects import Malformed
from ..core.allocation.reasons import ERROR, NO, UNKNOWN
from ..core.allocation.text import sentences
from ..core.errors import AcceleratorError, NotFound
from ..core.picture.answers import attention
from ..core.planner.cuts import Cuts
from ..core.planner.fleet import InvalidFleet
from .cel import HAS_CEL, PACKAGE, CelJudge

GROUP = "resource.k8s.io"
#: The supported versions of the API group, in order of preference.
VERSIONS = ("v1", "v1beta2", "v1beta1")
#: The attribute of ``Cluster`` for each kind.
LISTS = {
    "ResourceSlice": "slices",
    "ResourceClaim": "claims",
    "DeviceClass": "classes",
    "DeviceTaintRule": "rules",
    "Node": "nodes",
    "Pod": "pods",
    "ResourceClaimTemplate": "templates",
}
#: Default limits: explained pods, examined nodes for each pod (most nodes are alike), and seconds.
MOST_EXPLAINED, MOST_NODES, MOST_SECONDS = 20, 12, 60.0
WITHOUT_NAMESPACE = ("ResourceSlice", "DeviceClass", "DeviceTaintRule", "Node")
Json = dict[str, Any]


@dataclass
class Objects:
    """Objects by kind. A later object replaces an earlier one of the same name."""

    found: dict[str, dict[tuple[str, str], Json]] = field(default_factory=lambda: {kind: {} for kind in LISTS})

    def add(self, kind: str, document: Json, namespace: str) -> None:
        """Add an object of one of the kinds. ``namespace`` applies to objects without one."""
        metadata = dict(document["metadata"])
        if kind not in WITHOUT_NAMESPACE:
            metadata.setdefault("namespace", namespace)
        self.found[kind][str(metadata.get("namespace", "")), str(metadata["name"])] = {**document, "metadata": metadata}

    def cluster(self) -> Cluster:
        """Return the objects as the input of the explanation."""
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


def ask(
    api: Api,
    objects: Objects,
    kinds: Collection[str] = tuple(LISTS),
    queries: Mapping[str, Json] = MappingProxyType({}),
) -> None:
    """Add the cluster's objects of these kinds. ``queries`` are selectors by kind. Raises ApiError."""
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
        for each in api.list_all(path, queries.get(kind, {}), without_managed_fields) if kind in kinds else ():
            objects.add(kind, each, "default")
    version = first_serving(api, GROUP, RULE_VERSIONS, RULES) if "DeviceTaintRule" in kinds else ""
    for each in api.list_all(f"/apis/{GROUP}/{version}/{RULES}", {}) if version else ():
        objects.add("DeviceTaintRule", each, "")


def add_documents(objects: Objects, documents: Iterable[Any], namespace: str) -> list[tuple[str, str, str]]:
    """Add manifests of the known kinds; return the kind, namespace, and name of each. Raises AcceleratorError for an invalid object."""
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
    """Return the node reports in a file, by node name. Raises AcceleratorError."""
    found = documents_of(read(path), path)
    document = found[0] if len(found) == 1 else None
    if isinstance(document, dict) and isinstance(document.get("nodes"), dict):
        document = document["nodes"]
    if not isinstance(document, dict) or not all(each is None or isinstance(each, dict) for each in document.values()):
        raise InvalidFleet(
            f"{path} contains no reports of nodes",
            hint="Expected a mapping from the names of nodes to the results of the module accelerator_report.",
        )
    return document


def explainer_of(
    objects: Objects, nodes: Mapping[str, Any] | None = None, *, most_nodes: int | None = None
) -> Explainer:
    """Return the explainer of a cluster. Raises NoCel.

    ``most_nodes`` limits the examined nodes. The node reports in ``nodes`` state how devices can be partitioned.
    """
    cluster, judge = objects.cluster(), CelJudge()
    cuts = Cuts(nodes, judge, claims=cluster.claims, slices=cluster.slices) if nodes is not None else None
    return Explainer(cluster, judge, cuts, most_nodes=most_nodes)


def explanations(
    objects: Objects,
    *,
    pods: Sequence[str] = (),
    claims: Sequence[str] = (),
    manifests: Sequence[tuple[str, str, str]] = (),
    namespace: str = "",
    nodes: Mapping[str, Any] | None = None,
) -> list[Explanation]:
    """Explain the named pods and claims, or those in manifests, or all pending ones. Raises NotFound, NoCel, Malformed.

    A name can have a namespace prefix with a slash. ``namespace`` applies to other names, and restricts the pending pods
    and claims. ``nodes`` are node reports by node name.
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


def reasons(
    objects: Objects,
    pods: Sequence[Json],
    clock: Callable[[], float] = time.monotonic,
    *,
    nodes: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Json], int]:
    """Return why pods wait, by namespace/name, and the number of pods that were skipped because of the limits. Raises NoCel.

    Each reason has a code, a message, and a remedy. ``pods`` are the pending pods, the most urgent first. ``nodes`` are
    node reports by node name. Pods get no reason if devices are available, if they wait for another cause, or if a claim
    cannot be read. The scheduler's own message says more then.
    """
    ends = clock() + MOST_SECONDS
    explainer = explainer_of(objects, nodes, most_nodes=MOST_NODES)
    reasons: dict[str, Json | None] = {}
    found: dict[str, Json] = {}
    left = 0
    for pod in pods:
        alike = _alike(objects, pod)
        if alike in reasons:
            reason = reasons[alike]
        elif len(reasons) == MOST_EXPLAINED or clock() > ends:
            left += 1
            continue
        else:
            verdict, reason = _reason(explainer, pod)
            if verdict not in (ERROR, BLOCKED):  # the reason names the claim, and takes little time to find
                reasons[alike] = reason
        if reason is not None:
            found["/".join(_place(pod))] = reason
    return found, left


def why_pods_wait(
    api: Api, nodes: Mapping[str, Any], waiting: Sequence[Json], known: Mapping[str, Sequence[Json]]
) -> tuple[dict[str, Json], Json]:
    """Return why pods wait, by namespace/name, and a note if explanations are missing. Raises ApiError.

    ``nodes`` are node reports, ``known`` are objects by kind.
    """
    kind = "not-explained"
    if not HAS_CEL:
        text = f"Why claims wait is said in the scheduler's words: the Python package {PACKAGE}, which evaluates their selectors, is missing"
        return {}, attention(
            kind,
            text,
            f"Install it on the host that queries the cluster, with Python 3.11 or newer: pip install {PACKAGE}",
        )
    objects = Objects()
    for name, documents in {**known, "Pod": waiting}.items():
        for each in documents:
            objects.add(name, each, "default")
    others = ",".join(
        f"spec.driver!={each}" for each in sorted({each["spec"]["driver"] for each in known["ResourceSlice"]})
    )
    queries = {"ResourceSlice": {"fieldSelector": others}} if others else {}
    try:
        ask(api, objects, ("Node", "ResourceSlice", "ResourceClaimTemplate", "DeviceClass"), queries)
    except ApiError as error:
        if error.status != 403:
            raise
        text = f"Why claims wait is said in the scheduler's words: {error}"
        return {}, attention(
            kind,
            text,
            "Allow the caller to list nodes, deviceclasses and resourceclaimtemplates, or set explain to false.",
        )
    found, left = reasons(objects, waiting, nodes=nodes)
    text = f"Why they wait is said in the scheduler's words of {left} pods more: {MOST_EXPLAINED} that are not alike are explained, within a minute"
    return found, attention(
        kind, text, "The playbook dra.accelerators.why explains all, or those that are named."
    ) if left else {}


def _reason(explainer: Explainer, pod: Json) -> tuple[str, Json | None]:
    """Return the verdict for a pod, and the reason if the pod waits for devices."""
    try:
        said = explainer.pod(pod)
    except Malformed:
        return UNKNOWN, None
    if said.verdict not in (NO, ERROR, BLOCKED):
        return said.verdict, None
    nearest = next(iter(said.changes), None)
    at = f" (node {nearest.node})" if nearest is not None and nearest.node and nearest.node not in nearest.text else ""
    return said.verdict, {
        "code": nearest.kind if nearest is not None else said.verdict,
        "message": sentences(said),
        "remedy": f"{nearest.text[:1].upper()}{nearest.text[1:]}{at}."
        if nearest is not None and nearest.kind != NOTHING
        else "",
    }


def _alike(objects: Objects, pod: Json) -> str:
    """Return a key that is equal for pods with the same explanation: pods with one claim and equal requests, such as the replicas of a job."""
    namespace, name = _place(pod)
    spec = pod["spec"]
    made = {
        each["name"]: each.get("resourceClaimName")
        for each in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    }
    wanted = [each.get("resourceClaimName") or made.get(each["name"]) for each in spec["resourceClaims"]]
    claim = objects.found["ResourceClaim"].get((namespace, str(wanted[0])))
    if len(wanted) != 1 or claim is None or claim["metadata"].get("deletionTimestamp"):
        return json.dumps([namespace, name])
    own = {key: spec.get(key) for key in ("nodeSelector", "affinity", "tolerations")}
    return json.dumps([own, claim.get("spec"), (claim.get("status") or {}).get("allocation")], sort_keys=True)


def _place(each: Json) -> tuple[str, str]:
    return str(each["metadata"]["namespace"]), str(each["metadata"]["name"])


def _one(explainer: Explainer, objects: Objects, named: tuple[str, str, str]) -> Explanation:
    found = objects.get(*named)
    return explainer.pod(found) if named[0] == "Pod" else explainer.claim(found)


def _of_template(objects: Objects, named: tuple[str, str, str]) -> Json:
    """Return the claim that a template would create."""
    template = objects.get(*named)
    return {"metadata": template["metadata"], "spec": (template.get("spec") or {}).get("spec") or {}}


def _split(name: str, namespace: str) -> tuple[str, str]:
    place, slash, own = name.partition("/")
    return (place, own) if slash else (namespace or "default", name)
