# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the backend's structures with those of the tests, which were written independently."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from dra_driver.core.vendors.ascend.dcmi import structures

from tests.simulator.dcmi_structures import STRUCTURES

SAME: dict[str, type[ctypes.Structure]] = {
    "chip_info_v2": structures.ChipInfo,
    "pcie_info_all": structures.PciInfo,
    "ub_id_info": structures.UnifiedBusInfo,
    "die_id": structures.DieId,
    "hbm_info": structures.HbmInfo,
    "get_memory_info_stru": structures.MemoryInfo,
    "board_info": structures.BoardInfo,
    "elabel_info": structures.Label,
    "proc_mem_info": structures.ProcessMemory,
    "base_resource": structures.BaseResource,
    "computing_resource": structures.ComputingResource,
    "media_resource": structures.MediaResource,
    "create_vdev_res_stru": structures.CreateSlice,
    "create_vdev_out": structures.CreatedSlice,
    "vdev_query_info": structures.SliceInfo,
    "vdev_query_stru": structures.SliceQuery,
    "soc_total_resource": structures.TotalResource,
    "spod_info": structures.SuperPodInfo,
    "dms_fault_event": structures.FaultEvent,
    "event": structures.Event,
    "event_filter": structures.EventFilter,
}


def leaves(kind: Any, at: int = 0) -> list[tuple[int, int]]:
    """Return offset and size of every number in a structure. Character arrays count as one."""
    if issubclass(kind, ctypes.Structure):
        return [leaf for name, inner in kind._fields_ for leaf in leaves(inner, at + getattr(kind, name).offset)]
    if issubclass(kind, ctypes.Array) and ctypes.sizeof(kind._type_) > 1:
        size = ctypes.sizeof(kind._type_)
        return [leaf for number in range(kind._length_) for leaf in leaves(kind._type_, at + number * size)]
    return [(at, ctypes.sizeof(kind))]


@pytest.mark.parametrize("name", SAME)
def test_structure_layouts_are_equal(name: str) -> None:
    assert ctypes.sizeof(SAME[name]) == ctypes.sizeof(STRUCTURES[name])
    assert leaves(SAME[name]) == leaves(STRUCTURES[name])
