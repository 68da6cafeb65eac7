# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A host cannot replace the operator's variables by facts: roles that use the operator's rights, or files of the controller, stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.filter.foreign_facts import PREFIXES, foreign_facts
from playing import play

ROOT = Path(__file__).resolve().parents[3]
GUARD = "Reject facts with names of variables"
HOSTILE = {"dra_driver_node_name": "victim", "accelerator_report": {}, "distribution": "Debian"}


def test_prefixes_are_those_of_the_roles() -> None:
    roles = {f"{path.parent.parent.name}_" for path in ROOT.glob("roles/*/tasks/main.yml")}
    assert set(PREFIXES) == roles | {"accelerator_"}


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("dra_driver_node_name", True),
        ("__nvidia_driver_plan", True),
        ("ansible_accelerator_node_name", True),
        ("accelerator_kubeconfig", True),
        ("accelerator_report", False),
        ("distribution", False),
        ("nvidia", False),
    ],
)
def test_names_of_variables_are_found(name: str, foreign: bool) -> None:
    assert foreign_facts({name: 1}) == ([name] if foreign else [])


def tasks_of(value: Any) -> list[dict[str, Any]]:
    found = []
    for task in value or []:
        found += [task, *tasks_of(task.get("block")), *tasks_of(task.get("rescue")), *tasks_of(task.get("always"))]
    return found


def test_roles_that_use_the_operators_rights_have_the_guard() -> None:
    """Also roles that copy a file of the controller to a host, by a variable that names it."""
    without = []
    for role in sorted(ROOT.glob("roles/*/tasks/main.yml")):
        tasks = [
            task for path in role.parent.glob("*.yml") for task in tasks_of(yaml.safe_load(path.read_text("utf-8")))
        ]
        acts = any(
            task.get("delegate_to") == "localhost" or "{{" in str((task.get("ansible.builtin.copy") or {}).get("src"))
            for task in tasks
        )
        has_guard = any(task.get("name") == GUARD for task in tasks)
        # Preflight has it among its problems. Classes and the simulator take nothing from hosts.
        if acts and not has_guard and role.parents[1].name not in ("preflight", "device_classes", "simulator"):
            without.append(role.parents[1].name)
    assert not without


@pytest.mark.parametrize("role", ["dra_driver", "node_features", "driver_image"])
def test_guard_stops_a_host_with_foreign_facts(tmp_path: Path, role: str) -> None:
    document = yaml.safe_load((ROOT / f"roles/{role}/tasks/main.yml").read_text("utf-8"))
    (guard,) = [task for task in tasks_of(document) if task.get("name") == GUARD]
    (tmp_path / "library").mkdir()
    (tmp_path / "library/hostile.py").write_text(
        "from ansible.module_utils.basic import AnsibleModule\n"
        f"AnsibleModule({{'facts': {{'type': 'dict'}}}}).exit_json(ansible_facts={HOSTILE!r} if __import__('os').path.exists('{tmp_path}/on') else {{}})\n",
        encoding="utf-8",
    )
    tasks = [{"hostile": {}}, guard]
    assert play(tmp_path, tasks, {"n1": {}}, "--module-path", str(tmp_path / "library")).status == 0
    (tmp_path / "on").touch()
    played = play(tmp_path, tasks, {"n1": {}}, "--module-path", str(tmp_path / "library"))
    assert played.status != 0 and "dra_driver_node_name" in played.failed["n1"]["msg"]
    assert "accelerator_report" not in played.failed["n1"]["msg"]
