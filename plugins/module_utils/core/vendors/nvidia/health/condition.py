# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The health that a GPU reports: recovery action, memory repair, fabric, slowdown, and confidential computing.

Each scan makes one call for all fields, one for the fabric, and one for the clocks. Queries that a board or driver does
not support are not repeated. On hosts with confidential computing, further calls read the ready state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ....errors import AcceleratorError, BackendUnavailable
from ....health.conditions import Severity, Sign
from ....model import Health
from ..board_facts import BoardFacts
from ..fabric.fabric import IN_PROGRESS, NOT_STARTED, clique_of, has_joined, state_of
from ..nvml import Nvml

# From the header nvml.h, NVML_FI_DEV_…
REMAP_PENDING, REMAP_FAILURE, RECOVERY_ACTION = 144, 145, 230

# nvmlClocksEventReason…: slowdowns by the hardware to half of the clocks or less. Slowdowns and power caps by software
# are normal.
HARDWARE_SLOWDOWN, HARDWARE_THERMAL, POWER_BRAKE = 0x8, 0x40, 0x80

#: Seconds. The bit of any hardware slowdown counts once all scans of this time have found it, because power spikes and
#: clock changes set it for moments (nvml.h, nvmlClocksEventReasonHwSlowdown). Thermal slowdown and power brake have
#: separate bits and count at once.
SLOWDOWN_SECONDS = 30.0
# The second is the name before driver 535.
_CLOCKS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")

_COOLING = "See to the fans and the air, and what else heats the machine."
_RESET = "The GPU has to be reset (nvidia-smi --gpu-reset) once nothing uses it."
_REPLACE = "Run NVIDIA's field diagnostics; the board may have to be replaced."
_FABRIC = "See that nvidia-fabricmanager runs and has the driver's version, and what it logs."


class Action(NamedTuple):
    """A recovery action that a GPU can request (nvmlDeviceGpuRecoveryAction_t)."""

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


#: The actions that include a reset of the GPU, also by a reset of its bus.
_RESETS = frozenset({1, 4, 6})

#: The causes that each field reports. A GPU with MIG devices does not report its rows.
_CAUSES: Mapping[int, str] = MappingProxyType(
    {REMAP_PENDING: "row-remap-pending", REMAP_FAILURE: "row-remap-failure", RECOVERY_ACTION: "recovery-action"}
)


def read(nvml: Nvml, board: BoardFacts) -> Health:
    """Return the health that a GPU reports, and store its fabric state in the board's facts.

    Raises DeviceFaulty or AcceleratorError.
    """
    doing = f"Reading the health of GPU {board.uuid}"
    fields = _fields(nvml, board, doing)
    signs = [*_of_fields(fields), *_read_fabric(nvml, board, doing), *_read_clocks(nvml, board, doing)]
    if "confidential computing" not in board.unsupported_queries:
        signs.extend(_of_confidential(nvml, board, doing))
    action = fields.get(RECOVERY_ACTION)
    return Health(
        tuple(signs),
        needs_recovery=None if action is None else action != 0,
        needs_reset=None if action is None else action in _RESETS,
        unchecked_causes=frozenset(cause for field, cause in _CAUSES.items() if field not in fields),
    )


def _read_fabric(nvml: Nvml, board: BoardFacts, doing: str) -> Iterator[Sign]:
    """Yield the signs of a GPU's fabric, and store its fabric state in the board's facts."""
    if "fabric" in board.unsupported_queries:
        return
    fabric = nvml.filled("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t", board.handle, doing=doing)
    if fabric is None or not state_of(fabric):
        board.unsupported_queries.add("fabric")
        board.clique = None
        return
    state, status = state_of(fabric), int(fabric.status)
    yield from _of_fabric(state, status, int(fabric.healthMask))
    board.clique = clique_of(state, status, bytes(fabric.clusterUuid), int(fabric.cliqueId))
    board.switched = board.clique is None and has_joined(state, status)


def _read_clocks(nvml: Nvml, board: BoardFacts, doing: str) -> Iterator[Sign]:
    """Yield the sign of a slowdown."""
    if "clocks" in board.unsupported_queries:
        return
    reasons = _clocks(nvml, board, doing)
    if reasons is None:
        board.unsupported_queries.add("clocks")
    else:
        yield from _of_clocks(_without_short_slowdown(board, reasons, time.monotonic()))


def _clocks(nvml: Nvml, board: BoardFacts, doing: str) -> int | None:
    """Return the reasons for slow clocks, from the function that the driver supports; None if it supports none."""
    answers = (nvml.optional(name, board.handle, doing=doing) for name in _CLOCKS)
    return next((int(getattr(found, "value", found)) for found in answers if found is not None), None)


def _without_short_slowdown(board: BoardFacts, reasons: int, now: float) -> int:
    """Return the reasons without the bit of any hardware slowdown until it has lasted.

    ``now`` is a ``time.monotonic`` value.
    """
    if not reasons & HARDWARE_SLOWDOWN:
        board.slowed_since = None
        return reasons
    if board.slowed_since is None:
        board.slowed_since = now
    return reasons if now - board.slowed_since >= SLOWDOWN_SECONDS else reasons & ~HARDWARE_SLOWDOWN


def _of_confidential(nvml: Nvml, board: BoardFacts, doing: str) -> Iterator[Sign]:
    """Yield a sign if confidential computing is on and the GPUs do not accept work yet.

    Facts: nvml.h, nvmlSystemGetConfComputeGpusReadyState; NVIDIA's deployment guide of confidential computing. After a
    boot the GPUs accept no work until the ready state is set, usually after their attestation. The feature changes with
    a reset only.
    """
    try:
        is_on = _is_confidential(nvml, doing)
        ready = nvml.optional("nvmlSystemGetConfComputeGpusReadyState", doing=doing) if is_on else None
    except BackendUnavailable:
        raise
    except AcceleratorError:
        return  # a call for the whole host: its error is not a fault of this GPU
    if ready is None:
        board.unsupported_queries.add("confidential computing")
    elif not int(getattr(ready, "value", ready)):
        yield Sign(
            "confidential-computing",
            Severity.DEGRADED,
            "Confidential computing is on, and the GPUs of the node do not accept work: their ready state is not set.",
            "Verify the attestation of the GPUs. Then run `nvidia-smi conf-compute -srs 1` on the node.",
            value="not-ready",
        )


def _is_confidential(nvml: Nvml, doing: str) -> bool:
    """Return whether confidential computing is on, also in the mode Protected PCIe, in which the feature is off.

    Facts: NVIDIA/open-gpu-kernel-modules, conf_compute_api.c: the multi-GPU mode is not part of the feature. Drivers
    before 550 have no such mode. NVIDIA/nvtrust, ppcie-verifier: this mode needs the ready state too.
    """
    settings = nvml.filled("nvmlSystemGetConfComputeSettings", "c_nvmlSystemConfComputeSettings_v1_t", doing=doing)
    if settings is not None and (settings.ccFeature or settings.multiGpuMode):
        return True
    state = nvml.optional("nvmlSystemGetConfComputeState", doing=doing)
    return state is not None and bool(state.ccFeature)


def _fields(nvml: Nvml, board: BoardFacts, doing: str) -> Mapping[int, int]:
    """Return the values of the fields that the GPU supports, by field number."""
    if "fields" in board.unsupported_queries:
        return {}
    answers: Any = nvml.optional("nvmlDeviceGetFieldValues", board.handle, list(_CAUSES), doing=doing)
    if answers is None:
        board.unsupported_queries.add("fields")
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
        # NVIDIA's "GPU memory error management": unaffected work continues, and new work can start.
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
    """Yield the signs of a GPU's fabric state (nvmlGpuFabricInfoV_t). Parts of the mask are 0 if not reported."""
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
