# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read the facts of a node that the NVIDIA driver's installation needs: GPUs, kernel, loaded modules, and Secure Boot."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..core.host.system import System, text_or_none
from ..core.vendors.nvidia.generations import BusGpu, bus_gpus
from .driver_catalog import RIVALS, modules_to_unload

LOADED_MODULES = "/sys/module"
_EFI = "/sys/firmware/efi/efivars"
_SECURE_BOOT = f"{_EFI}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_OWNER_KEYS = "MokListRT"
#: A file of the vendor's .run installer. No package owns it.
_RUN_FILE = "/usr/bin/nvidia-uninstall"


@dataclass(frozen=True)
class Machine:
    """The GPUs, kernel, loaded modules, and Secure Boot state of a node."""

    kernel: str
    gpus: tuple[BusGpu, ...]
    modules: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    version: str = ""
    headers: bool = False
    secure_boot: bool = False
    run_file: bool = False


def read_machine(system: System) -> Machine:
    """Return the facts about the node. No program is run."""
    there = set(system.list_directory(LOADED_MODULES))
    kernel = os.uname().release
    secure = text_or_none(system, _SECURE_BOOT) or ""
    return Machine(
        kernel=kernel,
        gpus=bus_gpus(system),
        modules=tuple(modules_to_unload(there)),
        rivals=tuple(name for name in RIVALS if name in there),
        version=(text_or_none(system, f"{LOADED_MODULES}/nvidia/version") or "").strip(),
        headers=system.exists(f"/lib/modules/{kernel}/build"),
        secure_boot=secure.endswith("\x01"),
        run_file=system.exists(_RUN_FILE),
    )


def is_enrolled(system: System, certificate: str, key: str) -> bool | None:
    """Return whether the firmware's list of owner keys has a certificate; None if the certificate or its key is not on the node."""
    if not system.exists(certificate) or not system.exists(key):
        return None
    names = [name for name in system.list_directory(_EFI) if name.startswith(_OWNER_KEYS)]
    known = b"".join(system.read_bytes(f"{_EFI}/{name}")[4:] for name in sorted(names))
    return system.read_bytes(certificate) in known
