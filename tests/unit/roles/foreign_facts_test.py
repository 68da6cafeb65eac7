# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A host cannot replace the operator's variables with facts: roles with the operator's permissions, or with controller files, stop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import ChainMap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.filter.foreign_facts import PREFIXES, foreign_facts
from controller_files_test import GUARD as OPERATOR_PATH
from controller_files_test import module_of as module_and_options
from controller_files_test import origins
from controller_files_test import tasks_of as tasks_in_scopes
from playing import play

ROOT = Path(__file__).resolve().parents[3]
GUARD = "Reject facts with names of variables"
#: Preflight has the guard among its problems. Classes and the simulator use no answers of hosts. The environment packs
#: the collection's own files.
WITHOUT = ("preflight", "device_classes", "simulator", "python_environment")
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
    "dra_driver/tasks/rollback.yml: Allow the previous driver to watch claims": "main.yml has pinned the names",
    "dra_driver/tasks/rollback_pod.yml: Restore the labels of the Node": "main.yml has pinned the names",
    "node_features/tasks/main.yml: Record the removal of the feature file": "it only removes a note of this collection",
}
#: Facts of dra_driver's tasks, which they use afterwards, with the names that main.yml has pinned.
PINNED = {"__dra_driver_pod_set_fact", "__dra_driver_pinned"}
PLAYBOOKS = sorted(path.name for path in ROOT.glob("playbooks/*.yml"))
BLOCKS = ("tasks", "block", "rescue", "always")
#: Tasks whose results are only printed.
SHOWN = ("Format the summary line of the node",)
#: Variables of Ansible that facts do not replace, and functions. The others begin with ansible_.
MAGIC = {"groups", "hostvars", "inventory_hostname", "now"}
HOSTILE = {"dra_driver_node_name": "victim", "accelerator_report": {}, "distribution": "Debian"}


def test_prefixes_are_those_of_the_roles() -> None:
    roles = {f"{path.parent.parent.name}_" for path in ROOT.glob("roles/*/tasks/main.yml")}
    # The simulator role writes nothing with the operator's permissions.
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
    """Yield each task of a file in order. A task in a block inherits delegate_to."""
    for task in value or []:
        for key in blocks:
            inherited = {"delegate_to": task["delegate_to"]} if "delegate_to" in task else {}
            yield from ({**inherited, **each} for each in tasks_of(task.get(key), blocks=blocks))
        if "block" not in task:
            yield task


def module_of(task: dict[str, Any]) -> str:
    return next((key for key in task if "." in key), "")


def acts_on_controller(task: dict[str, Any]) -> bool:
    """Return whether a task writes with the operator's permissions, or runs a program or a module on the controller."""
    module = module_of(task)
    options = task[module] if module and isinstance(task[module], dict) else {}
    if task.get("delegate_to") != "localhost" or module == "dra.accelerators.cluster_info":
        return False
    return "state" in options or module.startswith("dra.accelerators.") or module == "ansible.builtin.command"


def role_files() -> list[Path]:
    return [path for path in sorted(ROOT.glob("roles/*/tasks/*.yml")) if path.parents[1].name not in WITHOUT]


def test_roles_that_use_the_operators_rights_have_the_guard() -> None:
    acting, guarded = set(), set()
    for path in role_files():
        for task in tasks_of(yaml.safe_load(path.read_text("utf-8"))):
            acting |= {path.parents[1].name} if acts_on_controller(task) else set()
            guarded |= {path.parents[1].name} if task.get("name") == GUARD else set()
    assert acting and acting <= guarded


def test_no_task_acts_on_the_controller_after_an_answer_without_a_guard() -> None:
    """Between a host's answer and a write with the operator's permissions there is the guard, or each host has named its node."""
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
    """The remedy in the error: with inject_facts_as_vars=false the facts stay in a cache, and are no variables."""
    document = yaml.safe_load((ROOT / "roles/dra_driver/tasks/main.yml").read_text("utf-8"))
    guard = next(task for task in tasks_of(document) if task.get("name") == GUARD)
    cached = {"ansible.builtin.set_fact": {"dra_driver_node_name": "victim", "cacheable": True}}
    monkeypatch.setenv("ANSIBLE_INJECT_FACT_VARS", "true")
    assert "dra_driver_node_name" in play(tmp_path, [cached, guard], {"n1": {}}).failed["n1"]["msg"]
    monkeypatch.setenv("ANSIBLE_INJECT_FACT_VARS", "false")
    played = play(tmp_path, [cached, guard], {"n1": {}})
    assert played.status == 0, played.output


def test_pinned_names_end_with_the_role(tmp_path: Path) -> None:
    """A later play can name another cluster: facts that a set_fact leaves with these names would override its variables."""
    document = yaml.safe_load((ROOT / "roles/dra_driver/tasks/main.yml").read_text("utf-8"))
    pin = next(task for task in document if "__dra_driver_pinned" in (task.get("ansible.builtin.set_fact") or {}))
    (block,) = (task for task in document if "dra_driver_kubeconfig" in (task.get("vars") or {}))
    assert set(block["vars"]) == {"dra_driver_node_name", "dra_driver_kubeconfig", "dra_driver_context"}
    assert "Install or remove the driver" in [task["name"] for task in block["block"]]
    reported = {
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
    tasks = [pin, {"vars": block["vars"], "block": [{"hostile": {}}, reported]}]
    played = play(tmp_path, tasks, {"n1": options}, "--module-path", str(tmp_path / "library"))
    assert played.messages == {"n1": ["n", "/first"]}, played.output


def steps_of(
    items: Any, scope: ChainMap[str, Any], around: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], ChainMap[str, Any]]]:
    """Yield the tasks of a playbook in order, including those of imported files, each with its outer variables and defaults."""
    for item in items or ():
        loop = {(item.get("loop_control") or {}).get("loop_var", "item"): item["loop"]} if "loop" in item else {}
        own = scope.new_child({**(item.get("vars") or {}), **loop})
        outer = {**around, **{key: item[key] for key in ("delegate_to", "module_defaults") if key in item}}
        module, options = module_and_options(item)
        # A play on localhost does not get facts of other hosts.
        inner = [item[key] if item.get("hosts") != "localhost" else [] for key in BLOCKS if key in item]
        if module in ("import_tasks", "include_tasks") and "{{" not in str(options):
            path = next(ROOT.glob(f"playbooks/**/{Path(options).name}"))
            inner = [yaml.safe_load(path.read_text("utf-8"))]
        # The variables of a host can choose the number of hosts of a batch.
        if "hostvars" in str(item.get("serial")):
            yield {"name": f"{item['name']}: serial", "ansible.builtin.set_fact": item["serial"]}, own
        for each in inner:
            yield from steps_of(each, own, outer)
        if not inner:
            yield {**outer, **item}, own


def asks_hosts(module: str, options: Any) -> bool:
    """Return whether hosts answer a task. The needs of a bundle come from the inventory only."""
    return options.get("tasks_from") != "needs" if module == "include_role" else module not in CONTROLLER_ACTIONS


@cache
def set_by_tasks() -> set[str]:
    """Return the variables that tasks of the playbooks set, which facts do not replace."""
    names = set(MAGIC)
    for path in ROOT.glob("playbooks/**/*.yml"):
        for task, _scope in tasks_in_scopes(yaml.safe_load(path.read_text("utf-8")), {}):
            names |= {task["register"]} if "register" in task else set()
            names |= set(task.get("ansible.builtin.set_fact") or ())
    return names


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_playbooks_use_no_variable_that_a_fact_replaces_after_an_answer(name: str) -> None:
    """Between a host's answer and a task with the operator's permissions there is the guard, or the task uses only variables that tasks have set."""
    answered, found, known = "", [], set_by_tasks()
    document = yaml.safe_load((ROOT / "playbooks" / name).read_text("utf-8"))
    for task, scope in steps_of(document, ChainMap(), {}):
        full = module_of(task)
        module, options = module_and_options(task)
        if task.get("name") == GUARD or options == "check_inventory.yml":
            answered = ""
        elif module == "set_fact" or (task.get("delegate_to") == "localhost" and module not in ("debug", "assert")):
            defaults = task.get("module_defaults") or {}
            used = [
                options,
                defaults.get(full),
                defaults.get("group/kubernetes.core.k8s") if full == "kubernetes.core.k8s" else None,
            ]
            names = {name for name in origins(used, scope) - known if not name.startswith("ansible_")}
            if answered and names and OPERATOR_PATH not in str(used) and task["name"] not in SHOWN:
                found.append(f"{task['name']} after {answered}: {', '.join(sorted(names))}")
        elif asks_hosts(module, options):
            answered = str(task.get("name"))
    assert found == []


@pytest.mark.prove
def test_playbooks_stop_at_facts_of_an_earlier_answer(tmp_path: Path) -> None:
    """Each playbook runs after an answer with hostile facts, as with a fact cache, and stops before it uses them."""
    (tmp_path / "hostile.py").write_text(
        "from ansible.module_utils.basic import AnsibleModule\n"
        f"AnsibleModule({{}}).exit_json(ansible_facts={{'accelerator_kubeconfig': '{tmp_path}/hostile'}})\n",
        encoding="utf-8",
    )
    answer = [{"hosts": "n1", "gather_facts": False, "tasks": [{"name": "Answer", "hostile": {}}]}]
    (tmp_path / "answer.yml").write_text(yaml.safe_dump(answer), encoding="utf-8")
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "accelerator_become": False}
    groups = ("accelerator_nodes", "accelerator_controllers", "accelerator_monitoring")
    inventory = {group: {"hosts": {"n1": host}} for group in groups}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    program = [
        Path(sys.executable).with_name("ansible-playbook"),
        "--module-path",
        tmp_path,
        "-i",
        tmp_path / "hosts.yml",
    ]
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local")}
    environment |= {"ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"), "KUBECONFIG": str(tmp_path / "operator")}
    runs = {}
    for name in PLAYBOOKS:
        path = ROOT / "playbooks" / name
        # A playbook on localhost alone, such as why.yml, does not get facts of other hosts.
        if any(part.get("hosts", "all") != "localhost" for part in yaml.safe_load(path.read_text("utf-8"))):
            runs[name] = subprocess.Popen(
                [*program, tmp_path / "answer.yml", path],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
    outputs = {name: run.communicate()[0] for name, run in runs.items()}
    assert len(outputs) > 10 and all(run.returncode != 0 for run in runs.values())
    for name, output in outputs.items():
        tasks = re.findall(r"^TASK \[(.*?)\]", output, re.MULTILINE)
        assert tasks[-1] == GUARD, f"{name}: {output}"
        assert set(tasks) == {"Answer", "Reject extra variables that only the playbooks set", GUARD}, (
            f"{name}: {output}"
        )
        assert (
            "n1 reports facts with names of variables" in output
            and "accelerator_kubeconfig. Examine the host." in output
        )
