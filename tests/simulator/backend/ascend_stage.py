# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stage of a scenario on NPUs: a machine with the backend open, and what scenarios have in common."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.core.ascend.backend import AscendBackend, Deadlines
from dra_driver.core.model import Device, Finding, Partition, Placement, devices_of
from dra_driver.core.system import System

from tests.simulator.backend.npu_machine import NpuMachine

Scenario = Callable[["Stage"], None]
#: By name: the machine that a scenario wants, statements for the whole machine, and the scenario.
SCENARIOS: dict[str, tuple[str, dict[str, Any], Scenario]] = {}


def on(machine: str, **library: Any) -> Callable[[Scenario], Scenario]:
    def register(scenario: Scenario) -> Scenario:
        SCENARIOS[scenario.__name__] = (machine, library, scenario)
        return scenario

    return register


class Stage(NpuMachine):
    """The machine as a scenario sees it, with a backend that is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.system = System(str(root))
        self.backend = self.fresh()

    def fresh(self, by_runtime: bool = False, **deadlines: float) -> AscendBackend:
        """A backend that has never looked, as a driver has that was just started."""
        backend = AscendBackend(self.system, Deadlines(**deadlines), by_runtime=by_runtime)
        backend.open()
        return backend

    def has(self, function: str) -> bool:
        """Whether this machine's driver has a function: an older one lacks some."""
        return hasattr(ctypes.CDLL(str(self.library)), function)

    def npus(self, full: bool = False) -> tuple[Device, ...]:
        """All NPUs, every one of them well."""
        findings = self.backend.discover(full)
        assert not any(finding.fault for finding in findings), findings
        return devices_of(findings)

    def first(self) -> Device:
        return self.npus()[0]

    def by_slices(self, npu: Device) -> list[tuple[str, int]]:
        """Template and place of the slices that are there."""
        return [(each.profile, each.placement.start) for each in self.backend.device(npu.uuid).partitions]

    def make(self, npu: Device, template: str, start: int) -> Partition:
        """Make a slice at a place, or with a number."""
        profile = npu.find_profile(template)
        assert profile is not None, [each.name for each in npu.profiles]
        return self.backend.create_partition(npu.uuid, profile.profile_id, Placement(start, profile.size))

    def recorded(self) -> Counter[str]:
        """Count the calls of the library and of programs from now on, by name."""
        counted: Counter[str] = Counter()
        dcmi, run = self.backend._source._dcmi, self.system.run
        code = dcmi._code

        def calling(function: str, *arguments: Any) -> int:
            counted[function] += 1
            return int(code(function, *arguments))

        def running(argv: Any, *arguments: Any, **options: Any) -> Any:
            counted[argv[0].rpartition("/")[2]] += 1
            return run(argv, *arguments, **options)

        dcmi._code = calling
        self.system.run = running  # type: ignore[method-assign]
        return counted

    def by_hand(self, *words: str) -> None:
        """What an administrator does with npu-smi."""
        assert "OK" in self.smi("set", "-t", *words), words


def faults(findings: tuple[Finding, ...]) -> dict[int, str]:
    return {finding.index: finding.fault.cause for finding in findings if finding.fault}


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.02)
