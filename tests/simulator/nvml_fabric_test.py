# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the module nvidia_fabric_manager takes for the proof: each GPU's way into its fabric, asked through NVML's binding as on a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.switches import read_query

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import Silicon, gpu_section, machine_text

PROGRAM = """
import json
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_fabric import ask
from ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.switches import not_joined
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System
answers = ask(System(), binding=True)
print(json.dumps({"said": [each.describe() for each in answers.values()], "left": len(not_joined(answers))}))
"""


def test_each_gpu_says_how_far_it_is(bare_silicon: Silicon) -> None:
    extra = (
        "fabric state=3 status=0 cluster=00112233-4455-6677-8899-aabbccddeeff clique=7 health-mask=0xaa",
        "nvlink 0 version=4 state=active remote=switch address=0000:05:00.0 speed=26562",
    )
    sections = [gpu_section(BOARDS["H100-80"], 0, extra), gpu_section(BOARDS["L4"], 1)]
    bare_silicon.load(machine_text(bare_silicon.folder, sections))

    def told() -> tuple[list[str], int]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            env={**bare_silicon.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        return answer["said"], answer["left"]

    def told_by_program() -> list[str]:
        """What is read where NVML's binding is not there yet: on a node that gets its first driver."""
        said = bare_silicon.smi("-q")
        assert said.returncode == 0, said.stdout + said.stderr
        return [each.describe() for each in read_query(said.stdout).values()]

    assert told() == (["has joined", "does not tell"], 0)
    assert told_by_program() == told()[0]
    for fault, word in {
        "not-started": "has not begun to join",
        "joining": "is still joining",
        "failed": "could not join (999)",
    }.items():
        bare_silicon.control(f"fault 0 fabric {fault}")
        assert told() == ([word, "does not tell"], 1)
        # In words there is no number of a result that is none.
        assert told_by_program() == [word.replace("(999)", "(-1)"), "does not tell"]
