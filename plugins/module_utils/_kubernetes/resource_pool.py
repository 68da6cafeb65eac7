# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan and write one pool of ResourceSlices in the API server, and verify its owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.dra.resource_slices import (
    COMBINED,
    SEPARATE,
    PoolPlan,
    PoolSpec,
    SliceContent,
    SliceWrite,
    dropped_fields,
    plan_pool,
    plan_removal,
    same_content,
)
from ..core.errors import AcceleratorError
from .client import ApiError, PartlyWritten

GROUP = "resource.k8s.io"
# Versions whose ResourceSlice has the structure of v1, in order of preference.
VERSIONS = ("v1", "v1beta2")
MANAGER = "dra.accelerators.resource-slices"
# From this minor version of Kubernetes on, counter sets are in separate slices.
SEPARATE_COUNTERS_SINCE = 35
ATTEMPTS = 3
INCOMPLETE = ", so the pool can be incomplete. The scheduler allocates no devices of an incomplete pool"


class Connection(Protocol):
    """The required methods of a connection to the API server."""

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send one request and return the answer. Raises ApiError."""

    def list_all(
        self, path: str, query: Mapping[str, str], keep: Callable[[dict[str, Any]], Any]
    ) -> list[dict[str, Any]]:
        """Return the objects of a list. ``keep`` returns the part to keep, or None to skip an object. Raises ApiError."""


@dataclass(frozen=True)
class Published:
    """The writes to a pool, and the fields that the server dropped. In a dry run, the planned writes."""

    steps: tuple[dict[str, Any], ...]
    generation: int
    before: dict[str, Any]
    after: dict[str, Any]
    dropped: tuple[str, ...]


def counter_layout(version: Mapping[str, Any]) -> str:
    """Return the layout of counter sets for the server's answer to /version. No side effects. Raises AcceleratorError."""
    digits = "".join(character for character in str(version.get("minor", "")) if character.isdecimal())
    if version.get("major") != "1" or not digits:
        raise AcceleratorError(
            f"The API server reports the version {version.get('major')}.{version.get('minor')}, expected 1.33 or newer",
            code="api-version",
        )
    return SEPARATE if int(digits) >= SEPARATE_COUNTERS_SINCE else COMBINED


def publishers(existing: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the other publishers of these slices, one text for each slice of another publisher. No side effects.

    A slice has another publisher if an object owns it, as a Node owns the slices of its driver, or if its creator did not
    use this module's field manager. A slice of this module that a user edited is not affected.
    """
    found: list[str] = []
    for each in existing:
        metadata = each["metadata"]
        owners = [f"{owner['kind']} {owner['name']}" for owner in metadata.get("ownerReferences") or ()]
        managers = [entry.get("manager", "") for entry in metadata.get("managedFields") or ()]
        if owners:
            found.append(f"{metadata['name']} is owned by {', '.join(owners)}")
        elif MANAGER not in managers:
            found.append(
                f"{metadata['name']} was written by {', '.join(dict.fromkeys(managers)) or 'an unknown field manager'}"
            )
    return tuple(found)


def refuse_foreign(driver: str, pool: str, existing: Sequence[Mapping[str, Any]]) -> None:
    """Raise AcceleratorError with code foreign-pool if slices of the pool have another publisher. No side effects."""
    others = publishers(existing)
    if others:
        raise AcceleratorError(
            f"Pool {pool} of driver {driver} has another publisher: {'; '.join(others)}",
            hint="Choose another pool name, stop that publisher, or set force to take the pool over.",
            code="foreign-pool",
        )


def summary(slices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of a pool for a diff, without the fields that always change."""
    contents = []
    for each in sorted(slices, key=lambda one: str(one["metadata"].get("name") or one["metadata"].get("generateName"))):
        spec = dict(each["spec"])
        spec.pop("driver", None)
        spec["pool"] = {key: value for key, value in spec["pool"].items() if key != "name"}
        contents.append(spec)
    return {"slices": contents}


def _after(existing: Sequence[Mapping[str, Any]], writes: Sequence[SliceWrite]) -> list[Mapping[str, Any]]:
    written = {write.name for write in writes if write.name}
    unchanged: list[Mapping[str, Any]] = [each for each in existing if each["metadata"]["name"] not in written]
    return unchanged + [write.body for write in writes if write.body is not None]


def _step(write: SliceWrite, name: str) -> dict[str, Any]:
    spec = write.body["spec"] if write.body is not None else {}
    return {
        "verb": write.verb,
        "name": name or (write.body or {}).get("metadata", {}).get("generateName", ""),
        "devices": len(spec.get("devices") or ()),
        "counter_sets": len(spec.get("sharedCounters") or ()),
    }


class Pools:
    """The pools of one driver in one API server."""

    def __init__(self, connection: Connection, version: str) -> None:
        self._connection = connection
        self._api_version = f"{GROUP}/{version}"
        self._path = f"/apis/{GROUP}/{version}/resourceslices"

    def find(self, driver: str, pool: str) -> list[dict[str, Any]]:
        """Return the slices of a pool from the server, sorted by name. Raises ApiError."""

        def keep(item: dict[str, Any]) -> dict[str, Any] | None:
            return item if item["spec"]["pool"]["name"] == pool else None

        slices = self._connection.list_all(self._path, {"fieldSelector": f"spec.driver={driver}"}, keep)
        return sorted(slices, key=lambda each: str(each["metadata"]["name"]))

    def _send(self, write: SliceWrite, *, dry: bool) -> dict[str, Any] | None:
        query = {"dryRun": "All"} if dry else {}
        if write.verb == "delete":
            # If a request has a body, the API server ignores the deletion options in the query.
            options: dict[str, Any] = {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "preconditions": dict(write.preconditions),
            }
            if dry:
                options["dryRun"] = ["All"]
            try:
                self._connection.request("DELETE", f"{self._path}/{write.name}", body=options)
            except ApiError as error:
                if not error.is_not_found:
                    raise
            return None
        body = {**(write.body or {}), "apiVersion": self._api_version}
        query = {**query, "fieldManager": MANAGER, "fieldValidation": "Strict"}
        if write.verb == "create":
            return self._connection.request("POST", self._path, query=query, body=body)
        return self._connection.request("PUT", f"{self._path}/{write.name}", query=query, body=body)

    def _dry_run(self, plan: PoolPlan, existing: Sequence[Mapping[str, Any]]) -> tuple[bool, tuple[str, ...]]:
        """Send all writes as dry runs. Return whether they would change anything, and the fields that the server would drop.

        If a server drops a field, each answer equals the stored slice. That is not a change.
        """
        present = {each["metadata"]["name"]: each for each in existing}
        dropped: list[str] = []
        changes = False
        for write in plan.writes:
            answer = self._send(write, dry=True)
            if write.verb != "update" or answer is None or write.body is None:
                changes = True
            if answer is None or write.body is None:
                continue
            dropped.extend(dropped_fields(write.body, answer))
            changes = changes or not _equal(answer["spec"], present[write.name]["spec"])
        return changes, tuple(dict.fromkeys(dropped))

    def publish(self, spec: PoolSpec, *, force: bool, validate: bool, check_mode: bool) -> Published:
        """Create or update a pool. Raises ApiError, PartlyWritten, AcceleratorError (foreign-pool)."""
        return self._apply(
            spec.driver,
            spec.pool,
            lambda existing: plan_pool(spec, existing),
            force=force,
            validate=validate,
            check_mode=check_mode,
        )

    def remove(self, driver: str, pool: str, *, force: bool, validate: bool, check_mode: bool) -> Published:
        """Remove a pool. Raises ApiError, PartlyWritten, AcceleratorError (foreign-pool)."""
        return self._apply(
            driver,
            pool,
            lambda existing: PoolPlan(plan_removal(driver, pool, existing).writes, 0),
            force=force,
            validate=validate,
            check_mode=check_mode,
        )

    def _apply(
        self, driver: str, pool: str, planner: Any, *, force: bool, validate: bool, check_mode: bool
    ) -> Published:
        first = existing = self.find(driver, pool)
        steps: list[dict[str, Any]] = []
        dropped: tuple[str, ...] = ()
        for attempt in range(1, ATTEMPTS + 1):
            if not force:
                refuse_foreign(driver, pool, existing)
            plan = planner(existing)
            try:
                if validate and plan.writes:
                    changes, dropped = self._dry_run(plan, existing)
                    if not changes:
                        plan = PoolPlan((), _generation(existing))
                if check_mode:
                    steps = [_step(write, write.name) for write in plan.writes]
                    after = summary(_after(existing, plan.writes))
                    return Published(tuple(steps), plan.generation, summary(first), after, dropped)
                dropped = self._write(plan, steps) or dropped
            except ApiError as error:
                # Another client wrote a slice after it was read: plan again with the current slices.
                if error.status == 409 and attempt < ATTEMPTS:
                    existing = self.find(driver, pool)
                    continue
                if steps:
                    raise PartlyWritten(error, steps, INCOMPLETE) from error
                raise
            break
        after = summary(self.find(driver, pool)) if steps else summary(first)
        return Published(tuple(steps), plan.generation, summary(first), after, dropped)

    def _write(self, plan: PoolPlan, steps: list[dict[str, Any]]) -> tuple[str, ...]:
        dropped: list[str] = []
        for write in plan.writes:
            answer = self._send(write, dry=False)
            steps.append(_step(write, answer["metadata"]["name"] if answer else write.name))
            if answer is not None and write.body is not None:
                dropped.extend(dropped_fields(write.body, answer))
        return tuple(dict.fromkeys(dropped))


def _generation(existing: Sequence[Mapping[str, Any]]) -> int:
    return max((int(each["spec"]["pool"].get("generation", 0)) for each in existing), default=0)


_POOL_KEYS = ("devices", "sharedCounters", "pool")


def _equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether two specs publish the same content, ignoring the generation."""
    content = SliceContent(tuple(left.get("devices") or ()), tuple(left.get("sharedCounters") or ()))
    rest = [{key: value for key, value in spec.items() if key not in _POOL_KEYS} for spec in (left, right)]
    counts = [spec["pool"]["resourceSliceCount"] for spec in (left, right)]
    return same_content(content, right) and rest[0] == rest[1] and counts[0] == counts[1]
