# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test chips: their visibility, their facts, and their faults."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from accelerator_simulator.hardware import load_machine
from accelerator_simulator.npu_description import NpuSettings, render_npus

from tests.simulator.dcmi_support import (
    BUSY,
    CATALOGUE,
    DATA,
    IN_CONTAINER,
    INTERNAL,
    MISSING,
    NO_DEVICE,
    NOT_PERMITTED,
    OCCUPIED,
    SUCCESS,
    NpuClient,
    NpuMachine,
)

MACHINES = sorted(path.stem for path in (DATA / "ascend/machines").glob("*.json"))


def chip(client: NpuClient, card: int, number: int) -> Any:
    return client.get("dcmi_get_device_chip_info_v2", card, number, ["struct", "chip_info_v2"])


def cards(client: NpuClient) -> list[int]:
    code, (count, listed) = client.call("dcmi_get_card_list", ["i32", 0], ["u32s", 64], 64)
    assert code in (SUCCESS, MISSING)
    return list(listed[:count])


def test_every_machine_loads_and_names_the_source_of_its_figures(npus: NpuMachine) -> None:
    for name in MACHINES:
        npus.load(name)
        machine = load_machine(DATA, name, CATALOGUE)
        shown = npus.show()["npus"]
        expected = [(npu.card, npu.chip, npu.physical, device.address) for device, npu in machine.chips]
        assert [(npu["card"], npu["chip"], npu["physical"], npu["pci_address"]) for npu in shown] == expected
        assert len({npu["vdie"] for npu in shown}) == len(shown)
        serials = {npu["card"]: npu["serial"] for npu in shown}
        assert all(npu["serial"] == serials[npu["card"]] for npu in shown)
        assert len(set(serials.values())) == len(serials)
    used = {device.board for name in MACHINES for device in load_machine(DATA, name, CATALOGUE).npus}
    assert used == {path.stem for path in (DATA / "ascend/boards").glob("*.json")}


def test_invalid_description_names_the_problem_and_changes_nothing(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    before = npus.show()
    text = (npus.folder / "machine.txt").read_text()
    for old, new, word in (
        ("groups=4", "groups=5", "0 to 4"),
        ("aicore=8 ", "aicore=x ", "number"),
        ("kind=ddr", "kind=core", "ddr"),
        ("  serial", "  serail", "serail"),
        ("name=vir01 ", "", "name="),
        ("physical 3", "physical 2", "differ"),
        ("driver-version 25.2.0\n", "", "driver-version"),
    ):
        (npus.folder / "wrong.txt").write_text(text.replace(old, new))
        answer = npus.control(f"load {npus.folder / 'wrong.txt'}")
        assert not answer["ok"]
        assert answer["error"].startswith("line ") and word in answer["error"], answer
    assert npus.show() == before


def test_chip_identity(npus: NpuMachine) -> None:
    npus.load("4x300I-Duo")
    client = npus.client()
    assert cards(client) == [0, 1, 2, 3]
    assert client.call("dcmi_get_device_id_in_card", 1, ["i32", 9], ["i32", 9], ["i32", 9])[1] == [2, 2, -1]
    assert client.get("dcmi_get_device_logic_id", ["i32", 9], 2, 1) == 5
    assert client.call("dcmi_get_card_id_device_id_from_logicid", ["i32", 9], ["i32", 9], 5)[1] == [2, 1]
    assert client.get("dcmi_get_device_phyid_from_logicid", 5, ["u32", 99]) == 5
    info = chip(client, 0, 1)
    assert (info["chip_type"], info["chip_name"], info["aicore_cnt"]) == ("Ascend", "310P3", 8)
    pci = client.get("dcmi_get_device_pcie_info_v2", 2, 1, ["struct", "pcie_info_all"])
    assert (pci["venderid"], pci["deviceid"], pci["subdeviceid"], pci["bdf_busid"]) == (0x19E5, 0xD500, 0x0110, 0x84)
    dies = [client.get("dcmi_get_device_die_v2", card, 0, 1, ["struct", "die_id"])["soc_die"] for card in range(4)]
    assert len({tuple(words) for words in dies}) == 4
    assert "".join(f"{word:08X}" for word in dies[1]) == npus.show()["npus"][2]["vdie"]
    memory = client.get("dcmi_get_device_memory_info_v3", 0, 0, ["struct", "get_memory_info_stru"])
    assert (memory["memory_size"], memory["memory_available"]) == (43054, 43054 - 1150)
    assert client.code("dcmi_get_device_hbm_info", 0, 0, ["struct", "hbm_info"]) == -8255
    near = [
        client.get("dcmi_get_topo_info_by_device_id", 0, 0, *other, ["i32", 9])
        for other in ((0, 0), (0, 1), (1, 0), (2, 0))
    ]
    assert near == [0, 3, 1, 1] or near == [0, 3, 2, 1]
    label = client.get("dcmi_get_card_elabel_v2", 0, ["struct", "elabel_info"])
    assert label["serial_number"] == npus.show()["npus"][0]["serial"]


def test_dies_of_a_module_have_sio_and_modules_have_the_switch(npus: NpuMachine) -> None:
    npus.load("8xA3")
    client = npus.client()
    near = [
        client.get("dcmi_get_topo_info_by_device_id", 0, 0, *other, ["i32", 9])
        for other in ((0, 0), (0, 1), (1, 0), (7, 1))
    ]
    assert near == [0, 6, 7, 7]


def test_health_codes_events_and_a_lost_chip(npus: NpuMachine) -> None:
    npus.load("8x910B3")
    client = npus.client()
    assert client.own("subscribe", -1, -1, {}) == SUCCESS
    npus.control("fault 3 error 0x80E01801 critical")
    npus.control("fault 3 error 0x80CF8000 warning")
    assert client.get("dcmi_get_device_health", 3, 0, ["u32", 9]) == 3
    count, codes = client.call("dcmi_get_device_errorcode_v2", 3, 0, ["i32", 0], ["u32s", 128], 128)[1]
    assert codes[:count] == [0x80E01801, 0x80CF8000]
    assert client.call("dcmi_get_device_errorcode_v2", 3, 0, ["i32", 0], ["u32s", 1], 1)[1][0] == 2
    reported = client.own("events", 2)
    assert [(event["event_id"], event["deviceid"], event["severity"], event["assertion"]) for event in reported] == [
        (0x80E01801, 3, 3, 1),
        (0x80CF8000, 3, 1, 1),
    ]
    npus.control("clear 3")
    assert [event["assertion"] for event in client.own("events", 4)[2:]] == [0, 0]
    assert client.get("dcmi_get_device_health", 3, 0, ["u32", 9]) == 0
    npus.control("fault 3 lost")
    assert client.code("dcmi_get_device_health", 3, 0, ["u32", 9]) == MISSING
    npus.control("unplug 4")
    assert client.code("dcmi_get_device_health", 4, 0, ["u32", 9]) == MISSING
    assert cards(npus.client()) == [0, 1, 2, 3, 5, 6, 7]
    npus.control("plug 4")
    assert cards(npus.client()) == list(range(8))


def test_faults_of_calls(npus: NpuMachine) -> None:
    npus.load("8x910B3")
    client = npus.client()
    npus.control("fault 1 call dcmi_get_device_health fail -8012 nth 2")
    assert [client.code("dcmi_get_device_health", 1, 0, ["u32", 9]) for _each in range(3)] == [SUCCESS, -8012, SUCCESS]
    assert client.code("dcmi_get_device_health", 0, 0, ["u32", 9]) == SUCCESS
    npus.control("clear")
    npus.control("fault all call dcmi_init fail -8005")
    assert npus.client(initialize="").code("dcmi_init") == INTERNAL
    assert not npus.control("fault 1 call nvmlInit fail -8005")["ok"]
    assert npus.control("calls")["functions"]["dcmi_get_device_health"] == 4


def test_npu_without_a_device_node_is_not_listed(npus: NpuMachine) -> None:
    npus.load("4x300I-Duo")
    (npus.dev / "davinci2").unlink()
    client = npus.client()
    assert client.code("dcmi_get_device_health", 1, 0, ["u32", 9]) == NO_DEVICE
    assert client.get("dcmi_get_device_logic_id", ["i32", 9], 1, 1) == 2
    (npus.dev / "davinci_manager").unlink()
    assert npus.client(initialize="").code("dcmi_init") == INTERNAL


def test_container_sees_only_its_vnpu(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    host = npus.client()
    vids = [host.make(2, 0, "vir02"), host.make(2, 0, "vir01")]
    inside = npus.container("davinci132")
    assert inside.code("dcmi_init") == SUCCESS
    assert cards(inside) == [2]
    info = chip(inside, 2, 0)
    assert (info["chip_name"], info["aicore_cnt"]) == ("310Pvir02", 2)
    assert inside.get("dcmi_get_device_phyid_from_logicid", 0, ["u32", 9]) == vids[0] == 132
    assert inside.get("dcmi_get_memory_info", 2, 0, ["struct", "memory_info_stru"])["memory_size"] == 5381
    assert inside.create(2, 0, "vir01")[0] == IN_CONTAINER
    # The host sees the container of a vNPU, and can still query a partitioned chip.
    used = host.slice(2, 0, 132)
    own_namespace = Path("/proc/self/ns/pid").stat().st_ino
    assert (used["status"], used["container_id"]) == (1, own_namespace % 2**32)
    assert host.slice(2, 0, vids[1])["status"] == 0
    # The vNPU is destroyed while the container uses it.
    assert host.destroy(2, 0, 132) == SUCCESS
    assert inside.code("dcmi_get_device_health", 2, 0, ["u32", 9]) == INTERNAL
    host.make(2, 0, "vir02", vid=132)
    assert inside.code("dcmi_get_device_health", 2, 0, ["u32", 9]) == INTERNAL
    assert inside.code("dcmi_init") == SUCCESS
    assert inside.get("dcmi_get_device_health", 2, 0, ["u32", 9]) == 0


def test_npu_used_whole_by_a_container_is_not_partitioned(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    host = npus.client()
    inside = npus.container("davinci0")
    assert inside.code("dcmi_init") == SUCCESS
    assert host.create(0, 0, "vir01")[0] == BUSY
    assert host.make(1, 0, "vir01") == 116
    inside.process.kill()
    inside.process.wait()
    assert host.make(0, 0, "vir01") == 100


@pytest.mark.parametrize("internal", [False, True])
def test_npu_of_one_container_is_rejected_for_another(npus: NpuMachine, internal: bool) -> None:
    """Containers are distinguished by their PID namespace. An older driver returns another code for the same case."""
    npus.load("8x310P-Pro", occupied_is_internal=internal)
    inside = npus.container("davinci0")
    assert inside.code("dcmi_init") == SUCCESS
    program = "import ctypes; print(ctypes.CDLL('libdcmi.so').dcmi_init())"
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "setpriv",
        "--bounding-set=-sys_admin",
        "--inh-caps=-sys_admin",
    ]
    environment = npus.build.environment(npus.folder / "lib")

    def initialize() -> int:
        words = [*command, "python3", "-c", program]
        return int(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)

    assert initialize() == (INTERNAL if internal else OCCUPIED)
    npus.control("device-share 0 1")
    assert initialize() == SUCCESS


def test_only_administrators_change_settings(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    for path in npus.dev.iterdir():
        path.chmod(0o666)
    client = npus.client(initialize="")
    client.own("become", 65534)
    assert client.code("dcmi_init") == SUCCESS
    assert client.create(0, 0, "vir01")[0] == NOT_PERMITTED
    assert client.code("dcmi_set_vdevice_mode", 1) == NOT_PERMITTED
    assert len(cards(client)) == 8


def test_machine_description_lists_every_chip_once() -> None:
    machine = load_machine(DATA, "16x910B", CATALOGUE)
    text = render_npus(machine, CATALOGUE, NpuSettings("a", "25.2.0", library={"interface": 2}))
    assert text.count("\nnpu\n") == 16
    assert text.count("\ninterface ") == 1
    assert text != render_npus(machine, CATALOGUE, NpuSettings("b", "25.2.0", library={"interface": 2}))
