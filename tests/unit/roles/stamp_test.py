# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Releases and environments whose files differ from their stamp, as after a power cut, are not complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._host import node_facts
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

PROGRAM = Path(__file__).resolve().parents[3] / "roles/python_environment/files/stamp.py"
RELEASE = "0.1.0-1a2b3c4d"
ENVIRONMENT = "0123456789ab"


def stamp(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", PROGRAM, directory], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory with a release and an environment, both stamped."""
    release, environment = tmp_path / "releases" / RELEASE, tmp_path / "venvs" / ENVIRONMENT
    for path in (release / "dra_driver/cli.py", release / "dra_driver/__init__.py", environment / "bin/pip"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("print('hello')\n" if path.name != "__init__.py" else "")
    (environment / "bin/python").symlink_to("/usr/bin/python3")
    for directory in (release, environment):
        assert stamp(directory).returncode == 0
    return tmp_path


def complete(root: Path) -> tuple[list[str], list[str]]:
    found = node_facts.read_program_facts(System(), str(root))
    return found["releases"], found["environments"]


def test_files_that_match_their_stamp_are_complete(root: Path) -> None:
    assert complete(root) == ([RELEASE], [ENVIRONMENT])
    # Python writes there at the first import of the program.
    cache = root / "releases" / RELEASE / "dra_driver/__pycache__"
    cache.mkdir()
    (cache / "cli.pyc").write_bytes(b"\0")
    (root / "releases" / RELEASE / "complete.new").write_text("of a killed run")
    assert complete(root) == ([RELEASE], [ENVIRONMENT])


@pytest.mark.parametrize("damage", ["emptied", "shortened", "missing"])
@pytest.mark.parametrize("name", ["dra_driver/cli.py", "complete"])
def test_release_with_a_damaged_file_is_not_complete(root: Path, name: str, damage: str) -> None:
    """A damaged release is not complete. An empty ``complete`` is also the stamp of an earlier version of the collection."""
    path = root / "releases" / RELEASE / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "emptied" else path.read_bytes()[:-2])
    assert complete(root) == ([], [ENVIRONMENT])


@pytest.mark.parametrize("content", ["[]", "{}", '{"sizes": {}}', '{"sizes": []}', '{"sizes": 1}', "null", "\0\0\0"])
def test_stamp_with_other_content_does_not_count(root: Path, content: str) -> None:
    (root / "releases" / RELEASE / "complete").write_text(content)
    assert complete(root) == ([], [ENVIRONMENT])


def test_environment_with_an_emptied_program_is_not_complete(root: Path) -> None:
    (root / "venvs" / ENVIRONMENT / "bin/pip").write_bytes(b"")
    assert complete(root) == ([RELEASE], [])


def test_stamp_of_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    done = stamp(tmp_path / "nowhere")
    assert done.returncode == 1
    assert "Cannot write" in done.stderr and "nowhere" in done.stderr
