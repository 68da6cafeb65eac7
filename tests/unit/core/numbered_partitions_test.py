# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Partitions with a number instead of a place: fits are counted, numbers belong to the device, and existing partitions keep theirs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numbered_model as model
import pytest
from dra_driver.core.errors import DoesNotFit, InvalidLayout
from dra_driver.core.model import Device, Partitioning, Placement, Process
from dra_driver.core.partitioning import capacity as partitioning_capacity
from dra_driver.core.partitioning import placement as partitioning_placement
from dra_driver.core.partitioning.layout_plan import CreatePartition, DestroyPartition, plan_layout
from dra_driver.core.partitioning.rules import Match, Rule, WantedPartition
from dra_driver.core.store.device_facts import device_of, document_of
from dra_driver.core.store.prepared_claims import PreparedPartition
from hypothesis import given
from hypothesis import strategies as st

PLACEMENTS = st.builds(Placement, st.integers(0, 7), st.integers(0, 4))
MULTISETS = st.sampled_from(model.multisets())


def wanted(counts: Mapping[str, int]) -> tuple[WantedPartition, ...]:
    return tuple(WantedPartition(name, count) for name, count in counts.items())


def rule(counts: Mapping[str, int]) -> Rule:
    return Rule(Match(), "static", wanted(counts))


def slots_of(draw: st.DataObject, counts: Mapping[str, int]) -> list[model.Slot]:
    names = [name for name, count in counts.items() for _each in range(count)]
    numbers = draw.draw(st.permutations(range(model.NUMBERS)))
    return list(zip(names, numbers))


@given(PLACEMENTS, PLACEMENTS)
def test_placement_numbers_clash_only_if_equal(one: Placement, other: Placement) -> None:
    assert one.overlaps(other) == bool(set(one.slices) & set(other.slices))
    numbers = one.is_number and other.is_number
    assert one.conflicts_with(other) == (one.start == other.start if numbers else one.overlaps(other))
    assert one.conflicts_with(other) == other.conflicts_with(one)
    assert partitioning_capacity.mask(one) == sum(1 << number for number in one.slices)


def test_counted_profiles_excludes_profiles_limited_by_counters() -> None:
    device = model.device()
    assert partitioning_capacity.count_disjoint(device.profiles[0].placements) == model.NUMBERS
    assert partitioning_capacity.counted_profiles(device) == ()
    scarce = tuple(replace(each, maximum=1) for each in device.profiles if each.name == "quarter")
    assert partitioning_capacity.counted_profiles(replace(device, profiles=scarce)) == scarce


def test_totals_use_totals_of_the_device() -> None:
    """No single profile consumes all helpers, so the device's own totals are used."""
    device = model.device()
    assert max(each.capacities["helpers"] * each.maximum for each in device.profiles) < model.TOTALS["helpers"]
    assert dict(partitioning_capacity.totals(device)) == model.TOTALS


@given(st.dictionaries(st.sampled_from(sorted(model.TAKES)), st.integers(1, 5)), st.data())
def test_fits_agrees_with_counted_amounts(counts: Mapping[str, int], data: st.DataObject) -> None:
    device = model.device()
    places = [(model.profile(name), Placement(number, 0)) for name, number in slots_of(data, counts)]
    assert partitioning_capacity.fits(device, places) == model.can_exist(counts)
    if places:
        twice = [*places[:1], (places[-1][0], places[0][1])]
        assert not partitioning_capacity.fits(device, twice), "a number is one partition's"


@given(MULTISETS, MULTISETS, st.data())
def test_plan_layout_keeps_partitions_and_uses_lowest_numbers(
    present: Mapping[str, int], target: Mapping[str, int], data: st.DataObject
) -> None:
    slots = slots_of(data, present)
    device = model.device(slots)
    plan = plan_layout(device, rule(target))
    gone = [step.partition for step in plan.steps if isinstance(step, DestroyPartition)]
    made = [step for step in plan.steps if isinstance(step, CreatePartition)]
    assert plan.steps == (*(step for step in plan.steps if isinstance(step, DestroyPartition)), *made)
    assert Counter(model.counted(gone)) == Counter(present) - Counter(target)
    kept = [each for each in device.partitions if each not in gone]
    assert list(plan.kept) == kept
    assert Counter(each.profile for each in kept) + Counter(step.profile for step in made) == Counter(target)
    numbers = sorted(step.placement.start for step in made)
    free = sorted(set(range(model.NUMBERS)) - {each.placement.start for each in kept})
    assert numbers == free[: len(numbers)]
    assert all(step.placement.is_number for step in made)
    after = model.device([(each.profile, each.placement.start) for each in kept])
    later = replace(
        after, partitions=(*after.partitions, *(model.partition(s.profile, s.placement.start) for s in made))
    )
    assert plan_layout(later, rule(target)).steps == ()


@given(MULTISETS, MULTISETS, st.data())
def test_plan_layout_keeps_held_partitions_first(
    present: Mapping[str, int], target: Mapping[str, int], data: st.DataObject
) -> None:
    slots = slots_of(data, present)
    held = set(data.draw(st.lists(st.sampled_from(slots), unique=True))) if slots else set()
    device = model.device(slots)
    busy = (Process(7, "train"),)
    device = replace(
        device,
        partitions=tuple(
            replace(each, processes=busy if (each.profile, each.placement.start) in held else ())
            for each in device.partitions
        ),
    )
    plan = plan_layout(device, rule(target), refuse=False)
    gone = {
        (step.partition.profile, step.partition.placement.start)
        for step in plan.steps
        if isinstance(step, DestroyPartition)
    }
    lost = Counter(name for name, _number in held) - Counter(target)
    assert Counter(name for name, _number in held & gone) == lost
    assert len(plan.blockers) == sum(lost.values())


@given(st.dictionaries(st.sampled_from(sorted(model.TAKES)), st.integers(1, 6), min_size=1))
def test_arrange_that_does_not_fit_names_missing_amounts(counts: Mapping[str, int]) -> None:
    if model.can_exist(counts):
        assert len(partitioning_placement.arrange(model.device(), wanted(counts))) == sum(counts.values())
        return
    with pytest.raises(DoesNotFit) as refused:
        partitioning_placement.arrange(model.device(), wanted(counts))
    assert "memory slices" not in str(refused.value) and refused.value.blockers


def test_plan_layout_requested_number_replaces_other_partition() -> None:
    """A given number is taken from another partition, as for partitions that claims hold after a reboot."""
    device = model.device([("quarter", 3), ("half", 5)])
    given_ = (WantedPartition("half", 1, 3), WantedPartition("quarter", 2))
    places = {(profile.name, placement.start) for profile, placement in partitioning_placement.arrange(device, given_)}
    assert places == {("half", 3), ("quarter", 0), ("quarter", 1)}
    with pytest.raises(InvalidLayout, match="number 16"):
        partitioning_placement.arrange(device, (WantedPartition("half", 1, 16),))
    with pytest.raises(DoesNotFit, match="number 3"):
        partitioning_placement.arrange(device, (WantedPartition("half", 1, 3), WantedPartition("quarter", 1, 3)))


def test_plan_layout_partition_without_handle_is_replaced() -> None:
    device = model.device()
    device = replace(device, partitions=(model.partition("half", 0, uuid="", compute_instances=0),))
    steps = plan_layout(device, rule({"half": 1})).steps
    assert [type(step) for step in steps] == [DestroyPartition, CreatePartition]


def test_arrange_exhausted_numbers_are_rejected() -> None:
    few = tuple(replace(each, placements=each.placements[:3]) for each in model.device().profiles)
    with pytest.raises(DoesNotFit, match="3 numbers"):
        partitioning_placement.arrange(model.device(profiles=few), (WantedPartition("quarter", 4),))


def test_arrange_many_numbers_is_fast() -> None:
    tiny = replace(model.profile("quarter"), capacities={"cores": 1, "helpers": 0, "memory": 1}, maximum=16)
    many = tuple(replace(tiny, name=f"tiny{number}", profile_id=number) for number in range(4))
    device = model.device(profiles=many)
    began = time.monotonic()
    assert len(partitioning_placement.arrange(device, tuple(WantedPartition(each.name, 4) for each in many))) == 16
    assert time.monotonic() - began < 5


def test_plan_layout_device_without_mode_has_no_mode_step() -> None:
    whole = Rule(Match(), "whole")
    assert plan_layout(model.device(), whole).steps == ()
    assert [type(step) for step in plan_layout(model.device([("half", 0)]), whole).steps] == [DestroyPartition]
    assert [type(step) for step in plan_layout(model.device(), rule({"half": 1})).steps] == [CreatePartition]
    document = document_of(model.device())
    assert document["partitioning"]["has_mode"] is False and device_of(document).partitioning == model.partitioning(
        False
    )


def test_document_of_device_with_mode_is_readable_by_previous_releases() -> None:
    device = model.device(partitioning=Partitioning(True, True, True))
    assert set(document_of(device)["partitioning"]) == {"supported", "enabled", "pending", "needs_reset"}
    assert device_of(document_of(device)).partitioning == device.partitioning


def test_plan_layout_partition_of_claim_is_found_by_number() -> None:
    device: Device = model.device([("half", 4), ("half", 9)])
    held = PreparedPartition("team/train", device.uuid, None, model.IDS["half"], Placement(9, 0))
    plan = plan_layout(device, rule({"half": 1}), prepared=(held,))
    assert [each.placement.start for each in plan.kept] == [9]
