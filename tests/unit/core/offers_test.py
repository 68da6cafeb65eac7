# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The published devices of a GPU, whose counters admit exactly the partitions that the hardware supports."""

from __future__ import annotations

from dataclasses import replace

import board_model
import pytest
from board_model import board_names, can_exist, device
from dra_driver.core.dra.resource_slices import build_pool
from dra_driver.core.health.conditions import Severity, Sign
from dra_driver.core.model import Health, Offer, Partitioning, Passthrough
from dra_driver.core.vendors.nvidia.offers import counter_set, offers
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.order_model import MIXES, served, trace

MIG_BOARDS = board_names()


#: Seeds, and the number of claims on eight GPUs in each mix of profiles.
SEEDS, CLAIMS = range(4), 400


@pytest.mark.parametrize("name", MIG_BOARDS)
def test_offers_order_rejects_no_more_claims_than_name_order(name: str) -> None:
    """Compare with the order of names, in which NVIDIA's driver publishes them (GKP/driver.go: sorted). With few places both are equal."""
    gpu = replace(device(name), partitioning=Partitioning(True, True, True))
    ours, counters = offers(gpu, True), counter_set(gpu).counters
    by_name = sorted(ours, key=lambda offer: offer.name)
    sizes = {each.name: each.size for each in gpu.profiles if not set("+-") & set(each.name)}
    served_by = {"ours": 0, "names": 0}
    for mix in MIXES:
        for seed in SEEDS:
            events = trace(sizes, gpu.memory_slices, mix, seed=seed, claims=CLAIMS)
            served_by["ours"] += served(ours, counters, events)
            served_by["names"] += served(by_name, counters, events)
    assert served_by["ours"] >= served_by["names"]
    if gpu.memory_slices == 8:
        assert served_by["ours"] > served_by["names"], "the holes that it leaves are no larger"


def place(offer: Offer) -> tuple[int, int]:
    assert offer.profile_id is not None and offer.placement is not None
    return offer.profile_id, offer.placement.start


def accepted(counters: dict[str, int], chosen: tuple[Offer, ...]) -> bool:
    left = dict(counters)
    for offer in chosen:
        for name, amount in offer.consumes.items():
            left[name] -= amount
            if left[name] < 0:
                return False
    return True


@pytest.mark.parametrize("name", MIG_BOARDS)
def test_counters_admit_exactly_possible_partitions(name: str) -> None:
    gpu = device(name, enabled=True)
    possible = sorted((offer for offer in offers(gpu, dynamic=True) if offer.kind == "partition"), key=place)
    counters = dict(counter_set(gpu).counters)
    frontier: list[tuple[tuple[Offer, ...], int]] = [((), 0)]
    seen = 0
    while frontier:
        chosen, position = frontier.pop()
        for index in range(position, len(possible)):
            larger = (*chosen, possible[index])
            places = tuple(place(offer) for offer in larger)
            fits = accepted(counters, larger)
            assert fits == can_exist(name, places), places
            if fits:
                seen += 1
                frontier.append((larger, index + 1))
    assert seen + 1 == len(board_model.all_states(name))


@pytest.mark.parametrize("name", MIG_BOARDS)
def test_whole_gpu_excludes_all_partitions(name: str) -> None:
    gpu = device(name)
    gpu = replace(gpu, partitioning=replace(gpu.partitioning, needs_reset=False))
    *possible, whole = offers(gpu, dynamic=True)
    assert whole.kind == "device"
    counters = dict(counter_set(gpu).counters)
    assert accepted(counters, (whole,))
    assert not any(accepted(counters, (whole, offer)) for offer in possible)


@pytest.mark.parametrize("name", MIG_BOARDS)
@given(data=st.data())
def test_offers_with_adopted_partitions_are_those_that_fit(name: str, data: st.DataObject) -> None:
    states = board_model.all_states(name)
    adopted = data.draw(st.sampled_from(states))
    gpu = device(name, enabled=True, places=adopted)
    published = offers(gpu, dynamic=True)
    static = [offer for offer in published if offer.partition_uuid]
    assert {place(offer) for offer in static} == set(adopted)
    assert all(not offer.consumes and not offer.dynamic for offer in static)
    counters = dict(counter_set(gpu, owned=()).counters)
    possible = [offer for offer in published if offer.kind == "partition" and offer.dynamic]
    chosen: tuple[Offer, ...] = ()
    for offer in data.draw(st.permutations(possible)):
        if accepted(counters, (*chosen, offer)):
            chosen = (*chosen, offer)
            assert can_exist(name, (*adopted, *map(place, chosen)))
        else:
            assert not can_exist(name, (*adopted, *map(place, chosen), place(offer)))
    assert any(offer.kind == "device" for offer in published) == (not adopted and not gpu.partitioning.needs_reset)


@pytest.mark.parametrize("name", MIG_BOARDS)
@given(data=st.data())
def test_offers_partitions_of_claims_change_nothing(name: str, data: st.DataObject) -> None:
    state = data.draw(st.sampled_from(board_model.all_states(name)))
    before = device(name, enabled=True)
    after = device(name, enabled=True, places=state)
    owned = [partition.key for partition in after.partitions]
    assert offers(after, True, owned) == offers(before, True)
    assert counter_set(after, owned) == counter_set(before, ())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MIG_BOARDS)
def test_offers_faulty_device_are_unchanged(name: str, dynamic: bool) -> None:
    gpu = device(name, enabled=True, places=board_model.all_states(name)[-1])
    ill = replace(gpu, health=Health((Sign("gpu-lost", Severity.FAILED, "It is lost."),)))
    assert offers(ill, dynamic) == offers(gpu, dynamic)


def test_offers_have_vendor_names_and_attributes() -> None:
    gpu = device("h100-80", index=1)
    published = {offer.name: offer for offer in offers(gpu, dynamic=True)}
    whole = published["gpu-1"]
    assert whole.attributes["type"] == "gpu" and whole.attributes["uuid"] == gpu.uuid
    assert set(whole.attributes) == {
        "type",
        "uuid",
        "productName",
        "brand",
        "architecture",
        "cudaComputeCapability",
        "driverVersion",
        "cudaDriverVersion",
        "addressingMode",
        "resource.kubernetes.io/pciBusID",
        "resource.kubernetes.io/pcieRoot",
        "resource.kubernetes.io/numaNode",
    }
    assert whole.capacities["memory"] == gpu.memory_bytes and whole.capacities["multiprocessors"] == 132
    two = published["gpu-1-mig-2g20gb-14-4"]
    assert two.attributes["type"] == "mig" and two.attributes["profile"] == "2g.20gb"
    assert two.attributes["parentUUID"] == gpu.uuid and "uuid" not in two.attributes
    assert two.counter_set == "gpu-1-counter-set" and two.partition_uuid is None
    assert two.consumes == {
        "multiprocessors": 32,
        "copy-engines": 2,
        "decoders": 2,
        "jpeg-engines": 2,
        "memory": 20096 * 1024 * 1024,
        "memory-slice-4": 1,
        "memory-slice-5": 1,
    }
    assert "gpu-1-mig-1g10gb-me-20-3" in published
    assert "gpu-0-mig-1g24gb-me-67-9" in {offer.name for offer in offers(device("rtx-pro-6000"), dynamic=True)}
    assert "gpu-0-mig-1g24gb-meall-65-9" in {offer.name for offer in offers(device("rtx-pro-6000"), dynamic=True)}


def test_first_fit_uses_least_disruptive_placement() -> None:
    published = [offer for offer in offers(device("h100-80"), dynamic=True) if offer.kind == "partition"]
    starts = {
        profile: [offer.placement.start for offer in published if offer.profile == profile and offer.placement]
        for profile in ("1g.10gb", "2g.20gb", "3g.40gb")
    }
    assert starts["1g.10gb"][:3] == [6, 4, 5]
    assert starts["2g.20gb"][0] == 4
    assert starts["3g.40gb"] == [4, 0]
    assert published[0].profile == "1g.10gb"
    assert published[-1].profile == "7g.80gb"


def test_offers_gpu_without_partitioning_is_whole() -> None:
    for dynamic in (False, True):
        (only,) = offers(device("l4"), dynamic)
        assert (only.name, only.kind, only.counter_set, dict(only.consumes)) == ("gpu-0", "device", None, {})
        assert dict(only.capacities) == {"memory": device("l4").memory_bytes}


def test_offers_static_partitions_have_uuid_and_slices() -> None:
    gpu = device("a100-40", places=((9, 4), (19, 0)))
    published = offers(gpu, dynamic=False)
    assert [offer.name for offer in published] == ["gpu-0-mig-1g5gb-19-0", "gpu-0-mig-3g20gb-9-4"]
    three = published[1]
    assert three.attributes["uuid"] == three.partition_uuid == gpu.partitions[1].uuid
    assert {name for name in three.capacities if name.startswith("memorySlice")} == {
        f"memorySlice{n}" for n in (4, 5, 6, 7)
    }
    assert three.counter_set is None


def test_offers_instance_without_compute_instance_consumes_only() -> None:
    gpu = device("h100-80", places=((19, 0),))
    gpu = replace(gpu, partitions=(replace(gpu.partitions[0], uuid="", compute_instance_id=None, compute_instances=0),))
    assert offers(gpu, dynamic=False) == ()
    published = offers(gpu, dynamic=True)
    assert not any(offer.placement and 0 in offer.placement.slices for offer in published)
    assert published and not any(offer.kind == "device" for offer in published)


def test_offers_mode_change_with_reset_keeps_current_mode() -> None:
    off = offers(device("a100-80"), dynamic=True)
    assert [offer.name for offer in off] == ["gpu-0"] and off[0].counter_set is None
    on = offers(device("a100-80", enabled=True), dynamic=True)
    assert on and all(offer.kind == "partition" for offer in on)


@pytest.mark.parametrize("name", MIG_BOARDS)
@pytest.mark.parametrize("layout", ["separate", "combined"])
def test_pool_of_every_board_is_within_api_limits(name: str, layout: str) -> None:
    gpus = [device(name, index) for index in range(8)]
    for dynamic in (False, True):
        published = [offer for gpu in gpus for offer in offers(gpu, dynamic)]
        build_pool(
            driver="gpu.nvidia.com",
            pool="node-1",
            node_name="node-1",
            offers=published,
            counter_sets=[counter_set(gpu) for gpu in gpus],
            layout=layout,
        )


@pytest.mark.parametrize("name", MIG_BOARDS)
@given(data=st.data())
def test_pool_of_static_partitions_is_within_api_limits(name: str, data: st.DataObject) -> None:
    state = data.draw(st.sampled_from(board_model.all_states(name)))
    published = offers(device(name, enabled=True, places=state), dynamic=False)
    assert len(published) == len(state)
    build_pool(driver="gpu.nvidia.com", pool="n", node_name="n", offers=published)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("board", board_names())
def test_offers_passthrough_device_with_whole_device(board: str, dynamic: bool) -> None:
    """Both consume all of the same counters. No other published value changes."""
    gpu = replace(device(board, 3), passthrough=Passthrough(5, 1 << 37, True))
    without, found = offers(gpu, dynamic), offers(gpu, dynamic, (), True)
    *others, sibling = found
    (whole,) = (offer for offer in others if offer.kind == "device")
    assert (sibling.name, sibling.kind, sibling.device_uuid) == ("gpu-vfio-5", "passthrough", gpu.uuid)
    counters = counter_set(gpu)
    assert whole.counter_set == sibling.counter_set == counters.name
    assert dict(whole.consumes) == dict(sibling.consumes) == dict(counters.counters) and counters.counters
    assert [offer.name for offer in others] == [offer.name for offer in without]
    assert [replace(each, counter_set=None, consumes={}) for each in others] == [
        replace(each, counter_set=None, consumes={}) for each in without
    ]
    assert dict(sibling.capacities) == {"addressableMemory": 1 << 37}
    assert sibling.attributes["type"] == "vfio" and sibling.attributes["iommuFDEnabled"] is True
    assert sibling.attributes["vendorID"] == "0x10de" and len(str(sibling.attributes["deviceID"])) == 6
    assert sibling.attributes["resource.kubernetes.io/pciBusID"] == gpu.pci_address


def test_offers_partitioned_or_without_iommu_is_no_passthrough() -> None:
    gpu = device("h100-80", 0)
    assert offers(gpu, True, (), True) == offers(gpu, True)
    passable = replace(gpu, passthrough=Passthrough(0, 0, False))
    profile = passable.find_profile("1g.10gb")
    assert profile is not None
    cut = replace(
        passable,
        partitioning=Partitioning(True, True, True),
        partitions=(board_model.partition(profile, 0, passable.uuid, 1),),
    )
    for dynamic in (False, True):
        assert all(offer.kind == "partition" for offer in offers(cut, dynamic, (), True))
    assert "gpu-vfio-0" in {each.name for each in offers(cut, True, [cut.partitions[0].key], True)}
