# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Check the options that select vendors, and find the state directory of a node driver, which stores the indices of the devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..core.errors import AcceleratorError, NotFound
from ..core.vendors.registry import BACKENDS

#: The options of the documentation fragment _node_driver.
STATE_DIRECTORY_OPTIONS: dict[str, dict[str, Any]] = {
    "kubelet_root": {"type": "path", "default": "/var/lib/kubelet"},
    "state_directory": {"type": "path"},
}


def state_directory_of(params: Mapping[str, Any], driver_name: str) -> str:
    """Return the state directory of the driver with this name, by the module's options."""
    return str(params["state_directory"] or f"{params['kubelet_root']}/plugins/{driver_name}")


def check_known_vendors(vendors: Collection[str]) -> None:
    """Raise NotFound for a vendor without a backend."""
    unknown = sorted(set(vendors) - set(BACKENDS))
    if unknown:
        raise NotFound(
            f"Unknown vendor: {', '.join(unknown)}",
            hint=f"Expected one of {', '.join(sorted(BACKENDS))}.",
            code="unknown-vendor",
        )


def check_one_vendor(params: Mapping[str, Any], vendors: Collection[str]) -> None:
    """Raise AcceleratorError if a state directory is set for several vendors. Each driver has a separate one."""
    if params["state_directory"] and len(vendors) > 1:
        raise AcceleratorError(
            f"state_directory {params['state_directory']} is set for the devices of {' and '.join(vendors)}",
            hint="The driver of each vendor has its own state directory. Set vendor to one vendor, or set kubelet_root instead.",
            code="state-directory",
        )
