# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build ResourceSlice pools from offers, and plan the writes that update a pool in the API server.

The functions work on plain JSON and have no side effects. Source: the resource.k8s.io/v1 types and their validation;
the behavior of the Go helper's ResourceSlice controller.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import quantity
from ..model import CounterSet, Offer
from .annotations import has_annotations, with_annotations
from .device_json import counter_set_form, published_form

API_VERSION = "resource.k8s.io/v1"
SEPARATE = "separate"  # from Kubernetes 1.35 on: counters in separate slices
COMBINED = "combined"  # 1.34: counters in the same slices as the devices that use them

MOST_DEVICES = 128
MOST_DEVICES_WITH_COUNTERS = 64
MOST_COUNTER_SETS = 8
MOST_COUNTERS_IN_SET = 32
MOST_COUNTERS_BESIDE_DEVICES = 32
MOST_CONSUMED_BESIDE_COUNTERS = 1024
MOST_CONSUMED_COUNTERS = 32
MOST_SETS_OF_A_DEVICE = 2
MOST_ATTRIBUTES_AND_CAPACITIES = 32
MOST_TAINTS = 16
LONGEST_STRING = 64
LONGEST_DRIVER_NAME = 63

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DRIVER = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_INDEX = re.compile(r"([0-9a-f]{5,})-")
_GROUPS = ""  # replaces a device's UUID for groups of devices, which have separate slices after the devices


@dataclass(frozen=True)
class SliceContent:
    """The devices, or the counters, of one slice, as JSON."""

    devices: tuple[Mapping[str, Any], ...] = ()
    shared_counters: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the content as part of a slice's spec."""
        content: dict[str, Any] = {}
        if self.shared_counters:
            content["sharedCounters"] = [copy.deepcopy(dict(each)) for each in self.shared_counters]
        if self.devices:
            content["devices"] = [copy.deepcopy(dict(each)) for each in self.devices]
        return content


@dataclass(frozen=True)
class PoolSpec:
    """The desired state of a pool, without its generation.

    The devices belong to the node ``node_name``. For devices that are reached over a network, ``node_name`` is empty,
    and there is a node selector with one term, or ``all_nodes``. ``notes`` are annotations of the first slice, with ""
    for an annotation to remove. Other annotations are kept.
    """

    driver: str
    pool: str
    node_name: str
    slices: tuple[SliceContent, ...]
    node_selector: Mapping[str, Any] | None = None
    all_nodes: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)

    def node_selection(self) -> dict[str, Any]:
        """Return the part of a slice's spec that selects the nodes with access to the devices."""
        if self.node_name:
            return {"nodeName": self.node_name}
        return {"nodeSelector": copy.deepcopy(dict(self.node_selector))} if self.node_selector else {"allNodes": True}


@dataclass(frozen=True)
class SliceWrite:
    """One request to the API server.

    ``verb`` is create, update, or delete. ``name`` is the object's name, empty for a create (the server completes
    ``generateName``). ``preconditions`` are uid and resourceVersion of the object for which the plan was made.
    """

    verb: str
    name: str
    body: dict[str, Any] | None
    preconditions: Mapping[str, str]


@dataclass(frozen=True)
class PoolPlan:
    """The writes in order, and the pool's generation after them. Without a difference there are no writes."""

    writes: tuple[SliceWrite, ...]
    generation: int


def build_pool(
    *,
    driver: str,
    pool: str,
    node_name: str,
    offers: Iterable[Offer],
    counter_sets: Iterable[CounterSet] = (),
    layout: str = SEPARATE,
    notes: Mapping[str, str] | None = None,
) -> PoolSpec:
    """Return the pool of a node, with the devices in the order of the offers, and groups of devices last.

    The pool has as few slices as possible, because the scheduler reads all slices of the cluster for each pod, and
    before Kubernetes 1.36 for each node of each pod. All offers of a physical device are in one slice, unless they
    exceed a slice's limit. The ``layout`` separate puts counter sets into separate slices before the others. The layout
    combined puts each counter set into the slice of its devices. Without offers the pool has one empty slice, which
    shows that the driver runs and has no devices. ``notes`` are those of PoolSpec. Raises ValueError, which names the
    device, for a pool that the API server would reject.
    """
    if layout not in (SEPARATE, COMBINED):
        raise ValueError(f"Layout {layout!r} is neither {SEPARATE} nor {COMBINED}")
    groups: dict[str, list[Offer]] = {}
    for offer in offers:
        groups.setdefault(_GROUPS if offer.members else offer.device_uuid, []).append(offer)
    used = {name for group in groups.values() for offer in group for name in offer.all_counters}
    sets = [each for each in counter_sets if each.name in used]
    slices: list[SliceContent] = []
    if layout == SEPARATE:
        counters = [counter_set_form(each) for each in sets]
        slices += [
            SliceContent(shared_counters=tuple(counters[start : start + MOST_COUNTER_SETS]))
            for start in range(0, len(counters), MOST_COUNTER_SETS)
        ]
    with_devices = []
    for group in groups.values():
        names = {name for offer in group for name in offer.all_counters} if layout == COMBINED else ()
        beside = tuple(counter_set_form(each) for each in sets if each.name in names)
        devices = tuple(published_form(offer) for offer in group)
        most = _most_devices(devices)
        if beside and len(devices) > most:
            raise ValueError(f"Pool {pool}: {len(devices)} devices share counters, a slice takes {most} at most")
        with_devices += [SliceContent(devices[start : start + most], beside) for start in range(0, len(devices), most)]
    slices += _pack(with_devices)
    spec = PoolSpec(driver, pool, node_name, tuple(slices) or (SliceContent(),), notes=dict(notes or {}))
    validate_pool(spec, layout)
    return spec


def validate_pool(spec: PoolSpec, layout: str = SEPARATE) -> None:
    """Raise ValueError, which names device and field, for a pool that the API server or the scheduler would reject."""
    if len(spec.driver) > LONGEST_DRIVER_NAME or not _DRIVER.fullmatch(spec.driver):
        raise ValueError(
            f"Driver name {spec.driver!r} must be a DNS subdomain with {LONGEST_DRIVER_NAME} characters at most"
        )
    if not spec.pool or len(spec.pool) > 253 or not all(_DRIVER.fullmatch(part) for part in spec.pool.split("/")):
        raise ValueError(f"Pool name {spec.pool!r} must be DNS subdomains joined by slashes")
    sets: dict[str, Mapping[str, Any]] = {}
    for content in spec.slices:
        if layout == SEPARATE and content.devices and content.shared_counters:
            raise ValueError(f"Pool {spec.pool}: a slice has either devices or counters, not both")
        consumed = _count_consumed(content)
        if content.shared_counters and consumed > MOST_CONSUMED_BESIDE_COUNTERS:
            raise ValueError(
                f"Pool {spec.pool}: the devices of one slice consume {consumed} counters; the limit in a slice with counter sets is "
                f"{MOST_CONSUMED_BESIDE_COUNTERS}"
            )
        if len(content.shared_counters) > MOST_COUNTER_SETS:
            raise ValueError(f"Pool {spec.pool}: a slice takes {MOST_COUNTER_SETS} counter sets at most")
        for each in content.shared_counters:
            validate_counter_set(each, sets)
    names: set[str] = set()
    for content in spec.slices:
        most = _most_devices(content.devices)
        if len(content.devices) > most:
            raise ValueError(f"Pool {spec.pool}: a slice has {len(content.devices)} devices, {most} is the most")
        for device in content.devices:
            validate_device(device, names, sets)
            names.add(device["name"])


def plan_pool(
    desired: PoolSpec, existing: Sequence[Mapping[str, Any]], *, owner: Mapping[str, Any] | None = None
) -> PoolPlan:
    """Return the writes that bring the slices in the API server to the desired state.

    ``existing`` are slices from the server; slices of other drivers, nodes, or pools are ignored. The generation
    increases if a slice is added or more than one changes. In that case all slices of the pool are written. The order
    is: delete obsolete slices, update, create.
    """
    mine = [each for each in existing if _is_slice_of_pool(each, desired)]
    newest = max((int(each["spec"]["pool"].get("generation", 0)) for each in mine), default=0)
    matched: dict[int, Mapping[str, Any]] = {}
    obsolete: list[Mapping[str, Any]] = []
    for each in sorted(mine, key=lambda found: str(found["metadata"]["name"])):
        index = _index_of(each)
        usable = (
            index is not None
            and index < len(desired.slices)
            and index not in matched
            and int(each["spec"]["pool"].get("generation", 0)) == newest
            and (each["spec"].get("nodeName") or "") == desired.node_name
            and not each["metadata"].get("deletionTimestamp")
        )
        if usable and index is not None:
            matched[index] = each
        else:
            obsolete.append(each)
    missing = [index for index in range(len(desired.slices)) if index not in matched]
    count = len(desired.slices)
    changed = [
        index
        for index, each in matched.items()
        if int(each["spec"]["pool"].get("resourceSliceCount", 0)) != count
        or not same_content(desired.slices[index], each["spec"])
        or not _same_selection(desired, each["spec"])
        or (owner is not None and not _is_owned(each, owner))
        or (index == 0 and not has_annotations(each["metadata"], desired.notes))
    ]
    generation = newest if mine else 1
    if mine and (missing or len(changed) > 1):
        generation = newest + 1
        changed = list(matched)
    writes = [SliceWrite("delete", str(each["metadata"]["name"]), None, _preconditions(each)) for each in obsolete]
    for index in sorted(changed):
        each = matched[index]
        body = _slice_body(desired, index, generation, owner)
        body["metadata"] = with_annotations(_kept_metadata(each, owner), desired.notes if index == 0 else {})
        _keep_taint_times(body["spec"], each["spec"])
        writes.append(SliceWrite("update", str(each["metadata"]["name"]), body, _preconditions(each)))
    for index in missing:
        body = _slice_body(desired, index, generation, owner)
        body["metadata"] = with_annotations(body["metadata"], desired.notes if index == 0 else {})
        writes.append(SliceWrite("create", "", body, {}))
    return PoolPlan(tuple(writes), generation)


def plan_removal(driver: str, pool: str | None, existing: Sequence[Mapping[str, Any]]) -> PoolPlan:
    """Return the deletes that remove a pool, or with ``pool`` None all pools of a driver, from the API server."""
    mine = [
        each
        for each in existing
        if each["spec"].get("driver") == driver and (pool is None or each["spec"]["pool"].get("name") == pool)
    ]
    writes = tuple(SliceWrite("delete", str(each["metadata"]["name"]), None, _preconditions(each)) for each in mine)
    return PoolPlan(writes, max((int(each["spec"]["pool"].get("generation", 0)) for each in mine), default=0))


def same_content(desired: SliceContent, spec: Mapping[str, Any]) -> bool:
    """Return whether a slice's spec has these devices and counters.

    Quantities are compared by value, taint times are ignored.
    """
    present = {key: spec.get(key) for key in ("devices", "sharedCounters")}
    return bool(_canonical(desired.to_dict()) == _canonical(present))


def dropped_fields(sent: Mapping[str, Any], returned: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that the server silently dropped from a slice, with the feature gate that is probably off."""
    found: list[str] = []
    for name, gate in (
        ("taints", "DRADeviceTaints"),
        ("consumesCounters", "DRAPartitionableDevices"),
        ("bindingConditions", "DRADeviceBindingConditions"),
        ("allowMultipleAllocations", "DRAConsumableCapacity"),
    ):
        before, after = _count_in_devices(sent, name), _count_in_devices(returned, name)
        if after < before:
            found.append(f"{name} of {before - after} devices (feature gate {gate})")
    before, after = (len(each.get("spec", {}).get("sharedCounters") or []) for each in (sent, returned))
    if after < before:
        found.append(f"{before - after} sharedCounters (feature gate DRAPartitionableDevices)")
    for name, gate in (
        ("partitionTypeAttribute", "DRAPartitionableDevicesType"),
        ("skipNodeOperations", "DRAOptionalNodeOperations"),
        ("perDeviceNodeSelection", "DRAPartitionableDevices"),
    ):
        if sent.get("spec", {}).get(name) and not returned.get("spec", {}).get(name):
            found.append(f"{name} (feature gate {gate})")
    return tuple(found)


def _most_devices(devices: Iterable[Mapping[str, Any]]) -> int:
    has_counters_or_taints = any(each.get("taints") or each.get("consumesCounters") for each in devices)
    return MOST_DEVICES_WITH_COUNTERS if has_counters_or_taints else MOST_DEVICES


def _pack(contents: Iterable[SliceContent]) -> list[SliceContent]:
    """Join neighboring contents while they fit into one slice with a taint on each device: a taint changes only one slice."""
    packed: list[SliceContent] = []
    for content in contents:
        last = packed.pop() if packed else SliceContent()
        sets = {each["name"]: each for each in (*last.shared_counters, *content.shared_counters)}
        joined = SliceContent((*last.devices, *content.devices), tuple(sets.values()))
        fits = len(joined.devices) <= MOST_DEVICES_WITH_COUNTERS and len(sets) <= MOST_COUNTER_SETS
        if sets:
            counters = sum(len(each["counters"]) for each in sets.values())
            fits = fits and counters <= MOST_COUNTERS_BESIDE_DEVICES
            fits = fits and _count_consumed(joined) <= MOST_CONSUMED_BESIDE_COUNTERS
        packed += [joined] if fits or not last.devices else [last, content]
    return packed


def _count_consumed(content: SliceContent) -> int:
    return sum(len(each["counters"]) for device in content.devices for each in device.get("consumesCounters", ()))


def validate_counter_set(each: Mapping[str, Any], sets: dict[str, Mapping[str, Any]]) -> None:
    """Add a counter set, in the API's form, to those of its pool.

    Raises ValueError if the API server would reject it.
    """
    name = each["name"]
    if name in sets:
        raise ValueError(f"Counter set {name} is in the pool twice")
    if not _LABEL.fullmatch(name):
        raise ValueError(f"Counter set name {name!r} is not a DNS label")
    if not each["counters"] or len(each["counters"]) > MOST_COUNTERS_IN_SET:
        raise ValueError(
            f"Counter set {name} has {len(each['counters'])} counters; 1 to {MOST_COUNTERS_IN_SET} are possible"
        )
    for counter in each["counters"]:
        if not _LABEL.fullmatch(counter):
            raise ValueError(f"Counter set {name}: {counter!r} is not a DNS label")
    sets[name] = each["counters"]


def validate_device(device: Mapping[str, Any], names: Collection[str], sets: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for a device, in the API's form, that the API server would reject.

    ``names`` are the previous devices of the pool, ``sets`` the counters of the pool's counter sets.
    """
    name = device["name"]
    if name in names:
        raise ValueError(f"Device {name} is in the pool twice")
    if not _LABEL.fullmatch(name):
        raise ValueError(f"Device name {name!r} is not a DNS label of 63 characters at most")
    attributes, capacity = device.get("attributes", {}), device.get("capacity", {})
    if len(attributes) + len(capacity) > MOST_ATTRIBUTES_AND_CAPACITIES:
        raise ValueError(
            f"Device {name} has {len(attributes)} attributes and {len(capacity)} capacities; "
            f"{MOST_ATTRIBUTES_AND_CAPACITIES} together are the most"
        )
    for key in (*attributes, *capacity):
        if not is_qualified_name(key):
            raise ValueError(f"Device {name}: {key!r} is not a qualified name")
    for key, value in attributes.items():
        text = value.get("string", value.get("version"))
        if text is not None and len(text.encode()) > LONGEST_STRING:
            raise ValueError(
                f"Device {name}: attribute {key} has {len(text.encode())} bytes, {LONGEST_STRING} is the most"
            )
    if len(device.get("taints", ())) > MOST_TAINTS:
        raise ValueError(f"Device {name} has {len(device['taints'])} taints, {MOST_TAINTS} is the most")
    if len(device.get("consumesCounters", ())) > MOST_SETS_OF_A_DEVICE:
        raise ValueError(
            f"Device {name} consumes of {len(device['consumesCounters'])} counter sets, {MOST_SETS_OF_A_DEVICE} is the most"
        )
    for consumed in device.get("consumesCounters", ()):
        known = sets.get(consumed["counterSet"])
        if known is None:
            raise ValueError(f"Device {name} consumes of counter set {consumed['counterSet']}, which the pool lacks")
        unknown = [counter for counter in consumed["counters"] if counter not in known]
        if unknown:
            raise ValueError(f"Device {name} consumes {', '.join(unknown)}, which {consumed['counterSet']} lacks")
        if len(consumed["counters"]) > MOST_CONSUMED_COUNTERS:
            raise ValueError(f"Device {name} consumes more than {MOST_CONSUMED_COUNTERS} counters")


def is_qualified_name(key: str) -> bool:
    """Return whether the API server accepts the name of an attribute or capacity."""
    domain, _slash, identifier = key.rpartition("/")
    return bool(_IDENTIFIER.fullmatch(identifier)) and (not domain or bool(_DRIVER.fullmatch(domain)))


def _is_slice_of_pool(each: Mapping[str, Any], desired: PoolSpec) -> bool:
    spec = each.get("spec", {})
    if spec.get("driver") != desired.driver or spec.get("pool", {}).get("name") != desired.pool:
        return False
    # Slices of another node belong to that node, whatever their pool.
    return not (desired.node_name and spec.get("nodeName") and spec["nodeName"] != desired.node_name)


def _name_prefix(desired: PoolSpec, index: int) -> str:
    # The server adds five characters, and a name has 253 at most. The index keeps the scheduler's order.
    return f"{index:05x}-{desired.driver}-{desired.node_name}"[:240].rstrip("-.") + "-"


def _same_selection(desired: PoolSpec, spec: Mapping[str, Any]) -> bool:
    present = {key: spec[key] for key in ("nodeName", "nodeSelector", "allNodes") if spec.get(key)}
    return bool(_canonical(desired.node_selection()) == _canonical(present))


def _index_of(each: Mapping[str, Any]) -> int | None:
    found = _INDEX.match(str(each["metadata"]["name"]))
    return int(found.group(1), 16) if found else None


def _slice_body(desired: PoolSpec, index: int, generation: int, owner: Mapping[str, Any] | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"generateName": _name_prefix(desired, index)}
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {
            "driver": desired.driver,
            **desired.node_selection(),
            "pool": {"name": desired.pool, "generation": generation, "resourceSliceCount": len(desired.slices)},
            **desired.slices[index].to_dict(),
        },
    }


def _kept_metadata(each: Mapping[str, Any], owner: Mapping[str, Any] | None) -> dict[str, Any]:
    kept = {
        key: copy.deepcopy(each["metadata"][key])
        for key in ("name", "uid", "resourceVersion", "generateName", "labels", "annotations", "ownerReferences")
        if each["metadata"].get(key)
    }
    if owner is not None:
        kept["ownerReferences"] = [dict(owner)]
    return kept


def _is_owned(each: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    return any(found.get("uid") == owner.get("uid") for found in each["metadata"].get("ownerReferences") or ())


def _preconditions(each: Mapping[str, Any]) -> Mapping[str, str]:
    return {key: str(each["metadata"][key]) for key in ("uid", "resourceVersion") if each["metadata"].get(key)}


def _keep_taint_times(spec: dict[str, Any], old: Mapping[str, Any]) -> None:
    """Keep the server's timestamps of unchanged taints."""
    times = {
        (device["name"], taint.get("key"), taint.get("value", ""), taint.get("effect")): taint.get("timeAdded")
        for device in old.get("devices") or ()
        for taint in device.get("taints") or ()
    }
    for device in spec.get("devices", ()):
        for taint in device.get("taints", ()):
            known = times.get((device["name"], taint["key"], taint.get("value", ""), taint["effect"]))
            if known and "timeAdded" not in taint:
                taint["timeAdded"] = known


def _canonical(value: Any, key: str = "") -> Any:
    """Normalize JSON for comparison: quantities by value, without empty members and taint times."""
    if isinstance(value, Mapping):
        if key in ("capacity", "counters"):
            return {name: _canonical_amount(each) for name, each in value.items()}
        return {
            name: _canonical(each, name)
            for name, each in value.items()
            if each not in (None, "", [], {}) and name != "timeAdded"
        }
    if isinstance(value, (list, tuple)):
        return [_canonical(each) for each in value]
    return value


def _canonical_amount(value: Any) -> Any:
    """Normalize a capacity or counter, including its request policy."""
    if isinstance(value, Mapping):
        return {name: _canonical_amount(each) for name, each in value.items() if each not in (None, "", [], {})}
    if isinstance(value, (list, tuple)):
        return [_canonical_amount(each) for each in value]
    return quantity.parse(value)


def _count_in_devices(each: Mapping[str, Any], name: str) -> int:
    return sum(1 for device in each.get("spec", {}).get("devices") or () if device.get(name))
