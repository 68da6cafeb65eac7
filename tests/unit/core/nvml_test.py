# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Calls of NVML's Python binding from several threads."""

from __future__ import annotations

import ctypes
import inspect
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pynvml
import pytest
from dra_driver.core.vendors import nvidia
from dra_driver.core.vendors.nvidia.fabric.fabric import COMPLETED, has_joined, state_of
from dra_driver.core.vendors.nvidia.nvml import DEPRECATED, Nvml


def test_calls_of_threads_return_their_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def library(handle: int, reference: Any) -> int:
        reference._obj.value = handle
        both.wait(10)
        return 0

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda _name: library)
    nvml = Nvml()
    nvml._binding = pynvml
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda handle: nvml.number("nvmlDeviceGetModuleId", handle), [3, 5])) == [3, 5]


@pytest.mark.parametrize(
    ("function", "structure", "place"),
    [
        ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t", 24),
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t", 28),
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t", 28),
    ],
)
def test_fabric_state_is_one_byte_as_in_the_header(
    monkeypatch: pytest.MonkeyPatch, function: str, structure: str, place: int
) -> None:
    def library(_handle: int, reference: Any) -> int:
        padded = bytes([COMPLETED, 0xA5, 0xA5, 0xA5])
        ctypes.memmove(ctypes.addressof(reference._obj) + place, padded, len(padded))
        return 0

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda _name: library)
    nvml = Nvml()
    nvml._binding = pynvml
    found = nvml.filled(function, structure, 0)
    assert state_of(found) == COMPLETED and has_joined(state_of(found), int(found.status))


def test_deprecated_function_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda _name: lambda *_arguments: DEPRECATED)
    nvml = Nvml()
    nvml._binding = pynvml
    assert nvml.optional("nvmlDeviceGetTemperature", 0, 0) is None


def test_calls_share_no_object_between_threads() -> None:
    shared = {
        name
        for name, function in inspect.getmembers(pynvml, inspect.isfunction)
        for parameter in inspect.signature(function).parameters.values()
        if isinstance(parameter.default, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array))
    }
    assert "nvmlDeviceGetModuleId" in shared
    directory = Path(inspect.getfile(nvidia)).parent
    calls = re.compile(r'(\w+)\(\s*"(nvml\w+)"')
    used = [
        (file.name, method, name)
        for file in sorted(directory.rglob("*.py"))
        for method, name in calls.findall(file.read_text())
        if name in shared
    ]
    assert used and all(method == "number" for _file, method, _name in used), used
