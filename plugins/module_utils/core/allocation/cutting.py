# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Model pools after a device is partitioned again, like an existing device of the same product or as a cutter proposes.

No side effects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Protocol

from ..errors import AcceleratorError
from .capacity import taken
from .constraints import text_of, values_of
from .nodes import taint_text
from .objects import Device, Pool, Request, SelectorFailed, WantedClaim
from .reasons import holders_of_counters
from .search import NodeSearch

#: Attributes that identify devices of the same product, and parts of the same device.
PRODUCTS = ("productName", "model")
OWN_UUID, PARENT_UUID = "uuid", "parentUUID"
STANDARD = "resource.kubernetes.io/"
#: The scope of counter sets of newly created parts.
ANEW = "partitioned-anew"
#: The name prefix of such parts.
NEW = "new-"


@dataclass(frozen=True)
class Cut:
    """A possible partitioning: the UUID of the whole device, the new parts, the parts that stay (UUIDs), and a text."""

    whole: str
    parts: tuple[Device, ...]
    stays: frozenset[str]
    text: str


class Cutter(Protocol):
    """Return possible partitionings of devices."""

    def cuts(self, node: str, claims: Sequence[WantedClaim], ended: Collection[str] = ()) -> Sequence[Cut] | None:
        """Return the partitionings of a node's devices for claims after the end of others.

        Empty if no partitioning helps, None if unknown.
        """


@dataclass(frozen=True)
class Model:
    """An existing device with its parts, one of which a request selects. ``forms`` describes its parts."""

    node: str
    pool: Pool
    parts: tuple[Device, ...]
    forms: tuple[str, ...]


def models(searches: Sequence[NodeSearch], claims: Sequence[WantedClaim]) -> dict[str, list[Model]]:
    """Return, by product, devices on any node with parts that a request selects; one device per form."""
    requests = [each for claim in claims for alternatives in claim.requests for each in alternatives]
    found: dict[str, list[Model]] = {}
    for other in searches:
        for whole, parts in sorted(wholes(other).items()):
            product, forms = product_of(parts[0]), forms_of(parts)
            known = found.setdefault(product, [])
            if not product or not whole or any(each.forms == forms for each in known):
                continue
            if any(_selected(other, request, device) for request in requests for device in parts):
                pool = next(one for one in other.pools if (one.driver, one.name) == parts[0].key[:2])
                known.append(Model(str(other.node["metadata"]["name"]), pool, tuple(parts), forms))
    return found


def _selected(at: NodeSearch, request: Request, device: Device) -> bool:
    try:
        return at.selectable(request, device) and taken(request.capacity, device) is not None
    except (SelectorFailed, AcceleratorError):
        return False


def wholes(at: NodeSearch) -> dict[str, list[Device]]:
    """Return the devices of a node by the UUID of the whole device that they are or are parts of."""
    found: dict[str, list[Device]] = {}
    for device in at.devices():
        found.setdefault(text_attribute(device, PARENT_UUID) or text_attribute(device, OWN_UUID), []).append(device)
    return found


def draws_beside(at: NodeSearch, mine: Sequence[Device]) -> bool:
    """Return whether claims already use counters that these devices consume."""
    places = {place for device in mine for place, _drawn, _groups in device.draws}
    return bool(places and holders_of_counters(at, places))


def replaced(at: NodeSearch, mine: Sequence[Device], model: Model) -> list[Pool]:
    """Return the node's pools with the model's parts instead of these devices."""
    places = {place for each in model.parts for place, _drawn, _groups in each.draws}
    counters = {(ANEW, place[1]): amounts for place, amounts in model.pool.counters.items() if place in places}
    return with_parts(at.pools, mine[0].key[:2], mine, mine, model.parts, counters)


def with_parts(
    pools: Sequence[Pool],
    into: tuple[str, str],
    mine: Sequence[Device],
    gone: Sequence[Device],
    parts: Iterable[Device],
    counters: Mapping[tuple[str, str], Mapping[str, Fraction]] = MappingProxyType({}),
) -> list[Pool]:
    """Return pools with new parts instead of the removed devices, in the pool ``into``.

    Parts get the device's location and taints. ``mine`` are the published devices of the physical device. If it is
    empty, the location is unknown.
    """
    standard = {
        name: value for each in mine[:1] for name, value in each.attributes.items() if name.startswith(STANDARD)
    }
    taints = tuple({taint_text(taint): taint for each in mine for taint in each.taints}.values())
    keys = {device.key for device in gone}
    already = sum(device.name.startswith(NEW) for pool in pools for device in pool.devices)
    made = tuple(
        replace(
            each,
            pool=into[1],
            content={
                **each.content,
                "name": f"{NEW}{number}-{each.name}",
                "attributes": {
                    **{name: value for name, value in each.attributes.items() if not name.startswith(STANDARD)},
                    **standard,
                },
            },
            slice=mine[0].slice if mine else {},
            taints=taints,
            scope=ANEW,
        )
        for number, each in enumerate(parts, start=already)
    )
    known = [*pools, *([] if any((one.driver, one.name) == into for one in pools) else [Pool(*into)])]
    return [
        replace(
            pool,
            devices=(*(each for each in pool.devices if each.key not in keys), *made),
            counters={**pool.counters, **counters},
        )
        if (pool.driver, pool.name) == into
        else pool
        for pool in known
    ]


def text_attribute(device: Device, name: str) -> str:
    """Return a string attribute of the driver; empty if it does not exist."""
    values = values_of(device.attribute(f"{device.driver}/{name}"))
    return text_of(values) if values is not None and values[0] == "string" else ""


def product_of(device: Device) -> str:
    """Return a device's product name."""
    return next((text for name in PRODUCTS if (text := text_attribute(device, name))), "")


def forms_of(parts: Iterable[Device]) -> tuple[str, ...]:
    """Return a description of the parts that distinguishes partitionings."""
    return tuple(sorted(map(_form, parts)))


def _form(device: Device) -> str:
    return f"{text_attribute(device, 'profile') or text_attribute(device, 'type')} {sorted(device.capacity)}"
