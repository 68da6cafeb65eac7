# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The settings of a GPU: power limit, clocks, compute mode, workload profiles, persistence, ECC, and the time slice.

NVML sets them, except the time slice, which nvidia-smi sets. Facts: nvml.h. ECC is stored in the board's InfoROM. All
other settings are lost when the GPU is reset or the driver is unloaded. Without persistence mode the driver also
deinitializes a GPU when its last client closes it: "Data Persistence" in NVIDIA's guide "Driver Persistence"
(docs.nvidia.com/deploy/driver-persistence) lists compute mode, persistence mode, and power limit. It does not mention
locked clocks, workload profiles, and time slices, so they count as lost.

NVML does not report whether clocks are locked, and has no call for the time slice:
kubernetes-sigs/dra-driver-nvidia-gpu, nvlib.go. The node's values of both are recorded by the program that sets them
(settings_record.py).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....errors import AcceleratorError, Unsupported
from ....host.system import System
from ....schema import Boolean, Choice, Integer, UniqueStrings
from ....settings.knobs import (
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
from ...host_texts import one_line
from ..board_facts import BoardFacts
from ..configs import INTERVALS
from ..container.driver_files import PERSISTENCE_SOCKET
from ..nvml import Nvml

# nvmlComputeMode_t; 1 (exclusive for a thread) is obsolete.
_COMPUTE_MODE_NUMBERS: Mapping[str, int] = dict(zip(COMPUTE_MODES, (0, 3, 2)))
# nvmlPowerProfileType_t, in the order of its numbers. A profile beyond these names is named by its number.
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
# Memory clocks can be locked from Ampere on (nvml.h), but not on Hopper: nvidia-smi reports "not supported" there, and
# locks them only from the next initialization of the GPU on (--lock-memory-clocks-deferred). NVML shows whether it is
# supported only when they are set.
_NO_MEMORY_LOCK = frozenset({"Tesla", "Fermi", "Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Hopper"})
#: Settings that NVML does not report.
UNREPORTED = frozenset({GRAPHICS_CLOCKS, MEMORY_CLOCKS, TIME_SLICE})
#: Settings that NVML reports, and that a GPU loses when the driver deinitializes it.
REPORTED = frozenset({POWER_LIMIT, COMPUTE_MODE, WORKLOAD_PROFILES, PERSISTENCE})
#: Settings that need no change on a GPU that is bound to another driver, because they end with NVIDIA's driver.
WHILE_DETACHED = frozenset({PERSISTENCE})
#: Settings that a GPU does not support while MIG is on: the compute mode then belongs to the MIG devices, the time
#: slice to whole GPUs.
UNSUPPORTED_WITH_MIG = frozenset({COMPUTE_MODE, TIME_SLICE})
TOOL = "nvidia-smi"
TIME_SLICE_TIMEOUT = PERSISTENCE_TIMEOUT = 30.0
_MEMORY_IS_NUMA_NODE = "the GPU's memory is a NUMA node of the host"


def read(
    nvml: Nvml, system: System, board: BoardFacts, names: Collection[str], recorded: Mapping[str, Any], *, mig: bool
) -> dict[str, Knob]:
    """Return the named settings that a GPU supports. Raises DeviceFaulty or AcceleratorError.

    ``recorded`` are the values that the node has set, for settings that cannot be read back. ``mig`` is whether MIG is on.
    """
    found: dict[str, Knob] = {}
    for name in names:
        if name not in _READERS or (name == TIME_SLICE and not system.finds(TOOL)):
            continue
        with contextlib.suppress(Unsupported):
            knob = _READERS[name](nvml, board)
            blocked = "MIG is on" if mig and name in UNSUPPORTED_WITH_MIG else ""
            value = recorded.get(name) if name in UNREPORTED else knob.value
            found[name] = replace(knob, value=value, blocked=blocked or knob.blocked)
    return found


def settings_while_detached(names: Collection[str]) -> dict[str, Knob]:
    """Return the settings of a GPU that is bound to another driver: those that ended with NVIDIA's driver, without a value."""
    return {name: Knob(None, Boolean()) for name in names if name in WHILE_DETACHED}


def is_disablable(knobs: Mapping[str, Knob]) -> bool:
    """Return whether persistence mode is on, and can be disabled. ``knobs`` are the settings of a GPU."""
    knob = knobs.get(PERSISTENCE)
    return knob is not None and bool(knob.value) and not knob.blocked


def _persistence(nvml: Nvml, board: BoardFacts) -> Knob:
    doing = f"Reading the persistence mode of GPU {board.uuid}"
    value = bool(nvml.call("nvmlDeviceGetPersistenceMode", board.handle, doing=doing))
    return Knob(value, Boolean(), blocked=_MEMORY_IS_NUMA_NODE if value and _is_memory_numa_node(nvml, board) else "")


def _is_memory_numa_node(nvml: Nvml, board: BoardFacts) -> bool:
    """Return whether the GPU's memory is a NUMA node of the host.

    The driver takes it offline when persistence mode is switched off.
    """
    doing = f"Reading the NUMA node of the memory of GPU {board.uuid}"
    return nvml.optional("nvmlDeviceGetNumaNodeId", board.handle, doing=doing) is not None


def _ecc(nvml: Nvml, board: BoardFacts) -> Knob:
    doing = f"Reading the ECC mode of GPU {board.uuid}"
    current, pending = nvml.call("nvmlDeviceGetEccMode", board.handle, doing=doing)
    return Knob(bool(current), Boolean(), pending=bool(pending))


def _power(nvml: Nvml, board: BoardFacts) -> Knob:
    doing = f"Reading the power limit of GPU {board.uuid}"
    least, most = nvml.call("nvmlDeviceGetPowerManagementLimitConstraints", board.handle, doing=doing)
    limit = nvml.call("nvmlDeviceGetPowerManagementLimit", board.handle, doing=doing)
    return Knob(limit / 1000, Integer(-(-int(least) // 1000), int(most) // 1000, "W"))


def _compute_mode(nvml: Nvml, board: BoardFacts) -> Knob:
    mode = nvml.call("nvmlDeviceGetComputeMode", board.handle, doing=f"Reading the compute mode of GPU {board.uuid}")
    names = {number: name for name, number in _COMPUTE_MODE_NUMBERS.items()}
    return Knob(names.get(int(mode), COMPUTE_MODES[0]), Choice(COMPUTE_MODES))


def _memory_clocks_of(nvml: Nvml, board: BoardFacts) -> list[int]:
    doing = f"Reading the memory clocks of GPU {board.uuid}"
    return [int(clock) for clock in nvml.call("nvmlDeviceGetSupportedMemoryClocks", board.handle, doing=doing)]


def _memory_clocks(nvml: Nvml, board: BoardFacts) -> Knob:
    if board.attributes["architecture"] in _NO_MEMORY_LOCK:
        raise Unsupported(
            f"GPU {board.uuid} does not lock memory clocks: it is a {board.attributes['architecture']} GPU"
        )
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
    """Return the names of the supported and of the requested profiles. Raises Unsupported."""
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
    supported, requested = _profiles(nvml, board)
    return Knob(sorted(requested), UniqueStrings(Choice(tuple(supported)), most=len(supported)))


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


def differing_from_initial(nvml: Nvml, board: BoardFacts, present: Mapping[str, Knob]) -> dict[str, Any]:
    """Return the present values, by name, that differ from those of a newly initialized GPU; of the settings in ``REPORTED`` only."""
    return {
        name: knob.value
        for name, knob in present.items()
        if name in REPORTED and knob.value != _initial_value(nvml, board, name)
    }


def _initial_value(nvml: Nvml, board: BoardFacts, name: str) -> Any:
    """Return the value of a setting after the driver has initialized a GPU."""
    if name == POWER_LIMIT:
        doing = f"Reading the default power limit of GPU {board.uuid}"
        limit = nvml.optional("nvmlDeviceGetPowerManagementDefaultLimit", board.handle, doing=doing)
        return None if limit is None else limit / 1000
    return {COMPUTE_MODE: COMPUTE_MODES[0], WORKLOAD_PROFILES: [], PERSISTENCE: False}[name]


#: All settings in the order in which they are set: the compute mode before the time slice.
ORDER = tuple(_READERS)


def apply(nvml: Nvml, system: System, board: BoardFacts, values: Mapping[str, Any]) -> None:
    """Set settings of a GPU. None means the value that the GPU has after a reset.

    Raises NotPermitted, Unsupported, DeviceFaulty, or AcceleratorError. Settings that were set before the error stay
    set.
    """
    for name in ORDER:
        if name in values:
            _set(nvml, system, board, name, values[name])


def _set(nvml: Nvml, system: System, board: BoardFacts, name: str, value: Any) -> None:
    doing = f"Setting {name} of GPU {board.uuid} to {'the default' if value is None else value}"
    if name == POWER_LIMIT:
        if value is None:
            milliwatts = nvml.call("nvmlDeviceGetPowerManagementDefaultLimit", board.handle, doing=doing)
        else:
            milliwatts = round(value * 1000)
        nvml.call("nvmlDeviceSetPowerManagementLimit", board.handle, milliwatts, doing=doing)
    elif name == COMPUTE_MODE:
        nvml.call(
            "nvmlDeviceSetComputeMode",
            board.handle,
            _COMPUTE_MODE_NUMBERS[value or COMPUTE_MODES[0]],
            doing=doing,
        )
    elif name == PERSISTENCE:
        if value is not None:  # the default is the mode at the load of the driver or of its daemon
            _set_persistence(nvml, system, board, bool(value), doing)
    elif name == ECC:
        if value is None:
            (value,) = nvml.call("nvmlDeviceGetDefaultEccMode", board.handle, doing=doing)  # the binding returns a list
        nvml.call("nvmlDeviceSetEccMode", board.handle, int(value), doing=doing)
    elif name == WORKLOAD_PROFILES:
        _request_profiles(nvml, board, frozenset(value or ()), doing)
    elif name == TIME_SLICE:
        _set_time_slice(system, board.uuid, value or INTERVALS[0], doing)
    else:
        which = {GRAPHICS_CLOCKS: "GpuLockedClocks", MEMORY_CLOCKS: "MemoryLockedClocks"}[name]
        if value is None:
            nvml.optional(f"nvmlDeviceReset{which}", board.handle, doing=doing)  # not supported: nothing is locked
        else:
            nvml.call(f"nvmlDeviceSet{which}", board.handle, value["minimum"], value["maximum"], doing=doing)


def _request_profiles(nvml: Nvml, board: BoardFacts, wanted: Collection[str], doing: str) -> None:
    """Change the requested profiles. Each NVML call changes only the profiles that it names."""
    _supported, requested = _profiles(nvml, board)
    for what, names in (
        ("Clear", [name for name in requested if name not in wanted]),
        ("Set", [name for name in wanted if name not in requested]),
    ):
        if names:
            change = nvml.structure("c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t")
            for number in map(_profile_number, names):
                change.requestedProfilesMask.mask[number // _MASK_BITS] |= 1 << number % _MASK_BITS
            function = f"nvmlDeviceWorkloadPowerProfile{what}RequestedProfiles"
            nvml.call(function, board.handle, ctypes.byref(change), doing=doing)


def _profile_number(name: str) -> int:
    return _PROFILES.index(name) if name in _PROFILES else int(name.rpartition("-")[2])


def _set_persistence(nvml: Nvml, system: System, board: BoardFacts, value: bool, doing: str) -> None:
    """Set the persistence mode, through NVIDIA's persistence daemon if it runs, because it has the GPU open while the mode is on."""
    if not value and _is_memory_numa_node(nvml, board):
        raise Unsupported(f"{doing}: {_MEMORY_IS_NUMA_NODE}", hint="Leave persistence mode on.", code="coherent-memory")
    if not system.is_socket(PERSISTENCE_SOCKET):
        nvml.call("nvmlDeviceSetPersistenceMode", board.handle, int(value), doing=doing)
        return
    done = system.run([TOOL, "-i", board.uuid, "-pm", str(int(value))], timeout=PERSISTENCE_TIMEOUT)
    now = nvml.call("nvmlDeviceGetPersistenceMode", board.handle, doing=doing)
    if done.returncode != 0 or bool(now) != value:
        raise AcceleratorError(
            f"{doing}: nvidia-smi ended with {done.returncode}, and the mode is {int(now)}, expected {int(value)}: {one_line(done)}",
            hint="Read the journal of nvidia-persistenced.",
            code="persistence-failed",
        )


def _set_time_slice(system: System, uuid: str, interval: str, doing: str) -> None:
    command = [TOOL, "compute-policy", "-i", uuid, f"--set-timeslice={INTERVALS.index(interval)}"]
    done = system.run(command, timeout=TIME_SLICE_TIMEOUT)
    if done.returncode != 0:
        raise AcceleratorError(
            f"{doing}: nvidia-smi ended with {done.returncode}: {one_line(done)}", code="time-slice-failed"
        )
