# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Shared code of the GPU scenarios: a machine with an open backend, and helpers."""

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
from dra_driver.core.host.system import System
from dra_driver.core.model import Device, devices_of
from dra_driver.core.partitioning.layout_execute import execute
from dra_driver.core.partitioning.layout_plan import LayoutPlan, plan_layouts
from dra_driver.core.partitioning.rules import Match, Rule
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend

from tests.simulator.backend.gpu_machine import SIMULATOR
from tests.unit.core import board_model

#: By name: the scenario's machine, and the scenario.
SCENARIOS: dict[str, tuple[str, Callable[[Stage], None]]] = {}


class Stage:
    """The machine of a GPU scenario, with an open backend."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.backend = NvidiaBackend(System(str(root)))

    def control(self, *words: str) -> str:
        """Run the simulator's command and return its output."""
        program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
        arguments = ["--root", str(self.root), *words]
        environment = {**os.environ, "PYTHONPATH": str(SIMULATOR)}
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], env=environment, check=True, capture_output=True, text=True
        ).stdout

    def gpus(self, full: bool = False) -> tuple[Device, ...]:
        """Return all GPUs; assert that all are healthy."""
        findings = self.backend.discover(full)
        assert not any(finding.fault for finding in findings), findings
        return devices_of(findings)

    def first_gpu(self) -> Device:
        return self.gpus()[0]

    def lay_out(self, *rules: Rule) -> None:
        """Apply these rules to the first GPUs, together with the GPUs that are reset along with them."""
        for outcome in plan_layouts(list(itertools.zip_longest(self.gpus(), rules))):
            assert isinstance(outcome, LayoutPlan), outcome
            execute(self.backend, outcome)

    def enable_mig(self) -> Device:
        """Enable MIG on the first GPU and return the GPU."""
        gpu = self.first_gpu()
        self.lay_out(Rule(Match(), "static"))
        gpu = self.backend.device(gpu.uuid)
        assert gpu.partitioning.enabled and gpu.partitioning.pending and gpu.partitions == ()
        return gpu


def on(machine: str) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """Register a scenario for a simulated machine."""

    def register(scenario: Callable[[Stage], None]) -> Callable[[Stage], None]:
        SCENARIOS[scenario.__name__] = (machine, scenario)
        return scenario

    return register


def assert_refused(kind: type[AcceleratorError], action: Callable[..., Any], *arguments: Any) -> AcceleratorError:
    """Assert that an action raises this error with a message, and return the error."""
    try:
        action(*arguments)
    except AcceleratorError as error:
        assert error.__class__ is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        assert str(error)
        return error
    raise AssertionError(f"{action} was not refused")


def record_calls(stage: Stage) -> list[tuple[str, Any]]:
    """Return a list that collects the later NVML calls of the backend: function and last argument."""
    calls: list[tuple[str, Any]] = []
    original = stage.backend._nvml.call

    def recording(function: str, *arguments: Any, doing: str = "") -> Any:
        calls.append((function, arguments[-1] if arguments else None))
        return original(function, *arguments, doing=doing)

    stage.backend._nvml.call = recording  # type: ignore[method-assign]
    return calls


def places(gpu: Device) -> tuple[board_model.Place, ...]:
    """Return profile ID and start of each partition, sorted."""
    return tuple(sorted((each.profile_id, each.placement.start) for each in gpu.partitions))


def assert_expected_profiles(gpu: Device, name: str) -> None:
    """Assert that a GPU has the profiles of the board model ``name``."""
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
    """Create a GPU instance with these compute instances through NVML, without the backend."""
    import ctypes

    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile_id, ctypes.byref(placement))
    for profile in compute:
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)
