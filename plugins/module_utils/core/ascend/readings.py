# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What can be asked of chips, whoever answers: the vendor's library, or its program where the library is missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Callable, Protocol

from ..model import Process
from .attributes import SuperPod
from .dcmi import Spot

MEBIBYTE = 1024 * 1024
NETWORK = "network"


@dataclass(frozen=True)
class Identity:
    """What does not change about the chip at a spot. Texts that are not told are empty.

    ``logic_id`` is how events name it, ``physical_id`` is in the name of its device node. PCI ids are 0xDDDDVVVV, device in the
    high half; the address is spelled as the kernel does. ``memory_bytes`` is what it measures, of its HBM where it has one.
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
    """A slice that exists; ``cores`` and ``memory_bytes`` are 0 where they are not told. ``container`` names who has it, if told."""

    slice_id: int
    template: str
    group: int | None
    is_used: bool
    container: str = ""
    cores: Fraction = Fraction(0)
    memory_bytes: int = 0


@dataclass(frozen=True)
class SliceReadings:
    """What a chip shares out, by the names that are published (what is not told is not in it), and its slices."""

    totals: Mapping[str, Fraction]
    slices: tuple[SliceReading, ...]


@dataclass(frozen=True)
class Condition:
    """What a chip says of its health: its level, its error codes, and the result of the test of its network port (None: not told)."""

    level: int
    errors: tuple[int, ...] = ()
    network: int | None = None


@dataclass(frozen=True)
class Work:
    """What a chip, or a slice, tells of its present work; units as in ``core.telemetry``, None for what it does not tell."""

    power: float | None = None
    temperature: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: float | None = None
    clocks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """A fault event: of which chip, by its logic id, which code, and whether it begins (None: it just happened)."""

    logic_id: int
    code: int
    begins: bool | None
    name: str = ""


class Source(Protocol):
    """Answers questions about the chips of this machine. Everything but ``open`` raises AcceleratorError, of one chip DeviceFaulty.

    ``doing`` is not among the arguments: errors say by themselves what was asked.
    """

    name: str

    @property
    def is_open(self) -> bool:
        """Whether open() has succeeded."""

    def open(self) -> None:
        """Reach whoever answers; once more to learn what has come and gone. Raises BackendUnavailable."""

    def close(self) -> None:
        """Ask nothing more."""

    def driver_version(self) -> str:
        """Return the version of the driver, as it spells it; empty where it does not tell."""

    def spots(self) -> tuple[Spot, ...]:
        """Return where chips are."""

    def uuid(self, spot: Spot) -> str:
        """Return the UUID of the chip at a spot, by asking the chip."""

    def identity(self, spot: Spot) -> Identity:
        """Return all that does not change about the chip at a spot."""

    def link(self, one: Spot, other: Spot) -> str | None:
        """Return what lies between two chips, as the vendor's matrix spells it; None where it is not told."""

    def slices(self, spot: Spot) -> SliceReadings | None:
        """Return what a chip shares out, and its slices; None for one that cannot be cut."""

    def is_shared(self, spot: Spot) -> bool | None:
        """Whether several containers may have a chip at a time; None where it does not tell."""

    def processes(self, spot: Spot) -> tuple[Process, ...]:
        """Return the processes that have a chip, or a slice of it, open; without their names where those are not told."""

    def condition(self, spot: Spot, without: Collection[str] = ()) -> Condition:
        """Return what a chip says of its health; ``without`` may hold NETWORK: what it has no answer to need not be asked again."""

    def work(self, spot: Spot) -> Work:
        """Return what a chip tells of its present work."""

    def work_of_slice(self, spot: Spot, slice_id: int) -> Work:
        """Return what a slice tells of its present work. Raises NotFound."""

    def create(self, spot: Spot, template: str, slice_id: int, group: int | None) -> None:
        """Make a slice with this id, in this vGroup where there are such."""

    def destroy(self, spot: Spot, slice_id: int) -> None:
        """Destroy a slice, whoever uses it. Raises NotFound."""

    def reset(self, spot: Spot) -> None:
        """Reset a chip."""

    def is_started(self, spot: Spot) -> bool:
        """Whether a chip that was reset has come up."""

    def hindrance(self, spot: Spot) -> str:
        """Return what of the machine's modes keeps the chip from being cut, with what to do; empty for nothing that is known."""

    def subscribe(self, told: Callable[[Told], object]) -> bool:
        """Have a function told of faults, on any thread, for as long as the process lasts; False where nobody tells."""
