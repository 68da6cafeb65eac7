# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the CDI files of NPUs with the CDI project's library inside nvidia-ctk, which reads files of any vendor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.backend.npu_machine import DATA, REPOSITORY, NpuMachine
from tests.simulator.nvml_builds import build

KIND = "k8s.npu.huawei.com/claim"
#: Writes the file of a claim for one whole chip, and of one for a vNPU if the chip supports it.
WRITES = """
import sys
from dra_driver.core.vendors.ascend.backend import AscendBackend
from dra_driver.core.host.cdi import build_spec, spec_path, write_spec
from dra_driver.core.model import devices_of
from dra_driver.core.host.system import System
root, directory = sys.argv[1:]
system = System(root)
backend = AscendBackend(system)
backend.open()
npus = devices_of(backend.discover())
edits = {"whole-npu": backend.device_edits(npus[-1], None)}
if npus[0].profiles:
    profile = npus[0].profiles[0]
    made = backend.create_partition(npus[0].uuid, profile.profile_id, profile.placements[-1])
    edits["slice-npu"] = backend.device_edits(npus[0], made)
for name, each in edits.items():
    spec = build_spec(backend.cdi_kind, {name: each}, common=backend.driver_edits(), annotations={"dra.accelerators/x": "{}"})
    write_spec(System(), spec_path(directory, backend.cdi_kind, name), spec)
"""


@pytest.fixture(scope="module")
def dcmi() -> Path:
    """Return the directory of the NPU library."""
    return build(sources=DATA / "dcmi").folder


@pytest.fixture
def listed(nvidia_ctk: Path, tmp_path: Path) -> Callable[[], tuple[set[str], str]]:
    """Return a function that returns the device names and messages of nvidia-ctk for the CDI directory."""

    def ask() -> tuple[set[str], str]:
        command = [nvidia_ctk, "cdi", "list", f"--spec-dir={tmp_path / 'cdi'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return set(re.findall(rf"^{re.escape(KIND)}=(\S+)$", done.stdout, re.MULTILINE)), done.stderr

    return ask


@pytest.mark.parametrize("machine", ["8x310P-Pro", "8x910B3", "1x950"])
def test_files_of_npus_are_cdi(
    machine: str, dcmi: Path, listed: Callable[[], tuple[set[str], str]], tmp_path: Path
) -> None:
    node = NpuMachine(tmp_path / "root")
    node.power_on(machine, dcmi)
    folder = tmp_path / "cdi"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(node.root), str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = {"whole-npu"} | ({"slice-npu"} if machine != "1x950" else set())
    found, said = listed()
    assert found == expected and "rror" not in said, said
    # Invalid files are not listed: nvidia-ctk reads their contents.
    for path in folder.iterdir():
        spec: dict[str, Any] = json.loads(path.read_text())
        spec["devices"][0]["containerEdits"]["deviceNodes"][0]["type"] = "x"
        path.write_text(json.dumps(spec))
    assert listed()[0] == set()
