# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The vNPUs that the vendor's driver restores at boot, and has not restored yet.

Facts: hicann/driver. While the recovery is on, DCMI writes each vNPU to ``/etc/vnpu.cfg`` (format:
`dcmi_inner_cfg_persist.h`), and deletes the line with the vNPU. At boot a script of the driver,
``vnpu_config_recover.sh``, runs these lines for each chip once it has started. It tries five times, 10 s apart. vNPUs
that another program creates during that time can take the numbers and the resources of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Callable

from ...host.system import System
from ...model import Device

CONFIGURATION = "/etc/vnpu.cfg"
_SWITCH_OFF = "vnpu_config_recover:disable"
_SLICE = re.compile(r"(\d+):(\d+):npu-smi set -t create-vnpu ")
#: Seconds after a boot in which the script can still create vNPUs.
BOOT_SECONDS = 600.0
_UPTIME = "/proc/uptime"


def parse(text: str) -> Mapping[int, frozenset[int]]:
    """Return the IDs of the vNPUs in a configuration, by the physical ID of their chip; empty if the recovery is off."""
    lines = [line.strip() for line in text.splitlines()]
    if _SWITCH_OFF in lines:
        return {}
    found: dict[int, set[int]] = {}
    for line in lines:
        match = _SLICE.match(line)
        if match:
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return {physical: frozenset(ids) for physical, ids in found.items()}


def describe_unrestored(system: System, discover: Callable[[], Iterable[Device]]) -> str:
    """Return a message with the vNPUs of the discovered chips that the driver has not restored yet after a boot; "" without any.

    Later than BOOT_SECONDS after the boot, the result is always "", because the script has ended.
    """
    try:
        if float(system.read_text(_UPTIME).split()[0]) > BOOT_SECONDS:
            return ""
        kept = parse(system.read_text(CONFIGURATION))
    except (OSError, ValueError, IndexError):
        return ""
    if not kept:
        return ""
    missing = {
        device.index: sorted(kept.get(device.minor, frozenset()) - {each.instance_id for each in device.partitions})
        for device in discover()
    }
    listed = [f"{', '.join(map(str, ids))} of NPU {index}" for index, ids in sorted(missing.items()) if ids]
    if not listed:
        return ""
    return (
        f"{CONFIGURATION} has slices that the driver has not created again after the boot: {'; '.join(listed)}. "
        "The layout decides which slices exist, so switch the recovery off: ascend_vnpu_recover: false, or npu-smi set -t vnpu-cfg-recover -d 0"
    )
