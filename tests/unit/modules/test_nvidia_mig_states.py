# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module nvidia_mig on simulated boards, apart from layouts: modes alone, and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from driver_store import claim

if TYPE_CHECKING:
    from conftest import Node

MIXED = {"3g.40gb": 1, "1g.10gb": 4}
PLACED = [("1g.10gb", 0), ("1g.10gb", 1), ("1g.10gb", 2), ("1g.10gb", 3), ("3g.40gb", 4)]
RULE = {"match": {"index": [0, 1]}, "mode": "static", "partitions": MIXED}
WHOLE = {"match": {}, "mode": "whole"}


def run(node: Node, state: str, *, check: bool = False, **options: Any) -> dict[str, Any]:
    options = {"state": state, "state_path": str(node.root / "state.db"), **options}
    return node.module("nvidia_mig", options, check=check, diff=True)


def test_mode_only_switches_modes(node: Node) -> None:
    dry_run = node.layout(RULE, WHOLE, mode_only=True, check=True)
    done = node.layout(RULE, WHOLE, mode_only=True)
    assert [step["step"] for step in done["steps"]] == ["set_partitioning"] * 2
    assert done["steps"] == dry_run["steps"]
    assert [state["enabled"] for state in done["after"]] == [True, True] + [False] * 6
    assert node.partitions()[0] == []
    assert not node.layout(RULE, WHOLE, mode_only=True)["changed"]

    node.layout(RULE, WHOLE)
    assert not node.layout({**RULE, "partitions": {}}, mode_only=True)["changed"]
    assert node.partitions()[0] == PLACED
    assert node.layout(WHOLE, mode_only=True)["changed"]
    assert node.partitions()[0] == []


def test_mode_only_reset_needs_consent(make_node: Callable[[str], Node]) -> None:
    node = make_node("8xA100-40")
    rule = {"match": {"index": 0}, "mode": "static", "partitions": {"1g.5gb": 7}}
    assert node.layout(rule, mode_only=True)["error_code"] == "reset-needs-consent"
    with node.fabric_manager():
        done = node.layout(rule, mode_only=True, reset="when_needed")
    assert [step["step"] for step in done["steps"]] == ["set_partitioning", "reset_device"]
    assert node.partitions()[0] == []


def test_restored_checkpoint_restores_all(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "layout.json"
    node.layout(
        {"match": {"index": 0}, "mode": "static", "partitions": [{"profile": "3g.40gb", "placement": 0}]},
        {**RULE, "match": {"index": 1}},
    )
    before = node.partitions()
    assert run(node, "checkpointed", checkpoint_file=str(path), check=True)["changed"]
    assert not path.exists()
    made = run(node, "checkpointed", checkpoint_file=str(path))
    assert made["changed"] and path.stat().st_mode & 0o777 == 0o600
    assert made["checkpoint"][0]["partitions"][0]["owner"] == "administrator"
    assert not run(node, "checkpointed", checkpoint_file=str(path))["changed"]

    node.layout(WHOLE)
    dry_run = run(node, "restored", checkpoint_file=str(path), check=True)
    assert node.partitions()[0] == []
    done = run(node, "restored", checkpoint_file=str(path))
    assert done["changed"] and done["steps"] == dry_run["steps"]
    assert node.partitions() == before
    assert done["left_out"] == []
    assert not run(node, "restored", checkpoint_file=str(path))["changed"]
    # A restart of the driver deletes the partitions, and the same file restores them.
    node.reboot()
    assert run(node, "restored", checkpoint_file=str(path))["changed"]
    assert node.partitions() == before


def test_restored_partition_of_ended_claim_is_left_out(node: Node, tmp_path: Path) -> None:
    path = str(tmp_path / "layout.json")
    done = node.layout(RULE)
    state = done["after"][0]
    claim(node.root / "state.db", state["uuid"], state["partitions"][4], created=True)
    made = run(node, "checkpointed", checkpoint_file=path)
    owners = [(each["profile"], each["owner"], each["claims"]) for each in made["checkpoint"][0]["partitions"]]
    assert owners[4] == ("3g.40gb", "claim", ["team-a/training"])
    (node.root / "state.db").unlink()
    node.layout(WHOLE)
    back = run(node, "restored", checkpoint_file=path)
    assert "was created for the claim team-a/training" in back["left_out"][0]
    assert back["left_out"][0] in str(back["warnings"])
    assert node.partitions()[0] == PLACED[:4]
    assert node.partitions()[1] == PLACED


def test_checkpoint_with_unreadable_gpu_is_rejected(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    run(node, "checkpointed", checkpoint_file=str(path))
    kept = path.read_text()
    node.simulator("fault", "3", "lost")
    for state in ("checkpointed", "restored"):
        failed = run(node, state, checkpoint_file=str(path))
        assert failed["error_code"] == "unread", failed
    assert path.read_text() == kept


def test_restored_invalid_checkpoint_is_rejected(shared_node: Node, tmp_path: Path) -> None:
    failed = run(shared_node, "restored", checkpoint_file=str(tmp_path / "nothing"))
    assert failed["error_code"] == "no-checkpoint"
    (tmp_path / "broken").write_text(json.dumps({"version": 1}))
    failed = run(shared_node, "restored", checkpoint_file=str(tmp_path / "broken"))
    assert failed["error_code"] == "damaged-record"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"state": "present"}, "one of the following"),
        ({"state": "restored", "checkpoint_file": "/kept.json", "layout": []}, "does not support the option layout"),
        ({"state": "checkpointed"}, "checkpoint_file"),
        ({"state": "restored"}, "checkpoint_file"),
        ({"state": "checkpointed", "checkpoint_file": "/kept.json", "mode_only": True}, "mode_only"),
    ],
)
def test_conflicting_options_are_rejected(shared_node: Node, options: dict[str, Any], named: str) -> None:
    result = shared_node.module("nvidia_mig", options)
    assert result["failed"]
    assert named in result["msg"]
