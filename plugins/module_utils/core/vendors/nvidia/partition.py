# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Change the partitioning of a GPU through NVML: MIG mode, GPU instances, and their compute instances."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable

from ...errors import AcceleratorError, DoesNotFit, InUse, InvalidLayout, NotFound, NotPermitted, Unsupported
from ...health.repair_marks import note_resets
from ...host.passthrough import holders, refuse_users
from ...host.system import Completed, System
from ...model import Device, Partition, Partitioning, Placement, Process, Profile
from ...settings.settings_record import TemporaryChange
from . import discover
from .board_facts import BoardFacts
from .nvml import IN_USE, RESET_REQUIRED, SUCCESS, Nvml, error_of
from .vendor import FACTS

LOG = logging.getLogger(__name__)

RESET_TIMEOUT = 300.0
MODULE_TIMEOUT = 60.0
PERSISTENCE_TIMEOUT = 30.0
#: How long, in seconds, the persistence daemon may take to close a GPU after its persistence mode was switched off.
CLOSE_SECONDS = 20.0
_DRM = "nvidia_drm"


def format_processes(processes: Iterable[Process]) -> str:
    """Return processes as text for messages."""
    return ", ".join(str(process) for process in processes)


#: A function that reads the facts of the changed GPU. It is called only for errors, so that a successful change needs
#: no further calls.
Read = Callable[[], Device]


def set_mode(nvml: Nvml, board: BoardFacts, now: Partitioning, read: Read, enabled: bool) -> bool:
    """Set the MIG mode if it differs, and return whether that changed anything.

    Success depends on the activation status, and on the current and the pending mode that are read afterwards. Raises
    InUse, NotPermitted, Unsupported, DeviceFaulty, or AcceleratorError.
    """
    action = f"{'Enabling' if enabled else 'Disabling'} MIG mode of GPU {board.uuid}"
    if not now.supported:
        raise Unsupported(f"GPU {board.uuid} ({board.product}) does not support MIG")
    if now.enabled == now.pending == enabled:
        return False
    if not enabled and now.enabled:
        _refuse_partitions(read(), action)
    board.last_mode = None
    try:
        status = int(nvml.call("nvmlDeviceSetMigMode", board.handle, int(enabled), doing=action))
    except InUse as error:
        raise _mode_in_use(read(), action) from error
    if status not in (SUCCESS, RESET_REQUIRED, IN_USE):
        raise error_of(status, f"{action} (activation)")
    board.handle = nvml.call("nvmlDeviceGetHandleByUUID", board.uuid, doing=f"Finding GPU {board.uuid} again")
    partitioning = discover.read_partitioning(nvml, board)
    if partitioning.enabled == enabled or (partitioning.pending == enabled and board.needs_reset):
        return True
    board.last_mode = None
    if partitioning.pending == enabled:
        # Roll the pending mode back, so that a failed change does not take effect at the next reset.
        with contextlib.suppress(AcceleratorError):
            nvml.call("nvmlDeviceSetMigMode", board.handle, int(partitioning.enabled))
    if status == IN_USE:
        raise _mode_in_use(read(), action)
    raise AcceleratorError(
        f"{action}: the mode is still {'enabled' if partitioning.enabled else 'disabled'} (activation status {status})",
        hint="Reset the GPU with `nvidia-smi --gpu-reset`, or reboot.",
        code="mode-not-changed",
    )


def is_only_used_by_persistence_daemon(processes: Iterable[Process]) -> bool:
    """Return whether only the persistence daemon, or no process, has a GPU open, so that it can be free without persistence mode."""
    return all(process.name == FACTS.persistence_daemon for process in processes)


def await_closed(system: System, nodes: Iterable[str], what: str) -> None:
    """Wait until the persistence daemon has closed device nodes. Raises InUse with the processes that use them."""
    refuse_users(system, nodes, what, seconds=CLOSE_SECONDS)


@contextlib.contextmanager
def _without_persistence(
    system: System, uuids: Sequence[str], nodes: Sequence[str], restore_record: TemporaryChange | None, action: str
) -> Iterator[None]:
    """Disable persistence mode with nvidia-smi, and enable it again at the end. nvidia-smi uses the persistence daemon if it runs."""

    def switch(value: int) -> bool:
        done = system.run(["nvidia-smi", "-i", ",".join(uuids), "-pm", str(value)], timeout=PERSISTENCE_TIMEOUT)
        if done.returncode:
            said = " ".join((done.stdout + " " + done.stderr).split())
            state = "enabled" if value else "disabled"
            LOG.warning("%s: persistence mode of %s cannot be %s: %s", action, ", ".join(uuids), state, said)
        return done.returncode == 0

    if restore_record is not None:
        restore_record.begin()
    switch(0)
    try:
        with contextlib.suppress(InUse):  # the next attempt names the processes
            await_closed(system, nodes, action)
        yield
    finally:
        if switch(1) and restore_record is not None:
            restore_record.end()


def reset(
    system: System,
    uuids: Sequence[str],
    nodes: Sequence[str] = (),
    persistent: Sequence[str] = (),
    restore_record: TemporaryChange | None = None,
) -> None:
    """Reset GPUs together with nvidia-smi, because NVML has no call for it. Raises InUse or NotPermitted.

    ``nodes`` are the device nodes of the GPUs. An error names the processes that use them. ``persistent`` are the
    GPUs in persistence mode. If only the persistence daemon has the GPUs open, the mode is disabled for a second
    attempt, and enabled again afterwards. ``restore_record`` is the record of their persistence mode for that time.

    nvidia_drm with kernel mode setting keeps the GPUs open without a process. It is unloaded for the reset if nothing
    uses it.
    """
    action = f"Resetting {', '.join(uuids)}"
    command = ["nvidia-smi", "--gpu-reset", "-i", ",".join(uuids)]
    done = system.run(command, timeout=RESET_TIMEOUT)
    unload_error, load_error = "", ""
    with contextlib.ExitStack() as persistence:
        if (
            done.returncode
            and _says_in_use(done)
            and persistent
            and is_only_used_by_persistence_daemon(holders(system, nodes))
        ):
            persistence.enter_context(_without_persistence(system, persistent, nodes, restore_record, action))
            done = system.run(command, timeout=RESET_TIMEOUT)
        if done.returncode and _says_in_use(done) and _has_mode_setting(system):
            unload_error = _run_module_tool(system, "rmmod", _DRM)
            if not unload_error:
                try:
                    done = system.run(command, timeout=RESET_TIMEOUT)
                finally:
                    load_error = _run_module_tool(system, "modprobe", _DRM)
    if done.returncode == 0:
        note_resets(uuids)
        if load_error:
            raise AcceleratorError(
                f"{action}: the reset is complete, but the kernel module {_DRM}, which was unloaded for it, cannot be loaded again: {load_error}",
                hint=f"Run `modprobe {_DRM}`: without it the GPUs have no device nodes below /dev/dri.",
                code="module-not-loaded",
            )
        return
    said = " ".join((done.stdout + " " + done.stderr).split())
    if load_error:
        said += f"; and the kernel module {_DRM} cannot be loaded again: {load_error}"
    if "permission" in said.lower():
        raise NotPermitted(f"{action}: {said}", hint="Run as root.")
    if _says_in_use(done):
        if unload_error:
            raise InUse(
                f"{action}: the kernel module {_DRM} keeps the GPU open (modeset=1) and cannot be unloaded: {unload_error}",
                hint=f"Stop the display server and the programs that have /dev/dri open, run `rmmod {_DRM}`, repeat the reset, and run "
                f"`modprobe {_DRM}`. Or load it with `options nvidia-drm modeset=0`, or reboot.",
            )
        found = holders(system, nodes)
        raise InUse(
            f"{action}: {said}" + (f" {', '.join(nodes)}: open in {format_processes(found)}" if found else ""),
            pids=[process.pid for process in found],
            hint="End the processes that use the GPU, services included.",
        )
    raise AcceleratorError(f"{action}: nvidia-smi ended with {done.returncode}: {said}", code="reset-failed")


def _says_in_use(done: Completed) -> bool:
    said = f"{done.stdout} {done.stderr}".lower()
    return "in use" in said or "is being used" in said


def _has_mode_setting(system: System) -> bool:
    try:
        return system.read_text(f"/sys/module/{_DRM}/parameters/modeset").strip() in ("Y", "1")
    except OSError:
        return False


def _run_module_tool(system: System, tool: str, module: str) -> str:
    """Load (modprobe) or unload (rmmod) a kernel module. Return the error, or ""."""
    try:
        done = system.run([tool, module], timeout=MODULE_TIMEOUT)
    except AcceleratorError as error:
        return error.message
    said = " ".join((done.stderr or done.stdout).split())
    return "" if done.returncode == 0 else said or f"{tool} ended with {done.returncode}"


def create(nvml: Nvml, board: BoardFacts, read: Read, profile_id: int, placement: Placement) -> Partition:
    """Create a GPU instance at exactly this placement, and the compute instance that fills it.

    If the compute instance fails, the GPU instance is destroyed. Raises DoesNotFit with the partitions that overlap.
    """
    profile = _profile(board, profile_id, placement)
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
        processes = read().processes
        held = format_processes(processes)
        raise InUse(
            f"{action}: the GPU is in use" + (f" by {held}" if held else ""),
            pids=[each.pid for each in processes],
        ) from error
    try:
        compute_profiles = discover.compute_profiles(nvml, board, profile_id, instance)
        full_profile = discover.full_profile(compute_profiles, profile)
        compute_instance = nvml.call(
            "nvmlGpuInstanceCreateComputeInstance",
            instance,
            full_profile.profile_id,
            doing=f"{action}: compute instance",
        )
        partition = discover.read_partition(nvml, board, profile, instance, {}, [(full_profile, compute_instance)])
        _require_uuid(partition, action)
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
        held = format_processes(holders)
        raise InUse(
            f"{action}: it is in use" + (f" by {held}" if held else ""),
            pids=[process.pid for process in holders],
            hint="End the processes. A monitoring agent such as DCGM can also use it.",
        ) from error


def _destroy_instance(nvml: Nvml, board: BoardFacts, profile: Profile, instance: Any, action: str) -> None:
    for _kind, handle in discover.compute_instances(nvml, board, profile, instance):
        nvml.call("nvmlComputeInstanceDestroy", handle, doing=f"{action}: compute instance")
    nvml.call("nvmlGpuInstanceDestroy", instance, doing=action)


def _require_uuid(partition: Partition, action: str) -> None:
    if not partition.uuid:
        raise AcceleratorError(f"{action}: the compute instance does not fill the GPU instance, so it has no MIG UUID")


def _profile(board: BoardFacts, profile_id: int, placement: Placement) -> Profile:
    profile = next((each for each in board.profiles if each.profile_id == profile_id), None)
    if profile is None:
        raise NotFound(
            f"GPU {board.uuid} ({board.product}) has no MIG profile with id {profile_id}; it has "
            + (", ".join(f"{each.name} ({each.profile_id})" for each in board.profiles) or "none")
        )
    if placement not in profile.placements:
        raise InvalidLayout(
            f"{profile.name} cannot lie at {placement} on GPU {board.uuid}; its placements are "
            + ", ".join(str(each) for each in profile.placements)
        )
    return profile


def _refuse_partitions(device: Device, action: str) -> None:
    if device.partitions:
        names = ", ".join(partition.describe() for partition in device.partitions)
        raise InUse(f"{action}: it still has partitions: {names}", hint="Destroy the partitions first.")


def _mode_in_use(device: Device, action: str) -> InUse:
    held = format_processes(device.processes)
    return InUse(
        f"{action}: the GPU is in use" + (f" by {held}" if held else ""),
        pids=[process.pid for process in device.processes],
        hint="End the processes that use the GPU, monitoring agents included.",
    )
