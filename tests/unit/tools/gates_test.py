# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The check that pytest finds each test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import suites
from gates import collection_gate, gates

MARKED = "import pytest\n\n\n@pytest.mark.prove\ndef test_nothing():\n    pass\n"


def passes(directory: Path) -> bool:
    done = subprocess.run(
        collection_gate(directory).command, cwd=directory, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode in (0, 2), done.stdout + done.stderr
    return done.returncode == 0


def test_check_imports_tests_that_only_prove_runs(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED, encoding="utf-8")
    assert passes(tmp_path)
    (tmp_path / "test_marked.py").write_text(f"from pathlib import no_such_name\n{MARKED}", encoding="utf-8")
    assert not passes(tmp_path)


def test_check_is_one_of_the_gates(tmp_path: Path) -> None:
    assert collection_gate().name in [each.name for each in gates(tmp_path)]


def test_release_runs_ansible_lint_and_sanity_completely(tmp_path: Path) -> None:
    def commands(*names: str) -> dict[str, list[str]]:
        return {step.name: [str(word) for word in step.command] for step in suites.steps_of_suites(names, tmp_path)}

    quick, complete = commands("lint"), commands("lint", "release")
    assert quick["ansible-lint"][-2:] == ["--exclude", "molecule"] and complete["ansible-lint"][-1] == "--strict"
    assert "--skip-test" in quick["ansible-test sanity"] and "--skip-test" not in complete["ansible-test sanity"]
