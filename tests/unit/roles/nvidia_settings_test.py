# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Messages of the role before it changes settings, pending reboots of GPUs, and the reboot itself. See test_nvidia_gpu.py for the changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/nvidia_settings"
FILE = "/etc/dra-accelerators/settings.json"
SKIPPED = {"changed": False, "skipped": True}
EXPRESSION = (
    "{{ {'words': __nvidia_settings_messages, 'waiting': __nvidia_settings_waiting, 'restarts': __nvidia_settings_may_restart | bool}"
    " | to_json | b64encode }}"
)
TASKS = [{"include_vars": {"file": str(ROLE / "vars/main.yml")}}, {"debug": {"msg": EXPRESSION}}]


def gpu(index: int, **more: Any) -> dict[str, Any]:
    return {"index": index, "changed": True, "claims": [], "pods": [], "reset_required": False, **more}


def host(
    *devices: dict[str, Any], steps: tuple[str, ...] = (), files: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    return {
        "nvidia_settings_state": "present",
        "nvidia_settings_rules": [{"match": {}, "power_limit": 500}],
        "nvidia_settings_reboot": "",
        "__nvidia_settings_plan": {"steps": [{"description": each} for each in steps], "devices": list(devices)},
        "__nvidia_settings_files_plan": {"changed_paths": list(files)},
        "__nvidia_settings_applied": SKIPPED,
        **more,
    }


def test_messages_come_before_any_change(tmp_path: Path) -> None:
    held = gpu(0, claims=["team-a/one", "team-a/two"], pods=["team-a/pod"])
    hosts = {
        "changes": host(held, gpu(1, claims=["b/c"]), gpu(2), steps=("set power_limit",), files=(FILE,)),
        "other": host(gpu(0, claims=["b/c"], changed=False), steps=("set power_limit",)),
        "quiet": host(gpu(0, claims=["b/c"], changed=False)),
        "goes": host(files=(FILE,), nvidia_settings_state="absent", __nvidia_settings_restored=SKIPPED),
        # No driver could be queried: check mode on a bare node.
        "bare": {**host(files=(FILE,)), "__nvidia_settings_plan": SKIPPED},
    }
    played = play(tmp_path, TASKS, hosts)
    assert played.status == 0, played.output
    assert {name: each["words"] for name, each in played.messages.items()} == {
        "changes": [
            "set power_limit",
            "GPU 0 is used by the claims team-a/one, team-a/two (pods team-a/pod), which continue with the new settings",
            "GPU 1 is used by the claims b/c, which continue with the new settings",
            f"write {FILE}",
        ],
        "other": ["set power_limit"],
        "quiet": [],
        "goes": [f"remove {FILE}"],
        "bare": [f"write {FILE}"],
    }


@pytest.mark.parametrize(
    ("reboot", "restarts"), [("", False), (False, False), ("no", False), (True, True), ("yes", True)]
)
def test_reboot_is_required_by_the_last_query(*, reboot: bool | str, restarts: bool, tmp_path: Path) -> None:
    waits = gpu(3, reset_required=True, changed=False)
    hosts = {
        "seen": host(waits, gpu(4), nvidia_settings_reboot=reboot),
        "done": host(
            waits, nvidia_settings_reboot=reboot, __nvidia_settings_applied={"changed": True, "devices": [gpu(3)]}
        ),
        "back": host(
            nvidia_settings_reboot=reboot,
            nvidia_settings_state="absent",
            __nvidia_settings_restored={"changed": True, "devices": [waits]},
        ),
    }
    played = play(tmp_path, TASKS, hosts)
    assert played.status == 0, played.output
    assert {name: each["waiting"] for name, each in played.messages.items()} == {"seen": [3], "done": [], "back": [3]}
    assert {each["restarts"] for each in played.messages.values()} == {restarts}
