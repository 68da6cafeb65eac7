# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert the errors of queries that always work on a healthy device to faults of the device."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import AcceleratorError, DeviceFaulty
from ..model import UNKNOWN_ERROR


def as_device_fault(error: AcceleratorError, causes: Mapping[type[AcceleratorError], str]) -> DeviceFaulty:
    """Return the device fault for an error. ``causes`` are the causes of errors by their class."""
    if isinstance(error, DeviceFaulty):
        return error
    cause = next((cause for kind, cause in causes.items() if isinstance(error, kind)), UNKNOWN_ERROR)
    return DeviceFaulty(error.message, hint=error.hint, code=cause)
