# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What can be wrong with one GPU so that nothing can be read of it: the words for it, which taints carry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import AcceleratorError, DeviceFaulty, NotPermitted
from ..lanes import DeviceBusy
from ..model import NO_ANSWER, UNKNOWN_ERROR
from ..signs import Severity, Sign

RESET_REQUIRED = "reset-required"
NO_PERMISSION = "no-permission"
INSUFFICIENT_POWER = "insufficient-power"
GPU_LOST = "gpu-lost"

#: Every cause that a GPU's fault can have, and how bad it is. A GPU that is gone is gone for its pods; with the others they may
#: well go on: what is wrong may be the way to ask.
SEVERITIES: Mapping[str, Severity] = MappingProxyType(
    {
        NO_ANSWER: Severity.DEGRADED,
        UNKNOWN_ERROR: Severity.DEGRADED,
        RESET_REQUIRED: Severity.FAILED,
        NO_PERMISSION: Severity.DEGRADED,
        INSUFFICIENT_POWER: Severity.DEGRADED,
        GPU_LOST: Severity.FAILED,
    }
)
CAUSES = tuple(SEVERITIES)


def faulty(error: AcceleratorError) -> DeviceFaulty:
    """Return what an error means for a GPU when it kept something from being read that can always be read."""
    if isinstance(error, DeviceFaulty):
        return error
    cause = UNKNOWN_ERROR
    if isinstance(error, NotPermitted):
        cause = NO_PERMISSION
    elif isinstance(error, DeviceBusy):
        cause = NO_ANSWER
    return DeviceFaulty(error.message, hint=error.hint, code=cause)


def sign(error: DeviceFaulty) -> Sign:
    """Return what a fault says of a GPU's health."""
    return Sign(
        cause=error.code,
        severity=SEVERITIES.get(error.code, Severity.DEGRADED),
        message=f"{error.message}.",
        remedy=error.hint,
        is_mended_by_reset=error.code == RESET_REQUIRED,
    )
