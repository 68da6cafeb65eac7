# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Labels that the role requests for a Node, cases without changes, and the feature file. See test_node_labels.py for the writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/node_features"
NAME, POD, BUS = (
    "huawei.com/npu.chip.name",
    "huawei.com/topotree.superpodid",
    "feature.node.kubernetes.io/pci-1200_19e5.present",
)
FILE = "/etc/kubernetes/node-feature-discovery/features.d/dra-accelerators"


def driver(labels: dict[str, str], **changes: Any) -> dict[str, Any]:
    output = {"vendor": "ascend", "available": True, "reason": "", "unanswered": [], "labels": labels, "pci_labels": {}}
    return {**output, **changes}


def host(drivers: list[dict[str, Any]], state: str = "present", **answer: Any) -> dict[str, Any]:
    found = {"node_features_state": state, "__node_features_query": {"drivers": drivers}}
    return {**found, "__node_features_plan": answer} if answer else found


THERE = {NAME: "Ascend910", POD: "7"}
BOTH = driver(THERE, pci_labels={BUS: "true"})
TEXT = f"{NAME}=Ascend910\n"
HOSTS = {
    "new": host([BOTH], way="api", had_file=False, file_content=""),
    "two": host([BOTH, driver({"nvidia.com/gpu.count": "2"}, vendor="nvidia")]),
    "silent": host([driver({}, available=False)]),
    "ill": host([driver({}, unanswered=["NPU 3: lost"])]),
    "filed": host([BOTH], way="file", had_file=False, file_content=TEXT),
    "left": host([BOTH], way="api", had_file=True, file_content=""),
    "nowhere": host([BOTH], way="", had_file=False, file_content=""),
    "absent": host([], "absent", way="api", had_file=True, file_content=""),
}
EXPRESSION = (
    "{{ {'labels': __node_features_requested, 'alone': __node_features_without_nfd, 'known': __node_features_known | bool,"
    " 'files': __node_features_files, 'leaves': __node_features_leaves_file | bool} | to_json | b64encode }}"
)
TASKS = [{"include_vars": {"file": str(ROLE / "vars/main.yml")}}, {"debug": {"msg": EXPRESSION}}]


def test_desired_labels_and_file_changes(tmp_path: Path) -> None:
    played = play(tmp_path, TASKS, HOSTS)
    assert played.status == 0, played.output
    reported = played.messages
    assert reported["new"] == {"labels": THERE, "alone": {BUS: "true"}, "known": True, "files": [], "leaves": False}
    assert reported["two"]["labels"] == {**THERE, "nvidia.com/gpu.count": "2"}
    # If the driver does not answer, the labels are unknown, and nothing changes.
    assert not reported["silent"]["known"] and not reported["ill"]["known"]
    folders, file = reported["filed"]["files"][:-1], reported["filed"]["files"][-1]
    assert file == {"path": FILE, "content": TEXT, "mode": "0644"} and not reported["filed"]["leaves"]
    assert [each["state"] for each in folders] == ["directory"] * 3 and folders[-1]["path"] == str(Path(FILE).parent)
    assert reported["left"]["files"] == [{"path": FILE, "state": "absent"}] and reported["left"]["leaves"]
    assert reported["nowhere"]["files"] == [] and not reported["nowhere"]["leaves"]
    # It is removed before the Node is read.
    assert reported["absent"] == {"labels": {}, "alone": {}, "known": True, "files": [], "leaves": False}


def test_file_is_removed_before_its_record() -> None:
    """An interrupted run leaves a note without a file, but never a file without a note."""
    document = yaml.safe_load((ROLE / "tasks/main.yml").read_text(encoding="utf-8"))
    (tasks,) = [task["block"] for task in document if "block" in task]
    steps = [task for task in tasks if not task.get("check_mode") and "ansible.builtin.assert" not in task]
    kinds = [next(key.rpartition(".")[2] for key in task if "." in key) for task in steps]
    assert kinds == ["debug", "file_set", "node_labels", "file_set", "node_labels"]
    assert steps[1]["when"] == "node_features_state == 'absent'"
    assert steps[4]["dra.accelerators.node_labels"]["file_gone"] is True


@pytest.mark.parametrize("by_file", [False, True])
def test_messages_list_label_changes(by_file: bool, tmp_path: Path) -> None:
    """The query at the start counts, not the records of an earlier run. Without changes there is no message."""
    output = {"way": "file" if by_file else "api", "had_file": by_file, "file_content": TEXT}
    none = {"coming": {}, "changing": {}, "going": []}
    hosts = {
        "comes": {"coming": {NAME: "Ascend910", POD: "7"}, "changing": {}, "going": []},
        "goes": {"coming": {}, "changing": {POD: "8"}, "going": [NAME]},
        "stays": none,
    }
    given = {
        name: {
            "node_features_state": "present",
            "__node_features_plan": {**output, **each},
            # Results of an earlier run in the same play.
            "__node_features_labelled": {"way": "api" if by_file else "file", "had_file": not by_file, "changed": True},
            "__node_features_file_plan": {"changed_paths": [FILE] if by_file and each != none else []},
        }
        for name, each in hosts.items()
    }
    expression = (
        "{{ {'words': __node_features_messages, 'by_file': __node_features_by_file | bool} | to_json | b64encode }}"
    )
    played = play(tmp_path, [TASKS[0], {"debug": {"msg": expression}}], given)
    assert played.status == 0, played.output
    nobody = "no disruption: labels affect only pods of DaemonSets that select nodes by them"
    file = [f"write {FILE}"] if by_file else []
    assert {each["by_file"] for each in played.messages.values()} == {by_file}
    assert played.messages["comes"]["words"] == [f"add the labels {NAME}=Ascend910, {POD}=7", *file, nobody]
    assert played.messages["goes"]["words"] == [
        f"change the labels {POD}=8",
        f"remove the labels {NAME}",
        *file,
        nobody,
    ]
    assert played.messages["stays"]["words"] == []


def test_labels_that_are_rejected_are_named(tmp_path: Path) -> None:
    plan = {"coming": {}, "changing": {}, "going": [], "rejected": {"node-role.kubernetes.io/x": "it is not a label"}}
    given = {"a": {"node_features_state": "present", "__node_features_plan": {"way": "api", "had_file": False, **plan}}}
    played = play(
        tmp_path, [TASKS[0], {"debug": {"msg": "{{ __node_features_messages | to_json | b64encode }}"}}], given
    )
    assert played.messages["a"] == ["reports labels that are not written, examine the node: node-role.kubernetes.io/x"]
