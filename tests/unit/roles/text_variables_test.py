# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks reject strings in place of lists and mappings, and name the variables. INI inventories and -e key=value pass strings."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.filter.text_variables import KINDS

from tests.unit.ansible_process import run_ansible

ROOT = Path(__file__).resolve().parents[3]
INVENTORY = """
[accelerator_nodes]
a ansible_connection=local accelerator_layouts='[{"hosts": "all", "layout": []}]'
b ansible_connection=local
[accelerator_controllers]
c ansible_connection=local
[accelerator_nodes:vars]
GROUP
"""


def play(directory: Path, group: str, *words: str, playbook: str = "check_inventory.yml") -> tuple[int, str]:
    """Run a playbook on an INI inventory with variables of its group. Return the status and the output."""
    (directory / "hosts.ini").write_text(INVENTORY.replace("GROUP", group), encoding="utf-8")
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(directory / "local")}
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [program, "-i", directory / "hosts.ini", ROOT / "playbooks" / playbook, *words]
    done = run_ansible(
        command,
        env=environment,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("group", "words", "found"),
    [
        ("accelerator_vendors=nvidia, ascend", (), "accelerator_vendors is text for a, b, expected a list."),
        ("", ("-e", "accelerator_vendors=nvidia"), "accelerator_vendors is text for a, b, c, expected a list."),
        (
            "",
            ("-e", json.dumps({"accelerator_proxy": "http://p"})),
            "accelerator_proxy is text for a, b, c, expected a mapping.",
        ),
        (
            "named='{{ texts }}'",
            ("-e", json.dumps({"nvidia_settings_rules": "{{ 'x' }}"})),
            "nvidia_settings_rules is text for a, b, c",
        ),
        # Accepted: Python literals in an INI inventory, as that of host a, and undefined or empty values.
        (
            "accelerator_vendors=",
            ("-e", json.dumps({"nvidia_settings_rules": "{{ nowhere }}", "accelerator_continue_on_failure": "yes"})),
            "",
        ),
        ("", ("-e", json.dumps({"accelerator_vendors": "{{ ['nvidia'] }}"})), ""),
    ],
)
def test_check_inventory_reports_only_variables_that_are_strings(
    group: str, words: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    status, output = play(tmp_path, group, *words)
    assert (status != 0) == bool(found) and found in output, output
    assert (" is text for " in output) == bool(found)


def test_controller_playbook_rejects_text(tmp_path: Path) -> None:
    status, output = play(tmp_path, "", "-e", "dra_controller_pod_tolerations=x", playbook="controller.yml")
    assert status != 0 and "dra_controller_pod_tolerations is text for a, b, c, expected a list." in output, output


def test_known_variables_are_those_of_the_argument_specs() -> None:
    specs = {}
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        if path.parts[-3] == "simulator":  # a role for tests
            continue
        for entry in yaml.safe_load(path.read_text("utf-8"))["argument_specs"].values():
            for name, option in (entry.get("options") or {}).items():
                if option.get("type") in ("list", "dict"):
                    specs[name] = "a list" if option["type"] == "list" else "a mapping"
    assert {name: kind for name, kind in KINDS.items() if not name.startswith("accelerator_")} == specs
    texts = "".join(path.read_text("utf-8") for path in ROOT.glob("playbooks/*.yml"))
    used = set(re.findall(r"(accelerator_\w+) \| default\((?:\[|\{)", texts)) & set(
        re.findall(r"accelerator_\w+", "".join(path.read_text("utf-8") for path in ROOT.glob("docs/*.md")))
    )
    assert used <= KINDS.keys()
