# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find partition changes on one node that would allow its unallocated claims, from the nodes' answers. No side effects.

Partitions in use are kept. The caller verifies the result with the search of `allocation`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..allocation.cutting import Cut
from ..allocation.objects import Device, Judge, WantedClaim
from ..errors import AcceleratorError
from ..partitioning.rules import WHOLE
from .claims import holdings, parts_of, published_kinds
from .demands import Demand, Kind
from .fleet import Fleet, FleetDevice, InvalidFleet, read_fleet
from .one_claim import place_claim
from .plan import DevicePlan, make_plan
from .problem import build

Json = Mapping[str, Any]


class Cuts:
    """Plan one node at a time.

    ``claims`` and ``slices`` are the cluster's, for devices that are allocated but not prepared yet.
    """

    def __init__(
        self, nodes: Mapping[str, Any], judge: Judge, *, claims: Iterable[Json] = (), slices: Iterable[Json] = ()
    ) -> None:
        self._nodes, self._judge = nodes, judge
        self._kinds = published_kinds(nodes)
        self._held = holdings(claims, slices, {each.driver for each in self._kinds.values()})
        self._fleets: dict[str, Fleet | None] = {}
        #: Requests, with the state of a node, for which no change is known. Most nodes of a fleet are alike.
        self._without: dict[Any, Sequence[Cut] | None] = {}

    def cuts(self, node: str, claims: Sequence[WantedClaim], ended: Collection[str] = ()) -> Sequence[Cut] | None:
        """Return the devices of a node to partition again, with their new partitions, as if the claims ``ended`` had ended.

        Empty if no change helps. None if unknown: the node has not answered, or no layout can be planned for the
        requests.
        """
        fleet = self._fleet(node)
        if fleet is None:
            return None
        parts, reason = parts_of("", claims, self._kinds, self._judge, [])
        if reason:
            return None
        if any(not each.items for each in parts):
            return ()
        devices = tuple(_after(each, set(ended)) for each in fleet.devices)
        key = (parts, tuple(map(_likeness, devices)))
        if key in self._without:
            return self._without[key]
        try:
            problem = build(replace(fleet, devices=devices), [Demand("wanted", 1, parts)])
            solution = place_claim(problem)
        except AcceleratorError:
            return self._without.setdefault(key, None)
        if solution is None:
            return self._without.setdefault(key, ())
        changed = [each for each in make_plan(problem, solution).devices if each.changed and not each.device.is_dynamic]
        return [found for each in changed if (found := _cut(each, self._kinds)).parts]

    def _fleet(self, node: str) -> Fleet | None:
        if node not in self._fleets:
            try:
                found = read_fleet({node: self._nodes.get(node)}, self._held_on(node)) if self._kinds else None
            except InvalidFleet:
                found = None
            self._fleets[node] = found if found is not None and found.devices else None
        return self._fleets[node]

    def _held_on(self, node: str) -> list[dict[str, Any]]:
        here = [{**each, "devices": [one for one in each["devices"] if one["node"] == node]} for each in self._held]
        return [each for each in here if each["devices"]]


def _likeness(each: FleetDevice) -> Any:
    """Return the properties of a device that determine its possible partitions."""
    one = each.device
    held = tuple((part.profile_id, part.placement.start, at in each.holders) for at, part in enumerate(one.partitions))
    profiles = tuple((profile.profile_id, profile.name) for profile in one.profiles)
    what = (one.vendor, one.product, one.memory_bytes, profiles, one.partitioning.enabled, held)
    rule = json.dumps(each.rule, sort_keys=True, default=str)
    return (*what, bool(each.occupants), bool(each.fixed), one.health.healthy, rule)


def _after(each: FleetDevice, ended: set[str]) -> FleetDevice:
    """Return a device's state after some claims have ended."""
    holders = {
        at: left for at, names in each.holders.items() if (left := tuple(one for one in names if one not in ended))
    }
    return replace(each, holders=holders, occupants=tuple(one for one in each.occupants if one not in ended))


def _cut(each: DevicePlan, kinds: Mapping[Kind, Device]) -> Cut:
    one = each.device.device
    same = (one.vendor, one.product, one.memory_bytes)
    if (each.rule or {}).get("mode") == WHOLE:
        return Cut(one.uuid, (kinds[(*same, None, False)],), frozenset(), "whole")
    parts = tuple(kinds[(*same, profile.profile_id, False)] for profile, _place in each.created)
    text = _counted(profile.name for profile, _place in each.created)
    if each.kept:
        text += f" in addition to {_counted(part.profile for part in each.kept)}"
    return Cut(one.uuid, parts, frozenset(part.uuid for part in each.kept), text)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(names).items()))
