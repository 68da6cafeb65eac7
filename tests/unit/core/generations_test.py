# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""GPU generations by PCI ids, and the kernel modules that support them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dra_driver.core.host.system import System
from dra_driver.core.vendors.nvidia.generations import (
    LAST_FOR_OLD,
    OPEN,
    OPEN_ALONE,
    ORDER,
    PROPRIETARY,
    BusGpu,
    bus_gpus,
    fitting_modules,
    generation_of,
    objections,
)
from hypothesis import given
from hypothesis import strategies as st

BOARDS = Path(__file__).resolve().parents[3] / "roles/simulator/files/boards"
BRANCHES = st.sampled_from([470, 515, 535, 550, 570, 580, 590, 615, 620])
GPUS = st.lists(st.builds(BusGpu, st.just("0000:00:00.0"), st.integers(0x1000, 0x3300)), max_size=4)


@pytest.mark.parametrize(
    ("device_id", "name"),
    [
        (0x102D, "older than Maxwell"),  # K80
        (0x17FD, "Maxwell"),  # M40
        (0x15F9, "Pascal"),  # P100
        (0x1B38, "Pascal"),  # P40
        (0x1DB6, "Volta"),  # V100
        (0x1EB8, "Turing"),  # T4
        (0x2182, "Turing"),  # GTX 1660 Ti
        (0x20B2, "Ampere"),  # A100
        (0x2236, "Ampere"),  # A10
        (0x2330, "Hopper"),  # H100
        (0x26B9, "Ada"),  # L40S
        (0x2901, "Blackwell"),  # B200
        (0x2BB5, "Blackwell"),  # RTX PRO 6000
    ],
)
def test_generation_of_public_pci_ids(device_id: int, name: str) -> None:
    assert generation_of(device_id) == name


def test_generation_of_simulated_boards() -> None:
    for path in BOARDS.glob("*.json"):
        board = json.loads(path.read_text())
        assert generation_of(int(board["pci"]["device"], 16)).lower().startswith(board["architecture"]), path.name


@given(GPUS, BRANCHES, st.sampled_from([OPEN, PROPRIETARY]))
def test_objections_agree_with_fitting_modules(gpus: list[BusGpu], branch: int, modules: str) -> None:
    against = objections(gpus, branch, modules)
    if not against:
        assert modules in fitting_modules(gpus, branch)
    if not gpus:
        assert bool(against) == (modules not in fitting_modules(gpus, branch))
    for gpu in gpus:
        if ORDER.index(gpu.generation) < ORDER.index("Turing") and branch > LAST_FOR_OLD:
            assert against
        if gpu.generation == "Blackwell" and modules == PROPRIETARY:
            assert against


def test_fitting_modules_vendor_default_is_first() -> None:
    hopper, volta, grace = (BusGpu("0000:00:00.0", number) for number in (0x2330, 0x1DB6, 0x2342))
    assert fitting_modules([hopper], 535) == (PROPRIETARY, OPEN) and fitting_modules([hopper], 580) == (
        OPEN,
        PROPRIETARY,
    )
    assert fitting_modules([hopper], OPEN_ALONE) == (OPEN,) and fitting_modules([grace], 580) == (OPEN,)
    assert fitting_modules([volta], 580) == (PROPRIETARY,) and fitting_modules([volta, grace], 580) == ()


def test_gpus_on_bus_exclude_other_devices(tmp_path: Path) -> None:
    for address, vendor, kind, device in (
        ("0000:3b:00.0", "0x10de", "0x030200", "0x2330"),
        ("0000:3c:00.0", "0x10de", "0x068000", "0x22a3"),
        ("0000:3d:00.0", "0x8086", "0x030000", "0x1234"),
        ("0000:3e:00.0", "0x10de", "0x030000", "nonsense"),
    ):
        directory = tmp_path / "sys/bus/pci/devices" / address
        directory.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("device", device)):
            (directory / name).write_text(f"{text}\n")
    assert bus_gpus(System(str(tmp_path))) == (BusGpu("0000:3b:00.0", 0x2330),)
