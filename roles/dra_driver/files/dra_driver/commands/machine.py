# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``dra-driver machine``: show, accept, or reset the machine that the driver's state belongs to."""

from __future__ import annotations

from pathlib import Path

from .. import config
from ..core.backend import create
from ..core.errors import AcceleratorError
from ..core.system import System
from ..machine import Machine, current_machine, delete_state, store_machine, stored_machine


def run_action(action: str, config_path: str) -> tuple[str, ...]:
    """Run one action for all drivers of the configuration, and return lines of text. Raises AcceleratorError."""
    configuration = config.load(config_path)
    directories = [
        configuration.state_directory_of(configuration.driver_name or create(backend, System()).driver_name)
        for backend in configuration.backends
    ]
    machine = current_machine(System())
    try:
        if action == "accept":
            for directory in directories:
                store_machine(directory, machine)
            return tuple(f"{directory}: belongs to this machine ({machine.describe()})" for directory in directories)
        if action == "reset":
            return _reset(directories, machine, configuration.kubeconfig, config_path)
    except OSError as error:
        raise AcceleratorError(
            f"The action {action} failed for {error.filename}: {error.strerror}",
            hint="Run this command as root, again after a failure.",
        ) from error
    lines = [f"this machine: {machine.describe()}"]
    for directory in directories:
        stored = stored_machine(directory)
        lines.append(f"{directory}: {_stored(machine, stored)}")
    return tuple(lines)


def _stored(machine: Machine, stored: Machine | None) -> str:
    if stored is None:
        return "belongs to no machine yet"
    return f"{'ANOTHER machine' if machine.is_other(stored) else 'this machine'} ({stored.describe()})"


def _reset(directories: list[str], machine: Machine, kubeconfig: str, config_path: str) -> tuple[str, ...]:
    """Delete the state that was copied from another machine, and the credentials of the copied node.

    A driver in a pod has no files for its identity. It continues with the identity of its pod's node.
    """
    copied = [each for each in directories if (stored := stored_machine(each)) and machine.is_other(stored)]
    if not copied:
        raise AcceleratorError(
            "This machine has no state of another machine, so nothing is reset",
            hint="`dra-driver machine show` prints both identities.",
            code="nothing-to-reset",
        )
    deleted: list[str] = []
    if kubeconfig:
        # Before the state: without these credentials no driver can act as the other node.
        for path in (kubeconfig, config_path):
            if Path(path).exists():
                Path(path).unlink()
                deleted.append(path)
    for directory in copied:
        deleted += delete_state(directory)
        if not kubeconfig:
            store_machine(directory, machine)
    last = "run dra.accelerators.site for this machine, under its own name" if kubeconfig else "the driver continues"
    return (*(f"deleted {path}" for path in deleted), last)
