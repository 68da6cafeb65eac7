# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module nvidia_mig_info on simulated boards: current state, exports, comparison, and validation without a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from driver_store import claim

if TYPE_CHECKING:
    from conftest import Node

RULE = {"match": {"index": [0, 1]}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}}
OTHER = {**RULE, "partitions": {"3g.40gb": 2}}
WHOLE = {"match": {}, "mode": "whole"}
DOCUMENT = {"version": "v1", "mig-configs": {"off": [{"devices": "all", "mig-enabled": False}], "wrong": [{}]}}
INVALID = [
    ({"layout": [{"match": {}}]}, "Layout rule 1"),
    ({"config": DOCUMENT, "config_name": "wrong"}, "entry 1"),
    ({"config": DOCUMENT, "config_name": "missing"}, "no configuration 'missing'"),
    ({"config_file": "/nowhere/config.yaml", "config_name": "off"}, "/nowhere/config.yaml cannot be read"),
]


def info(node: Node, *, check: bool = False, **options: Any) -> dict[str, Any]:
    return node.module("nvidia_mig_info", {"state_path": str(node.root / "state.db"), **options}, check=check)


def test_info_returns_the_state_of_each_gpu(node: Node) -> None:
    after = node.layout(RULE, WHOLE)["after"]
    for check in (True, False):
        result = info(node, check=check)
        assert not result["changed"] and result["devices"] == after
        assert not {"matches", "differences", "warnings"} & result.keys()


def test_info_difference_does_not_fail(node: Node) -> None:
    node.layout(RULE, WHOLE)
    before = node.partitions()
    assert info(node, layout=[RULE, WHOLE])["matches"]
    for check in (True, False):
        result = info(node, layout=[OTHER, WHOLE], check=check)
        assert not result.get("failed") and not result["changed"] and result["matches"] is False
        assert [each["index"] for each in result["differences"]] == [0, 1]
        assert result["differences"][0]["requested"] == "static: 2 × 3g.40gb"
        assert result["differences"][0]["mode"] == {"found": True, "requested": True}
        assert "differs from the requested layout" in result["differences"][0]["message"]
        assert "missing: 3g.40gb at 0" in result["differences"][0]["message"]
    assert node.partitions() == before


def test_info_mode_only_ignores_partitions(node: Node) -> None:
    node.layout(RULE, WHOLE)
    assert info(node, layout=[OTHER, WHOLE], mode_only=True)["matches"]
    result = info(node, layout=[WHOLE], mode_only=True)
    assert [(each["index"], each["mode"]) for each in result["differences"]] == [
        (index, {"found": True, "requested": False}) for index in (0, 1)
    ]


def test_info_unreadable_gpu_is_a_difference(node: Node) -> None:
    node.simulator("fault", "3", "lost")
    result = info(node, layout=[WHOLE])
    assert not result.get("failed") and result["matches"] is False and "warnings" not in result
    assert [(each["index"], each["error"]["code"]) for each in result["differences"]] == [(3, "unread")]
    assert "could not be read" in result["differences"][0]["message"]
    assert [each["index"] for each in result["devices"]] == [0, 1, 2, 4, 5, 6, 7]
    exported = info(node)
    assert len(exported["left_out"]) == 1 and "Not in the export" in str(exported["warnings"])


def test_info_exported_layout_applied_again_changes_nothing(node: Node) -> None:
    node.layout(
        RULE,
        {"match": {"index": 2}, "mode": "static", "partitions": [{"profile": "3g.40gb", "placement": 0}]},
    )
    exported = info(node)["exported"]
    assert [rule["match"].get("index") for rule in exported["layout"]] == [[0, 1], [2], [3, 4, 5, 6, 7]]
    assert info(node, layout=exported["layout"])["matches"]
    assert not node.layout(*exported["layout"])["changed"]
    assert exported["config"] == {
        "version": "v1",
        "mig-configs": {
            "current": [
                {"devices": [0, 1], "mig-enabled": True, "mig-devices": {"1g.10gb": 4, "3g.40gb": 1}},
                {"devices": [2], "mig-enabled": True, "mig-devices": {"3g.40gb": 1}},
                {"devices": [3, 4, 5, 6, 7], "mig-enabled": False},
            ]
        },
    }
    assert "all-1g.10gb" in exported["possible"]["mig-configs"]
    options = {"config": exported["config"], "config_name": "current", "state_path": str(node.root / "state.db")}
    assert info(node, **options)["matches"]
    assert not node.module("nvidia_mig", options)["changed"]
    named = info(node, export_name="mine")["exported"]["config"]["mig-configs"]
    assert list(named) == ["mine"]


def test_info_partitions_of_claims_are_exported_as_dynamic(node: Node) -> None:
    state = node.layout(RULE)["after"][0]
    for each in state["partitions"][:1]:
        claim(node.root / "state.db", state["uuid"], each, created=True)
    result = info(node, layout=[RULE])
    assert result["exported"]["layout"][0] == {"match": {"vendor": "nvidia", "index": [0]}, "mode": "dynamic"}
    # The other partitions of this GPU are not in the export. The comparison needs no warning about it.
    assert len(result["left_out"]) == 4 and "warnings" not in result
    assert len(info(node)["warnings"]) == 4


def test_info_config_file_is_compared(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))
    options = {"config_file": str(path), "config_name": "off"}
    assert info(node, **options)["matches"]
    node.layout(RULE)
    assert [each["index"] for each in info(node, **options)["differences"]] == [0, 1]


@pytest.mark.parametrize("options", [{"layout": [RULE]}, {"config": DOCUMENT, "config_name": "off"}])
def test_info_read_devices_false_needs_no_device(
    run_here: Callable[..., dict[str, Any]], options: dict[str, Any]
) -> None:
    result = run_here("nvidia_mig_info", {"read_devices": False, "interpreter": "/nowhere/python", **options})
    assert not result.get("failed") and not result["changed"]
    assert not {"devices", "exported", "matches"} & result.keys()


@pytest.mark.parametrize(("options", "named"), INVALID)
def test_info_invalid_layout_fails_without_device(
    run_here: Callable[..., dict[str, Any]], options: dict[str, Any], named: str
) -> None:
    result = run_here("nvidia_mig_info", {"read_devices": False, **options})
    assert result["failed"] and named in result["msg"], result


@pytest.mark.parametrize(("options", "named"), INVALID)
def test_info_invalid_layout_fails_before_devices_are_read(node: Node, options: dict[str, Any], named: str) -> None:
    node.driver = False
    assert info(node)["error_code"] == "backend-unavailable"
    result = info(node, **options)
    assert result["failed"] and named in result["msg"], result


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"read_devices": False}, "layout, config, config_file"),
        ({"mode_only": True}, "mode_only requires one of the following: layout, config, config_file"),
        ({"config": DOCUMENT}, "config_name"),
        ({"layout": [], "config": DOCUMENT, "config_name": "off"}, "mutually exclusive"),
    ],
)
def test_info_conflicting_options_are_rejected(
    run_here: Callable[..., dict[str, Any]], options: dict[str, Any], named: str
) -> None:
    result = run_here("nvidia_mig_info", options)
    assert result["failed"] and named in result["msg"], result
