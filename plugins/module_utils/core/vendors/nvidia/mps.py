# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""MPS: the control daemons of a claim, their settings, and the container edits for their clients.

Facts: the manual of nvidia-cuda-mps-control, observed with 535.261.03; CUDA's documentation of MPS.

- The daemon ignores a wrong value and keeps the previous one, so the daemon's unit reads the settings back
  (mps-settings.sh of the role dra_driver).
- The driver never opens the pipe directory, because containers write to it.
- A process can use one daemon, selected by its pipe directory. A MIG device needs a separate daemon.
- The daemon's memory limit was reported to have no effect for clients on MIG devices. The client's variable has an
  effect, so these clients get both.
- Several users need the option -M, as in NVIDIA's DRA driver (mps-control-daemon.tmpl.yaml). A program that does not
  support it (535.261.03) starts as the user interface, finds no daemon, and exits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...dra.opaque_config import ConfigRefused
from ...errors import AcceleratorError
from ...host.cdi import ContainerEdits, Mount
from ...host.companions import OF_DEVICE, SHARED_MEMORY, Companion, SharedDevice, companion_name, device_owner
from ...host.system import System
from ...schema import any_of
from .configs import MULTI_USER

KIND = "mps"
TOOL = "nvidia-cuda-mps-control"
#: The environment variable with further command-line options for the daemon's service.
OPTIONS = "DRA_ACCELERATORS_MPS_OPTIONS"
PIPE_FOLDER = "/tmp/nvidia-mps"  # noqa: S108 in the container, where CUDA looks first

_MEBIBYTE = 1024**2
_MOUNT_OPTIONS = ("rw", "nosuid", "nodev", "bind")
_PERCENTAGE = "get_default_active_thread_percentage"
_MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def companions(claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
    """Return the daemons of a claim: one for all whole GPUs with the same settings, one for each MIG device, and those of shared GPUs.

    Raises ConfigRefused for a limit of a device outside the claim, for a request with several MIG devices, and for a
    request with a shared daemon and another device. A container of such a request would reach only one of the daemons.
    """
    found = [_of_device(device, devices) for device in devices if device.sharing.get(OF_DEVICE)]
    for number, group in enumerate(_groups(each for each in devices if not each.sharing.get(OF_DEVICE))):
        limits = _limits(group, devices)
        sharing = group[0].sharing
        name = companion_name(claim_uid, number)
        environment = _environment(name, group)
        commands = [f"set_default_device_pinned_mem_limit {index} {limit}M" for index, limit in limits.items()]
        if "defaultActiveThreadPercentage" in sharing:
            commands.append(f"set_default_active_thread_percentage {sharing['defaultActiveThreadPercentage']}")
        names = tuple(device.cdi_name for device in group)
        found.append(Companion(KIND, name, names, environment, (*commands, _PERCENTAGE)))
    return tuple(found)


def _environment(name: str, group: Sequence[SharedDevice]) -> dict[str, str]:
    """Return the environment of the daemon for devices with the same settings."""
    folder = Companion(KIND, name, (), {}).folder
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        "CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in group),
    }
    return {**environment, OPTIONS: "-M"} if group[0].sharing.get(MULTI_USER) else environment


def _of_device(device: SharedDevice, claimed: Sequence[SharedDevice]) -> Companion:
    """Return the daemon that all claims of a GPU share.

    It has no limits, because its clients' variables limit each claim.

    Facts: NVIDIA's documentation of MPS, "Environment Variables": a client can only lower the limits of the daemon. The
    daemon's percentage is set to 100, so that a check detects a lower one. Each client can change it for the clients of
    all claims.
    """
    names = [each.name for each in claimed if each.request == device.request]
    if len(names) > 1:
        raise ConfigRefused(
            f"request {device.request} has {' and '.join(names)}, and a container has the shared MPS daemon and the limits of one device",
            hint="Request one share of a GPU in each request, and name the request in each container. Or leave out sharedDaemon.",
        )
    name = companion_name(device_owner(device.uuid), 0)
    client = [f"{_MEMORY_LIMIT}={index}={limit}M" for index, limit in _limits([device], claimed).items()]
    if "defaultActiveThreadPercentage" in device.sharing:
        client.append(f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={device.sharing['defaultActiveThreadPercentage']}")
    environment = _environment(name, [device])
    commands = ("set_default_active_thread_percentage 100", _PERCENTAGE)
    return Companion(KIND, name, (device.cdi_name,), environment, commands, client=tuple(client))


def _groups(devices: Iterable[SharedDevice]) -> list[list[SharedDevice]]:
    groups: list[list[SharedDevice]] = []
    for device in devices:
        for group in groups:
            first = group[0]
            if device.is_partition and first.is_partition and device.request == first.request:
                raise ConfigRefused(
                    f"request {device.request} has {first.name} and {device.name}, and a container reaches the MPS daemon "
                    "of one MIG device",
                    hint="Request one MIG device in each request, and name the request in each container.",
                )
            if not device.is_partition and not first.is_partition and device.sharing == first.sharing:
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _limits(group: Sequence[SharedDevice], claimed: Sequence[SharedDevice]) -> dict[int, int]:
    """Return the memory limits of a daemon's devices in MiB, by the daemon's index of the device.

    A configuration can apply to devices of several daemons. A UUID of another daemon's device is skipped. Raises
    ConfigRefused for other keys.
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
    """Return the container edits for a daemon's clients: its pipes, its shared memory, and limits that clients set."""
    variables = [f"CUDA_MPS_PIPE_DIRECTORY={PIPE_FOLDER}"]
    if companion.environment["CUDA_VISIBLE_DEVICES"].startswith("MIG-"):
        limits = [
            command.split()[1:] for command in companion.commands if command.startswith("set_default_device_pinned")
        ]
        variables += [f"{_MEMORY_LIMIT}={index}={limit}" for index, limit in limits]
    variables += companion.client
    return ContainerEdits(
        env=tuple(variables),
        mounts=(
            Mount(f"{companion.folder}/pipe", PIPE_FOLDER, _MOUNT_OPTIONS),
            Mount(f"{companion.folder}/{SHARED_MEMORY}", "/dev/shm", _MOUNT_OPTIONS),  # noqa: S108
        ),
    )


def refuse_without_tool(system: System) -> None:
    """Raise AcceleratorError if MPS is not installed."""
    if not system.finds(TOOL):
        raise AcceleratorError(
            f"The config requests MPS, and {TOOL} is not on this node",
            hint="Install it: Debian's package nvidia-cuda-mps, Ubuntu's nvidia-compute-utils, part of NVIDIA's own driver.",
            code="mps-missing",
        )
