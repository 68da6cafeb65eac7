# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""MPS as the driver runs it, on a real GPU, with PyTorch as the client: what the daemon holds, and whether it holds to it.

Usage: python tests/silicon/mps.py FILE     (as root, with nvidia-cuda-mps-control and PyTorch; it changes no setting of the GPU)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pynvml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "plugins/module_utils"))
from core.companions import SharedDevice  # noqa: E402
from core.nvidia import mps  # noqa: E402
from core.nvidia.configs import MULTI_USER  # noqa: E402
from core.system import System  # noqa: E402

GIB = 1024**3
CLIENT = """
import json, os, sys, time
import torch
made = {"multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count, "count": torch.cuda.device_count()}
free, total = torch.cuda.mem_get_info(0)
made["free"], made["total"] = free, total
held = []
try:
    for number in range(40):
        held.append(torch.empty(512 * 1024**2, dtype=torch.uint8, device="cuda:0"))
except Exception as error:
    made["refused"] = type(error).__name__ + ": " + str(error)[:300]
made["taken_mib"] = 512 * len(held)
held = held[:1]
x = torch.ones(1024, 1024, device="cuda:0")
made["sum"] = float((x @ x).sum())
print(json.dumps(made), flush=True)
time.sleep(float(sys.argv[1]))
"""
ASKED = (
    "get_server_list",
    "get_default_active_thread_percentage",
    "get_default_device_pinned_mem_limit 0",
    "get_default_device_pinned_mem_limit 1",
    "get_default_client_priority",
    "ps",
    "get_device_client_list",
    "lspart",
    "no_such_command",
)


def ask(environment: dict[str, str], command: str) -> list[Any]:
    """One command's end and words."""
    done = subprocess.run(
        ["nvidia-cuda-mps-control"],
        input=f"{command}\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return [done.returncode, done.stdout, done.stderr]


def processes() -> dict[str, Any]:
    """Who uses the GPU, by each of NVML's lists."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = {}
    for name in ("Compute", "Graphics", "MPSCompute"):
        try:
            running = getattr(pynvml, f"nvmlDeviceGet{name}RunningProcesses_v3")(handle)
            found[name] = [
                [each.pid, Path(f"/proc/{each.pid}/comm").read_text().strip(), each.gpuInstanceId] for each in running
            ]
        except (pynvml.NVMLError, OSError) as error:
            found[name] = str(error)
    pynvml.nvmlShutdown()
    return found


def case(number: int, uuid: str, sharing: dict[str, Any], clients: int) -> dict[str, Any]:
    """One claim's daemon, and its clients."""
    device = SharedDevice("nvidia.com/gpu=gpu-0", "gpu-0", "gpu", uuid, False, sharing)
    (companion,) = mps.companions(f"claim-{number}", [device])
    folder = Path(companion.folder)
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **companion.environment}
    options = companion.environment.get(mps.OPTIONS, "").split()
    begun = time.monotonic()
    daemon = subprocess.Popen(
        ["nvidia-cuda-mps-control", "-f", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    made: dict[str, Any] = {"companion": companion.environment_text, "commands": companion.commands_text}
    try:
        while True:
            told = subprocess.run(
                ["nvidia-cuda-mps-control"],
                input=companion.commands_text,
                env=environment,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            if told.returncode == 0 or time.monotonic() - begun > 15:
                break
            time.sleep(0.1)
        made["told"] = [told.returncode, told.stdout, told.stderr, round(time.monotonic() - begun, 2)]
        try:
            mps.check(System(), companion)
            made["check"] = "as asked"
        except Exception as error:  # noqa: BLE001
            made["check"] = f"{type(error).__name__}: {error}"
        inside = {
            key: value
            for key, value in environment.items()
            if key not in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_LOG_DIRECTORY")
        }
        started = [
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, "8"],
                env=inside,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _each in range(clients)
        ]
        lines = [each.stdout.readline() for each in started if each.stdout]
        made["clients"] = [json.loads(line) if line.strip() else None for line in lines]
        made["during"] = processes()
        made["asked"] = {command: ask(environment, command) for command in ASKED}
        servers = made["asked"]["get_server_list"][1].split()
        for server in servers[:1]:
            for command in (
                f"get_server_status {server}",
                f"get_client_list {server}",
                f"get_active_thread_percentage {server}",
                f"get_device_pinned_mem_limit {server} 0",
            ):
                made["asked"][command] = ask(environment, command)
        for each, line in zip(started, lines):
            _out, said = each.communicate(timeout=60)
            if not line.strip():
                made.setdefault("said", []).append(said[-1500:])
    finally:
        made["quit"] = ask(environment, "quit -t 2")
        try:
            made["ended"] = daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            made["ended"] = "killed"
        made["printed"] = daemon.stdout.read()[-3000:] if daemon.stdout else ""
        made["logs"] = {
            path.name: path.read_text("utf-8", "replace")[-3000:]
            for path in (folder / "log").iterdir()
            if path.is_file()
        }
        made["pipes"] = sorted(path.name for path in (folder / "pipe").iterdir())
    return made


def main() -> int:
    """All cases."""
    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    pynvml.nvmlShutdown()
    cases = {
        "limits": ({"defaultPinnedDeviceMemoryLimit": 4 * GIB, "defaultActiveThreadPercentage": 25}, 2),
        "uneven": ({"defaultPinnedDeviceMemoryLimit": 4 * GIB + 512 * 1024**2, "defaultActiveThreadPercentage": 50}, 1),
        "by uuid": ({"defaultPerDevicePinnedMemoryLimit": {uuid: 2 * GIB}}, 1),
        "users": ({MULTI_USER: True, "defaultActiveThreadPercentage": 33}, 1),
        "nothing": ({}, 1),
    }
    made: dict[str, Any] = {}
    for number, (name, (sharing, clients)) in enumerate(cases.items()):
        try:
            made[name] = case(number, uuid, sharing, clients)
        except Exception as error:  # noqa: BLE001
            made[name] = f"{type(error).__name__}: {error}"
        Path(sys.argv[1]).write_text(json.dumps(made, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
