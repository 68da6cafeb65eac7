# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that imports point one way: modules, topic directories, core; and that no files import each other in a cycle.

The core has two names, one in the collection and one in the daemons' package, so a tool that knows one name for each
file cannot check this.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
UTILS = ROOT / "plugins/module_utils"
DAEMONS = ROOT / "roles/dra_driver/files/dra_driver"
#: The names under which files are imported, and their directories. The first match counts.
NAMES = {
    "dra_driver.core": UTILS / "core",
    "dra_driver": DAEMONS,
    "ansible_collections.dra.accelerators.plugins": ROOT / "plugins",
}
FILES = sorted({*UTILS.rglob("*.py"), *DAEMONS.rglob("*.py")})


def directory_of(name: str) -> Path | None:
    """Return the path of a module or a package by its full name, without a suffix. None if it is not of this project."""
    for prefix, directory in NAMES.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return directory.joinpath(*name[len(prefix) :].split(".")[1:])
    return None


def imported(path: Path) -> Iterator[Path]:
    """Yield the files of this project that a file imports, also for type checks only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            if base.is_relative_to(DAEMONS / "core"):
                base = UTILS / base.relative_to(DAEMONS)
        else:
            found = directory_of(node.module or "")
            if found is None:
                continue
            base = found
        for name in node.names:
            for each in (base / f"{name.name}.py", base.with_suffix(".py")):
                if each.is_file():
                    yield each
                    break


GRAPH = {path: {each for each in imported(path) if each != path} for path in FILES}


def test_imports_are_found() -> None:
    assert sum(map(len, GRAPH.values())) > 1000
    service, operations = DAEMONS / "claims/service.py", DAEMONS / "claims/operations.py"
    assert operations in GRAPH[service] and service not in GRAPH[operations]
    assert UTILS / "core/errors.py" in GRAPH[operations]


def test_no_files_import_each_other_in_a_cycle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(path.relative_to(ROOT)) for path in error.args[1]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    """The core imports the core. Topic directories import no module. The daemons import themselves and the core."""
    if path.is_relative_to(UTILS / "core"):
        allowed: tuple[Path, ...] = (UTILS / "core",)
    elif path.is_relative_to(UTILS):
        allowed = (UTILS,)
    else:
        allowed = (DAEMONS, UTILS / "core")
    assert not [each for each in GRAPH[path] if not any(each.is_relative_to(folder) for folder in allowed)]
