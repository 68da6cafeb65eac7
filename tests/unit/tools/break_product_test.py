# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The list of breaks is up to date: each can be made in this checkout, and the README of the tests names all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from break_product import BREAKS, ROOT, Break


def test_every_break_applies_to_the_checkout() -> None:
    assert len(BREAKS) >= 10
    assert [problem for each in BREAKS if (problem := each.problem(ROOT))] == []
    assert all(each.text != each.replacement for each in BREAKS)
    assert len({each.name for each in BREAKS}) == len(BREAKS)


def test_readme_lists_every_break() -> None:
    readme = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    for each in BREAKS:
        assert f"| `{each.name}` | {each.fault} | `{each.file}` |" in readme


@pytest.mark.parametrize(("content", "count"), [("one two", "0 times"), ("three three", "2 times")])
def test_inapplicable_break_is_reported(tmp_path: Path, content: str, count: str) -> None:
    (tmp_path / "file").write_text(content)
    made = Break("name", "what", "file", "three", "four", ())
    assert count in made.problem(tmp_path)
    assert "0 times" in Break("name", "what", "missing", "three", "four", ()).problem(tmp_path)
    assert "does not exist" in Break("name", "what", "file", content, "", ("gone.py",)).problem(tmp_path)
