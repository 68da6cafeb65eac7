# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a backend says of a device that is not well: a word for it, how bad it is, what ends it and what to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """How bad something is for those who have the device or want it."""

    #: People should know; the device does its work.
    INFORMATIVE = 0
    #: Nobody should be given the device; who has it can go on.
    DEGRADED = 1
    #: Who has the device cannot work with it.
    FAILED = 2

    @property
    def word(self) -> str:
        """The severity as configuration, status and metrics spell it."""
        return self.name.lower()


class Ends(enum.Enum):
    """What ends a fault. A new boot ends all of them but those of a board to be replaced."""

    #: A scan that does not find the state any more.
    LOOK = "look"
    #: A report of the device that it needs no recovery.
    RECOVERY = "recovery"
    #: A known reset: made by this product, reported by an operator, or requested by the device after the fault and no longer requested.
    RESET = "reset"
    #: A new boot of the machine.
    RESTART = "restart"
    #: The end of the processes that were using the device.
    PROCESSES = "processes"
    #: The replacement of the board.
    REPLACEMENT = "replacement"


@dataclass(frozen=True)
class Sign:
    """One thing that is wrong with a device.

    ``cause`` is the stable word for it, which taints carry in their key, ``value`` what tells it apart from others of the
    same cause (an error's number), which taints carry as their value. ``instance`` is the partition that it is about, where
    it is about one. ``is_mended_by_reset`` says that resetting the device while it is idle is what the vendor advises.
    ``is_consequence`` marks an error that only follows another one of the same cause, and only counts without it.
    ``only_in_use`` marks an error that counts only while processes use the device.
    """

    cause: str
    severity: Severity
    message: str
    remedy: str = ""
    ends: Ends = Ends.LOOK
    value: str = ""
    instance: int | None = None
    is_mended_by_reset: bool = False
    is_consequence: bool = False
    only_in_use: bool = False

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What makes two signs the same one."""
        return (self.cause, self.value, self.instance)

    def describe(self) -> str:
        """Say what is wrong and what to do."""
        return f"{self.message} {self.remedy}".strip()
