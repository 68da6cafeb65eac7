# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What GPUs' errors mean: NVIDIA's Xid numbers, and the other events of NVML, as data.

The immediate action for each number is that of NVIDIA's "Analyzing Xid Errors with the Xid Catalog" (Ampere and newer), and
the short names are those of "Xid Errors". Where the catalogue sends its reader through a workflow (48, 74, 144 to 150, 159) the
GPU is held back from new claims until it says by itself that it needs no recovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..signs import Ends, Severity, Sign

XID = "xid"

_RESTART_APPLICATION = (
    "Restart the application; if others meet it too, look at the kernel log and the GPU's other errors."
)
_RESET = "The GPU has to be reset (nvidia-smi --gpu-reset) once nothing uses it."
_RESTART_MACHINE = "The machine has to be restarted; if it comes back, the board, its seat and its power want a look."
_WORKFLOW = "Look at the kernel log and at the recovery action that the GPU asks for (nvidia-smi -q)."


@dataclass(frozen=True)
class Kind:
    """One bucket of the catalogue: what its errors do to a GPU, what ends them, and what to do."""

    severity: Severity
    ends: Ends
    remedy: str
    is_mended_by_reset: bool = False


APPLICATION = Kind(Severity.INFORMATIVE, Ends.PROCESSES, _RESTART_APPLICATION)
RESET = Kind(Severity.FAILED, Ends.RESET, _RESET, is_mended_by_reset=True)
WORKFLOW = Kind(Severity.DEGRADED, Ends.RESET, _WORKFLOW)
MACHINE = Kind(Severity.FAILED, Ends.RESTART, _RESTART_MACHINE)
SOFTWARE = Kind(Severity.INFORMATIVE, Ends.PROCESSES, "Update the GPU's driver and firmware.")
POWER = Kind(
    Severity.DEGRADED, Ends.RESTART, "See that all external power cables of the GPU are connected, then restart."
)
UNKNOWN = Kind(Severity.INFORMATIVE, Ends.PROCESSES, "Look the number up in NVIDIA's catalogue of Xid errors.")
#: Nothing to do, or only follows another error, or is told better by something else (154 by the recovery action itself).
NOTHING: Kind | None = None

_BUCKETS: tuple[tuple[Kind | None, tuple[int | range, ...]], ...] = (
    (
        APPLICATION,
        (8, 11, 13, 25, 31, 32, range(39, 42), 45, 60, range(68, 73), range(75, 78), 80, range(82, 87), 88, 89),
    ),
    (APPLICATION, (94, range(96, 106), range(126, 136), 139)),
    (NOTHING, (14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 154, 157, 160, 161)),
    (NOTHING, (range(162, 167), 170)),
    (RESET, (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 169)),
    (WORKFLOW, (48, 74, range(144, 151), 159, 167, 168)),
    (MACHINE, (79, 151)),
    (SOFTWARE, (78,)),
    (POWER, (54,)),
)
#: What each number means; None for one that asks for nothing.
KINDS: Mapping[int, Kind | None] = MappingProxyType(
    {
        number: kind
        for kind, entries in _BUCKETS
        for entry in entries
        for number in (entry if isinstance(entry, range) else (entry,))
    }
)

_NAMES: Mapping[int, str] = MappingProxyType(
    {
        8: "GPU stopped processing",
        13: "graphics engine exception",
        31: "GPU memory page fault",
        32: "invalid or corrupted push buffer stream",
        45: "preemptive cleanup, after a former error",
        46: "GPU stopped processing",
        48: "double-bit ECC error",
        54: "auxiliary power is not connected",
        62: "halt of the internal microcontroller",
        64: "row remapping failed",
        74: "NVLink error",
        78: "driver and firmware do not go together",
        79: "the GPU has fallen off the bus",
        94: "contained memory error",
        95: "uncontained memory error",
        109: "context switch timeout",
        119: "the GPU's system processor did not answer in time",
        120: "error of the GPU's system processor",
        136: "link training failed",
        140: "unrecovered ECC error",
        143: "initialisation error",
    }
)

#: Other events of NVML by their bit (nvmlEventType…): cause, what is told, and what it means.
_EVENTS: Mapping[int, tuple[str, str, Kind]] = MappingProxyType(
    {
        0x800: ("memory-failure", "a failure to retire memory", WORKFLOW),
        0x2000: ("poison", "a fatal poison error", RESET),
        0x4000: ("unavailable", "an error that makes it unavailable", RESET),
    }
)


def describe(number: int) -> str:
    """Name an Xid for a person."""
    name = _NAMES.get(number)
    return f"Xid {number} ({name})" if name else f"Xid {number}"


def of_xid(number: int, instance: int | None) -> Sign | None:
    """Return what an Xid says of a GPU, or of one GPU instance of it; None for one that asks for nothing."""
    kind = KINDS.get(number, UNKNOWN)
    if kind is None:
        return None
    where = f" in GPU instance {instance}" if instance is not None else ""
    return _sign(XID, f"It told of {describe(number)}{where}.", kind, str(number), instance)


def of_event(bit: int, instance: int | None) -> Sign | None:
    """Return what another event of NVML says; None for one that asks for nothing."""
    if bit not in _EVENTS:
        return None
    cause, told, kind = _EVENTS[bit]
    return _sign(cause, f"It told of {told}.", kind, "", instance)


def _sign(cause: str, message: str, kind: Kind, value: str, instance: int | None) -> Sign:
    return Sign(
        cause=cause,
        severity=kind.severity,
        message=message,
        remedy=kind.remedy,
        ends=kind.ends,
        value=value,
        instance=instance,
        is_mended_by_reset=kind.is_mended_by_reset,
    )
