# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One operation of the playbook repartition on a simulated NPU: its modules in order, to the end and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition.progress import parse
from driver_store import claim
from test_ascend_vnpu import Node, library, power_on, static

__all__ = ["library", "power_on"]

DRIVER = "npu.huawei.com"
#: A chip with eight cores has seven AICPUs to share, so four times vir02 do not fit.
FIRST, SECOND = static({"vir02": 3}, index=0), static({"vir04": 1, "vir02": 1}, index=0)


class Operation:
    """One operation on a node's first NPU, and the state directory of the node's driver."""

    def __init__(self, node: Node, directory: Path) -> None:
        self.node, self.kubelet = node, directory / "kubelet"
        # The store and its locks are files on this machine. The record is below the simulated root.
        self.state = self.kubelet / "plugins" / DRIVER
        self.inside = node.machine.root / self.state.relative_to("/")
        boot = node.machine.root / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True, exist_ok=True)
        boot.write_text("boot-1\n")
        for each in (self.state, self.inside):
            each.mkdir(parents=True)
        node.state = self.state / "state.db"

    def plan(self, wanted: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the one operation that leads to a layout."""
        answer = self.node.run(
            "device_repartition", layout=wanted, former_layout=FIRST, vendor=["ascend"], kubelet_root=str(self.kubelet)
        )
        (operation,) = answer["operations"]
        return dict(operation)

    def step(self, operation: dict[str, Any], step: str = "", **more: Any) -> dict[str, Any]:
        """Record the start of a step, or without a step the end of the operation."""
        return self.node.run(
            "device_repartition",
            state="present" if step else "absent",
            kubelet_root=str(self.kubelet),
            driver=operation["driver"],
            operation=operation["operation"],
            devices=[each["uuid"] for each in operation["devices"]],
            wanted=operation["wanted"],
            former=operation["former"],
            going=operation["going"],
            restarts=operation["restarts"],
            unprepare_timeout=0,
            **({"step": step} if step else {}),
            **more,
        )

    def started_steps(self) -> list[str]:
        """Return the steps that the node driver reports as Events."""
        return [each.step for each in parse((self.inside / "repartition-steps.json").read_text())]


@pytest.fixture
def begun(power_on: Callable[..., Node], tmp_path: Path) -> tuple[Operation, dict[str, Any]]:
    """Return an operation that leads to the second layout, on a chip with three vNPUs, one of them held by a claim."""
    node = power_on("8x310P-Pro")
    made = node.run(layout=FIRST)["after"][0]
    operation = Operation(node, tmp_path)
    claim(node.state, made["uuid"], made["partitions"][0])
    return operation, operation.plan(SECOND)


@pytest.mark.prove
def test_operation_deletes_unused_slices_only(begun: tuple[Operation, dict[str, Any]]) -> None:
    one, operation = begun
    assert operation["vendor"] == "ascend" and operation["driver"] == DRIVER and not operation["resets"]
    assert [each["profile"] for each in operation["going"]] == ["vir02"] * 2
    assert operation["claims"] == [] and len(operation["kept"]) == 1, "of three slices two are free"
    before = one.node.slices(0)
    assert one.step(operation, "draining")["changed"] and one.step(operation, "applying")["changed"]
    assert one.node.run(layout=operation["wanted"])["changed"]
    assert one.node.slices(0) == ["vir02", "vir04"] != before
    assert one.node.run("ascend_vnpu_info", layout=operation["wanted"])["matches"]
    assert one.step(operation, "publishing")["changed"] and one.step(operation)["changed"]
    assert one.started_steps() == ["draining", "applying", "publishing", "released"]
    assert not (one.inside / "repartition.json").exists()


@pytest.mark.prove
def test_operation_rollback_restores_the_same_slices(begun: tuple[Operation, dict[str, Any]]) -> None:
    one, operation = begun
    one.step(operation, "applying")
    one.node.run(layout=operation["wanted"])
    why = '"Verify the layout of the NPU" failed: it differs'
    assert one.step(operation, "reverting", reason=why)["record"]["former"] == operation["former"]
    assert one.node.run(layout=operation["former"])["changed"]
    assert one.node.run("ascend_vnpu_info", layout=operation["former"])["matches"]
    assert one.node.slices(0) == ["vir02"] * 3
    assert one.step(operation, reason=why)["changed"]
    assert one.started_steps() == ["applying", "reverting", "failed"]


@pytest.mark.prove
def test_operation_waits_for_claim_on_deleted_slice(begun: tuple[Operation, dict[str, Any]]) -> None:
    one, _operation = begun
    operation = one.plan([{"match": {"index": 0}, "mode": "whole"}])
    assert operation["claims"] == ["team-a/training"]
    one.step(operation, "draining")
    refused = one.step(operation, "applying")
    assert refused["failed"] and refused["error_code"] == "still-prepared" and refused["claims"] == ["team-a/training"]
    one.node.state.unlink()
    assert one.step(operation, "applying")["record"]["step"] == "applying"
    assert one.node.run(layout=operation["wanted"])["changed"] and one.node.slices(0) == []
