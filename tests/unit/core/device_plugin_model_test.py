# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Resources that a node offers through the kubelet's device-plugin API, and the preferred sets of devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import board_model
import chip_model
import pytest
from dra_driver.core.dra.device_plugin_model import (
    LONGEST_ID,
    NotAllocatable,
    PluginDevice,
    by_resource,
    cdi_kind,
    given,
    partition_of,
    plugin_devices,
    preferred,
    reasons_not_offered,
    socket_name,
    specification,
)
from dra_driver.core.dra.nearest_devices import Level, levels, nearest, of_parts
from dra_driver.core.errors import NotFound
from dra_driver.core.health.conditions import Severity, Sign
from dra_driver.core.health.tracker import TrackedFault
from dra_driver.core.host.cdi import ContainerEdits, DeviceNode
from dra_driver.core.model import AttributeValue, Device, Offer, Placement
from dra_driver.core.vendors.ascend.groups import groups
from dra_driver.core.vendors.registry import create
from hypothesis import given as for_all
from hypothesis import strategies as st

DRIVER = "gpu.nvidia.com"
# The kubelet's check of the name of an extended resource.
EXTENDED = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
KIND = "k8s.gpu.nvidia.com/device"


def by_uuid(*devices: Device) -> dict[str, Device]:
    return {each.uuid: each for each in devices}


def ill(severity: Severity, instance: int | None = None) -> TrackedFault:
    return TrackedFault(Sign("xid", severity, "It fell.", instance=instance, value="79"), 0.0, 0.0, is_confirmed=True)


def offered(*devices: Device, **more: Any) -> tuple[PluginDevice, ...]:
    faults = more.pop("faults", {})
    return plugin_devices(create("nvidia"), DRIVER, by_uuid(*devices), faults, **more)


def cut(index: int = 0) -> Device:
    """Return a GPU with one 3g.40gb and two 1g.10gb."""
    return board_model.device("h100-80", index, places=((9, 4), (19, 0), (19, 1)))


def test_offered_gpus_and_partitions_have_vendor_resource_names() -> None:
    whole, in_parts = board_model.device("h100-80", 0), cut(1)
    found = by_resource(offered(whole, in_parts))
    assert {name: len(each) for name, each in found.items()} == {
        "nvidia.com/gpu": 1,
        "nvidia.com/mig-1g.10gb": 2,
        "nvidia.com/mig-3g.40gb": 1,
    }
    (first,) = found["nvidia.com/gpu"]
    assert (first.id, first.partition_uuid, first.numa_node, first.is_healthy) == (whole.uuid, None, 0, True)
    (second,) = found["nvidia.com/mig-3g.40gb"]
    assert second.id == second.partition_uuid and second.device_uuid == in_parts.uuid


def test_offered_empty_static_gpu_offers_nothing() -> None:
    assert offered(board_model.device("h100-80", enabled=True)) == ()


def test_reasons_not_offered_name_each_device_without_an_offer() -> None:
    empty, whole, held = board_model.device("h100-80", 0, enabled=True), board_model.device("h100-80", 1), cut(2)
    nameless = replace(cut(3), partitions=tuple(replace(each, uuid=None) for each in cut(3).partitions))
    devices = (empty, whole, held, nameless)
    found = reasons_not_offered(by_uuid(*devices), offered(*devices, held=[held.uuid]), [held.uuid])
    assert list(found) == [each.describe() for each in (empty, held, nameless)]
    assert "no partition exists" in found[empty.describe()] and "mode: static" in found[empty.describe()]
    assert "claim" in found[held.describe()] and "UUID" in found[nameless.describe()]


@pytest.mark.parametrize("board", board_model.board_names(mig=True))
def test_resource_of_each_profile_is_valid_for_kubelet(board: str) -> None:
    device = board_model.device(board)
    names = [create("nvidia").resource_name(device, each.name) for each in device.profiles]
    assert all(EXTENDED.fullmatch(each) for each in names) and len(set(names)) == len(names)
    assert all(len(socket_name(each)) + len("/var/lib/kubelet/device-plugins/") <= 107 for each in names)


@pytest.mark.parametrize(
    ("kind", "template", "resource"),
    [
        ("310P", None, "huawei.com/Ascend310P"),
        ("310P", "vir01", "huawei.com/Ascend310P-1c"),
        ("310P", "vir02_1c", "huawei.com/Ascend310P-2c.1cpu"),
        ("310P", "vir04_3c_ndvpp", "huawei.com/Ascend310P-4c.3cpu.ndvpp"),
        ("310P", "vir04_4c_dvpp", "huawei.com/Ascend310P-4c.4cpu.dvpp"),
        ("910B", "vir05_1c_8g", "huawei.com/Ascend910-5c.1cpu.8g"),
        ("910B", "vir10_3c_16g_nm", "huawei.com/Ascend910-10c.3cpu.16g.ndvpp"),
        ("910B", "vir10_4c_16g_m", "huawei.com/Ascend910-10c.4cpu.16g.dvpp"),
        ("910B", "special_one", "huawei.com/Ascend910-special-one"),
    ],
)
def test_offered_npus_and_slices_have_vendor_resource_names(kind: str, template: str | None, resource: str) -> None:
    chip = next(name for name, each in chip_model.CHIPS.items() if each.family.word == kind)
    assert create("ascend").resource_name(chip_model.device(chip), template) == resource
    assert EXTENDED.fullmatch(resource)


def test_offered_slices_are_identified_by_uuid() -> None:
    chip = next(name for name, each in chip_model.CHIPS.items() if each.family.word == "310P")
    made = chip_model.partition(chip, "vir01", Placement(0, 1))
    found = plugin_devices(create("ascend"), "npu.huawei.com", by_uuid(chip_model.device(chip, [made])), {})
    assert [(each.id, each.resource) for each in found] == [(made.uuid, "huawei.com/Ascend310P-1c")]
    assert len(found[0].id) <= LONGEST_ID


def test_offered_only_evicting_faults_make_device_unhealthy() -> None:
    device = board_model.device("h100-80")
    for severity, healthy in ((Severity.INFORMATIVE, True), (Severity.DEGRADED, False), (Severity.FAILED, False)):
        (found,) = offered(device, faults={device.uuid: (ill(severity),)})
        assert found.is_healthy is healthy
        assert found.barred == ("" if healthy else "xid")
    (found,) = offered(device, faults={device.uuid: (ill(Severity.FAILED),)}, effects=dict.fromkeys(Severity, "None"))
    assert found.is_healthy, "an effect of None keeps no pod away"


def test_offered_partition_fault_affects_only_it() -> None:
    device = cut()
    sick = device.partitions[0]
    found = offered(device, faults={device.uuid: (ill(Severity.DEGRADED, sick.instance_id),)})
    assert {each.id for each in found if not each.is_healthy} == {sick.uuid}


def test_offered_devices_of_claims_are_excluded() -> None:
    one, other = cut(0), cut(1)
    assert {each.device_uuid for each in offered(one, other, held={one.uuid})} == {other.uuid}


def test_offered_excludes_dynamic_groups_and_passthrough() -> None:
    class Everything:
        def offers(
            self, device: Device, dynamic: bool, owned: Any = (), passthrough: bool = False
        ) -> tuple[Offer, ...]:
            assert not dynamic and not passthrough
            (whole,) = create("nvidia").offers(board_model.device("h100-80"), False)
            group = replace(whole, kind="group", members=(device.uuid, "GPU-1"))
            return (replace(whole, kind="passthrough"), group, replace(whole, kind="partition", dynamic=True))

        def resource_name(self, device: Device, profile: str | None) -> str:
            return "example.com/device"

    assert plugin_devices(Everything(), DRIVER, by_uuid(board_model.device("h100-80")), {}) == ()


def test_partition_of_missing_partition_is_rejected() -> None:
    device = cut()
    some = offered(device)[0]
    found = partition_of(some, device)
    assert found is not None and found.uuid == some.id
    with pytest.raises(NotFound, match="any more"):
        partition_of(some, replace(device, partitions=()))
    (whole,) = offered(board_model.device("h100-80"))
    assert partition_of(whole, board_model.device("h100-80")) is None
    with pytest.raises(NotFound, match="has been cut"):
        partition_of(whole, cut())


def test_specification_matches_devices_of_container() -> None:
    edits = {name: ContainerEdits(device_nodes=(DeviceNode(f"/dev/{name}"),)) for name in ("GPU-2", "GPU-1")}
    common = ContainerEdits(env=("A=b",))
    file = specification(cdi_kind("k8s.gpu.nvidia.com/claim"), edits, common)
    assert file is not None and file["kind"] == KIND
    names = {f"{file['kind']}={each['name']}" for each in file["devices"]}
    response = given(KIND, ["GPU-1"], edits, common)
    assert set(response.cdi_devices) == {f"{KIND}=GPU-1"} < names and response.variables is None
    assert specification(KIND, {}, common) is None, "without devices there is no file"
    with pytest.raises(NotAllocatable, match="GPU-3"):
        given(KIND, ["GPU-1", "GPU-3"], edits, common)


def test_variables_list_all_devices_of_a_container() -> None:
    common = ContainerEdits(lists=(("VISIBLE", ()),))
    edits = {name: ContainerEdits(env=("OPTIONS=x=y",), lists=(("VISIBLE", (name,)),)) for name in ("0", "1", "2")}
    assert specification(KIND, edits, common) is None
    response = given(KIND, ["0", "2"], edits, common)
    assert response.cdi_devices == () and response.variables == {"OPTIONS": "x=y", "VISIBLE": "0,2"}


# ------------------------------------------------------------------ topology


class Cards:
    """A vendor topology in which each pair of devices is a card."""

    def groups(self, devices: Sequence[Device], /) -> tuple[Offer, ...]:
        chips = [replace(each, attributes={**each.attributes, "cardID": each.index // 2}) for each in devices]
        return groups([replace(each, attributes={**each.attributes, "chipID": each.index % 2}) for each in chips])

    def attributes_of(self, kind: str, devices: Sequence[Device], /) -> dict[str, AttributeValue]:
        return {}


def eight() -> dict[str, Device]:
    """Return eight devices: two per PCI root, four per NUMA node."""
    return by_uuid(
        *(
            replace(board_model.device("h100-80", index), pcie_root=f"pci{index // 2}", numa_node=index // 4)
            for index in range(8)
        )
    )


def test_levels_are_ordered_from_device_to_numa_node() -> None:
    devices = eight()
    sizes = [max(list(level.values()).count(place) for place in level.values()) for level in levels(devices, None)]
    assert sizes == [1, 2, 4]
    assert [max(list(each.values()).count(place) for place in each.values()) for each in levels(devices, Cards())] == [
        1,
        2,
        2,
        4,
    ]


@pytest.mark.parametrize(
    ("free", "size", "expected"),
    [
        ({0, 1, 2, 3, 4, 5, 6, 7}, 2, {0, 1}),
        ({0, 2, 3, 4, 5}, 1, {0}),  # its neighbor is taken, so no free pair is broken
        ({1, 2, 3, 4, 5, 6, 7}, 2, {2, 3}),
        ({0, 1, 2, 4, 5, 6, 7}, 3, {0, 1, 2}),  # the NUMA node with the fewest free devices
        ({0, 1, 2, 4, 5, 6, 7}, 4, {4, 5, 6, 7}),
        ({0, 1, 2, 4, 5, 6}, 5, {0, 1, 2, 4, 5}),
    ],
)
def test_nearest_adjacent_devices_are_chosen_together(free: set[int], size: int, expected: set[int]) -> None:
    devices = eight()
    names = {each.index: uuid for uuid, each in devices.items()}
    found = nearest([names[index] for index in sorted(free)], (), size, levels(devices, None))
    assert {devices[uuid].index for uuid in found} == expected


def test_nearest_complete_groups_are_chosen_first() -> None:
    devices = {uuid: replace(each, numa_node=0) for uuid, each in eight().items()}
    names = {each.index: uuid for uuid, each in devices.items()}
    found = nearest([names[index] for index in (0, 2, 4, 5, 6, 7)], (), 4, levels(devices, None))
    assert {devices[uuid].index for uuid in found} == {4, 5, 6, 7}


def test_nearest_partitions_use_fewest_and_fullest_devices() -> None:
    devices = by_uuid(cut(0), cut(1), replace(board_model.device("h100-80", 2, places=((19, 0),))))
    found = [each for each in offered(*devices.values()) if each.resource == "nvidia.com/mig-1g.10gb"]
    near = levels(devices, None)
    names = [each.id for each in found]
    of = {each.id: devices[each.device_uuid].index for each in found}
    assert [of[each] for each in preferred(found, names, (), 1, near)] == [2]
    assert {of[each] for each in preferred(found, names, (), 2, near)} in ({0}, {1})
    must = next(each for each in names if of[each] == 1)
    assert {of[each] for each in preferred(found, names, [must], 2, near)} == {1}
    # A device that the kubelet names but the driver does not know comes last.
    assert preferred(found, [*names, "gone"], (), 1, near) != ("gone",)
    assert set(preferred(found, [names[0], "gone"], (), 2, near)) == {names[0], "gone"}


@st.composite
def scenes(draw: Any) -> tuple[list[str], frozenset[str], int, tuple[Level, ...]]:
    """Draw partitions on devices, devices behind roots, and roots at nodes. Some partitions are mandatory."""
    count = draw(st.integers(1, 14))
    things = [f"t{number}" for number in range(count)]
    device_of = {thing: f"d{draw(st.integers(0, 7))}" for thing in things}
    root_of = {f"d{number}": f"r{draw(st.integers(0, 3))}" for number in range(8)}
    node_of = {f"r{number}": draw(st.integers(0, 3)) for number in range(4)}
    near: list[Level] = [{device: device for device in root_of}, root_of]
    near.append({device: node_of[root] for device, root in root_of.items()})
    size = draw(st.integers(0, count))
    must = draw(st.sets(st.sampled_from(things), max_size=size))
    return things, frozenset(must), size, of_parts(near, device_of)


def nearest_level(things: Sequence[str], must: Collection[str], size: int, near: Sequence[Level]) -> int | None:
    """Return the nearest level with enough partitions in one place, or None."""
    for number, level in enumerate(near):
        for place in set(level.values()):
            here = {thing for thing in things if level[thing] == place}
            if len(here) >= size and set(must) <= here:
                return number
    return None


@for_all(scenes())
def test_nearest_has_required_devices_and_size_at_nearest_level(
    scene: tuple[list[str], frozenset[str], int, tuple[Level, ...]],
) -> None:
    things, must, size, near = scene
    found = nearest(things, must, size, near)
    assert len(found) == len(set(found)) == size and must <= set(found) <= set(things)
    assert list(found) == [each for each in things if each in found], "the order is the pool's"
    best = nearest_level(things, must, size, near)
    here = list(things)
    if size and best is not None:
        assert len({near[best][each] for each in found}) == 1
        places = [
            [each for each in things if near[best][each] == place] for place in dict.fromkeys(near[best].values())
        ]
        fitting = [each for each in places if len(each) >= size and must <= set(each)]
        here = [each for each in things if near[best][each] == near[best][found[0]]]
        assert len(here) == min(len(each) for each in fitting), "a larger group stays complete"
    if size and best != 0 and not must:
        # Within that place, or within all, use as few places of the next nearer level as possible.
        inner = near[-1 if best is None else best - 1]
        counts = sorted(Counter(inner[each] for each in here).values(), reverse=True)
        fewest = next(number for number in range(1, len(counts) + 1) if sum(counts[:number]) >= size)
        assert len({inner[each] for each in found}) == fewest


@for_all(st.integers(-1, 4), st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))
def test_nearest_impossible_request_is_rejected(size: int, pool: set[str], must: set[str]) -> None:
    if must <= pool and len(must) <= size <= len(pool):
        assert set(nearest(sorted(pool), must, size, ())) >= must
    else:
        with pytest.raises(ValueError, match="cannot be chosen"):
            nearest(sorted(pool), must, size, ())
