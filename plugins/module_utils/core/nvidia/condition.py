# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a GPU says of its own state when it is asked: recovery action, memory repair, fabric, slowdown.

Asked at every look, in one call for all fields, one for the fabric and one for the clocks; what a board or driver does not answer is not asked again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..model import Health
from ..signs import Severity, Sign
from .board_facts import BoardFacts
from .fabric import IN_PROGRESS, NOT_STARTED, clique_of, has_joined, state_of
from .nvml import Nvml

# Of the header, NVML_FI_DEV_…
REMAP_PENDING, REMAP_FAILURE, RECOVERY_ACTION = 144, 145, 230

# nvmlClocksEventReason…: what the hardware itself does, by half of the clocks or more. Software's slowdown and power cap are every day's.
HARDWARE_SLOWDOWN, HARDWARE_THERMAL, POWER_BRAKE = 0x8, 0x40, 0x80

_COOLING = "See to the fans and the air, and what else heats the machine."
_RESET = "The GPU has to be reset (nvidia-smi --gpu-reset) once nothing uses it."
_REPLACE = "Run NVIDIA's field diagnostics; the board may have to be replaced."
_FABRIC = "See that nvidia-fabricmanager runs and has the driver's version, and what it logs."


class Action(NamedTuple):
    """A recovery action that a GPU can ask for (nvmlDeviceGpuRecoveryAction_t)."""

    word: str
    severity: Severity
    message: str
    remedy: str
    is_reset: bool = False


_ACTIONS: Mapping[int, Action] = MappingProxyType(
    {
        1: Action("reset", Severity.FAILED, "It asks for a reset.", _RESET, is_reset=True),
        2: Action("reboot", Severity.FAILED, "It asks for a restart of the node.", "Drain and restart the node."),
        3: Action(
            "drain-p2p",
            Severity.DEGRADED,
            "It asks for an end of all traffic between GPUs.",
            "End the work that uses several GPUs of this machine together.",
        ),
        4: Action("drain-and-reset", Severity.DEGRADED, "It asks to be drained and reset.", _RESET, is_reset=True),
        5: Action(
            "recover-imex-domain",
            Severity.DEGRADED,
            "It asks for a recovery of its IMEX domain.",
            "Restart nvidia-imex on the nodes of the domain.",
        ),
        6: Action("bus-reset", Severity.FAILED, "It asks for a reset of its bus.", "Drain and power-cycle the node."),
        7: Action(
            "system-reboot", Severity.FAILED, "It asks for a restart of the whole system.", "Restart the whole system."
        ),
    }
)


#: The actions that end with a reset of the GPU; a reset of its bus is one as well.
_RESETS = frozenset({1, 4, 6})

#: The causes that each field tells of. A GPU with MIG devices does not tell of its rows.
_CAUSES: Mapping[int, str] = MappingProxyType(
    {REMAP_PENDING: "row-remap-pending", REMAP_FAILURE: "row-remap-failure", RECOVERY_ACTION: "recovery-action"}
)


def read(nvml: Nvml, board: BoardFacts) -> Health:
    """Return what a GPU says of itself, and have its place in the fabric in the board's facts. Raises DeviceFaulty, AcceleratorError."""
    doing = f"Asking GPU {board.uuid} for its condition"
    fields = _fields(nvml, board, doing)
    signs = [*_of_fields(fields)]
    if "fabric" not in board.unanswered:
        fabric = nvml.filled("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t", board.handle, doing=doing)
        if fabric is None or not state_of(fabric):
            board.unanswered.add("fabric")
            board.clique = None
        else:
            state, status = state_of(fabric), int(fabric.status)
            signs.extend(_of_fabric(state, status, int(fabric.healthMask)))
            board.clique = clique_of(state, status, bytes(fabric.clusterUuid), int(fabric.cliqueId))
            board.switched = board.clique is None and has_joined(state, status)
    if "clocks" not in board.unanswered:
        reasons = nvml.optional("nvmlDeviceGetCurrentClocksEventReasons", board.handle, doing=doing)
        if reasons is None:
            board.unanswered.add("clocks")
        else:
            signs.extend(_of_clocks(int(getattr(reasons, "value", reasons))))
    action = fields.get(RECOVERY_ACTION)
    return Health(
        tuple(signs),
        needs_recovery=None if action is None else action != 0,
        needs_reset=None if action is None else action in _RESETS,
        untold=frozenset(cause for field, cause in _CAUSES.items() if field not in fields),
    )


def _fields(nvml: Nvml, board: BoardFacts, doing: str) -> Mapping[int, int]:
    """Return the fields that the GPU answers, by their numbers."""
    if "fields" in board.unanswered:
        return {}
    answers: Any = nvml.optional("nvmlDeviceGetFieldValues", board.handle, list(_CAUSES), doing=doing)
    if answers is None:
        board.unanswered.add("fields")
        return {}
    return {int(each.fieldId): int(each.value.uiVal) for each in answers if int(each.nvmlReturn) == 0}


def _of_fields(fields: Mapping[int, int]) -> Iterator[Sign]:
    number = fields.get(RECOVERY_ACTION, 0)
    if number:
        action = _ACTIONS.get(number) or Action(
            str(number), Severity.DEGRADED, f"It asks for recovery action {number}.", "See NVIDIA's documentation."
        )
        yield Sign(
            _CAUSES[RECOVERY_ACTION],
            action.severity,
            action.message,
            action.remedy,
            value=action.word,
            is_mended_by_reset=action.is_reset,
        )
    if fields.get(REMAP_PENDING):
        # NVIDIA's "GPU memory error management": what is not affected goes on, and new work may be begun.
        yield Sign(
            _CAUSES[REMAP_PENDING],
            Severity.INFORMATIVE,
            "Rows of its memory wait to be remapped.",
            _RESET,
            is_mended_by_reset=True,
        )
    if fields.get(REMAP_FAILURE):
        yield Sign(_CAUSES[REMAP_FAILURE], Severity.DEGRADED, "Rows of its memory could not be remapped.", _REPLACE)


def _of_clocks(reasons: int) -> Iterator[Sign]:
    if reasons & HARDWARE_THERMAL:
        yield Sign(
            "slowdown", Severity.DEGRADED, "It is too hot, and its hardware slows it down.", _COOLING, value="thermal"
        )
    elif reasons & POWER_BRAKE:
        yield Sign(
            "slowdown",
            Severity.DEGRADED,
            "The machine's power supply has it slowed down.",
            "See to the power supplies of the machine.",
            value="power-brake",
        )
    elif reasons & HARDWARE_SLOWDOWN:
        yield Sign(
            "slowdown", Severity.DEGRADED, "Its hardware slows it down.", "See to cooling and power.", value="hardware"
        )


def _of_fabric(state: int, status: int, mask: int) -> Iterator[Sign]:
    """Read nvmlGpuFabricInfoV_t; the mask's parts are 0 where the GPU does not tell."""
    if state in (NOT_STARTED, IN_PROGRESS):
        word = "has not begun to join" if state == NOT_STARTED else "is still joining"
        yield Sign("fabric", Severity.DEGRADED, f"It {word} the NVLink fabric.", _FABRIC, value="not-joined")
        return
    if status:
        yield Sign(
            "fabric", Severity.DEGRADED, f"It could not join the NVLink fabric: {status}.", _FABRIC, value="failed"
        )
        return
    bandwidth, recovering, unhealthy, timeouts = (mask >> shift & 0x3 for shift in (0, 2, 4, 6))
    if unhealthy == 1:
        yield Sign(
            "fabric", Severity.DEGRADED, "Its routes in the NVLink fabric are not well.", _FABRIC, value="routes"
        )
    elif 1 in (recovering, timeouts):
        yield Sign(
            "fabric", Severity.DEGRADED, "Its routes in the NVLink fabric are being mended.", _FABRIC, value="mending"
        )
    elif (mask >> 8 & 0xF) > 1:
        yield Sign(
            "fabric", Severity.DEGRADED, "Its place in the NVLink fabric is not as configured.", _FABRIC, value="place"
        )
    elif bandwidth == 1:
        yield Sign("fabric", Severity.INFORMATIVE, "Its NVLink bandwidth is degraded.", _FABRIC, value="bandwidth")
