# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a vendor's folder implements, and the list of vendors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Callable, Protocol

from .cdi import ContainerEdits
from .configuration import ConfigKind
from .model import CounterSet, Device, Finding, Notice, Offer, OwnedPartition, Partition, Placement
from .nvidia.backend import NvidiaBackend
from .system import System


class Backend(Protocol):
    """One vendor's devices on this machine.

    All methods may be called from several threads. Methods that change a device hold that device's lock, so calls for
    different devices run side by side.

    A fault has an owner. What goes wrong with one physical device is DeviceFaulty, whose code is the cause, for a call
    about that device, and a Fault in what ``discover`` returns; other devices notice nothing. Every call about a device
    ends within a deadline: a device that hangs is DeviceFaulty with the cause no-answer, at once for whoever asks next,
    until the call that hangs has come back. Only BackendUnavailable is about the whole machine.
    """

    vendor: str
    driver_name: str
    cdi_kind: str
    config_kinds: tuple[ConfigKind, ...]

    def open(self) -> None:
        """Reach the vendor's library. Raises BackendUnavailable with the reason; may be called again at any time."""

    def close(self) -> None:
        """Let go of the vendor's library, of every handle and of what ``wait_for_change`` listens to.

        Afterwards nothing of this process keeps a device from being reset. Last known facts are kept for ``discover``.
        """

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Look at all devices, side by side, and return each one's facts or its fault, ordered by index.

        A device that was known and does not answer any more is among them, one that was taken away is not. Facts that
        never change are read once; ``full`` reads them again. With ``patience``, in seconds, a device that was never read
        is not waited for longer than that: it goes on being read, and until it is back, or its own deadline is over, it
        is found as awaited. Raises BackendUnavailable, and nothing else, where the library itself does not work or does
        not tell which devices there are.
        """

    def device(self, uuid: str) -> Device:
        """Return fresh facts of one device, cheaply. Raises NotFound, DeviceFaulty, BackendUnavailable."""

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait until a device tells of something, for so many seconds at most; nothing said means nothing was told.

        What is told (an error, a change of partitioning that somebody else has made) is a reason to look at once, no more:
        vendors tell of some changes and not of others, and a look is what tells the facts. Blocks, so it wants a thread of
        its own; returns early when the backend is closed. While somebody waits, looks may leave out what would have been
        told. Raises BackendUnavailable when the backend is not open.
        """

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Switch partitioning on or off; where a reset is needed the change stays pending.

        Raises InUse, NotPermitted, Unsupported, DeviceFaulty.
        """

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset devices together. Raises InUse, NotPermitted, DeviceFaulty, AcceleratorError."""

    def create_partition(self, uuid: str, profile_id: int, placement: Placement) -> Partition:
        """Create a partition at exactly this placement; nothing stays behind on failure.

        Raises DoesNotFit, NotPermitted, Unsupported, NotFound, DeviceFaulty.
        """

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        """Destroy a partition. Raises NotFound, InUse, NotPermitted, DeviceFaulty."""

    def offers(self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = ()) -> tuple[Offer, ...]:
        """Return what is published of a device. Pure.

        ``owned`` are the partitions, by profile id, start and size, that the driver made for claims; all others that
        exist are an administrator's, are published as they are and never destroyed.
        """

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return what the device's dynamic offers share. Pure.

        With ``owned`` (the same as for ``offers``) the room that other partitions take is left out.
        """

    def driver_edits(self) -> ContainerEdits:
        """Return the container edits that all devices of the vendor need, by what is on the disk now; cheap.

        Raises BackendUnavailable, naming it, when something is not there that no container can do without.
        """

    def device_edits(self, device: Device, partition: Partition | None) -> ContainerEdits:
        """Return the container edits of one whole device (no partition) or of one partition."""


BACKENDS: dict[str, Callable[[System], Backend]] = {"nvidia": NvidiaBackend}


def create(vendor: str, system: System | None = None) -> Backend:
    """Return the backend of a vendor. Raises ValueError that lists the vendors known."""
    try:
        factory = BACKENDS[vendor]
    except KeyError:
        raise ValueError(
            f"There is no backend for vendor {vendor!r}; known are {', '.join(sorted(BACKENDS))}"
        ) from None
    return factory(system or System())
