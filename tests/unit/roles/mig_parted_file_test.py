# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The file of nvidia-mig-parted that the role nvidia_mig reads on the Ansible controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/nvidia_mig"
FILE = {"version": "v1", "mig-configs": {"half": [{"devices": "all", "mig-enabled": False}]}}
CONTENTS: dict[str, tuple[Any, Any]] = {
    "plain": (FILE, FILE),
    "wrapped": ({"kind": "ConfigMap", "data": {"config.yaml": yaml.safe_dump(FILE), "other": "x"}}, FILE),
    "one-key": ({"kind": "ConfigMap", "data": {"mine.yaml": yaml.safe_dump(FILE)}}, FILE),
    "two-keys": ({"kind": "ConfigMap", "data": {"a": "1", "b": "2"}},) * 2,
    "without-data": ({"kind": "ConfigMap"},) * 2,
    "empty": (None, {}),
    "list": (["a"], ["a"]),
}


def test_the_file_is_read_also_from_a_config_map(tmp_path: Path) -> None:
    hosts = {}
    for name, (content, _expected) in CONTENTS.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text("" if content is None else yaml.safe_dump(content))
        hosts[name] = {"nvidia_mig_config_file": str(path), "nvidia_mig_layout": []}
    tasks = [
        {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")},
        {"ansible.builtin.debug": {"msg": "{{ {'found': __nvidia_mig_document} | to_json | b64encode }}"}},
    ]
    played = play(tmp_path, tasks, hosts)
    assert {name: each["found"] for name, each in played.messages.items()} == {
        name: expected for name, (_content, expected) in CONTENTS.items()
    }, played.output
