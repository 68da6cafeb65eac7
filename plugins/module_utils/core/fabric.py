# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Partitions of a machine's fabric: what a vendor's backend implements if a fabric connects its devices, and only those of one partition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Callable, Protocol

from .model import Device


class FabricPartitions(Protocol):
    """The partitions of the machine's fabric. All methods may be called from several threads, and end within a deadline."""

    @property
    def is_used(self) -> bool:
        """Whether the fabric has partitions at present, of which each claim's whole devices have to be one."""

    @property
    def active(self) -> frozenset[int] | None:
        """The partitions that were active at the last ``discover``; None if there are none, or their state is unknown."""

    def set_claimed(self, claimed: Callable[[], Collection[int]]) -> None:
        """Set the function that returns the partitions that claims use, for a fabric manager that has to be told after its restart.

        It is called on any thread.
        """

    def find(self, devices: Sequence[Device]) -> tuple[int, bool]:
        """Return the number of the partition that consists of exactly these whole devices, and whether it is active.

        Raises AcceleratorError with the partitions that exist if they are none, BackendUnavailable.
        """

    def activate(self, number: int) -> None:
        """Connect the devices of a partition with each other, unless they are connected.

        Raises InUse if another active partition has one of them, FabricRejected, BackendUnavailable, AcceleratorError.
        """

    def deactivate(self, number: int) -> None:
        """Disconnect the devices of a partition, unless they are not connected.

        Raises FabricRejected if the fabric manager answers and refuses, BackendUnavailable if it does not answer.
        """
