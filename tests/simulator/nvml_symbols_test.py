# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Every symbol is there, and what has no behaviour says so."""

from __future__ import annotations

import inspect
import re
import subprocess

import pynvml
import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import LIBRARY, SOURCES, UNINITIALIZED, Silicon, gpu_section, machine_text


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


def test_every_symbol_that_the_python_binding_names_is_exported(bare_silicon: Silicon) -> None:
    named = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', inspect.getsource(pynvml)))
    assert len(named) > 400
    assert named - exported(bare_silicon) == set()


def test_the_table_is_what_is_exported_and_versions_come_with_their_plain_names(bare_silicon: Silicon) -> None:
    symbols = {name for name in exported(bare_silicon) if name.startswith("nvml")}
    assert symbols == set(table())
    assert "gpuSimulatorControl" in exported(bare_silicon)
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
def test_the_soname(bare_silicon: Silicon) -> None:
    text = subprocess.run(
        ["readelf", "-d", str(bare_silicon.folder / "lib" / LIBRARY)], check=True, capture_output=True, text=True
    ).stdout
    assert "[libnvidia-ml.so.1]" in text
    assert set(re.findall(r"NEEDED.*\[(.*)\]", text)) <= {"libc.so.6", "libm.so.6"}


def test_what_has_no_behaviour_answers_as_the_table_says(bare_silicon: Silicon) -> None:
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
