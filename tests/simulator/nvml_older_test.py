# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test differences of older drivers: instance IDs in reversed order, and missing symbols."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.backend.gpu_machine import Machine
from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_builds import build
from tests.simulator.nvml_support import LIBRARY, Silicon, gpu_section, machine_text

#: Symbols that the backend uses and a driver of the branch R535 lacks.
ABSENT = (
    "nvmlDeviceGetAddressingMode",
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV",
    "nvmlDeviceGetGpuInstanceProfileInfoV",
)
PARTITION = """
import json, sys
from dra_driver.core.model import Placement, devices_of
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.host.system import System
backend = NvidiaBackend(System(sys.argv[1]))
backend.open()
before = devices_of(backend.discover())[0]
backend.set_partitioning(before.uuid, True)
made = backend.create_partition(before.uuid, 9, Placement(4, 4))
claimed = [node.path for node in backend.device_edits(before, made).device_nodes]
gpu = backend.device(before.uuid)
ids = sorted(profile.profile_id for profile in gpu.profiles)
assert [partition.uuid for partition in gpu.partitions] == [made.uuid]
paths = [node.path for node in backend.device_edits(gpu, made).device_nodes]
print(json.dumps([ids, made.instance_id, before.minor, gpu.minor, paths, claimed]))
"""


def test_instance_ids_are_reversed_for_a_whole_machine(bare_silicon: Silicon) -> None:
    own = {**BOARDS["H100-80"], "order": "ascending"}
    plain = gpu_section(BOARDS["H100-80"], 0, ("mig-mode yes",)).replace("mig-id-order ascending\n", "")
    sections = [plain, gpu_section(own, 1, ("mig-mode yes",))]
    assert bare_silicon.load(machine_text(bare_silicon.folder, sections, ("mig-id-order reversed",)))["ok"]
    client = bare_silicon.client()
    ids = {}
    for index in (0, 1):
        for start in (0, 4):
            instance = client("create_at", client.gpu(index), 9, start, 4)
            ids[index, start] = client("nvmlGpuInstanceGetInfo", instance)["id"]
    assert ids == {(0, 0): 2, (0, 4): 1, (1, 0): 1, (1, 4): 2}


@pytest.mark.parametrize("nvml_build", [""], indirect=True, ids=["plain"])
def test_absent_symbols_are_not_exported(bare_silicon: Silicon) -> None:
    shutil.copy(build("", f"ABSENT={' '.join(ABSENT)}").folder / LIBRARY, bare_silicon.folder / "lib" / LIBRARY)
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(BOARDS["H100-80"], 0, ("mig-mode yes",))]))
    client = bare_silicon.client()
    program = """
import ctypes, json, sys
library = ctypes.CDLL("libnvidia-ml.so.1")
print(json.dumps([hasattr(library, name) for name in sys.argv[1:]]))
"""
    names = [*ABSENT, "nvmlDeviceGetGpuInstanceProfileInfo"]
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        env=bare_silicon.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [False, False, False, True]
    assert client("symbol", "nvmlDeviceGetCount_v2", {"out": 0}) == [0, 1]


def run_on_machine(root: Path, program: str, library: Path, **settings: object) -> Any:
    """Return the JSON output of a Python program on a machine whose library has these settings."""
    (root / "etc/accelerator-simulator").mkdir(parents=True)
    (root / "etc/accelerator-simulator/machine.json").write_text(json.dumps({"library": settings}))
    machine = Machine(root, "8xH100", library)
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        env=machine.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_backend_creates_partitions_on_an_older_driver(tmp_path: Path) -> None:
    """Missing symbols, reversed IDs, and a minor that changes with the MIG mode."""
    settings = {"mig-id-order": "reversed", "mode-change-moves-minor": True}
    answer = run_on_machine(tmp_path / "root", PARTITION, build("", f"ABSENT={' '.join(ABSENT)}").folder, **settings)
    ids, instance, before, after, paths, claimed = answer
    assert (ids, instance, before, after) == ([0, 5, 9, 14, 15, 19, 20], 1, 0, 8)
    assert "/dev/nvidia8" in paths
    assert "/dev/nvidia0" not in paths
    assert claimed == paths, "the facts that a claim was planned with are from before the change"


#: Changes a GPU's MIG mode alternately in this and another process, and prints each time the minor that it knows and
#: the one that a third process reads.
BY_TURNS = """
import json, subprocess, sys
from dra_driver.core.vendors.registry import create
from dra_driver.core.model import devices_of
from dra_driver.core.host.system import System
root = sys.argv[1]
OTHER = '''
import sys
from dra_driver.core.vendors.registry import create
from dra_driver.core.model import devices_of
from dra_driver.core.host.system import System
backend = create("nvidia", System(sys.argv[1]))
backend.open()
if sys.argv[2]:
    backend.set_partitioning(devices_of(backend.discover())[0].uuid, sys.argv[2] == "on")
print(devices_of(backend.discover())[0].minor)
'''
def other(mode=""):
    return int(subprocess.run([sys.executable, "-c", OTHER, root, mode], capture_output=True, text=True, check=True).stdout)
backend = create("nvidia", System(root))
backend.open()
uuid = devices_of(backend.discover())[0].uuid
found = []
for who, mode in (("it", "on"), ("it", "off"), ("other", "on"), ("it", "off"), ("other", "on"), ("other", "off"), ("it", "on")):
    if who == "it":
        backend.set_partitioning(uuid, mode == "on")
    else:
        other(mode)
        backend.device(uuid)
    found.append([backend.device(uuid).minor, other()])
print(json.dumps(found))
"""


def test_backend_follows_a_minor_changed_by_any_process(tmp_path: Path) -> None:
    found = run_on_machine(tmp_path / "root", BY_TURNS, build("").folder, **{"mode-change-moves-minor": True})
    assert len(found) == 7 and all(known == there for known, there in found), found
    assert len({there for _known, there in found}) > 1, "the minor has not moved"
