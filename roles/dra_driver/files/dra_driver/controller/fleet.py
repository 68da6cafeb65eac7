# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The report of a fleet as the cluster tells of it: what the playbook ``report`` writes, without what only nodes know.

Everything is asked for when somebody wants to read it, and nothing is kept but the answer, for some seconds: who asks often costs the API
server no more than who asks once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..api.client import ApiClient
from ..api.resources import GROUP, ResourceApi, slice_from_version
from ..core.cluster.claims import facts_by
from ..core.cluster.inventory import devices
from ..core.layout_differences import told_by_slices
from ..core.picture.answers import duplicate_class_notes, fleet_report
from ..core.picture.fleet import picture
from ..core.times import text_of

Json = dict[str, Any]
#: An answer is given again for so long.
KEPT_SECONDS = 10.0
SLICE_PAGE, PAGE = 100, 500


def report_of(
    slices: list[Json],
    claims: list[Json],
    pending: list[Json],
    rules: list[Json],
    classes: list[Json],
    generated: str,
) -> Json:
    """Return the report of the cluster's objects: ``slices`` in the form of v1, ``generated`` the time of the requests, RFC 3339."""
    published = devices(slices, claims)
    report = fleet_report({}, published, facts_by(claims, published, {}))
    # No node was asked, so none is unknown to who asked.
    report["attention"] = [each for each in report["attention"] if each["code"] != "node-unknown"]
    report["attention"] += duplicate_class_notes(classes)
    return picture(
        report, published, pending=pending, rules=rules, generated=generated, differing=told_by_slices(slices)
    )


@dataclass(frozen=True)
class Made:
    """A report as it is sent, and when it was made, by the clock that its maker has."""

    body: bytes
    at: float


class FleetReport:
    """Makes the report, once at a time however many want it. ``clock`` is in seconds and never goes back."""

    def __init__(
        self, client: ApiClient, drivers: Collection[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._resources = ResourceApi(client)
        self._drivers = tuple(drivers)
        self._clock = clock
        self._one = asyncio.Lock()
        self.last: Made | None = None

    async def current(self) -> Made:
        """Return the report, made anew where the last one is old. Raises ApiError, ApiUnreachable, ResourceApiMissing."""
        async with self._one:
            if self.last is None or self._clock() - self.last.at >= KEPT_SECONDS:
                found = await self._ask()
                # A large fleet takes its time, and claims wait for the webhook of the same process.
                self.last = Made(await asyncio.to_thread(_made, found), self._clock())
            return self.last

    async def _ask(self) -> tuple[list[Json], list[Json], list[Json], list[Json], list[Json], str]:
        self._resources.forget()  # the cluster may have been upgraded
        version = await self._resources.version()
        generated = text_of(time.time())
        base = f"/apis/{GROUP}/{version}"
        slices = [
            slice_from_version(each, version)
            for driver in self._drivers
            for each in await self._list(
                f"{base}/resourceslices", SLICE_PAGE, {"fieldSelector": f"spec.driver={driver}"}
            )
        ]
        claims = await self._list(f"{base}/resourceclaims", PAGE)
        pending = await self._list("/api/v1/pods", PAGE, {"fieldSelector": "status.phase=Pending"})
        rules = await self._resources.rules_path()
        taints = await self._list(rules, PAGE) if rules else []
        return slices, claims, pending, taints, await self._list(f"{base}/deviceclasses", PAGE), generated

    async def _list(self, path: str, page: int, params: Json | None = None) -> list[Json]:
        found = await self._client.list_all(path, params, page=page)
        for each in found:
            # Half of an object is who has written which field.
            each.get("metadata", {}).pop("managedFields", None)
        return found


def _made(found: tuple[list[Json], list[Json], list[Json], list[Json], list[Json], str]) -> bytes:
    return json.dumps(report_of(*found), separators=(",", ":")).encode() + b"\n"
