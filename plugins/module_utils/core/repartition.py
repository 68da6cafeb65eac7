# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""From the present devices of a node and a new layout to operations: what is done while pods use the node, device by device. Pure.

An operation is what is done at one go on one device, or on a group that a reset takes together. It says which partitions go,
which claims hold those, and which of the published devices nobody may be given meanwhile. What an operation does not name stays as it
is, on the same device too: a partition that is kept, and whoever has it, notices nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .backend_protocol import Backend
from .errors import AcceleratorError, InUse
from .layout import (
    CreatePartition,
    DestroyPartition,
    LayoutPlan,
    ResetDevice,
    SetPartitioning,
    Step,
    claims_on,
    plan_layouts,
)
from .layout_rules import DYNAMIC, STATIC, WHOLE, Rule, wanted_for
from .model import PARTITION, Device, Offer, OwnedPartition, Partition, Placement
from .node_settings import words
from .packing import PODS
from .prepared import PreparedPartition
from .repartition_settings import Unrest, key_to_knob
from .texts import join_problems

Document = dict[str, Any]


@dataclass(frozen=True)
class Going:
    """A partition that goes, and the claims that hold it, as namespace and name."""

    device_uuid: str
    partition: Partition
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Operation:
    """What is done at one go.

    ``devices`` are those that change, and those that are reset along. ``steps`` is what is left to do when the claims have gone; the
    driver itself destroys what it has made for them. ``wanted`` are rules for these devices alone, with every place. ``claims`` have
    to end first; ``names`` are devices, by all names under which they may be published, that nobody may be given meanwhile. ``restarts``
    says that everything on the devices ends: their mode changes, they are reset, or settings change that need that nobody uses them.
    ``settings`` and ``former_settings`` are rules of such settings, for the devices of which any change.
    """

    devices: tuple[Device, ...]
    steps: tuple[Step, ...]
    going: tuple[Going, ...]
    kept: tuple[tuple[str, Partition], ...]
    claims: tuple[str, ...]
    names: tuple[str, ...]
    wanted: tuple[Document, ...]
    former: tuple[Document, ...]
    restarts: bool
    settings: tuple[Document, ...] = ()
    former_settings: tuple[Document, ...] = ()

    @property
    def emptied(self) -> tuple[Document, ...]:
        """Rules that leave nothing on the devices, in their mode: what a reset for settings wants."""
        return tuple(
            rule_document(device, {"mode": STATIC, "partitions": []})
            for device in self.devices
            if device.partitioning.supported and device.partitioning.enabled
        )

    @property
    def resets(self) -> bool:
        """Whether a device is reset."""
        return any(isinstance(step, ResetDevice) for step in self.steps)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The devices' UUIDs."""
        return tuple(device.uuid for device in self.devices)

    def _described_steps(self) -> list[Document]:
        """The steps as data, with what is set between what goes and the reset."""
        steps: list[Document] = [{**step.to_dict(), "description": step.describe()} for step in self.steps]
        first = next(
            (number for number, step in enumerate(self.steps) if not isinstance(step, DestroyPartition)), len(steps)
        )
        sets: list[Document] = [
            {
                "step": "set",
                "device_uuid": rule["match"]["uuid"][0],
                "setting": key,
                "to": value,
                "description": f"set {key} of {rule['match']['uuid'][0]} to {words(key_to_knob(key), value)}",
            }
            for rule in self.settings
            for key, value in rule.items()
            if key != "match"
        ]
        return [*steps[:first], *sets, *steps[first:]]

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
            "steps": self._described_steps(),
            "going": [
                {
                    "device_uuid": each.device_uuid,
                    "profile": each.partition.profile,
                    "start": each.partition.placement.start,
                    "size": each.partition.placement.size,
                    "uuid": each.partition.uuid,
                    "claims": list(each.claims),
                }
                for each in self.going
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
            "restarts": self.restarts,
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
    unrest: Mapping[str, Unrest] | None = None,
) -> tuple[tuple[Operation, ...], tuple[AcceleratorError, ...]]:
    """Return the operations that bring devices to their rules, in the devices' order, and what stands in the way of others.

    ``former`` are the rules that the driver works by until then. ``pods`` says how many pods a claim has (one where it
    says nothing): of all ways to the layout that is taken which disturbs the
    fewest of them, and of those the one that destroys the fewest partitions; with ``prefer`` partitions the other way round. Of the backend
    only pure functions are called.

    ``unrest`` says by UUID which settings of a device have to change while nobody uses it. Such a device is emptied altogether; where
    that is in force only after a reset, those that are reset along are too.

    A partition that the driver has made for a claim goes with that claim: it is in no static layout, and its claim has to end
    first where a device becomes static. What a process holds that has no claim is InUse: nobody could be asked to leave.
    """
    unrest = unrest or {}
    wanted = [
        (_without_made(device, wanted_for(device, rules), prepared, device.uuid in unrest), wanted_for(device, rules))
        for device in devices
    ]
    resets = {uuid for uuid, each in unrest.items() if each.resets}
    outcomes = plan_layouts(wanted, prepared=prepared, refuse=False, pods=pods, prefer=prefer, resets=resets)
    reset = [_reset_together(outcome) for outcome in outcomes]
    along = {uuid for uuids in reset for uuid in uuids}
    operations: list[Operation] = []
    errors: list[AcceleratorError] = []
    for device, outcome, together in zip(devices, outcomes, reset):
        if isinstance(outcome, AcceleratorError):
            errors.append(outcome)
            continue
        if device.uuid in along and not together:
            continue  # in the operation of another one
        taken = [each for each in devices if each.uuid in together] if together else [device]
        found = _operation(backend, devices, taken, rules, former, outcome, prepared, unrest)
        if not found.steps and not found.going and not found.settings:
            continue
        problem = _held_by_nobody(found, outcome)
        if problem is not None:
            errors.append(problem)
        else:
            operations.append(found)
    return tuple(operations), tuple(errors)


def _reset_together(outcome: LayoutPlan | AcceleratorError) -> tuple[str, ...]:
    if isinstance(outcome, AcceleratorError):
        return ()
    return next((step.device_uuids for step in outcome.steps if isinstance(step, ResetDevice)), ())


def _without_made(
    device: Device, rule: Rule | None, prepared: Sequence[PreparedPartition], emptied: bool = False
) -> Device:
    """Return the device as it is when the claims whose partitions the driver has made have ended: where it becomes static, or is emptied."""
    if not emptied and (rule is None or rule.mode != STATIC):
        return device
    made = _made(device, prepared)
    left = tuple(each for each in device.partitions if not claims_on(each, made))
    return replace(device, partitions=left)


def _made(device: Device, prepared: Sequence[PreparedPartition]) -> tuple[PreparedPartition, ...]:
    return tuple(each for each in prepared if each.device_uuid == device.uuid and each.created)


def _operation(
    backend: Backend,
    everything: Sequence[Device],
    devices: Sequence[Device],
    rules: Sequence[Rule],
    former: Sequence[Rule],
    plan: LayoutPlan,
    prepared: Sequence[PreparedPartition],
    unrest: Mapping[str, Unrest],
) -> Operation:
    destroyed = {(step.device_uuid, step.partition.key) for step in plan.steps if isinstance(step, DestroyPartition)}
    changing = [(device, unrest[device.uuid]) for device in devices if device.uuid in unrest]
    restarts = _restarts(devices, plan) or bool(changing)
    going: list[Going] = []
    kept: list[tuple[str, Partition]] = []
    for device in devices:
        mine = tuple(each for each in prepared if each.device_uuid == device.uuid)
        rule = wanted_for(device, rules)
        emptied = device.uuid in unrest or (rule is not None and rule.mode == STATIC)
        made = _made(device, prepared) if emptied else ()
        for partition in device.partitions:
            if (device.uuid, partition.key) in destroyed or claims_on(partition, made):
                going.append(Going(device.uuid, partition, claims_on(partition, mine)))
            else:
                kept.append((device.uuid, partition))
    uuids = {device.uuid for device in devices}
    claims = [claim for each in going for claim in each.claims]
    if restarts:
        claims += [each.claim for each in prepared if each.device_uuid in uuids]
    staying = {(uuid, partition.key) for uuid, partition in kept} if not restarts else set()
    return Operation(
        devices=tuple(devices),
        steps=plan.steps,
        going=tuple(going),
        kept=tuple(kept),
        claims=tuple(dict.fromkeys(claims)),
        names=_names(backend, everything, devices, prepared, staying),
        wanted=tuple(
            rule_document(device, _placed(device, rule, plan, kept))
            for device, rule in ((device, wanted_for(device, rules)) for device in devices)
            if rule is not None
        ),
        former=tuple(
            rule_document(device, _former(device, wanted_for(device, former), prepared)) for device in devices
        ),
        restarts=restarts,
        settings=tuple(rule_document(device, each.wanted) for device, each in changing),
        former_settings=tuple(rule_document(device, each.former) for device, each in changing),
    )


def _restarts(devices: Sequence[Device], plan: LayoutPlan) -> bool:
    """Whether a step of the plan takes everything of the devices along: a reset, or a change of mode that acts at once."""
    enabled = {device.uuid: device.partitioning.enabled for device in devices}
    return any(
        isinstance(step, ResetDevice)
        or (isinstance(step, SetPartitioning) and enabled.get(step.device_uuid) != step.enabled)
        for step in plan.steps
    )


def _placed(device: Device, rule: Rule, plan: LayoutPlan, kept: Sequence[tuple[str, Partition]]) -> Document:
    """Return what a rule wants of one device, with the places that the plan has chosen: taken again it leads to the same."""
    document = described(rule)
    if rule.mode != STATIC:
        return document
    made = [step for step in plan.steps if isinstance(step, CreatePartition) and step.device_uuid == device.uuid]
    places = [(each.profile, each.placement) for uuid, each in kept if uuid == device.uuid and each.uuid]
    places += [(each.profile, each.placement) for each in made]
    document["partitions"] = _written(places)
    return document


def _written(places: Sequence[tuple[str, Placement]]) -> list[Document]:
    """Return partitions as a layout has them: each at its place, and those that have numbers counted."""
    ordered = sorted(places, key=lambda each: (each[1], each[0]))
    numbered = [profile for profile, placement in ordered if placement.is_number]
    return [
        {"profile": profile, "placement": placement.start} for profile, placement in ordered if not placement.is_number
    ] + [{"profile": profile, "count": numbered.count(profile)} for profile in dict.fromkeys(numbered)]


def _former(device: Device, rule: Rule | None, prepared: Sequence[PreparedPartition]) -> Document:
    """Return what brings the device back to what it is: places and all, or what the driver makes of it for claims."""
    if not device.partitioning.supported or not device.partitioning.enabled:
        return {"mode": WHOLE}
    made = _made(device, prepared)
    others = [each for each in device.partitions if not claims_on(each, made)]
    # What the driver makes comes and goes with claims, also between this look and the first step.
    if made or (rule is not None and rule.mode == DYNAMIC and not others):
        return {"mode": DYNAMIC}
    left = [(each.profile, each.placement) for each in others if each.uuid]
    return {"mode": STATIC, "partitions": _written(left)}


def described(rule: Rule) -> Document:
    """Return a rule as it is written in a layout, without its match."""
    document: Document = {"mode": rule.mode}
    if rule.mode == STATIC:
        document["partitions"] = [
            {"profile": each.profile, "placement": each.start}
            if each.start is not None
            else {"profile": each.profile, "count": each.count}
            for each in rule.partitions
        ]
    if rule.shares:
        document["shares"] = rule.shares
    for key in ("passthrough", "prepared_before_binding"):
        if getattr(rule, key):
            document[key] = True
    if not rule.composed:
        document["composed"] = False
    return document


def rule_document(device: Device, content: Mapping[str, Any]) -> Document:
    """Return a rule for one device alone."""
    return {"match": {"uuid": [device.uuid]}, **content}


def _names(
    backend: Backend,
    everything: Sequence[Device],
    devices: Sequence[Device],
    prepared: Sequence[PreparedPartition],
    staying: Collection[tuple[str, OwnedPartition]],
) -> tuple[str, ...]:
    """Return by what names the devices may be published, whatever their present rule is, without partitions that stay.

    Groups that have one of the devices among their members are among them.
    """
    found: list[Offer] = []
    for device in devices:
        owned = tuple(partition.key for partition in device.partitions if claims_on(partition, _made(device, prepared)))
        for dynamic in (False, True):
            for passthrough in (False, True):
                found += backend.offers(device, dynamic, owned, passthrough)
    if backend.grouping is not None:
        uuids = {device.uuid for device in devices}
        found += [offer for offer in backend.grouping.groups(everything) if uuids & set(offer.members)]
    return tuple(
        dict.fromkeys(
            offer.name
            for offer in found
            if not (
                offer.kind == PARTITION
                and offer.placement is not None
                and offer.profile_id is not None
                and (offer.device_uuid, (offer.profile_id, offer.placement.start, offer.placement.size)) in staying
            )
        )
    )


def _held_by_nobody(operation: Operation, plan: LayoutPlan) -> InUse | None:
    """Return the error for processes that hold what would go and have no claim: nobody can be evicted for them."""
    loose = [each for each in plan.blockers if each.processes and not each.claims and not operation.claims]
    if not loose:
        return None
    return InUse(
        join_problems(loose),
        pids=sorted({process.pid for each in loose for process in each.processes}),
        blockers=loose,
        hint="They have no claim, so that no pod can be asked to leave. End them, or choose a layout that keeps what they use.",
    )


def still_held(
    prepared: Sequence[PreparedPartition],
    wanted: Sequence[Rule],
    going: Sequence[tuple[str, int, int]],
    restarts: bool,
    uuids: Collection[str],
) -> tuple[str, ...]:
    """Return the claims that the driver still has prepared on what goes, as namespace and name, in the store's order.

    ``going`` are partitions by their device's UUID, start and size, ``wanted`` the rules of the operation's devices, ``uuids`` those devices.
    Where everything ends (``restarts``) each claim of the devices counts; otherwise those on what goes, and those whose partition the
    driver has made itself on a device that is to become whole or static, also when they came after the plan.
    """
    emptied = {uuid for rule in wanted if rule.mode in (WHOLE, STATIC) for uuid in rule.match.uuid or ()}
    places = set(going)
    found = [
        each.claim
        for each in prepared
        if each.device_uuid in uuids
        and (
            restarts
            or (each.created and each.device_uuid in emptied)
            or (each.placement is not None and (each.device_uuid, each.placement.start, each.placement.size) in places)
        )
    ]
    return tuple(dict.fromkeys(found))


def driver_rules(
    devices: Sequence[Device], rules: Sequence[Rule], former: Sequence[Rule], pending: Collection[str]
) -> tuple[Document, ...]:
    """Return what the driver has to be told of the devices while those in ``pending`` are still to be changed.

    One rule for each device that has any: the new one, or the former one for what is pending. Both are as users wrote them.
    """
    found = []
    for device in devices:
        rule = wanted_for(device, former if device.uuid in pending else rules)
        if rule is not None:
            found.append(rule_document(device, described(rule)))
    return tuple(found)


def same_for_driver(device: Device, rules: Sequence[Rule], former: Sequence[Rule]) -> bool:
    """Whether a device's new rule says nothing else to the driver than its former one: how it is published."""
    new, old = wanted_for(device, rules), wanted_for(device, former)
    return _published(new) == _published(old)


def _published(rule: Rule | None) -> tuple[Any, ...]:
    if rule is None:
        return (False, 0, False, False, True)
    return (rule.mode == DYNAMIC, rule.shares, rule.passthrough, rule.prepared_before_binding, rule.composed)
