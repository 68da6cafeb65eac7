# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the devices of a fleet and their holders from the nodes' answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import AcceleratorError
from ..health.conditions import Severity, Sign
from ..model import Device, Health, Partition, Partitioning, Placement, Profile, frozen
from ..partitioning.rules import DYNAMIC, MODES, STATIC, WHOLE

#: Keys of a rule, besides mode and partitions, that reserve its devices for a special purpose.
_PARTICULAR = ("shares", "passthrough")

Json = Mapping[str, Any]


class InvalidFleet(AcceleratorError):
    """Report that the fleet data are not node answers."""

    default_code = "invalid-inventory"


@dataclass(frozen=True)
class FleetDevice:
    """One device of one node.

    ``rule`` is the device's current rule in the node's layout, without ``match``; None if unknown. ``holders`` maps a
    partition's position on the device to its holders. ``occupants`` are the holders of the device itself. ``fixed`` is
    the reason why the plan must not change the device, or empty.
    """

    node: str
    device: Device
    rule: Json | None = None
    holders: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    occupants: tuple[str, ...] = ()
    fixed: str = ""

    @property
    def mode(self) -> str:
        """Return the mode of its current rule, or without a rule the mode that its state corresponds to."""
        if self.rule is not None:
            return str(self.rule["mode"])
        return STATIC if self.device.partitioning.enabled else WHOLE

    @property
    def is_dynamic(self) -> bool:
        """Return whether its partitions are created on demand for claims."""
        return self.mode == DYNAMIC

    @property
    def has_particular_rule(self) -> bool:
        """Return whether it is a whole device for a special purpose: shared by several claims, or for virtual machines."""
        return self.rule is not None and self.mode == WHOLE and any(self.rule.get(key) for key in _PARTICULAR)

    def describe(self) -> str:
        """Return the device's name for messages."""
        return f"{self.node}: {self.device.product} {self.device.index}"


@dataclass(frozen=True)
class Fleet:
    """All devices, by node and index. ``claims`` maps the names of claims with devices to their number of devices."""

    devices: tuple[FleetDevice, ...]
    claims: Mapping[str, int] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes without duplicates, in order."""
        return tuple(dict.fromkeys(each.node for each in self.devices))


def read_fleet(nodes: Mapping[str, Any], claims: Iterable[Json] = ()) -> Fleet:
    """Read the answers of nodes, by node name. Empty answers are skipped.

    An answer has ``devices`` with their ``profiles`` and ``partitions``. Profiles can be stored once for all devices of
    a kind, in ``kinds`` by the device's ``kind``. ``claims`` are the cluster's claims with ``namespace``, ``name``, and
    ``devices`` (``node``, ``uuid``). They add allocated devices that are not prepared yet or that the nodes do not
    report. Raises InvalidFleet.
    """
    kinds: dict[str, tuple[Profile, ...]] = {}
    found: list[FleetDevice] = []
    for node, answer in sorted(nodes.items()):
        if not answer:
            continue
        try:
            reported_kinds = answer.get("kinds") or {}
            devices = [_device(node, each, reported_kinds, kinds) for each in answer["devices"]]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidFleet(
                f"The data of the node {node} are not the answer of a node ({type(error).__name__}: {error})",
                hint="Expected the result of the module accelerator_report or accelerator_info there: devices with profiles and partitions.",
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
                f"{other} and {each.describe()} share the UUID {each.device.uuid}",
                hint="A node can be in an inventory only once.",
            )


def _device(node: str, facts: Json, reported_kinds: Json, kinds: dict[str, tuple[Profile, ...]]) -> FleetDevice:
    kind: Json = reported_kinds[facts["kind"]] if facts.get("kind") is not None else facts
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
        raise ValueError(f"mode {rule.get('mode')!r} of its rule is not one of {', '.join(MODES)}")
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
        return "it has a partition that was created manually and that no layout can describe"
    unknown = [each.profile for each in device.partitions if device.profile(each.profile_id) is None]
    return f"it does not report the profile {unknown[0]} of one of its partitions" if unknown else ""


def _held_by(partition: Json) -> tuple[str, ...]:
    """Return the claims of a partition, or without a claim its processes.

    The processes of a claim's pods end with the claim.
    """
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
    """Add allocations that the nodes do not report, and count the devices of each claim."""
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
                # The partition does not exist yet. Only the device's driver knows its future placement.
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
