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

from tests.chaos.claim_kinds import Kind

if TYPE_CHECKING:
    from tests.chaos.node import Node

Handover = tuple[tuple[str, ...], str]
FuzzConfiguration = tuple[tuple[str | Mapping[str, Any], ...], Mapping[str, Any]]


def do_nothing(*_arguments: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Vendor:
    """One vendor with one machine.

    Each vendor has kinds of claims with the names ``whole``, ``static``, ``dynamic``, ``three``, ``admin``, and
    ``ahead``, on the layout's matching partitions. The kind ``dynamic`` is on the device with the index 1.
    """

    #: The name on the command line, and the name of the driver's backend.
    name: str
    backend: str
    driver: str
    #: The vendor whose library the simulator has, and the source files of this library.
    simulated_vendor: library.Vendor
    sources: Path
    machine: str
    layout: tuple[Mapping[str, Any], ...]
    kinds: tuple[Kind, ...]
    #: Kinds that can be prepared at the same time. They cover all actions of a driver except for slow ones.
    parallel_kinds: tuple[str, ...]
    #: A kind that changes a device outside of ``static`` and ``three``.
    other_kind: str
    #: Pairs of the kinds that are prepared during a handover, and the kind of one more claim during it. No two kinds of
    #: a pair need the same placement.
    handovers: tuple[Handover, ...]
    #: Functions of the library that prepare and unprepare call, their possible errors, and kinds with these calls.
    library_calls: tuple[str, ...]
    error_codes: tuple[int, ...]
    kinds_with_calls: tuple[str, ...]
    #: Functions that change a device, and functions that a scan calls for each device.
    hanging_calls: tuple[str, ...]
    scan_calls: tuple[str, ...]
    #: Errors that a device reports, and the state of a failed device, as arguments for a fault of the simulator.
    device_errors: tuple[str, ...]
    failed_state: str
    #: Configurations to mutate, with their devices, and texts for the mutated values.
    fuzz_configurations: tuple[FuzzConfiguration, ...]
    fuzz_words: tuple[str, ...]
    #: Returns whether a name is the name of a partition from the layout.
    is_static: Callable[[str], bool]
    #: Returns the settings and the partitions of each device that the library shows.
    hardware: Callable[[Library], dict[str, Any]]
    #: Returns the device nodes that are created and deleted with partitions.
    device_nodes: Callable[[], Any]
    #: Raises Broken if one of the CDI files names a missing device.
    check_cdi_files: Callable[[Library, list[Path]], None]
    #: The class of its devices on the PCI bus, and their driver.
    pci_class: str
    pci_driver: str
    #: Returns the directory for a file of the library's build.
    install_directory: Callable[[str], Path]
    #: Attributes of published devices that change with claims.
    claim_attributes: frozenset[str] = frozenset()
    #: The start of the names of programs for claims, and a function that starts one for an unknown claim.
    program_prefix: bytes = b""
    start_orphaned_program: Callable[[str], None] | None = None
    #: Build options of the library, and its settings for the whole machine.
    build_options: tuple[str, ...] = ()
    library_settings: Mapping[str, Any] = field(default_factory=dict)
    #: Returns the library's records of partitions that a reboot creates again, by device.
    recreated_partitions: Callable[[], dict[str, list[str]]] = dict
    #: Deletes these records.
    forget_partitions: Callable[[Node], None] = do_nothing

    @property
    def by_name(self) -> dict[str, Kind]:
        """Return the kinds by their names."""
        return {kind.name: kind for kind in self.kinds}
