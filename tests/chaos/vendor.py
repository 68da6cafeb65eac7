# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The chaos tests' description of one vendor: a machine, a layout, the kinds of claims, its hardware state, and its failures.

The test cases are the same for all vendors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerator_simulator import library
from accelerator_simulator.library import Library

from tests.chaos.kinds import Kind

if TYPE_CHECKING:
    from tests.chaos.node import Node

Turn = tuple[tuple[str, ...], str]
Base = tuple[tuple[str | Mapping[str, Any], ...], Mapping[str, Any]]


def nothing(*_arguments: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Vendor:
    """One vendor with one machine. ``name`` is its name on the command line, ``word`` is the name of the driver's backend.

    ``silicon`` is the vendor whose library the simulator has, ``sources`` are its source files. Each vendor has kinds
    with the names ``whole``, ``static``, ``dynamic``, ``three``, ``admin``, and ``ahead``, on the layout's matching
    partitions or, for the dynamic one, on the device with the index 1.

    ``side_by_side`` are kinds that fit together and cover all actions of a driver except for slow ones. ``another`` is
    a kind that changes a device outside of ``static`` and ``three``. ``turns``: the kinds of claims that are held
    during a handover, and the kind of one more claim during it. No two of them need the same place.

    ``calls`` and ``codes`` are the library calls of prepare and unprepare, and their possible errors. ``called`` are
    kinds with these calls, ``hanging`` are calls that change a device, ``scanned`` are those of a scan of each device.
    ``errors`` are errors that a device reports. ``failing`` is a state in which it has failed, as the simulator's
    arguments for a fault.
    """

    name: str
    word: str
    driver: str
    silicon: library.Vendor
    sources: Path
    machine: str
    layout: tuple[Mapping[str, Any], ...]
    kinds: tuple[Kind, ...]
    side_by_side: tuple[str, ...]
    another: str
    turns: tuple[Turn, ...]
    calls: tuple[str, ...]
    codes: tuple[int, ...]
    called: tuple[str, ...]
    hanging: tuple[str, ...]
    scanned: tuple[str, ...]
    errors: tuple[str, ...]
    failing: str
    #: Configurations that become almost valid after a change, with their devices, and words that are valid in none.
    bases: tuple[Base, ...]
    words: tuple[str, ...]
    #: Returns whether a name is that of a partition from the layout.
    is_static: Callable[[str], bool]
    #: Returns the settings and the partitions of each device that the library shows.
    hardware: Callable[[Library], dict[str, Any]]
    #: Returns the device nodes that are created and deleted with partitions.
    nodes: Callable[[], Any]
    #: Raises Broken if a CDI file names a missing device. The argument is the list of CDI files.
    check: Callable[[Library, list[Path]], None]
    #: The class of its devices on the PCI bus, and their driver.
    pci_class: str
    pci_driver: str
    #: Returns the path of a file in the library's build.
    place: Callable[[str], Path]
    #: Attributes of published devices that change with claims, the start of the names of programs for claims, and a
    #: function that starts such a program for an unknown claim.
    told_of_claims: frozenset[str] = frozenset()
    programs: bytes = b""
    leave_program: Callable[[str], None] | None = None
    #: Build options of the older library, and its settings for the whole machine.
    built: tuple[str, ...] = ()
    statements: Mapping[str, Any] = field(default_factory=dict)
    #: Returns the library's records of partitions that a reboot creates again, by device.
    made_again: Callable[[], dict[str, list[str]]] = dict
    #: Deletes the records of partitions that a reboot would create again.
    forget: Callable[[Node], None] = nothing

    @property
    def by_name(self) -> dict[str, Kind]:
        """Return the kinds by their names."""
        return {kind.name: kind for kind in self.kinds}
