# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which labels a Node gets, which go again, and when none is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/node_features"
NAME, POD = "huawei.com/npu.chip.name", "huawei.com/topotree.superpodid"
MARK = "dra-accelerators/labels"


def driver(labels: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {"vendor": "ascend", "available": True, "reason": "", "unanswered": [], "labels": labels, **changes}


def host(
    drivers: list[dict[str, Any]], labels: dict[str, str], annotations: dict[str, str], state: str = "present"
) -> dict[str, Any]:
    known = {"exists": True, "labels": {"kubernetes.io/os": "linux", **labels}, "annotations": annotations}
    return {
        "node_features_node_name": "n",
        "node_features_state": state,
        "node_features_cluster_info": {"nodes": {"n": known}},
        "__node_features_asked": {"drivers": drivers},
    }


THERE = {NAME: "Ascend910", POD: "7"}
BOTH = driver(THERE)
MARKED = {MARK: f"{NAME},{POD}"}
HOSTS = {
    "new": host([BOTH], {}, {}),
    "right": host([BOTH], THERE, MARKED),
    "moved": host([BOTH], {**THERE, POD: "6"}, MARKED),
    "left": host([driver({NAME: "Ascend910"})], THERE, MARKED),
    "others": host([driver({NAME: "Ascend910"})], {POD: "7", "nvidia.com/gpu.count": "8"}, {}),
    "silent": host([driver({}, available=False)], THERE, MARKED),
    "ill": host([driver({}, unanswered=["NPU 3: lost"])], THERE, MARKED),
    "two": host([BOTH, driver({"nvidia.com/gpu.count": "2"}, vendor="nvidia")], THERE, MARKED),
    "absent": host([BOTH], THERE, MARKED, state="absent"),
    "never": host([], {POD: "7"}, {}, state="absent"),
}
TASKS = [
    {"include_vars": {"file": str(ROLE / "vars/main.yml")}},
    {
        "debug": {
            "msg": "{{ {'labels': __node_features_labels, 'said': __node_features_said, 'writes':"
            " (__node_features_known | bool and __node_features_differs | bool)} | to_json | b64encode }}"
        }
    },
]


def test_labels_are_written_kept_and_removed(tmp_path: Path) -> None:
    played = play(tmp_path, TASKS, HOSTS)
    assert played.status == 0, played.output
    told = played.told
    assert told["new"] == {"labels": THERE, "said": f"{NAME},{POD}", "writes": True}
    assert not told["right"]["writes"] and not told["silent"]["writes"] and not told["ill"]["writes"]
    assert told["moved"] == {"labels": THERE, "said": f"{NAME},{POD}", "writes": True}
    assert told["left"] == {"labels": {NAME: "Ascend910", POD: None}, "said": NAME, "writes": True}
    # What somebody else has written is left alone, though it is no longer true.
    assert told["others"]["labels"] == {NAME: "Ascend910"} and told["others"]["writes"]
    assert told["two"]["labels"] == {**THERE, "nvidia.com/gpu.count": "2"} and told["two"]["writes"]
    assert told["absent"] == {"labels": {NAME: None, POD: None}, "said": "", "writes": True}
    assert told["never"] == {"labels": {}, "said": "", "writes": False}
