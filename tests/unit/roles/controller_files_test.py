# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A host cannot choose files of the Ansible controller that roles and playbooks read, neither with a fact nor with another answer.

Files of a kubeconfig count as well, for tasks on the controller.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment, nodes
from playing import play

ROOT = Path(__file__).resolve().parents[3]
GUARD = "dra.accelerators.operator_path"
#: Lookups whose terms name files of the controller.
READERS = ("csvfile", "file", "fileglob", "first_found", "ini", "lines", "pipe", "template", "unvault", "url")
#: Modules that read files of the controller, with the option that names them.
COPIERS = {"assemble": "src", "copy": "src", "patch": "src", "script": "cmd", "template": "src", "unarchive": "src"}
INCLUDERS = ("import_tasks", "include_tasks", "include_vars")
#: Variables of Ansible that facts do not replace, and functions.
MAGIC = {"role_path", "playbook_dir", "omit", "lookup", "query", "q"}
HARMLESS = {
    "roles/nvidia_driver/tasks/needs.yml: Read the distribution's package names": "only platforms of a list",
    "roles/nvidia_driver/tasks/apply.yml: Read the distribution's package names": "only platforms of a list, by the task before",
}
#: Block variables of main.yml, which has pinned them, in the tasks that it includes.
PINNED: dict[str, dict[str, Any]] = {"roles/dra_driver/tasks": {"dra_driver_kubeconfig": None}}
#: A fact of the playbooks. They set it before the first answer of the host, or after the guard (foreign_facts_test.py).
PLAYBOOKS = {"accelerator_api": None}


@cache
def parse(text: str) -> nodes.Template:
    """Return the syntax tree of a template, or an empty one for a plain string."""
    return Environment(autoescape=True).parse(text if "{{" in text or "{%" in text else "")


def called(node: nodes.Node) -> str:
    """Return the name of the lookup that a node calls, or an empty string."""
    if (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Name)
        and node.node.name in ("lookup", "query", "q")
    ):
        return str(node.args[0].value) if isinstance(node.args[0], nodes.Const) else "?"
    return ""


def names_in(node: nodes.Node) -> set[str]:
    """Return the variables in a path. A condition and a key only select one of several paths."""
    if called(node) == GUARD:
        return set()
    if isinstance(node, nodes.Name):
        return {node.name} - MAGIC
    parts: list[nodes.Node] = list(node.iter_child_nodes())
    if isinstance(node, nodes.CondExpr):
        parts = [part for part in (node.expr1, node.expr2) if part is not None]
    elif isinstance(node, nodes.Getitem):
        parts = [node.node]
    elif isinstance(node, nodes.Filter) and node.name == "map" and node.args and isinstance(node.args[0], nodes.Const):
        parts = node.args[1:] if node.args[0].value == "extract" else parts
    return {name for part in parts for name in names_in(part)}


def names_of_loops(node: nodes.Node) -> set[str]:
    """Return the variables that the loops of a template set."""
    return {name.name for name in node.find_all(nodes.Name) if name.ctx == "store"}


def strings_in(value: Any) -> Iterator[str]:
    """Yield each string of a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from strings_in(each)


def read_paths(value: Any) -> Iterator[nodes.Node]:
    """Yield the terms of all lookups in a value that read files."""
    for text in strings_in(value):
        for call in parse(text).find_all(nodes.Call):
            if called(call).rpartition(".")[2] in (*READERS, ""):
                yield from call.args[1:] if called(call) else ()


def tasks_of(tasks: Any, scope: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], ChainMap[str, Any]]]:
    """Yield each task of a file with the variables that it and its blocks and its play set."""
    for task in tasks or ():
        loop = {(task.get("loop_control") or {}).get("loop_var", "item"): task["loop"]} if "loop" in task else {}
        own = ChainMap({**(task.get("vars") or {}), **loop}, scope)  # type: ignore[arg-type]
        inner = [key for key in ("block", "rescue", "always", "tasks") if key in task]
        for key in inner:
            for each, variables in tasks_of(task[key], own):
                inherited = {name: task[name] for name in ("delegate_to", "module_defaults") if name in task}
                yield {**inherited, **each}, variables
        if not inner:
            yield task, own


def module_of(task: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of a task's module without its collection, and its options."""
    name = next((key for key in task if key.count(".") == 2), "")
    return name.rpartition(".")[2], task.get(name)


def paths_of(task: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the expressions in a task that name files of the controller: strings, and terms of lookups."""
    module, options = module_of(task)
    if module in INCLUDERS:
        yield options if isinstance(options, str) else options.get("file", "")
    if module in COPIERS and isinstance(options, Mapping) and not options.get("remote_src"):
        path = options.get(COPIERS[module], "")
        yield path.split()[0] if module == "script" else path
    if task.get("delegate_to") == "localhost":
        for each in (options, *(task.get("module_defaults") or {}).values()):
            yield each.get("kubeconfig", "") if isinstance(each, Mapping) else ""
    yield from read_paths(task)


def origins(path: Any, variables: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the variables of a path that neither the role nor its tasks set. ``None`` is a value that no host has returned."""
    trees = [path] if isinstance(path, nodes.Node) else map(parse, strings_in(path))
    found: set[str] = set()
    for name in {name for tree in trees for name in names_in(tree) - names_of_loops(tree)} - seen:
        if name not in variables:
            found.add(name)
        elif variables[name] is not None:
            found |= origins(variables[name], variables, seen | {name})
    return found


def unguarded(files: list[Path], variables: Mapping[str, Any]) -> list[str]:
    """Return the tasks and files of a role or of the playbooks whose paths a host can choose."""
    documents = {file: yaml.safe_load(file.read_text("utf-8")) for file in files}
    own: dict[str, Any] = {}
    for document in documents.values():
        for task, _scope in tasks_of(document, {}) if isinstance(document, list) else ():
            module, options = module_of(task)
            own |= options if module == "set_fact" else {}
            if task.get("delegate_to") == "localhost":
                own |= dict.fromkeys([task["register"]] if "register" in task else [])
            # It returns the registered result of another host's task.
            own |= (
                {task["register"]: "{{ " + options["name"] + " }}"}
                if module == "host_answer" and "register" in task
                else {}
            )
    own |= variables
    found = []
    for file, document in documents.items():
        paths = [(file.name, path, own) for path in read_paths(document)] if isinstance(document, dict) else []
        if isinstance(document, list):
            for task, scope in tasks_of(document, own):
                pinned = PINNED.get(str(file.relative_to(ROOT).parent), {}) if file.name != "main.yml" else {}
                paths += [(str(task.get("name")), path, scope.new_child(pinned)) for path in paths_of(task)]
        for name, path, scope in paths:
            if chosen := origins(path, scope):
                found.append(f"{file.relative_to(ROOT)}: {name} (by {', '.join(sorted(chosen))})")
    return found


# The role simulator is for tests only.
@pytest.mark.parametrize("role", sorted({path.parent.name for path in ROOT.glob("roles/*/tasks")} - {"simulator"}))
def test_files_of_the_controller_that_a_role_reads_are_the_operators_choice(role: str) -> None:
    directory = ROOT / "roles" / role
    variables: dict[str, Any] = {}
    for file in directory.glob("vars/*.yml"):
        for name, value in (yaml.safe_load(file.read_text("utf-8")) or {}).items():
            variables.setdefault(name, []).append(value)
    files = [
        file for part in ("tasks", "handlers", "vars", "defaults") for file in sorted(directory.glob(f"{part}/*.yml"))
    ]
    found = unguarded(files, variables)
    assert [each for each in found if each.split(" (by ")[0] not in HARMLESS] == []
    assert len(found) == len([name for name in HARMLESS if name.startswith(f"roles/{role}/")])


def test_files_of_the_controller_that_playbooks_read_are_the_operators_choice() -> None:
    assert unguarded(sorted(ROOT.glob("playbooks/**/*.yml")), PLAYBOOKS) == []


def after_failures(tasks: Any, scope: Mapping[str, Any], *, is_after: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a file that run after the failure of a block, with the defaults of modules of their blocks."""
    for task in tasks or ():
        own = {**scope, **(task.get("module_defaults") or {})}
        for key in ("block", "rescue", "always", "tasks"):
            yield from after_failures(task.get(key), own, is_after=is_after or key in ("rescue", "always"))
        if is_after and not {"block", "rescue", "always"} & task.keys():
            yield {**task, "module_defaults": own}


def test_access_to_the_cluster_after_a_failure_does_not_depend_on_the_facts_of_the_host() -> None:
    """The guard fails for a host with facts instead of variables: the cleanup needs no such facts. Otherwise the taint of a drain would stay."""
    drain = "dra.accelerators.device_drain"
    files = [file for part in ("roles/*/tasks", "playbooks") for file in ROOT.glob(f"{part}/**/*.yml")]
    documents = {file: yaml.safe_load(file.read_text("utf-8")) for file in files}
    tasks = [(file, each) for file, document in documents.items() for each in after_failures(document, {})]
    drained = {file for file, each in tasks if drain in each}
    included = {file.parent / str(each.get("ansible.builtin.include_tasks")) for file, each in tasks if file in drained}
    tasks += [(file, each) for file in included & documents.keys() for each in documents[file]]
    assert {file.name for file in drained} == {"replace.yml", "drained.yml", "repartition_operation.yml"}
    for file, each in tasks:
        if file in drained | included:
            options = [each.get(drain), (each.get("module_defaults") or {}).get(drain), each.get("kubernetes.core.k8s")]
            assert GUARD not in str([option for option in options if option]), (file, each["name"])


@pytest.mark.parametrize(
    ("task", "chosen"),
    [
        ({"ansible.builtin.copy": {"src": "{{ a if b else 'c' }}"}}, "a"),
        ({"ansible.builtin.copy": {"src": "{{ a }}", "remote_src": True}}, ""),
        ({"ansible.builtin.copy": {"src": "{{ lookup('" + GUARD + "', a) }}"}}, ""),
        ({"ansible.builtin.debug": {"msg": ["{{ lookup('ansible.builtin.file', a ~ '/b') }}"]}}, "a"),
        (
            {"ansible.builtin.include_vars": "{{ each }}", "loop": "{{ a[b] }}", "loop_control": {"loop_var": "each"}},
            "a",
        ),
        ({"ansible.builtin.include_tasks": {"file": "{{ local }}.yml"}, "vars": {"local": "{{ a }}"}}, "a"),
    ],
)
def test_files_chosen_by_a_task_are_found(task: dict[str, Any], chosen: str) -> None:
    ((task, scope),) = tasks_of([task], {})
    assert {name for path in paths_of(task) for name in origins(path, scope)} == ({chosen} if chosen else set())


def test_facts_cannot_choose_a_file(tmp_path: Path) -> None:
    """The role nvidia_mig sends the content to the host, which could otherwise read files of the controller."""
    (tmp_path / "layout.yaml").write_text("secret: 1\n", "utf-8")
    named = yaml.safe_load((ROOT / "roles/nvidia_mig/vars/main.yml").read_text("utf-8"))["__nvidia_mig_file"]
    chosen = {"nvidia_mig_config_file": str(tmp_path / "layout.yaml")}
    reported = {
        "ansible.builtin.debug": {"msg": "{{ __nvidia_mig_file | to_json | b64encode }}"},
        "vars": {"__nvidia_mig_file": named},
    }
    assert play(tmp_path, [reported], {"n1": chosen}).messages == {"n1": {"secret": 1}}
    played = play(tmp_path, [{"ansible.builtin.set_fact": {**chosen, "cacheable": True}}, reported], {"n1": {}})
    assert played.status != 0 and "n1 reports facts with names of variables" in played.output
    assert "the operator's: nvidia_mig_config_file. Examine the host." in played.output
