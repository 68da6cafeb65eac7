# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that NVIDIA's nvidia-ctk describes the simulated node: whole GPUs, MIG devices, capability nodes, libraries.

The program runs like on a node: in a separate mount namespace in which the simulator has mounted its trees over /proc,
/sys, and /dev. This needs root.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/simulator/files"
VERSION = "580.95.05"
PARTITION = """
import pynvml
pynvml.nvmlInit()
pynvml.nvmlDeviceSetMigMode(pynvml.nvmlDeviceGetHandleByIndex(1), 1)
gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
for profile, compute in ((9, 2), (19, 0), (15, 7)):
    instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, profile)
    made = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, compute)
    device = pynvml.nvmlComputeInstanceGetInfo(made).device
    print(pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlGpuInstanceGetInfo(instance).id)
"""
ON_A_NODE = """
set -eu
mount --make-rprivate /
mkdir -p /var/lib/accelerator-simulator
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib/accelerator-simulator
simulator() {{ PYTHONPATH={files} {python} -c 'import sys; from accelerator_simulator.cli import main; sys.exit(main())' "$@"; }}
simulator --configuration {configuration} --library-folder {library} power-on >&2
export LD_LIBRARY_PATH={library}
{python} {partition} > {uuids}
mknod -m 666 /dev/nvidia-uvm c $(awk '$2 == "nvidia-uvm" {{print $1}}' /proc/devices) 0
{before}
exec {ctk} --quiet cdi generate --mode=nvml --format=json --library-search-path={library} \
    --nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook
"""


def generated(nvidia_ctk: Path, library: Path, folder: Path, before: str = "") -> dict[str, Any]:
    """Return nvidia-ctk's output for a simulated node with partitions. ``before`` are commands that run there first."""
    (folder / "partition.py").write_text(PARTITION)
    (folder / "machine.json").write_text(
        json.dumps({"machine": "8xH100", "identity": "oracle", "library": {"cap-nodes": True}})
    )
    script = ON_A_NODE.format(
        files=FILES,
        python=sys.executable,
        configuration=folder / "machine.json",
        library=library,
        partition=folder / "partition.py",
        uuids=folder / "uuids",
        before=before,
        ctk=nvidia_ctk,
    )
    run = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.fixture
def described(nvidia_ctk: Path, library: Path, tmp_path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the CDI specification, and the UUIDs of the MIG devices with their GPU instances."""
    specification = generated(nvidia_ctk, library, tmp_path)
    made = dict(line.split() for line in (tmp_path / "uuids").read_text().splitlines())
    return specification, {uuid: int(instance) for uuid, instance in made.items()}


def paths(device: dict[str, Any]) -> set[str]:
    return {node["path"] for node in device["containerEdits"]["deviceNodes"]}


def test_specification_contains_every_device_and_its_nodes(
    described: tuple[dict[str, Any], dict[str, int]], library: Path
) -> None:
    specification, mig = described
    devices = {device["name"]: device for device in specification["devices"]}
    assert specification["kind"] == "nvidia.com/gpu"
    whole = {str(index) for index in (0, 2, 3, 4, 5, 6, 7)}
    assert whole <= set(devices)
    assert {name for name in devices if ":" in name} == {"1:0", "1:1", "1:2"}
    assert {name for name in devices if name.startswith("MIG-")} == set(mig)
    assert len([name for name in devices if name.startswith("GPU-")]) == 7
    for index in whole:
        assert f"/dev/nvidia{index}" in paths(devices[index])
    for uuid, instance in mig.items():
        minor = 3 + 135 * 1 + 9 * instance
        caps = {f"/dev/nvidia-caps/nvidia-cap{minor}", f"/dev/nvidia-caps/nvidia-cap{minor + 1}"}
        assert paths(devices[uuid]) == {"/dev/nvidia1"} | caps
    edits = specification["containerEdits"]
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= {node["path"] for node in edits["deviceNodes"]}
    mounted = {mount["hostPath"] for mount in edits["mounts"]}
    wanted = ("libnvidia-ml.so", "libcuda.so", "libnvidia-gpusim.so")
    assert {f"{library}/{name}.{VERSION}" for name in wanted} <= mounted
