# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A simulated machine with the NVML library in a directory, and processes that use it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_builds import ROOT, SANITIZERS, SOURCES, Build, build
from tests.simulator.nvml_processes import start

DATA = ROOT / "roles/simulator/files"
VERSION = "580.95.05"
LIBRARY = f"libnvidia-ml.so.{VERSION}"
STATE = f"libnvidia-gpusim.so.{VERSION}"

__all__ = ["SOURCES", "Build"]
SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 0, 1, 2, 3, 4
NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED, TIMEOUT, FUNCTION_NOT_FOUND = 6, 7, 9, 10, 13
GPU_IS_LOST, RESET_REQUIRED, IN_USE, INSUFFICIENT_RESOURCES, ARGUMENT_VERSION_MISMATCH = 15, 16, 19, 23, 25
NOT_TIED = 0xFFFFFFFF


class NvmlError(Exception):
    """An NVML error code as the calling process received it."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{call}: NVML error {code}")
        self.code = code


class Client:
    """A separate process that calls NVML."""

    def __init__(self, environment: dict[str, str], initialize: bool = True, user: int | None = None) -> None:
        self.process = start(environment)
        if user is not None:
            self("become", user)
        if initialize:
            self("nvmlInit")

    def send(self, call: str, *arguments: Any, by_reference: bool = False) -> None:
        """Send a request without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(
            json.dumps({"call": call, "arguments": list(arguments), "by_reference": by_reference}) + "\n"
        )
        self.process.stdin.flush()

    def receive(self, call: str = "") -> dict[str, Any]:
        """Return the answer to the oldest request."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"{call}: the process ended with {self.process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NvmlError(answer["error"], call)
        return answer

    def __call__(self, call: str, *arguments: Any) -> Any:
        self.send(call, *arguments)
        return self.receive(call)["result"]

    def fill(self, call: str, *arguments: Any, by_reference: bool = False) -> Any:
        """Return the first structure argument as the call filled it."""
        self.send(call, *arguments, by_reference=by_reference)
        answer = self.receive(call)
        return answer["structs"][0]

    def code(self, call: str, *arguments: Any) -> int:
        """Return NVML's return code."""
        try:
            self(call, *arguments)
        except NvmlError as error:
            return error.code
        return SUCCESS

    def gpu(self, index: int = 0) -> Any:
        """Return the handle of a GPU."""
        return self("nvmlDeviceGetHandleByIndex", index)

    def close(self) -> int:
        """End the process; return its exit code."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        code = self.process.wait()
        self.process.stdout.close()
        return code


@dataclass
class Silicon:
    """A machine: the library with its state in one directory, and the trees that define the devices."""

    build: Build
    folder: Path
    clients: list[Client] = field(default_factory=list)
    operator: Client | None = None

    @property
    def dev(self) -> Path:
        return self.folder / "dev"

    @property
    def capabilities(self) -> Path:
        return self.folder / "proc/driver/nvidia/capabilities"

    @property
    def environment(self) -> dict[str, str]:
        return self.build.environment(self.folder / "lib")

    def client(self, initialize: bool = True, user: int | None = None) -> Client:
        """Return a new process, which ends with the test."""
        self.clients.append(Client(self.environment, initialize, user))
        return self.clients[-1]

    def container(self) -> Client:
        """Return a process as in a pod, without administrator rights."""
        client = self.client(initialize=False)
        client("give_administration_up")
        client("nvmlInit")
        return client

    def control(self, command: str) -> dict[str, Any]:
        """Send one control command from a process that does nothing else."""
        if self.operator is None:
            self.operator = self.client(initialize=False)
        return dict(self.operator("control", command))

    def show(self) -> dict[str, Any]:
        """Return the whole state."""
        return self.control("show")

    def load(self, description: str) -> dict[str, Any]:
        """Load a description whose roots are in this directory."""
        path = self.folder / "machine.txt"
        path.write_text(description)
        return self.control(f"load {path}")

    def smi(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run nvidia-smi of this build."""
        return subprocess.run(
            [str(self.folder / "lib/nvidia-smi"), *arguments],
            capture_output=True,
            text=True,
            env=self.environment,
            check=False,
        )

    def close(self) -> None:
        """End all processes and assert that they succeed. A sanitizer's finding changes the exit code."""
        codes = [client.close() for client in self.clients if client.process.poll() is None]
        assert set(codes) <= {0}


def profile_line(board: dict[str, Any], enum: int, profile: dict[str, Any]) -> str:
    """Return a `gpu-instance-profile` statement."""
    starts = ",".join(map(str, profile["starts"]))
    engines = " ".join(f"{name}={number}" for name, number in profile.get("engines", {}).items())
    return (
        f"gpu-instance-profile enum={enum} id={profile['id']} name={profile['name']} memory={profile['memory']} "
        f"slices={profile['slices']} multiprocessors={profile['multiprocessors']} {engines} maximum={profile['maximum']} "
        f"placements={starts}:{profile['size']}"
    )


# Placements of compute instances in a GPU instance, by its number of slices: nvidia.md §1.6 and the MIG user guide.
COMPUTE = {
    1: {1: [0]},
    2: {1: [0, 1], 2: [0]},
    3: {1: [0, 1, 2], 2: [0], 3: [0]},
    4: {1: [0, 1, 2, 3], 2: [0, 2], 4: [0]},
    7: {1: [0, 1, 2, 3, 4, 5, 6], 2: [0, 2, 4], 3: [0, 4], 4: [0], 7: [0]},
}
COMPUTE_ENUMS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}


def gpu_section(board: dict[str, Any], number: int, extra: Sequence[str] = ()) -> str:
    """Return a `gpu` section for a board of nvml_boards.py."""
    engines = " ".join(f"{name}={count}" for name, count in board["engines"].items())
    lines = [
        "gpu",
        f"uuid GPU-{number:08x}-0000-4000-8000-00000000{number:04x}",
        f"serial 16500000000{number:02d}",
        f"name {board['name']}",
        f"architecture {board['architecture']}",
        f"compute-capability {board['capability']}",
        f"pci-address 0000:{0x10 + number:02x}:00.0",
        f"pci-device-id {board['device_id']}",
        f"memory total={board['memory']} reserved=512 used=0",
        "power default=300000 minimum=100000 maximum=400000 usage=60000",
        "ecc yes",
        "row-remapping yes",
        "row-remapper-banks 640",
        f"engines {engines}",
    ]
    if board["profiles"]:
        lines += [
            f"mig {board['mig']}",
            f"mig-slices memory={board['memory_slices']} compute={board['compute_slices']}",
            f"mig-id-order {board.get('order', 'ascending')}",
        ]
    for enum, profile in board["profiles"].items():
        lines.append(profile_line(board, enum, profile))
        for slices, starts in COMPUTE[profile["slices"]].items():
            share = profile["multiprocessors"] * slices // profile["slices"]
            name = profile["name"] if slices == profile["slices"] else f"{slices}c.{profile['name']}"
            lines.append(
                f"compute-instance-profile gi={enum} enum={COMPUTE_ENUMS[slices]} id={COMPUTE_ENUMS[slices]} name={name} "
                f"slices={slices} multiprocessors={share} maximum={len(starts)} placements={','.join(map(str, starts))}:{slices}"
            )
    return "\n  ".join([*lines, *extra])


def machine_text(folder: Path, gpus: Sequence[str], statements: Sequence[str] = ()) -> str:
    """Return a complete description with its roots below the directory."""
    return "\n".join(
        [
            "format 1",
            f"driver-version {VERSION}",
            "cuda-version 13.0",
            f"dev-root {folder / 'dev'}",
            f"proc-root {folder / 'proc/driver/nvidia'}",
            f"sys-root {folder / 'sys'}",
            *statements,
            *gpus,
            "",
        ]
    )


def load(
    silicon: Silicon, *boards: str, extra: tuple[str, ...] = ("mig-mode yes",), statements: tuple[str, ...] = ()
) -> None:
    """Load a machine with these boards. GPUs that support MIG get the ``extra`` lines."""
    sections = [
        gpu_section(BOARDS[name], number, extra if BOARDS[name]["profiles"] else ())
        for number, name in enumerate(boards)
    ]
    answer = silicon.load(machine_text(silicon.folder, sections, statements))
    assert answer["ok"], answer


@pytest.fixture(scope="session", params=[SANITIZERS], ids=["sanitized"])
def nvml_build(request: pytest.FixtureRequest) -> Build:
    """Return the library build. Tests of programs that use the library request the plain build."""
    return build(request.param)


@pytest.fixture
def bare_silicon(nvml_build: Build) -> Iterator[Silicon]:
    """Yield the library in its own directory that every user can read, without a loaded machine."""
    with tempfile.TemporaryDirectory(prefix="nvml-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "lib").mkdir()
        programs = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
        for name in (LIBRARY, f"libcuda.so.{VERSION}", *programs):
            shutil.copy(nvml_build.folder / name, folder / "lib" / name)
        (folder / "lib/libnvidia-ml.so.1").symlink_to(LIBRARY)
        (folder / "lib/libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
        for name in ("dev/nvidia-caps", "proc/driver/nvidia", "sys"):
            (folder / name).mkdir(parents=True)
        for node in ("nvidiactl", *(f"nvidia{minor}" for minor in range(8))):
            (folder / "dev" / node).touch()
            (folder / "dev" / node).chmod(0o666)
        silicon = Silicon(nvml_build, folder)
        yield silicon
        silicon.close()
