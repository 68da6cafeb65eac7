# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The layout planner finds the minimum among all possible arrangements, and the executor rolls back after a failure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import board_model
import pytest
from board_model import Place, all_states, board_names, can_exist, device, multiset
from dra_driver.core.errors import AcceleratorError, DoesNotFit, InUse, InvalidLayout, LayoutFailed, Unsupported
from dra_driver.core.model import Device, Process
from dra_driver.core.partitioning.layout_execute import execute
from dra_driver.core.partitioning.layout_plan import (
    CreatePartition,
    DestroyPartition,
    LayoutPlan,
    ResetDevice,
    SetPartitioning,
    plan_layout,
    plan_layouts,
    reset_groups,
)
from dra_driver.core.partitioning.rules import Match, Rule, WantedPartition
from dra_driver.core.store.prepared_claims import PreparedPartition
from hypothesis import given
from hypothesis import strategies as st
from memory_backend import MemoryBackend

MIG_BOARDS = board_names()
Multiset = tuple[tuple[int, int], ...]


@cache
def states_by_multiset(name: str) -> dict[Multiset, list[frozenset[Place]]]:
    found: dict[Multiset, list[frozenset[Place]]] = defaultdict(list)
    for state in all_states(name):
        found[multiset(state)].append(frozenset(state))
    return found


def rule_of(gpu: Device, wanted: Multiset) -> Rule:
    names = {profile.profile_id: profile.name for profile in gpu.profiles}
    return Rule(Match(), "static", tuple(WantedPartition(names[profile], count) for profile, count in wanted))


def static(**counts: int) -> Rule:
    return Rule(Match(), "static", tuple(WantedPartition(name, count) for name, count in counts.items()))


def wanted(*partitions: tuple[Any, ...]) -> Rule:
    return Rule(Match(), "static", tuple(WantedPartition(*each) for each in partitions))


def destroyed(plan: LayoutPlan) -> set[Place]:
    return {
        (step.partition.profile_id, step.partition.placement.start)
        for step in plan.steps
        if isinstance(step, DestroyPartition)
    }


def check_minimum(name: str, present: tuple[Place, ...], target: Multiset) -> None:
    gpu = device(name, enabled=True, places=present)
    candidates = states_by_multiset(name).get(target, [])
    if not candidates:
        with pytest.raises(DoesNotFit):
            plan_layout(gpu, rule_of(gpu, target))
        return
    least = min(len(set(present) - candidate) for candidate in candidates)
    plan = plan_layout(gpu, rule_of(gpu, target))
    assert len(destroyed(plan)) == least
    backend = MemoryBackend(name, gpu)
    execute(backend, plan)
    result = tuple((each.profile_id, each.placement.start) for each in backend.present.partitions)
    assert multiset(result) == target
    assert set(result) >= set(present) - destroyed(plan)
    assert plan_layout(backend.present, rule_of(gpu, target)).steps == ()


def test_plan_layout_smallest_board_every_change_is_minimal() -> None:
    for present in all_states("a30"):
        for target in states_by_multiset("a30"):
            check_minimum("a30", present, target)


@pytest.mark.parametrize("name", MIG_BOARDS)
@given(data=st.data())
def test_plan_layout_changes_are_minimal(name: str, data: st.DataObject) -> None:
    present = data.draw(st.sampled_from(all_states(name)))
    target = data.draw(st.sampled_from(sorted(states_by_multiset(name))))
    check_minimum(name, present, target)


@pytest.mark.parametrize("name", MIG_BOARDS)
@given(data=st.data())
def test_plan_layout_any_request_is_planned_or_rejected(name: str, data: st.DataObject) -> None:
    present = data.draw(st.sampled_from(all_states(name)))
    ids = [entry["id"] for entry in board_model.board(name)["mig"]["profiles"]]
    counts = data.draw(st.dictionaries(st.sampled_from(ids), st.integers(1, 5), min_size=1, max_size=4))
    check_minimum(name, present, tuple(sorted(counts.items())))


@pytest.mark.parametrize("name", MIG_BOARDS)
@given(data=st.data())
def test_plan_layout_requested_placements_are_used(name: str, data: st.DataObject) -> None:
    present = data.draw(st.sampled_from(all_states(name)))
    target = data.draw(st.sampled_from([state for state in all_states(name) if state]))
    pinned = frozenset(data.draw(st.sets(st.sampled_from(target))))
    names = {profile.profile_id: profile.name for profile in device(name).profiles}
    gpu = device(name, enabled=True, places=present)
    loose = multiset(tuple(each for each in target if each not in pinned))
    rule = wanted(
        *((names[profile], 1, start) for profile, start in pinned), *((names[profile], n) for profile, n in loose)
    )
    candidates = [each for each in states_by_multiset(name)[multiset(target)] if each >= pinned]
    plan = plan_layout(gpu, rule)
    assert len(destroyed(plan)) == min(len(set(present) - each) for each in candidates)
    backend = MemoryBackend(name, gpu)
    execute(backend, plan)
    assert pinned <= {(each.profile_id, each.placement.start) for each in backend.present.partitions}


@pytest.mark.parametrize("name", MIG_BOARDS)
@given(data=st.data())
def test_plan_layout_held_partitions_are_kept_if_possible(name: str, data: st.DataObject) -> None:
    present = data.draw(st.sampled_from([state for state in all_states(name) if state]))
    target = data.draw(st.sampled_from(sorted(states_by_multiset(name))))
    held = frozenset(data.draw(st.sets(st.sampled_from(present))))
    gpu = device(name, enabled=True, places=present)
    gpu = replace(
        gpu,
        partitions=tuple(
            replace(each, processes=(Process(7, "train"),)) if (each.profile_id, each.placement.start) in held else each
            for each in gpu.partitions
        ),
    )
    costs = [(len(held - each), len(set(present) - each)) for each in states_by_multiset(name)[target]]
    plan = plan_layout(gpu, rule_of(gpu, target), refuse=False)
    assert (len(destroyed(plan) & held), len(destroyed(plan))) == min(costs)
    if min(costs)[0]:
        assert len(plan.blockers) == min(costs)[0]
        with pytest.raises(InUse) as refused:
            plan_layout(gpu, rule_of(gpu, target))
        assert refused.value.pids == (7,) and "7 (train)" in str(refused.value)
    else:
        assert plan.blockers == ()


def test_plan_layout_demo_layout_on_empty_gpu() -> None:
    plan = plan_layout(device("h100-80"), static(**{"3g.40gb": 1, "1g.10gb": 4}))
    assert isinstance(plan.steps[0], SetPartitioning)
    made = [(step.profile, step.placement.start) for step in plan.steps if isinstance(step, CreatePartition)]
    assert made[0] == ("3g.40gb", 4)
    assert sorted(made[1:]) == [("1g.10gb", start) for start in (0, 1, 2, 3)]


def test_plan_layout_claim_on_needed_partition_is_named() -> None:
    gpu = device("h100-80", places=((9, 4), (19, 0)))
    held = PreparedPartition("team/train", gpu.uuid, gpu.partitions[1].uuid, 9, gpu.partitions[1].placement)
    other = replace(held, claim="team/elsewhere", device_uuid="GPU-other")
    with pytest.raises(InUse) as refused:
        plan_layout(gpu, static(**{"7g.80gb": 1}), prepared=(held, other))
    assert refused.value.claims == ("team/train",) and refused.value.pids == ()
    assert "3g.40gb at 4:4" in str(refused.value) and "team/train" in str(refused.value)
    assert plan_layout(gpu, static(**{"3g.40gb": 1}), prepared=(held,)).kept == (gpu.partitions[1],)


def test_plan_layout_claim_on_whole_device_blocks_mode_change() -> None:
    gpu = device("h100-80")
    held = PreparedPartition("team/whole", gpu.uuid)
    with pytest.raises(InUse) as refused:
        plan_layout(gpu, static(**{"1g.10gb": 1}), prepared=(held,))
    assert refused.value.claims == ("team/whole",)
    assert plan_layout(gpu, Rule(Match(), "whole"), prepared=(held,)).steps == ()


def test_plan_layout_process_on_device_blocks_mode_change() -> None:
    gpu = device("h100-80", processes=(Process(41, "python"),))
    with pytest.raises(InUse) as refused:
        plan_layout(gpu, static(**{"1g.10gb": 1}))
    assert refused.value.pids == (41,)


def test_plan_layout_instance_without_compute_instance_is_replaced() -> None:
    gpu = device("h100-80", places=((19, 0),))
    empty = replace(gpu.partitions[0], uuid="", compute_instance_id=None, compute_instances=0)
    plan = plan_layout(replace(gpu, partitions=(empty,)), static(**{"1g.10gb": 7}))
    assert [type(step) for step in plan.steps] == [DestroyPartition] + [CreatePartition] * 7


def test_plan_layout_empty_instance_is_deleted_before_used_one() -> None:
    gpu = device("h100-80", places=((19, 0), (19, 4)))
    first, second = gpu.partitions
    gpu = replace(gpu, partitions=(replace(first, uuid="", compute_instance_id=None, compute_instances=0), second))
    plan = plan_layout(gpu, static(**{"1g.10gb": 1, "3g.40gb": 1}))
    assert second in plan.kept and destroyed(plan) == {(19, 0)}


@pytest.mark.parametrize(
    ("state", "rule", "kinds"),
    [
        ((False, False), static(**{"1g.5gb": 1}), [SetPartitioning, ResetDevice, CreatePartition]),
        ((False, True), static(**{"1g.5gb": 1}), [ResetDevice, CreatePartition]),
        ((True, False), static(**{"1g.5gb": 1}), [SetPartitioning, CreatePartition]),
        ((True, True), Rule(Match(), "whole"), [SetPartitioning, ResetDevice]),
        ((False, True), Rule(Match(), "whole"), [SetPartitioning]),
        ((False, False), Rule(Match(), "dynamic"), [SetPartitioning, ResetDevice]),
        ((True, True), Rule(Match(), "dynamic"), []),
    ],
)
def test_plan_layout_mode_change_with_reset(state: tuple[bool, bool], rule: Rule, kinds: list[type]) -> None:
    gpu = device("a100-40", enabled=state[0], pending=state[1])
    plan = plan_layout(gpu, rule)
    assert [type(step) for step in plan.steps] == kinds
    backend = MemoryBackend("a100-40", gpu)
    execute(backend, plan)
    assert plan_layout(backend.present, rule).steps == ()


def test_plan_layout_dynamic_without_reset_keeps_mode() -> None:
    for gpu in (device("h100-80"), device("h100-80", enabled=False, pending=False), device("l4")):
        assert plan_layout(gpu, Rule(Match(), "dynamic")).steps == ()


@pytest.mark.parametrize("board", ["h100-80", "a100-40"])
def test_plan_layout_dynamic_keeps_only_partitions_of_claims(board: str) -> None:
    gpu = device(board, places=((9, 0), (19, 4), (19, 5)))
    claimed = gpu.partitions[1]
    held = PreparedPartition("team/train", gpu.uuid, claimed.uuid, 19, claimed.placement, created=True)
    plan = plan_layout(gpu, Rule(Match(), "dynamic"), prepared=[held])
    assert plan.kept == (claimed,)
    assert destroyed(plan) == {(9, 0), (19, 5)} and all(isinstance(step, DestroyPartition) for step in plan.steps)
    backend = MemoryBackend(board, gpu)
    execute(backend, plan)
    assert plan_layout(backend.present, Rule(Match(), "dynamic"), prepared=[held]).steps == ()


def test_plan_layout_dynamic_claim_on_static_partition_is_rejected() -> None:
    gpu = device("h100-80", places=((9, 0),))
    held = PreparedPartition("team/train", gpu.uuid, gpu.partitions[0].uuid, 9, gpu.partitions[0].placement)
    with pytest.raises(InUse, match="team/train"):
        plan_layout(gpu, Rule(Match(), "dynamic"), prepared=[held])


def test_plan_layout_whole_deletes_all_partitions() -> None:
    gpu = device("h100-80", places=((9, 0), (9, 4)))
    plan = plan_layout(gpu, Rule(Match(), "whole"))
    assert [type(step) for step in plan.steps] == [DestroyPartition, DestroyPartition, SetPartitioning]


def test_plan_layout_unsupported_device_is_rejected() -> None:
    assert plan_layout(device("l4"), Rule(Match(), "whole")).steps == ()
    with pytest.raises(Unsupported, match="NVIDIA L4"):
        plan_layout(device("l4"), static(**{"1g.10gb": 1}))


@pytest.mark.parametrize(
    ("rule", "error", "text"),
    [
        (static(**{"9g.10gb": 1}), InvalidLayout, "no profile '9g.10gb'.*3g.40gb"),
        (wanted(("3g.40gb", 1, 2)), InvalidLayout, "start at memory slice 2.*0, 4"),
        (static(**{"3g.40gb": 3}), DoesNotFit, "takes 2 × 3g.40gb at most, 3"),
        (static(**{"3g.40gb": 2, "1g.10gb": 1}), DoesNotFit, "needs 9 memory slices, the board has 8"),
        (static(**{"1g.10gb+me": 1, "7g.80gb": 1}), DoesNotFit, "memory slices"),
        (static(**{"2g.20gb": 3, "1g.20gb": 1, "1g.10gb": 1}), DoesNotFit, "memory slices"),
        (static(**{"4g.40gb": 1, "2g.20gb": 2}), DoesNotFit, "one less of"),
    ],
)
def test_plan_layout_that_does_not_fit_is_explained(rule: Rule, error: type[AcceleratorError], text: str) -> None:
    with pytest.raises(error, match=text) as refused:
        plan_layout(device("h100-80"), rule)
    if isinstance(refused.value, DoesNotFit):
        assert refused.value.blockers


def test_plan_layout_missing_engines_are_named() -> None:
    with pytest.raises(DoesNotFit, match="2 jpegEngines of 1, 2 ofaEngines of 1"):
        plan_layout(device("a30"), static(**{"1g.6gb+me": 1, "2g.12gb+me": 1}))


def test_plan_layout_profile_spellings_are_equal() -> None:
    gpu = device("a100-40", places=((19, 6),))
    for spelling in ("1g.5gb", "1c.1g.5gb", "MIG 1g.5gb"):
        assert plan_layout(gpu, static(**{spelling: 1})).steps == ()


@pytest.mark.parametrize("name", MIG_BOARDS)
@given(data=st.data())
def test_execute_failure_at_any_call_rolls_back(name: str, data: st.DataObject) -> None:
    present = data.draw(st.sampled_from(all_states(name)))
    on = bool(present) or data.draw(st.booleans())
    gpu = device(name, enabled=on, places=present)
    target = data.draw(st.sampled_from(sorted(states_by_multiset(name))))
    rule = data.draw(st.sampled_from([rule_of(gpu, target), Rule(Match(), "whole")]))
    plan = plan_layout(gpu, rule)
    fail_at = data.draw(st.integers(0, max(len(plan.steps) - 1, 0)))
    backend = MemoryBackend(name, gpu, fail_at)
    before = backend.state()
    seen: list[str] = []
    if not plan.steps:
        assert execute(backend, plan) == () and backend.calls == []
        return
    with pytest.raises(LayoutFailed) as failed:
        execute(backend, plan, lambda result: seen.append(result.step.describe()))
    assert backend.state() == before
    assert failed.value.code == "injected" and failed.value.not_undone == ()
    assert plan.steps[fail_at].describe() in str(failed.value)
    assert seen == [step.describe() for step in plan.steps[:fail_at]]


@pytest.mark.parametrize("error", [DoesNotFit("still taken"), OSError("still taken")])
def test_execute_failed_rollback_is_reported(error: Exception) -> None:
    gpu = device("h100-80", places=((9, 4),))
    plan = plan_layout(gpu, static(**{"4g.40gb": 1, "2g.20gb": 1}))
    backend = MemoryBackend("h100-80", gpu, fail_at=2)
    original = backend.create_partition

    def create(uuid: str, profile_id: int, placement: Any) -> Any:
        if profile_id == 9:
            raise error
        return original(uuid, profile_id, placement)

    backend.create_partition = create  # type: ignore[method-assign]
    with pytest.raises(LayoutFailed, match=r"Could not be undone: create 3g.40gb at 4:4") as failed:
        execute(backend, plan)
    assert len(failed.value.not_undone) == 1 and failed.value.undone


def test_execute_unchanged_mode_fails() -> None:
    gpu = device("h100-80")
    plan = plan_layout(gpu, static(**{"1g.10gb": 1}))
    backend = MemoryBackend("h100-80", gpu)
    backend.set_partitioning = lambda uuid, enabled: None  # type: ignore[method-assign]
    with pytest.raises(LayoutFailed, match="still off"):
        execute(backend, plan)


def linked(board: str, links: dict[int, tuple[int, ...]], **changes: Any) -> list[Device]:
    """Return GPUs of one board. ``links`` has the directly linked ones, by index."""
    gpus = [device(board, index, **changes) for index in range(4)]
    return [replace(gpu, linked=tuple(gpus[other].pci_address for other in links.get(gpu.index, ()))) for gpu in gpus]


def test_plan_layouts_reset_includes_linked_devices() -> None:
    gpus = linked("a30", {0: (1,), 1: (0, 2), 2: (1,)})
    rule = static(**{"1g.6gb": 1})
    first, *others = plan_layouts([(gpus[0], None), (gpus[1], rule), (gpus[2], None), (gpus[3], rule)])
    assert isinstance(first, LayoutPlan) and first.steps == ()
    merged, second, alone = others
    assert isinstance(merged, LayoutPlan) and isinstance(second, LayoutPlan) and isinstance(alone, LayoutPlan)
    assert [step for step in merged.steps if isinstance(step, ResetDevice)] == [
        ResetDevice(tuple(gpu.uuid for gpu in gpus[:3]))
    ]
    assert second.steps == ()
    assert ResetDevice((gpus[3].uuid,)) in alone.steps


def test_plan_layouts_devices_that_reset_alone_are_independent() -> None:
    gpus = linked("a30", {0: (1,), 1: (0,)}, resets_alone=True)
    plans = plan_layouts([(gpu, static(**{"1g.6gb": 1}) if gpu.index == 1 else None) for gpu in gpus])
    assert [isinstance(plan, LayoutPlan) and bool(plan.steps) for plan in plans] == [False, True, False, False]
    assert isinstance(plans[1], LayoutPlan) and ResetDevice((gpus[1].uuid,)) in plans[1].steps


def test_plan_layouts_switched_devices_are_reset_together() -> None:
    gpus = linked("a30", {}, switched=True)
    assert reset_groups([*gpus[:3], replace(gpus[3], switched=False)]) == ((0, 1, 2), (3,))
    assert reset_groups([replace(gpu, resets_alone=True) for gpu in gpus]) == ((0,), (1,), (2,), (3,))


def test_plan_layouts_linked_without_reset_are_independent() -> None:
    gpus = linked("a30", {0: (1,), 1: (0,)}, enabled=True)
    rule = static(**{"1g.6gb": 1})
    plans = plan_layouts([(gpu, rule) for gpu in gpus])
    assert [[type(step) for step in plan.steps] for plan in plans if isinstance(plan, LayoutPlan)] == [
        [CreatePartition]
    ] * 4


def test_plan_layouts_error_affects_only_its_device() -> None:
    gpus = linked("a30", {0: (1,), 1: (0,)})
    bad, good = static(**{"9g.9gb": 1}), static(**{"1g.6gb": 1})
    outcomes = plan_layouts([(gpus[0], bad), (gpus[1], good), (gpus[2], bad), (gpus[3], None)])
    assert isinstance(outcomes[0], InvalidLayout) and isinstance(outcomes[2], InvalidLayout)
    assert isinstance(outcomes[1], LayoutPlan)
    assert ResetDevice((gpus[0].uuid, gpus[1].uuid)) in outcomes[1].steps
    assert not any(isinstance(step, SetPartitioning) and step.device_uuid == gpus[0].uuid for step in outcomes[1].steps)


def test_plan_layouts_claim_on_linked_device_blocks_reset() -> None:
    gpus = linked("a30", {0: (1,), 1: (0,)})
    gpus[0] = replace(device("a30", 0, places=((5, 0),)), linked=gpus[0].linked)
    held = PreparedPartition("team/train", gpus[0].uuid, gpus[0].partitions[0].uuid)
    wanted_here: list[tuple[Device, Rule | None]] = [(gpus[0], None), (gpus[1], static(**{"1g.6gb": 1}))]
    _first, refused = plan_layouts(wanted_here, prepared=[held])
    assert isinstance(refused, InUse) and refused.claims == ("team/train",)
    _first, shown = plan_layouts(wanted_here, prepared=[held], refuse=False)
    assert isinstance(shown, LayoutPlan) and len(shown.blockers) == 1
    kinds = [(type(step).__name__, getattr(step, "device_uuid", "")) for step in shown.steps]
    assert kinds == [
        ("DestroyPartition", gpus[0].uuid),
        ("SetPartitioning", gpus[1].uuid),
        ("ResetDevice", ""),
        ("CreatePartition", gpus[0].uuid),
        ("CreatePartition", gpus[1].uuid),
    ]


def test_plan_to_dict_has_steps() -> None:
    gpu = device("a100-40", enabled=False, places=())
    plan = plan_layout(gpu, static(**{"1g.5gb": 1})).to_dict()
    assert [step["step"] for step in plan["steps"]] == ["set_partitioning", "reset_device", "create_partition"]
    assert plan["steps"][2]["profile"] == "1g.5gb" and plan["blockers"] == []
    assert can_exist("a100-40", ((19, plan["steps"][2]["start"]),))
