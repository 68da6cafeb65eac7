# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Raise an unexpected exception in each NVML call of a scan: it affects only the GPU of the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dra_driver.core.model import Finding

from tests.simulator.backend.stage import Stage, on, record_calls

SICK = 3
# These calls concern no GPU: without them the node has no devices, and BackendUnavailable or the driver's scan reports
# that.
OF_THE_NODE = {"nvmlDeviceGetCount", "nvmlEventSetCreate", "nvmlEventSetWait_v2", "nvmlSystemGetDriverVersion"}


class Unforeseen(ValueError):
    """An error that the product cannot expect by its type."""


@contextmanager
def defect(stage: Stage, function: str, handles: set[Any]) -> Iterator[list[str]]:
    """Raise in calls of a function whose first argument is one of these; yield the calls that raised."""
    nvml, raised = stage.backend._nvml, list[str]()
    original = nvml.call

    def call(called: str, *arguments: Any, doing: str = "") -> Any:
        if called == function and arguments and _plain(arguments[0]) in handles:
            raised.append(called)
            raise Unforeseen(f"invalid literal in the answer of {called}")
        return original(called, *arguments, doing=doing)

    nvml.call = call  # type: ignore[method-assign]
    try:
        yield raised
    finally:
        nvml.call = original  # type: ignore[method-assign]


def _plain(argument: Any) -> Any:
    """Return a comparable value of a handle, a UUID, or an index."""
    import ctypes

    if isinstance(argument, (int, str)):
        return argument
    return ctypes.cast(argument, ctypes.c_void_p).value


def names_of(stage: Stage) -> set[Any]:
    """Return the values by which calls can name the faulty GPU."""
    import pynvml

    gpu = stage.gpus()[SICK]
    return {SICK, gpu.uuid, _plain(pynvml.nvmlDeviceGetHandleByIndex(SICK))}


def assert_only_one_is_faulty(findings: tuple[Finding, ...], function: str) -> None:
    faults = {finding.index: finding.fault for finding in findings if finding.fault}
    assert [finding.index for finding in findings] == list(range(8)), (function, findings)
    assert list(faults) == [SICK] and faults[SICK].cause == "unknown-error", (function, faults)
    assert "Unforeseen" in faults[SICK].message and f"of {function}" in faults[SICK].message, faults[SICK]
    device = findings[SICK].device
    assert device is not None and device.health.causes == ("unknown-error",), function


@on("8xH100")
def unexpected_exception_in_one_gpu_affects_no_other_gpu(stage: Stage) -> None:
    stage.enable_mig()
    handles = names_of(stage)
    tried = set()
    for full in (False, True):
        calls = record_calls(stage)
        stage.gpus(full)
        functions = {call for call, _argument in calls} - OF_THE_NODE
        stage.backend._nvml.call = type(stage.backend._nvml).call.__get__(stage.backend._nvml)  # type: ignore[method-assign]
        for function in sorted(functions):
            with defect(stage, function, handles) as raised:
                findings = stage.backend.discover(full)
            if not raised:
                continue  # the call concerns an instance of the first GPU
            assert_only_one_is_faulty(findings, function)
            tried.add(function)
            assert not any(finding.fault for finding in stage.backend.discover(full)), function
    assert len(tried) > 12 and {"nvmlDeviceGetUUID", "nvmlDeviceGetFieldValues"} <= tried, tried
