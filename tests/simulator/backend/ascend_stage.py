# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Shared code of the NPU scenarios: a machine with an open backend, and helpers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.core.host.system import System
from dra_driver.core.model import Device, Finding, Partition, Placement, devices_of
from dra_driver.core.vendors.ascend.backend import AscendBackend, AscendDeadlines
from dra_driver.core.vendors.ascend.dcmi.messages import SOCKET

from tests.simulator.backend.npu_machine import NpuMachine

Scenario = Callable[["Stage"], None]
#: By name: the scenario's machine, statements for the whole machine, and the scenario.
SCENARIOS: dict[str, tuple[str, dict[str, Any], Scenario]] = {}


def on(machine: str, **library: Any) -> Callable[[Scenario], Scenario]:
    """Register a scenario for a simulated machine. ``library``: additional statements of its description."""

    def register(scenario: Scenario) -> Scenario:
        SCENARIOS[scenario.__name__] = (machine, library, scenario)
        return scenario

    return register


class Calls:
    """Counts of the library calls of all processes since its creation, by name."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.clear()

    def clear(self) -> None:
        self._stage.control("calls", "reset")

    def now(self) -> Counter[str]:
        return Counter(self._stage.control("calls")["functions"])

    def __getitem__(self, name: str) -> int:
        return self.now()[name]

    def __contains__(self, name: str) -> bool:
        return name in self.now()


class Stage(NpuMachine):
    """The machine of a scenario, with a backend that is open through the DCMI helper, as on a node."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.system = System(str(root))
        self._folder = tempfile.TemporaryDirectory(prefix="dcmi-")  # the path of a socket must be short
        self.helper: subprocess.Popen[bytes] | None = None
        if not self.system.exists(SOCKET):  # else another process of the scenario has started it
            self.start_helper()
        try:
            self.backend = self.fresh()
        except Exception:
            self.close()
            raise

    @property
    def socket(self) -> Path:
        return Path(self._folder.name, "socket")

    def start_helper(self) -> None:
        """Start the helper, and wait until it listens."""
        place = self.system.path(SOCKET)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(self.socket)
        words = [
            sys.executable,
            "-m",
            "dra_driver.core.vendors.ascend.dcmi.helper_server",
            "--socket",
            str(self.socket),
            "--root",
            str(self.root),
        ]
        self.helper = subprocess.Popen(words, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
        until(self.socket.exists)

    def stop_helper(self) -> None:
        """Stop the helper and its processes."""
        if self.helper is not None:
            self.helper.terminate()
            self.helper.wait(60)
            self.helper = None

    def close(self) -> None:
        """Stop the processes of the stage."""
        self.stop_helper()
        self._folder.cleanup()

    def fresh(self, by_runtime: bool = False, network_tools: bool = False, **deadlines: float) -> AscendBackend:
        """Return a backend that has not scanned yet, like a driver at its start."""
        backend = AscendBackend(
            self.system, AscendDeadlines(**deadlines), by_runtime=by_runtime, network_tools=network_tools
        )
        backend.open()
        return backend

    def has(self, function: str) -> bool:
        """Return whether this machine's driver has a function. An older one lacks some."""
        return hasattr(ctypes.CDLL(str(self.library)), function)

    def npus(self, full: bool = False) -> tuple[Device, ...]:
        """Return all NPUs; assert that all are healthy."""
        findings = self.backend.discover(full)
        assert not any(finding.fault for finding in findings), findings
        return devices_of(findings)

    def first_npu(self) -> Device:
        return self.npus()[0]

    def by_slices(self, npu: Device) -> list[tuple[str, int]]:
        """Return template and placement of the existing vNPUs."""
        return [(each.profile, each.placement.start) for each in self.backend.device(npu.uuid).partitions]

    def make(self, npu: Device, template: str, start: int) -> Partition:
        """Create a vNPU at a placement, or with a number."""
        profile = npu.find_profile(template)
        assert profile is not None, [each.name for each in npu.profiles]
        return self.backend.create_partition(npu.uuid, profile.profile_id, Placement(start, profile.size))

    def call_counts(self) -> Calls:
        """Count the library calls from now on, including those of npu-smi."""
        return Calls(self)

    def by_hand(self, *words: str) -> None:
        """Run an administrator's npu-smi command."""
        assert "OK" in self.smi("set", "-t", *words), words


def faults(findings: tuple[Finding, ...]) -> dict[int, str]:
    return {finding.index: finding.fault.cause for finding in findings if finding.fault}


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.02)
