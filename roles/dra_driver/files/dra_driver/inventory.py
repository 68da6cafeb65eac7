# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The offers of one vendor's devices, for ResourceSlices and for the checks of claims."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from .claims.plan import Inventory
from .core.dra.composite_devices import compose
from .core.dra.consumable_capacity import shared
from .core.errors import AcceleratorError, unexpected
from .core.health.conditions import Severity, Sign
from .core.model import (
    DEVICE,
    PARTITION,
    PASSTHROUGH,
    UNKNOWN_ERROR,
    CounterSet,
    Device,
    Fault,
    Finding,
    Offer,
    OwnedPartition,
    devices_of,
)
from .core.partitioning.rules import DYNAMIC, Rule, wanted_for
from .core.vendors.protocol import Backend


@dataclass(frozen=True)
class Survey:
    """The result of a scan: findings, devices with known facts, offers, and the UUIDs of the dynamically partitioned devices.

    ``left_out`` maps the names of device groups that are not offered to the reason. A device with a fault keeps the
    offers of its healthy state, with a taint. A device whose facts were never read has no offers. The offers of the
    devices in ``failed`` (UUIDs) could not be computed, and those of the previous survey apply.
    ``active_fabric_partitions`` stays None if the host has no fabric partitions, or if their state is unknown.
    """

    findings: tuple[Finding, ...]
    devices: Mapping[str, Device]
    offers: tuple[Offer, ...]
    counter_sets: tuple[CounterSet, ...]
    dynamic: frozenset[str]
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    active_fabric_partitions: frozenset[int] | None = None

    def inventory(self, pool: str) -> Inventory:
        """Return the inventory that claims are checked against."""
        return Inventory(
            pool=pool,
            offers={offer.name: offer for offer in self.offers},
            dynamic=self.dynamic,
            faults={
                finding.uuid: f"{finding.fault.cause}: {finding.fault}"
                for finding in self.findings
                if finding.fault is not None and finding.uuid
            },
        )


def survey(
    backend: Backend,
    findings: Collection[Finding],
    rules: tuple[Rule, ...],
    owned: Mapping[str, Collection[OwnedPartition]],
) -> Survey:
    """Compute the offers of the devices from a scan. Only the backend can have side effects.

    ``owned`` must contain each partition that the driver owned when the devices were read. Other partitions count as
    partitions of an administrator.
    """
    offers: list[Offer] = []
    counter_sets: list[CounterSet] = []
    dynamic: set[str] = set()
    never_grouped: set[str] = set()
    checked_findings = [_with_sharing_obstacle(finding, rules) for finding in findings]
    failed: set[str] = set()
    named: dict[str, Device] = {}
    for number, finding in enumerate(checked_findings):
        device = finding.device
        if device is None:
            continue
        rule = wanted_for(device, rules)
        on_demand = rule is not None and rule.mode == DYNAMIC
        if on_demand:
            dynamic.add(device.uuid)
        owned_here = owned.get(device.uuid, ())
        try:
            found = _offers(backend, device, rule, owned_here)
            counters = backend.counter_set(device, owned_here) if any(offer.counter_set for offer in found) else None
            names = [*(offer.name for offer in found), *([counters.name] if counters is not None else [])]
        except Exception as error:  # noqa: BLE001  one device's defect is not the other devices'
            checked_findings[number] = _with_defect(finding, device, error)
            failed.add(device.uuid)
            continue
        other = next((named[name] for name in names if name in named), None)
        if other is not None:
            checked_findings[number] = _with_fault(finding, device, _name_conflict(device, other))
            continue
        if rule is not None and not rule.composed:
            never_grouped.add(device.uuid)
        named.update(dict.fromkeys(names, device))
        offers.extend(found)
        if counters is not None:
            counter_sets.append(counters)
    devices = devices_of(checked_findings)
    defects: dict[str, str] = {}
    groups: Collection[Offer] = ()
    try:
        if backend.grouping is not None:
            groups = backend.grouping.groups([device for device in devices if device.uuid not in failed])
    except Exception as error:  # noqa: BLE001  single devices are published without groups
        defects["all groups"] = str(unexpected(error, "Finding groups of devices"))
    composition = compose(offers, counter_sets, groups, never_grouped)
    fabric = backend.fabric_partitions
    return Survey(
        findings=tuple(checked_findings),
        devices={device.uuid: device for device in devices},
        offers=composition.offers,
        counter_sets=composition.counter_sets,
        dynamic=frozenset(dynamic),
        left_out={**composition.left_out, **defects},
        failed=frozenset(failed),
        active_fabric_partitions=fabric.active if fabric is not None else None,
    )


def _offers(
    backend: Backend, device: Device, rule: Rule | None, owned: Collection[OwnedPartition]
) -> tuple[Offer, ...]:
    """Return the offers of one device under its layout rule."""
    if rule is None:
        return backend.offers(device, False, owned, False)
    on_demand = rule.mode == DYNAMIC
    found = backend.offers(device, on_demand, owned, rule.passthrough)
    if rule.shares:
        parts = backend.parts(device)
        found = tuple(shared(offer, rule.shares, parts) if offer.kind == DEVICE else offer for offer in found)
    if rule.prepared_before_binding:
        found = tuple(
            replace(offer, prepared_before_binding=_preparation_changes_hardware(offer, on_demand)) for offer in found
        )
    return found


def _with_defect(finding: Finding, device: Device, error: Exception) -> Finding:
    """Return the finding of a device with an unexpected exception as its fault."""
    return _with_fault(finding, device, unexpected(error, f"Working out what to publish of {device.describe()}"))


def _name_conflict(device: Device, other: Device) -> AcceleratorError:
    """Return the error for a device with the name of another device.

    Claims could get the wrong device, so it is not published.
    """
    return AcceleratorError(
        f"{device.describe()} is not published: it has the names of {other.describe()}, expected unique names",
        hint="Restart the driver. If this remains, report it with the output of `dra-driver collect`.",
    )


def _with_fault(finding: Finding, device: Device, failed: AcceleratorError) -> Finding:
    sign = Sign(UNKNOWN_ERROR, Severity.DEGRADED, f"{failed.message}.", failed.hint)
    ill = replace(device, health=replace(device.health, signs=(*device.health.signs, sign)))
    return replace(finding, device=ill, fault=finding.fault or Fault(UNKNOWN_ERROR, str(failed)))


def with_previous_offers(found: Survey, previous: Survey | None, held: Collection[str]) -> Survey:
    """Return the survey with the previous offers of the devices in ``held`` (UUIDs). Without side effects.

    While a layout changes a device, its intermediate states must not be published. The groups of such a device and the
    other members of these groups keep their previous offers too, because they share counters. Without a previous survey
    the current one is returned.
    """
    if previous is None or not held:
        return found
    kept = set(held)
    groups = [set(offer.members) for survey in (previous, found) for offer in survey.offers if offer.members]
    while True:
        more = {uuid for group in groups if group & kept for uuid in group} - kept
        if not more:
            break
        kept |= more

    def of(survey: Survey, uuid: str) -> list[Offer]:
        return [offer for offer in survey.offers if not offer.members and offer.device_uuid == uuid]

    singles = [
        offer
        for uuid in dict.fromkeys((*previous.devices, *found.devices))
        for offer in of(previous if uuid in kept else found, uuid)
    ]
    joined = [offer for offer in previous.offers if offer.members and set(offer.members) & kept]
    joined += [offer for offer in found.offers if offer.members and not set(offer.members) & kept]
    needed = {name for offer in (*singles, *joined) for name in offer.all_counters}
    needed |= {offer.counter_set for offer in singles if offer.counter_set}
    mine = {offer.counter_set for offer in singles if offer.device_uuid in kept and offer.counter_set}
    mine |= {name for offer in joined if set(offer.members) & kept for name in offer.all_counters}
    sets = {each.name: each for each in found.counter_sets}
    sets.update({each.name: each for each in previous.counter_sets if each.name in mine or each.name not in sets})
    return replace(
        found,
        offers=(*singles, *joined),
        counter_sets=tuple(each for name, each in sets.items() if name in needed),
        dynamic=(found.dynamic - kept) | (previous.dynamic & kept),
        left_out={**previous.left_out, **found.left_out},
    )


def _with_sharing_obstacle(finding: Finding, rules: tuple[Rule, ...]) -> Finding:
    """Return the finding with the obstacle to sharing as a health sign, if the rule shares the device and it cannot be shared.

    The sign taints the device and is reported.
    """
    device = finding.device
    rule = wanted_for(device, rules) if device is not None else None
    if device is None or device.sharing_obstacle is None or rule is None or not rule.shares:
        return finding
    health = replace(device.health, signs=(*device.health.signs, device.sharing_obstacle))
    return replace(finding, device=replace(device, health=health))


def _preparation_changes_hardware(offer: Offer, on_demand: bool) -> bool:
    """Return whether preparation changes the device's mode, creates a partition, or changes the device's kernel driver."""
    if offer.kind == PARTITION:
        return offer.dynamic
    return offer.kind == PASSTHROUGH or on_demand
