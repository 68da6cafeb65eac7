# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``dra-driver machine``: show, accept, or reset the machine that the driver's state belongs to."""

from __future__ import annotations

from .. import config
from ..core.errors import AcceleratorError
from ..core.host.system import System
from ..core.vendors.registry import create
from ..machine import ForeignState, Machine, current_machine, delete_file, delete_state, store_machine, stored_machine


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
    return (f"this machine: {machine.describe()}", *(f"{each}: {_stored(machine, each)}" for each in directories))


def _stored(machine: Machine, directory: str) -> str:
    try:
        stored = stored_machine(directory)
    except ForeignState as error:
        return f"an UNKNOWN machine: {error}"
    if stored is None:
        return "belongs to no machine yet"
    return f"{'ANOTHER machine' if machine.is_other(stored) else 'this machine'} ({stored.describe()})"


def _is_foreign(machine: Machine, directory: str) -> bool:
    """Return whether the state is that of another or an unknown machine."""
    try:
        stored = stored_machine(directory)
    except ForeignState:
        return True
    return stored is not None and machine.is_other(stored)


def _reset(directories: list[str], machine: Machine, kubeconfig: str, config_path: str) -> tuple[str, ...]:
    """Delete the state that was copied from another machine, and the credentials of the copied node.

    A driver in a pod has no files for its identity. It continues with the identity of its pod's node.
    """
    copied = [each for each in directories if _is_foreign(machine, each)]
    if not copied:
        raise AcceleratorError(
            "This machine has no state of another machine, so nothing is reset",
            hint="`dra-driver machine show` prints both identities.",
            code="nothing-to-reset",
        )
    deleted: list[str] = []
    if kubeconfig:
        # Before the state: without these credentials no driver can act as the other node, also after a power failure.
        deleted += [path for path in (kubeconfig, config_path) if delete_file(path)]
    for directory in copied:
        deleted += delete_state(directory)
        if not kubeconfig:
            store_machine(directory, machine)
    last = "run dra.accelerators.site for this machine, under its own name" if kubeconfig else "the driver continues"
    return (*(f"deleted {path}" for path in deleted), last)
