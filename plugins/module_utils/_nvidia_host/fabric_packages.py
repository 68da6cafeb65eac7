# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The packages of the NVIDIA fabric manager, NVLSM, and IMEX: the ones that a node needs, their version, and their verification."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._host.driver_installation import DeviceUsers, find_users, is_running, last_words
from .._packages.interface import PackageProblem, upstream
from .._packages.package_group import Group, Part, Unit
from ..core.host.system import System
from ..core.vendors.nvidia.fabric.fabric import state_of
from ..core.vendors.nvidia.fabric.nvswitch import (
    NO_SUMMARY,
    NOT_SUPPORTED,
    FabricJoinState,
    Switches,
    faults_of,
    not_joined,
    read_query,
)
from ..core.vendors.nvidia.nvml import Nvml
from .driver_catalog import branch_of

MANAGER, SUBNET, IMEX = "nvidia-fabricmanager", "nvlsm", "nvidia-imex"
MANAGER_UNIT, IMEX_UNIT = f"{MANAGER}.service", f"{IMEX}.service"
AUTO, ALWAYS, NEVER = "auto", "always", "never"
NONE, INSTALLED, ENABLED = "none", "installed", "enabled"
_TRACES = ("/var/tmp/fabricmanager.state",)  # noqa: S108
_LOADED = "/sys/module/nvidia/version"
#: Packages whose version is the driver's version, by the names of the vendor and of the distributions.
_OF_DRIVER = re.compile(
    r"libnvidia-ml1|libnvidia-compute(-\d+)?(-server)?|nvidia-driver-cuda|nvidia-compute(-utils)?-G\d\d"
)
#: Names in the vendor's older RPM packages.
_OLDER_NAMES = {MANAGER: ("nvidia-fabric-manager",)}
#: Query functions with their structures, newest first.
_QUERIES = (
    ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t"),
    ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"),
    ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
)
_QUERY_SECONDS = 120.0
_IMEX_PROGRAM, _READY = "nvidia-imex-ctl", "READY"
_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Needs:
    """The packages that a node needs, and the reason."""

    manager: bool
    subnet: bool
    imex: bool
    reason: str

    def __bool__(self) -> bool:
        return self.manager or self.imex

    def package_names(self) -> list[str]:
        """Return the names of the needed packages, without a branch."""
        chosen = {MANAGER: self.manager, SUBNET: self.subnet, IMEX: self.imex}
        return [name for name, is_needed in chosen.items() if is_needed]


def needs_of(found: Switches, *, manager: str, subnet: str, imex: str) -> Needs:
    """Return the packages that a node needs, by its switches and by the options: auto, always or never; none, installed or enabled."""
    has_manager = manager == ALWAYS or (manager == AUTO and bool(found))
    # NVLSM is needed for switches that are not PCI devices. Only it manages them.
    has_subnet = has_manager and (subnet == ALWAYS or (subnet == AUTO and bool(found.managed)))
    reason = f"The node has {found.describe()}"
    if not found and not has_manager:
        reason += ", so it gets no fabric manager"
    return Needs(has_manager, has_subnet, imex != NONE, reason)


def driver_version(installed: Mapping[str, str], recorded: str, loaded: str) -> str:
    """Return the version of the installed driver, also if it is loaded only after a reboot. Empty for no driver."""
    found = sorted({upstream(version) for name, version in installed.items() if _OF_DRIVER.fullmatch(name)})
    if recorded and (recorded in found or not found):
        return recorded
    if loaded in found or not found:
        return loaded
    return found[-1]


def loaded_version(system: System) -> str:
    """Return the version of the driver that the kernel has loaded; empty for none."""
    return system.read_text(_LOADED).strip() if system.exists(_LOADED) else ""


def group_of(needs: Needs, *, version: str, loaded: bool, imex: str) -> Group:
    """Return the package group for a node's needs. Package names of older drivers contain the branch."""
    branch = branch_of(version)

    def part(name: str) -> Part:
        names = (name, f"{name}-{branch}") if branch else (name,)
        return Part((*names, *_OLDER_NAMES.get(name, ())), replaces=rf"{_pattern(name)}(-\d+)?")

    parts = [
        *([part(MANAGER)] if needs.manager else []),
        *([Part((SUBNET,), own_version=True)] if needs.subnet else []),
        *([part(IMEX)] if needs.imex else []),
    ]
    return Group(
        name="nvidia-fabric-manager",
        title="the fabric manager" if needs.manager or not needs.imex else "IMEX",
        pattern=rf"{_pattern(MANAGER)}(-\d+)?|{SUBNET}|{IMEX}(-\d+)?",
        parts=tuple(parts),
        variable="nvidia_fabric_manager_driver_version",
        units=(
            # The fabric manager starts only with the driver of the same version.
            Unit(MANAGER_UNIT, True if needs.manager else None, stays=loaded),
            # If claims start IMEX, an instance that starts at boot would hold its resources. Therefore the unit is masked.
            Unit(IMEX_UNIT, {INSTALLED: False, ENABLED: True}.get(imex), stays=loaded, masked=imex == INSTALLED),
        ),
        traces=_TRACES,
        # The driver's own pin has the same version, and changes with it.
        pinned=False,
    )


def _pattern(name: str) -> str:
    return "|".join((name, *_OLDER_NAMES.get(name, ()))).join(("(", ")"))


# Users of GPUs


def users_of(system: System, *, state_path: str, services: list[str]) -> DeviceUsers:
    """Return the users of GPUs while a fabric manager runs.

    Without the fabric manager no new program can use the GPUs. On older boards, running programs are ended.
    """
    if not is_running(system, MANAGER_UNIT):
        return DeviceUsers()
    names = [f"/dev/{name}" for name in system.list_directory("/dev") if name.startswith("nvidia")]
    return find_users(system, state_path=state_path, paths=names, services=services)


# Verification


def read_join_states(system: System, *, binding: bool) -> dict[str, FabricJoinState]:
    """Return the fabric state of each GPU, by UUID. Uses NVML if its binding can be imported, otherwise nvidia-smi. Raises AcceleratorError."""
    if not binding:
        done = system.run(["nvidia-smi", "-q"], _QUERY_SECONDS)
        if done.returncode:
            raise PackageProblem(
                f"nvidia-smi -q ended with {done.returncode}: {last_words(done.stdout + done.stderr)}", code="fabric"
            )
        return read_query(done.stdout)
    nvml = Nvml()
    nvml.open()
    try:
        found = {}
        for index in range(int(nvml.call("nvmlDeviceGetCount"))):
            handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
            found[str(nvml.call("nvmlDeviceGetUUID", handle))] = _join_state(nvml, handle)
        return found
    finally:
        nvml.close()


def _join_state(nvml: Nvml, handle: Any) -> FabricJoinState:
    """Return the fabric state of one GPU, with the newest query function that the library and its binding support.

    The newest structure has a health summary and a health mask, the second only the mask, the oldest neither.
    """
    for function, structure in _QUERIES:
        info = nvml.filled(function, structure, handle)
        if info is not None:
            mask, summary = getattr(info, "healthMask", 0), getattr(info, "healthSummary", NO_SUMMARY)
            return FabricJoinState(state_of(info), int(info.status), int(summary), faults_of(int(mask)))
    return FabricJoinState(NOT_SUPPORTED)


def wait_for_fabric(
    states: Callable[[], Mapping[str, FabricJoinState]],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until all GPUs have joined the fabric and are healthy. Raises PackageProblem with the other GPUs and their faults."""
    end = clock() + seconds
    while left := not_joined(found := states()):
        if clock() >= end:
            raise PackageProblem(
                f"After {seconds:g} seconds {len(left)} of {len(found)} GPUs have not joined the NVLink fabric, or are not well in it: {'; '.join(left)}",
                hint=f"Check `journalctl -u {MANAGER_UNIT}` and /var/log/fabricmanager.log.",
                code="fabric",
            )
        sleep(_PAUSE_SECONDS)


def wait_for_imex(
    system: System,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until IMEX is ready. Raises PackageProblem with the last answer of IMEX."""
    end = clock() + seconds
    while True:
        done = system.run([_IMEX_PROGRAM, "-q"], _QUERY_SECONDS)
        if not done.returncode and done.stdout.strip() == _READY:
            return
        if clock() >= end:
            raise PackageProblem(
                f"After {seconds:g} seconds IMEX is not ready: {_IMEX_PROGRAM} -q says {last_words(done.stdout + done.stderr) or 'nothing'}",
                hint="The query needs its command service (IMEX_CMD_ENABLED=1 in /etc/nvidia-imex/config.cfg), and IMEX may wait for nodes of "
                f"/etc/nvidia-imex/nodes_config.cfg (IMEX_WAIT_FOR_QUORUM). Check `journalctl -u {IMEX_UNIT}` and /var/log/nvidia-imex.log.",
                code="imex",
            )
        sleep(_PAUSE_SECONDS)
