# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's Xid catalog as the tests expect it: for each number its severity, its end, and the branches that request a recovery.

It is transcribed from the catalog, and shares nothing with the product's table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dra_driver.core.health.conditions import Severity

#: The ends of a fault.
PROCESS, RESET, REBOOT, RECOVERY, NEVER = "process", "reset", "reboot", "recovery", "never"


@dataclass(frozen=True)
class Row:
    """One row of the table. A number that needs no action has no ``severity``. Also the end of the fault, and whether a reset repairs it."""

    severity: Severity | None
    ends: str = PROCESS
    mended: bool = False


IGNORED = Row(None)
APPLICATION = Row(Severity.INFORMATIVE)
RESET_NOW = Row(Severity.FAILED, RESET, mended=True)
RESET_SOON = Row(Severity.DEGRADED, RESET, mended=True)


def numbers(text: str) -> tuple[int, ...]:
    """Read a list such as "8, 39-41"."""
    found: list[int] = []
    for part in text.split(","):
        first, _dash, last = part.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


_ROWS: tuple[tuple[Row, str], ...] = (
    # Unused since A100: contact support.
    (
        APPLICATION,
        "1-7, 9, 10, 12, 15-24, 26-30, 33-36, 42, 47, 49-53, 55-59, 61, 65, 73, 81, 87, 90, 91, 111-118, 122-125, 138",
    ),
    (APPLICATION, "8, 11, 25, 32, 13, 69, 31, 39-41, 70-72, 75-77, 85, 126-135, 60, 80"),
    (APPLICATION, "68, 83, 84, 88, 89, 96-98, 82, 99-105, 86, 139, 94"),
    (IGNORED, "14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 141, 152, 153, 121, 137, 157, 160, 161"),
    (RESET_NOW, "46, 158, 62, 110, 119, 120, 95, 140, 109, 143, 156, 136, 155"),
    (Row(Severity.FAILED, NEVER), "64"),
    (Row(Severity.FAILED, REBOOT), "79"),
    (Row(Severity.DEGRADED, REBOOT), "151"),
    (APPLICATION, "78, 142"),
    (Row(Severity.DEGRADED, REBOOT), "54"),
    # Workflows. 45 without another Xid: restart the fabric manager; 154: the recovery action reports it.
    (APPLICATION, "45"),
    (RESET_SOON, "48, 159, 171, 172"),
    (Row(Severity.DEGRADED, RECOVERY), "74, 144-150"),
    (IGNORED, "154"),
    # Without an action in the catalog.
    (IGNORED, "162, 164, 166, 170"),
    (RESET_SOON, "163"),
    (Row(Severity.DEGRADED, NEVER), "165"),
    (Row(Severity.FAILED, REBOOT), "167, 169, 173"),
    (Row(Severity.DEGRADED, REBOOT), "168"),
    # Not in the catalog, in the open kernel modules: a process ended, the memory subsystem, corrected PCIe errors, sparing.
    (APPLICATION, "174, 175, 185"),
    (IGNORED, "176"),
)
ROWS: dict[int, Row] = {number: row for row, text in _ROWS for number in numbers(text)}

#: The first driver branch in which the GPU requests a recovery after the Xid. Other Xids request none in any branch.
ASKS_FROM: dict[int, int] = {
    **dict.fromkeys(numbers("62, 63, 64, 79, 94, 95, 110, 120, 136, 155, 156"), 565),
    109: 570,
    143: 575,
    161: 575,
    158: 0,
    48: 0,  # a workflow; chosen
}
BRANCHES = (560, 565, 570, 575, 580)


def asks(number: int, branch: int) -> bool:
    """Return whether the GPU requests a recovery after an Xid, with this branch of the driver."""
    return number in ASKS_FROM and branch >= ASKS_FROM[number]


def branches_of(number: int) -> Iterable[int]:
    """Return the relevant branches for a number: the last one before the GPU requests a recovery, and the first one with it."""
    first = ASKS_FROM.get(number, 0)
    return (580,) if not first else tuple(each for each in (max(b for b in BRANCHES if b < first), first, 580))
