# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pools have as few slices as the limits of the API server allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from board_model import device
from dra_driver.core.dra.resource_slices import COMBINED, SEPARATE, PoolSpec, SliceContent, build_pool, plan_pool
from dra_driver.core.model import CounterSet, Offer, Taint
from dra_driver.core.vendors.nvidia.offers import counter_set, offers
from hypothesis import given
from hypothesis import strategies as st

TAINT = Taint("gpu.nvidia.com/xid", "NoSchedule", "79")
#: For each physical device: its offers, the counters of its set, the counters that each offer consumes, and whether it
#: is tainted.
Shape = tuple[int, int, int, bool]
SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(0, 20), st.booleans()), min_size=1, max_size=24
)
LAYOUTS = st.sampled_from((COMBINED, SEPARATE))


def offers_of(index: int, shape: Shape) -> list[Offer]:
    number, counters, consumed, tainted = shape
    taken = {f"c{counter}": 1 for counter in range(min(counters, consumed))}
    return [
        Offer(
            name=f"gpu-{index}-{position}",
            kind="device",
            device_uuid=f"GPU-{index}",
            dynamic=False,
            profile=None,
            profile_id=None,
            placement=None,
            partition_uuid=None,
            attributes={},
            capacities={"memory": 1},
            counter_set=f"set-{index}" if taken else None,
            consumes=taken,
            taints=(TAINT,) if tainted else (),
        )
        for position in range(number)
    ]


def pool_of(groups: Sequence[Sequence[Offer]], shapes: Sequence[Shape], layout: str) -> PoolSpec:
    return build_pool(
        driver="gpu.nvidia.com",
        pool="node-1",
        node_name="node-1",
        offers=[offer for group in groups for offer in group],
        counter_sets=[
            CounterSet(f"set-{index}", {f"c{counter}": 1 for counter in range(counters)})
            for index, (_number, counters, _consumed, _tainted) in enumerate(shapes)
        ],
        layout=layout,
    )


def counters_in(content: SliceContent) -> int:
    return sum(len(each["counters"]) for each in content.shared_counters)


def consumed_in(content: SliceContent) -> int:
    return sum(len(taken["counters"]) for device in content.devices for taken in device.get("consumesCounters", ()))


def stored(spec: PoolSpec) -> list[dict[str, Any]]:
    """Return the slices as an API server returns them after the first publication."""
    found = []
    for number, write in enumerate(plan_pool(spec, ()).writes):
        assert write.body is not None
        metadata = {
            "name": f"{write.body['metadata']['generateName']}{number}",
            "resourceVersion": "1",
            "uid": f"{number}",
        }
        found.append({**write.body, "metadata": metadata})
    return found


@given(SHAPES, LAYOUTS)
def test_build_pool_is_within_api_limits(shapes: list[Shape], layout: str) -> None:
    groups = [offers_of(*each) for each in enumerate(shapes)]
    spec = pool_of(groups, shapes, layout)
    for content in spec.slices:
        # 64 is the limit with a taint, which each device can get.
        assert len(content.devices) <= 64
        assert len(content.shared_counters) <= 8
        if layout == SEPARATE:
            assert not (content.devices and content.shared_counters)
            continue
        # Kubernetes 1.34: counters of all sets, consumed counters of all devices, and the sets in the slice of their
        # devices.
        assert counters_in(content) <= 32
        assert consumed_in(content) <= 1024
        used = {taken["counterSet"] for device in content.devices for taken in device.get("consumesCounters", ())}
        assert {each["name"] for each in content.shared_counters} == used


@given(SHAPES, LAYOUTS)
def test_build_pool_has_each_device_once_in_the_order_of_the_offers(shapes: list[Shape], layout: str) -> None:
    groups = [offers_of(*each) for each in enumerate(shapes)]
    spec = pool_of(groups, shapes, layout)
    names = [device["name"] for content in spec.slices for device in content.devices]
    assert names == [offer.name for group in groups for offer in group]
    sets = [each["name"] for content in spec.slices for each in content.shared_counters]
    assert sets == [group[0].counter_set for group in groups if group[0].counter_set]
    assert spec == pool_of(groups, shapes, layout)


@given(SHAPES, LAYOUTS)
def test_build_pool_slice_has_no_room_for_next_device(shapes: list[Shape], layout: str) -> None:
    groups = [offers_of(*each) for each in enumerate(shapes)]
    slices = [each for each in pool_of(groups, shapes, layout).slices if each.devices]
    for content, following in zip(slices, slices[1:]):
        physical = following.devices[0]["name"].rsplit("-", 1)[0]
        devices = tuple(each for each in following.devices if each["name"].rsplit("-", 1)[0] == physical)
        sets = following.shared_counters[:1] if devices[0].get("consumesCounters") else ()
        joined = SliceContent((*content.devices, *devices), (*content.shared_counters, *sets))
        too_many = len(joined.devices) > 64
        if layout == COMBINED:
            too_many |= counters_in(joined) > 32 or len(joined.shared_counters) > 8 or consumed_in(joined) > 1024
        assert too_many


@given(SHAPES, LAYOUTS, st.data())
def test_plan_pool_writes_one_slice_for_a_change_of_one_device(
    shapes: list[Shape], layout: str, data: st.DataObject
) -> None:
    groups = [offers_of(*each) for each in enumerate(shapes)]
    before = pool_of(groups, shapes, layout)
    ill = data.draw(st.integers(0, len(groups) - 1))
    groups[ill] = [
        replace(offer, taints=(*offer.taints, Taint("gpu.nvidia.com/lost", "NoExecute"))) for offer in groups[ill]
    ]
    plan = plan_pool(pool_of(groups, shapes, layout), stored(before))
    assert [write.verb for write in plan.writes] == ["update"]
    assert plan.generation == 1


@pytest.mark.parametrize(
    ("layout", "whole", "partitions"),
    [
        (SEPARATE, [(0, 16)], [(8, 0), (8, 0), *[(0, 52)] * 8]),
        (COMBINED, [(0, 16)], [(2, 52)] * 8),
    ],
)
def test_build_pool_of_sixteen_gpus_has_these_slices(
    layout: str, whole: list[tuple[int, int]], partitions: list[tuple[int, int]]
) -> None:
    gpus = [device("h100-80", index) for index in range(16)]
    for dynamic, wanted in ((False, whole), (True, partitions)):
        spec = build_pool(
            driver="gpu.nvidia.com",
            pool="node-1",
            node_name="node-1",
            offers=[offer for gpu in gpus for offer in offers(gpu, dynamic=dynamic)],
            counter_sets=[counter_set(gpu) for gpu in gpus] if dynamic else (),
            layout=layout,
        )
        assert [(len(each.shared_counters), len(each.devices)) for each in spec.slices] == wanted


def test_build_pool_combined_with_too_many_consumed_counters_names_the_limit() -> None:
    shape = (60, 20, 20, False)
    with pytest.raises(ValueError, match=r"Pool node-1: the devices of one slice consume 1200 counters.* 1024"):
        pool_of([offers_of(0, shape)], [shape], COMBINED)
