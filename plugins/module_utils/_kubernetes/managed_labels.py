# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan and write Node labels: which labels this collection manages, and whether the API or a feature file writes them.

Source: Kubernetes' server-side apply (metadata.managedFields); Node Feature Discovery's customization guide (source
local, label namespaces).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ..core.dra.node_labels import BUS_LABEL, FEATURES
from ..core.errors import AcceleratorError
from ..core.vendors.registry import BACKENDS, create
from .client import Api, ApiError, group_versions, serves
from .cluster_facts import found_or_none

MANAGER = "dra-accelerators-node-features"
#: The Node's annotations with the names of the labels that this collection wrote through the API, and of those in its
#: feature file, separated by commas.
WRITTEN, IN_FILE = "dra-accelerators/labels", "dra-accelerators/feature-file"
AUTO, API, FILE = "auto", "api", "file"
WAYS = (AUTO, API, FILE)
GROUP = "nfd.k8s-sigs.io"
#: The label that NFD sets on its objects, and the prefix of its annotations on nodes.
NODE_LABEL, NODE_ANNOTATIONS = "nfd.node.kubernetes.io/node-name", "nfd.node.kubernetes.io/"
CHART, WORKERS = ("app.kubernetes.io/name", "node-feature-discovery"), ("nfd-worker", "node-feature-discovery-worker")
ATTEMPTS = 3
#: More labels than any supported node needs: MIG has fewer than ten profiles per GPU model, with thirteen labels each.
MOST_LABELS = 256
_RESERVED, _NFDS_OWN = "kubernetes.io", (FEATURES, "profile.node.kubernetes.io")
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Discovery:
    """The state of NFD: whether its API is served, its DaemonSets with pods, and whether it reports the node."""

    served: bool = False
    daemons: tuple[str, ...] = ()
    knows_node: bool = False

    @property
    def runs(self) -> bool:
        """Return whether NFD runs on the node.

        The API alone does not show this: it remains after NFD is removed, and the pods of NFD can run only on other nodes.
        """
        return self.served and bool(self.daemons) and self.knows_node


@dataclass(frozen=True)
class DesiredLabels:
    """The desired labels of a Node. ``without_nfd`` are desired only if NFD does not run, because NFD writes these itself."""

    labels: Mapping[str, str]
    without_nfd: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The labels to write through the API, the labels for the feature file, and the labels that others manage.

    ``labels`` and ``annotations`` are all that this collection's manager applies. ``removed`` and ``forgotten`` are
    managed labels and annotations to remove. ``left`` are desired or previously managed labels that belong to other field
    managers, with the names of these managers.
    """

    way: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    in_file: Mapping[str, str]
    removed: tuple[str, ...]
    forgotten: tuple[str, ...]
    left: Mapping[str, tuple[str, ...]]
    changes: bool


@dataclass(frozen=True)
class LabelResult:
    """The result for the Node, in check mode the predicted result. ``plan`` is None if the Node does not exist.

    ``filed`` are the names of the labels that the Node's annotation listed before as written to the feature file.
    """

    plan: Plan | None
    changed: bool
    before: Mapping[str, str]
    after: Mapping[str, str]
    had_file: bool
    filed: frozenset[str] = frozenset()

    def added(self) -> dict[str, str]:
        """Return the new labels: those that the Node had from neither the API nor the feature file before."""
        now = {**self.after, **(self.plan.in_file if self.plan is not None else {})}
        return {name: now[name] for name in sorted(now) if name not in self.before and name not in self.filed}

    def removed_names(self) -> list[str]:
        """Return the names of the removed labels: those that the Node has from neither the API nor the feature file now."""
        in_file = self.plan.in_file if self.plan is not None else {}
        return sorted(({*self.before, *self.filed} - {*self.after, *in_file}) if self.plan is not None else ())


def allows_label(name: str, vendors: Iterable[str] = tuple(BACKENDS)) -> bool:
    """Return whether this collection may write or remove a label of this name for one of the vendors.

    The names come from the node, and the label is written with the operator's rights. A node must not get a label that its own
    identity may not write, such as node-restriction.kubernetes.io/... or node-role.kubernetes.io/...
    """
    return re.fullmatch(BUS_LABEL, name) is not None or any(create(each).facts.allows_label(name) for each in vendors)


def split_allowed(labels: Mapping[str, str], vendors: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels that may be written for these vendors, and for each other label the reason why it is rejected.

    Raises AcceleratorError for more than MOST_LABELS labels.
    """
    if len(labels) > MOST_LABELS:
        raise AcceleratorError(
            f"Found {len(labels)} labels for one Node, expected at most {MOST_LABELS}",
            hint="No label was written. Examine the node, which reports these labels for its devices.",
            code="too-many-labels",
        )
    known = tuple(vendors)
    allowed: dict[str, str] = {}
    rejected: dict[str, str] = {}
    for name, value in labels.items():
        if not allows_label(name, known):
            rejected[name] = f"it is not a label of {' or '.join(known)} devices"
        elif not _LABEL_VALUE.fullmatch(value):
            rejected[name] = f"its value {value[:80]!r} is not the value of a label"
        else:
            allowed[name] = value
    return allowed, rejected


def is_accepted_by_nfd(name: str) -> bool:
    """Return whether NFD accepts a label of this name from features.

    Below kubernetes.io it accepts only its own namespaces.
    """
    domain = name.partition("/")[0]
    if any(domain == own or domain.endswith(f".{own}") for own in _NFDS_OWN):
        return True
    return domain != _RESERVED and not domain.endswith(f".{_RESERVED}")


def file_content(labels: Mapping[str, str]) -> str:
    """Return labels in the format of NFD's source local."""
    return "".join(f"{name}={labels[name]}\n" for name in sorted(labels))


def _names(text: str) -> frozenset[str]:
    return frozenset(each for each in text.split(",") if each)


def _entries(node: Json, name: str) -> list[tuple[str, str]]:
    """Return manager and operation of all entries in managedFields that contain this label."""
    return [
        (str(each.get("manager", "")), str(each.get("operation", "")))
        for each in node["metadata"].get("managedFields") or ()
        if f"f:{name}" in _fields(each)
    ]


def _fields(entry: Json, kind: str = "labels") -> Json:
    found: Json = ((entry.get("fieldsV1") or {}).get("f:metadata") or {}).get(f"f:{kind}") or {}
    return found


def _applied(node: Json) -> Json | None:
    """Return the entry of this collection's manager for its applied fields, or None."""
    return next(
        (
            each
            for each in node["metadata"].get("managedFields") or ()
            if each.get("manager") == MANAGER and each.get("operation") == "Apply"
        ),
        None,
    )


def managed_names(node: Json) -> frozenset[str]:
    """Return the names of the labels that this collection wrote through the API.

    Earlier versions patched them and recorded their names in an annotation. An annotation that is not applied comes
    from such a version. An applied annotation is less exact than managedFields: it still contains a label that another
    manager has changed. A node can write both, so names that this collection does not write are ignored.
    """
    entry = _applied(node)
    applied = frozenset(
        str(key)[2:] for key in _fields(entry or {}) if str(key).startswith("f:") and allows_label(str(key)[2:])
    )
    if f"f:{WRITTEN}" in _fields(entry or {}, "annotations"):
        return applied
    return applied | _annotated_names(node, WRITTEN)


def _annotated_names(node: Json, annotation: str) -> frozenset[str]:
    """Return the names in an annotation of the Node, without names that this collection does not write."""
    text = str((node["metadata"].get("annotations") or {}).get(annotation, ""))
    return frozenset(name for name in _names(text) if allows_label(name))


def plan(node: Json, wanted: DesiredLabels, way: str, *, file_gone: bool = False) -> Plan:
    """Plan the writes through the API or the feature file.

    With ``file_gone`` the file no longer exists and its record is removed.
    """
    present: Mapping[str, str] = node["metadata"].get("labels") or {}
    present_annotations: Mapping[str, str] = node["metadata"].get("annotations") or {}
    managed, filed = managed_names(node), _annotated_names(node, IN_FILE)
    all_wanted = dict(wanted.labels) if way == FILE else {**wanted.without_nfd, **wanted.labels}
    left: dict[str, tuple[str, ...]] = {}
    free: dict[str, str] = {}
    for name, value in sorted(all_wanted.items()):
        is_ours = name in filed or (
            name in managed and (present.get(name) == value or not _is_applied_by_others(node, name))
        )
        if name in present and not is_ours:
            left[name] = _other_managers(node, name)
        else:
            free[name] = value
    in_file = {name: value for name, value in free.items() if way == FILE and is_accepted_by_nfd(name)}
    labels = {name: value for name, value in free.items() if name not in in_file}
    obsolete = sorted((managed & set(present)) - set(labels))
    left.update({name: _other_managers(node, name) for name in obsolete if _is_applied_by_others(node, name)})
    annotations = {WRITTEN: ",".join(labels)} if labels else {}
    if way == FILE or (filed and not file_gone):
        # The record covers existing and possible files, so that an interrupted run leaves no unknown file.
        annotations[IN_FILE] = ",".join(in_file if way == FILE else sorted(filed))
    previous = {key: present_annotations[key] for key in (WRITTEN, IN_FILE) if key in present_annotations}
    return Plan(
        way,
        labels,
        annotations,
        in_file,
        removed=tuple(name for name in obsolete if name not in left),
        forgotten=tuple(key for key in previous if key not in annotations),
        left=dict(sorted(left.items())),
        changes=bool(obsolete)
        or annotations != previous
        or any(present.get(name) != value for name, value in labels.items())
        or (bool(labels) and _applied(node) is None),
    )


def _is_applied_by_others(node: Json, name: str) -> bool:
    """Return whether another manager applies a label. A manager that only patched it does not count."""
    return any(verb == "Apply" and manager != MANAGER for manager, verb in _entries(node, name))


def _other_managers(node: Json, name: str) -> tuple[str, ...]:
    return tuple(sorted({manager for manager, _verb in _entries(node, name) if manager and manager != MANAGER}))


def has_pods(item: Json) -> bool:
    """Return whether a DaemonSet is NFD's worker and has pods on nodes."""
    metadata = item["metadata"]
    labels = metadata.get("labels") or {}
    is_worker = any(name in str(metadata["name"]) for name in WORKERS) or (
        labels.get(CHART[0]) == CHART[1] and labels.get("role", "worker") == "worker"
    )
    return is_worker and int((item.get("status") or {}).get("currentNumberScheduled") or 0) > 0


def reports_node(node: Json, features: Iterable[Json]) -> bool:
    """Return whether NFD's worker reports a node: with an object of the node's name, or in older versions with annotations."""
    metadata = node["metadata"]
    return any(each["metadata"]["name"] == metadata["name"] for each in features) or any(
        str(key).startswith(NODE_ANNOTATIONS) for key in metadata.get("annotations") or {}
    )


def discovery(api: Api, node: Json) -> Discovery:
    """Return the state of NFD. Raises ApiError."""
    versions = group_versions(api, GROUP)
    if not versions:
        return Discovery()
    selector = {"labelSelector": f"{NODE_LABEL}={node['metadata']['name']}"}
    path = f"/apis/{GROUP}/{versions[0]}/nodefeatures"
    # Some versions of the group have only rules.
    features = api.list_all(path, selector) if serves(api, GROUP, versions[0], "nodefeatures") else []
    found = api.list_all("/apis/apps/v1/daemonsets", {}, lambda item: item if has_pods(item) else None)
    daemons = sorted(f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found)
    return Discovery(True, tuple(daemons), reports_node(node, features))


class NodeLabels:
    """The labels of one Node."""

    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self._name = name
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"
        #: The state of NFD; None before it was read.
        self.discovery: Discovery | None = None

    def apply(self, wanted: DesiredLabels, way: str, *, file_gone: bool = False, dry: bool = False) -> LabelResult:
        """Bring the Node's labels to the desired state. Raises ApiError."""
        first: Json | None = None
        changed = False
        attempt = 0
        while True:
            attempt += 1
            node = found_or_none(self._api, self._path)
            if node is None:
                return LabelResult(None, changed, {}, {}, False)
            first = first or node
            if way == AUTO and self.discovery is None:
                self.discovery = discovery(self._api, node)
            runs = self.discovery is not None and self.discovery.runs
            selected = (FILE if runs else API) if way == AUTO else way
            decided = plan(node, wanted, selected, file_gone=file_gone)
            try:
                if decided.changes:
                    changed = True
                    self._write(node, decided, dry=dry)
            except ApiError as error:
                # The Node changed since it was read, for example by its kubelet: plan again from its current state.
                if error.status == 409 and attempt < ATTEMPTS:
                    continue
                raise
            return _result_of(first, decided, changed)

    def _write(self, node: Json, decided: Plan, *, dry: bool) -> None:
        query = {"fieldManager": MANAGER, **({"dryRun": "All"} if dry else {})}
        version = node["metadata"]["resourceVersion"]
        if decided.removed or decided.forgotten:
            # Explicit removal: if another manager patched a label too, releasing it would leave it on the Node.
            removed = {"labels": dict.fromkeys(decided.removed), "annotations": dict.fromkeys(decided.forgotten)}
            body: dict[str, Any] = {"metadata": {"resourceVersion": version, **removed}}
            answer = self._api.request("PATCH", self._path, query=query, body=body, content_type=_MERGE)
            if not dry:  # a dry run stores nothing, so its version cannot be the base of the next write
                version = answer["metadata"]["resourceVersion"]
        if not (decided.labels or decided.annotations or _applied(node)):
            return
        metadata: dict[str, Any] = {"name": self._name, "resourceVersion": version}
        # The API server would keep a managedFields entry for an empty map.
        kinds = {"labels": decided.labels, "annotations": decided.annotations}
        metadata.update({kind: dict(named) for kind, named in kinds.items() if named})
        body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        # Force, to take over labels that earlier versions patched. Labels of others are not included, as of this
        # version of the Node.
        query["force"] = "true"
        self._api.request("PATCH", self._path, query=query, body=body, content_type=_APPLY)


def _result_of(node: Json, decided: Plan, changed: bool) -> LabelResult:
    present: Mapping[str, str] = node["metadata"].get("labels") or {}
    names = managed_names(node) | set(decided.labels)
    before = {name: present[name] for name in sorted(names) if name in present}
    after = {name: value for name, value in before.items() if name not in decided.removed}
    noted: Mapping[str, str] = node["metadata"].get("annotations") or {}
    now = dict(sorted({**after, **decided.labels}.items()))
    return LabelResult(decided, changed, before, now, IN_FILE in noted, _annotated_names(node, IN_FILE))
