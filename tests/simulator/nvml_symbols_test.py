# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that every symbol exists, and that a symbol without behavior reports that."""

from __future__ import annotations

import inspect
import re
import subprocess

import pynvml
import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import (
    INVALID_ARGUMENT,
    LIBRARY,
    NOT_SUPPORTED,
    SOURCES,
    SUCCESS,
    UNINITIALIZED,
    Client,
    Silicon,
    gpu_section,
    machine_text,
)


def exported(silicon: Silicon) -> set[str]:
    text = subprocess.run(
        ["nm", "-D", "--defined-only", str(silicon.folder / "lib" / LIBRARY)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {line.split()[-1] for line in text.splitlines()}


def table() -> dict[str, str]:
    lines = (SOURCES / "symbols.txt").read_text().splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))


def test_every_symbol_of_the_python_binding_is_exported(bare_silicon: Silicon) -> None:
    named = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', inspect.getsource(pynvml)))
    assert len(named) > 400
    assert named - exported(bare_silicon) == set()


def test_symbol_table_equals_the_exported_symbols_with_plain_and_versioned_names(bare_silicon: Silicon) -> None:
    symbols = {name for name in exported(bare_silicon) if name.startswith("nvml")}
    assert symbols == set(table())
    assert "acceleratorSimulatorControl" in exported(bare_silicon)
    for base in (
        "nvmlInit",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetPciInfo",
        "nvmlEventSetWait",
        "nvmlComputeInstanceGetInfo",
    ):
        assert base in symbols
        assert any(name.startswith(f"{base}_v") for name in symbols)


@pytest.mark.parametrize("nvml_build", [""], indirect=True, ids=["plain"])
def test_soname_of_the_library(bare_silicon: Silicon) -> None:
    text = subprocess.run(
        ["readelf", "-d", str(bare_silicon.folder / "lib" / LIBRARY)], check=True, capture_output=True, text=True
    ).stdout
    assert "[libnvidia-ml.so.1]" in text
    assert set(re.findall(r"NEEDED.*\[(.*)\]", text)) <= {"libc.so.6", "libm.so.6"}


def test_function_without_behavior_returns_the_error_in_the_table(bare_silicon: Silicon) -> None:
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(BOARDS["L4"], 0)]))
    client = bare_silicon.client(initialize=False)
    numbers = {"NOT_SUPPORTED": 3, "INVALID_ARGUMENT": 2}
    stubs = {name: numbers[answer] for name, answer in table().items() if answer != "real"}
    assert len(stubs) > 100
    client("nvmlInit")
    answers = {name: client("symbol", name)[0] for name in stubs}
    assert answers == stubs
    client("nvmlShutdown")
    assert {client("symbol", name)[0] for name in list(stubs)[:20]} == {UNINITIALIZED}


#: Symbols whose first parameter is no handle despite their name: an output parameter or a string.
WITHOUT_HANDLE = re.compile(
    r"nvmlDeviceGet(Count|HandleBy)|nvmlEventSetCreate|nvmlDevice(Discover|Remove|Modify|Query)"
)
#: Prefixes of the symbols whose first parameter is a handle.
HANDLED = ("nvmlDevice", "nvmlGpuInstance", "nvmlComputeInstance", "nvmlEventSet")


def handles(client: Client) -> dict[str, object]:
    """Return NULL, handles of destroyed objects, handles that never existed, and handles of other types."""
    gpu = client.gpu(0)
    instance = client("create_at", gpu, 19, 0, 1)
    compute = client("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    mig = client("nvmlComputeInstanceGetInfo", compute)["device"]
    client("nvmlComputeInstanceDestroy", compute)
    client("nvmlGpuInstanceDestroy", instance)
    return {
        "null": None,
        "stale compute instance": compute,
        "stale GPU instance": instance,
        "stale MIG device": mig,
        "small": {"handle": ["device", 8]},
        "pointer": {"handle": ["device", 0x7FFF00001000]},
        "ones": {"handle": ["device", 2**64 - 1]},
    }


def test_every_symbol_rejects_missing_stale_and_foreign_handles(bare_silicon: Silicon) -> None:
    """The sanitizers verify that an invalid handle causes no invalid memory access."""
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(BOARDS["H100-80"], 0, ("mig-mode yes",))]))
    client = bare_silicon.client()
    wrong = handles(client)
    names = [name for name in table() if name.startswith(HANDLED) and not WITHOUT_HANDLE.match(name)]
    assert len(names) > 300
    refusals = {INVALID_ARGUMENT, NOT_SUPPORTED}
    for what, handle in wrong.items():
        answers = client("every_symbol", names, handle)
        assert {name: code for name, code in answers.items() if code not in refusals} == {}, what
        real = {name for name, code in answers.items() if table()[name] == "real" and code != INVALID_ARGUMENT}
        assert real == set(), what
    others = sorted(set(table()) - set(names) - {"nvmlShutdown", "nvmlErrorString"})
    answers = client("every_symbol", others, None)
    harmless = {"nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags"}
    assert {name for name, code in answers.items() if code == SUCCESS} == harmless


def test_every_symbol_handles_a_valid_handle_with_null_arguments(bare_silicon: Silicon) -> None:
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(BOARDS["H100-80"], 0, ("mig-mode yes",))]))
    client = bare_silicon.client()
    gpu = client.gpu()
    instance = client("create_at", gpu, 19, 0, 1)
    compute = client("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    mig = client("nvmlComputeInstanceGetInfo", compute)["device"]
    ends = {"nvmlGpuInstanceDestroy", "nvmlComputeInstanceDestroy"}
    names = [
        name for name in table() if name.startswith(HANDLED) and not WITHOUT_HANDLE.match(name) and name not in ends
    ]
    own = {"nvmlDevice": gpu, "nvmlGpuInstance": instance, "nvmlComputeInstance": compute}
    for kind, handle in own.items():
        answers = client("every_symbol", names, handle)
        foreign = {n: c for n, c in answers.items() if not n.startswith(kind) and table()[n] == "real"}
        assert set(foreign.values()) == {INVALID_ARGUMENT}, kind
    client("every_symbol", [name for name in names if name.startswith("nvmlDevice")], mig)
    (left,) = bare_silicon.show()["gpus"][0]["gpu_instances"]
    assert len(left["compute_instances"]) == 1
    for name in ("nvmlShutdown",):
        assert client("every_symbol", [name], None) == {name: SUCCESS}
    answers = client("every_symbol", names, gpu)
    assert set(answers.values()) == {UNINITIALIZED}
