# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What can be wrong with one GPU: the words for it, which taints carry."""

from __future__ import annotations

from ..errors import AcceleratorError, DeviceFaulty, NotPermitted
from ..lanes import DeviceBusy
from ..model import NO_ANSWER, UNKNOWN_ERROR

RESET_REQUIRED = "reset-required"
NO_PERMISSION = "no-permission"
INSUFFICIENT_POWER = "insufficient-power"
GPU_LOST = "gpu-lost"

#: Every cause that a GPU's fault can have.
CAUSES = (NO_ANSWER, UNKNOWN_ERROR, RESET_REQUIRED, NO_PERMISSION, INSUFFICIENT_POWER, GPU_LOST)


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
