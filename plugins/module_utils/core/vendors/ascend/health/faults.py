# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The meaning of the codes of DCMI and npu-smi, as errors of a call and as faults of a chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ....discovery.device_workers import DeviceBusy
from ....errors import AcceleratorError, BackendUnavailable, DeviceFaulty, InUse, NotFound, NotPermitted, Unsupported
from ....health.conditions import Severity, Sign
from ....model import NO_ANSWER, UNKNOWN_ERROR
from ...device_faults import as_device_fault

NOT_READY = "not-ready"
NO_PERMISSION = "no-permission"
INTERNAL = "internal-error"
NPU_LOST = "npu-lost"

#: The severity of each cause of a chip fault. Pods cannot continue on a lost chip. With the other causes they may
#: continue, because only the queries may be affected.
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


#: Causes that end without intervention. A read is repeated, and so is a change after its result was read.
TRANSIENT = frozenset({NO_ANSWER, NOT_READY})


@dataclass(frozen=True)
class Code:
    """One code of DCMI: its meaning, the error class, and the remedy. ``word`` is the error's code."""

    said: str
    error: type[AcceleratorError] = AcceleratorError
    word: str = ""
    hint: str = ""


_IN_CONTAINER = (
    "Where this runs in a container the chip may be another container's, or its slice may have been destroyed."
)
_KERNEL_LOG = "Read the kernel log."
#: -8002: `dcmi_check_set_vnpu_permission` in `dcmi_virtual_intf.c` of hicann/driver rejects users other than root, and
#: virtual machines except for the 310P. Names and numbers: `dcmi_interface_api.h` of hicann/driver. -8001 also means
#: "does not fit", and -8013 also "busy": the driver's code for a busy device is converted to it
#: (`dcmi_fault_manage_intf.c`).
CODES: Mapping[int, Code] = MappingProxyType(
    {
        -8001: Code("a value is not valid, or does not fit", word="invalid-argument"),
        -8002: Code(
            "it is not permitted",
            NotPermitted,
            hint="Run it as root on the host or in a privileged container. In a virtual machine only the 310P allows it.",
        ),
        -8003: Code("a memory operation failed", DeviceFaulty, INTERNAL, _KERNEL_LOG),
        -8004: Code("a checked memory operation failed", DeviceFaulty, INTERNAL, _KERNEL_LOG),
        -8005: Code("the driver met an internal error", DeviceFaulty, INTERNAL, _IN_CONTAINER),
        -8006: Code("the chip did not answer in time", DeviceFaulty, NO_ANSWER, _KERNEL_LOG),
        -8007: Code("there is no such chip", DeviceFaulty, NPU_LOST, "It was removed, or its driver has lost it."),
        -8008: Code("the object does not exist", NotFound),
        -8009: Code("the driver did not take the call", DeviceFaulty, INTERNAL, _KERNEL_LOG),
        -8010: Code("a message to the chip was not sent", DeviceFaulty, NO_ANSWER, _KERNEL_LOG),
        -8011: Code("a message from the chip was not received", DeviceFaulty, NO_ANSWER, _KERNEL_LOG),
        -8012: Code("the chip is not ready", DeviceFaulty, NOT_READY, "It may be starting, or being reset. Try again."),
        -8013: Code(
            "the chip is busy, or this is an ordinary container",
            InUse,
            hint="End the processes that use the chip. An ordinary container cannot do this: use the host.",
        ),
        -8014: Code(
            "a file of the driver cannot be read or written",
            word="file-operation",
            hint="Check that the filesystem of /etc/vnpu.cfg is writable and not full.",
        ),
        -8015: Code("the reset failed", DeviceFaulty, NOT_READY, "Reset the chip again, or restart the host."),
        -8016: Code("the driver aborted the operation", word="aborted", hint="Try again."),
        -8017: Code(
            "the firmware is being upgraded", DeviceFaulty, NOT_READY, "Try again when the upgrade has finished."
        ),
        -8020: Code(
            "the chip is occupied",
            InUse,
            hint="End what uses it: a program, another container, or slices of another mode.",
        ),
        -8022: Code("the chip's slices do not allow it", word="partition"),
        -8023: Code("the setting is not configured", Unsupported, "not-configured"),
        -8255: Code("the chip does not support it", Unsupported),
        # These codes are not from DCMI. Its callers use them for a library that lacks a function or is missing.
        -99998: Code("the library does not have this function", Unsupported, "function-not-found"),
        -99999: Code("the library is not there", BackendUnavailable, hint="Install the driver."),
    }
)
TRANSIENT_CODES = frozenset(number for number, code in CODES.items() if code.word in TRANSIENT)
_TOOL_OFFSET = 1000  # npu-smi uses -9001 for -8001
_BY_EXIT: Mapping[int, int] = MappingProxyType(
    {(code - _TOOL_OFFSET) & 0xFF: code for code in CODES if code > -_TOOL_OFFSET * 10}
)


def code_of_exit(status: int) -> int | None:
    """Return the DCMI code for an exit status of npu-smi; None for a status without a code."""
    return _BY_EXIT.get(status)


def error_of(code: int, doing: str) -> AcceleratorError:
    """Return the error for a DCMI code. ``doing`` is the beginning of its text."""
    known = CODES.get(code)
    if known is None:
        return DeviceFaulty(f"{doing} failed: DCMI returned {code}", code=UNKNOWN_ERROR)
    return known.error(f"{doing} failed: {known.said} ({code})", hint=known.hint, code=known.word)


#: The cause of a device fault, by the class of the error. A query names only its chip, so NotFound means a lost chip.
_CAUSES: Mapping[type[AcceleratorError], str] = MappingProxyType(
    {NotFound: NPU_LOST, NotPermitted: NO_PERMISSION, DeviceBusy: NO_ANSWER}
)


def as_fault(error: AcceleratorError) -> DeviceFaulty:
    """Return the device fault for an error of a query that always works on a healthy chip."""
    return as_device_fault(error, _CAUSES)


def sign(error: DeviceFaulty) -> Sign:
    """Return the health sign of a fault."""
    severity = SEVERITIES.get(error.code, Severity.DEGRADED)
    return Sign(error.code, severity, f"{error.message}.", error.hint)
