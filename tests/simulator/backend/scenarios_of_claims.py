# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the driver's claims on NVML: one GPU is faulty, and the claims of the others are not affected."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from dra_driver.core.host.cdi import ContainerEdits
from dra_driver.core.host.system import System
from dra_driver.core.model import Device, Partition
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.nvidia.nvml_session import NvidiaDeadlines

from tests.simulator.backend.stage import Stage, on

UNIT = Path(__file__).resolve().parents[2] / "unit"
sys.path[:0] = [str(UNIT / "dra_driver"), str(UNIT / "core")]

from machine_model import Claims, Node  # noqa: E402  it is in the directories above

SICK, CALL = 3, "nvmlDeviceGetMemoryInfo"


class WithoutNodes(NvidiaBackend):
    """The backend without container edits: below a root without privileges there are no device nodes."""

    def driver_edits(self) -> ContainerEdits:
        return ContainerEdits(env=("NVIDIA_VISIBLE_DEVICES=void",))

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        return ContainerEdits(env=(f"GPU={device.uuid}",))


def sick(stage: Stage, cause: str, *fault: str) -> None:
    """Prepare a claim on a GPU that then becomes faulty, prepare others, unprepare it, and end the fault."""

    async def main(folder: Path) -> None:
        claims = Claims()
        backend = WithoutNodes(System(str(stage.root)), NvidiaDeadlines(scan=2.0, full_scan=4.0))
        backend.open()
        node = Node(folder, claims, hardware=backend)

        async def prepare(name: str, gpu: int) -> str:
            claim = claims.allocate(name, f"gpu-{gpu}-mig-1g10gb-19-0")
            return (await node.service.prepare([claim]))[claim.uid].error

        async def unprepare(name: str) -> str:
            claim = claims.allocate(name, "gpu-0")
            return (await node.service.unprepare([claim]))[claim.uid].error

        await node.start()
        offers = set(node.inventory.offers)
        assert await prepare("held", SICK) == ""
        stage.control("fault", str(SICK), "call", CALL, *fault)
        while not node.inventory.faults:  # a hanging call counts as slow at first
            await node.scan()
        (uuid,) = node.inventory.faults
        assert node.inventory.faults[uuid].startswith(cause), node.inventory.faults
        assert set(node.inventory.offers) == offers
        survey = node.survey
        assert survey is not None and [each.index for each in survey.devices.values() if each.health.signs] == [SICK]
        assert uuid in await prepare("late", SICK)
        errors = await asyncio.gather(*(prepare(f"well-{gpu}", gpu) for gpu in range(8) if gpu != SICK))
        assert errors == [""] * 7, errors
        assert await unprepare("held") == ""
        assert await unprepare("well-0") == ""
        assert len(node.cdi_files()) == 6

        stage.control("clear")
        while node.inventory.faults:
            await node.scan()
        await node.service.housekeeping.settle(uuid)
        assert node.service.unprepare_runner.ownership.cleanups == ()
        assert backend.device(uuid).partitions == ()
        assert await prepare("late", SICK) == ""
        node.close()
        backend.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))


@on("8xH100")
def claims_on_other_gpus_work_while_calls_of_one_fail(stage: Stage) -> None:
    sick(stage, "unknown-error", "fail", "999")


@on("8xH100")
def claims_on_other_gpus_work_while_calls_of_one_hang(stage: Stage) -> None:
    sick(stage, "no-answer", "hang")
