# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the telemetry of a GPU from NVML, with ten optional calls for a GPU and two for each partition.

Facts: nvml.h. A GPU in MIG mode has no utilization, and a partition has memory values only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from ...errors import AcceleratorError, NotFound, NotPermitted, Unsupported
from ...model import Partition
from ...telemetry import Telemetry
from .board_facts import BoardFacts
from .nvml import Nvml

_GPU_TEMPERATURE = 0  # NVML_TEMPERATURE_GPU
_CLOCKS = (("graphics", 0), ("memory", 2))  # NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM
_MEGAHERTZ = 1_000_000


def read(nvml: Nvml, board: BoardFacts, partitions: Iterable[Partition]) -> tuple[Telemetry, ...]:
    """Return the telemetry of a GPU and of these partitions. Raises DeviceFaulty or AcceleratorError.

    NVML cannot release the handle of a MIG device. A process that queries it keeps it open until NVML is shut down.
    """
    doing = f"Reading the telemetry of GPU {board.uuid}"

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return nvml.call(function, board.handle, *arguments, doing=doing)
        except (Unsupported, NotPermitted):
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    rates = ask("nvmlDeviceGetUtilizationRates")
    temperature = ask("nvmlDeviceGetTemperature", _GPU_TEMPERATURE)
    clocks = {name: ask("nvmlDeviceGetClockInfo", number) for name, number in _CLOCKS}
    whole = Telemetry(
        uuid=board.uuid,
        device_uuid=board.uuid,
        power=_thousandth(ask("nvmlDeviceGetPowerUsage")),
        power_limit=_thousandth(ask("nvmlDeviceGetEnforcedPowerLimit")),
        energy=_thousandth(ask("nvmlDeviceGetTotalEnergyConsumption")),
        temperature=None if temperature is None else float(temperature),
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        utilization=None if rates is None else int(rates.gpu) / 100,
        clocks={name: float(value) * _MEGAHERTZ for name, value in clocks.items() if value is not None},
    )
    parts = []
    for partition in partitions:
        with contextlib.suppress(NotFound):  # destroyed since it was listed
            if partition.uuid:
                parts.append(_partition(nvml, board, partition.uuid, doing))
    return (whole, *parts)


def _partition(nvml: Nvml, board: BoardFacts, uuid: str, doing: str) -> Telemetry:
    try:
        handle = nvml.call("nvmlDeviceGetHandleByUUID", uuid, doing=doing)
        memory = nvml.optional("nvmlDeviceGetMemoryInfo", handle, doing=doing)
    except AcceleratorError as error:
        if error.code == "invalid-argument":
            raise NotFound(f"{doing}: partition {uuid} does not exist any more") from error
        raise
    return Telemetry(
        uuid=uuid,
        device_uuid=board.uuid,
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
    )


def _thousandth(value: Any) -> float | None:
    return None if value is None else int(value) / 1000
