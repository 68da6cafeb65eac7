# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Whole chips that several claims have at a time: what is shared out, when it can be, and what containers are told. Pure.

The silicon lets several containers open one chip where device-share is on, and does nothing else: who has how much is counted by
the scheduler alone. What holds containers to it, if anything does, is a library in their images that stands before the vendor's
runtime (vCANN-RT, HAMi's vNPU core and others).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..cdi import ContainerEdits
from ..model import Device
from ..room import MEMORY
from ..signs import Severity, Sign
from .templates import CORES, published

NOT_SHAREABLE = "not-shareable"
_MEBIBYTE = 1024**2
_HUNDRED = 100


def parts(device: Device) -> Mapping[str, int]:
    """Return what of a whole chip is shared out among claims: memory and AI cores, the two things that quotas are set for.

    Nobody shares out AICPUs and media units: whoever has the chip open has them all.
    """
    whole = published(device.capacities)
    return {name: whole[name] for name in (CORES, MEMORY) if name in whole}


def obstacle(is_shared: bool | None) -> Sign | None:
    """Return what keeps containers from having a chip at the same time, by its switch; None for nothing.

    ``is_shared`` is None for a chip that does not tell of such a switch.
    """
    if is_shared:
        return None
    if is_shared is None:
        return Sign(
            NOT_SHAREABLE,
            Severity.DEGRADED,
            "One container at a time can have it: it does not tell of device-share.",
            "Its driver may be too old for it. Give it a rule without shares.",
        )
    return Sign(
        NOT_SHAREABLE,
        Severity.DEGRADED,
        "One container at a time can have it: device-share is off.",
        "Set ascend_vnpu_device_share: true, or switch it on by hand (npu-smi set -t device-share -i CARD -c CHIP -d 1). A reboot "
        "switches it off again unless device-share-cfg-recover is on.",
    )


def edits(device: Device, consumed: Mapping[str, int]) -> ContainerEdits:
    """Return the variables that tell a container how much of a chip its claim has. They limit nothing by themselves.

    ``NPU_MEM_QUOTA``, in MiB, is what HAMi's vNPU core reads. The others are ours: of memory in MiB, and of the AI cores in
    percent, at least one; a claim that has none of either is told nothing of it.
    """
    whole, found = parts(device), []
    memory = consumed.get(MEMORY, 0) // _MEBIBYTE
    if memory:
        found += [f"NPU_SHARE_MEMORY_MIB={memory}", f"NPU_MEM_QUOTA={memory}"]
    if consumed.get(CORES) and whole.get(CORES):
        found.append(f"NPU_SHARE_AICORE_PERCENT={max(consumed[CORES] * _HUNDRED // whole[CORES], 1)}")
    return ContainerEdits(env=tuple(found))
