# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Whole chips that several claims share: the shared capacities, the preconditions, and the container variables.

With device-share on, the hardware lets several containers open one chip, and does not limit them. Only the scheduler
counts the shares. A limit requires a library in the container image that wraps the vendor's runtime (vCANN-RT, HAMi's
vNPU core, and others). This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...health.conditions import Severity, Sign
from ...host.cdi import ContainerEdits
from ...model import Device
from ...partitioning.capacity import MEMORY
from .templates import CORES, published

NOT_SHAREABLE = "not-shareable"
_MEBIBYTE = 1024**2


def shareable_capacities(device: Device) -> Mapping[str, int]:
    """Return the capacities of a whole chip that claims share: memory and AI cores, for which quotas exist.

    AICPUs and media units are not shared by quota: each container that has the chip open can use all of them.
    """
    whole = published(device.capacities)
    return {name: whole[name] for name in (CORES, MEMORY) if name in whole}


def sharing_obstacle(is_shared: bool | None) -> Sign | None:
    """Return the sign for a chip that containers cannot share, from its device-share switch; None if they can.

    ``is_shared`` is None for a chip that does not report the switch.
    """
    if is_shared:
        return None
    if is_shared is None:
        return Sign(
            NOT_SHAREABLE,
            Severity.DEGRADED,
            "One container at a time can have it: it does not report device-share.",
            "Its driver may be too old for it. Set a rule without shares for it.",
        )
    return Sign(
        NOT_SHAREABLE,
        Severity.DEGRADED,
        "One container at a time can have it: device-share is off.",
        "Set ascend_vnpu_device_share: true, or switch it on by hand (npu-smi set -t device-share -i CARD -c CHIP -d 1). A reboot "
        "switches it off again unless device-share-cfg-recover is on.",
    )


def edits(device: Device, consumed: Mapping[str, int]) -> ContainerEdits:
    """Return the environment variables for the share of a chip that a claim has. They do not enforce limits.

    HAMi's vNPU core reads ``NPU_MEM_QUOTA``, in MiB. The others are defined by this collection: memory in MiB, and AI
    cores in percent, at least 1. A capacity that the claim does not consume has no variable.
    """
    whole, variables = shareable_capacities(device), []
    memory = consumed.get(MEMORY, 0) // _MEBIBYTE
    if memory:
        variables += [f"NPU_SHARE_MEMORY_MIB={memory}", f"NPU_MEM_QUOTA={memory}"]
    if consumed.get(CORES) and whole.get(CORES):
        variables.append(f"NPU_SHARE_AICORE_PERCENT={max(consumed[CORES] * 100 // whole[CORES], 1)}")
    return ContainerEdits(env=tuple(variables))
