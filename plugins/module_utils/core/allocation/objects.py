# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Devices, pools, requests and what claims hold, read from the API's objects for the scheduler's work. Pure.

Facts: resource.k8s.io/v1 (k8s.io/api/resource/v1/types.go); v1beta1, whose devices have their content under ``basic`` and whose requests have the
fields of ``exactly`` themselves, is read as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from .. import quantity
from ..errors import AcceleratorError
from ..published import attribute_of

Json = Mapping[str, Any]
#: Driver, pool and name of a device.
Key = tuple[str, str, str]
ALL = "All"


class Malformed(AcceleratorError):
    """An object is not what the API server would have stored."""

    default_code = "malformed-object"


class SelectorFailed(AcceleratorError):
    """An expression had no answer for a device: the scheduler gives up the whole pod, not only the device."""

    default_code = "selector-failed"

    def __init__(self, message: str, *, hint: str = "", code: str = "", reason: str = "") -> None:
        super().__init__(message, hint=hint, code=code)
        self.reason = reason or message


class NotJudged(AcceleratorError):
    """An expression uses what cannot be evaluated here, so nothing is known of it."""

    default_code = "not-judged"


class Judge(Protocol):
    """Evaluates expressions about devices."""

    def matches(self, expression: str, device: Device) -> bool:
        """Whether a selector is true of a device. Raises SelectorFailed where the scheduler would have an error, NotJudged where nobody here knows."""

    def value(self, expression: str, device: Device) -> Json:
        """What an expression makes of a device, as an attribute's value in the API's form. Raises the same."""


@dataclass(frozen=True)
class Device:
    """A device as it is published, with the taints that rules add."""

    driver: str
    pool: str
    content: Json
    taints: tuple[Json, ...] = ()
    #: The slice's spec, for what is said there of all its devices.
    slice: Json = field(default_factory=dict)
    #: Where counter sets have their names: empty for the pool's, the slice's name where they lie beside the devices (Kubernetes 1.34).
    scope: str = ""

    @property
    def name(self) -> str:
        """Its name in the pool."""
        return str(self.content["name"])

    @property
    def key(self) -> Key:
        """What it is known by in claims."""
        return (self.driver, self.pool, self.name)

    @property
    def label(self) -> str:
        """Pool and name."""
        return f"{self.pool}/{self.name}"

    @property
    def attributes(self) -> Json:
        """By name, the values in the API's form."""
        return self.content.get("attributes") or {}

    @property
    def capacity(self) -> Json:
        """By name, ``value`` and ``requestPolicy``."""
        return {
            str(name): each if isinstance(each, Mapping) else {"value": each}
            for name, each in (self.content.get("capacity") or {}).items()
        }

    @property
    def shared(self) -> bool:
        """Whether several claims can have it at a time."""
        return bool(self.content.get("allowMultipleAllocations"))

    @property
    def draws(self) -> list[tuple[tuple[str, str], dict[str, Fraction], frozenset[str]]]:
        """What it takes of counter sets: the set's scope and name, the amounts, and the compatibility groups."""
        return [
            (
                (self.scope, str(each["counterSet"])),
                amounts(each.get("counters")),
                frozenset(map(str, each.get("compatibilityGroups") or ())),
            )
            for each in self.content.get("consumesCounters") or ()
        ]

    def attribute(self, name: str) -> Json | None:
        """Return an attribute by its fully qualified name; what has no domain is the driver's own."""
        return attribute_of(self.attributes, self.driver, name)


@dataclass(frozen=True)
class Pool:
    """What a node sees of a pool. A pool that is incomplete or invalid offers nothing."""

    driver: str
    name: str
    devices: tuple[Device, ...] = ()
    #: Devices of the same pool that other nodes reach; what they hold of counters counts all the same.
    elsewhere: tuple[Device, ...] = ()
    #: By the set's scope and name, what there is of each counter.
    counters: Mapping[tuple[str, str], Mapping[str, Fraction]] = field(default_factory=dict)
    incomplete: str = ""
    invalid: str = ""

    @property
    def usable(self) -> bool:
        """Whether devices are taken from it."""
        return not (self.incomplete or self.invalid)

    @property
    def label(self) -> str:
        """Driver and pool."""
        return f"{self.driver}/{self.name}"


@dataclass(frozen=True)
class Request:
    """A request, or one of its alternatives. ``selectors`` are those of the class and its own, each with where it is written."""

    name: str
    parent: str
    device_class: str
    selectors: tuple[tuple[str, str], ...]
    every: bool
    count: int
    admin: bool
    tolerations: tuple[Json, ...]
    capacity: Mapping[str, Fraction]
    derived: Mapping[str, str]

    @property
    def full_name(self) -> str:
        """The name by which constraints, configurations and results call it."""
        return f"{self.parent}/{self.name}" if self.parent else self.name

    def is_named_by(self, names: Sequence[str]) -> bool:
        """Whether a constraint for these requests is for this one; none is all."""
        return not names or self.full_name in names or bool(self.parent and self.parent in names)


@dataclass(frozen=True)
class Constraint:
    """Devices have to agree (or differ, with ``distinct``) in an attribute; ``requests`` empty means all requests."""

    attribute: str
    distinct: bool
    requests: tuple[str, ...]


@dataclass(frozen=True)
class WantedClaim:
    """A claim that has no devices yet. Each of ``requests`` is the alternatives in their order; one without alternatives is alone."""

    namespace: str
    name: str
    requests: tuple[tuple[Request, ...], ...]
    constraints: tuple[Constraint, ...]

    @property
    def label(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"


@dataclass
class Held:
    """What claims have: by device the claims that have it alone, and those that have a share with what they consume."""

    alone: dict[Key, list[str]] = field(default_factory=dict)
    shares: dict[Key, list[tuple[str, Mapping[str, Fraction]]]] = field(default_factory=dict)

    def holders(self, key: Key) -> list[str]:
        """Return the names of the claims that have a device, or a share of it."""
        return [*self.alone.get(key, ()), *(name for name, _consumed in self.shares.get(key, ()))]

    def consumed(self, key: Key) -> dict[str, Fraction]:
        """Return how much of a device's capacities its shares have."""
        found: dict[str, Fraction] = {}
        for _name, consumed in self.shares.get(key, ()):
            for name, amount in consumed.items():
                found[name] = found.get(name, Fraction(0)) + amount
        return found

    def without(self, claims: Iterable[str]) -> Held:
        """Return what would be held if these claims had ended."""
        gone = set(claims)
        return Held(
            {key: left for key, names in self.alone.items() if (left := [one for one in names if one not in gone])},
            {key: rest for key, those in self.shares.items() if (rest := [one for one in those if one[0] not in gone])},
        )


def amounts(found: Json | None) -> dict[str, Fraction]:
    """Return quantities by name, whether they are plain or under ``value``."""
    return {
        str(name): quantity.parse(each["value"] if isinstance(each, Mapping) else each)
        for name, each in (found or {}).items()
    }


def held_by(claims: Iterable[Json]) -> Held:
    """Return what claims have by their allocations. Who watches as an administrator has nothing."""
    found = Held()
    for claim in claims:
        metadata = claim["metadata"]
        name = f"{metadata.get('namespace', 'default')}/{metadata['name']}"
        allocation = ((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}
        for result in allocation.get("results") or ():
            if result.get("adminAccess"):
                continue
            key = (str(result["driver"]), str(result["pool"]), str(result["device"]))
            if result.get("shareID") is None:
                found.alone.setdefault(key, []).append(name)
            else:
                found.shares.setdefault(key, []).append((name, amounts(result.get("consumedCapacity"))))
    return found


def wanted_claim(claim: Json, classes: Mapping[str, Json]) -> WantedClaim:
    """Read a claim's requests and constraints; ``classes`` are the DeviceClasses by name. Raises Malformed.

    The selectors of a class that is not there are none: who asks sees to that before (see ``missing_classes``).
    """
    metadata = claim["metadata"]
    devices = (claim.get("spec") or {}).get("devices") or {}
    try:
        return WantedClaim(
            namespace=str(metadata.get("namespace") or "default"),
            name=str(metadata["name"]),
            requests=tuple(_alternatives(each, classes) for each in devices.get("requests") or ()),
            constraints=tuple(_constraint(each) for each in devices.get("constraints") or ()),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Malformed(
            f"ResourceClaim {metadata.get('name')}: its requests cannot be read ({type(error).__name__}: {error})",
            hint="See that the API server takes it: kubectl apply --dry-run=server.",
        ) from error


def missing_classes(claim: WantedClaim, classes: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return the requests whose DeviceClass does not exist, each with its name and the class's."""
    return [
        (request.full_name, request.device_class)
        for alternatives in claim.requests
        for request in alternatives
        if request.device_class not in classes
    ]


def _alternatives(entry: Json, classes: Mapping[str, Json]) -> tuple[Request, ...]:
    name = str(entry["name"])
    alternatives = entry.get("firstAvailable") or ()
    if alternatives:
        return tuple(_request(each, name, classes, admin=False) for each in alternatives)
    content = {**(entry.get("exactly") or entry), "name": name}
    return (_request(content, "", classes, admin=bool(content.get("adminAccess"))),)


def _request(entry: Json, parent: str, classes: Mapping[str, Json], *, admin: bool) -> Request:
    name, device_class = str(entry["name"]), str(entry["deviceClassName"])
    full_name = f"{parent}/{name}" if parent else name
    spec = (classes.get(device_class) or {}).get("spec") or {}
    selectors = [
        *((f"class {device_class}", each) for each in _expressions(spec)),
        *((f"request {full_name}", each) for each in _expressions(entry)),
    ]
    return Request(
        name=name,
        parent=parent,
        device_class=device_class,
        selectors=tuple(selectors),
        every=entry.get("allocationMode") == ALL,
        count=int(entry.get("count") or 1),
        admin=admin,
        tolerations=tuple(entry.get("tolerations") or ()),
        capacity=amounts((entry.get("capacity") or {}).get("requests")),
        derived={str(each["name"]): str(each["expression"]) for each in entry.get("derivedAttributes") or ()},
    )


def _expressions(holder: Json) -> list[str]:
    return [str((each.get("cel") or {})["expression"]) for each in holder.get("selectors") or ()]


def _constraint(entry: Json) -> Constraint:
    requests = tuple(map(str, entry.get("requests") or ()))
    if entry.get("matchAttribute"):
        return Constraint(str(entry["matchAttribute"]), distinct=False, requests=requests)
    return Constraint(str(entry["distinctAttribute"]), distinct=True, requests=requests)
