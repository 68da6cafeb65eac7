# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define a backend's report of a device fault: cause, severity, end, and remedy."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """The severity of a fault for current and future users of the device."""

    #: The device works; administrators should know about the fault.
    INFORMATIVE = 0
    #: The device should not be allocated; current users can continue.
    DEGRADED = 1
    #: Current users cannot work with the device.
    FAILED = 2

    @property
    def word(self) -> str:
        """Return the severity as spelled in configuration, status, and metrics."""
        return self.name.lower()


class Ends(enum.Enum):
    """The event that ends a fault. A reboot ends every fault, except on a board that must be replaced."""

    #: A scan that no longer finds the state.
    #: Stored records have the value ``look``.
    SCAN = "look"
    #: A report of the device that it needs no recovery.
    RECOVERY = "recovery"
    #: A known reset: made by this product, reported by an operator, or requested by the device after the fault and no longer requested.
    RESET = "reset"
    #: A reboot of the node.
    RESTART = "restart"
    #: The end of the processes that were using the device.
    PROCESSES = "processes"
    #: The replacement of the board.
    REPLACEMENT = "replacement"


@dataclass(frozen=True)
class Sign:
    """One fault of a device.

    ``cause`` is its stable name, which taints carry in their key. ``value`` distinguishes faults of the same cause (an
    error number), and taints carry it as their value. ``instance`` is the affected partition, if the fault affects only
    one. ``is_mended_by_reset`` says that the vendor advises a reset while the device is idle. ``is_consequence`` marks
    an error that only follows another error of the same cause, and counts only without it. ``only_in_use`` marks an
    error that counts only while processes use the device.
    """

    cause: str
    severity: Severity
    message: str
    remedy: str = ""
    ends: Ends = Ends.SCAN
    value: str = ""
    instance: int | None = None
    is_mended_by_reset: bool = False
    is_consequence: bool = False
    only_in_use: bool = False

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Return the values by which two signs are the same."""
        return (self.cause, self.value, self.instance)

    def describe(self) -> str:
        """Return the fault and its remedy as text."""
        return f"{self.message} {self.remedy}".strip()
