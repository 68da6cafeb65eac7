# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Nodes that the role ascend_driver skips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/ascend_driver"
TOLD = "{{ (__ascend_driver_skipped | bool) | to_json | b64encode }}"


def node(unified_bus: bool | None, *devices: str, **variables: Any) -> dict[str, Any]:
    """Return the variables of a host with these facts, or with None, those of an earlier release."""
    ascend = {} if unified_bus is None else {"unified_bus": unified_bus}
    facts = {"devices": {"ascend": list(devices)} if devices else {}, "ascend": ascend}
    return {"__ascend_driver_node": facts, **variables}


def test_node_without_npus_is_skipped_unless_its_driver_is_for_the_unified_bus(tmp_path: Path) -> None:
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    hosts = {
        "none": node(False),
        "earlier": node(None),
        "pci": node(False, "0000:82:00.0"),
        "unloaded": node(True),
        "first": node(False, ascend_driver_only_with_npus=False),
        "absent": node(False, ascend_driver_state="absent"),
    }
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    given = {name: {**defaults, **variables} for name, variables in hosts.items()}
    reported = play(tmp_path, [read, {"ansible.builtin.debug": {"msg": TOLD}}], given).messages
    assert {name for name, is_skipped in reported.items() if is_skipped} == {"none", "earlier"}, reported
