# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Find the container runtime of a node's kubelet. This module changes nothing."""

from __future__ import annotations

import contextlib

from .._host.systemd_unit import COMMAND_SECONDS
from ..core.host.system import System
from .detect import (
    AUTO,
    CONTAINERD,
    CRI_DOCKERD,
    CRIO,
    DOCKER,
    UNITS,
    Choice,
    RuntimeChoiceError,
    choose_runtime,
    endpoint_in,
    kubelet_options,
    running_units,
)


def unit_states(system: System) -> dict[str, str]:
    """Return the states of the units that identify runtimes."""
    states = system.run(["systemctl", "is-active", *UNITS], COMMAND_SECONDS).stdout.split()
    return dict(zip(UNITS, states))


def find(system: System, asked: str) -> Choice:
    """Return the runtime to configure. Raises RuntimeChoiceError."""
    if asked in (CONTAINERD, CRIO, DOCKER):
        return Choice(asked)
    states = unit_states(system)
    several = asked == AUTO and len(running_units(states)) > 1
    choice = choose_runtime(asked, states, kubelet_endpoint(system) if several else "")
    if choice.unit == CRI_DOCKERD and asked == AUTO:
        raise cri_dockerd_error()
    return choice


def kubelet_endpoint(system: System) -> str:
    """Return the endpoint of the running kubelet from its command line or its files, or an empty string."""
    for pid in system.list_directory("/proc"):
        if not pid.isdecimal():
            continue
        with contextlib.suppress(OSError):
            options = kubelet_options(system.read_text(f"/proc/{pid}/cmdline").split("\0"))
            if options:
                return options.get("container-runtime-endpoint") or _endpoint_of_files(system, options)
    return ""


def _endpoint_of_files(system: System, options: dict[str, str]) -> str:
    folder = options.get("config-dir", "")
    # A later file has priority, and the files of the directory have priority over the main file.
    paths = [f"{folder}/{name}" for name in reversed(system.list_directory(folder)) if name.endswith(".conf")]
    for path in [*paths, options.get("config", "")]:
        with contextlib.suppress(OSError):
            found = endpoint_in(system.read_text(path)) if path else ""
            if found:
                return found
    return ""


def cri_dockerd_error() -> RuntimeChoiceError:
    """Return the error for a node with cri-dockerd whose runtime is not set by name."""
    return RuntimeChoiceError(
        "The kubelet of this node uses Docker Engine through cri-dockerd, which passes no CDI devices to pods",
        hint="Configure the kubelet for containerd 1.7.2 or newer, or for CRI-O. Set container_runtime_name to docker if your cri-dockerd contains "
        "the pull request 522, which passes CDI devices to pods, or if only Docker's own containers need the devices.",
        code="cri-dockerd",
    )
