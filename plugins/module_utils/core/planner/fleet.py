# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The devices of a fleet with who holds what of them, read from what the nodes have answered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import AcceleratorError
from ..layout_rules import DYNAMIC, MODES, STATIC, WHOLE
from ..model import Device, Health, Partition, Partitioning, Placement, Profile, frozen
from ..signs import Severity, Sign

#: What may be on a rule beside mode and partitions, and says that its devices are meant for something particular.
_PARTICULAR = ("shares", "passthrough")

Json = Mapping[str, Any]


class InvalidFleet(AcceleratorError):
    """What is said of a fleet is not what nodes answer."""

    default_code = "invalid-inventory"


@dataclass(frozen=True)
class FleetDevice:
    """One device of one node.

    ``rule`` is what its node's layout says of it now, without ``match``; None where that is not known. ``holders`` are, by the position
    of a partition among the device's, who holds it; ``occupants`` who has the device itself. ``fixed`` says why it is left as it is; empty
    where it is not.
    """

    node: str
    device: Device
    rule: Json | None = None
    holders: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    occupants: tuple[str, ...] = ()
    fixed: str = ""

    @property
    def mode(self) -> str:
        """The mode of its present rule, or, where none is known, what it looks like."""
        if self.rule is not None:
            return str(self.rule["mode"])
        return STATIC if self.device.partitioning.enabled else WHOLE

    @property
    def is_dynamic(self) -> bool:
        """Whether its partitions are made when claims want them."""
        return self.mode == DYNAMIC

    @property
    def has_particular_rule(self) -> bool:
        """Whether it is whole for a purpose of its own: for several claims at a time, or for virtual machines."""
        return self.rule is not None and self.mode == WHOLE and any(self.rule.get(key) for key in _PARTICULAR)

    def describe(self) -> str:
        """Name it for a person."""
        return f"{self.node}: {self.device.product} {self.device.index}"


@dataclass(frozen=True)
class Fleet:
    """All devices, by node and index. ``claims`` are the names of claims that hold something, with how many devices each."""

    devices: tuple[FleetDevice, ...]
    claims: Mapping[str, int] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, each once, in order."""
        return tuple(dict.fromkeys(each.node for each in self.devices))


def read_fleet(nodes: Mapping[str, Any], claims: Iterable[Json] = ()) -> Fleet:
    """Read what nodes have answered, by their names; a node whose answer is empty is left out.

    An answer has ``devices`` with their ``profiles`` and ``partitions``; profiles may stand once for all devices of a kind, in ``kinds`` by the
    device's ``kind``. ``claims`` are those of the cluster, with ``namespace``, ``name`` and ``devices`` (``node``, ``uuid``): what is allocated and
    not prepared yet, or not told by the nodes. Raises InvalidFleet.
    """
    kinds: dict[str, tuple[Profile, ...]] = {}
    found: list[FleetDevice] = []
    for node, answer in sorted(nodes.items()):
        if not answer:
            continue
        try:
            told = answer.get("kinds") or {}
            devices = [_device(node, each, told, kinds) for each in answer["devices"]]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidFleet(
                f"What is said of the node {node} is no answer of a node ({type(error).__name__}: {error})",
                hint="Expected is what the module accelerator_report or accelerator_info returns there: devices with profiles and partitions.",
            ) from error
        found += sorted(devices, key=lambda each: (each.device.vendor, each.device.index))
    _see_unique(found)
    return _with_claims(found, claims)


def _see_unique(devices: Sequence[FleetDevice]) -> None:
    seen: dict[str, str] = {}
    for each in devices:
        other = seen.setdefault(each.device.uuid, each.describe())
        if other != each.describe():
            raise InvalidFleet(
                f"{other} and {each.describe()} have the same UUID {each.device.uuid}",
                hint="A node can be in an inventory once.",
            )


def _device(node: str, facts: Json, told: Json, kinds: dict[str, tuple[Profile, ...]]) -> FleetDevice:
    kind: Json = told[facts["kind"]] if facts.get("kind") is not None else facts
    key = json.dumps(kind.get("profiles") or [], sort_keys=True)
    if key not in kinds:
        kinds[key] = tuple(_profile(each) for each in kind.get("profiles") or [])
    mode = facts["partitioning"]
    health = facts.get("health") or {}
    device = Device(
        vendor=str(facts["vendor"]),
        index=int(facts["index"]),
        minor=int(facts.get("minor", facts["index"])),
        uuid=str(facts["uuid"]),
        product=str(facts["product"]),
        pci_address=str(facts.get("pci_address", "")),
        pcie_root=None,
        numa_node=facts.get("numa_node"),
        memory_bytes=int(facts["memory_bytes"]),
        memory_slices=int(kind.get("memory_slices") or 0),
        attributes={},
        capacities=frozen(kind.get("capacities") or {}),
        partitioning=Partitioning(
            bool(mode["supported"]),
            bool(mode["enabled"]),
            bool(mode.get("pending", mode["enabled"])),
            bool(mode.get("needs_reset")),
        ),
        profiles=kinds[key],
        partitions=tuple(_partition(each) for each in facts.get("partitions") or ()),
        health=Health()
        if health.get("healthy", True)
        else Health((Sign("unhealthy", Severity.FAILED, ", ".join(health.get("causes") or ()) or "it is not well"),)),
    )
    rule = facts.get("rule")
    if rule is not None and rule.get("mode") not in MODES:
        raise ValueError(f"mode {rule.get('mode')!r} of its rule is none of {', '.join(MODES)}")
    partitions = facts.get("partitions") or ()
    holders = {number: _held_by(each) for number, each in enumerate(partitions)}
    of_parts = {claim for each in partitions for claim in each.get("claims") or ()}
    occupants = [claim for claim in facts.get("claims") or () if claim not in of_parts]
    if not device.partitions and not occupants:
        occupants = _processes(facts)
    found = FleetDevice(
        node,
        device,
        dict(rule) if rule is not None else None,
        {number: names for number, names in holders.items() if names},
        tuple(occupants),
    )
    return replace(found, fixed=_why_fixed(found, partitions))


def _why_fixed(found: FleetDevice, partitions: Sequence[Json]) -> str:
    device = found.device
    if not device.health.healthy:
        return f"it is not well: {device.health.signs[0].message}"
    if device.partitioning.pending != device.partitioning.enabled:
        return "a change of its mode waits for a reset"
    if any(not each.uuid for each in device.partitions) or any(each.get("owner") == "foreign" for each in partitions):
        return "somebody has made a partition by hand that no layout has"
    unknown = [each.profile for each in device.partitions if device.profile(each.profile_id) is None]
    return f"it does not tell of the profile {unknown[0]} that a partition of it has" if unknown else ""


def _held_by(partition: Json) -> tuple[str, ...]:
    """Claims, or, where there is none, processes: those of a claim's pods end with them."""
    return tuple(partition.get("claims") or ()) or tuple(_processes(partition))


def _processes(facts: Json) -> list[str]:
    return [f"process {each['pid']}" for each in facts.get("processes") or ()]


def _profile(facts: Json) -> Profile:
    return Profile(
        name=str(facts["name"]),
        profile_id=int(facts["profile_id"]),
        memory_bytes=int(facts["memory_bytes"]),
        capacities=frozen(facts["capacities"]),
        attributes={},
        placements=tuple(Placement(int(each["start"]), int(each["size"])) for each in facts["placements"]),
        maximum=int(facts["maximum"]),
    )


def _partition(facts: Json) -> Partition:
    return Partition(
        uuid=str(facts["uuid"]),
        profile=str(facts["profile"]),
        profile_id=int(facts["profile_id"]),
        placement=Placement(int(facts["placement"]["start"]), int(facts["placement"]["size"])),
        instance_id=int(facts.get("instance_id") or 0),
        compute_instance_id=facts.get("compute_instance_id"),
        memory_bytes=int(facts["memory_bytes"]),
    )


def _with_claims(devices: list[FleetDevice], claims: Iterable[Json]) -> Fleet:
    """Add what the cluster has given away and the nodes do not tell of; count the devices of each claim."""
    by_uuid: dict[str, tuple[int, int | None]] = {}
    by_node: dict[str, list[int]] = {}
    for number, each in enumerate(devices):
        by_uuid[each.device.uuid] = (number, None)
        by_node.setdefault(each.node, []).append(number)
        by_uuid.update({one.uuid: (number, place) for place, one in enumerate(each.device.partitions) if one.uuid})
    known = {name for each in devices for names in (*each.holders.values(), each.occupants) for name in names}
    for claim in claims:
        name = f"{claim['namespace']}/{claim['name']}"
        if name in known:
            continue
        for one in claim.get("devices") or ():
            if one.get("admin_access"):
                continue
            at = by_uuid.get(one.get("uuid") or "")
            if at is None:
                # A partition that is yet to be made: where, only the driver of that device can say.
                parent = by_uuid.get(one.get("parent_uuid") or "")
                for number in [parent[0]] if parent else by_node.get(one.get("node") or "", []):
                    devices[number] = _fixed(
                        devices[number], f"the claim {name} has a part of it that is not prepared yet"
                    )
                continue
            number, place = at
            before = devices[number]
            if place is None:
                devices[number] = replace(before, occupants=(*before.occupants, name))
            else:
                held = {**before.holders, place: (*before.holders.get(place, ()), name)}
                devices[number] = replace(before, holders=held)
    counts: dict[str, int] = {}
    for each in devices:
        for names in (*each.holders.values(), each.occupants):
            for name in names:
                counts[name] = counts.get(name, 0) + 1
    return Fleet(tuple(devices), counts)


def _fixed(device: FleetDevice, reason: str) -> FleetDevice:
    return device if device.fixed else replace(device, fixed=reason)
