# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the interface for fabric partitions, for vendors whose fabric connects only the devices of one partition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Callable, Protocol

from ..model import Device


class FabricPartitions(Protocol):
    """The partitions of the node's fabric. All methods are thread-safe and end within a deadline."""

    @property
    def is_used(self) -> bool:
        """Return whether the fabric has partitions at present.

        Then the whole devices of each claim must form one partition.
        """

    @property
    def active(self) -> frozenset[int] | None:
        """Return the partitions that were active at the last ``discover``; None without partitions or if unknown."""

    def set_claimed(self, claimed: Callable[[], Collection[int]]) -> None:
        """Set the function that returns the claims' partitions, which a fabric manager needs again after its restart.

        The function is called on any thread.
        """

    def find(self, devices: Sequence[Device]) -> tuple[int, bool]:
        """Return the number of the partition that consists of exactly these whole devices, and whether it is active.

        Raises AcceleratorError, which lists the existing partitions, if no partition matches, or BackendUnavailable.
        """

    def activate(self, number: int) -> None:
        """Connect the devices of a partition, unless they are connected.

        Raises InUse if another active partition contains one of them, FabricRejected, BackendUnavailable,
        AcceleratorError.
        """

    def deactivate(self, number: int) -> None:
        """Disconnect the devices of a partition, unless they are disconnected.

        Raises FabricRejected if the fabric manager rejects the change, BackendUnavailable if it does not answer.
        """
