# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The knobs of a GPU: power limit, locked clocks, compute mode, workload profiles and ECC through NVML, the time slice through nvidia-smi.

Facts: nvml.h. But for ECC, which is in the board's InfoROM, none of it outlives a reset of the GPU or the driver's being unloaded. NVML
does not tell whether clocks are locked, and there is no NVML call for the time slice: kubernetes-sigs/dra-driver-nvidia-gpu, nvlib.go.
What the node has set of both is noted by whoever set it (settings_record.py).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..documents import Choice, Several, Truth, Whole
from ..errors import AcceleratorError, Unsupported
from ..settings import (
    COMPUTE_MODE,
    COMPUTE_MODES,
    ECC,
    GRAPHICS_CLOCKS,
    MEMORY_CLOCKS,
    PERSISTENCE,
    POWER_LIMIT,
    TIME_SLICE,
    WORKLOAD_PROFILES,
    Knob,
    clocks,
)
from ..system import System
from .board_facts import BoardFacts
from .configs import INTERVALS
from .nvml import Nvml

# nvmlComputeMode_t; 1, exclusive for a thread, is no more.
_MODES: Mapping[str, int] = dict(zip(COMPUTE_MODES, (0, 3, 2)))
# nvmlPowerProfileType_t, in the order of its numbers; a profile that has none of these names goes by its number.
_PROFILES = (
    "max-p",
    "max-q",
    "compute",
    "memory-bound",
    "network",
    "balanced",
    "llm-inference",
    "llm-training",
    "rbm",
    "dcpcie",
    "hmma-sparse",
    "hmma-dense",
    "sync-balanced",
    "hpc",
    "mig",
    "max-q-1",
    "network-bound",
    "high-throughput-inference",
    "medium-throughput-inference",
    "low-latency-inference",
    "training",
    "inference",
    "max-q-2",
    "max-q-3",
    "low-priority-background",
)
_MASK_BITS = 32
#: What NVML does not tell.
_UNTOLD = frozenset({GRAPHICS_CLOCKS, MEMORY_CLOCKS, TIME_SLICE})
#: What needs nothing done on a GPU that another driver has: NVIDIA's own holds none that it has not.
WHILE_AWAY = frozenset({PERSISTENCE})
#: What a GPU does not take while MIG is on: the one is the MIG devices' then, the other is for whole GPUs.
NOT_WITH_MIG = frozenset({COMPUTE_MODE, TIME_SLICE})
TOOL = "nvidia-smi"
TIME_SLICE_TIMEOUT = 30.0


def read(
    nvml: Nvml, system: System, board: BoardFacts, names: Collection[str], noted: Mapping[str, Any], *, mig: bool
) -> dict[str, Knob]:
    """Return those of a GPU's knobs that are named and that it has. Raises DeviceFaulty, AcceleratorError.

    ``noted`` is what the node has set, for what cannot be read back; ``mig`` whether MIG is on.
    """
    found: dict[str, Knob] = {}
    for name in names:
        if name not in _READERS or (name == TIME_SLICE and not system.finds(TOOL)):
            continue
        with contextlib.suppress(Unsupported):
            knob = _READERS[name](nvml, board)
            blocked = "MIG is on" if mig and name in NOT_WITH_MIG else ""
            found[name] = replace(knob, value=noted.get(name) if name in _UNTOLD else knob.value, blocked=blocked)
    return found


def of_none(names: Collection[str]) -> dict[str, Knob]:
    """Return the knobs of a GPU that another driver has: what is set with that driver's own end, and cannot be read."""
    return {name: Knob(None, Truth()) for name in names if name in WHILE_AWAY}


def _persistence(nvml: Nvml, board: BoardFacts) -> Knob:
    doing = f"Reading the persistence mode of GPU {board.uuid}"
    return Knob(bool(nvml.call("nvmlDeviceGetPersistenceMode", board.handle, doing=doing)), Truth())


def _ecc(nvml: Nvml, board: BoardFacts) -> Knob:
    doing = f"Reading the ECC mode of GPU {board.uuid}"
    current, pending = nvml.call("nvmlDeviceGetEccMode", board.handle, doing=doing)
    return Knob(bool(current), Truth(), pending=bool(pending))


def _power(nvml: Nvml, board: BoardFacts) -> Knob:
    doing = f"Reading the power limit of GPU {board.uuid}"
    least, most = nvml.call("nvmlDeviceGetPowerManagementLimitConstraints", board.handle, doing=doing)
    limit = nvml.call("nvmlDeviceGetPowerManagementLimit", board.handle, doing=doing)
    return Knob(limit / 1000, Whole(-(-int(least) // 1000), int(most) // 1000, "W"))


def _compute_mode(nvml: Nvml, board: BoardFacts) -> Knob:
    mode = nvml.call("nvmlDeviceGetComputeMode", board.handle, doing=f"Reading the compute mode of GPU {board.uuid}")
    names = {number: name for name, number in _MODES.items()}
    return Knob(names.get(int(mode), COMPUTE_MODES[0]), Choice(COMPUTE_MODES))


def _memory_clocks_of(nvml: Nvml, board: BoardFacts) -> list[int]:
    doing = f"Reading the memory clocks of GPU {board.uuid}"
    return [int(clock) for clock in nvml.call("nvmlDeviceGetSupportedMemoryClocks", board.handle, doing=doing)]


def _memory_clocks(nvml: Nvml, board: BoardFacts) -> Knob:
    return _clocks(_memory_clocks_of(nvml, board))


def _graphics_clocks(nvml: Nvml, board: BoardFacts) -> Knob:
    memory = max(_memory_clocks_of(nvml, board), default=0)
    doing = f"Reading the graphics clocks of GPU {board.uuid}"
    return _clocks(nvml.call("nvmlDeviceGetSupportedGraphicsClocks", board.handle, memory, doing=doing))


def _clocks(supported: Collection[Any]) -> Knob:
    if not supported:
        raise Unsupported("The GPU names no clocks to choose from")
    least, most = int(min(supported)), int(max(supported))
    return Knob(None, clocks(least, most, defaults={"minimum": least}))


def _time_slice(_nvml: Nvml, _board: BoardFacts) -> Knob:
    return Knob(None, Choice(INTERVALS))


def _profiles(nvml: Nvml, board: BoardFacts) -> tuple[list[str], list[str]]:
    """The names of the profiles that a board has, and of those that are requested. Raises Unsupported."""
    doing = f"Reading the workload profiles of GPU {board.uuid}"
    current = nvml.filled(
        "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles",
        "c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t",
        board.handle,
        doing=doing,
    )
    if current is None:
        raise Unsupported(f"{doing}: the GPU or its driver has none: they came with Blackwell, and driver 570")
    return _names(current.perfProfilesMask.mask), _names(current.requestedProfilesMask.mask)


def _names(mask: Sequence[int]) -> list[str]:
    numbers = [
        index * _MASK_BITS + bit for index, word in enumerate(mask) for bit in range(_MASK_BITS) if word >> bit & 1
    ]
    return [_PROFILES[number] if number < len(_PROFILES) else f"profile-{number}" for number in numbers]


def _workload_profiles(nvml: Nvml, board: BoardFacts) -> Knob:
    there, requested = _profiles(nvml, board)
    return Knob(sorted(requested), Several(Choice(tuple(there)), most=len(there)))


_READERS: Mapping[str, Callable[[Nvml, BoardFacts], Knob]] = {
    POWER_LIMIT: _power,
    COMPUTE_MODE: _compute_mode,
    GRAPHICS_CLOCKS: _graphics_clocks,
    MEMORY_CLOCKS: _memory_clocks,
    WORKLOAD_PROFILES: _workload_profiles,
    TIME_SLICE: _time_slice,
    PERSISTENCE: _persistence,
    ECC: _ecc,
}

#: All of them, in the order in which they are set: the compute mode goes before the time slice.
ORDER = tuple(_READERS)


def apply(nvml: Nvml, system: System, board: BoardFacts, values: Mapping[str, Any]) -> None:
    """Set knobs of a GPU; None is what the GPU has after a reset.

    Raises NotPermitted, Unsupported, DeviceFaulty, AcceleratorError; what was set before the one that fails stays set.
    """
    for name in ORDER:
        if name in values:
            _set(nvml, system, board, name, values[name])


def _set(nvml: Nvml, system: System, board: BoardFacts, name: str, value: Any) -> None:
    doing = f"Setting {name} of GPU {board.uuid} to {'what it is by default' if value is None else value}"
    if name == POWER_LIMIT:
        if value is None:
            milliwatts = nvml.call("nvmlDeviceGetPowerManagementDefaultLimit", board.handle, doing=doing)
        else:
            milliwatts = round(value * 1000)
        nvml.call("nvmlDeviceSetPowerManagementLimit", board.handle, milliwatts, doing=doing)
    elif name == COMPUTE_MODE:
        nvml.call("nvmlDeviceSetComputeMode", board.handle, _MODES[value or COMPUTE_MODES[0]], doing=doing)
    elif name == PERSISTENCE:
        if value is not None:  # by default it is as whoever loads the driver, or its daemon, has it
            nvml.call("nvmlDeviceSetPersistenceMode", board.handle, int(value), doing=doing)
    elif name == ECC:
        if value is None:
            (value,) = nvml.call(
                "nvmlDeviceGetDefaultEccMode", board.handle, doing=doing
            )  # the binding makes a list of it
        nvml.call("nvmlDeviceSetEccMode", board.handle, int(value), doing=doing)
    elif name == WORKLOAD_PROFILES:
        _request_profiles(nvml, board, frozenset(value or ()), doing)
    elif name == TIME_SLICE:
        _set_time_slice(system, board.uuid, value or INTERVALS[0], doing)
    else:
        which = {GRAPHICS_CLOCKS: "GpuLockedClocks", MEMORY_CLOCKS: "MemoryLockedClocks"}[name]
        if value is None:
            nvml.call(f"nvmlDeviceReset{which}", board.handle, doing=doing)
        else:
            nvml.call(f"nvmlDeviceSet{which}", board.handle, value["minimum"], value["maximum"], doing=doing)


def _request_profiles(nvml: Nvml, board: BoardFacts, wanted: Collection[str], doing: str) -> None:
    """Both calls change what is requested by the profiles that they name, and leave the others."""
    _there, requested = _profiles(nvml, board)
    for what, names in (
        ("Clear", [name for name in requested if name not in wanted]),
        ("Set", [name for name in wanted if name not in requested]),
    ):
        if names:
            change = nvml.structure("c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t")
            for number in map(_number, names):
                change.requestedProfilesMask.mask[number // _MASK_BITS] |= 1 << number % _MASK_BITS
            function = f"nvmlDeviceWorkloadPowerProfile{what}RequestedProfiles"
            nvml.call(function, board.handle, ctypes.byref(change), doing=doing)


def _number(name: str) -> int:
    return _PROFILES.index(name) if name in _PROFILES else int(name.rpartition("-")[2])


def _set_time_slice(system: System, uuid: str, interval: str, doing: str) -> None:
    command = [TOOL, "compute-policy", "-i", uuid, f"--set-timeslice={INTERVALS.index(interval)}"]
    done = system.run(command, timeout=TIME_SLICE_TIMEOUT)
    if done.returncode != 0:
        said = " ".join((done.stdout + " " + done.stderr).split())
        raise AcceleratorError(f"{doing}: nvidia-smi ended with {done.returncode}: {said}", code="time-slice-failed")
