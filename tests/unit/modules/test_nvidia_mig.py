# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module nvidia_mig on nodes with simulated boards: layouts, refusals before any change, and rollback."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from dra_driver.kubelet.sockets import lock_instance
from driver_store import claim

if TYPE_CHECKING:
    from conftest import Node

MIXED = {"3g.40gb": 1, "1g.10gb": 4}
PLACED = [("1g.10gb", 0), ("1g.10gb", 1), ("1g.10gb", 2), ("1g.10gb", 3), ("3g.40gb", 4)]


def static(index: int | list[int], partitions: Any) -> dict[str, Any]:
    return {"match": {"index": index}, "mode": "static", "partitions": partitions}


def kinds(result: dict[str, Any]) -> list[str]:
    return [step["step"] for step in result["steps"]]


def without_uuids(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**state, "partitions": [{**one, "uuid": ""} for one in state["partitions"]]} for state in states]


def test_static_layout_is_created_once(node: Node) -> None:
    rules = [static(0, MIXED), {"match": {}, "mode": "dynamic"}]
    dry_run = node.layout(*rules, check=True, diff=True)
    assert node.partitions() == {index: [] for index in range(8)}

    done = node.layout(*rules, diff=True)
    assert done["changed"]
    assert done["steps"] == dry_run["steps"]
    assert done["diff"] == dry_run["diff"]
    assert done["before"] == dry_run["before"]
    assert without_uuids(done["after"]) == dry_run["after"]
    assert kinds(done) == ["set_partitioning"] + ["create_partition"] * 5
    assert all(partition["uuid"].startswith("MIG-") for partition in done["after"][0]["partitions"])
    assert [device["changed"] for device in done["devices"]] == [True] + [False] * 7
    assert [device["mode"] for device in done["devices"]] == ["static"] + ["dynamic"] * 7
    assert done["reset_required"] is False
    assert len(done["diff"]) == 1
    assert done["diff"][0]["before"] == "MIG disabled\nno partitions\n"
    assert done["diff"][0]["after"].splitlines()[:2] == ["MIG enabled", "partitions:"]
    assert node.partitions()[0] == PLACED

    again = node.layout(*rules, diff=True)
    assert not again["changed"]
    assert again["steps"] == []
    assert again["diff"] == []
    assert again["before"] == again["after"] == done["after"]
    assert again["devices"][0]["kept"] == 5


def test_unreadable_gpu_is_named_and_others_get_layout(node: Node) -> None:
    node.simulator("fault", "3", "lost")
    result = node.layout({"match": {}, "mode": "static", "partitions": {"7g.80gb": 1}})
    assert [device["index"] for device in result["devices"]] == [0, 1, 2, 4, 5, 6, 7]
    assert "One GPU keeps its layout: GPU 3: " in str(result["warnings"])


def test_layout_change_keeps_partitions(node: Node) -> None:
    first = node.layout(static(0, MIXED))
    result = node.layout(static(0, {"3g.40gb": 1, "1g.10gb": 2, "2g.20gb": 1}))
    assert kinds(result) == ["destroy_partition", "destroy_partition", "create_partition"]
    assert result["devices"][0]["kept"] == 3
    before = {one["uuid"] for one in first["after"][0]["partitions"]}
    after = {one["uuid"] for one in result["after"][0]["partitions"]}
    assert len(before & after) == 3


def test_layout_with_placement(node: Node) -> None:
    node.layout(static(0, [{"profile": "3g.40gb", "placement": 0}, {"profile": "1g.10gb", "count": 2}]))
    found = node.partitions()[0]
    assert ("3g.40gb", 0) in found
    assert len(found) == 3


def test_layout_whole_and_dynamic(node: Node) -> None:
    node.layout(static([0, 1], MIXED))
    result = node.layout({"match": {"index": 0}, "mode": "whole"}, {"match": {}, "mode": "dynamic"})
    assert kinds(result) == ["destroy_partition"] * 5 + ["set_partitioning"] + ["destroy_partition"] * 5
    assert result["after"][0]["enabled"] is False and result["after"][1]["enabled"] is True
    assert node.partitions()[0] == node.partitions()[1] == []


def test_layout_dynamic_keeps_partitions_of_driver(node: Node) -> None:
    node.layout(static(0, MIXED))
    device = node.module("accelerator_info", {"match": {"index": 0}})["devices"][0]
    made = next(one for one in device["partitions"] if one["profile"] == "3g.40gb")
    claim(node.root / "state.db", device["uuid"], made, created=True)
    result = node.layout({"match": {}, "mode": "dynamic"})
    assert kinds(result) == ["destroy_partition"] * 4
    assert node.partitions()[0] == [("3g.40gb", 4)]
    assert not node.layout({"match": {}, "mode": "dynamic"})["changed"]


def test_layout_without_match_warns(shared_node: Node) -> None:
    result = shared_node.layout(static(8, MIXED))
    assert not result["changed"]
    assert result["devices"] == []
    assert "matches any of the 8 GPUs" in str(result["warnings"])


MIG_PARTED: dict[str, Any] = {
    "version": "v1",
    "mig-configs": {
        "half": [
            {"devices": [0, 1], "mig-enabled": True, "mig-devices": {"3g.40gb": 2}},
            {"devices": [2, 3], "mig-enabled": False},
        ],
        "all-disabled": [{"devices": "all", "mig-enabled": False}],
        "strange": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 1}}],
    },
}
HALVES = [("3g.40gb", 0), ("3g.40gb", 4)]


def test_mig_parted_document_is_applied(node: Node) -> None:
    options = {"config": MIG_PARTED, "config_name": "half", "state_path": str(node.root / "state.db")}
    result = node.module("nvidia_mig", options)
    assert [device["index"] for device in result["devices"]] == [0, 1, 2, 3]
    assert node.partitions() == {0: HALVES, 1: HALVES, **{index: [] for index in range(2, 8)}}
    assert not node.module("nvidia_mig", options)["changed"]
    assert node.module("nvidia_mig", {**options, "config_name": "all-disabled"})["changed"]
    assert node.partitions()[0] == []


def test_mig_parted_file_is_applied(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MIG_PARTED))
    options = {"config_file": str(path), "config_name": "half", "state_path": str(node.root / "state.db")}
    assert node.module("nvidia_mig", options)["changed"]
    # In the format of the GPU Operator.
    path.write_text(yaml.safe_dump({"kind": "ConfigMap", "data": {"config.yaml": yaml.safe_dump(MIG_PARTED)}}))
    answer = node.module("nvidia_mig", options)
    assert not answer.get("failed") and not answer["changed"], answer


def test_index_without_gpu_warns(node: Node) -> None:
    answer = node.layout({"match": {"index": [0, 8]}, "mode": "whole"})
    assert "there is no device 8" in str(answer["warnings"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is empty, expected a dictionary with version and mig-configs"),
        (None, "cannot be read"),
        ("a: [", "not YAML"),
        ("- a", "list"),
        ("version: v2\nmig-configs: {half: []}", "v2"),
        ("version: v1", "mig-configs"),
        ("version: v1\nmig-configs: {half: []}\nfurther: 1", "further"),
    ],
)
def test_mig_parted_invalid_file_is_rejected(shared_node: Node, tmp_path: Path, text: str | None, named: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    result = shared_node.module("nvidia_mig", {"config_file": str(path), "config_name": "half"})
    assert result["failed"]
    assert named in result["msg"]


@pytest.mark.parametrize(("name", "named"), [("third", "third"), ("strange", "1g.5gb")])
def test_mig_parted_invalid_configuration_is_rejected(shared_node: Node, name: str, named: str) -> None:
    result = shared_node.module("nvidia_mig", {"config": MIG_PARTED, "config_name": name})
    assert result["failed"]
    assert named in result["msg"]
    assert shared_node.partitions()[0] == []


@pytest.mark.parametrize("check", [True, False])
def test_process_on_partition_blocks_change(node: Node, check: bool) -> None:
    node.layout(static([0, 1], MIXED))
    device = node.module("accelerator_info", {"match": {"index": 1}})["devices"][0]
    busy = next(one for one in device["partitions"] if one["profile"] == "3g.40gb")
    node.simulator("fault", "1", "process", "4711", str(busy["instance_id"]), str(busy["compute_instance_id"]))
    before = node.partitions()
    result = node.layout(static([0, 1], {"7g.80gb": 1}), check=check)
    assert result["failed"]
    assert result["error_code"] == "in-use"
    assert result["pids"] == [4711]
    assert "4711" in result["msg"]
    assert busy["uuid"] in result["msg"]
    assert node.partitions() == before

    # A layout that keeps the placement of the busy partition is still possible.
    result = node.layout(static([0, 1], {"3g.40gb": 1, "2g.20gb": 1}))
    assert result["changed"], result
    assert busy["uuid"] in {one["uuid"] for one in result["after"][1]["partitions"]}


def test_process_on_whole_gpu_blocks_change(node: Node) -> None:
    node.simulator("fault", "2", "process", "4712")
    result = node.layout(static([0, 2], MIXED))
    assert result["failed"]
    assert result["pids"] == [4712]
    assert node.partitions()[0] == []


@pytest.mark.parametrize("check", [True, False])
def test_claim_on_partition_blocks_change(node: Node, check: bool) -> None:
    done = node.layout(static(0, MIXED))
    state = done["after"][0]
    claim(node.root / "state.db", state["uuid"], state["partitions"][4])
    result = node.layout(static([0, 1], {"7g.80gb": 1}), check=check)
    assert result["failed"]
    assert result["error_code"] == "in-use"
    assert result["claims"] == ["team-a/training"]
    assert node.partitions() == {0: PLACED, **{index: [] for index in range(1, 8)}}


def test_claim_on_whole_gpu_blocks_change(node: Node) -> None:
    uuid = node.module("accelerator_info", {})["devices"][0]["uuid"]
    claim(node.root / "state.db", uuid)
    result = node.layout(static(0, MIXED))
    assert result["failed"]
    assert result["claims"] == ["team-a/training"]


def test_all_blockers_are_named_at_once(node: Node) -> None:
    done = node.layout(static([0, 1], MIXED))
    state = done["after"][0]
    claim(node.root / "state.db", state["uuid"], state["partitions"][4])
    node.simulator("fault", "3", "process", "4713")
    result = node.layout(
        static(0, {"7g.80gb": 1}), static(2, {"3g.40gb": 3}), static(3, MIXED), static(1, {"2g.20gb": 1})
    )
    assert result["failed"]
    assert result["error_code"] == "several"
    assert [error["code"] for error in result["errors"]] == ["in-use", "does-not-fit", "in-use"]
    assert result["claims"] == ["team-a/training"]
    assert result["pids"] == [4713]
    assert node.partitions() == {0: PLACED, 1: PLACED, **{index: [] for index in range(2, 8)}}


def test_unreadable_store_is_rejected(node: Node) -> None:
    (node.root / "state.db").write_text("no database at all, but long enough to be read " * 20)
    result = node.layout(static(0, MIXED))
    assert result["failed"]
    assert result["error_code"] == "store-unreadable"
    assert node.partitions()[0] == []


@pytest.mark.prove
@pytest.mark.parametrize("call", range(1, 6))  # one on the first GPU, four on the second
def test_failure_is_rolled_back_on_all_gpus(node: Node, call: int) -> None:
    node.layout(static(0, MIXED))
    before = node.module("accelerator_info", {})["devices"]
    node.simulator("fault", "all", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "999", "nth", str(call))
    result = node.layout(static([0, 1], {"2g.20gb": 1, "1g.10gb": 3}))
    node.simulator("clear")
    assert result["failed"], result
    assert "999" in result["msg"]
    assert result["not_undone"] == []
    after = node.module("accelerator_info", {})["devices"]
    assert [[one["profile"], one["placement"]] for each in after for one in each["partitions"]] == [
        [one["profile"], one["placement"]] for each in before for one in each["partitions"]
    ]
    assert [each["partitioning"] for each in after] == [each["partitioning"] for each in before]


def test_reset_needs_consent(make_node: Callable[[str], Node]) -> None:
    node = make_node("8xA100-40")
    rule = static([0, 1], {"1g.5gb": 7})
    for check in (True, False):
        refused = node.layout(rule, check=check)
        assert refused["failed"]
        assert refused["error_code"] == "reset-needs-consent"
        assert "when_needed" in refused["hint"]

    waiting = node.layout(rule, reset="never", check=True)
    pending = node.layout(rule, reset="never")
    assert pending["steps"] == waiting["steps"]
    assert kinds(pending) == ["set_partitioning"] * 2
    assert pending["reset_required"] is True
    assert pending["after"][0]["enabled"] is False
    assert pending["after"][0]["pending"] is True
    again = node.layout(rule, reset="never")
    assert not again["changed"]
    assert again["reset_required"] is True
    assert node.layout(rule)["error_code"] == "reset-needs-consent"

    with node.fabric_manager():
        done = node.layout(rule, reset="when_needed")
    assert kinds(done) == (["reset_device"] + ["create_partition"] * 7) * 2
    assert done["reset_required"] is False
    assert len(node.partitions()[1]) == 7
    assert not node.layout(rule)["changed"]


def test_pending_mode_is_applied_by_reboot(make_node: Callable[[str], Node]) -> None:
    node = make_node("8xA100-40")
    rule = static(0, {"1g.5gb": 7})
    node.layout(rule, reset="never")
    node.reboot()
    done = node.layout(rule, reset="never")
    assert kinds(done) == ["create_partition"] * 7
    assert done["reset_required"] is False


def test_boards_without_partitions_are_rejected(make_node: Callable[[str], Node]) -> None:
    node = make_node("1xL4")
    result = node.layout(static(0, {"1g.5gb": 1}))
    assert result["failed"]
    assert result["error_code"] == "unsupported"
    assert not node.layout({"match": {}, "mode": "dynamic"})["changed"]
    assert not node.layout({"match": {}, "mode": "whole"})["changed"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "one of the following"),
    ({"layout": [], "config": {}, "config_name": "a"}, "mutually exclusive"),
    ({"config": {"version": "v1"}}, "config_name"),
    ({"config_file": "/nowhere"}, "config_name"),
    ({"layout": "static"}, "layout"),
    ({"layout": [{"match": {}, "mode": "static"}]}, "Layout rule 1"),
    ({"layout": [{"match": {}, "mode": "dynamic"}, {"match": {}, "mode": "sliced"}]}, "Layout rule 2"),
    ({"layout": [{"mode": "dynamic"}]}, "match"),
    ({"layout": [{"match": {"slot": 1}, "mode": "dynamic"}]}, "slot"),
    ({"layout": [{"match": {"index": "zero"}, "mode": "dynamic"}]}, "zero"),
    ({"layout": [{"match": {"pci_address": "everywhere"}, "mode": "dynamic"}]}, "everywhere"),
    ({"layout": [{"match": {}, "mode": "whole", "partitions": {"1g.10gb": 1}}]}, "partitions"),
    ({"layout": [static(0, {"1g.10gb": -1})]}, "1g.10gb"),
    ({"layout": [static(0, {"1g.10gb": "many"})]}, "many"),
    ({"layout": [static(0, {"9g.99gb": 1})]}, "9g.99gb"),
    ({"layout": [static(0, "1g.10gb")]}, "partitions"),
    ({"layout": [static(0, [{"profile": "3g.40gb", "placement": 1}])]}, "memory slice 1"),
    ({"layout": [static(0, {"1g.10gb": 8})]}, "8"),
    ({"layout": [static(0, {"4g.40gb": 1, "3g.40gb": 1, "1g.10gb": 1})]}, "does not fit"),
    ({"layout": [], "reset": "always"}, "reset"),
    ({"layout": [], "place": 1}, "place"),
]


@pytest.mark.parametrize(("options", "named"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_invalid_options_are_rejected(shared_node: Node, options: dict[str, Any], named: str) -> None:
    for check in (True, False):
        result = shared_node.module("nvidia_mig", options, check=check)
        assert result["failed"]
        assert named in result["msg"]
    assert shared_node.partitions() == {**{index: [] for index in range(8)}, 3: PLACED}


def test_without_driver_fails(node: Node) -> None:
    node.driver = False
    result = node.layout(static(0, MIXED))
    assert result["failed"]
    assert result["error_code"] == "backend-unavailable"
    assert "libnvidia-ml.so.1" in result["msg"]


def test_without_binding_fails(node: Node, bare_python: Path) -> None:
    options = {"layout": [static(0, MIXED)], "interpreter": "/nowhere/python"}
    result = node.module_of(bare_python, "nvidia_mig", options)
    assert result["failed"]
    assert result["error_code"] == "binding-missing"
    assert "/nowhere/python" in result["msg"]
    assert "nvidia-ml-py" in result["msg"]


def test_runs_as_packed_by_ansible(node: Node, bare_python: Path) -> None:
    """Ansible packs the module and starts it with an interpreter without the binding. The module runs again with one that has it."""
    options = {"layout": [static(0, MIXED)], "state_path": str(node.root / "state.db")}
    first = node.ansible("nvidia_mig", options, bare_python)
    assert first["changed"], json.dumps(first)
    assert len(first["steps"]) == 6
    assert node.partitions()[0] == PLACED
    assert not node.ansible("nvidia_mig", options, bare_python)["changed"]


def test_linked_gpus_are_reset_together_before_ampere(make_node: Callable[[str], Node]) -> None:
    """Boards before Ampere with a direct link: a reset of one takes the partitions of the other along, which are made again."""
    node = make_node("4xA30")
    node.edit_boards("compute-capability 8.0", "compute-capability 7.0")
    first = node.layout(static(1, {"2g.12gb": 2}), reset="when_needed")
    assert [device["index"] for device in first["devices"]] == [0, 1]
    assert first["devices"][0]["mode"] is None
    (reset,) = [step for step in first["steps"] if step["step"] == "reset_device"]
    assert reset["indices"] == [0, 1]
    (partition,) = {one["profile"] for one in first["after"][1]["partitions"]}
    assert partition == "2g.12gb"

    waiting = node.layout(static(0, {"1g.6gb": 4}), reset="never", check=True)
    assert kinds(waiting) == ["set_partitioning"]
    assert [(device["index"], device["reset_required"]) for device in waiting["devices"]] == [(0, True)]
    second = node.layout(static(0, {"1g.6gb": 4}), reset="when_needed")
    assert node.partitions()[0] == [("1g.6gb", start) for start in range(4)]
    assert node.partitions()[1] == [("2g.12gb", 0), ("2g.12gb", 2)]
    assert without_uuids(second["after"])[1] == without_uuids(second["before"])[1]

    node.simulator("fault", "1", "process", "4714")
    refused = node.layout({"match": {"index": 0}, "mode": "whole"}, reset="when_needed")
    assert refused["failed"]
    assert refused["pids"] == [4714]


def test_linked_gpus_are_reset_alone_from_ampere_on(make_node: Callable[[str], Node]) -> None:
    node = make_node("4xA30")
    node.simulator("fault", "0", "process", "4714")
    first = node.layout(static(1, {"2g.12gb": 2}), reset="when_needed")
    assert [device["index"] for device in first["devices"]] == [1]
    assert node.partitions()[1] == [("2g.12gb", 0), ("2g.12gb", 2)]


def test_running_driver_is_notified(node: Node) -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _frame: signals.append(number))
    lock = lock_instance(str(node.root))
    try:
        node.layout(static(0, MIXED), check=True)
        assert signals == []
        assert node.layout(static(0, MIXED))["changed"]
        assert signals == [signal.SIGHUP]
        assert not node.layout(static(0, MIXED))["changed"]
        assert signals == [signal.SIGHUP]
    finally:
        lock.close()
        signal.signal(signal.SIGHUP, before)
