# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that every symbol exists, and that a symbol without behavior reports that."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.simulator import older_driver
from tests.simulator.dcmi_support import INVALID, LIBRARY, NOT_READY, NOT_SUPPORTED, SOURCES, NpuMachine
from tests.simulator.nvml_builds import build

#: Functions that programs load, by interface version. They are listed here so that a missing entry in the table is
#: detected.
FIRST = """
init get_card_num_list get_device_num_in_card get_device_logic_id create_vdevice get_device_info set_destroy_vdevice get_device_type
get_device_health get_device_utilization_rate get_device_multi_utilization_rate get_device_multi_utilization_rate_period
get_device_temperature get_device_voltage get_device_power_info get_device_frequency get_device_memory_info_v3 get_device_hbm_info
get_device_errorcode_v2 get_device_chip_info get_device_chip_info_v2 get_device_phyid_from_logicid get_device_logicid_from_phyid
get_device_ip get_device_network_health get_card_list get_device_id_in_card get_memory_info get_device_errorcode
get_card_id_device_id_from_logicid mcu_get_power_info get_product_type get_card_elabel_v2 set_device_reset
get_device_outband_channel_state pre_reset_soc rescan_soc get_netdev_brother_device get_device_boot_status subscribe_fault_event
get_npu_work_mode get_device_die_v2 get_device_resource_info get_device_pcie_info_v2 get_device_board_info
get_pcie_link_bandwidth_info get_dcmi_version get_device_ecc_info get_mainboard_id get_affinity_cpu_info_by_device_id
get_hccs_link_bandwidth_info start_hccsping_mesh stop_hccsping_mesh get_hccsping_mesh_info get_hccsping_mesh_state
get_multi_die_policy set_multi_die_policy get_spod_node_status set_spod_node_status get_urma_device_cnt
get_eid_list_by_urma_dev_index start_ub_ping_mesh stop_ub_ping_mesh get_ub_ping_mesh_info get_ub_ping_mesh_state
"""
SECOND = """
init get_device_info get_all_device_count get_device_type get_device_health get_device_utilization_rate
get_device_multi_utilization_rate get_device_multi_utilization_rate_period get_device_temperature get_device_voltage
get_device_power_info get_device_frequency get_device_hbm_info get_device_error_code_list get_device_chip_info
get_chip_phy_id_by_dev_id get_dev_id_by_chip_phy_id get_device_network_health get_device_list get_device_elabel_info reset_device
get_device_outband_channel_state pre_reset_device rescan_device get_device_boot_status subscribe_fault_event get_device_die_id
get_device_proc_mem_info get_device_pcie_info get_device_board_info get_pcie_link_bandwidth_info get_dcmi_version
get_device_ecc_info get_mainboard_id get_affinity_cpu_info_by_dev_id get_urma_device_cnt get_eid_list_by_urma_dev_index
start_ub_ping_mesh stop_ub_ping_mesh get_ub_ping_mesh_info get_ub_ping_mesh_state get_port_pkt_stats_info
"""


def exported(npus: NpuMachine) -> set[str]:
    words = ["nm", "-D", "--defined-only", str(npus.folder / "lib" / LIBRARY)]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in text.splitlines()}


def table() -> dict[str, str]:
    lines = (SOURCES / "symbols.txt").read_text().splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))


def test_every_symbol_that_programs_load_is_exported(npus: NpuMachine) -> None:
    wanted = {f"dcmi_{name}" for name in FIRST.split()} | {f"dcmiv2_{name}" for name in SECOND.split()}
    assert len(wanted) == 65 + 42
    assert wanted - exported(npus) == set()
    assert {name for name in exported(npus) if name.startswith("dcmi")} == set(table())
    assert "acceleratorSimulatorControl" in exported(npus)


@pytest.mark.parametrize("dcmi_build", [""], indirect=True, ids=["plain"])
def test_library_depends_only_on_libc_and_libm(npus: NpuMachine) -> None:
    words = ["readelf", "-d", str(npus.folder / "lib" / LIBRARY)]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "[libdcmi.so]" in text
    assert set(re.findall(r"NEEDED.*\[(.*)\]", text)) <= {"libc.so.6", "libm.so.6"}


def test_function_without_behavior_returns_not_supported(npus: NpuMachine) -> None:
    stubs = {name for name, answer in table().items() if answer != "real"}
    assert set(table().values()) == {"real", "NOT_SUPPORTED"}
    for machine, first, second in (("8x310P-Pro", NOT_SUPPORTED, NOT_READY), ("1x950", NOT_READY, NOT_SUPPORTED)):
        npus.load(machine)
        client = npus.client(initialize="")
        assert {client.code(name) for name in stubs} == {NOT_READY}
        client.call("dcmi_init" if first == NOT_SUPPORTED else "dcmiv2_init")
        for name in stubs:
            assert client.code(name) == (second if name.startswith("dcmiv2_") else first), name


def test_null_pointers_are_rejected(npus: NpuMachine) -> None:
    """The sanitizers verify that NULL and invalid numbers cause no invalid memory access."""
    callbacks = {"dcmi_subscribe_fault_event", "dcmiv2_subscribe_fault_event"}
    for machine, prefix in (("8x910A", "dcmi_"), ("1x950", "dcmiv2_")):
        npus.load(machine)
        client = npus.client(f"{prefix}init")
        names = [
            name
            for name, answer in table().items()
            if answer == "real" and name.startswith(prefix) and name not in callbacks
        ]
        for name in names:
            if not name.endswith("init") and "set_" not in name and "reset" not in name:
                assert client.code(name, 0, 0, None, None, None, None) in {INVALID, NOT_SUPPORTED, -8007}, name
            # Functions whose first argument is the number of a card or device.
            if re.match(r"dcmi(v2)?_get_device_(?!logic|phyid|list|num|id_in)", name):
                assert client.code(name, -1, -1, None, None, None, None) != 0, name
                assert client.code(name, 2**31 - 1, 2**31 - 1, None, None, None, None) != 0, name


@pytest.mark.parametrize("dcmi_build", [""], indirect=True, ids=["plain"])
def test_older_library_lacks_the_absent_symbols(npus: NpuMachine) -> None:
    older = build("", older_driver.BUILT, sources=SOURCES)
    words = ["nm", "-D", "--defined-only", str(older.folder / LIBRARY)]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "dcmi_get_device_health" in text
    assert not [name for name in older_driver.LACKING if f" {name}\n" in text]
