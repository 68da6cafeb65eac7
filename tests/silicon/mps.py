# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test MPS on a real GPU with the driver's settings for a claim: the settings of the daemon and their effect on its
clients.

Usage: python tests/silicon/mps.py     (as root, with nvidia-cuda-mps-control and PyTorch; the README.md of tests lists
other requirements)

The commands of the driver's unit run without systemd. No setting of the GPU changes, because MPS runs in processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pynvml
from dra_driver.core.host.companions import Companion, SharedDevice
from dra_driver.core.vendors.nvidia import mps
from dra_driver.core.vendors.nvidia.configs import MULTI_USER

SECONDS = 60
SETTINGS = Path(__file__).resolve().parents[2] / "roles/dra_driver/files/mps-settings.sh"
GIB = 1024**3
MIB = 1024**2
PERCENT = "defaultActiveThreadPercentage"
LIMIT = "defaultPinnedDeviceMemoryLimit"
CLIENT = """
import json, sys, torch
made = {"multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count, "free": torch.cuda.mem_get_info(0)[0], "taken": 0}
held = []
try:
    while made["taken"] < 20 * 1024:
        held.append(torch.empty(256 * 1024**2, dtype=torch.uint8, device="cuda:0"))
        made["taken"] += 256
except torch.cuda.OutOfMemoryError:
    made["refused"] = True
print(json.dumps(made), flush=True)
sys.stdin.readline()
"""


def control(environment: Mapping[str, str], commands: str) -> subprocess.CompletedProcess[str]:
    """Send commands to the daemon."""
    return subprocess.run(
        [mps.TOOL], input=commands, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def check(companion: Companion, environment: Mapping[str, str]) -> None:
    """Verify that the daemon holds its settings, with the script that the daemon's unit runs."""
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as commands:
        commands.write(companion.commands_text)
        commands.flush()
        subprocess.run(["/bin/sh", SETTINGS, "check", commands.name], env=environment, timeout=SECONDS, check=True)


@contextlib.contextmanager
def daemon(companion: Companion) -> Iterator[dict[str, str]]:
    """Start the daemon of a claim with its settings; yield the environment of its clients."""
    for name in ("pipe", "log"):
        Path(companion.folder, name).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **companion.environment}
    words = [mps.TOOL, "-f", *companion.environment.get(mps.OPTIONS, "").split()]
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            deadline = time.monotonic() + SECONDS
            while control(environment, companion.commands_text).returncode and time.monotonic() < deadline:
                time.sleep(0.1)
            yield environment
        finally:
            control(environment, "quit -t 2\n")
            ended = running.wait(SECONDS)
            shutil.rmtree(companion.folder)
    assert ended == 0, ended


def clients(companion: Companion, environment: Mapping[str, str], number: int) -> list[dict[str, Any]]:
    """Return the observations of processes that run at the same time. NVML reports them and their server."""
    left_out = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_LOG_DIRECTORY", mps.OPTIONS)
    inside = {name: value for name, value in environment.items() if name not in left_out}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT], env=inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _each in range(number)
    ]
    try:
        found = [json.loads(each.stdout.readline()) for each in started if each.stdout]
        (server,) = control(environment, "get_server_list\n").stdout.split()
        handle = pynvml.nvmlDeviceGetHandleByUUID(companion.environment["CUDA_VISIBLE_DEVICES"])
        running = {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)}
        assert running == {int(server), *(each.pid for each in started)}, running
        return found
    finally:
        for each in started:
            each.communicate("\n", timeout=SECONDS)


def main() -> None:
    """Run claims with each kind of setting."""
    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "nothing": ({}, 1),
        "a quarter and 4 GiB": ({PERCENT: 25, LIMIT: 4 * GIB}, 2),
        "a half and 4.5 GiB": ({PERCENT: 50, LIMIT: 4 * GIB + 512 * MIB}, 1),
        "2 GiB by UUID": ({"defaultPerDevicePinnedMemoryLimit": {uuid: 2 * GIB}}, 1),
        "one server for all users": ({PERCENT: 50, MULTI_USER: True}, 1),
    }
    whole = 0
    for number, (name, (sharing, count)) in enumerate(cases.items()):
        (companion,) = mps.companions(f"real-{number}", [SharedDevice("", "gpu-0", "gpu", uuid, False, sharing)])
        limit = sharing.get(LIMIT) or sum(sharing.get("defaultPerDevicePinnedMemoryLimit", {}).values())
        with daemon(companion) as environment:
            check(companion, environment)
            for seen in clients(companion, environment, count):
                whole = whole or seen["multiprocessors"]
                share = seen["multiprocessors"] / whole
                print(
                    f"{name}: {share:.0%} of {whole} multiprocessors, {seen['free'] / GIB:.2f} GiB free, {seen['taken']} MiB taken"
                )
                assert abs(100 * share - sharing.get(PERCENT, 100)) <= 2, seen
                if limit:
                    assert seen.get("refused") and limit / 2 < seen["free"] < limit, seen
                    assert seen["taken"] * MIB < limit, seen
                else:
                    assert not seen.get("refused") and seen["free"] > 20 * GIB, seen
    pynvml.nvmlShutdown()


if __name__ == "__main__":
    main()
