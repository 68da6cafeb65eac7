# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the generation of a GPU from its PCI device ID, and the kernel modules and driver branches that support it.

Facts: the public list of PCI IDs, whose names begin with the chip (GM, GP, GV, TU, GA, GH, AD, GB), and NVIDIA's
installation guide. Open modules support Turing and later. Blackwell, later ones, and Grace need them. Branch 580 is the
last for Maxwell, Pascal, and Volta. From 560 on, the vendor installs open modules by default, and from 620 on there are
no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...host.system import System
from .sysfs import gpus_on_the_bus

OPEN, PROPRIETARY = "open", "proprietary"
LEGACY, MAXWELL, PASCAL, VOLTA, TURING, AMPERE, HOPPER, ADA, BLACKWELL, NEWER = (
    "older than Maxwell",
    "Maxwell",
    "Pascal",
    "Volta",
    "Turing",
    "Ampere",
    "Hopper",
    "Ada",
    "Blackwell",
    "newer than Blackwell",
)
ORDER = (LEGACY, MAXWELL, PASCAL, VOLTA, TURING, AMPERE, HOPPER, ADA, BLACKWELL, NEWER)

#: The first ID of each block, in order. A block ends where the next one begins.
_BLOCKS = (
    (0x0000, LEGACY),
    (0x1340, MAXWELL),
    (0x1580, PASCAL),
    (0x1600, MAXWELL),
    (0x1720, PASCAL),
    (0x1740, MAXWELL),
    (0x1B00, PASCAL),
    (0x1D80, VOLTA),
    (0x1E00, TURING),
    (0x2080, AMPERE),
    (0x2180, TURING),
    (0x2200, AMPERE),
    (0x2300, HOPPER),
    (0x2400, AMPERE),
    (0x2600, ADA),
    (0x2900, BLACKWELL),
    (0x3200, NEWER),
)
#: GPUs that are combined with a Grace processor.
_GRACE_HOPPER = range(0x2340, 0x2350)
#: The first branch that has open modules, the first that installs them by default, and the first without proprietary
#: modules.
OPEN_SINCE, OPEN_BY_DEFAULT, OPEN_ALONE = 515, 560, 620
#: The last branch for GPUs that open modules do not support.
LAST_FOR_OLD = 580
#: The first branch for a generation.
_FIRST = {TURING: 410, AMPERE: 450, HOPPER: 515, ADA: 520, BLACKWELL: 570, NEWER: 580}


@dataclass(frozen=True)
class BusGpu:
    """A GPU on the PCI bus."""

    address: str
    device_id: int

    @property
    def generation(self) -> str:
        """The generation of the GPU."""
        return generation_of(self.device_id)

    @property
    def wants_open(self) -> bool:
        """Return whether the GPU works with open kernel modules only."""
        return ORDER.index(self.generation) >= ORDER.index(BLACKWELL) or self.device_id in _GRACE_HOPPER

    @property
    def knows_open(self) -> bool:
        """Return whether the GPU works with open kernel modules."""
        return ORDER.index(self.generation) >= ORDER.index(TURING)

    def describe(self) -> str:
        """Return the address, generation, and PCI ID as text."""
        return f"{self.address} ({self.generation}, 10de:{self.device_id:04x})"


def generation_of(device_id: int) -> str:
    """Return the generation of a PCI device ID."""
    return next(name for first, name in reversed(_BLOCKS) if device_id >= first)


def bus_gpus(system: System) -> tuple[BusGpu, ...]:
    """Return the GPUs on the PCI bus, ordered by address and with any kernel driver. Does not call a driver."""
    found = []
    for address in gpus_on_the_bus(system):
        try:
            text = system.read_text(f"/sys/bus/pci/devices/{address}/device").strip()
            found.append(BusGpu(address, int(text, 16)))
        except (OSError, ValueError):
            continue  # it is being removed
    return tuple(found)


def fitting_modules(gpus: Iterable[BusGpu], branch: int) -> tuple[str, ...]:
    """Return the kernel modules of a branch that work with all of these GPUs, the preferred one first. Can be empty."""
    boards = tuple(gpus)
    can_open = branch >= OPEN_SINCE and all(gpu.knows_open for gpu in boards)
    can_proprietary = branch < OPEN_ALONE and not any(gpu.wants_open for gpu in boards)
    fitting = [name for name, can in ((OPEN, can_open), (PROPRIETARY, can_proprietary)) if can]
    return tuple(fitting if branch >= OPEN_BY_DEFAULT else reversed(fitting))


def objections(gpus: Iterable[BusGpu], branch: int, modules: str) -> list[str]:
    """Return the reasons why these kernel modules of this branch do not support the GPUs, one sentence each."""
    found = []
    for gpu in gpus:
        first = _FIRST.get(gpu.generation, 0)
        if gpu.generation == LEGACY:
            found.append(f"{gpu.describe()} is driven by no branch that this collection installs.")
        elif not gpu.knows_open and branch > LAST_FOR_OLD:
            found.append(f"{gpu.describe()} is driven by branches up to {LAST_FOR_OLD}, and {branch} is wanted.")
        elif branch < first:
            found.append(f"{gpu.describe()} is driven by branches from {first} on, and {branch} is wanted.")
        elif modules == OPEN and not gpu.knows_open:
            found.append(f"{gpu.describe()} needs proprietary kernel modules: open ones know Turing and later.")
        elif modules == PROPRIETARY and gpu.wants_open:
            found.append(f"{gpu.describe()} needs open kernel modules: proprietary ones do not know it.")
    if modules == PROPRIETARY and branch >= OPEN_ALONE:
        found.append(f"Branch {branch} has open kernel modules alone.")
    if modules == OPEN and branch < OPEN_SINCE:
        found.append(f"Branch {branch} has no open kernel modules; they begin with {OPEN_SINCE}.")
    return found
