# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The meaning of GPU errors as data: NVIDIA's Xid numbers, and the other error events of NVML.

The immediate action of each number is that of NVIDIA's Xid catalog (Ampere and newer), and the short names are those of
"Xid Errors". A GPU requests recovery only after some of them (Xid 154), and after 109 and 143 only from the driver
branches R570 and R575 on. So the end of a fault that needs a reset does not depend only on the recovery action, see
``signs.Ends``. NVML reports a number without the registers of the kernel's log line. For 74 and 144 to 150, the action
depends on these registers. A GPU with such an error gets no new claims until it reports that it needs no recovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ....health.conditions import Ends, Severity, Sign

XID = "xid"

_RESET = "Reset the GPU (nvidia-smi --gpu-reset) once no program uses it."
_REPORT = "If others reset or repair it, run `dra-driver recovered` with its UUID."


@dataclass(frozen=True)
class Kind:
    """One class of errors: its severity, the event that ends it, and its remedy.

    ``is_consequence`` and ``only_in_use`` are as in Sign.
    """

    severity: Severity
    ends: Ends
    remedy: str
    is_mended_by_reset: bool = False
    is_consequence: bool = False
    only_in_use: bool = False


APPLICATION = Kind(
    Severity.INFORMATIVE,
    Ends.PROCESSES,
    "Restart the application; if other applications meet it too, look at the kernel log and the GPU's other errors.",
)
CLEANUP = Kind(
    Severity.INFORMATIVE,
    Ends.PROCESSES,
    "The GPU has ended a program's work. Without another Xid before it: restart nvidia-fabricmanager on machines with NVSwitch.",
    is_consequence=True,
)
RESET = Kind(Severity.FAILED, Ends.RESET, f"{_RESET} {_REPORT}", is_mended_by_reset=True)
POWER_CYCLE = Kind(
    Severity.FAILED,
    Ends.RESET,
    f"{_RESET} If the error recurs, switch the machine off and on. {_REPORT}",
    is_mended_by_reset=True,
)
RESET_FROM_WORKFLOW = Kind(Severity.DEGRADED, Ends.RESET, f"{_RESET} {_REPORT}", is_mended_by_reset=True)
RESET_IN_USE = Kind(Severity.DEGRADED, Ends.RESET, f"{_RESET} {_REPORT}", is_mended_by_reset=True, only_in_use=True)
WORKFLOW = Kind(
    Severity.DEGRADED,
    Ends.RECOVERY,
    "Check the kernel log and the recovery action that the GPU asks for (nvidia-smi -q).",
)
MACHINE = Kind(
    Severity.FAILED,
    Ends.RESTART,
    "Reboot the node. If the error recurs, check the board, its slot, and its power supply.",
)
ECC_OFF = Kind(Severity.DEGRADED, Ends.RESTART, "Enable ECC on the GPU, or reboot the node.")
VIRTUAL_MACHINE = Kind(
    Severity.DEGRADED, Ends.RESTART, "Reboot the virtual machine that has the GPU; its host needs no reboot."
)
POWER = Kind(Severity.DEGRADED, Ends.RESTART, "Connect all external power cables of the GPU, then reboot the node.")
REPLACE = Kind(
    Severity.FAILED,
    Ends.REPLACEMENT,
    f"Run NVIDIA's field diagnostic and replace the board. {_REPORT}",
)
WORN_OUT = Kind(Severity.DEGRADED, Ends.REPLACEMENT, f"Replace the board. {_REPORT}")
SOFTWARE = Kind(Severity.INFORMATIVE, Ends.PROCESSES, "Update the GPU's driver and firmware.")
SUPPORT = Kind(Severity.INFORMATIVE, Ends.PROCESSES, "Contact NVIDIA's support if the error recurs.")
UNKNOWN = Kind(Severity.INFORMATIVE, Ends.PROCESSES, "Look the number up in NVIDIA's Xid catalog.")
#: No action, or the scan reports the result better (154: the recovery action itself).
NOTHING: Kind | None = None

_BUCKETS: tuple[tuple[Kind | None, tuple[int | range, ...]], ...] = (
    (
        APPLICATION,
        (8, 11, 13, 25, 31, 32, range(39, 42), 60, range(68, 73), range(75, 78), 80, range(82, 87), 88, 89),
    ),
    (APPLICATION, (94, range(96, 106), range(126, 136), 139, 174)),
    (CLEANUP, (45,)),
    (NOTHING, (14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 154, 157, 160, 161)),
    (NOTHING, (162, 164, 166, 170, 176)),
    (RESET, (46, 62, 95, 109, 136, 140, 143, 155, 156, 158)),
    (POWER_CYCLE, (110, 119, 120)),
    (RESET_FROM_WORKFLOW, (48, 163, 171, 172)),
    (RESET_IN_USE, (159,)),
    (WORKFLOW, (74, range(144, 151))),
    (MACHINE, (79, 167, 169, 173)),
    (ECC_OFF, (168,)),
    (VIRTUAL_MACHINE, (151,)),
    (REPLACE, (64,)),
    (WORN_OUT, (165,)),
    (SOFTWARE, (78,)),
    (POWER, (54,)),
    # 142 and, since A100, the unused numbers.
    (SUPPORT, (range(1, 8), 9, 10, 12, range(15, 25), range(26, 31), range(33, 37), 42, 47, range(49, 54))),
    (SUPPORT, (range(55, 60), 61, 65, 73, 81, 87, 90, 91, range(111, 119), range(122, 126), 138, 142)),
)
#: The class of each number; None for one that needs no action.
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
        45: "preemptive cleanup, after an earlier error",
        46: "GPU stopped processing",
        48: "double-bit ECC error",
        54: "auxiliary power is not connected",
        62: "halt of the internal microcontroller",
        64: "row remapping failed",
        74: "NVLink error",
        78: "driver and firmware do not match",
        79: "the GPU has fallen off the bus",
        94: "contained memory error",
        95: "uncontained memory error",
        109: "context switch timeout",
        110: "security fault",
        119: "the GPU's system processor did not answer in time",
        120: "error of the GPU's system processor",
        136: "link training failed",
        140: "unrecovered ECC error",
        143: "initialization error",
        151: "key rotation failed",
        156: "resource retired",
        158: "fatal timeout",
        163: "power smoothing is off",
        165: "the life of the power smoothing has ended",
        167: "fatal PCIe timeout",
        168: "errors in the write-protected region",
        169: "halt of the security processor",
        171: "double-bit ECC error of the DRAM",
        172: "double-bit ECC error of the SRAM",
        173: "fatal C2C link error",
    }
)

#: Other events of NVML by their bit (nvmlEventType…): cause, reported text, and its class.
_EVENTS: Mapping[int, tuple[str, str, Kind]] = MappingProxyType(
    {
        0x800: ("memory-failure", "a failure to retire memory", WORKFLOW),
        0x2000: ("poison", "a fatal poison error", RESET),
        0x4000: ("unavailable", "an error that makes it unavailable", RESET),
    }
)


def describe(number: int) -> str:
    """Return the number and name of an Xid."""
    name = _NAMES.get(number)
    return f"Xid {number} ({name})" if name else f"Xid {number}"


def sign_of_xid(number: int, instance: int | None) -> Sign | None:
    """Return the sign of an Xid of a GPU, or of one of its GPU instances; None for a number that needs no action."""
    kind = KINDS.get(number, UNKNOWN)
    if kind is None:
        return None
    where = f" in GPU instance {instance}" if instance is not None else ""
    return _sign(XID, f"It reported {describe(number)}{where}.", kind, str(number), instance)


def sign_of_event(bit: int, instance: int | None) -> Sign | None:
    """Return the sign of another NVML event; None for an event that needs no action."""
    if bit not in _EVENTS:
        return None
    cause, reported, kind = _EVENTS[bit]
    return _sign(cause, f"It reported {reported}.", kind, "", instance)


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
        is_consequence=kind.is_consequence,
        only_in_use=kind.only_in_use,
    )
