# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Variables for Huawei's container runtime about a chip and a vNPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chip_model import device, partition
from dra_driver.core.errors import BackendUnavailable, NotFound
from dra_driver.core.host.system import DeviceNumber, System
from dra_driver.core.model import Placement
from dra_driver.core.vendors.ascend.driver_files import runtime_device_edits, runtime_edits


class Nodes(System):
    """A system whose device nodes are files whose names begin like theirs."""

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber("c", 1, 3) if self.exists(path) else None


@pytest.fixture
def system(tmp_path: Path) -> Nodes:
    for name in ("dev/davinci3", "dev/vdavinci148", "etc/ascend-docker-runtime.d/base.list"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return Nodes(str(tmp_path))


def environment(edits: Any) -> list[str]:
    found = edits.to_dict()
    assert set(found) == {"env"}, "nodes and mounts are the runtime's"
    return sorted(found["env"])


def test_environment_identifies_chip_by_physical_id_and_slice_by_its_id(system: Nodes) -> None:
    whole = device("310P", physical=3)
    made = partition("310P", "vir02", Placement(0, 2), physical=3)
    assert environment(runtime_device_edits(system, whole, None)) == [
        "ASCEND_RUNTIME_OPTIONS=",  # the image's own options must not apply
        "ASCEND_VISIBLE_DEVICES=3",
    ]
    assert environment(runtime_device_edits(system, whole, made)) == [
        "ASCEND_RUNTIME_OPTIONS=VIRTUAL",
        "ASCEND_VISIBLE_DEVICES=148",
    ]


def test_environment_never_requests_slice_creation(system: Nodes) -> None:
    made = partition("310P", "vir02", Placement(0, 2), physical=3)
    for part in (None, made):
        edits = runtime_device_edits(system, device("310P", physical=3), part)
        assert not [entry for entry in environment(edits) if entry.startswith("ASCEND_VNPU_SPECS")]


def test_edits_missing_files_are_reported_before_container_start(system: Nodes, tmp_path: Path) -> None:
    assert runtime_edits(system).to_dict() == {} and runtime_edits(system).lists
    for name in ("dev/davinci3", "dev/vdavinci148", "etc/ascend-docker-runtime.d/base.list"):
        (tmp_path / name).unlink()
    (tmp_path / "etc/ascend-docker-runtime.d").rmdir()
    with pytest.raises(NotFound, match="/dev/davinci3"):
        runtime_device_edits(system, device("310P", physical=3), None)
    with pytest.raises(NotFound, match="/dev/vdavinci148"):
        runtime_device_edits(system, device("310P"), partition("310P", "vir02", Placement(0, 2), physical=3))
    with pytest.raises(BackendUnavailable, match="ascend-docker-runtime") as caught:
        runtime_edits(system)
    assert caught.value.code == "runtime-missing" and "ascend_runtime" in caught.value.hint
