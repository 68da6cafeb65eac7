# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stage of a scenario on NPUs: a machine with the backend open, and what scenarios have in common."""

from __future__ import annotations

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

    def fresh(self, **deadlines: float) -> AscendBackend:
        """A backend that has never looked, as a driver has that was just started."""
        backend = AscendBackend(self.system, Deadlines(**deadlines))
        backend.open()
        return backend

    def npus(self, full: bool = False) -> tuple[Device, ...]:
        """All NPUs, every one of them well."""
        findings = self.backend.discover(full)
        assert not any(finding.fault for finding in findings), findings
        return devices_of(findings)

    def first(self) -> Device:
        return self.npus()[0]

    def make(self, npu: Device, template: str, start: int) -> Partition:
        """Make a slice at a place, or with a number."""
        profile = npu.find_profile(template)
        assert profile is not None, [each.name for each in npu.profiles]
        return self.backend.create_partition(npu.uuid, profile.profile_id, Placement(start, profile.size))

    def calls(self) -> Counter[str]:
        """How often each function of the library was called so far, by whatever process."""
        return Counter({name: sum(each.values()) if isinstance(each, dict) else each for name, each in self._calls()})

    def _calls(self) -> Any:
        return self.control("calls")["calls"].items()

    def by_hand(self, *words: str) -> None:
        """What an administrator does with npu-smi."""
        assert "OK" in self.smi("set", "-t", *words), words


def faults(findings: tuple[Finding, ...]) -> dict[int, str]:
    return {finding.index: finding.fault.cause for finding in findings if finding.fault}
