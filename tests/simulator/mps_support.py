# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""MPS daemons on simulated GPUs, and CUDA processes that are their clients or not."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import Client, Silicon, gpu_section, machine_text

SECONDS = 120
MIB, GIB = 1 << 20, 1 << 30
INVALID_VALUE, OUT_OF_MEMORY, UNAVAILABLE, NO_DEVICE, CONNECTION_FAILED, RPC_FAILURE = 1, 2, 46, 100, 805, 806
EXCLUSIVE, PROHIBITED = 3, 2
#: Reads calls as JSON lists, makes them, and prints the return code and the results.
CUDA = """
import ctypes, json, os, sys
if len(sys.argv) > 1:
    os.setgroups([]); os.setresgid(*[int(sys.argv[1])] * 3); os.setresuid(*[int(sys.argv[1])] * 3)
cuda = ctypes.CDLL("libcuda.so.1")
RESULTS = {
    "cuDeviceGetCount": [ctypes.c_int], "cuDeviceGet": [ctypes.c_int], "cuDeviceGetAttribute": [ctypes.c_int],
    "cuDeviceTotalMem_v2": [ctypes.c_size_t], "cuMemGetInfo_v2": [ctypes.c_size_t, ctypes.c_size_t],
    "cuCtxCreate_v2": [ctypes.c_void_p], "cuDevicePrimaryCtxRetain": [ctypes.c_void_p],
    "cuMemAlloc_v2": [ctypes.c_ulonglong], "cuDeviceGetUuid_v2": [ctypes.c_char * 16], "cuGetErrorName": [],
}
print("ready", flush=True)
for line in sys.stdin:
    name, *words = json.loads(line)
    if name == "cuGetErrorName":
        text = ctypes.c_char_p()
        code = cuda.cuGetErrorName(*words, ctypes.byref(text))
        values = [text.value.decode() if text.value else None]
    elif name == "cuDeviceGetName":
        text = ctypes.create_string_buffer(96)
        code = cuda.cuDeviceGetName(text, 96, *words)
        values = [text.value.decode()]
    elif name == "fork":
        child = os.fork()
        if child == 0:
            os._exit(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
        code, values = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), []
    else:
        cells = [kind() for kind in RESULTS.get(name, [])]
        wide = [ctypes.c_void_p(word) if word > 0x7fffffff else word for word in words]
        code = getattr(cuda, name)(*map(ctypes.byref, cells), *wide)
        values = [cell.raw.hex() if isinstance(cell, ctypes.Array) else cell.value for cell in cells]
    print(json.dumps([code, *values]), flush=True)
"""


def until(what: str, true: Callable[[], Any]) -> Any:
    """Return the first true value of a function; fail after SECONDS."""
    end = time.monotonic() + SECONDS
    while not (found := true()):
        assert time.monotonic() < end, f"timeout: {what}"
        time.sleep(0.01)
    return found


class Cuda:
    """A separate process that calls CUDA."""

    def __init__(self, environment: dict[str, str], user: int | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CUDA, *([str(user)] if user is not None else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.receive()

    def send(self, name: str, *words: int) -> None:
        """Send a request without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([name, *words]) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Return the answer to the oldest request."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the CUDA process ended with {self.process.wait()}"
        return line if line == "ready\n" else json.loads(line)

    def __call__(self, name: str, *words: int) -> Any:
        """Return the error code, or the result of a successful call."""
        self.send(name, *words)
        code, *values = self.receive()
        if code:
            return code
        return values[0] if len(values) == 1 else values or 0

    def open(self) -> int:
        """Create a context on the first device; return the code."""
        self.send("cuInit", 0)
        (code,) = self.receive()
        self.send("cuCtxCreate_v2", 0, 0)
        return int(code or self.receive()[0])

    def allocate(self, size: int) -> int:
        """Return the code of an allocation."""
        self.send("cuMemAlloc_v2", size)
        return int(self.receive()[0])

    def multiprocessors(self) -> int:
        return int(self("cuDeviceGetAttribute", 16, 0))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> int:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        code = self.process.wait(SECONDS)
        self.process.stdout.close()
        return code


@dataclass
class Mps:
    """A control daemon with its own directory."""

    silicon: Silicon
    name: str = "mps"
    variables: dict[str, str] = field(default_factory=dict)
    processes: list[Cuda] = field(default_factory=list)
    daemon: subprocess.Popen[str] | None = None

    @property
    def folder(self) -> Path:
        return self.silicon.folder / self.name

    @property
    def environment(self) -> dict[str, str]:
        return self.silicon.environment | {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }

    @property
    def program(self) -> str:
        return str(self.silicon.folder / "lib/nvidia-cuda-mps-control")

    def start(self, *options: str) -> Mps:
        """Start the daemon in the foreground as a child process."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "out").open("a") as output:
            self.daemon = subprocess.Popen(
                [self.program, "-f", *options],
                env=self.environment | self.variables,
                stdout=output,
                stderr=output,
                text=True,
            )
        until("the daemon answers", lambda: self.run("get_server_list").returncode == 0)
        return self

    def run(self, *commands: str) -> subprocess.CompletedProcess[str]:
        """Run the user interface once."""
        return subprocess.run(
            [self.program],
            input="".join(f"{command}\n" for command in commands),
            capture_output=True,
            text=True,
            env=self.environment,
            check=False,
            timeout=SECONDS,
        )

    def ask(self, *commands: str) -> str:
        """Return the answer of a running daemon."""
        done = self.run(*commands)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def log(self) -> str:
        return (self.folder / "out").read_text()

    def server(self) -> int:
        """Wait for a server that is ready; return its PID."""
        pid = int(until("a server", lambda: self.ask("get_server_list")))
        until("the server is ready", lambda: f"NEW SERVER {pid}: Ready" in self.log())
        return pid

    def clients(self) -> list[int]:
        return [int(word) for word in self.ask(f"get_client_list {self.server()}").split()]

    def client(self, user: int | None = None, **variables: str) -> Cuda:
        """Return a CUDA process with this daemon's pipe directory that has made no call yet."""
        self.processes.append(Cuda(self.environment | variables, user))
        return self.processes[-1]

    def stop(self) -> None:
        """Stop the remaining processes."""
        for process in self.processes:
            if process.process.poll() is None:
                assert process.close() == 0
        if self.daemon and self.daemon.poll() is None:
            self.run("quit -t 0")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.daemon.wait(SECONDS)
            self.daemon.kill()
            self.daemon.wait()


def processes(silicon: Silicon, gpu: int = 0) -> dict[int, dict[str, int]]:
    """Return the processes that a simulated GPU reports."""
    return {entry["pid"]: entry for entry in silicon.show()["gpus"][gpu]["processes"]}


def load(silicon: Silicon, mig: bool = False) -> None:
    """Load a machine with two H100 and an L4."""
    sections = [
        gpu_section(BOARDS["H100-80"], number, ("cores 16896", *(["mig-mode yes"] if mig else [])))
        for number in range(2)
    ]
    sections.append(gpu_section(BOARDS["L4"], 2, ("cores 7424",)))
    assert silicon.load(machine_text(silicon.folder, sections))["ok"]


def partition(silicon: Silicon, start: int) -> tuple[Client, Any, Any, str]:
    """Create a 1g.10gb on the first GPU; return the client, the GPU instance, the compute instance, and the UUID."""
    root = silicon.client()
    instance = root("create_at", root.gpu(), 19, start, 1)
    compute = root("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    return root, instance, compute, root("nvmlDeviceGetUUID", root("nvmlComputeInstanceGetInfo", compute)["device"])
