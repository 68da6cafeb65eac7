# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Change the partitioning of a GPU through NVML: MIG mode, GPU instances, and their compute instances."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Callable

from ...errors import AcceleratorError, DoesNotFit, InUse, NotFound, Unsupported
from ...model import Device, Partition, Partitioning, Placement, Process, Profile
from ..profile_lookup import find_profile
from . import mig_reader
from .board_facts import BoardFacts
from .nvml import IN_USE, RESET_REQUIRED, SUCCESS, Nvml, error_of

_END_PROCESSES = "End the processes that use the GPU, monitoring agents included."

#: A function that reads the facts of the changed GPU. It is called only for errors, so that a successful change needs
#: no further calls.
Read = Callable[[], Device]


def set_mode(nvml: Nvml, board: BoardFacts, current: Partitioning, read: Read, enabled: bool) -> bool:
    """Set the MIG mode if it differs, and return whether that changed anything.

    Success depends on the activation status, and on the current and the pending mode that are read afterwards. Raises
    InUse, NotPermitted, Unsupported, DeviceFaulty, or AcceleratorError.
    """
    action = f"{'Enabling' if enabled else 'Disabling'} MIG mode of GPU {board.uuid}"
    if not current.supported:
        raise Unsupported(f"GPU {board.uuid} ({board.product}) does not support MIG")
    if current.enabled == current.pending == enabled:
        return False
    if not enabled and current.enabled:
        _refuse_partitions(read(), action)
    board.last_mode = None
    try:
        status = int(nvml.call("nvmlDeviceSetMigMode", board.handle, int(enabled), doing=action))
    except InUse as error:
        raise _in_use(f"{action}: the GPU is in use", read().processes, _END_PROCESSES) from error
    if status not in (SUCCESS, RESET_REQUIRED, IN_USE):
        raise error_of(status, f"{action} (activation)")
    board.handle = nvml.call("nvmlDeviceGetHandleByUUID", board.uuid, doing=f"Finding GPU {board.uuid} again")
    partitioning = mig_reader.read_mig_mode(nvml, board)
    if partitioning.enabled == enabled or (partitioning.pending == enabled and board.needs_reset):
        return True
    board.last_mode = None
    if partitioning.pending == enabled:
        # Roll the pending mode back, so that a failed change does not take effect at the next reset.
        with contextlib.suppress(AcceleratorError):
            nvml.call("nvmlDeviceSetMigMode", board.handle, int(partitioning.enabled))
    if status == IN_USE:
        raise _in_use(f"{action}: the GPU is in use", read().processes, _END_PROCESSES)
    raise AcceleratorError(
        f"{action}: the mode is still {'enabled' if partitioning.enabled else 'disabled'} (activation status {status})",
        hint="Reset the GPU with `nvidia-smi --gpu-reset`, or reboot.",
        code="mode-not-changed",
    )


def create(nvml: Nvml, board: BoardFacts, read: Read, profile_id: int, placement: Placement) -> Partition:
    """Create a GPU instance at exactly this placement, and the compute instance that fills it.

    If the compute instance fails, the GPU instance is destroyed. Raises DoesNotFit with the partitions that overlap.
    """
    profile = find_profile(
        board.profiles, profile_id, placement, device=f"GPU {board.uuid} ({board.product})", term="MIG profile"
    )
    action = f"Creating {profile.name} at {placement} on GPU {board.uuid}"
    if not board.mode:
        raise Unsupported(f"{action}: MIG mode is disabled", hint="Enable MIG mode first.", code="partitioning-off")
    try:
        instance = nvml.call(
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            board.handle,
            profile_id,
            nvml.placement(placement.start, placement.size),
            doing=action,
        )
    except DoesNotFit as error:
        blocked_by = tuple(each for each in read().partitions if each.placement.overlaps(placement))
        names = ", ".join(each.describe() for each in blocked_by)
        cause = f"occupied by {names}" if names else "other partitions have an engine that it needs"
        raise DoesNotFit(f"{action}: the placement is not available; {cause}", blockers=blocked_by) from error
    except InUse as error:
        raise _in_use(f"{action}: the GPU is in use", read().processes) from error
    try:
        compute_profiles = mig_reader.compute_profiles(nvml, board, profile_id, instance)
        full_profile = mig_reader.full_profile(compute_profiles, profile)
        compute_instance = nvml.call(
            "nvmlGpuInstanceCreateComputeInstance",
            instance,
            full_profile.profile_id,
            doing=f"{action}: compute instance",
        )
        partition = mig_reader.read_partition(nvml, board, profile, instance, {}, [(full_profile, compute_instance)])
        if not partition.uuid:
            raise AcceleratorError(
                f"{action}: the compute instance does not fill the GPU instance, so it has no MIG UUID"
            )
    except BaseException:
        with contextlib.suppress(AcceleratorError):
            _destroy_instance(nvml, board, profile, instance, action)
        raise
    return partition


def destroy(nvml: Nvml, board: BoardFacts, read: Read, instance_id: int) -> None:
    """Destroy a GPU instance and its compute instances. Raises NotFound, InUse with the PIDs, or NotPermitted."""
    action = f"Destroying GPU instance {instance_id} of GPU {board.uuid}"
    if not board.mode:
        raise NotFound(f"{action}: MIG mode is disabled")
    instance = nvml.call("nvmlDeviceGetGpuInstanceById", board.handle, instance_id, doing=action)
    info = nvml.call("nvmlGpuInstanceGetInfo", instance, doing=action)
    profile = next((each for each in board.profiles if each.profile_id == int(info.profileId)), None)
    if profile is None:
        raise NotFound(f"{action}: its profile {info.profileId} is not a profile of the GPU")
    try:
        _destroy_instance(nvml, board, profile, instance, action)
    except InUse as error:
        holders = next((each.processes for each in read().partitions if each.instance_id == instance_id), ())
        hint = "End the processes. A monitoring agent such as DCGM can also use it."
        raise _in_use(f"{action}: it is in use", holders, hint) from error


def _destroy_instance(nvml: Nvml, board: BoardFacts, profile: Profile, instance: Any, action: str) -> None:
    for _kind, handle in mig_reader.compute_instances(nvml, board, profile, instance):
        nvml.call("nvmlComputeInstanceDestroy", handle, doing=f"{action}: compute instance")
    nvml.call("nvmlGpuInstanceDestroy", instance, doing=action)


def _refuse_partitions(device: Device, action: str) -> None:
    if device.partitions:
        names = ", ".join(partition.describe() for partition in device.partitions)
        raise InUse(f"{action}: it still has partitions: {names}", hint="Destroy the partitions first.")


def _in_use(message: str, processes: Iterable[Process], hint: str = "") -> InUse:
    """Return the error for a GPU or a partition in use, with its processes."""
    users = tuple(processes)
    names = ", ".join(map(str, users))
    return InUse(message + (f" by {names}" if names else ""), pids=[process.pid for process in users], hint=hint)
