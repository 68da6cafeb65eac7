# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan the operations that change a node's devices to a new layout while pods use the node. No side effects.

An operation changes one device, or a group of devices that a reset affects together. It lists the partitions to delete,
the claims that use them, and the published devices that must not be allocated during the change. Anything else stays
unchanged, also on the same device: a kept partition and its users are not affected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import AcceleratorError, InUse
from ..model import PARTITION, Device, Offer, OwnedPartition, Partition, Placement
from ..partitioning.layout_plan import (
    CreatePartition,
    DestroyPartition,
    LayoutPlan,
    ResetDevice,
    SetPartitioning,
    Step,
    claims_on,
    plan_layouts,
)
from ..partitioning.placement import PODS
from ..partitioning.rules import DYNAMIC, STATIC, WHOLE, Rule, document_of, wanted_for
from ..settings.settings_plan import setting_text
from ..store.prepared_claims import PreparedPartition
from ..texts import join_problems
from ..vendors.protocol import Backend
from .settings_changes import IdleSettings, key_to_knob

Document = dict[str, Any]


@dataclass(frozen=True)
class AffectedPartition:
    """A partition to delete, and the claims that use it, as namespace and name."""

    device_uuid: str
    partition: Partition
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Operation:
    """One step of the change, for one device or a group of devices.

    ``devices`` are the devices that change and those that are reset with them. ``steps`` are the remaining steps after
    the claims have ended; the driver itself deletes the partitions that it created for them. ``wanted`` are rules for
    these devices only, with explicit placements. ``claims`` must end first. ``names`` are all names under which the
    devices can be published: they must not be allocated during the change. With ``ends_use`` all use of the devices ends,
    because their mode changes, they are reset, or a changed setting requires an unused device. ``settings`` and
    ``former_settings`` are rules with the new and the previous values, for the devices whose settings change.
    """

    devices: tuple[Device, ...]
    steps: tuple[Step, ...]
    deleted: tuple[AffectedPartition, ...]
    kept: tuple[tuple[str, Partition], ...]
    claims: tuple[str, ...]
    names: tuple[str, ...]
    wanted: tuple[Document, ...]
    former: tuple[Document, ...]
    ends_use: bool
    settings: tuple[Document, ...] = ()
    former_settings: tuple[Document, ...] = ()

    @property
    def emptied(self) -> tuple[Document, ...]:
        """Return rules that delete all partitions and keep the devices' mode, for a reset that changes settings."""
        return tuple(
            rule_document(device, {"mode": STATIC, "partitions": []})
            for device in self.devices
            if device.partitioning.supported and device.partitioning.enabled
        )

    @property
    def resets(self) -> bool:
        """Return whether a device is reset."""
        return any(isinstance(step, ResetDevice) for step in self.steps)

    @property
    def uuids(self) -> tuple[str, ...]:
        """Return the devices' UUIDs."""
        return tuple(device.uuid for device in self.devices)

    def _step_documents(self) -> list[Document]:
        """Return the steps as data. Settings are set after partitions are deleted and before the reset."""
        steps: list[Document] = [{**step.to_dict(), "description": step.describe()} for step in self.steps]
        first = next(
            (number for number, step in enumerate(self.steps) if not isinstance(step, DestroyPartition)), len(steps)
        )
        settings_steps: list[Document] = [
            {
                "step": "set",
                "device_uuid": rule["match"]["uuid"][0],
                "setting": key,
                "to": value,
                "description": f"set {key} of {rule['match']['uuid'][0]} to {setting_text(key_to_knob(key), value)}",
            }
            for rule in self.settings
            for key, value in rule.items()
            if key != "match"
        ]
        return [*steps[:first], *settings_steps, *steps[first:]]

    def to_dict(self) -> Document:
        """Return the operation as data."""
        return {
            "devices": [
                {
                    "index": device.index,
                    "uuid": device.uuid,
                    "product": device.product,
                    "pci_address": device.pci_address,
                    "vendor": device.vendor,
                }
                for device in self.devices
            ],
            "steps": self._step_documents(),
            "going": [
                {
                    "device_uuid": each.device_uuid,
                    "profile": each.partition.profile,
                    "start": each.partition.placement.start,
                    "size": each.partition.placement.size,
                    "uuid": each.partition.uuid,
                    "claims": list(each.claims),
                }
                for each in self.deleted
            ],
            "kept": [
                {
                    "device_uuid": uuid,
                    "profile": each.profile,
                    "start": each.placement.start,
                    "size": each.placement.size,
                    "uuid": each.uuid,
                }
                for uuid, each in self.kept
            ],
            "claims": list(self.claims),
            "names": list(self.names),
            "wanted": [dict(each) for each in self.wanted],
            "former": [dict(each) for each in self.former],
            "resets": self.resets,
            "restarts": self.ends_use,
            "settings": [dict(each) for each in self.settings],
            "former_settings": [dict(each) for each in self.former_settings],
            "emptied": [dict(each) for each in self.emptied] if self.settings else [],
        }


def plan_operations(
    backend: Backend,
    devices: Sequence[Device],
    rules: Sequence[Rule],
    prepared: Sequence[PreparedPartition],
    pods: Mapping[str, int] | None = None,
    former: Sequence[Rule] = (),
    prefer: str = PODS,
    idle_settings: Mapping[str, IdleSettings] | None = None,
) -> tuple[tuple[Operation, ...], tuple[AcceleratorError, ...]]:
    """Return the operations that bring devices to their rules, in the devices' order, and the errors of other devices.

    ``former`` are the rules that the driver uses until then. ``pods`` maps a claim to its number of pods, 1 by default.
    Of all ways to reach the layout, the plan affects the fewest pods, and among those deletes the fewest partitions. If
    ``prefer`` is partitions, the order of these criteria is reversed. Only functions of the backend without side
    effects are called.

    ``idle_settings`` maps UUIDs to settings that can only change while the device is unused. All partitions of such a device
    are deleted. If the setting takes effect only after a reset, the devices that are reset together with it are
    emptied, too.

    A partition that the driver created for a claim is deleted with the claim. It is in no static layout, so its claim
    must end before the device becomes static. A process without a claim causes InUse, because there is no pod to evict.
    """
    idle_settings = idle_settings or {}
    wanted = [
        (
            _without_claim_partitions(device, wanted_for(device, rules), prepared, device.uuid in idle_settings),
            wanted_for(device, rules),
        )
        for device in devices
    ]
    resets = {uuid for uuid, each in idle_settings.items() if each.resets}
    outcomes = plan_layouts(wanted, prepared=prepared, refuse=False, pods=pods, prefer=prefer, resets=resets)
    reset = [_devices_to_reset(outcome) for outcome in outcomes]
    reset_with_others = {uuid for uuids in reset for uuid in uuids}
    operations: list[Operation] = []
    errors: list[AcceleratorError] = []
    for device, outcome, together in zip(devices, outcomes, reset):
        if isinstance(outcome, AcceleratorError):
            errors.append(outcome)
            continue
        if device.uuid in reset_with_others and not together:
            continue  # it is in another device's operation
        members = [each for each in devices if each.uuid in together] if together else [device]
        found = _operation(backend, devices, members, rules, former, outcome, prepared, idle_settings)
        if not found.steps and not found.deleted and not found.settings:
            continue
        problem = _use_without_claim(found, outcome)
        if problem is not None:
            errors.append(problem)
        else:
            operations.append(found)
    return tuple(operations), tuple(errors)


def _devices_to_reset(outcome: LayoutPlan | AcceleratorError) -> tuple[str, ...]:
    if isinstance(outcome, AcceleratorError):
        return ()
    return next((step.device_uuids for step in outcome.steps if isinstance(step, ResetDevice)), ())


def _without_claim_partitions(
    device: Device, rule: Rule | None, prepared: Sequence[PreparedPartition], emptied: bool = False
) -> Device:
    """Return the device without the partitions that claims own, if the device becomes static or is emptied."""
    if not emptied and (rule is None or rule.mode != STATIC):
        return device
    owned = _claim_partitions(device, prepared)
    left = tuple(each for each in device.partitions if not claims_on(each, owned))
    return replace(device, partitions=left)


def _claim_partitions(device: Device, prepared: Sequence[PreparedPartition]) -> tuple[PreparedPartition, ...]:
    return tuple(each for each in prepared if each.device_uuid == device.uuid and each.created)


def _operation(
    backend: Backend,
    all_devices: Sequence[Device],
    devices: Sequence[Device],
    rules: Sequence[Rule],
    former: Sequence[Rule],
    plan: LayoutPlan,
    prepared: Sequence[PreparedPartition],
    idle_settings: Mapping[str, IdleSettings],
) -> Operation:
    destroyed = {(step.device_uuid, step.partition.key) for step in plan.steps if isinstance(step, DestroyPartition)}
    changing = [(device, idle_settings[device.uuid]) for device in devices if device.uuid in idle_settings]
    ends_use = _ends_use(devices, plan) or bool(changing)
    deleted: list[AffectedPartition] = []
    kept: list[tuple[str, Partition]] = []
    for device in devices:
        mine = tuple(each for each in prepared if each.device_uuid == device.uuid)
        rule = wanted_for(device, rules)
        emptied = device.uuid in idle_settings or (rule is not None and rule.mode == STATIC)
        owned = _claim_partitions(device, prepared) if emptied else ()
        for partition in device.partitions:
            if (device.uuid, partition.key) in destroyed or claims_on(partition, owned):
                deleted.append(AffectedPartition(device.uuid, partition, claims_on(partition, mine)))
            else:
                kept.append((device.uuid, partition))
    uuids = {device.uuid for device in devices}
    claims = [claim for each in deleted for claim in each.claims]
    if ends_use:
        claims += [each.claim for each in prepared if each.device_uuid in uuids]
    kept_keys = {(uuid, partition.key) for uuid, partition in kept} if not ends_use else set()
    return Operation(
        devices=tuple(devices),
        steps=plan.steps,
        deleted=tuple(deleted),
        kept=tuple(kept),
        claims=tuple(dict.fromkeys(claims)),
        names=_published_names(backend, all_devices, devices, prepared, kept_keys),
        wanted=tuple(
            rule_document(device, _rule_with_placements(device, rule, plan, kept))
            for device, rule in ((device, wanted_for(device, rules)) for device in devices)
            if rule is not None
        ),
        former=tuple(
            rule_document(device, _restoring_rule(device, wanted_for(device, former), prepared)) for device in devices
        ),
        ends_use=ends_use,
        settings=tuple(rule_document(device, each.wanted) for device, each in changing),
        former_settings=tuple(rule_document(device, each.former) for device, each in changing),
    )


def _ends_use(devices: Sequence[Device], plan: LayoutPlan) -> bool:
    """Return whether a step ends all use of the devices: a reset, or a mode change that takes effect at once."""
    enabled = {device.uuid: device.partitioning.enabled for device in devices}
    return any(
        isinstance(step, ResetDevice)
        or (isinstance(step, SetPartitioning) and enabled.get(step.device_uuid) != step.enabled)
        for step in plan.steps
    )


def _rule_with_placements(
    device: Device, rule: Rule, plan: LayoutPlan, kept: Sequence[tuple[str, Partition]]
) -> Document:
    """Return a device's rule with the placements that the plan chose, so that planning it again gives the same layout."""
    document = document_of(rule)
    if rule.mode != STATIC:
        return document
    created = [step for step in plan.steps if isinstance(step, CreatePartition) and step.device_uuid == device.uuid]
    places = [(each.profile, each.placement) for uuid, each in kept if uuid == device.uuid and each.uuid]
    places += [(each.profile, each.placement) for each in created]
    document["partitions"] = _partition_entries(places)
    return document


def _partition_entries(places: Sequence[tuple[str, Placement]]) -> list[Document]:
    """Return partitions as a layout rule lists them: with their placements, or with a count if they are numbered."""
    ordered = sorted(places, key=lambda each: (each[1], each[0]))
    numbered = [profile for profile, placement in ordered if placement.is_number]
    return [
        {"profile": profile, "placement": placement.start} for profile, placement in ordered if not placement.is_number
    ] + [{"profile": profile, "count": numbered.count(profile)} for profile in dict.fromkeys(numbered)]


def _restoring_rule(device: Device, rule: Rule | None, prepared: Sequence[PreparedPartition]) -> Document:
    """Return the rule that restores the device's current state: static with placements, or dynamic."""
    if not device.partitioning.supported or not device.partitioning.enabled:
        return {"mode": WHOLE}
    owned = _claim_partitions(device, prepared)
    others = [each for each in device.partitions if not claims_on(each, owned)]
    # The driver's partitions change with claims, also between this scan and the first step.
    if owned or (rule is not None and rule.mode == DYNAMIC and not others):
        return {"mode": DYNAMIC}
    left = [(each.profile, each.placement) for each in others if each.uuid]
    return {"mode": STATIC, "partitions": _partition_entries(left)}


def rule_document(device: Device, content: Mapping[str, Any]) -> Document:
    """Return a rule for one device only."""
    return {"match": {"uuid": [device.uuid]}, **content}


def _published_names(
    backend: Backend,
    all_devices: Sequence[Device],
    devices: Sequence[Device],
    prepared: Sequence[PreparedPartition],
    kept_keys: Collection[tuple[str, OwnedPartition]],
) -> tuple[str, ...]:
    """Return all names under which the devices can be published under any rule, without partitions that stay.

    The names include groups with one of the devices as a member.
    """
    found: list[Offer] = []
    for device in devices:
        owned = tuple(
            partition.key
            for partition in device.partitions
            if claims_on(partition, _claim_partitions(device, prepared))
        )
        for dynamic in (False, True):
            for passthrough in (False, True):
                found += backend.offers(device, dynamic, owned, passthrough)
    if backend.grouping is not None:
        uuids = {device.uuid for device in devices}
        found += [offer for offer in backend.grouping.groups(all_devices) if uuids & set(offer.members)]
    return tuple(
        dict.fromkeys(
            offer.name
            for offer in found
            if not (
                offer.kind == PARTITION
                and offer.placement is not None
                and offer.profile_id is not None
                and (offer.device_uuid, (offer.profile_id, offer.placement.start, offer.placement.size)) in kept_keys
            )
        )
    )


def _use_without_claim(operation: Operation, plan: LayoutPlan) -> InUse | None:
    """Return the error for processes without a claim that use deleted partitions: no pod can be evicted for them."""
    unclaimed = [each for each in plan.blockers if each.processes and not each.claims and not operation.claims]
    if not unclaimed:
        return None
    return InUse(
        join_problems(unclaimed),
        pids=sorted({process.pid for each in unclaimed for process in each.processes}),
        blockers=unclaimed,
        hint="They have no claim, so there is no pod to evict. End them, or choose a layout that keeps the partitions that they use.",
    )


def remaining_claims(
    prepared: Sequence[PreparedPartition],
    wanted: Sequence[Rule],
    deleted: Sequence[tuple[str, int, int]],
    ends_use: bool,
    uuids: Collection[str],
) -> tuple[str, ...]:
    """Return the claims that are still prepared on the deleted partitions, as namespace and name, in the store's order.

    ``deleted`` are partitions by device UUID, start, and size. ``wanted`` are the rules of the operation's devices,
    ``uuids`` these devices. With ``ends_use`` all claims on the devices count. Otherwise these claims count: claims on
    the deleted partitions, and claims whose partition the driver created on a device that becomes whole or static, even
    after the plan was made.
    """
    emptied = {uuid for rule in wanted if rule.mode in (WHOLE, STATIC) for uuid in rule.match.uuid or ()}
    places = set(deleted)
    found = [
        each.claim
        for each in prepared
        if each.device_uuid in uuids
        and (
            ends_use
            or (each.created and each.device_uuid in emptied)
            or (each.placement is not None and (each.device_uuid, each.placement.start, each.placement.size) in places)
        )
    ]
    return tuple(dict.fromkeys(found))


def driver_rules(
    devices: Sequence[Device], rules: Sequence[Rule], former: Sequence[Rule], pending: Collection[str]
) -> tuple[Document, ...]:
    """Return the rules for the driver while the devices in ``pending`` have not changed yet.

    The result has one rule for each device that has a rule: the previous rule for a pending device, the new rule
    otherwise. Rules keep the form that users wrote.
    """
    found = []
    for device in devices:
        rule = wanted_for(device, former if device.uuid in pending else rules)
        if rule is not None:
            found.append(rule_document(device, document_of(rule)))
    return tuple(found)


def publish_equally(device: Device, rules: Sequence[Rule], former: Sequence[Rule]) -> bool:
    """Return whether a device's new and previous rules are equal for the driver, which publishes the device by them."""
    new, old = wanted_for(device, rules), wanted_for(device, former)
    return _published_properties(new) == _published_properties(old)


def _published_properties(rule: Rule | None) -> tuple[Any, ...]:
    if rule is None:
        return (False, 0, False, False, True)
    return (rule.mode == DYNAMIC, rule.shares, rule.passthrough, rule.prepared_before_binding, rule.composed)
