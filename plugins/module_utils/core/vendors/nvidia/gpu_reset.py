# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Reset GPUs with nvidia-smi, and make programs that keep them open release them for the reset."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ...errors import AcceleratorError, InUse, NotPermitted
from ...health.repair_marks import note_resets
from ...host.device_users import find_located_users, require_unused
from ...host.system import Completed, System
from ...model import Process
from ...settings.settings_record import TemporaryChange
from ..host_texts import one_line, text_or_empty
from .vendor import FACTS

LOG = logging.getLogger(__name__)

# Timeouts of programs, in seconds.
RESET_TIMEOUT = 300.0
MODULE_TIMEOUT = 60.0
PERSISTENCE_TIMEOUT = 30.0
#: How long, in seconds, the persistence daemon may take to close a GPU after its persistence mode was switched off.
CLOSE_SECONDS = 20.0
_DRM = "nvidia_drm"


def is_only_used_by_persistence_daemon(processes: Iterable[Process]) -> bool:
    """Return whether only the persistence daemon, or no process, has a GPU open. Without persistence mode, no process has it open."""
    return all(process.name == FACTS.persistence_daemon for process in processes)


def await_closed(system: System, nodes: Iterable[str], what: str) -> None:
    """Wait until the persistence daemon has closed device nodes. Raises InUse with the processes that use them."""
    require_unused(system, nodes, what, seconds=CLOSE_SECONDS)


@contextlib.contextmanager
def _without_persistence(
    system: System, uuids: Sequence[str], nodes: Sequence[str], restore_record: TemporaryChange | None, action: str
) -> Iterator[None]:
    """Disable persistence mode with nvidia-smi, and enable it again at the end. nvidia-smi uses the persistence daemon if it runs."""

    def switch(value: int) -> bool:
        done = system.run(["nvidia-smi", "-i", ",".join(uuids), "-pm", str(value)], timeout=PERSISTENCE_TIMEOUT)
        if done.returncode:
            state = "enabled" if value else "disabled"
            LOG.warning("%s: persistence mode of %s cannot be %s: %s", action, ", ".join(uuids), state, one_line(done))
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
    attempt = partial(system.run, ["nvidia-smi", "--gpu-reset", "-i", ",".join(uuids)], timeout=RESET_TIMEOUT)
    done = attempt()
    unload_error, load_error = "", ""
    with contextlib.ExitStack() as persistence:
        if _is_in_use(done) and persistent and is_only_used_by_persistence_daemon(find_located_users(system, nodes)):
            persistence.enter_context(_without_persistence(system, persistent, nodes, restore_record, action))
            done = attempt()
        if _is_in_use(done) and _has_mode_setting(system):
            unload_error = _run_module_tool(system, "rmmod", _DRM)
            if not unload_error:
                try:
                    done = attempt()
                finally:
                    load_error = _run_module_tool(system, "modprobe", _DRM)
    if done.returncode:
        raise _reset_error(system, action, done, nodes, unload_error, load_error)
    note_resets(uuids)
    if load_error:
        raise AcceleratorError(
            f"{action}: the reset is complete, but the kernel module {_DRM}, which was unloaded for it, cannot be loaded again: {load_error}",
            hint=f"Run `modprobe {_DRM}`: without it the GPUs have no device nodes below /dev/dri.",
            code="module-not-loaded",
        )


def _reset_error(
    system: System, action: str, done: Completed, nodes: Sequence[str], unload_error: str, load_error: str
) -> AcceleratorError:
    """Return the error for a failed reset. The errors of the kernel module are "" without a failure."""
    output = one_line(done)
    if load_error:
        output += f"; and the kernel module {_DRM} cannot be loaded again: {load_error}"
    if "permission" in output.lower():
        return NotPermitted(f"{action}: {output}", hint="Run as root.")
    if not _is_in_use(done):
        return AcceleratorError(f"{action}: nvidia-smi ended with {done.returncode}: {output}", code="reset-failed")
    if unload_error:
        return InUse(
            f"{action}: the kernel module {_DRM} keeps the GPU open (modeset=1) and cannot be unloaded: {unload_error}",
            hint=f"Stop the display server and the programs that have /dev/dri open, run `rmmod {_DRM}`, repeat the reset, and run "
            f"`modprobe {_DRM}`. Or load it with `options nvidia-drm modeset=0`, or reboot.",
        )
    users = find_located_users(system, nodes)
    names = ", ".join(map(str, users))
    return InUse(
        f"{action}: {output}" + (f" {', '.join(nodes)}: open in {names}" if names else ""),
        pids=[process.pid for process in users],
        hint="End the processes that use the GPU, services included.",
    )


def _is_in_use(done: Completed) -> bool:
    """Return whether a reset failed because a GPU is in use, according to the output of nvidia-smi."""
    output = one_line(done).lower()
    return done.returncode != 0 and ("in use" in output or "is being used" in output)


def _has_mode_setting(system: System) -> bool:
    return text_or_empty(system, f"/sys/module/{_DRM}/parameters/modeset") in ("Y", "1")


def _run_module_tool(system: System, tool: str, module: str) -> str:
    """Load (modprobe) or unload (rmmod) a kernel module. Return the error, or ""."""
    try:
        done = system.run([tool, module], timeout=MODULE_TIMEOUT)
    except AcceleratorError as error:
        return error.message
    output = " ".join((done.stderr or done.stdout).split())
    return "" if done.returncode == 0 else output or f"{tool} ended with {done.returncode}"
