# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test power on and off with the library: the state of boards after files are placed again, a reboot, and a change of
the machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerator_simulator.description import gpu_uuid
from accelerator_simulator.hardware import load_catalogue, load_machine

from tests.simulator.nvml_support import Build

FILES = Path(__file__).resolve().parents[2] / "roles" / "simulator" / "files"
CATALOGUE = load_catalogue(FILES)
# A machine with NPUs needs their library too: machine_npus_test.py tests it
NAMES = sorted(
    path.stem for path in (FILES / "machines").glob("*") if not load_machine(FILES, path.stem, CATALOGUE).npus
)
# The command is tested here. Other tests cover the library with sanitizers.
pytestmark = pytest.mark.parametrize("nvml_build", [""], indirect=True, ids=["plain"])
# Runs the command with the test's boot ID
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from accelerator_simulator import cli, power
power.BOOT_ID = sys.argv[2]
sys.exit(cli.main(sys.argv[3:]))
"""


class Box:
    """A machine below a directory, with its library."""

    def __init__(self, build: Build, root: Path) -> None:
        self.root = root
        self.library = root / "usr/lib/x86_64-linux-gnu"
        self.library.mkdir(parents=True)
        for path in build.folder.iterdir():
            if path.is_symlink() or path.is_file():
                shutil.copy2(path, self.library / path.name, follow_symlinks=False)
        self.environment = build.environment(self.library)
        self.boot("first")

    def boot(self, identity: str) -> None:
        """Set another boot ID."""
        (self.root / "boot_id").write_text(identity)

    def command(self, *words: str) -> dict[str, Any]:
        """Return the command's JSON output."""
        arguments = [sys.executable, "-c", PROGRAM, str(FILES), str(self.root / "boot_id"), "--root", str(self.root)]
        done = subprocess.run([*arguments, *words], capture_output=True, text=True, env=self.environment, check=False)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def smi(self, *words: str) -> str:
        """Return nvidia-smi's output."""
        program = [str(self.library / "nvidia-smi"), *words]
        done = subprocess.run(program, capture_output=True, text=True, env=self.environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def instances(self, gpu: int) -> list[str]:
        """Return the profiles of a GPU's instances."""
        return [entry["profile"] for entry in self.command("show", "--json")["gpus"][gpu]["gpu_instances"]]

    def capabilities(self) -> set[str]:
        """Return the capability files of instances."""
        folder = self.root / "proc/driver/nvidia/capabilities"
        return {str(path.relative_to(folder)) for path in folder.glob("gpu*/mig/gi*/**/access")}


@pytest.fixture
def box(nvml_build: Build, tmp_path: Path) -> Box:
    return Box(nvml_build, tmp_path)


def test_instances_exist_until_the_next_boot_and_their_files_follow(box: Box) -> None:
    assert box.command("power-on", "--machine", "8xH100")["library"] == "load"
    box.smi("-i", "3", "-mig", "1")
    box.smi("mig", "-i", "3", "-cgi", "9,19", "-C")
    assert sorted(box.instances(3)) == ["1g.10gb", "3g.40gb"]
    made = box.capabilities()
    assert len(made) == 4

    box.command("power-off")
    assert box.capabilities() == set()
    again = box.command("power-on", "--machine", "8xH100")
    assert (again["place"], again["library"]) == (True, None)
    assert box.capabilities() == made
    assert sorted(box.instances(3)) == ["1g.10gb", "3g.40gb"]

    box.boot("second")
    assert box.command("power-on", "--machine", "8xH100")["library"] == "power-cycle"
    assert box.instances(3) == []
    assert box.capabilities() == set()
    assert box.command("show", "--json")["gpus"][3]["mig_mode_current"] == 0


def test_ampere_keeps_its_mode_after_a_boot_and_another_machine_starts_with_defaults(box: Box) -> None:
    box.command("power-on", "--machine", "4xA30")
    box.smi("-i", "0", "-mig", "1")
    shown = box.command("show", "--json")["gpus"]
    assert (shown[0]["mig_mode_current"], shown[0]["mig_mode_pending"]) == (0, 1)
    box.boot("second")
    box.command("power-on", "--machine", "4xA30")
    shown = box.command("show", "--json")["gpus"]
    assert [gpu["mig_mode_current"] for gpu in shown] == [1, 0, 0, 0]
    assert box.command("power-on", "--machine", "mixed")["library"] == "load"
    shown = box.command("show", "--json")["gpus"]
    assert [gpu["minor"] for gpu in shown] == [3, 1, 0, 4, 2]
    assert [gpu["mig_mode_current"] for gpu in shown] == [0] * 5


def test_gpu_is_unplugged_and_plugged(box: Box) -> None:
    box.command("power-on", "--machine", "8xH100")
    box.smi("-i", "3", "-mig", "1")
    before = {str(path.relative_to(box.root)) for path in box.root.glob("proc/driver/nvidia/gpus/*/information")}
    assert len(before) == 8 and box.smi("-L").count("GPU ") == 8
    (address,) = box.command("unplug", "3")["unplug"]
    assert not (box.root / "proc/driver/nvidia/gpus" / address).exists()
    assert not (box.root / "sys/bus/pci/devices" / address).is_symlink()
    assert box.smi("-L").count("GPU ") == 7
    assert box.command("unplug", "3") == {"unplug": []}, "it is already unplugged"
    assert box.command("plug", "all") == {"plug": [address]}
    after = {str(path.relative_to(box.root)) for path in box.root.glob("proc/driver/nvidia/gpus/*/information")}
    assert after == before and box.smi("-L").count("GPU ") == 8
    assert box.command("show", "--json")["gpus"][3]["mig_mode_current"] == 0


def test_newer_library_keeps_the_state_file(box: Box) -> None:
    box.command("power-on", "--machine", "8xH100")
    state = next(box.library.glob("libnvidia-gpusim.so.*"))
    before = state.stat().st_ino
    box.smi("-i", "0", "-mig", "1")
    installed = next(path for path in box.library.glob("libnvidia-ml.so.*.*") if not path.is_symlink())
    shutil.copy2(installed, box.library / "new")
    (box.library / "new").replace(installed)
    assert not box.command("power-on", "--machine", "8xH100")["changed"]
    assert state.stat().st_ino == before
    assert box.command("show", "--json")["gpus"][0]["mig_mode_current"] == 1


def test_command_injects_shows_and_clears_faults(box: Box) -> None:
    box.command("power-on", "--machine", "1xL4")
    box.command("fault", "0", "thermal")
    assert box.command("show", "--json")["gpus"][0]["thermal"] is True
    box.command("clear")
    assert box.command("show", "--json")["gpus"][0]["thermal"] is False


def test_configuration_provides_the_statements_for_the_library(box: Box) -> None:
    folder = box.root / "etc/accelerator-simulator"
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(json.dumps({"machine": "1xL4", "library": {"cap-nodes": True}}))
    box.command("power-on")
    assert "cap-nodes yes" in (box.root / "var/lib/accelerator-simulator/nvidia.txt").read_text().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_nvidia_smi_lists_each_machine_as_described(box: Box, name: str) -> None:
    box.command("power-on", "--machine", name, "--identity", "n")
    machine = load_machine(FILES, name, CATALOGUE)
    rows = box.smi(
        "--query-gpu=index,name,uuid,pci.bus_id,memory.total,mig.mode.current", "--format=csv,noheader,nounits"
    )
    found = [tuple(cell.strip() for cell in row.split(",")) for row in rows.splitlines()]
    expected = []
    for index, gpu in enumerate(machine.gpus):
        board = CATALOGUE.boards[gpu.board or ""]
        mode = "Disabled" if board.mig else "[N/A]"
        uuid, address = gpu_uuid("n", gpu.address), f"0000{gpu.address}".upper()
        expected.append((str(index), board.name, uuid, address, str(board.memory["total_mib"]), mode))
    assert found == expected


FACTS = """
import ctypes, json, pynvml
pynvml.nvmlInit()
def ask(name, *arguments):
    try:
        answer = getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as error:
        return f"error {error.value}"
    return answer.decode() if isinstance(answer, bytes) else answer
def filled(name, structure, gpu, field):
    made = getattr(pynvml, structure)()
    code = getattr(pynvml.nvmlLib, name)(gpu, ctypes.byref(made))
    return getattr(made, field) if code == 0 else f"error {code}"
rows = []
for index in range(pynvml.nvmlDeviceGetCount()):
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    histogram = ask("nvmlDeviceGetRowRemapperHistogram", gpu)
    mode = pynvml.c_nvmlDeviceAddressingMode_t()
    code = pynvml.nvmlLib.nvmlDeviceGetAddressingMode(gpu, ctypes.byref(mode))
    rows.append([ask("nvmlDeviceGetBrand", gpu), ask("nvmlDeviceGetNvLinkVersion", gpu, 0), ask("nvmlDeviceGetNumaNodeId", gpu),
                 filled("nvmlDeviceGetC2cModeInfoV", "c_nvmlC2cModeInfo_v1_t", gpu, "isC2cEnabled"), mode.value if code == 0 else code,
                 ask("nvmlDeviceGetDefaultApplicationsClock", gpu, 0), getattr(histogram, "max", histogram),
                 filled("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t", gpu, "state")])
print(json.dumps(rows))
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("4xGB200", [[14, 7, node, 1, 2, 2062, 3968, 3] for node in (2, 10, 18, 26)]),
        ("8xH100", [[14, 6, "error 3", 0, 0, 1980, 2560, 3]] * 8),
        ("8xA100-40", [[14, 4, "error 3", 0, 0, 1095, 640, "error 3"]] * 8),
        ("1xL4", [[14, "error 3", "error 3", 0, 0, 2040, 192, "error 3"]]),
        ("2xRTX-PRO-6000", [[14, "error 3", "error 3", 0, 0, 2430, 1536, "error 3"]] * 2),
    ],
)
def test_library_returns_recorded_board_values(box: Box, name: str, expected: list[list[Any]]) -> None:
    """Brand, NVLink version, the memory's NUMA node, C2C, addressing mode, application clock, remapper banks, fabric
    state.
    """
    box.command("power-on", "--machine", name)
    done = subprocess.run(
        [sys.executable, "-c", FACTS], capture_output=True, text=True, env=box.environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
