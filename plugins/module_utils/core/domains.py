# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the domains of nodes that a fabric connects, and choose nodes of one domain for a multi-node job.

No side effects. The scheduler allocates devices of one node to a claim. A job on several nodes has a claim for each
pod, and the nodes of the pods must be in one domain. This module reads the domains from published devices and chooses
nodes. No program in this collection uses the choice yet; it is for a future controller of domains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from .dra.device_lookup import attribute_of
from .vendors.vendor_facts import Fabric

Identity = Union[int, str]
#: A device in the allocation of a claim: driver, pool, device.
AllocatedDevice = tuple[str, str, str]


@dataclass(frozen=True)
class Member:
    """A node of a domain: its position in the domain, if known, and its number of unallocated whole devices."""

    node: str
    domain: Identity
    free: int
    server: int | None = None
    rack: int | None = None


@dataclass(frozen=True)
class Span:
    """The chosen nodes of a job, in one domain, sorted by server. This is also the order of the job's ranks."""

    domain: Identity
    members: tuple[Member, ...]
    devices: int

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes; the first has rank 0."""
        return tuple(each.node for each in self.members)

    @property
    def racks(self) -> int:
        """Return the number of racks of the nodes. Nodes without a rack count as one rack."""
        return len({each.rack for each in self.members})


def members(
    slices: Iterable[Mapping[str, Any]], driver: str, fabric: Fabric, taken: Collection[AllocatedDevice] = ()
) -> tuple[Member, ...]:
    """Return the nodes that belong to a domain, sorted by name, from the ResourceSlices of a driver.

    ``taken`` are the allocated devices. A node with two domains belongs to neither, because its domain would be wrong
    for some of its devices.
    """
    devices: dict[str, dict[str, Mapping[str, Any]]] = {}
    pools: dict[str, tuple[str, int]] = {}
    for each in slices:
        spec = each.get("spec", {})
        node, pool = spec.get("nodeName"), spec.get("pool", {})
        if spec.get("driver") != driver or not node:
            continue
        # Slices of an older generation can exist for a short time together with their replacements.
        generation = int(pool.get("generation", 0))
        if generation < pools.get(node, ("", -1))[1]:
            continue
        if generation > pools.get(node, ("", -1))[1]:
            pools[node], devices[node] = (str(pool.get("name", "")), generation), {}
        devices[node].update({str(device["name"]): device.get("attributes", {}) for device in spec.get("devices", ())})
    found = []
    for node, published in sorted(devices.items()):
        whole = {
            name: attributes
            for name, attributes in published.items()
            if _value(attributes, driver, "type") == fabric.device_type
        }
        values = [_value(attributes, driver, fabric.domain) for attributes in whole.values()]
        domains = {each for each in values if each is not None}
        if len(domains) != 1:
            continue
        free = [name for name in whole if (driver, pools[node][0], name) not in taken]
        server, rack = (_common_number(whole.values(), driver, name) for name in (fabric.server, fabric.rack))
        found.append(Member(node, domains.pop(), len(free), server, rack))
    return tuple(found)


def choose(known: Iterable[Member], nodes: int, devices: int) -> Span | None:
    """Return nodes of one domain, each with the required free devices, or None if no domain has enough.

    Of the possible domains, the choice uses the fewest racks. Then it leaves the fewest other nodes that could serve
    the job, so that domains with much free capacity stay available for jobs that need them. Within a domain it uses the
    nodes with the fewest free devices. The order of the input does not matter. Raises ValueError.
    """
    if nodes < 1 or devices < 1:
        raise ValueError(f"A job has at least one node and one device on each, not {nodes} and {devices}")
    fitting: dict[Identity, list[Member]] = {}
    for each in known:
        if each.free >= devices:
            fitting.setdefault(each.domain, []).append(each)
    spans = [
        (len(candidates), Span(domain, _choose_in_domain(candidates, nodes), devices))
        for domain, candidates in fitting.items()
        if len(candidates) >= nodes
    ]
    if not spans:
        return None
    return min(spans, key=lambda each: (each[1].racks, each[0], _by_identity(each[1].domain)))[1]


def _choose_in_domain(candidates: Sequence[Member], nodes: int) -> tuple[Member, ...]:
    """Choose nodes in one domain: from the smallest sufficient rack, else from the largest racks first, to use few racks."""
    racks: dict[int | None, list[Member]] = {}
    for each in sorted(candidates, key=_by_free_devices):
        racks.setdefault(each.rack, []).append(each)
    chosen: list[Member] = []
    remaining_racks = [racks[rack] for rack in sorted(racks, key=lambda rack: (rack is None, rack or 0))]
    while len(chosen) < nodes:
        lacking = nodes - len(chosen)
        enough = [each for each in remaining_racks if len(each) >= lacking]
        rack = min(enough, key=len) if enough else max(remaining_racks, key=len)
        remaining_racks.remove(rack)
        chosen += rack[:lacking]
    return tuple(sorted(chosen, key=lambda each: (each.server is None, each.server or 0, each.node)))


def _by_free_devices(member: Member) -> tuple[int, int, str]:
    return member.free, member.server or 0, member.node


def _by_identity(domain: Identity) -> tuple[int, str]:
    return (domain, "") if isinstance(domain, int) else (0, domain)


def _common_number(devices: Iterable[Mapping[str, Any]], driver: str, name: str) -> int | None:
    values = {_value(attributes, driver, name) for attributes in devices}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, int) else None


def _value(attributes: Mapping[str, Any], driver: str, name: str) -> Identity | None:
    """Return an attribute of a device by its name, with or without the driver's domain; None if the device lacks it."""
    typed_value = attribute_of(attributes, driver, name) or {}
    value = typed_value.get("int", typed_value.get("string"))
    return value if isinstance(value, (int, str)) else None
