# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The list of files in the driver's state directory has all files that any program writes there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from dra_driver.core.store.state_files import LOCK, LOCKS, OWN_NAMES, STATE
from dra_driver.kubelet.sockets import private_path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("roles/dra_driver/files/dra_driver", "plugins/module_utils/core", "plugins/modules")
SUFFIXES = ("", "-0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f")


def constants(tree: ast.Module) -> dict[str, str]:
    """Return the named texts of a module."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def parts(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a path in an expression such as ``f"{directory}/NAME"``, ``Path(directory, NAME)`` or ``Path(directory) / NAME``."""
    if isinstance(node, ast.JoinedStr):
        first, *rest = node.values
        if isinstance(first, ast.FormattedValue) and rest and ast.unparse(rest[0]).startswith("'/"):
            return [first.value, ast.JoinedStr(rest)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Path":
        return list(node.args)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [*parts(node.left), node.right]
    return []


def text(node: ast.AST, names: dict[str, str], suffix: str) -> str:
    """Return the text of a part, or "" if it is known only at run time, such as a claim's UID."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return text(node.value, names, suffix)
    if isinstance(node, ast.JoinedStr):
        found = [text(each, names, suffix) for each in node.values]
        return "".join(found) if all(found) or "suffix" in ast.unparse(node) else ""
    return names.get(ast.unparse(node), suffix if ast.unparse(node) == "suffix" else "")


def written(suffix: str) -> Iterator[tuple[str, str]]:
    """Yield the place in the source and the name of each file in the state directory."""
    for file in sorted(path for directory in FOLDERS for path in (ROOT / directory).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = constants(tree)
        for node in ast.walk(tree):
            first, *rest = parts(node) or [ast.Constant("")]
            if rest and re.fullmatch(r"(self\._?|state_)?directory", ast.unparse(first)):
                name = text(rest[0], names, suffix).strip("/")
                if name:
                    yield f"{file.name}:{node.lineno}", name  # type: ignore[attr-defined]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_file_that_the_source_names_is_in_the_lists(suffix: str) -> None:
    found = set(written(suffix))
    names = {name for _place, name in found}
    assert {LOCKS, "state.db", "repairs", "metadata", "machine.json", "handed-over", f"dra{suffix}.sock"} <= names
    assert [each for each in found if not OWN_NAMES.fullmatch(each[1]) and not OWN_NAMES.fullmatch(f"{each[1]}/")] == []
    state = [each for each in found if each[1] not in (LOCK, LOCKS) and not each[1].endswith(".sock")]
    assert [each for each in state if not STATE.fullmatch(each[1])] == []


def test_files_of_killed_writers_are_in_the_lists() -> None:
    documents = {name for _place, name in written("") if name.endswith(".json")}
    assert len(documents) >= 6
    for name in documents:
        for left in (f".{name}.1234-5.tmp", f"{name}.damaged"):
            assert OWN_NAMES.fullmatch(left) and STATE.fullmatch(left), left
    assert OWN_NAMES.fullmatch(Path(private_path("/state/dra.sock")).name)


@pytest.mark.parametrize("name", [LOCK, f"{LOCKS}/", "dra.sock", "vendor.txt", "checkpoint.json"])
def test_locks_sockets_and_other_files_are_no_state(name: str) -> None:
    assert not STATE.fullmatch(name) and not STATE.fullmatch(name.rstrip("/"))
