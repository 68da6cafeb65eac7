# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Published devices, claims, and a selector evaluator for tests of the scheduler's search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dra_driver.core.allocation.objects import Device, NotJudged, SelectorFailed, WantedClaim, held_by, wanted_claim
from dra_driver.core.allocation.pools import Inventory
from dra_driver.core.allocation.reasons import NodeFinding, evaluate_node
from dra_driver.core.allocation.search import NodeSearch

Json = dict[str, Any]
DRIVER = "dev.example.com"
ANY = {"metadata": {"name": "any"}, "spec": {}}
NODE = {"metadata": {"name": "n", "labels": {"zone": "a"}}}
TAINT = {"key": "worn", "value": "yes", "effect": "NoSchedule"}


class Judge:
    """A selector evaluator. Expressions are ``attribute=value``. A missing attribute is an error, and ``?`` is not evaluated."""

    def matches(self, expression: str, device: Device) -> bool:
        if expression == "?":
            raise NotJudged("it is not judged")
        name, _equal, value = expression.partition("=")
        found = device.attribute(f"{DRIVER}/{name}")
        if found is None:
            raise SelectorFailed(
                f"selector {expression!r}: no such key: {name}", hint="Guard it.", reason=f"no such key: {name}"
            )
        return str(next(iter(found.values()))) == value

    def value(self, expression: str, device: Device) -> Json:
        return {"string": f"{expression} {device.name[-1]}"}


def device(name: str, *, draws: Json | None = None, memory: str = "8Gi", **attributes: Any) -> Json:
    made: Json = {"name": name, "capacity": {"memory": {"value": memory}}}
    made["attributes"] = {key: {"int" if isinstance(one, int) else "string": one} for key, one in attributes.items()}
    if draws:
        made["consumesCounters"] = [
            {"counterSet": "set", "counters": {key: {"value": str(one)} for key, one in draws.items()}}
        ]
    return made


def published(
    *devices: Json, name: str = "n-0", count: int = 1, generation: int = 1, pool: str = "n", **more: Any
) -> Json:
    spec: Json = {
        "driver": DRIVER,
        "nodeName": "n",
        "pool": {"name": pool, "generation": generation, "resourceSliceCount": count},
    }
    spec.update({"devices": list(devices)}, **more)
    return {"metadata": {"name": name}, "spec": {key: one for key, one in spec.items() if one is not None}}


def counters(**amounts: int) -> Json:
    sets = [{"name": "set", "counters": {key: {"value": str(one)} for key, one in amounts.items()}}]
    return published(name="n-counters", count=2, devices=None, sharedCounters=sets)


def request(name: str = "r", **more: Any) -> Json:
    selectors = [{"cel": {"expression": one}} for one in more.pop("selectors", ())]
    return {"name": name, "exactly": {"deviceClassName": "any", "selectors": selectors, **more}}


def claim(*requests: Json, constraints: Sequence[Json] = (), name: str = "c", **more: Any) -> Json:
    spec = {"devices": {"requests": list(requests or (request(),)), "constraints": list(constraints)}}
    return {"kind": "ResourceClaim", "metadata": {"name": name, "namespace": "default"}, "spec": spec, **more}


def holds(name: str, *devices: str, **result: Any) -> Json:
    results = [{"request": "r", "driver": DRIVER, "pool": "n", "device": each, **result} for each in devices]
    return claim(name=name, status={"allocation": {"devices": {"results": results}}})


def at(
    slices: Sequence[Json], held: Sequence[Json] = (), rules: Sequence[Json] = (), node: Json | None = None
) -> NodeSearch:
    where = node or NODE
    return NodeSearch(where, Inventory(slices, rules).pools(where), held_by(held), Judge())


def wanted(*claims: Json) -> list[WantedClaim]:
    return [wanted_claim(each, {"any": ANY}) for each in claims]


def taken_by(there: NodeSearch, *claims: Json) -> list[str] | None:
    found = there.find(wanted(*claims))
    return None if found is None else [each.device.name for each in found]


PARTS = [
    counters(units=4),
    published(*(device(f"p{number}", draws={"units": size}) for number, size in enumerate((2, 2, 1, 3))), count=2),
]


def finding_for(there: NodeSearch, *claims: Json) -> NodeFinding:
    return evaluate_node(there, wanted(*claims))
