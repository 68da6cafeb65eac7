# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a vendor's folder implements, and the list of vendors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Callable, Protocol

from .cdi import ContainerEdits
from .model import CounterSet, Device, Offer, OwnedPartition, Partition, Placement
from .nvidia.backend import NvidiaBackend
from .system import System


class Backend(Protocol):
    """One vendor's devices on this machine.

    All methods may be called from several threads. Methods that change a device hold that device's lock, so calls for
    different devices run side by side.
    """

    vendor: str
    driver_name: str
    cdi_kind: str

    @property
    def unanswered(self) -> tuple[str, ...]:
        """What the last ``discover`` found but could not read and never knew before, in words; in order of index."""

    def open(self) -> None:
        """Reach the vendor's library. Raises BackendUnavailable with the reason; may be called again at any time."""

    def close(self) -> None:
        """Let go of the vendor's library."""

    def discover(self) -> tuple[Device, ...]:
        """Return fresh facts of all devices, ordered by index. A lost device that was known is returned as such."""

    def device(self, uuid: str) -> Device:
        """Return fresh facts of one device, cheaply. Raises NotFound, DeviceLost."""

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Switch partitioning on or off; where a reset is needed the change stays pending.

        Raises InUse, NotPermitted, Unsupported.
        """

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset devices together. Raises InUse, NotPermitted, AcceleratorError."""

    def create_partition(self, uuid: str, profile_id: int, placement: Placement) -> Partition:
        """Create a partition at exactly this placement; nothing stays behind on failure.

        Raises DoesNotFit, NotPermitted, Unsupported, NotFound.
        """

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        """Destroy a partition. Raises NotFound, InUse, NotPermitted."""

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
        """Return the container edits that all devices of the vendor need, cached for one driver version."""

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
