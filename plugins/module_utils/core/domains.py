# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Nodes that are joined by more than the network, and which of them a job over several nodes takes. Pure.

The allocator of the scheduler gives a claim devices of one node. What spans nodes is a claim for each pod, and the pods' nodes
have to be of one domain: here is read who is in which, out of what drivers have published, and chosen. Nothing in this
collection acts on a choice yet; a controller of domains is to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from .published import attribute_of
from .vendor import Fabric

Identity = Union[int, str]
#: A device as the allocation of a claim names it: driver, pool, device.
Taken = tuple[str, str, str]


@dataclass(frozen=True)
class Member:
    """A node of a domain: where it is in it, as far as that is told, and how many of its whole devices nobody has."""

    node: str
    domain: Identity
    free: int
    server: int | None = None
    rack: int | None = None


@dataclass(frozen=True)
class Span:
    """The nodes that a job takes, in the order of their servers, which is the order of its ranks; all are of one domain."""

    domain: Identity
    members: tuple[Member, ...]
    devices: int

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes; the first has rank 0."""
        return tuple(each.node for each in self.members)

    @property
    def racks(self) -> int:
        """How many racks the nodes stand in; those that do not tell theirs count as one."""
        return len({each.rack for each in self.members})


def members(
    slices: Iterable[Mapping[str, Any]], driver: str, fabric: Fabric, taken: Collection[Taken] = ()
) -> tuple[Member, ...]:
    """Return the nodes that are in a domain, by the ResourceSlices of a driver, in the order of their names.

    ``taken`` are the devices that claims have. A node that names two domains is in none: it would be wrong for somebody.
    """
    devices: dict[str, dict[str, Mapping[str, Any]]] = {}
    pools: dict[str, tuple[str, int]] = {}
    for each in slices:
        spec = each.get("spec", {})
        node, pool = spec.get("nodeName"), spec.get("pool", {})
        if spec.get("driver") != driver or not node:
            continue
        # Slices of an older generation stay for a moment beside those that replace them.
        generation = int(pool.get("generation", 0))
        if generation < pools.get(node, ("", -1))[1]:
            continue
        if generation > pools.get(node, ("", -1))[1]:
            pools[node], devices[node] = (str(pool.get("name", "")), generation), {}
        devices[node].update({str(device["name"]): device.get("attributes", {}) for device in spec.get("devices", ())})
    found = []
    for node, there in sorted(devices.items()):
        whole = {name: said for name, said in there.items() if _value(said, driver, "type") == fabric.device_type}
        told = [_value(said, driver, fabric.domain) for said in whole.values()]
        domains = {each for each in told if each is not None}
        if len(domains) != 1:
            continue
        free = [name for name in whole if (driver, pools[node][0], name) not in taken]
        server, rack = (_agreed(whole.values(), driver, name) for name in (fabric.server, fabric.rack))
        found.append(Member(node, domains.pop(), len(free), server, rack))
    return tuple(found)


def choose(known: Iterable[Member], nodes: int, devices: int) -> Span | None:
    """Return so many nodes of one domain with so many free devices each, or None where no domain has them.

    Of the domains that can serve the job it is the one where it stands in the fewest racks; of these the one that is left with
    the fewest nodes that could serve another pod of the job, so that domains with much room keep it for jobs that need it. In
    a domain it is the nodes with the fewest free devices. The order of what is given does not matter. Raises ValueError.
    """
    if nodes < 1 or devices < 1:
        raise ValueError(f"A job has at least one node and one device on each, not {nodes} and {devices}")
    fitting: dict[Identity, list[Member]] = {}
    for each in known:
        if each.free >= devices:
            fitting.setdefault(each.domain, []).append(each)
    spans = [
        (len(there), Span(domain, _near(there, nodes), devices))
        for domain, there in fitting.items()
        if len(there) >= nodes
    ]
    if not spans:
        return None
    return min(spans, key=lambda each: (each[1].racks, each[0], _by_identity(each[1].domain)))[1]


def _near(there: Sequence[Member], nodes: int) -> tuple[Member, ...]:
    """Choose in one domain: the smallest rack that has all, else the largest racks first, so that they are few."""
    racks: dict[int | None, list[Member]] = {}
    for each in sorted(there, key=_tightest):
        racks.setdefault(each.rack, []).append(each)
    wanted: list[Member] = []
    left = [racks[rack] for rack in sorted(racks, key=lambda rack: (rack is None, rack or 0))]
    while len(wanted) < nodes:
        lacking = nodes - len(wanted)
        enough = [each for each in left if len(each) >= lacking]
        rack = min(enough, key=len) if enough else max(left, key=len)
        left.remove(rack)
        wanted += rack[:lacking]
    return tuple(sorted(wanted, key=lambda each: (each.server is None, each.server or 0, each.node)))


def _tightest(member: Member) -> tuple[int, int, str]:
    return member.free, member.server or 0, member.node


def _by_identity(domain: Identity) -> tuple[int, str]:
    return (domain, "") if isinstance(domain, int) else (0, domain)


def _agreed(devices: Iterable[Mapping[str, Any]], driver: str, name: str) -> int | None:
    values = {_value(said, driver, name) for said in devices}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, int) else None


def _value(attributes: Mapping[str, Any], driver: str, name: str) -> Identity | None:
    """Return an attribute of a device, by its name with the driver's domain or without; None where it has none."""
    said = attribute_of(attributes, driver, name) or {}
    value = said.get("int", said.get("string"))
    return value if isinstance(value, (int, str)) else None
