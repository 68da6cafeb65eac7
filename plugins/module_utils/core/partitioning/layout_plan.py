# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan the ordered steps from a device's current state to the desired layout.

No side effects. ``layout_execute.py`` runs the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

from ..errors import AcceleratorError, InUse, Unsupported
from ..model import Device, Partition, Placement, Process
from ..store.prepared_claims import PreparedPartition
from ..texts import join_problems
from . import placement as partitioning_placement
from .rules import DYNAMIC, STATIC, WHOLE, Match, Rule


@dataclass(frozen=True)
class SetPartitioning:
    """Switch a device's partitioning mode on or off."""

    device_uuid: str
    enabled: bool

    def describe(self) -> str:
        """Return the step as text."""
        return f"switch partitioning of {self.device_uuid} {'on' if self.enabled else 'off'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the step as data."""
        return {"step": "set_partitioning", "device_uuid": self.device_uuid, "enabled": self.enabled}


@dataclass(frozen=True)
class ResetDevice:
    """Reset devices together, so that a pending change takes effect."""

    device_uuids: tuple[str, ...]

    def describe(self) -> str:
        """Return the step as text."""
        return f"reset {', '.join(self.device_uuids)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the step as data."""
        return {"step": "reset_device", "device_uuids": list(self.device_uuids)}


@dataclass(frozen=True)
class DestroyPartition:
    """Delete an existing partition."""

    device_uuid: str
    partition: Partition

    def describe(self) -> str:
        """Return the step as text."""
        return f"destroy {self.partition.describe()} on {self.device_uuid}"

    def to_dict(self) -> dict[str, Any]:
        """Return the step as data."""
        return {
            "step": "destroy_partition",
            "device_uuid": self.device_uuid,
            "profile": self.partition.profile,
            "start": self.partition.placement.start,
            "size": self.partition.placement.size,
            "uuid": self.partition.uuid,
        }


@dataclass(frozen=True)
class CreatePartition:
    """Create a partition at one placement."""

    device_uuid: str
    profile: str
    profile_id: int
    placement: Placement

    def describe(self) -> str:
        """Return the step as text."""
        return f"create {self.profile} at {self.placement} on {self.device_uuid}"

    def to_dict(self) -> dict[str, Any]:
        """Return the step as data."""
        return {
            "step": "create_partition",
            "device_uuid": self.device_uuid,
            "profile": self.profile,
            "start": self.placement.start,
            "size": self.placement.size,
        }


Step = Union[SetPartitioning, ResetDevice, DestroyPartition, CreatePartition]


@dataclass(frozen=True)
class Blocker:
    """The holders of a partition, or of a whole device, that a plan would affect."""

    device_uuid: str
    partition: Partition | None
    processes: tuple[Process, ...]
    claims: tuple[str, ...]

    def __str__(self) -> str:
        what = self.partition.describe() if self.partition else f"device {self.device_uuid}"
        holders = [f"process {process}" for process in self.processes] + [f"claim {claim}" for claim in self.claims]
        return f"{what} is held by {', '.join(holders)}"


@dataclass(frozen=True)
class LayoutPlan:
    """The steps for one device; empty if it has the desired layout.

    ``blockers`` are holders that the steps would affect.
    """

    device_uuid: str
    steps: tuple[Step, ...]
    kept: tuple[Partition, ...]
    blockers: tuple[Blocker, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as data, for check mode and diff."""
        return {
            "device_uuid": self.device_uuid,
            "steps": [step.to_dict() for step in self.steps],
            "kept": [partition.describe() for partition in self.kept],
            "blockers": [str(blocker) for blocker in self.blockers],
        }


def plan_layout(
    device: Device,
    rule: Rule,
    *,
    prepared: Sequence[PreparedPartition] = (),
    refuse: bool = True,
    pods: Mapping[str, int] | None = None,
    prefer: str = partitioning_placement.PODS,
) -> LayoutPlan:
    """Plan the steps from a device's current state to a rule, with the fewest affected partitions.

    The mode whole means no partitioning and no partitions. The mode static means partitioning with exactly these
    partitions. The mode dynamic means only partitions that the driver created for claims. Dynamic switches the
    partitioning mode on only on devices that need a reset for this.

    ``pods`` maps claims, by namespace and name, to their number of pods, 1 by default. The plan affects the fewest
    pods, then the fewest partitions. If ``prefer`` is partitions, this order is reversed.

    Raises InvalidLayout, DoesNotFit, and Unsupported. Raises InUse, with PIDs and claims, if every plan would affect a
    holder. With ``refuse=False`` the plan is returned with its blockers instead.
    """
    mine = tuple(each for each in prepared if each.device_uuid == device.uuid)
    state = device.partitioning
    if not state.supported:
        if rule.mode == STATIC:
            raise Unsupported(
                f"{device.describe()} cannot be partitioned, but the layout wants {rule.describe()}",
                hint="Match such devices with another rule, mode dynamic or whole.",
            )
        return LayoutPlan(device.uuid, (), ())
    enabled = rule.mode != WHOLE
    creates: tuple[CreatePartition, ...] = ()
    keeping: tuple[Partition, ...] = ()
    if rule.mode == DYNAMIC:
        owned = tuple(each for each in mine if each.created)
        keeping = tuple(partition for partition in device.partitions if claims_on(partition, owned))
        enabled = state.needs_reset or state.enabled
    if rule.mode == STATIC and rule.partitions:
        if not device.profiles:
            raise Unsupported(
                f"The driver of {device.describe()} reports no profiles in the device's present mode",
                hint="Switch partitioning on with a layout without partitions first.",
            )
        holders = {each.key: _count_holders(each, mine, pods or {}) for each in device.partitions}
        held = {key: number for key, number in holders.items() if number}
        places = partitioning_placement.arrange(device, rule.partitions, held, prefer)
        keeping = partitioning_placement.kept(device, places)
        kept_keys = {partition.key for partition in keeping}
        creates = tuple(
            CreatePartition(device.uuid, profile.name, profile.profile_id, placement)
            for profile, placement in sorted(places, key=lambda each: (-each[1].size, each[1].start))
            if (profile.profile_id, placement.start, placement.size) not in kept_keys
        )
    destroyed = tuple(partition for partition in device.partitions if partition not in keeping)
    mode_steps = _mode_steps(device, enabled)
    steps: tuple[Step, ...] = (
        *(DestroyPartition(device.uuid, partition) for partition in destroyed),
        *mode_steps,
        *creates,
    )
    # A reset, or a mode change that takes effect at once, ends all use of the device.
    ends_use = bool(mode_steps) and state.enabled != enabled
    blockers = _blockers(device, destroyed, ends_use, mine)
    if blockers and refuse:
        raise _in_use(device, rule, blockers)
    return LayoutPlan(device.uuid, steps, keeping, blockers)


def _count_holders(partition: Partition, prepared: Sequence[PreparedPartition], pods: Mapping[str, int]) -> int:
    """Return a partition's number of holders: its claims' pods, at least 1 per claim, or 1 for processes without a claim."""
    claims = claims_on(partition, prepared)
    return sum(max(pods.get(claim, 1), 1) for claim in claims) or int(bool(partition.processes))


def plan_layouts(
    wanted: Sequence[tuple[Device, Rule | None]],
    *,
    prepared: Sequence[PreparedPartition] = (),
    refuse: bool = True,
    pods: Mapping[str, int] | None = None,
    prefer: str = partitioning_placement.PODS,
    resets: Collection[str] = (),
) -> tuple[LayoutPlan | AcceleratorError, ...]:
    """Plan all devices of a node.

    Return one result for each, in order: a plan, or the error that plan_layout would raise. ``resets`` are the UUIDs of
    devices that must be reset independently of their layout.

    Some devices are reset together (``Device.is_reset_with``), and a reset deletes the partitions of all of them. If a
    device of such a group needs a reset, the plan of the first such device contains the steps of the whole group: delete
    all partitions, change all modes, reset once, and create all partitions, also on devices without a rule (None).
    """
    outcomes: list[LayoutPlan | AcceleratorError] = []
    for device, rule in wanted:
        try:
            outcomes.append(
                LayoutPlan(device.uuid, (), device.partitions)
                if rule is None
                else plan_layout(device, rule, prepared=prepared, refuse=refuse, pods=pods, prefer=prefer)
            )
        except AcceleratorError as error:
            outcomes.append(error)
    for group in reset_groups([device for device, _rule in wanted]):
        forced = [number for number in group if wanted[number][0].uuid in resets]
        leaders = [number for number in group if _has_reset(outcomes[number])] or forced
        if leaders and (forced or len(group) > 1):
            members = [(wanted[number][0], outcomes[number]) for number in group]
            leader = leaders[0]
            merged = _merge_group(wanted[leader][0].uuid, members, prepared)
            for number in group:
                plan = outcomes[number]
                if isinstance(plan, LayoutPlan):
                    outcomes[number] = LayoutPlan(plan.device_uuid, (), ())
            outcomes[leader] = merged
            if merged.blockers and refuse:
                device, rule = wanted[leader]
                outcomes[leader] = _in_use(device, rule or Rule(Match(), DYNAMIC), merged.blockers)
    return tuple(outcomes)


def _has_reset(outcome: LayoutPlan | AcceleratorError) -> bool:
    return isinstance(outcome, LayoutPlan) and any(isinstance(step, ResetDevice) for step in outcome.steps)


def reset_groups(devices: Sequence[Device]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of devices that are reset together, in groups, including indirect connections."""
    return groups_of(devices, Device.is_reset_with)


def groups_of(devices: Sequence[Device], is_joined: Callable[[Device, Device], bool]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of devices that a relation joins, in groups, including indirect connections."""
    groups: list[set[int]] = []
    for position, device in enumerate(devices):
        joined = {position}
        joined.update(number for number, other in enumerate(devices) if is_joined(device, other))
        for group in [group for group in groups if group & joined]:
            groups.remove(group)
            joined |= group
        groups.append(joined)
    return tuple(tuple(sorted(group)) for group in groups)


def _merge_group(
    leader: str, members: Sequence[tuple[Device, LayoutPlan | AcceleratorError]], prepared: Sequence[PreparedPartition]
) -> LayoutPlan:
    destroys: list[Step] = []
    modes: list[Step] = []
    creates: list[Step] = []
    blockers: list[Blocker] = []
    for device, outcome in members:
        plan = outcome if isinstance(outcome, LayoutPlan) else LayoutPlan(device.uuid, (), device.partitions)
        destroys.extend(DestroyPartition(device.uuid, each) for each in device.partitions)
        modes.extend(step for step in plan.steps if isinstance(step, SetPartitioning))
        creates.extend(
            CreatePartition(device.uuid, each.profile, each.profile_id, each.placement)
            for each in plan.kept
            if each.uuid
        )
        creates.extend(step for step in plan.steps if isinstance(step, CreatePartition))
        mine = tuple(each for each in prepared if each.device_uuid == device.uuid)
        blockers.extend(_blockers(device, device.partitions, ends_use=True, prepared=mine))
    reset = ResetDevice(tuple(device.uuid for device, _outcome in members))
    return LayoutPlan(leader, (*destroys, *modes, reset, *creates), (), tuple(blockers))


def _mode_steps(device: Device, enabled: bool) -> tuple[Step, ...]:
    state = device.partitioning
    steps: list[Step] = []
    if not state.has_mode:
        return ()
    if state.pending != enabled or (state.enabled != enabled and not state.needs_reset):
        steps.append(SetPartitioning(device.uuid, enabled))
    if state.enabled != enabled and state.needs_reset:
        steps.append(ResetDevice((device.uuid,)))
    return tuple(steps)


def claims_on(partition: Partition, prepared: Sequence[PreparedPartition]) -> tuple[str, ...]:
    """Return the claims that use a partition, among the given claims on its device."""
    found = [
        each.claim
        for each in prepared
        if (each.partition_uuid and each.partition_uuid == partition.uuid)
        or (each.placement is not None and each.placement == partition.placement)
    ]
    return tuple(dict.fromkeys(found))


def _blockers(
    device: Device, destroyed: Sequence[Partition], ends_use: bool, prepared: Sequence[PreparedPartition]
) -> tuple[Blocker, ...]:
    affected = device.partitions if ends_use else destroyed
    blockers = tuple(
        Blocker(device.uuid, each, each.processes, claims_on(each, prepared))
        for each in affected
        if each.processes or claims_on(each, prepared)
    )
    if not ends_use:
        return blockers
    named_claims = {claim for blocker in blockers for claim in blocker.claims}
    named_pids = {process.pid for blocker in blockers for process in blocker.processes}
    whole_device = Blocker(
        device.uuid,
        None,
        tuple(process for process in device.processes if process.pid not in named_pids),
        tuple(dict.fromkeys(each.claim for each in prepared if each.claim not in named_claims)),
    )
    return (*blockers, whole_device) if whole_device.processes or whole_device.claims else blockers


def _in_use(device: Device, rule: Rule, blockers: Sequence[Blocker]) -> InUse:
    return InUse(
        f"The layout {rule.describe()} on {device.describe()} cannot be reached without a change of devices in use: "
        + join_problems(blockers),
        pids=sorted({process.pid for blocker in blockers for process in blocker.processes}),
        claims=tuple(dict.fromkeys(claim for blocker in blockers for claim in blocker.claims)),
        blockers=blockers,
        hint="End the processes, delete the pods that use the claims, choose a layout that does not change these devices, or run the "
        "playbook dra.accelerators.repartition, which takes them out of service first.",
    )
