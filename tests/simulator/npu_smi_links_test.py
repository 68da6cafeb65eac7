# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test links between chips with DCMI and npu-smi, and the settings that keep or reset sharing and vNPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulator.dcmi_support import INVALID, NOT_SUPPORTED, SUCCESS, NpuClient, NpuMachine
from tests.simulator.npu_smi_reader import pairs

pytestmark = pytest.mark.parametrize("dcmi_build", [""], indirect=True, ids=["plain"])
WRONG, MISSING = -9001 & 0xFF, -9008 & 0xFF
#: Main and sub commands of dcmi_get_device_info.
HCCS, SIO, NARROW, WIDE = 16, 56, 3, 5


def query_info(npus: NpuMachine, *words: str) -> dict[str, str]:
    run = npus.smi("info", "-t", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(pairs(run.stdout))


def set_it(npus: NpuMachine, *words: str, answer: str = "") -> dict[str, str]:
    run = npus.smi("set", "-t", *words, answer=answer)
    return dict(pairs(run.stdout.rpartition("]")[2])) | {"code": str(run.returncode)}


def bandwidth(client: NpuClient, card: int, time: int = 1000) -> tuple[int, Any]:
    code, out = client.call(
        "dcmi_get_hccs_link_bandwidth_info", card, 0, ["struct", "hccs_bandwidth_info", {"profiling_time": time}]
    )
    return code, out[0]


@pytest.mark.parametrize(("machine", "links"), [("8x910B3", 7), ("16x910B", 7), ("8xA3", 15)])
def test_links_of_hccs_have_counts(npus: NpuMachine, machine: str, links: int) -> None:
    npus.load(machine)
    client = npus.client()
    shown = query_info(npus, "hccs", "-i", "1", "-c", "0")
    assert (shown["HCCS Links"], shown["CRC Errors"]) == (str(links), " ".join(["0"] * links))
    npus.control("fault 2,3 hccs 4 9" if machine == "8xA3" else "fault 1 hccs 4 9")
    assert query_info(npus, "hccs", "-i", "1", "-c", "0")["CRC Errors"].split()[4] == "9"
    for sub, name in ((NARROW, "hccs_statistic_info"), (WIDE, "hccs_statistic_info_u64")):
        counts = client.information(1, 0, HCCS, sub, name)
        assert (counts["crc_err_cnt"][4], sum(counts["crc_err_cnt"]), sum(counts["tx_cnt"])) == (9, 9, 0)
        assert sum(client.information(0, 0, HCCS, sub, name)["crc_err_cnt"]) == 0
    code, info = bandwidth(client, 1)
    assert (code, info["profiling_time"], info["total_txbw"]) == (SUCCESS, 1000, 0.0)
    assert bandwidth(client, 1, time=0)[0] == INVALID
    shown = query_info(npus, "hccs-bw", "-i", "1", "-c", "0")
    assert (shown["Total Tx Bandwidth(GB/s)"], len(shown["Tx Bandwidth(GB/s)"].split())) == ("0.00", links)
    assert not npus.control(f"fault 1 hccs {links} 1")["ok"]
    npus.control("clear")
    assert set(query_info(npus, "hccs", "-i", "1", "-c", "0")["CRC Errors"].split()) == {"0"}


def test_two_dies_of_a_module_have_counts_of_their_link(npus: NpuMachine) -> None:
    npus.load("8xA3")
    client = npus.client()
    npus.control("fault 5 sio 3")
    shown = query_info(npus, "sio-info", "-i", "2", "-c", "1")
    assert (shown["NPU ID"], shown["Tx Errors"], shown["Rx Errors"]) == ("2", "0", "3")
    assert client.information(2, 1, SIO, 0, "sio_crc_err_statistic_info")["rx_error_count"] == 3
    # Without a number the command prints all chips of the machine.
    everything = pairs(npus.smi("info", "-t", "sio-info").stdout)
    assert [value for key, value in everything if key == "Rx Errors"] == ["0"] * 5 + ["3"] + ["0"] * 10
    npus.control("power-cycle")
    assert query_info(npus, "sio-info", "-i", "2", "-c", "1")["Rx Errors"] == "0"


@pytest.mark.parametrize("machine", ["8x310P-Pro", "4x300I-Duo", "8x910A", "8x910B4"])
def test_chip_without_links_reports_not_supported(npus: NpuMachine, machine: str) -> None:
    npus.load(machine)
    client = npus.client()
    for kind in ("hccs", "hccs-bw", "sio-info"):
        run = npus.smi("info", "-t", kind, "-i", "0", "-c", "0")
        assert (run.returncode, "not support" in run.stdout) == (0, True), kind
    assert bandwidth(client, 0)[0] == NOT_SUPPORTED
    for main, sub in ((HCCS, NARROW), (HCCS, WIDE), (SIO, 0), (HCCS, 4)):
        place = ["struct", "hccs_statistic_info_u64"]
        assert client.code("dcmi_get_device_info", 0, 0, main, sub, place, ["u32", 4096]) == NOT_SUPPORTED
    assert not npus.control("fault 0 hccs 0 1")["ok"] and not npus.control("fault 0 sio 1")["ok"]


def test_too_small_buffer_is_rejected(npus: NpuMachine) -> None:
    npus.load("8xA3")
    client = npus.client()
    for main, sub, size in ((HCCS, NARROW, 512), (HCCS, WIDE, 1024), (SIO, 0, 12)):
        code, out = client.call("dcmi_get_device_info", 0, 0, main, sub, ["text", 2048], ["u32", size - 1])
        assert (code, out[1]) == (INVALID, size)


def test_device_share_survives_a_boot_only_if_configured(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")

    def shares() -> list[bool]:
        return [npu["device_share"] for npu in npus.show()["npus"]][:2]

    share = ("device-share", "-i", "1", "-c", "0", "-d", "1")
    assert set_it(npus, *share, answer="Y\n")["Status"] == "OK"
    assert list(query_info(npus, "device-share-cfg-recover").values()) == ["Disable"]
    npus.control("power-cycle")
    assert shares() == [False, False]
    assert set_it(npus, "device-share-cfg-recover", "-d", "1")["Status"] == "OK"
    assert list(query_info(npus, "device-share-cfg-recover").values()) == ["Enable"]
    set_it(npus, *share, answer="Y\n")
    for _boot in range(2):
        npus.control("power-cycle")
        assert shares() == [False, True]
    # A chip that was reinserted counts as another chip.
    npus.control("unplug 1")
    npus.control("plug 1")
    assert shares() == [False, False]
    assert set_it(npus, "device-share-cfg-recover", "-d", "0")["Status"] == "OK"
    assert npus.show()["share_recover"] is False
    assert npus.smi("set", "-t", "device-share-cfg-recover", "-d", "2").returncode == WRONG


def test_vnpu_reset_works_only_in_vm_mode(npus: NpuMachine) -> None:
    reset = ("reset-vnpu", "-i", "0", "-c", "0", "-v", "100")
    npus.load("8x310P-Pro")
    run = npus.smi("set", "-t", *reset)
    assert (run.returncode, "not support" in run.stdout) == (0, True)
    npus.load("8x910B3")
    run = npus.smi("set", "-t", *reset)
    assert (run.returncode, "VM mode" in run.stdout, "Status" in run.stdout) == (0, True, False)
    assert npus.smi("set", "-t", "vnpu-mode", "-d", "1").returncode == 0
    gone = set_it(npus, *reset)
    assert (gone["code"], gone["Status"]) == (str(MISSING), "Fail")
    assert npus.smi("set", "-t", "reset-vnpu", "-i", "0", "-c", "0").returncode == WRONG
