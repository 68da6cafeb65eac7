# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""MPS: the control daemons of a claim, their settings, and the container edits that reach them.

Facts: the manual of nvidia-cuda-mps-control, seen with 535.261.03; CUDA's documentation of MPS. The daemon ignores a wrong value
and keeps the previous one, so the daemon's unit reads the settings back (mps-settings.sh of the role dra_driver). The driver itself
never opens the pipe directory, because containers write there. A process can use one daemon, by its pipe directory,
and a MIG device has a daemon of its own. The daemon's memory limit was reported not to hold for clients on MIG devices; the
variable of the client does, so they get both. Several users: -M, as NVIDIA's own DRA driver has it (mps-control-daemon.tmpl.yaml); a
program that does not know it (535.261.03) takes itself for the user interface, finds no daemon and ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..cdi import ContainerEdits, Mount
from ..companions import SHARED_MEMORY, Companion, SharedDevice, companion_name
from ..configuration import ConfigRefused
from ..documents import any_of
from ..errors import AcceleratorError
from ..system import System
from .configs import MULTI_USER

KIND = "mps"
TOOL = "nvidia-cuda-mps-control"
#: The variable from which the daemon's service takes further options of its command line.
OPTIONS = "DRA_ACCELERATORS_MPS_OPTIONS"
PIPE_FOLDER = "/tmp/nvidia-mps"  # noqa: S108 in the container, where CUDA looks first

_MEBIBYTE = 1024**2
_MOUNT_OPTIONS = ("rw", "nosuid", "nodev", "bind")
_PERCENTAGE = "get_default_active_thread_percentage"


def companions(claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
    """Return the daemons of one claim: one for all whole GPUs with the same settings, and one for each MIG device.

    Pure. Raises ConfigRefused for a limit of a device that is not among them, and for a request that was given several MIG
    devices: its containers would reach the daemon of one of them.
    """
    found = []
    for number, group in enumerate(_groups(devices)):
        limits = _limits(group, devices)
        sharing = group[0].sharing
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": "pipe",
            "CUDA_MPS_LOG_DIRECTORY": "log",
            "CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in group),
        }
        if sharing.get(MULTI_USER):
            environment[OPTIONS] = "-M"
        name = companion_name(claim_uid, number)
        draft = Companion(KIND, name, tuple(device.cdi_name for device in group), environment)
        for variable in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            environment[variable] = f"{draft.folder}/{environment[variable]}"
        commands = [f"set_default_device_pinned_mem_limit {index} {limit}M" for index, limit in limits.items()]
        if "defaultActiveThreadPercentage" in sharing:
            commands.append(f"set_default_active_thread_percentage {sharing['defaultActiveThreadPercentage']}")
        found.append(Companion(KIND, name, draft.devices, environment, (*commands, _PERCENTAGE)))
    return tuple(found)


def _groups(devices: Iterable[SharedDevice]) -> list[list[SharedDevice]]:
    groups: list[list[SharedDevice]] = []
    for device in devices:
        for group in groups:
            first = group[0]
            if device.is_partition and first.is_partition and device.request == first.request:
                raise ConfigRefused(
                    f"request {device.request} was given {first.name} and {device.name}, and a container reaches the MPS daemon "
                    "of one MIG device",
                    hint="Ask for one MIG device by request, and name the request in each container.",
                )
            if not device.is_partition and not first.is_partition and device.sharing == first.sharing:
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _limits(group: Sequence[SharedDevice], claimed: Sequence[SharedDevice]) -> dict[int, int]:
    """The memory limits of a daemon's devices in whole MiB, by the number that the device has for the daemon.

    One configuration may be for devices of several daemons: a UUID of the claim's that is another daemon's is left to that one.
    """
    sharing = group[0].sharing
    for_all = sharing.get("defaultPinnedDeviceMemoryLimit")
    limits = {} if for_all is None else dict.fromkeys(range(len(group)), for_all // _MEBIBYTE)
    numbers = {str(index): index for index in range(len(group))}
    numbers.update({device.uuid: index for index, device in enumerate(group) if device.uuid})
    for key, limit in sharing.get("defaultPerDevicePinnedMemoryLimit", {}).items():
        if key not in numbers:
            if any(device.uuid == key for device in claimed):
                continue
            raise ConfigRefused(
                f"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit names {key}; expected {any_of(list(numbers))}",
                hint="Name devices of the claim, by their UUID or by their place among them.",
            )
        limits[numbers[key]] = limit // _MEBIBYTE
    return limits


def edits(companion: Companion) -> ContainerEdits:
    """Return what a container needs to reach a daemon: its pipes, its shared memory, and limits that the daemon leaves to it."""
    variables = [f"CUDA_MPS_PIPE_DIRECTORY={PIPE_FOLDER}"]
    if companion.environment["CUDA_VISIBLE_DEVICES"].startswith("MIG-"):
        limits = [
            command.split()[1:] for command in companion.commands if command.startswith("set_default_device_pinned")
        ]
        variables += [f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={index}={limit}" for index, limit in limits]
    return ContainerEdits(
        env=tuple(variables),
        mounts=(
            Mount(f"{companion.folder}/pipe", PIPE_FOLDER, _MOUNT_OPTIONS),
            Mount(f"{companion.folder}/{SHARED_MEMORY}", "/dev/shm", _MOUNT_OPTIONS),  # noqa: S108
        ),
    )


def refuse_without_tool(system: System) -> None:
    """Refuse where MPS is not installed. Raises AcceleratorError."""
    if not system.finds(TOOL):
        raise AcceleratorError(
            f"MPS was asked for, and {TOOL} is not on this node",
            hint="Install it: Debian's package nvidia-cuda-mps, Ubuntu's nvidia-compute-utils, part of NVIDIA's own driver.",
            code="mps-missing",
        )
