# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What chips and slices tell of their present work, as the core has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ..errors import NotFound
from ..model import Partition
from ..telemetry import Telemetry
from .chips import Chip
from .readings import Source, Work


def read(source: Source, chip: Chip, partitions: Iterable[Partition], is_cut: bool) -> tuple[Telemetry, ...]:
    """Return what a chip tells of itself and of these slices. Raises DeviceFaulty, AcceleratorError.

    The cores of a chip that is cut are its slices': it says 0 of its own then, which is not so.
    """
    found = [_telemetry(chip.uuid, chip.uuid, source.work(chip.spot), is_cut)]
    for partition in partitions:
        with contextlib.suppress(NotFound):  # destroyed since it was listed
            work = source.work_of_slice(chip.spot, partition.instance_id)
            found.append(_telemetry(partition.uuid, chip.uuid, work))
    return tuple(found)


def _telemetry(uuid: str, device_uuid: str, work: Work, is_cut: bool = False) -> Telemetry:
    return Telemetry(
        uuid=uuid,
        device_uuid=device_uuid,
        power=work.power,
        temperature=work.temperature,
        memory_used=work.memory_used,
        memory_total=work.memory_total,
        utilization=None if is_cut else work.utilization,
        clocks=work.clocks,
    )
