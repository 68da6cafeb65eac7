# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The queries about chips and their results, for each source: the vendor's library, or its program if the library is missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Callable, Protocol

from ...model import Process
from .attributes import SuperPod
from .dcmi.dcmi import Spot

MEBIBYTE = 1024 * 1024
NETWORK = "network"


@dataclass(frozen=True)
class Identity:
    """The fixed facts of a chip. Unknown strings are "".

    ``logic_id`` is its number in events, ``physical_id`` that in the name of its device node. PCI IDs are 0xDDDDVVVV,
    with the device in the high half. The address has the kernel's spelling, and is "" for a chip on the unified bus.
    ``memory_bytes`` is the reported size, that of the HBM if there is one.
    """

    physical_id: int
    logic_id: int
    uuid: str
    model: str
    pci_address: str
    pci_device_id: int
    pci_subsystem_id: int = 0
    memory_bytes: int = 0
    board_id: int | None = None
    product: str = ""
    card_serial: str = ""
    super_pod: SuperPod | None = None


@dataclass(frozen=True)
class SliceReading:
    """An existing vNPU.

    ``cores`` and ``memory_bytes`` are 0 if unknown. ``container`` is the ID of its container, "" if unknown.
    """

    slice_id: int
    template: str
    group: int | None
    is_used: bool
    container: str = ""
    cores: Fraction = Fraction(0)
    memory_bytes: int = 0


@dataclass(frozen=True)
class SliceReadings:
    """The shared resources of a chip by their published names, without unknown ones, and its vNPUs."""

    totals: Mapping[str, Fraction]
    slices: tuple[SliceReading, ...]


@dataclass(frozen=True)
class Condition:
    """The health of a chip: its level, its error codes, and the result of its network port test (None: not reported)."""

    level: int
    errors: tuple[int, ...] = ()
    network: int | None = None


@dataclass(frozen=True)
class Work:
    """The telemetry of a chip or a vNPU. Units are as in ``core.telemetry``; None means not reported."""

    power: float | None = None
    temperature: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: float | None = None
    clocks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """A fault event: the logic ID of the chip, the code, and whether the fault begins (None: it occurred once).

    The name of the class is part of the protocol of the DCMI helper.
    """

    logic_id: int
    code: int
    begins: bool | None
    name: str = ""


class Source(Protocol):
    """Query and change the chips of this host.

    All methods except ``open`` raise AcceleratorError, for a single chip DeviceFaulty. The text of an error names the
    query.
    """

    name: str

    @property
    def is_open(self) -> bool:
        """Return whether the source is open."""

    def open(self) -> None:
        """Open the source. A second call finds added and removed chips. Raises BackendUnavailable."""

    def close(self) -> None:
        """Reject further calls."""

    def driver_version(self) -> str:
        """Return the version of the driver, in its spelling; "" if unknown."""

    def spots(self) -> tuple[Spot, ...]:
        """Return the positions of the chips."""

    def uuid(self, spot: Spot) -> str:
        """Read the UUID of the chip at a position from the chip."""

    def identity(self, spot: Spot) -> Identity:
        """Return the fixed facts of the chip at a position."""

    def link(self, one: Spot, other: Spot) -> str | None:
        """Return the link between two chips in the vendor's spelling; None if it is not reported."""

    def slices(self, spot: Spot) -> SliceReadings | None:
        """Return the resources that vNPUs of a chip share, and its vNPUs; None for a chip that cannot be partitioned."""

    def free(self, spot: Spot) -> Mapping[str, Fraction]:
        """Return the free resources of a chip for vNPUs, by their published names, without unknown ones."""

    def template_table(self, spot: Spot) -> str | None:
        """Return the table of a card's templates, as npu-smi prints it; None if the card does not support templates."""

    def is_shared(self, spot: Spot) -> bool | None:
        """Return whether several containers can use a chip at a time; None if it is not reported."""

    def processes(self, spot: Spot) -> tuple[Process, ...]:
        """Return the processes that have a chip, or one of its vNPUs, open. Their names can be missing."""

    def condition(self, spot: Spot, without: Collection[str] = ()) -> Condition:
        """Return the health of a chip. ``without`` can contain NETWORK, to skip a query that the chip does not support."""

    def work(self, spot: Spot) -> Work:
        """Return the telemetry of a chip."""

    def work_of_slice(self, spot: Spot, slice_id: int) -> Work:
        """Return the telemetry of a vNPU. Raises NotFound."""

    def create(self, spot: Spot, template: str, slice_id: int, group: int | None) -> None:
        """Create a vNPU with this ID, in this vGroup if the chip has vGroups."""

    def destroy(self, spot: Spot, slice_id: int) -> None:
        """Destroy a vNPU, even if it is in use. Raises NotFound."""

    def reset(self, spot: Spot) -> None:
        """Reset a chip."""

    def rescan(self, spot: Spot) -> None:
        """Rescan the bus for a chip after a reset, if the driver does not do so itself."""

    def associated_card(self, spot: Spot) -> int | None:
        """Return the card that is reset together with that of a chip; -1 without one, None if it is not reported."""

    def is_started(self, spot: Spot) -> bool:
        """Return whether a chip has started after its reset."""

    def hindrance(self, spot: Spot) -> str:
        """Return the mode of the host that prevents vNPUs, with the remedy; "" if none is known."""

    def subscribe(self, callback: Callable[[Told], object]) -> bool:
        """Register a function for fault events, on any thread, until the process ends.

        Return False without support for events.
        """
