# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The host's own device numbers and kernel files, and the machine's, which must fit to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# The only fixed major number
NVIDIA_MAJOR = 195
# First major numbers of each driver. Those of NPUs are chosen
FIRST_MAJORS: Mapping[str, Mapping[str, int]] = {
    "nvidia": {"nvidia-caps": 236, "nvidia-nvswitch": 235, "nvidia-caps-imex-channels": 234, "nvidia-uvm": 510},
    "vfio": {"vfio": 233, "vfio-dev": 232},
    "ascend": {
        "devdrv-cdev": 239,
        "davinci_manager": 238,
        "vdavinci": 237,
        "devmm_svm": 231,
        "hisi_hdc": 230,
        "dvpp_cmdlist": 229,
        "uburma": 228,
        "ummu": 227,
    },
}
# A line of /proc/modules: module name, size, and the modules that use it
Module = tuple[str, int, tuple[str, ...]]


@dataclass(frozen=True)
class Surroundings:
    """The host's own state to which the trees must fit: its /proc files and the first free IOMMU group.

    ``vfio`` is true if the host has no VFIO driver, which would conflict with the machine's.
    """

    proc_devices: str = "Character devices:\n\nBlock devices:\n"
    proc_modules: str | None = ""
    iommu_base: int = 0
    vfio: bool = True


@dataclass(frozen=True)
class Majors:
    """Major numbers of the drivers' character devices, by name. Only NVIDIA's first one is fixed."""

    by_name: Mapping[str, int] = field(default_factory=dict)

    def of(self, vendor: str) -> dict[str, int]:
        """Return the numbers of one vendor's driver, or of ``vfio``."""
        return {name: self.by_name[name] for name in FIRST_MAJORS[vendor] if name in self.by_name}


def choose_majors(
    proc_devices: str, previous: Mapping[str, int] | None = None, vendors: Iterable[str] = ("nvidia",)
) -> Majors:
    """Choose majors that no driver of the host uses, so that its drivers never serve our nodes.

    Numbers are assigned like the kernel's dynamic allocation: from 236 downward, and for UVM from 510 downward. Those
    of a ``previous`` boot are preferred, so that a machine stays the same over reboots.
    """
    taken = {int(number) for number in re.findall(r"^\s*(\d+) ", proc_devices, re.MULTILINE)} | {NVIDIA_MAJOR}
    by_name: dict[str, int] = {}
    wanted = [each for each in FIRST_MAJORS if each == "vfio" or each in vendors]
    for name, start in [pair for each in wanted for pair in FIRST_MAJORS[each].items()]:
        number = (previous or {}).get(name, start)
        number = start if number in taken else number
        while number in taken:
            number -= 1
        taken.add(number)
        by_name[name] = number
    return Majors(by_name)


def merge_proc_devices(original: str, ours: Iterable[tuple[int, str]]) -> str:
    """Return /proc/devices with our lines among the character devices, sorted by number."""
    characters, blank, blocks = original.partition("\n\n")
    lines = [line for line in characters.splitlines()[1:] if line.strip()]
    lines += [f"{number:3d} {name}" for number, name in ours]
    lines.sort(key=lambda line: int(line.split()[0]))
    return "\n".join(["Character devices:", *lines]) + (blank + blocks if blank else "\n\nBlock devices:\n")


def merge_proc_modules(original: str, modules: Iterable[Module]) -> str:
    """Return /proc/modules with the drivers' modules first, as the most recently loaded ones."""
    lines = [
        f"{name} {int(size)} {len(users)} {''.join(user + ',' for user in users) or '-'} Live 0x0000000000000000 (OE)"
        for name, size, users in modules
    ]
    return "\n".join(reversed(lines)) + "\n" + original
