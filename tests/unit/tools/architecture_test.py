# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that docs/architecture.md lists the directories with code, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAP = ROOT / "docs/architecture.md"


def listed() -> set[str]:
    """Return the directories of the map, by indentation, relative to the repository."""
    (block,) = re.findall(r"(?s)## Directories.*?```\n(.*?)```", MAP.read_text(encoding="utf-8"))
    found: set[str] = set()
    parents: list[tuple[int, str]] = []
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip())
        while parents and parents[-1][0] >= indent:
            parents.pop()
        names = re.match(r"\s*((?:[\w./]+/\s*)+)", line)
        assert names is not None, line
        for name in names.group(1).split():
            path = "/".join([*(parent for _, parent in parents), name.rstrip("/")])
            found.add(path)
        parents.append((indent, names.group(1).split()[0].rstrip("/")))
    return found


@pytest.mark.parametrize("root", ["plugins", "roles/dra_driver/files/dra_driver"])
def test_map_has_every_directory_with_code(root: str) -> None:
    there = {str(path.parent.relative_to(ROOT)) for path in (ROOT / root).rglob("*.py")}
    below = {path for path in listed() if path == root or path.startswith(f"{root}/")}
    assert there <= below, there - below


def test_directories_of_the_map_exist() -> None:
    assert not [path for path in listed() if not (ROOT / path).is_dir()]
    assert len(listed()) > 50
