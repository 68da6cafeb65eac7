# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A cluster test applies each file of examples/, so that users copy only tested files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file())
TESTS = [path for directory in ("cluster", "prove") for path in sorted((ROOT / "tests" / directory).glob("*.py"))]
CLUSTER = {path.name: path.read_text(encoding="utf-8") for path in TESTS}


def those_who_name(name: str) -> list[str]:
    """Return the cluster test files that contain a file's name in quotes."""
    pattern = re.compile(rf"""["']{re.escape(name)}["']""")
    return [path for path, text in CLUSTER.items() if pattern.search(text)]


def test_examples_exist_and_parts_of_names_do_not_count() -> None:
    assert len(EXAMPLES) > 10 and "shares.yaml" in EXAMPLES
    assert those_who_name("iommufd.yaml") == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_is_tested_on_the_cluster(name: str) -> None:
    assert those_who_name(name), f"no test on a cluster applies examples/{name}"
