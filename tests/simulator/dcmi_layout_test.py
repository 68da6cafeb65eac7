# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that every structure of the interface has the same size in the build's own checks and in the tests' tables."""

from __future__ import annotations

import ctypes
import re

from tests.simulator.dcmi_structures import STRUCTURES
from tests.simulator.dcmi_support import SOURCES

#: The structures that programs use, listed here so that a missing entry in either table is detected.
NAMES = """
chip_info chip_info_v2 pcie_info_all die_id ecc_info hbm_info get_memory_info_stru ip_addr base_resource computing_resource
media_resource create_vdev_out create_vdev_res_stru vdev_query_info vdev_query_stru ub_ping_mesh_operate ub_ping_mesh_info
soc_free_resource soc_total_resource spod_info dms_fault_event event event_filter proc_mem_info board_info pcie_link_bandwidth_info
hccs_statistic_info hccs_statistic_info_u64 hccs_bandwidth_info sio_crc_err_statistic_info elabel_info hccsping_mesh_operate
hccsping_mesh_info multi_utilization_info urma_in4 urma_in6 urma_eid_info ub_id_info ub_port_info port_pkt_stats_info memory_info_stru
"""


def test_every_structure_has_its_size_in_both_tables() -> None:
    assert len(NAMES.split()) == 41
    checks = (SOURCES / "layout_checks.c").read_text()
    counted = {name: int(size) for name, size in re.findall(r"^SIZE\(dcmi_(\w+), (\d+)\);$", checks, re.MULTILINE)}
    defined = set(re.findall(r"^struct dcmi_(\w+) \{$", (SOURCES / "dcmi_types.h").read_text(), re.MULTILINE))
    assert set(NAMES.split()) == defined == set(counted)
    assert {name: ctypes.sizeof(STRUCTURES[name]) for name in NAMES.split()} == counted
