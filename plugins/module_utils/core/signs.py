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
    """What ends something that was told once, and is no state that can be looked at."""

    #: A look that finds it no more: it is a state.
    LOOK = "look"
    #: A reset of the device, or the device itself saying that it needs none.
    RESET = "reset"
    #: A new start of the machine, or the device itself saying that it needs none.
    RESTART = "restart"
    #: The end of the processes that were using the device.
    PROCESSES = "processes"


@dataclass(frozen=True)
class Sign:
    """One thing that is wrong with a device.

    ``cause`` is the stable word for it, which taints carry in their key, ``value`` what tells it apart from others of the
    same cause (an error's number), which taints carry as their value. ``instance`` is the partition that it is about, where
    it is about one. ``is_mended_by_reset`` says that resetting the device while it is idle is what the vendor advises.
    """

    cause: str
    severity: Severity
    message: str
    remedy: str = ""
    ends: Ends = Ends.LOOK
    value: str = ""
    instance: int | None = None
    is_mended_by_reset: bool = False

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What makes two signs the same one."""
        return (self.cause, self.value, self.instance)

    def describe(self) -> str:
        """Say what is wrong and what to do."""
        return f"{self.message} {self.remedy}".strip()
