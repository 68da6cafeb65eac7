# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a device tells of its present work: power, temperature, memory, use and clocks. Read when somebody asks, never stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Telemetry:
    """One reading of a whole device, or of a partition. None is what the device, its mode or its driver does not tell.

    ``uuid`` is the device's or the partition's own, ``device_uuid`` that of the physical device. Units are those of physics:
    watts, joules since the driver was loaded, degrees Celsius, bytes, and hertz by the name of the clock. ``utilization`` is the
    part of the time, from 0 to 1, in which something was computed.
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
