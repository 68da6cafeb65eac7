# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that errors in a machine description are reported with line, key, found value, and expected value."""

from __future__ import annotations

import json
from pathlib import Path

from accelerator_simulator.description import Settings, render
from accelerator_simulator.hardware import load_catalogue, load_machine

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import DATA, INVALID_ARGUMENT, VERSION, Silicon, gpu_section, machine_text

MACHINES = sorted(path.stem for path in (DATA / "machines").glob("*.json"))


# Text of a valid description, its replacement, and the expected error.
WRONG = [
    ("format 1", "format 2", 'line 1: format: found "format", expected "format 1"'),
    ("cuda-version 13.0", "cuda-version x", "a version such as 13.0"),
    ("cuda-version 13.0", "", "both before the first gpu"),
    ("cuda-version 13.0", "cuda-version 13.0\ncolour red", 'colour: found "colour"'),
    ("cuda-version 13.0", "cuda-version 13.0\ncuda-version 13.0", "each statement once"),
    ("cuda-version 13.0", "cuda-version 13.0\ncap-nodes maybe", 'cap-nodes: found "maybe", expected yes or no'),
    ("name NVIDIA A30", "", "expected name"),
    ("name NVIDIA A30", "name NVIDIA A30\n  taste sweet", "a statement for a gpu"),
    ("name NVIDIA A30", "name", "expected a value"),
    ("name NVIDIA A30", "name " + 70 * "x", "a text of 1 to 63 bytes"),
    ("name NVIDIA A30", "name NVIDIA A30\n  minor 32", "a whole number from 0 to 31"),
    ("name NVIDIA A30", "name NVIDIA A30\n# " + 1100 * "x", "at most 1023 bytes"),
    ("uuid GPU-00000000", "uuid GPU-x0000000", "GPU- and a UUID"),
    ("pci-address 0000:10:00.0", "pci-address 0000:10:99.0", "a PCI address such as"),
    ("pci-address 0000:10:00.0", "", "expected pci-address"),
    ("memory total=24576", "memory total=5", "memory reserved + used not above total"),
    ("memory total=24576 reserved=512", "memory reserved=512", "expected total"),
    ("memory total=24576", "memory total=24576 size=3", "expected pairs out of: total reserved used"),
    ("memory total=24576", "memory total=24576 total=24576", "each pair once"),
    ("default=300000", "default=500000", "power minimum <= default <= maximum"),
    ("ecc yes", "ecc sometimes", "one of no yes unsupported"),
    ("mig pending", "mig later", "one of none pending immediate"),
    ("mig pending", "mig none", "mig pending"),
    ("mig-slices memory=4 compute=4", "", "mig-slices and gpu-instance-profile statements"),
    ("enum=0 id=14", "enum=18 id=14", "a whole number from 0 to 17"),
    ("enum=7 id=21", "enum=7 id=14", "each enum and each id once in a gpu"),
    ("placements=0,1,2,3:1\n", "placements=0,1,2,4:1\n", "placements that are multiples of their size"),
    ("placements=0,2:2\n", "placements=0,1:2\n", "placements that are multiples of their size"),
    ("placements=0:4\n", "placements=0:3\n", "a placement size that is the whole"),
    ("placements=0,2:2\n", "placements=0,2\n", "placements=start,start"),
    ("decoder=4", "decoder=3", "suffice for maximum="),
    ("compute-instance-profile gi=0 ", "compute-instance-profile gi=5 ", "gi= the enum of"),
    ("gi=0 enum=0", "gi=0 enum=9", "a whole number from 0 to 8"),
    ("name=1c.2g.12gb ", "", "name= of at most 31 bytes"),
]


def good(silicon: Silicon) -> str:
    return machine_text(silicon.folder, [gpu_section(BOARDS["A30"], 0)])


def test_invalid_description_is_rejected_and_the_state_is_unchanged(bare_silicon: Silicon) -> None:
    text = good(bare_silicon)
    for load_first in (False, True):
        if load_first:
            assert bare_silicon.load(text)["ok"]
        before = bare_silicon.control("show")
        for line, replacement, message in WRONG:
            assert line in text
            answer = bare_silicon.load(text.replace(line, replacement, 1))
            assert answer["code"] == INVALID_ARGUMENT, replacement
            assert message in answer["error"]
            assert "found" in answer["error"]
        assert bare_silicon.control("show") == before


def test_gpus_differ(bare_silicon: Silicon) -> None:
    twice = machine_text(bare_silicon.folder, [gpu_section(BOARDS["A30"], 0)] * 2)
    assert "GPUs that differ" in bare_silicon.load(twice)["error"]
    many = machine_text(bare_silicon.folder, [gpu_section(BOARDS["L4"], number) for number in range(33)])
    assert "at most 32" in bare_silicon.load(many)["error"]
    most = machine_text(bare_silicon.folder, [gpu_section(BOARDS["H100-80"], number) for number in range(32)])
    assert bare_silicon.load(most)["gpus"] == 32
    assert len(bare_silicon.show()["gpus"]) == 32


def test_error_names_the_missing_file(bare_silicon: Silicon) -> None:
    answer = bare_silicon.control("load /nowhere/machine.txt")
    assert "/nowhere/machine.txt: No such file or directory" in answer["error"]


def test_a_machine_without_gpus(bare_silicon: Silicon) -> None:
    assert bare_silicon.load(machine_text(bare_silicon.folder, []))["gpus"] == 0
    assert bare_silicon.client()("nvmlDeviceGetCount") == 0


def test_every_machine_of_the_role_loads(bare_silicon: Silicon) -> None:
    catalogue = load_catalogue(DATA)
    settings = Settings(
        identity="n",
        driver_version=VERSION,
        cuda_version="13.0",
        proc_root=str(bare_silicon.folder / "proc/driver/nvidia"),
        dev_root=str(bare_silicon.folder / "dev"),
        sys_root=str(bare_silicon.folder / "sys"),
    )
    for machine in MACHINES:
        hardware = load_machine(DATA, machine, catalogue)
        answer = bare_silicon.load(render(hardware, catalogue, settings))
        assert answer == {"code": 0, "ok": True, "gpus": len(hardware.gpus)}, machine


def test_the_documented_example_loads(bare_silicon: Silicon) -> None:
    text = (Path(DATA) / "nvml/MACHINE_FORMAT.md").read_text()
    example = text.split("## Example (cut down)")[1].split("```")[1]
    assert bare_silicon.load(example)["gpus"] == 1
    assert json.loads(json.dumps(bare_silicon.show()))["gpus"][0]["name"] == "NVIDIA A30"
