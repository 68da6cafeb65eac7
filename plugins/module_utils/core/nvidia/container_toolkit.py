# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's own program for container edits, nvidia-ctk: asked for what all GPUs need, where it is installed.

Facts: NVIDIA/nvidia-container-toolkit (cmd/nvidia-ctk/cdi/generate); ``--device-id`` came with 1.19.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ..cdi import ContainerEdits, Mount
from ..errors import AcceleratorError
from ..system import System
from .driver_files import check_libraries, hook_program

PROGRAM = "/usr/bin/nvidia-ctk"
TIMEOUT = 20.0
_GENERATE = (PROGRAM, "--quiet", "cdi", "generate", "--mode=nvml", "--format=json")
# No device is looked at, so that one that is ill does not stand in the way of the others.
# It keeps programs in a container from making device nodes, which no container of ours may make in the first place; and it fails
# a container whose /proc does not show the driver.
_NOT_TAKEN = "disable-device-node-modification"
_COMMON_ONLY = ("--device-id=none", "--no-all-device")


def is_installed(system: System) -> bool:
    """Whether nvidia-ctk is on this machine."""
    return system.exists(PROGRAM)


def common_edits(system: System, driver_version: str) -> ContainerEdits:
    """Return what all GPUs need in a container, as nvidia-ctk has it.

    Raises AcceleratorError, saying why, when it fails, does not end in time, or its answer cannot be used whole.
    """
    # It would name nvidia-cdi-hook also where only nvidia-ctk, which can do the same, is installed.
    generate = (*_GENERATE, f"--nvidia-cdi-hook-path={hook_program(system) or PROGRAM}")
    done = system.run([*generate, *_COMMON_ONLY], timeout=TIMEOUT)
    if done.returncode != 0 and "flag provided but not defined" in f"{done.stdout}{done.stderr}":
        done = system.run(generate, timeout=TIMEOUT)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise AcceleratorError(
            f"{PROGRAM} cdi generate ended with {done.returncode}: {said[-1] if said else 'it said nothing'}",
            code="toolkit-failed",
        )
    try:
        # Boards with coherent memory add files of their own behind the first one.
        specification, _end = json.JSONDecoder().raw_decode(done.stdout.lstrip())
        edits = ContainerEdits.from_dict(specification["containerEdits"])
    except (ValueError, KeyError, TypeError) as error:
        raise AcceleratorError(
            f"What {PROGRAM} cdi generate said is not understood: {error}", code="toolkit-failed"
        ) from error
    check_libraries(edits.mounts, driver_version)
    return replace(
        edits,
        device_nodes=tuple(replace(node, permissions=node.permissions.replace("m", "")) for node in edits.device_nodes),
        mounts=tuple(_present(system, edits.mounts)),
        hooks=tuple(hook for hook in edits.hooks if _NOT_TAKEN not in hook.args),
    )


def _present(system: System, mounts: tuple[Mount, ...]) -> list[Mount]:
    """Return the mounts whose source is there; one that is gone would fail every container."""
    return [mount for mount in mounts if system.exists(mount.host_path)]
