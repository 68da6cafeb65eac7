# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the facts that the module nvidia_fabric_manager verifies: each GPU's fabric state, read with NVML's binding as
on a node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.fabric.nvswitch import (
    read_query,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.nvml import FUNCTION_NOT_FOUND

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import Silicon, gpu_section, machine_text

# Older bindings are simulated by removing the names that they lack.
PROGRAM = """
import json, sys
import pynvml
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.fabric_packages import read_join_states
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.fabric.nvswitch import not_joined
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
for name in sys.argv[1:]:
    delattr(pynvml, name)
answers = read_join_states(System(), binding=True)
print(json.dumps({"said": [each.describe() for each in answers.values()], "left": len(not_joined(answers))}))
"""
THIRD, SECOND, VERSIONED = "c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"
UNHEALTHY = {
    "routes": "has joined and is unhealthy: its routes are unhealthy",
    "mending": "has joined and is unhealthy: its routes are being recovered",
    "place": "has joined and is unhealthy: it is not configured as its place wants it (wrong system GUID)",
}
LIMITED = "has joined with limited capacity: its bandwidth is degraded"


def place(mask: str, summary: int) -> str:
    """Return the description of a GPU's fabric state."""
    health = f"health-mask={mask} health-summary={summary}"
    return f"fabric state=3 status=0 cluster=00112233-4455-6677-8899-aabbccddeeff clique=7 {health}"


LINK = "nvlink 0 version=4 state=active remote=switch address=0000:05:00.0 speed=26562"


def read_states(silicon: Silicon, *lacking: str) -> tuple[list[str], int]:
    """Return the state of each GPU, and how many have not joined or are unhealthy, with a binding that lacks some
    names.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lacking],
        capture_output=True,
        text=True,
        env={**silicon.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["said"], answer["left"]


def states_of_nvidia_smi(silicon: Silicon) -> list[str]:
    """Return the states from nvidia-smi, which is used on a node without NVML's binding during its first driver
    installation.
    """
    said = silicon.smi("-q")
    assert said.returncode == 0, said.stdout + said.stderr
    return [each.describe() for each in read_query(said.stdout).values()]


def test_each_gpu_reports_its_fabric_state(bare_silicon: Silicon) -> None:
    sections = [gpu_section(BOARDS["H100-80"], 0, (place("0xaa", 0), LINK)), gpu_section(BOARDS["L4"], 1)]
    bare_silicon.load(machine_text(bare_silicon.folder, sections))
    assert read_states(bare_silicon) == (["has joined", "does not report its state"], 0)
    assert states_of_nvidia_smi(bare_silicon) == read_states(bare_silicon)[0]
    for fault, word in {
        "not-started": "has not begun to join",
        "joining": "is still joining",
        "failed": "could not join (999)",
    }.items():
        bare_silicon.control(f"fault 0 fabric {fault}")
        assert read_states(bare_silicon) == ([word, "does not report its state"], 1)
        # nvidia-smi's text contains no number for an unknown result.
        assert states_of_nvidia_smi(bare_silicon) == [word.replace("(999)", "(-1)"), "does not report its state"]


@pytest.mark.parametrize("summary", [1, 0], ids=["with a summary", "without one"])
def test_each_gpu_reports_its_fabric_health(bare_silicon: Silicon, summary: int) -> None:
    bare_silicon.load(
        machine_text(bare_silicon.folder, [gpu_section(BOARDS["H100-80"], 0, (place("0x1aa", summary), LINK))])
    )
    assert read_states(bare_silicon) == (["has joined"], 0) and states_of_nvidia_smi(bare_silicon) == ["has joined"]
    for fault, words in {**UNHEALTHY, "bandwidth": LIMITED}.items():
        bare_silicon.control(f"fault 0 fabric {fault}")
        assert read_states(bare_silicon) == ([words], int(fault in UNHEALTHY)), fault
        assert states_of_nvidia_smi(bare_silicon) == [words.replace("wrong system GUID", "Incorrect SysGUID")]


def test_older_libraries_and_bindings_are_queried_with_older_functions(bare_silicon: Silicon) -> None:
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(BOARDS["H100-80"], 0, (place("0x1aa", 1), LINK))]))
    bare_silicon.control("fault 0 fabric routes")
    assert read_states(bare_silicon, THIRD) == ([UNHEALTHY["routes"]], 1), "the mask alone contains the state"
    for lacking in ((THIRD, SECOND), (VERSIONED,)):
        assert read_states(bare_silicon, *lacking) == (["has joined"], 0), "the health is unknown"
    bare_silicon.control("fault 0 fabric joining")
    for lacking in ((THIRD,), (THIRD, SECOND), (VERSIONED,)):
        assert read_states(bare_silicon, *lacking) == (["is still joining"], 1)
    bare_silicon.control(f"fault 0 call {VERSIONED} fail {FUNCTION_NOT_FOUND}")
    assert read_states(bare_silicon) == (["is still joining"], 1), "the library is older than this function"
    bare_silicon.control("fault 0 call nvmlDeviceGetGpuFabricInfo fail 3")
    assert read_states(bare_silicon) == (["does not report its state"], 0)
