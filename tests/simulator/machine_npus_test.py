# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test machines with NPUs through the simulator's command: their files, reboots, files placed again, and removed
chips.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerator_simulator.hardware import load_machine

from tests.simulator import older_driver
from tests.simulator.dcmi_support import CATALOGUE, DATA
from tests.simulator.dcmi_support import SOURCES as DCMI
from tests.simulator.machine_library_test import PROGRAM
from tests.simulator.nvml_builds import SOURCES as NVML
from tests.simulator.nvml_builds import build

DRIVER = "usr/local/Ascend/driver"
MACHINES = sorted(path.stem for path in (DATA / "ascend/machines").glob("*.json"))


class Node:
    """A machine below a directory, with the required drivers at the vendors' paths."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.libraries = root / DRIVER / "lib64/driver"
        self.libraries.mkdir(parents=True)
        for path in build(sources=DCMI).folder.iterdir():
            if path.is_file():
                shutil.copy2(path, self.libraries / path.name)
        self.boot("first")

    def boot(self, identity: str) -> None:
        """Set another boot ID."""
        (self.root / "boot_id").write_text(identity)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command with any exit status."""
        arguments = [sys.executable, "-c", PROGRAM, str(DATA), str(self.root / "boot_id"), "--root", str(self.root)]
        return subprocess.run([*arguments, *words], capture_output=True, text=True, check=False)

    def command(self, *words: str) -> dict[str, Any]:
        """Return the command's JSON output."""
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def program(self, name: str, *words: str) -> str:
        """Return the output of a program of the driver."""
        environment = dict(os.environ, LD_LIBRARY_PATH=str(self.libraries))
        program = [str(self.libraries / name), *words]
        return subprocess.run(program, capture_output=True, text=True, env=environment, check=True).stdout

    def nodes(self) -> set[str]:
        """Return the device nodes of chips and vNPUs."""
        return {path.name for path in (self.root / "dev").glob("*davinci[0-9]*")}

    def slices(self) -> dict[int, list[str]]:
        """Return the templates of the vNPUs by physical chip ID."""
        shown = self.command("show", "--json")["npus"]
        return {npu["physical"]: [each["template"] for each in npu["slices"]] for npu in shown if npu["slices"]}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_vnpus_survive_a_boot_with_their_device_nodes(node: Node) -> None:
    assert node.command("power-on", "--machine", "8x310P-Pro")["library"] == "load"
    whole = {f"davinci{number}" for number in range(8)}
    assert node.nodes() == whole
    node.program("npu-smi", "set", "-t", "create-vnpu", "-i", "3", "-c", "0", "-f", "vir02")
    assert node.nodes() == whole | {"vdavinci148"}
    node.command("power-off")
    assert node.nodes() == set()
    assert not (node.root / "etc/ascend_install.info").exists()
    again = node.command("power-on", "--machine", "8x310P-Pro")
    assert (again["place"], again["library"]) == (True, None)
    assert node.nodes() == whole | {"vdavinci148"}

    node.command("power-off")
    node.boot("second")
    assert node.command("power-on", "--machine", "8x310P-Pro")["library"] == "power-cycle"
    assert (node.slices(), node.nodes()) == ({3: ["vir02"]}, whole | {"vdavinci148"})
    node.program("npu-smi", "set", "-t", "vnpu-cfg-recover", "-d", "0")
    node.command("power-off")
    node.boot("third")
    node.command("power-on", "--machine", "8x310P-Pro")
    assert (node.slices(), node.nodes()) == ({}, whole)


def test_npu_is_unplugged_and_plugged(node: Node) -> None:
    node.command("power-on", "--machine", "4x300I-Duo")
    node.program("npu-smi", "set", "-t", "create-vnpu", "-i", "1", "-c", "1", "-f", "vir01")
    before = node.nodes()
    (address,) = node.command("unplug", "3")["unplug"]
    assert before - node.nodes() == {"davinci3", "vdavinci148"}
    assert not (node.root / "sys/bus/pci/devices" / address).is_symlink()
    listed = node.program("npu-smi", "info", "-m")
    assert listed.count("310P3") == 7
    assert node.command("plug", "all") == {"plug": [address]}
    assert before - node.nodes() == {"vdavinci148"}, "a chip that was taken out has lost its slices"
    driver = (node.root / "sys/bus/pci/devices" / address / "driver").resolve()
    assert driver == node.root / "sys/bus/pci/drivers/devdrv_device_driver"


def test_faults_are_shown(node: Node) -> None:
    node.command("power-on", "--machine", "8x310P-Pro")
    node.command("fault", "2", "health", "warning")
    node.command("fault", "5", "error", "0x80e01801")
    lines = node.run("show").stdout.splitlines()
    assert [line.split("  ")[-1].strip() for line in (lines[3], lines[6])] == ["warning", "alarm, error 0x80e01801"]
    node.command("clear")
    assert all(line.endswith("-") for line in node.run("show").stdout.splitlines()[1:])
    assert node.command("calls")["functions"].get("nvmlInit_v2") is None


def test_network_port_is_in_hccn_tool_and_its_file(node: Node) -> None:
    node.command("power-on", "--machine", "8xA3")
    assert node.program("hccn_tool", "-i", "3", "-ip", "-g") == "ipaddr:192.168.100.104\nnetmask:255.255.255.0\n"
    assert node.program("hccn_tool", "-i", "3", "-link", "-g") == "link status: UP\n"
    node.command("fault", "3", "network", "3")
    assert node.program("hccn_tool", "-i", "3", "-link", "-g") == "link status: DOWN\n"
    assert node.program("hccn_tool", "-i", "3", "-net_health", "-g") == "net health status: Unreachable\n"
    assert node.run("show").stdout.splitlines()[4].endswith("network 3")
    node.command("clear", "3")
    assert node.program("hccn_tool", "-i", "3", "-net_health", "-g") == "net health status: Success\n"
    lines = (node.root / "etc/hccn.conf").read_text().splitlines()
    assert lines[6:8] == ["address_3=192.168.100.104", "netmask_3=255.255.255.0"]


def test_hccn_tool_reports_the_port_state(node: Node) -> None:
    node.command("power-on", "--machine", "8x910B3")

    def answer(question: str) -> str:
        return node.program("hccn_tool", "-i", "3", question, "-g")

    def count(name: str) -> int:
        (line,) = [line for line in answer("-link_stat").splitlines() if name in line]
        assert len(line.split()) == 6 and line.startswith("[device 3]")
        return int(line.split()[-1])

    assert answer("-speed") == "Speed: 200000 Mb/s\n"
    assert (count("link up count"), count("link down count")) == (1, 0)
    assert answer("-bandwidth") == "Bandwidth TX: 0.00 MB/sec\nBandwidth RX: 0.00 MB/sec\n"
    node.command("fault", "3", "traffic", "1200", "800", "17")
    assert answer("-bandwidth") == "Bandwidth TX: 1200.00 MB/sec\nBandwidth RX: 800.00 MB/sec\n"
    counts = dict(line.split(":") for line in answer("-stat").splitlines() if not line.endswith(":"))
    assert (counts["mac_rx_bad_pkt_num"], counts["mac_tx_bad_pkt_num"]) == ("17", "0")

    def optical() -> dict[str, str]:
        lines = [line.split(":") for line in answer("-optical").splitlines()]
        return {key.strip().replace(" ", "_"): value.strip() for key, value in lines if value.strip()}

    well = optical()
    assert well["present"] == "present"
    assert [well[name].split()[1] for name in ("Tx_Power0", "Rx_Power0", "Vcc", "temperature")] == [
        "mW",
        "mW",
        "mV",
        "C",
    ]
    assert float(well["Rx_Power0"].split()[0]) > 0
    node.command("fault", "3", "network", "3")
    assert (answer("-speed"), answer("-link")) == ("Speed: Unknown!\n", "link status: DOWN\n")
    assert float(optical()["Rx_Power0"].split()[0]) == 0.0
    assert (count("link up count"), count("link down count")) == (1, 1)
    node.command("fault", "3", "network", "2")
    assert count("link down count") == 1, "it was down already"
    node.command("clear", "3")
    assert (count("link up count"), count("link down count")) == (2, 1)
    assert answer("-bandwidth").startswith("Bandwidth TX: 0.00")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        answer("-route")
    assert "not supported" in caught.value.stdout


def test_hccn_tool_second_command_line_syntax(node: Node) -> None:
    node.command("power-on", "--machine", "1x950")

    def answer(question: str, *words: str) -> str:
        return node.program("hccn_tool", "-g", question, "-i", "0", "-u", "1", "-p", "4", *words)

    assert answer("-link") == "link status: UP\n"
    assert answer("-bandwidth", "-time", "10") == "Bandwidth TX: 0.00 MB/sec\nBandwidth RX: 0.00 MB/sec\n"
    rows = [line for line in answer("-speed").splitlines() if "|" in line and "+" not in line]
    assert rows[1].split("|")[4].split()[1] == "Mb/s"
    assert "link up count" in answer("-link_stat")
    ports = [
        line.split("|") for line in node.program("hccn_tool", "-g", "-dev_info", "-i", "0").splitlines() if "ub" in line
    ]
    assert [(int(cells[1]), int(cells[2])) for cells in ports] == [(die, port) for die in (0, 1) for port in range(9)]
    node.command("fault", "0", "network", "5")
    node.command("fault", "0", "traffic", "3", "4", "5")
    assert answer("-link") == "link status: DOWN\n"
    assert "NA" in answer("-speed")
    counts = dict(line.split(":") for line in answer("-stat").splitlines() if not line.endswith(":"))
    assert counts["core_mib_rxbadpkts"] == "5"
    for words in (
        ["-i", "0", "-link", "-g"],
        ["-g", "-link", "-i", "0", "-u", "2", "-p", "0"],
        ["-g", "-link", "-i", "0", "-u", "0", "-p", "9"],
        ["-g", "-link", "-i", "1", "-u", "0", "-p", "0"],
    ):
        with pytest.raises(subprocess.CalledProcessError):
            node.program("hccn_tool", *words)


def test_machine_of_two_vendors_needs_a_vendor_for_an_ambiguous_device(node: Node) -> None:
    folder = node.root / "usr/lib/x86_64-linux-gnu"
    shutil.copytree(build(sources=NVML).folder, folder, symlinks=True)
    node.command("power-on", "--machine", "2xH100-2x310P")
    shown = node.command("show", "--json")
    assert (len(shown["nvidia"]["gpus"]), len(shown["ascend"]["npus"])) == (2, 2)
    unclear = node.run("fault", "1", "lost")
    assert unclear.returncode == 1 and "name one with --vendor" in unclear.stderr
    node.command("--vendor", "ascend", "fault", "1", "lost")
    node.command("fault", shown["nvidia"]["gpus"][0]["uuid"], "lost")
    shown = node.command("show", "--json")
    assert [gpu["lost"] for gpu in shown["nvidia"]["gpus"]] == [True, False]
    assert [npu["lost"] for npu in shown["ascend"]["npus"]] == [False, True]
    assert set(node.command("clear")) == {"nvidia", "ascend"}
    assert node.command("unplug", "0000:49:00.0") == {"unplug": ["0000:49:00.0"]}
    assert node.command("--vendor", "ascend", "plug", "all") == {"plug": ["0000:49:00.0"]}
    files = node.root / "var/lib/accelerator-simulator"
    assert {path.name for path in files.glob("*.txt")} == {"nvidia.txt", "ascend.txt"}
    node.command("power-on", "--machine", "8x310P-Pro")
    assert {path.name for path in files.glob("*.txt")} == {"ascend.txt"}


@pytest.mark.parametrize("name", MACHINES)
def test_every_chip_has_a_sysfs_directory_and_a_device_node(node: Node, name: str) -> None:
    node.command("power-on", "--machine", name)
    machine = load_machine(DATA, name, CATALOGUE)
    assert node.nodes() == {f"davinci{npu.physical}" for _device, npu in machine.chips}
    for device, _npu in machine.chips:
        here = node.root / "sys/bus/pci/devices" / device.address
        if machine.is_on_unified_bus:
            assert not here.exists()
            continue
        assert (here / "vendor").read_text() == "0x19e5\n"
        assert (here / "class").read_text() == "0x120000\n"
        assert (here / "device").read_text().strip() == CATALOGUE.npu_boards[device.board or ""]["pci"]["device"]
        assert (here / "numa_node").read_text().strip() == str(device.numa)
        assert (here / "driver").readlink().name == "devdrv_device_driver"
    assert (node.root / "dev/davinci_manager").exists()
    assert (node.root / "dev/devmm_svm").exists() == (machine.ascend.get("interface") != 2)
    version = (node.root / DRIVER / "version.info").read_text().splitlines()
    assert version[0] == "Version=25.2.0"
    assert "Driver_Install_Status=complete" in (node.root / "etc/ascend_install.info").read_text().splitlines()
    assert node.program("npu-smi", "info").startswith("+--"), "no warning of an installation that is not complete"


def test_npu_smi_works_with_an_older_library(node: Node) -> None:
    older = build("", older_driver.BUILT, sources=DCMI)
    shutil.copy2(older.folder / "libdcmi.so", node.libraries / "libdcmi.so")
    node.command("power-on", "--machine", "8x910A")
    assert node.program("npu-smi", "info", "-m").count("Ascend 910") == 8
