# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Resets that are not possible now, and processes that prevent a reset."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import Unsupported
from ..model import Device, Process
from ..texts import LONGEST_CAUSE, join_problems

#: The error code of a reset that is not possible now.
RESET_BLOCKED = "reset-blocked"


def blocked_reset(devices: Iterable[Device]) -> Unsupported | None:
    """Return the error of a reset of these devices if one of them cannot be reset now."""
    blocked: dict[str, list[str]] = {}
    for device in devices:
        if device.reset_blocked:
            blocked.setdefault(device.reset_blocked, []).append(device.describe())
    if not blocked:
        return None
    # The remedy is in the reason, which comes first: a list of many devices is shortened.
    reasons = join_problems(
        (f"{reason}. Affected devices: {', '.join(names)}" for reason, names in blocked.items()), longest=LONGEST_CAUSE
    )
    return Unsupported(f"A reset is needed and not possible now. {reasons}", code=RESET_BLOCKED)


def held_reset(devices: Iterable[Device], holders: Iterable[Process]) -> str:
    """Return the warning that processes have devices open, so that a reset would fail now; "" without processes."""
    found = ", ".join(map(str, holders))
    names = ", ".join(device.describe() for device in devices)
    return f"A reset of {names} fails while processes use it: {found}. End them, services included" if found else ""
