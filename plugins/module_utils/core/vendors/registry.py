# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""List the vendors' backends.

An import of this file imports all of them; ``protocol.py`` contains only the type.
"""

from __future__ import annotations

from functools import partial
from typing import Callable

from ..host.system import System
from .ascend.backend import AscendBackend
from .nvidia.backend import NvidiaBackend
from .protocol import Backend

BACKENDS: dict[str, Callable[[System], Backend]] = {"ascend": AscendBackend, "nvidia": NvidiaBackend}


#: The same for vendors with a container runtime that injects the devices into containers.
BY_RUNTIME: dict[str, Callable[[System], Backend]] = {"ascend": partial(AscendBackend, by_runtime=True)}


#: The same for vendors whose devices have network ports, with the tool for these ports in containers.
WITH_NETWORK_TOOLS: dict[str, Callable[[System], Backend]] = {"ascend": partial(AscendBackend, network_tools=True)}


def create(
    vendor: str, system: System | None = None, *, by_runtime: bool = False, network_tools: bool = False
) -> Backend:
    """Return the backend of a vendor. Raises ValueError, which lists the known vendors."""
    known = BY_RUNTIME if by_runtime else WITH_NETWORK_TOOLS if network_tools else BACKENDS
    try:
        factory = known[vendor]
    except KeyError:
        raise ValueError(f"There is no backend for vendor {vendor!r}; known are {', '.join(sorted(known))}") from None
    return factory(system or System())


def vendors_there(system: System | None = None) -> tuple[str, ...]:
    """Return the vendors of the node's devices."""
    machine = system or System()
    return tuple(vendor for vendor, factory in sorted(BACKENDS.items()) if factory(machine).has_devices())
