# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the chaos has to know of one vendor: a machine, a layout, the kinds of claims, what its hardware shows and how it fails.

All that is tried is the same for all of them.
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
    """One vendor with one machine, by the name that the command line has for it; ``word`` is the name of the driver's backend.

    ``silicon`` is whose library the simulator has, ``sources`` is what it is made of. Every vendor has kinds of the names ``whole``,
    ``static``, ``dynamic``, ``three``, ``admin`` and ``ahead``, of which the layout's partitions, or the device of the dynamic one with the
    index 1, are what they are called.

    ``side_by_side`` are kinds that do not get in each other's way, of which everything that a driver does is part, but what takes its time;
    ``another`` is one that changes a device which none of ``static`` and ``three`` has. ``turns``: claims of which kinds are held over a
    hand-over, and of which one more comes and goes meanwhile; no two need the same place.

    ``calls`` and ``codes`` are what the library is called for while claims come and go, and how such a call can fail; ``called`` are kinds
    that make these calls, ``hanging`` calls that change a device, ``scanned`` those of a scan of each device. ``errors`` are errors that
    a device reports, ``failing`` is a state in which it has failed, as the simulator's arguments for a fault.
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
    #: Configurations that are nearly right when something of them is changed, with what they are for; words that belong into none.
    bases: tuple[Base, ...]
    words: tuple[str, ...]
    #: Whether a name is that of a partition which the layout has made.
    is_static: Callable[[str], bool]
    #: Of each device that the library shows what it is set to, and its partitions.
    hardware: Callable[[Library], dict[str, Any]]
    #: The nodes that come and go with partitions.
    nodes: Callable[[], Any]
    #: Raises Broken where a CDI file names what does not exist; is given the CDI files.
    check: Callable[[Library, list[Path]], None]
    #: The class of its devices on the PCI bus, and their driver.
    pci_class: str
    pci_driver: str
    #: Where the library's build puts a file of its own.
    place: Callable[[str], Path]
    #: How the programs begin that run for claims, and what starts one for a claim that there is not.
    #: Attributes of published devices that change when claims come and go.
    told_of_claims: frozenset[str] = frozenset()
    programs: bytes = b""
    leave_program: Callable[[str], None] | None = None
    #: How the library is built that is older than the others, and what is said to it of the whole machine.
    built: tuple[str, ...] = ()
    statements: Mapping[str, Any] = field(default_factory=dict)
    #: By device what the library has noted for the next start of the machine, a line for each partition that it makes again then.
    made_again: Callable[[], dict[str, list[str]]] = dict
    #: Forgets partitions that would be there again after a start of the machine.
    forget: Callable[[Node], None] = nothing

    @property
    def by_name(self) -> dict[str, Kind]:
        """The kinds by their names."""
        return {kind.name: kind for kind in self.kinds}
