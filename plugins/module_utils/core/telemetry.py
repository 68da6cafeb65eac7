# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the telemetry of a device: power, temperature, memory, utilization, and clocks.

It is read on request and never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Telemetry:
    """One reading of a whole device or of a partition. Values that are not reported are None.

    ``uuid`` identifies the device or the partition, ``device_uuid`` the physical device. Units are watts, joules since
    the driver was loaded, degrees Celsius, bytes, and hertz by clock name. ``utilization`` is the fraction of time,
    from 0 to 1, with computations.
    """

    uuid: str
    device_uuid: str
    power: float | None = None
    power_limit: float | None = None
    energy: float | None = None
    temperature: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: float | None = None
    clocks: Mapping[str, float] = field(default_factory=dict)
