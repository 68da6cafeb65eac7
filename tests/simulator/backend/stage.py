# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stage of a scenario: a machine with the backend open, and what scenarios have in common."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.core.errors import (
    AcceleratorError,
)
from dra_driver.core.layout import LayoutPlan, plan_layouts
from dra_driver.core.layout_rules import Match, Rule
from dra_driver.core.layout_run import execute
from dra_driver.core.model import Device, devices_of
from dra_driver.core.nvidia.backend import NvidiaBackend
from dra_driver.core.system import System

from tests.simulator.backend.gpu_machine import SIMULATOR
from tests.unit.core import board_model

#: By name: the machine that a scenario wants, and the scenario.
SCENARIOS: dict[str, tuple[str, Callable[[Stage], None]]] = {}


class Stage:
    """The machine as a scenario sees it, with a backend that is open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.backend = NvidiaBackend(System(str(root)))

    def control(self, *words: str) -> str:
        """What the simulator's command line says."""
        program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
        arguments = ["--root", str(self.root), *words]
        environment = {**os.environ, "PYTHONPATH": str(SIMULATOR)}
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], env=environment, check=True, capture_output=True, text=True
        ).stdout

    def gpus(self, full: bool = False) -> tuple[Device, ...]:
        """All GPUs, every one of them well."""
        findings = self.backend.discover(full)
        assert not any(finding.fault for finding in findings), findings
        return devices_of(findings)

    def first(self) -> Device:
        return self.gpus()[0]

    def lay_out(self, *rules: Rule) -> None:
        """Bring the first GPUs to these rules, together with the GPUs that are reset along with them."""
        for outcome in plan_layouts(list(itertools.zip_longest(self.gpus(), rules))):
            assert isinstance(outcome, LayoutPlan), outcome
            execute(self.backend, outcome)

    def enabled(self) -> Device:
        """The first GPU with partitioning on."""
        gpu = self.first()
        self.lay_out(Rule(Match(), "static"))
        gpu = self.backend.device(gpu.uuid)
        assert gpu.partitioning.enabled and gpu.partitioning.pending and gpu.partitions == ()
        return gpu


def on(machine: str) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    def register(scenario: Callable[[Stage], None]) -> Callable[[Stage], None]:
        SCENARIOS[scenario.__name__] = (machine, scenario)
        return scenario

    return register


def refused(kind: type[AcceleratorError], action: Callable[..., Any], *arguments: Any) -> AcceleratorError:
    try:
        action(*arguments)
    except AcceleratorError as error:
        assert error.__class__ is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        assert str(error)
        return error
    raise AssertionError(f"{action} was not refused")


def recorded(stage: Stage) -> list[tuple[str, Any]]:
    """Record the calls of NVML from now on, by function and last argument."""
    calls: list[tuple[str, Any]] = []
    original = stage.backend._nvml.call

    def recording(function: str, *arguments: Any, doing: str = "") -> Any:
        calls.append((function, arguments[-1] if arguments else None))
        return original(function, *arguments, doing=doing)

    stage.backend._nvml.call = recording  # type: ignore[method-assign]
    return calls


def places(gpu: Device) -> tuple[board_model.Place, ...]:
    return tuple(sorted((each.profile_id, each.placement.start) for each in gpu.partitions))


def same_profiles(gpu: Device, name: str) -> None:
    expected = {profile.profile_id: profile for profile in board_model.profiles(name)}
    assert {profile.profile_id for profile in gpu.profiles} == set(expected)
    for profile in gpu.profiles:
        wanted = expected[profile.profile_id]
        assert (
            profile.name,
            dict(profile.capacities),
            profile.placements,
            profile.maximum,
            profile.compute_slices,
        ) == (
            wanted.name,
            dict(wanted.capacities),
            wanted.placements,
            wanted.maximum,
            wanted.compute_slices,
        ), (profile, wanted)
        assert profile.memory_bytes == wanted.memory_bytes and set(profile.aliases) == set(wanted.aliases)


def raw_instance(gpu: Device, profile_id: int, start: int, size: int, compute: tuple[int, ...]) -> None:
    """Make a GPU instance the way an administrator's tool does, with these compute instances."""
    import ctypes

    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile_id, ctypes.byref(placement))
    for profile in compute:
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)
