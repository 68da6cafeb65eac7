# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test vNPUs: which fit, their placement, rejections, and their restore at boot."""

from __future__ import annotations

import os
import stat

import pytest

from tests.simulator.dcmi_support import (
    BUSY,
    INVALID,
    MISSING,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OCCUPIED,
    SUCCESS,
    NpuMachine,
)


def test_seven_smallest_vnpus_and_their_groups(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    client = npus.client()
    made = [client.create(0, 0, "vir01")[1] for _each in range(7)]
    assert [each["vfg_id"] for each in made] == [0, 0, 1, 1, 2, 2, 3]
    assert client.create(0, 0, "vir01")[0] == INVALID
    assert client.vids(0, 0) == [each["vdev_id"] for each in made] == list(range(100, 107))
    assert client.slice(0, 0, 100)["computing"]["memory_size"] == 2690
    # The other chips are not affected.
    assert client.make(1, 0, "vir04") == 116
    assert client.slice(1, 0, 116)["computing"]["memory_size"] == 10763
    assert client.slice(1, 0, 116)["name"] == "vir04"


def test_fragmented_groups_reject_what_the_counters_allow(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    client = npus.client()
    lone = [client.make(0, 0, "vir01", group=0), client.make(0, 0, "vir01", group=1)]
    for group in (2, 3):
        client.make(0, 0, "vir02", group=group)
    left = client.resources(0, 0, free=True)
    assert (left["computing"]["aic"], left["computing"]["device_aicpu"], left["vfg_num"]) == (2.0, 1, 0)
    assert client.create(0, 0, "vir02_1c")[0] == INVALID
    assert client.destroy(0, 0, lone[1]) == SUCCESS
    assert client.resources(0, 0, free=True)["vfg_bitmap"] == 2
    assert client.create(0, 0, "vir02_1c")[1]["vfg_id"] == 1


def test_fragmented_capacity_is_joined_only_on_an_empty_chip(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    client = npus.client()
    there = client.make(0, 0, "vir01")
    npus.control("fault 0 fragmented")
    assert [npu["fragmented"] for npu in npus.show()["npus"]] == [True] + [False] * 7
    assert client.create(0, 0, "vir01")[0] == INVALID
    client.make(1, 0, "vir01")
    assert client.destroy(0, 0, there) == SUCCESS
    client.make(0, 0, "vir02")
    client.make(0, 0, "vir01")
    npus.control("fault 0 fragmented")
    npus.control("clear 0")
    client.make(0, 0, "vir01")


def test_requested_vnpu_ids(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    client = npus.client()
    assert client.make(3, 0, "vir01", vid=155) == 155
    assert client.create(3, 0, "vir01", vid=155)[0] == OCCUPIED
    for wrong in (147, 156, 99, 100):
        assert client.create(3, 0, "vir01", vid=wrong)[0] == INVALID
    assert client.create(3, 0, "vir01", group=4)[0] == INVALID
    assert client.create(3, 0, "vir03")[0] == INVALID
    assert client.create(3, 1, "vir01")[0] == -8007
    assert client.make(3, 0, "vir01") == 148
    assert client.destroy(3, 0, 149) == MISSING
    assert client.destroy(3, 0, 155) == SUCCESS
    assert client.destroy(3, 0, 65535) == SUCCESS
    assert client.vids(3, 0) == []


def test_first_vnpu_moves_aicpu_with_sriov(npus: NpuMachine) -> None:
    npus.load("8x910B4")
    client = npus.client()

    def aicpu() -> tuple[int, int]:
        free = client.resources(2, 0, free=True)["computing"]["device_aicpu"]
        return free, client.resources(2, 0)["computing"]["device_aicpu"]

    assert aicpu() == (6, 6)
    code, made = client.create(2, 0, "vir10_4c_16g_m")
    assert (code, made["vdev_id"], made["vfg_id"], made["pcie_func"]) == (SUCCESS, 132, 0xFFFFFFFF, 1)
    assert aicpu() == (3, 7)
    assert client.create(2, 0, "vir10_3c_16g")[0] == INVALID
    assert client.make(2, 0, "vir10_3c_16g_nm") == 133
    assert aicpu() == (0, 7)
    assert client.slice(2, 0, 132)["computing"]["memory_size"] == 14336
    assert client.destroy(2, 0, 65535) == SUCCESS
    assert aicpu() == (6, 6)
    # Only the 310P has vGroups. The second template belongs to another mode.
    assert client.create(2, 0, "vir05_1c_8g", group=0)[0] == INVALID
    assert client.create(2, 0, "vir10_4c_16g")[0] == INVALID


def test_work_mode_and_vnpu_mode_forbid_vnpus(npus: NpuMachine) -> None:
    npus.load("8x910A")
    client = npus.client()
    assert client.get("dcmi_get_npu_work_mode", 0, ["u8", 9]) == 0
    vid = client.make(0, 0, "vir16")
    assert client.code("dcmi_set_vdevice_mode", 1) == OCCUPIED
    assert client.destroy(0, 0, vid) == SUCCESS
    assert client.code("dcmi_set_vdevice_mode", 1) == SUCCESS
    assert client.get("dcmi_get_vdevice_mode", ["i32", 9]) == 1
    assert client.create(0, 0, "vir16")[0] == NOT_PERMITTED
    assert client.code("dcmi_set_vdevice_mode", 0) == SUCCESS
    npus.control("work-mode smp")
    assert client.create(0, 0, "vir16")[0] == NOT_PERMITTED
    assert client.resources(0, 0)["computing"]["aic"] == 32.0


def test_joined_dies_cannot_be_partitioned(npus: NpuMachine) -> None:
    npus.load("8xA3", multi_die_policy="union")
    client = npus.client()
    assert client.create(0, 1, "vir12_3c_32g")[0] == NOT_PERMITTED
    assert client.code("dcmi_set_multi_die_policy", 1) == SUCCESS
    assert client.make(0, 1, "vir12_3c_32g") == 116
    assert client.code("dcmi_set_multi_die_policy", 0) == OCCUPIED
    assert client.code("dcmi_set_vdevice_mode", 1) == OCCUPIED
    pod = client.information(7, 1, 12, 1, "spod_info")
    assert (pod["sdid"], pod["scale_type"], pod["super_pod_id"], pod["server_id"]) == (
        7 << 18 | 1 << 16 | 15,
        384,
        1,
        0,
    )


def test_process_blocks_create_and_blocks_destroy_only_if_configured(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    client = npus.client()
    npus.control(f"fault 1 process {os.getpid()}")
    assert client.create(1, 0, "vir01")[0] == BUSY
    vid = client.make(0, 0, "vir02")
    npus.control(f"fault 0 process {os.getpid()} {vid} memory 1000")
    shown = client.slice(0, 0, vid, activity=True)
    assert (shown["status"], shown["is_container_used"], shown["container_id"]) == (1, 1, 2**48 - 1)
    assert shown["computing"]["vdev_memory_free"] == shown["computing"]["vdev_memory_total"] - 1000
    assert client.destroy(0, 0, vid) == SUCCESS
    npus.load("8x310P-Pro", guard_destroy=True)
    client = npus.client()
    vid = client.make(0, 0, "vir02")
    npus.control(f"fault 0 process {os.getpid()} {vid}")
    assert client.destroy(0, 0, vid) == OCCUPIED


def test_boot_restores_vnpus(npus: NpuMachine) -> None:
    npus.load("4x300I-Duo")
    client = npus.client()
    client.make(1, 1, "vir04", vid=151, group=2)
    client.make(0, 0, "vir01", group=3)
    gone = client.make(0, 0, "vir02")
    client.destroy(0, 0, gone)
    text = npus.configuration.read_text()
    assert text.splitlines() == [
        "vnpu_config_recover:enable",
        "[vnpu-config start]",
        "0:100:npu-smi set -t create-vnpu -i 0 -c 0 -f vir01 -v 100 -g 3",
        "3:151:npu-smi set -t create-vnpu -i 1 -c 1 -f vir04 -v 151 -g 2",
        "[vnpu-config end]",
    ]
    assert npus.configuration.stat().st_mode & 0o777 == 0o600
    assert npus.configuration.with_suffix(".cfg.bak").exists()
    assert npus.control("power-cycle")["ok"]
    assert client.code("dcmi_get_device_health", 0, 0, ["u32", 0]) == MISSING
    slices = [[(s["vid"], s["template"], s["group"]) for s in npu["slices"]] for npu in npus.show()["npus"]]
    assert slices == [[(100, "vir01", 3)], [], [], [(151, "vir04", 2)], [], [], [], []]


def test_device_nodes_follow_their_vnpus(npus: NpuMachine) -> None:
    def nodes() -> list[str]:
        return sorted(path.name for path in npus.dev.glob("vdavinci*"))

    npus.load("8x310P-Pro")
    client = npus.client()
    client.make(0, 0, "vir01")
    client.make(7, 0, "vir04", vid=215)
    assert nodes() == ["vdavinci100", "vdavinci215"]
    # Remains of a killed writer are removed with the next change.
    npus.nodes("vdavinci101")
    client.destroy(0, 0, 100)
    assert nodes() == ["vdavinci215"]
    client.code("dcmi_set_vnpu_config_recover_mode", 0)
    npus.control("power-cycle")
    assert nodes() == []


def test_device_nodes_of_vnpus_have_owner_and_mode_of_the_chip(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    npus.nodes("davinci3")
    chip = npus.dev / "davinci3"
    chip.chmod(0o640)
    os.chown(chip, 1000, 1001)
    npus.client().make(3, 0, "vir01")
    found = (npus.dev / "vdavinci148").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1000, 1001, 0o640)


def test_late_recovery_keeps_vnpus_in_the_file_until_it_runs(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    npus.client().make(3, 0, "vir01")
    text = npus.configuration.read_text()
    assert npus.control("power-cycle late")["ok"]
    assert npus.show()["npus"][3]["slices"] == [] and npus.configuration.read_text() == text
    assert npus.control("recover")["ok"]
    assert [each["vid"] for each in npus.show()["npus"][3]["slices"]] == [148]
    assert not npus.control("power-cycle soon")["ok"]


def test_boot_without_recovery_leaves_no_vnpu(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    client = npus.client()
    assert client.get("dcmi_get_vnpu_config_recover_mode", ["u32", 9]) == 1
    client.make(0, 0, "vir01")
    assert client.code("dcmi_set_vnpu_config_recover_mode", 0) == SUCCESS
    assert npus.configuration.read_text() == "vnpu_config_recover:disable\n[vnpu-config start]\n[vnpu-config end]\n"
    client.make(0, 0, "vir01")
    npus.control("power-cycle")
    shown = npus.show()
    assert (shown["recover"], shown["npus"][0]["slices"]) == (False, [])


def test_vnpu_that_cannot_be_saved_is_not_created(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    client = npus.client()
    npus.configuration.unlink()
    npus.configuration.symlink_to("/dev/null")
    assert client.create(0, 0, "vir01")[0] == -8005
    assert client.vids(0, 0) == []
    npus.configuration.unlink()
    assert client.make(0, 0, "vir01") == 100


@pytest.mark.parametrize("machine", ["1x950"])
def test_950_has_only_the_second_interface(npus: NpuMachine, machine: str) -> None:
    npus.load(machine)
    client = npus.client(initialize="")
    assert client.code("dcmi_init") == NOT_SUPPORTED
    assert client.code("dcmiv2_init") == SUCCESS
    assert client.get("dcmiv2_get_all_device_count", ["i32", 9]) == 1
    info = client.get("dcmiv2_get_device_chip_info", 0, ["struct", "chip_info_v2"])
    assert (info["chip_name"], info["aicore_cnt"]) == ("Ascend950PR", 36)
    assert (
        client.code("dcmiv2_get_device_info", 0, 52, 1, ["struct", "soc_total_resource"], ["u32", 4096])
        == NOT_SUPPORTED
    )
    assert client.code("dcmiv2_get_device_health", 1, ["u32", 0]) == -8007
