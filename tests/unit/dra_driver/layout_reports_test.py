# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The whole driver of one vendor reports its layout and a repartitioning once, on the slice and as Events, also after a restart."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER
from claim_steps import SMALL
from dra_driver.core.host.system import System
from dra_driver.core.partitioning.layout_differences import ANNOTATION
from dra_driver.core.repartition import progress as steps
from vendor_scene import Scene, run


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dra_driver.supervisors.repartitioning.SECONDS", 0.02)
    return tmp_path_factory.mktemp("t")


def note(scene: Scene) -> dict[str, Any]:
    found = [each["metadata"].get("annotations", {}).get(ANNOTATION) for each in scene.api.slices.values()]
    return dict(json.loads(next(filter(None, found), "{}")))


def reasons(scene: Scene) -> list[str]:
    return [each["reason"] for each in scene.api.events if each["involvedObject"]["kind"] == "Node"]


def test_layout_differences_are_reported(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        wants = {"match": {"index": 0}, "mode": "static", "partitions": {"1g.10gb": 1}}
        scene.settings = {"full_inventory_interval": 1, "layout": [wants, {"match": {}, "mode": "dynamic"}]}
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: note(scene))
        (output,) = note(scene).values()
        assert output["index"] == 0 and "+ 1g.10gb at 6" in output["steps"], output
        assert {each["spec"]["pool"]["generation"] for each in scene.api.slices.values()} == {1}
        await scene.until(lambda: "LayoutDiffers" in reasons(scene))
        writes = len(scene.api.slice_writes())
        # A restarted driver writes nothing for unchanged findings.
        await scene.stop()
        await scene.start()
        await scene.until(lambda: scene.driver.view().differing == 1)
        assert note(scene) and len(scene.api.slice_writes()) == writes
        # A different layout that the devices already have: the end is reported at the first scan.
        await scene.stop()
        scene.settings = {"full_inventory_interval": 300}
        await scene.start()
        await scene.until(lambda: not note(scene))
        assert await scene.prepare("a", SMALL) == "" and scene.driver.view().differing == 0

    run(short, scenario)


def test_repartition_steps_are_reported_once(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        directory = str(scene.folder / "kubelet/plugins" / DRIVER)
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        uuid = next(iter(scene.backend.gpus.devices())).uuid
        for step in ("draining", "applying", "publishing", "released"):
            steps.add(System(), directory, steps.StartedStep(time.time(), "replan-0", (uuid,), step))
        reported = ["RepartitionBegun", "RepartitionChanging", "RepartitionApplied", "RepartitionDone"]
        await scene.until(lambda: reasons(scene) == reported)
        await scene.stop()
        await scene.start()
        steps.add(System(), directory, steps.StartedStep(time.time(), "replan-0", (uuid,), "draining"))
        await scene.until(lambda: reasons(scene)[4:] == ["RepartitionBegun"])
        assert [each["count"] for each in scene.api.events if each["reason"].startswith("Repartition")] == [1] * 5

    run(short, scenario)
