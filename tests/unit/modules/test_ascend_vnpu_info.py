# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module ascend_vnpu_info on simulated NPUs: current state, exports, comparison, and validation without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_ascend_vnpu import COMPLETE, Node, library, power_on, static

__all__ = ["library", "power_on"]


def test_info_compares_and_exports(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    layout = [*static(COMPLETE, index=0), {"match": {}, "mode": "whole"}]
    differs = node.run("ascend_vnpu_info", layout=layout)
    assert not differs.get("failed") and not differs["changed"] and differs["matches"] is False
    assert [each["index"] for each in differs["differences"]] == [0] and differs["differences"][0]["mode"] is None
    assert differs["differences"][0]["requested"].startswith("static: ")
    assert node.slices(0) == [] and differs["waited_for"] == []
    after = node.run(layout=layout)["after"]
    compared = node.run("ascend_vnpu_info", layout=layout, check=True)
    assert compared["matches"] and compared["differences"] == [] and compared["devices"] == after
    read = node.run("ascend_vnpu_info")
    assert not {"matches", "differences"} & read.keys() and read["left_out"] == []
    exported = read["exported"]["layout"]
    assert exported[0]["match"] == {"vendor": "ascend", "index": [0]}
    assert not node.run(layout=exported)["changed"]


def test_info_unreadable_npu_is_a_difference(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    node.machine.control("fault", "2", "lost")
    result = node.run("ascend_vnpu_info", layout=[{"match": {}, "mode": "whole"}])
    assert not result.get("failed") and result["matches"] is False
    assert [each["error"]["code"] for each in result["differences"]] == ["unread"]
    assert len(result["devices"]) == 7 and len(result["left_out"]) == 1


def test_info_after_boot_reports_missing_slices(power_on: Callable[..., Node]) -> None:
    """Right after a boot, the module waits for the vendor's script, as ascend_vnpu does."""
    node = power_on("8x310P-Pro")
    layout = static({"vir02": 2}, index=0)
    node.run(layout=layout)
    uptime = node.machine.root / "proc/uptime"
    uptime.parent.mkdir(exist_ok=True)
    uptime.write_text("12.5 30.0\n")
    node.machine.control("power-cycle", "late")
    result = node.run("ascend_vnpu_info", layout=layout, wait=0.0)
    assert result["matches"] is False and "of NPU 0" in str(result["warnings"])


def test_info_read_devices_false_needs_no_device(run_here: Callable[..., dict[str, Any]]) -> None:
    result = run_here("ascend_vnpu_info", {"read_devices": False, "layout": static(COMPLETE)})
    assert not result.get("failed") and not result["changed"]
    assert not {"devices", "matches", "waited_for"} & result.keys()


@pytest.mark.parametrize("read_devices", [True, False])
def test_info_invalid_layout_fails_without_device(run_here: Callable[..., dict[str, Any]], read_devices: bool) -> None:
    result = run_here("ascend_vnpu_info", {"read_devices": read_devices, "layout": [{"match": {}}]})
    assert result["failed"] and "Layout rule 1" in result["msg"]


def test_info_read_devices_false_requires_layout(run_here: Callable[..., dict[str, Any]]) -> None:
    result = run_here("ascend_vnpu_info", {"read_devices": False})
    assert result["failed"] and "layout" in result["msg"]
