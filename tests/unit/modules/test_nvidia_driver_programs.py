# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs that need the driver's exact version: they are installed and rolled back with it, and recognized at its removal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_node import NEWER, OLDER, Node


@pytest.fixture
def node(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, run_here, monkeypatch)


def test_programs_installed_after_driver_are_rolled_back_with_it(node: Node) -> None:
    node.run(OLDER)
    node.apt.names.add("nvidia-fabricmanager")
    node.apt.installed["nvidia-fabricmanager"] = f"{OLDER}-1"
    done = node.run(NEWER)
    assert done["previous_available"] and node.apt.installed["nvidia-fabricmanager"] == f"{NEWER}-1"
    node.apt.versions = []
    node.run(state="previous")
    assert node.apt.installed["nvidia-fabricmanager"] == f"{OLDER}-1" and node.machine.loaded() == OLDER


def test_program_with_branch_name_is_replaced(node: Node) -> None:
    node.run(OLDER)
    node.apt.names.add("nvidia-fabricmanager")
    node.apt.installed["nvidia-fabricmanager-575"] = f"{OLDER}-1"
    node.run(NEWER)
    programs = {name: version for name, version in node.apt.installed.items() if "fabric" in name}
    assert programs == {"nvidia-fabricmanager": f"{NEWER}-1"}
    node.run(state="previous")
    programs = {name: version for name, version in node.apt.installed.items() if "fabric" in name}
    assert programs == {"nvidia-fabricmanager-575": f"{OLDER}-1"}


def test_programs_installed_after_driver_block_removal(node: Node) -> None:
    node.run(OLDER)
    node.apt.installed["nvidia-fabricmanager"] = f"{OLDER}-1"
    refused = node.run(state="absent")
    assert refused["error_code"] == "foreign" and "nvidia_fabric_manager" in refused["msg"]


@pytest.mark.parametrize("is_off", [False, True])
def test_vendor_cdi_file_is_refreshed_unless_disabled(node: Node, is_off: bool) -> None:
    unit = "nvidia-cdi-refresh.service"
    node.machine.enabled.add(unit)
    node.machine.switched_off |= {unit} if is_off else set()
    node.run(NEWER)
    assert (f"restart {unit}" in node.machine.log) != is_off
