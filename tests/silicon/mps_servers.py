# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Measure whether two MPS servers with a thread percentage each divide the multiprocessors of a GPU twice.

The acceptance program uses this. It needs `nvidia-cuda-mps-control`, PyTorch, and an idle GPU in the compute mode
Default.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SECONDS = 120
COMMAND_SECONDS = 10
MEASURED_SECONDS = 5
#: Prefixes of environment variables that would change the daemon's interface, or the devices and limits of clients.
FOREIGN = ("CUDA_MPS_", "CUDA_VISIBLE_DEVICES")
PERCENT = 50
TOOL = "nvidia-cuda-mps-control"
#: Two servers with 50 percent each do 100 percent of the unlimited work if they run at the same time, and 50 percent
#: if they take turns.
LEAST = 0.75
ANSWERS = ("divided once", "divided twice")
#: Waits for a line, multiplies matrices for some seconds, and prints the number of products.
CLIENT = f"""
import sys, time, torch
one = torch.ones(4096, 4096, dtype=torch.float16, device="cuda:0")
torch.matmul(one, one)
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
count, end = 0, time.monotonic() + {MEASURED_SECONDS}
while time.monotonic() < end:
    for _each in range(20):
        torch.matmul(one, one)
    torch.cuda.synchronize()
    count += 20
print(count, flush=True)
"""


def answer_of(limited: int, unlimited: int) -> str:
    """Return the answer from the work of two clients with a percentage each, and without."""
    return ANSWERS[limited < LEAST * unlimited]


@contextlib.contextmanager
def server(uuid: str, percentage: int) -> Iterator[Mapping[str, str]]:
    """Run a control daemon for one GPU; yield the environment of its clients."""
    with tempfile.TemporaryDirectory() as directory:
        folders = {f"CUDA_MPS_{name}_DIRECTORY": str(Path(directory, name)) for name in ("PIPE", "LOG")}
        for folder in folders.values():
            Path(folder).mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment = {**kept, **folders}
        running = subprocess.Popen([TOOL, "-f"], env={**environment, "CUDA_VISIBLE_DEVICES": uuid})
        try:
            deadline = time.monotonic() + SECONDS
            while not tell(f"set_default_active_thread_percentage {percentage}", environment):
                if time.monotonic() > deadline or running.poll() is not None:
                    raise TimeoutError(f"{TOOL} does not answer")
                time.sleep(0.1)
            yield environment
        finally:
            tell("quit -t 2", environment)
            end(running)


def tell(line: str, environment: Mapping[str, str]) -> bool:
    """Send a command to the daemon; return whether it was accepted, False without an answer."""
    try:
        done = subprocess.run(
            [TOOL], input=f"{line}\n", env=environment, text=True, check=False, timeout=COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def end(process: subprocess.Popen[Any]) -> None:
    """Wait for the end of a process; kill it after COMMAND_SECONDS."""
    try:
        process.wait(COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def work(uuid: str, percentage: int) -> int:
    """Return the work of two clients at the same time, each with its own server."""
    with contextlib.ExitStack() as stack:
        clients = [client_of(uuid, percentage, stack) for _each in range(2)]
        for client in clients:
            if client.stdout is None or client.stdout.readline() != "ready\n":
                raise RuntimeError("a client of MPS has ended; PyTorch with CUDA is necessary")
        for client in clients:
            if client.stdin is not None:
                client.stdin.write("\n")
                client.stdin.flush()
        return sum(int(client.stdout.readline()) for client in clients if client.stdout is not None)


def client_of(uuid: str, percentage: int, stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    """Start a client with its own server. It is killed after SECONDS, so that reads of its answers end."""
    environment = stack.enter_context(server(uuid, percentage))
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stack.enter_context(client)
    stack.callback(client.kill)
    timer = threading.Timer(SECONDS, client.kill)
    timer.start()
    stack.callback(timer.cancel)
    return client


def measure(uuid: str) -> str:
    """Return whether the multiprocessors of a GPU are divided once or twice."""
    return answer_of(work(uuid, PERCENT), work(uuid, 100))
