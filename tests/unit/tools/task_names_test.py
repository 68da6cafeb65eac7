# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Tests refer to tasks and plays by name. Only long tests would otherwise notice a name that no playbook and no role has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
#: Positions of task names in the arguments of test functions.
ARGUMENTS = {"killed_at": (1,), "task_of": (1,), "index": (0,), "Case": (1, 2), "at": (0,)}
#: Module-level sequences of task names.
SEQUENCES = {"STEPS", "ON_NODE", "WRITE", "ASK"}
TITLE = re.compile(r"TASK \[(?:[\w.]+ : )?([^]{}*]+)\]")
#: Files whose strings are other names, with the reason.
OTHERS = {
    "tests/unit/tools/playbook_rules_test.py": "names of test tasks",
    "tests/unit/tools/task_names_test.py": "names of test tasks",
    "tests/oracles/fleet_plan_test.py": "pods",
    "tests/oracles/module_faults_test.py": "cases of modules",
    "tests/simulator/nvml_format_test.py": "products",
}


def names_of(value: Any) -> Iterator[str]:
    """Yield the names of the plays, blocks, and tasks of a document."""
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict):
            yield str(each.get("name", ""))
            for inner in each.values():
                yield from names_of(inner)


def known_names() -> set[str]:
    globs = ("playbooks/**/*.yml", "roles/*/tasks/**/*.yml", "roles/*/handlers/*.yml")
    paths = [path for pattern in globs for path in ROOT.glob(pattern)]
    return {name for path in paths for name in names_of(yaml.safe_load(path.read_text("utf-8")))}


def references(text: str) -> set[str]:
    """Return the names of tasks in a Python file."""
    tree = ast.parse(text)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def strings(node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Name) and node.id in constants:
            yield constants[node.id]
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            for each in node.elts:
                yield from strings(each)

    def is_name(node: ast.expr) -> bool:
        subscript = isinstance(node, ast.Subscript) and list(strings(node.slice)) == ["name"]
        return subscript or (isinstance(node, ast.Name) and node.id == "task")

    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(TITLE.findall(node.value))
        elif isinstance(node, ast.Compare) and any(map(is_name, (node.left, *node.comparators))):
            found |= {each for side in (node.left, *node.comparators) for each in strings(side)}
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for position in ARGUMENTS.get(function, ()):
                found |= {each for argument in node.args[position : position + 1] for each in strings(argument)}
        elif isinstance(node, ast.Assign) and SEQUENCES & {getattr(target, "id", "") for target in node.targets}:
            found |= set(strings(node.value))
    # Names of tasks have a space and begin with a capital letter. Names of objects have none.
    return {each for each in found if " " in each and each[:1].isupper()}


def test_tests_refer_to_existing_tasks() -> None:
    known = known_names()
    unknown = [
        f"{path.relative_to(ROOT)}: {name!r}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if str(path.relative_to(ROOT)) not in OTHERS
        for name in sorted(references(path.read_text("utf-8")) - known)
    ]
    assert not unknown, "No playbook and no role has a task of this name:\n" + "\n".join(unknown)


@pytest.mark.parametrize(
    "text",
    [
        'said == "TASK [Write it]"',
        'found = f"TASK [role : Write it] {rest}"',
        '[each for each in tasks if each["name"] == "Write it"]',
        '[each for each in tasks if each["name"] in ("Write it", "x")]',
        'STEP = "Write it"\nkilled_at(cluster, STEP)',
        'STEP = "Write it"\nSTEPS = (STEP,)',
        'STEP = "Write it"\ncluster.at_step = lambda task: task == STEP',
        'Case(FAULT, "Write it", "Write it")',
    ],
)
def test_references_are_found(text: str) -> None:
    assert references(text) == {"Write it"}
    assert not references(text.replace("Write it", "write-it"))
