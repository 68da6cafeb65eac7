# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the codes of DCMI and npu-smi mean: as errors of a call, and as faults of one chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import AcceleratorError, BackendUnavailable, DeviceFaulty, InUse, NotFound, NotPermitted, Unsupported
from ..lanes import DeviceBusy
from ..model import NO_ANSWER, UNKNOWN_ERROR
from ..signs import Severity, Sign

NOT_READY = "not-ready"
NO_PERMISSION = "no-permission"
INTERNAL = "internal-error"
NPU_LOST = "npu-lost"

#: Every cause that a chip's fault can have, and how bad it is. One that is gone is gone for its pods; with the others they may
#: well go on: what is wrong may be the way to ask.
SEVERITIES: Mapping[str, Severity] = MappingProxyType(
    {
        NO_ANSWER: Severity.DEGRADED,
        UNKNOWN_ERROR: Severity.DEGRADED,
        NOT_READY: Severity.DEGRADED,
        NO_PERMISSION: Severity.DEGRADED,
        INTERNAL: Severity.DEGRADED,
        NPU_LOST: Severity.FAILED,
    }
)
CAUSES = tuple(SEVERITIES)


@dataclass(frozen=True)
class Code:
    """One code of DCMI: what it says, which error it is, and what to do. ``word`` is the error's code."""

    said: str
    error: type[AcceleratorError] = AcceleratorError
    word: str = ""
    hint: str = ""


_IN_CONTAINER = (
    "Where this runs in a container the chip may be another container's, or its slice may have been destroyed."
)
CODES: Mapping[int, Code] = MappingProxyType(
    {
        -8001: Code("a value is not valid", word="invalid-argument"),
        -8002: Code("it is not permitted", NotPermitted, hint="It wants root on the host."),
        -8005: Code("the driver met an internal error", DeviceFaulty, INTERNAL, _IN_CONTAINER),
        -8007: Code("there is no such chip", DeviceFaulty, NPU_LOST, "It was taken away, or its driver has lost it."),
        -8008: Code("there is no such thing", NotFound),
        -8009: Code("the driver did not take the call", DeviceFaulty, INTERNAL, "Look at the kernel log."),
        -8012: Code("the chip is not ready", DeviceFaulty, NOT_READY, "It may be starting, or being reset. Try again."),
        -8013: Code("it cannot be done in a container", NotPermitted, hint="Run it on the host."),
        -8020: Code(
            "the chip is occupied",
            InUse,
            hint="End what uses it: a program, another container, or slices of another mode.",
        ),
        -8022: Code("the chip's slices do not allow it", word="partition"),
        -8255: Code("the chip does not support it", Unsupported),
        # Not DCMI's own: its callers' for a library that lacks a function, or is not there.
        -99998: Code("the library does not have this function", Unsupported, "function-not-found"),
        -99999: Code("the library is not there", BackendUnavailable, hint="Install the driver."),
    }
)
_TOOL_OFFSET = 1000  # npu-smi says -9001 for what is -8001
_BY_EXIT: Mapping[int, int] = MappingProxyType(
    {(code - _TOOL_OFFSET) & 0xFF: code for code in CODES if code > -_TOOL_OFFSET * 10}
)


def code_of_exit(status: int) -> int | None:
    """Return the code of DCMI that npu-smi ended with, by its exit status; None for one that stands for none."""
    return _BY_EXIT.get(status)


def error_of(code: int, doing: str) -> AcceleratorError:
    """Return the error that a code is, for whoever was ``doing`` something (the beginning of a sentence)."""
    known = CODES.get(code)
    if known is None:
        return DeviceFaulty(f"{doing} failed: DCMI says {code}", code=UNKNOWN_ERROR)
    return known.error(f"{doing} failed: {known.said} ({code})", hint=known.hint, code=known.word)


def faulty(error: AcceleratorError) -> DeviceFaulty:
    """Return what an error means for a chip when it kept something from being read that can always be read."""
    if isinstance(error, DeviceFaulty):
        return error
    cause = UNKNOWN_ERROR
    if isinstance(error, NotFound):
        cause = NPU_LOST  # nothing else was named than the chip
    elif isinstance(error, NotPermitted):
        cause = NO_PERMISSION
    elif isinstance(error, DeviceBusy):
        cause = NO_ANSWER
    return DeviceFaulty(error.message, hint=error.hint, code=cause)


def sign(error: DeviceFaulty) -> Sign:
    """Return what a fault says of a chip's health."""
    severity = SEVERITIES.get(error.code, Severity.DEGRADED)
    return Sign(error.code, severity, f"{error.message}.", error.hint)
