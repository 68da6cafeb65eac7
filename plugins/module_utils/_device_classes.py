# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""DeviceClasses: what is to be written, whose they are, and the writing.

Facts: k8s.io/api/resource DeviceClass, the same in v1, v1beta2 and v1beta1 in what is used here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ._kubernetes import Api, ApiError, PartlyWritten, served_version
from .core.errors import AcceleratorError
from .core.extended_claims import duplicates

GROUP = "resource.k8s.io"
#: Best first.
VERSIONS = ("v1", "v1beta2", "v1beta1")
MANAGER = "dra.accelerators.device-class"
MANAGED_BY, OURS = "app.kubernetes.io/managed-by", "dra-accelerators"
LEAVE, REFUSE, REPLACE = "leave", "refuse", "replace"
ATTEMPTS = 3
_SPEC = ("selectors", "config", "extendedResourceName")


@dataclass(frozen=True)
class Write:
    """One request. ``before`` is the class as it is, ``body`` as it is to be."""

    verb: str
    name: str
    body: Mapping[str, Any] | None
    before: Mapping[str, Any] | None


@dataclass(frozen=True)
class Plan:
    """The writes in the order in which the classes were given, and the classes of others that are left as they are."""

    writes: tuple[Write, ...]
    left: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """The changes to the classes; in check mode the expected changes.

    ``duplicates`` are the extended resources that one of them and another class serve; the class that the scheduler uses is the first.
    """

    steps: tuple[dict[str, str], ...]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    left: tuple[str, ...]
    dropped: tuple[str, ...]
    duplicates: Mapping[str, Sequence[str]] = field(default_factory=dict)


def document(wanted: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return a class that a user wrote as the API has it; pure."""
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
    wanted: Sequence[Mapping[str, Any]], present: Mapping[str, Mapping[str, Any]], *, absent: bool, foreign: str
) -> Plan:
    """Decide what is written; pure. Labels and annotations of others stay.

    ``wanted`` are classes as the API has them. Raises AcceleratorError with code foreign-class, or with code invalid-classes for a name
    that is there twice.
    """
    names = [str(each["metadata"]["name"]) for each in wanted]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise AcceleratorError(f"The classes {', '.join(twice)} are given twice", code="invalid-classes")
    theirs = tuple(name for name in names if name in present and not is_ours(present[name]))
    if theirs and foreign == REFUSE:
        raise AcceleratorError(
            f"The DeviceClasses {', '.join(theirs)} do not bear the label {MANAGED_BY}={OURS}: somebody else made them",
            hint="Take them out of the list, choose other names, or set foreign to leave or replace.",
            code="foreign-class",
        )
    left = theirs if foreign == LEAVE else ()
    writes = []
    for each, name in zip(wanted, names):
        there = present.get(name)
        if name in left or (absent and there is None):
            continue
        if absent:
            writes.append(Write("delete", name, None, there))
        elif there is None:
            writes.append(Write("create", name, each, None))
        elif summary(there) != summary(each) or not is_ours(there):
            writes.append(Write("update", name, _merged(each, there), there))
    return Plan(tuple(writes), left)


def _merged(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    metadata = there["metadata"]
    kept = {
        key: metadata[key] for key in ("name", "uid", "resourceVersion", "annotations", "finalizers") if key in metadata
    }
    labels = {**(metadata.get("labels") or {}), **wanted["metadata"]["labels"]}
    # What else a newer API server knows of a class is not this module's to take away.
    more = {key: value for key, value in (there.get("spec") or {}).items() if key not in _SPEC}
    return {**wanted, "metadata": {**kept, "labels": labels}, "spec": {**more, **wanted["spec"]}}


def is_ours(item: Mapping[str, Any]) -> bool:
    """Whether a class bears the collection's label, as those of the role do."""
    return (item["metadata"].get("labels") or {}).get(MANAGED_BY) == OURS


def summary(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a class says, for a comparison and a diff."""
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
    """Return the extended resources of the classes that are there now which other classes serve as well; pure.

    Of a class that was made in this run the server's time is not known here: it counts as the newest.
    """
    written = {
        str(each["metadata"]["name"]): each for each in wanted if str(each["metadata"]["name"]) not in decided.left
    }
    now: dict[str, Mapping[str, Any]] = {name: each for name, each in present.items() if name not in written}
    for name in ordered:
        if name in written:
            there = (present.get(name) or {}).get("metadata") or {"creationTimestamp": "9999"}
            times = {"creationTimestamp": there.get("creationTimestamp") or ""}
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

    def bring_about(self, classes: Sequence[Mapping[str, Any]], *, absent: bool, foreign: str, dry: bool) -> Done:
        """Bring the classes to what is wanted. Raises ApiError, PartlyWritten, AcceleratorError.

        The server judges all writes by its dry run before the first one is made.
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
            decided = plan(wanted, present, absent=absent, foreign=foreign)
            try:
                writes, dropped = self._rehearse(decided.writes)
                for write in writes:
                    answer = self._send(write, dry=dry)
                    steps.append({"verb": write.verb, "name": write.name})
                    after.pop(write.name, None)
                    if answer is not None:
                        after[write.name] = summary(answer)
            except ApiError as error:
                # Somebody wrote one since it was read: plan again from what is there now.
                if error.status == 409 and attempt < ATTEMPTS:
                    continue
                if steps:
                    raise PartlyWritten(error, steps) from error
                raise
            break
        ordered = {name: after[name] for name in names if name in after}
        return Done(
            tuple(steps),
            first or {},
            ordered,
            decided.left,
            dropped,
            duplicates_after(present, wanted, ordered, decided),
        )

    def _rehearse(self, writes: Sequence[Write]) -> tuple[list[Write], tuple[str, ...]]:
        """Let the server judge all writes. Returns those that would change anything, and what it would drop.

        A server that drops a field gives the class back as it was before, for ever; that is no change.
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
            # Where there is a body, the API server reads nothing of what a deletion is to be from the query.
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
