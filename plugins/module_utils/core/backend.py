# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The list of vendors. An import of this file imports all of them; ``backend_protocol.py`` has the type alone."""

from __future__ import annotations

from functools import partial
from typing import Callable

from .ascend.backend import AscendBackend
from .backend_protocol import Backend
from .nvidia.backend import NvidiaBackend
from .system import System

BACKENDS: dict[str, Callable[[System], Backend]] = {"ascend": AscendBackend, "nvidia": NvidiaBackend}


#: The same for vendors that have a container runtime of their own, where this is to bring the devices into containers.
BY_RUNTIME: dict[str, Callable[[System], Backend]] = {"ascend": partial(AscendBackend, by_runtime=True)}


def create(vendor: str, system: System | None = None, *, by_runtime: bool = False) -> Backend:
    """Return the backend of a vendor. Raises ValueError that lists the vendors known."""
    known = BY_RUNTIME if by_runtime else BACKENDS
    try:
        factory = known[vendor]
    except KeyError:
        raise ValueError(f"There is no backend for vendor {vendor!r}; known are {', '.join(sorted(known))}") from None
    return factory(system or System())


def vendors_there(system: System | None = None) -> tuple[str, ...]:
    """Return the vendors of whose devices the machine shows any."""
    machine = system or System()
    return tuple(vendor for vendor, factory in sorted(BACKENDS.items()) if factory(machine).is_there())
