# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test persistence mode on an idle GPU: whether NVIDIA's daemon blocks changes, and which settings are lost without the mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dra_driver.core.errors import InUse
from dra_driver.core.host.device_users import find_device_users
from dra_driver.core.model import Device, devices_of
from dra_driver.core.settings.knobs import COMPUTE_MODE, GRAPHICS_CLOCKS, PERSISTENCE, POWER_LIMIT, TIME_SLICE
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.nvidia.nvml import IN_USE, RESET_REQUIRED, SUCCESS
from dra_driver.core.vendors.nvidia.vendor import FACTS

TOOL = "nvidia-smi"
RESET_SECONDS = 300.0
_GRAPHICS_CLOCK = 0  # NVML_CLOCK_GRAPHICS
_OUTCOMES = {SUCCESS: "done", RESET_REQUIRED: "pending", IN_USE: "in use"}


def idle_gpus(backend: NvidiaBackend) -> Iterator[Device]:
    """Return the idle GPUs without partitions whose persistence mode is on and can be switched off."""
    for device in devices_of(backend.discover()):
        knob = backend.knobs(device.uuid, [PERSISTENCE]).get(PERSISTENCE)
        is_whole = not device.partitioning.enabled and not device.partitioning.pending
        if is_whole and not device.processes and knob is not None and knob.value and not knob.blocked:
            yield device


def blocked_by_daemon(backend: NvidiaBackend) -> str:
    """Change the MIG mode of a GPU that only the daemon uses, and reset it. Return the results, "" without such a GPU."""
    system = backend._system
    for device in idle_gpus(backend):
        numbers = [number for path in backend.device_nodes(device) if (number := system.device_number(path))]
        if {process.name for process in find_device_users(system, numbers)} != {FACTS.persistence_daemon}:
            continue
        mode = "not supported"
        if device.partitioning.supported:
            handle = backend._boards.board(device.uuid).handle
            try:
                status = int(backend._nvml.call("nvmlDeviceSetMigMode", handle, 1))
                mode = _OUTCOMES.get(status, f"error {status}")
            except InUse:
                mode = "in use"
            finally:
                backend._nvml.call("nvmlDeviceSetMigMode", handle, 0)
        backend.close()
        try:
            done = system.run([TOOL, "--gpu-reset", "-i", device.uuid], timeout=RESET_SECONDS)
        finally:
            backend.open()
        output = f"{done.stdout} {done.stderr}".lower()
        reset = "done" if done.returncode == 0 else "in use" if "use" in output else f"error {done.returncode}"
        return f"MIG mode {mode}, reset {reset}"
    return ""


def read_settings(backend: NvidiaBackend, uuid: str) -> dict[str, Any]:
    """Return the settings of a GPU. For locked clocks it returns the current clock."""
    knobs = backend.knobs(uuid, [POWER_LIMIT, COMPUTE_MODE])
    found: dict[str, Any] = {name: knob.value for name, knob in knobs.items()}
    handle = backend._boards.board(uuid).handle
    found[GRAPHICS_CLOCKS] = backend._nvml.call("nvmlDeviceGetClockInfo", handle, _GRAPHICS_CLOCK)
    policy = backend._system.run([TOOL, "compute-policy", "-l", "-i", uuid], timeout=30.0)
    if policy.returncode == 0:
        found[TIME_SLICE] = policy.stdout.split()[-1]
    return found


def lost_without_mode(backend: NvidiaBackend) -> str:
    """Change settings of a GPU without persistence mode, close NVML, and return the settings that are lost; "" without such a GPU."""
    device = next(iter(idle_gpus(backend)), None)
    if device is None:
        return ""
    uuid, previous = device.uuid, read_settings(backend, device.uuid)
    knobs = backend.knobs(uuid, [POWER_LIMIT, COMPUTE_MODE, GRAPHICS_CLOCKS, TIME_SLICE])
    handle = backend._boards.board(uuid).handle
    memory = max(backend._nvml.call("nvmlDeviceGetSupportedMemoryClocks", handle))
    clock = int(max(backend._nvml.call("nvmlDeviceGetSupportedGraphicsClocks", handle, memory)))
    values = {
        POWER_LIMIT: getattr(knobs[POWER_LIMIT].allowed, "least", None) if POWER_LIMIT in knobs else None,
        COMPUTE_MODE: "ExclusiveProcess",
        GRAPHICS_CLOCKS: {"minimum": clock, "maximum": clock},
        TIME_SLICE: "Long",
    }
    values = {name: value for name, value in values.items() if name in knobs and value is not None}
    backend.set_knobs(uuid, {PERSISTENCE: False})
    try:
        backend.set_knobs(uuid, values)
        changed = read_settings(backend, uuid)
        backend.close()
        try:
            reader = NvidiaBackend(backend._system)  # its first opening restores nothing
            reader.open()
            reader.discover()
            now = read_settings(reader, uuid)
            reader.close()
        finally:
            backend.open()
    finally:
        backend.set_knobs(uuid, {**dict.fromkeys(values), PERSISTENCE: True})
    differing = [name for name in changed if changed[name] != previous[name]]
    return ", ".join(sorted(name for name in differing if now[name] != changed[name])) or "none"
