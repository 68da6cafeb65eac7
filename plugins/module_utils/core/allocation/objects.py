# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert API objects to the devices, pools, requests, and allocations that the search uses.

No side effects. Source: resource.k8s.io/v1 (k8s.io/api/resource/v1/types.go). v1beta1 is also supported: its devices
have their content under ``basic``, and its requests contain the fields of ``exactly`` themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from .. import quantity
from ..dra.device_lookup import attribute_of
from ..errors import AcceleratorError

Json = Mapping[str, Any]
#: Driver, pool, and name of a device.
Key = tuple[str, str, str]
ALL = "All"


class Malformed(AcceleratorError):
    """Report an object that the API server would not have stored."""

    default_code = "malformed-object"


class SelectorFailed(AcceleratorError):
    """Report that an expression failed for a device. The scheduler then aborts the whole pod, not only this device."""

    default_code = "selector-failed"

    def __init__(self, message: str, *, hint: str = "", code: str = "", reason: str = "") -> None:
        super().__init__(message, hint=hint, code=code)
        self.reason = reason or message


class NotJudged(AcceleratorError):
    """Report that an expression uses features that cannot be evaluated here, so its result is unknown."""

    default_code = "not-judged"


class Judge(Protocol):
    """Evaluate expressions about devices."""

    def matches(self, expression: str, device: Device) -> bool:
        """Return whether a selector matches a device.

        Raises SelectorFailed if the scheduler would report an error, NotJudged if the result is unknown.
        """

    def value(self, expression: str, device: Device) -> Json:
        """Return the result of an expression for a device, as an attribute value in the API's form.

        Raises like ``matches``.
        """


@dataclass(frozen=True)
class Device:
    """A published device, with the taints of DeviceTaintRules."""

    driver: str
    pool: str
    content: Json
    taints: tuple[Json, ...] = ()
    #: The slice's spec, for fields that apply to all its devices.
    slice: Json = field(default_factory=dict)
    #: The namespace of counter set names: empty for the pool, the slice's name if they are in the devices' slice
    #: (Kubernetes 1.34).
    scope: str = ""

    @property
    def name(self) -> str:
        """Return its name in the pool."""
        return str(self.content["name"])

    @property
    def key(self) -> Key:
        """Return the key by which claims identify it."""
        return (self.driver, self.pool, self.name)

    @property
    def label(self) -> str:
        """Return pool and name."""
        return f"{self.pool}/{self.name}"

    @property
    def attributes(self) -> Json:
        """Return the attributes by name, with values in the API's form."""
        return self.content.get("attributes") or {}

    @property
    def capacity(self) -> Json:
        """Return the capacities by name, with ``value`` and ``requestPolicy``."""
        return {
            str(name): each if isinstance(each, Mapping) else {"value": each}
            for name, each in (self.content.get("capacity") or {}).items()
        }

    @property
    def shared(self) -> bool:
        """Return whether several claims can use it at a time."""
        return bool(self.content.get("allowMultipleAllocations"))

    @property
    def draws(self) -> list[tuple[tuple[str, str], dict[str, Fraction], frozenset[str]]]:
        """Return its counter consumption: the set's scope and name, the amounts, and the compatibility groups."""
        return [
            (
                (self.scope, str(each["counterSet"])),
                amounts(each.get("counters")),
                frozenset(map(str, each.get("compatibilityGroups") or ())),
            )
            for each in self.content.get("consumesCounters") or ()
        ]

    def attribute(self, name: str) -> Json | None:
        """Return an attribute by its qualified name. Published names without a domain belong to the driver."""
        return attribute_of(self.attributes, self.driver, name)


@dataclass(frozen=True)
class Pool:
    """A pool from the view of a node. An incomplete or invalid pool offers no devices."""

    driver: str
    name: str
    devices: tuple[Device, ...] = ()
    #: Devices of the same pool that only other nodes can use. Their counter consumption counts, too.
    elsewhere: tuple[Device, ...] = ()
    #: The total of each counter, by the set's scope and name.
    counters: Mapping[tuple[str, str], Mapping[str, Fraction]] = field(default_factory=dict)
    incomplete: str = ""
    invalid: str = ""

    @property
    def usable(self) -> bool:
        """Return whether devices can be allocated from it."""
        return not (self.incomplete or self.invalid)

    @property
    def label(self) -> str:
        """Return driver and pool."""
        return f"{self.driver}/{self.name}"


@dataclass(frozen=True)
class Request:
    """A request, or one of its alternatives.

    ``selectors`` are those of the class and of the request, each with its origin.
    """

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
        """Return the name that constraints, configurations, and results use."""
        return f"{self.parent}/{self.name}" if self.parent else self.name

    def is_named_by(self, names: Sequence[str]) -> bool:
        """Return whether a constraint for these requests applies to this one. An empty list means all."""
        return not names or self.full_name in names or bool(self.parent and self.parent in names)


@dataclass(frozen=True)
class Constraint:
    """Devices must have equal (or different, with ``distinct``) values of an attribute.

    Empty ``requests`` means all requests.
    """

    attribute: str
    distinct: bool
    requests: tuple[str, ...]


@dataclass(frozen=True)
class WantedClaim:
    """A claim without devices.

    Each entry of ``requests`` contains the alternatives in order, or the only request.
    """

    namespace: str
    name: str
    requests: tuple[tuple[Request, ...], ...]
    constraints: tuple[Constraint, ...]

    @property
    def label(self) -> str:
        """Return namespace and name."""
        return f"{self.namespace}/{self.name}"


@dataclass
class Held:
    """The allocations by device: the claims with exclusive use, and the claims with a share and its consumption."""

    alone: dict[Key, list[str]] = field(default_factory=dict)
    shares: dict[Key, list[tuple[str, Mapping[str, Fraction]]]] = field(default_factory=dict)

    def holders(self, key: Key) -> list[str]:
        """Return the names of the claims that use a device or a share of it."""
        return [*self.alone.get(key, ()), *(name for name, _consumed in self.shares.get(key, ()))]

    def consumed(self, key: Key) -> dict[str, Fraction]:
        """Return the amounts of a device's capacities that its shares consume."""
        found: dict[str, Fraction] = {}
        for _name, consumed in self.shares.get(key, ()):
            for name, amount in consumed.items():
                found[name] = found.get(name, Fraction(0)) + amount
        return found

    def without(self, claims: Iterable[str]) -> Held:
        """Return the allocations without these claims."""
        gone = set(claims)
        return Held(
            {key: left for key, names in self.alone.items() if (left := [one for one in names if one not in gone])},
            {key: rest for key, those in self.shares.items() if (rest := [one for one in those if one[0] not in gone])},
        )


def name_of(item: Json) -> str:
    """Return the name of an API object."""
    return str(item["metadata"]["name"])


def namespaced_name(item: Json) -> tuple[str, str]:
    """Return the namespace and the name of an API object."""
    return str(item["metadata"].get("namespace") or "default"), name_of(item)


def amounts(found: Json | None) -> dict[str, Fraction]:
    """Return quantities by name, given directly or under ``value``."""
    return {
        str(name): quantity.parse(each["value"] if isinstance(each, Mapping) else each)
        for name, each in (found or {}).items()
    }


def held_by(claims: Iterable[Json]) -> Held:
    """Return the allocations of claims. Results with admin access are omitted."""
    found = Held()
    for claim in claims:
        name = "/".join(namespaced_name(claim))
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
    """Parse a claim's requests and constraints; ``classes`` are the DeviceClasses by name. Raises Malformed.

    A missing class has no selectors. The caller checks this with ``missing_classes``.
    """
    devices = (claim.get("spec") or {}).get("devices") or {}
    try:
        namespace, name = namespaced_name(claim)
        return WantedClaim(
            namespace=namespace,
            name=name,
            requests=tuple(_alternatives(each, classes) for each in devices.get("requests") or ()),
            constraints=tuple(_constraint(each) for each in devices.get("constraints") or ()),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Malformed(
            f"ResourceClaim {claim['metadata'].get('name')}: its requests cannot be read ({type(error).__name__}: {error})",
            hint="See that the API server takes it: kubectl apply --dry-run=server.",
        ) from error


def missing_classes(claim: WantedClaim, classes: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return the requests whose DeviceClass does not exist, with the names of request and class."""
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
