# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the NVLinks of a GPU and the fabric that it has joined over them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from ....errors import AcceleratorError, Unsupported
from ....host import pci
from ....model import Clique
from ..nvml import Nvml, text

NVLINKS = 18  # the maximum number of links of a GPU
NVLINK_TO_GPU, NVLINK_TO_SWITCH = 0, 2  # NVML_NVLINK_DEVICE_TYPE_*
# NVML_GPU_FABRIC_STATE_…
NOT_STARTED, IN_PROGRESS, COMPLETED = 1, 2, 3


def read_links(nvml: Nvml, handle: Any, doing: str = "Reading the links of a GPU") -> tuple[tuple[str, ...], bool]:
    """Return the PCI addresses of the GPUs that NVLink connects directly, and whether a link leads to an NVSwitch."""
    found: set[str] = set()
    switched = False
    for link in range(NVLINKS):
        try:
            if not nvml.call("nvmlDeviceGetNvLinkState", handle, link, doing=doing):
                continue
            there = nvml.call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, doing=doing)
            switched = switched or there == NVLINK_TO_SWITCH
            if there == NVLINK_TO_GPU:
                remote = nvml.call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link, doing=doing)
                found.add(pci.normalize_address(text(remote.busId)))
        except Unsupported:
            break
        except AcceleratorError as error:
            if error.code != "invalid-argument":
                raise
            break  # beyond the last link
    return tuple(sorted(found)), switched


def clique_of(state: int, status: int, cluster: bytes, number: int) -> Clique | None:
    """Return the fabric clique of a GPU; None if it has not joined a fabric, or the fabric has no UUID."""
    if not has_joined(state, status) or not any(cluster):
        return None
    return Clique(str(UUID(bytes=cluster[:16].ljust(16, b"\0"))), number)


def state_of(info: Any) -> int:
    """Return the state in a structure of nvmlDeviceGetGpuFabricInfo….

    NVML's header (nvmlGpuFabricState_t) uses one byte for it, the Python binding four. The other three are padding,
    which is not documented as zero.
    """
    return int(info.state) & 0xFF


def has_joined(state: int, status: int) -> bool:
    """Return whether a GPU has joined its fabric. A fabric within one host has no UUID."""
    return state == COMPLETED and not status
