# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan and write DeviceClasses, and determine which classes this collection manages.

Source: k8s.io/api/resource DeviceClass. The used fields are equal in v1, v1beta2, and v1beta1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ..core.dra.extended_claims import duplicates
from ..core.errors import AcceleratorError
from .client import Api, ApiError, PartlyWritten, served_version

GROUP = "resource.k8s.io"
#: The preferred version first.
VERSIONS = ("v1", "v1beta2", "v1beta1")
MANAGER = "dra.accelerators.device-class"
MANAGED_BY, OURS = "app.kubernetes.io/managed-by", "dra-accelerators"
LEAVE, REFUSE, REPLACE = "leave", "refuse", "replace"
ATTEMPTS = 3
_SPEC = ("selectors", "config", "extendedResourceName")


@dataclass(frozen=True)
class Write:
    """One API request. ``before`` is the current class, ``body`` the desired one."""

    verb: str
    name: str
    body: Mapping[str, Any] | None
    before: Mapping[str, Any] | None


@dataclass(frozen=True)
class Plan:
    """The requests in the order of the given classes. ``left`` are the unmanaged classes that do not change."""

    writes: tuple[Write, ...]
    left: tuple[str, ...]


@dataclass(frozen=True)
class ClassResult:
    """The changes to the classes; in check mode the expected changes.

    ``duplicates`` are the extended resources that more than one class serves, at least one of them from this run. The
    class that the scheduler uses comes first.
    """

    steps: tuple[dict[str, str], ...]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    left: tuple[str, ...]
    dropped: tuple[str, ...]
    duplicates: Mapping[str, Sequence[str]] = field(default_factory=dict)


def document(wanted: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the API object of a user-defined class."""
    spec: dict[str, Any] = {
        "selectors": [{"cel": {"expression": expression}} for expression in wanted.get("selectors") or ()]
    }
    if wanted.get("config"):
        spec["config"] = list(wanted["config"])
    if wanted.get("extended_resource"):
        spec["extendedResourceName"] = wanted["extended_resource"]
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "DeviceClass",
        "metadata": {"name": wanted["name"], "labels": {MANAGED_BY: OURS}},
        "spec": spec,
    }


def plan(
    wanted: Sequence[Mapping[str, Any]], present: Mapping[str, Mapping[str, Any]], *, absent: bool, unmanaged: str
) -> Plan:
    """Plan the requests. Labels and annotations of others are kept. No side effects.

    ``wanted`` are API objects. Raises AcceleratorError with code foreign-class, or with code invalid-classes for
    duplicate names.
    """
    names = [str(each["metadata"]["name"]) for each in wanted]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise AcceleratorError(
            f"The list contains the classes {', '.join(twice)} more than once", code="invalid-classes"
        )
    foreign = tuple(name for name in names if name in present and not is_ours(present[name]))
    if foreign and unmanaged == REFUSE:
        raise AcceleratorError(
            f"The DeviceClasses {', '.join(foreign)} do not have the label {MANAGED_BY}={OURS}, because another program or person created them",
            hint="Remove them from the list, choose other names, or set on_unmanaged to leave or replace.",
            code="foreign-class",
        )
    left = foreign if unmanaged == LEAVE else ()
    writes = []
    for each, name in zip(wanted, names):
        existing = present.get(name)
        if name in left or (absent and existing is None):
            continue
        if absent:
            writes.append(Write("delete", name, None, existing))
        elif existing is None:
            writes.append(Write("create", name, each, None))
        elif summary(existing) != summary(each) or not is_ours(existing):
            writes.append(Write("update", name, _merged(each, existing), existing))
    return Plan(tuple(writes), left)


def _merged(wanted: Mapping[str, Any], existing: Mapping[str, Any]) -> dict[str, Any]:
    metadata = existing["metadata"]
    kept = {
        key: metadata[key] for key in ("name", "uid", "resourceVersion", "annotations", "finalizers") if key in metadata
    }
    labels = {**(metadata.get("labels") or {}), **wanted["metadata"]["labels"]}
    # Keep fields of newer API servers that this module does not know.
    more = {key: value for key, value in (existing.get("spec") or {}).items() if key not in _SPEC}
    return {**wanted, "metadata": {**kept, "labels": labels}, "spec": {**more, **wanted["spec"]}}


def is_ours(item: Mapping[str, Any]) -> bool:
    """Return whether a class has the collection's label, like the classes of the role."""
    return (item["metadata"].get("labels") or {}).get(MANAGED_BY) == OURS


def summary(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compared fields of a class, for a comparison and a diff."""
    spec = item.get("spec") or {}
    return {
        "selectors": [(each.get("cel") or {}).get("expression", "") for each in spec.get("selectors") or ()],
        "config": list(spec.get("config") or ()),
        "extended_resource": spec.get("extendedResourceName") or "",
    }


def duplicates_after(
    present: Mapping[str, Mapping[str, Any]],
    wanted: Iterable[Mapping[str, Any]],
    ordered: Collection[str],
    decided: Plan,
) -> dict[str, list[str]]:
    """Return the extended resources of the written classes that other classes also serve.

    The server's creation time of a class from this run is unknown, so the class counts as the newest.
    """
    written = {
        str(each["metadata"]["name"]): each for each in wanted if str(each["metadata"]["name"]) not in decided.left
    }
    now: dict[str, Mapping[str, Any]] = {name: each for name, each in present.items() if name not in written}
    for name in ordered:
        if name in written:
            existing = (present.get(name) or {}).get("metadata") or {"creationTimestamp": "9999"}
            times = {"creationTimestamp": existing.get("creationTimestamp") or ""}
            now[name] = {**written[name], "metadata": {**written[name]["metadata"], **times}}
    return {
        resource: names for resource, names in duplicates(now.values()).items() if not set(names).isdisjoint(written)
    }


class Classes:
    """The DeviceClasses of one API server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.version = served_version(api, GROUP, VERSIONS)
        self._path = f"/apis/{GROUP}/{self.version}/deviceclasses"

    def find(self) -> dict[str, dict[str, Any]]:
        """Return all classes by name. Raises ApiError."""
        return {str(each["metadata"]["name"]): each for each in self._api.list_all(self._path, {})}

    def apply(self, classes: Sequence[Mapping[str, Any]], *, absent: bool, unmanaged: str, dry: bool) -> ClassResult:
        """Create, update, or delete classes to reach the desired state.

        Raises ApiError, PartlyWritten, AcceleratorError. All requests are validated with a server-side dry run before
        the first write.
        """
        wanted = [document(each, self.version) for each in classes]
        names = [str(each["metadata"]["name"]) for each in wanted]
        first: dict[str, Any] | None = None
        steps: list[dict[str, str]] = []
        after: dict[str, Any] = {}
        for attempt in range(1, ATTEMPTS + 1):
            present = self.find()
            if first is None:
                first = {name: summary(present[name]) for name in names if name in present}
                after = dict(first)
            decided = plan(wanted, present, absent=absent, unmanaged=unmanaged)
            try:
                writes, dropped = self._dry_run(decided.writes)
                for write in writes:
                    answer = self._send(write, dry=dry)
                    steps.append({"verb": write.verb, "name": write.name})
                    after.pop(write.name, None)
                    if answer is not None:
                        after[write.name] = summary(answer)
            except ApiError as error:
                # A class changed since it was read: plan again from the current state.
                if error.status == 409 and attempt < ATTEMPTS:
                    continue
                if steps:
                    raise PartlyWritten(error, steps) from error
                raise
            break
        ordered = {name: after[name] for name in names if name in after}
        return ClassResult(
            steps=tuple(steps),
            before=first or {},
            after=ordered,
            left=decided.left,
            dropped=dropped,
            duplicates=duplicates_after(present, wanted, ordered, decided),
        )

    def _dry_run(self, writes: Sequence[Write]) -> tuple[list[Write], tuple[str, ...]]:
        """Validate all requests with a server-side dry run.

        Return the requests that change a class, and the fields that the server drops. If the server drops the only changed
        field, it returns the class unchanged, and the request does not count as a change.
        """
        found, dropped = [], []
        for write in writes:
            answer = self._send(write, dry=True)
            if answer is not None and write.body is not None and summary(answer) != summary(write.body):
                lost = [key for key, value in summary(write.body).items() if summary(answer)[key] != value]
                dropped.append(f"{' and '.join(lost)} of {write.name}")
            same = (
                answer is not None
                and write.before is not None
                and summary(answer) == summary(write.before)
                and is_ours(write.before)
            )
            if not same:
                found.append(write)
        return found, tuple(dropped)

    def _send(self, write: Write, *, dry: bool) -> dict[str, Any] | None:
        path = f"{self._path}/{quote(write.name, safe='')}"
        if write.verb == "delete":
            metadata = (write.before or {}).get("metadata") or {}
            preconditions = {key: metadata[key] for key in ("uid", "resourceVersion") if metadata.get(key)}
            # If the request has a body, the API server ignores delete options in the query.
            options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
            try:
                self._api.request("DELETE", path, body={**options, **({"dryRun": ["All"]} if dry else {})})
            except ApiError as error:
                if not error.is_not_found:
                    raise
            return None
        query = {**({"dryRun": "All"} if dry else {}), "fieldManager": MANAGER, "fieldValidation": "Strict"}
        if write.verb == "create":
            return self._api.request("POST", self._path, query=query, body=write.body)
        return self._api.request("PUT", path, query=query, body=write.body)
