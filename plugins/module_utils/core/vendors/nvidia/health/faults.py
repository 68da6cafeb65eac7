# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The faults that prevent reading a GPU: their names, which taints show, and their severities."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ....discovery.device_workers import DeviceBusy
from ....errors import AcceleratorError, DeviceFaulty, NotPermitted
from ....health.conditions import Severity, Sign
from ....model import NO_ANSWER, UNKNOWN_ERROR
from ...device_faults import as_device_fault

RESET_REQUIRED = "reset-required"
NO_PERMISSION = "no-permission"
INSUFFICIENT_POWER = "insufficient-power"
GPU_LOST = "gpu-lost"

#: The severity of each cause of a GPU fault. Pods cannot continue on a lost GPU. With the other causes they may
#: continue, because only the queries may be affected.
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


#: The cause of a device fault, by the class of the error.
_CAUSES: Mapping[type[AcceleratorError], str] = MappingProxyType({NotPermitted: NO_PERMISSION, DeviceBusy: NO_ANSWER})


def as_fault(error: AcceleratorError) -> DeviceFaulty:
    """Return the device fault for an error of a query that always works on a healthy GPU."""
    return as_device_fault(error, _CAUSES)


def sign(error: DeviceFaulty) -> Sign:
    """Return the health sign of a fault."""
    return Sign(
        cause=error.code,
        severity=SEVERITIES.get(error.code, Severity.DEGRADED),
        message=f"{error.message}.",
        remedy=error.hint,
        is_mended_by_reset=error.code == RESET_REQUIRED,
    )
