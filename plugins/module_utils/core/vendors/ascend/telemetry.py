# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert the telemetry of chips and vNPUs to the core's form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ...errors import NotFound
from ...model import Partition
from ...telemetry import Telemetry
from .chips import Chip
from .readings import Source, Work


def read(source: Source, chip: Chip, partitions: Iterable[Partition], *, is_partitioned: bool) -> tuple[Telemetry, ...]:
    """Return the telemetry of a chip and of these vNPUs. Raises DeviceFaulty or AcceleratorError.

    The utilization of a partitioned chip is left out, because the chip reports 0 for the cores that its vNPUs use.
    """
    found = [_telemetry(chip.uuid, chip.uuid, source.work(chip.spot), is_partitioned=is_partitioned)]
    for partition in partitions:
        with contextlib.suppress(NotFound):  # destroyed since it was listed
            work = source.work_of_slice(chip.spot, partition.instance_id)
            found.append(_telemetry(partition.uuid, chip.uuid, work))
    return tuple(found)


def _telemetry(uuid: str, device_uuid: str, work: Work, *, is_partitioned: bool = False) -> Telemetry:
    return Telemetry(
        uuid=uuid,
        device_uuid=device_uuid,
        power=work.power,
        temperature=work.temperature,
        memory_used=work.memory_used,
        memory_total=work.memory_total,
        utilization=None if is_partitioned else work.utilization,
        clocks=work.clocks,
    )
