# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the Ascend backend does on DCMI. Each scenario runs in a process of its own, started by ascend_test.py."""

from __future__ import annotations

import sys
from pathlib import Path

from dra_driver.core.errors import DoesNotFit, NotFound
from dra_driver.core.model import Placement

from tests.simulator.backend.ascend_stage import SCENARIOS, Stage, on
from tests.simulator.backend.stage import refused

__all__ = ["SCENARIOS"]


@on("8x310P-Pro")
def facts_of_a_server(stage: Stage) -> None:
    npus = stage.npus()
    assert [npu.index for npu in npus] == list(range(8)) == [npu.minor for npu in npus]
    first = npus[0]
    assert first.product == "Atlas 300I Pro" and first.memory_bytes == 21527 << 20
    assert first.profiles[0].name == "vir01"
    assert first == stage.backend.device(first.uuid)


@on("8x310P-Pro")
def slices_come_and_go(stage: Stage) -> None:
    npu = stage.first()
    made = stage.make(npu, "vir02", 6)
    assert (made.instance_id, made.placement) == (106, Placement(6, 2))
    assert stage.backend.device(npu.uuid).partitions == (made,)
    refused(DoesNotFit, stage.make, npu, "vir01", 7)
    refused(NotFound, stage.backend.destroy_partition, npu.uuid, 101)
    stage.backend.destroy_partition(npu.uuid, made.instance_id)
    assert stage.backend.device(npu.uuid).partitions == ()


def main() -> None:
    """Run one scenario by name, on the machine below a folder."""
    name, root = sys.argv[1:]
    stage = Stage(Path(root))
    SCENARIOS[name][2](stage)


if __name__ == "__main__":
    main()
