# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A host cannot replace the operator's variables by facts: roles that use the operator's rights, or files of the controller, stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.filter.foreign_facts import PREFIXES, foreign_facts
from playing import play

ROOT = Path(__file__).resolve().parents[3]
GUARD = "Reject facts with names of variables"
#: Preflight has the guard among its problems. Classes and the simulator take nothing from hosts.
WITHOUT = ("preflight", "device_classes", "simulator")
CONTROLLER_ACTIONS = (
    "assert",
    "debug",
    "host_answer",
    "fail",
    "group_by",
    "include_role",
    "include_tasks",
    "include_vars",
    "meta",
    "set_fact",
)
HARMLESS = {
    "dra_driver/tasks/pod_back.yml: Leave the node the driver that it had": "main.yml has pinned the names",
    "python_environment/tasks/present.yml: Name the release of the node programs": "its parts come from the role's vars, which facts do not replace",
    "node_features/tasks/main.yml: Note that there is no feature file any more": "it only removes a note of this collection",
}
#: Facts of dra_driver's tasks: from there on they use these, and the names that main.yml has pinned.
PINNED = {"__dra_driver_pod_set_named", "__dra_driver_pinned"}
HOSTILE = {"dra_driver_node_name": "victim", "accelerator_report": {}, "distribution": "Debian"}


def test_prefixes_are_those_of_the_roles() -> None:
    roles = {f"{path.parent.parent.name}_" for path in ROOT.glob("roles/*/tasks/main.yml")}
    # The role of tests writes nothing with the operator's rights.
    assert set(PREFIXES) == roles - {"simulator_"} | {"accelerator_"}


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


def tasks_of(value: Any, *, blocks: tuple[str, ...] = ("block", "rescue", "always")) -> Iterator[dict[str, Any]]:
    """Yield each task of a file in its order; a task of a block inherits delegate_to."""
    for task in value or []:
        for key in blocks:
            inherited = {"delegate_to": task["delegate_to"]} if "delegate_to" in task else {}
            yield from ({**inherited, **each} for each in tasks_of(task.get(key), blocks=blocks))
        if "block" not in task:
            yield task


def module_of(task: dict[str, Any]) -> str:
    return next((key for key in task if "." in key), "")


def acts_on_controller(task: dict[str, Any]) -> bool:
    """Return whether a task writes with the operator's rights, or runs a program or a module on the controller."""
    module = module_of(task)
    options = task[module] if module and isinstance(task[module], dict) else {}
    if task.get("delegate_to") != "localhost" or module == "dra.accelerators.cluster_info":
        return False
    return "state" in options or module.startswith("dra.accelerators.") or module == "ansible.builtin.command"


def copies_a_named_file(task: dict[str, Any]) -> bool:
    return "{{" in str((task.get("ansible.builtin.copy") or {}).get("src"))


def role_files() -> list[Path]:
    return [path for path in sorted(ROOT.glob("roles/*/tasks/*.yml")) if path.parents[1].name not in WITHOUT]


def test_roles_that_use_the_operators_rights_have_the_guard() -> None:
    """Also roles that copy a file of the controller to a host, by a variable that names it."""
    acting, guarded = set(), set()
    for path in role_files():
        for task in tasks_of(yaml.safe_load(path.read_text("utf-8"))):
            acting |= {path.parents[1].name} if acts_on_controller(task) or copies_a_named_file(task) else set()
            guarded |= {path.parents[1].name} if task.get("name") == GUARD else set()
    assert acting and acting <= guarded


def test_no_task_acts_on_the_controller_after_an_answer_without_a_guard() -> None:
    """Between an answer of the host and a write with the operator's rights stands the guard, or each host has named its node."""
    unguarded = []
    for path in role_files():
        answered = ""
        for task in tasks_of(yaml.safe_load(path.read_text("utf-8")), blocks=("block",)):
            module = module_of(task)
            if task.get("name") == GUARD:
                answered = ""
            elif PINNED & set(task.get("ansible.builtin.set_fact") or {}):
                break
            elif task.get("delegate_to") == "localhost":
                name = f"{path.relative_to(ROOT / 'roles')}: {task['name']}"
                if answered and acts_on_controller(task) and name not in HARMLESS:
                    unguarded.append(f"{name} (after {answered})")
            elif module.rpartition(".")[2] not in CONTROLLER_ACTIONS:
                answered = str(task.get("name"))
    assert not unguarded


@pytest.mark.parametrize("role", ["dra_driver", "node_features", "driver_image"])
def test_guard_stops_a_host_with_foreign_facts(tmp_path: Path, role: str) -> None:
    document = yaml.safe_load((ROOT / f"roles/{role}/tasks/main.yml").read_text("utf-8"))
    guard = next(task for task in tasks_of(document) if task.get("name") == GUARD)
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


def test_guard_accepts_facts_that_do_not_become_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy of the error: with inject_facts_as_vars=false the facts stay in a cache, and are no variables."""
    document = yaml.safe_load((ROOT / "roles/dra_driver/tasks/main.yml").read_text("utf-8"))
    guard = next(task for task in tasks_of(document) if task.get("name") == GUARD)
    cached = {"ansible.builtin.set_fact": {"dra_driver_node_name": "victim", "cacheable": True}}
    monkeypatch.setenv("ANSIBLE_INJECT_FACT_VARS", "true")
    assert "dra_driver_node_name" in play(tmp_path, [cached, guard], {"n1": {}}).failed["n1"]["msg"]
    monkeypatch.setenv("ANSIBLE_INJECT_FACT_VARS", "false")
    played = play(tmp_path, [cached, guard], {"n1": {}})
    assert played.status == 0, played.output


def test_pinned_names_end_with_the_role(tmp_path: Path) -> None:
    """A later play can name another cluster: facts that a set_fact leaves under these names would take precedence over its variables."""
    document = yaml.safe_load((ROOT / "roles/dra_driver/tasks/main.yml").read_text("utf-8"))
    pin = next(task for task in document if "__dra_driver_pinned" in (task.get("ansible.builtin.set_fact") or {}))
    (block,) = (task for task in document if "dra_driver_kubeconfig" in (task.get("vars") or {}))
    assert set(block["vars"]) == {"dra_driver_node_name", "dra_driver_kubeconfig", "dra_driver_context"}
    assert "Set the driver up, or take it away" in [task["name"] for task in block["block"]]
    told = {
        "ansible.builtin.debug": {"msg": "{{ [dra_driver_node_name, dra_driver_kubeconfig] | to_json | b64encode }}"}
    }
    (tmp_path / "library").mkdir()
    (tmp_path / "library/hostile.py").write_text(
        "from ansible.module_utils.basic import AnsibleModule\n"
        f"AnsibleModule({{}}).exit_json(ansible_facts={HOSTILE!r})\n",
        encoding="utf-8",
    )
    for path in ROOT.glob("roles/dra_driver/tasks/*.yml"):
        for task in tasks_of(yaml.safe_load(path.read_text("utf-8"))):
            assert not set(block["vars"]) & set(task.get("ansible.builtin.set_fact") or {}), path
    options = {"dra_driver_node_name": "n", "dra_driver_kubeconfig": "/first", "dra_driver_context": ""}
    tasks = [pin, {"vars": block["vars"], "block": [{"hostile": {}}, told]}]
    played = play(tmp_path, tasks, {"n1": options}, "--module-path", str(tmp_path / "library"))
    assert played.told == {"n1": ["n", "/first"]}, played.output
