# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The release that the role python_environment installs on a node: complete, named by its content, and the same on each node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "roles" / "python_environment" / "files" / "pack_release.py"


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Return a minimal collection."""
    root = tmp_path / "collection"
    daemons, core = root / "roles/dra_driver/files/dra_driver", root / "plugins/module_utils/core"
    for directory in (daemons / "api", core, daemons / "__pycache__"):
        directory.mkdir(parents=True)
    (daemons / "cli.py").write_text("print('hello')\n", encoding="utf-8")
    (daemons / "api" / "__init__.py").touch()
    (daemons / "__pycache__" / "cli.cpython-311.pyc").write_bytes(b"\0")
    (core / "__init__.py").write_text("VALUE = 1\n", encoding="utf-8")
    (root / "galaxy.yml").write_text("---\nnamespace: dra\nversion: 1.2.3\n", encoding="utf-8")
    return root


def pack(collection: Path, output: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--collection", collection, "--output", output],
        check=True,
        capture_output=True,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_archive_holds_daemons_and_core_without_a_stamp(collection: Path, tmp_path: Path) -> None:
    answer = pack(collection, tmp_path / "a.tar.gz")
    assert answer["name"] == f"1.2.3-{answer['digest'][:8]}"
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        files = [member for member in archive if member.isfile()]
    assert [member.name for member in files] == [
        "dra_driver/api/__init__.py",
        "dra_driver/cli.py",
        "dra_driver/core/__init__.py",
    ]
    assert {(member.uid, member.mtime, member.mode) for member in files} == {(0, 0, 0o644)}


def test_name_follows_the_content_alone(collection: Path, tmp_path: Path) -> None:
    first = pack(collection, tmp_path / "a.tar.gz")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(collection, elsewhere)
    os.utime(elsewhere / "roles/dra_driver/files/dra_driver/cli.py", (1, 1))
    (elsewhere / "roles/dra_driver/files/dra_driver/cli.py").chmod(0o700)
    assert pack(elsewhere, tmp_path / "b.tar.gz") == first
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    (elsewhere / "plugins/module_utils/core/__init__.py").write_text("VALUE = 2\n", encoding="utf-8")
    assert pack(elsewhere, tmp_path / "c.tar.gz")["name"] != first["name"]


def test_installed_collection_takes_its_version_from_the_manifest(collection: Path, tmp_path: Path) -> None:
    (collection / "galaxy.yml").unlink()
    (collection / "MANIFEST.json").write_text(json.dumps({"collection_info": {"version": "4.5.6"}}), encoding="utf-8")
    assert pack(collection, tmp_path / "a.tar.gz")["version"] == "4.5.6"


def test_missing_directory_is_named(collection: Path, tmp_path: Path) -> None:
    shutil.rmtree(collection / "plugins")
    done = subprocess.run(
        [sys.executable, PROGRAM, "--collection", collection, "--output", tmp_path / "a.tar.gz"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "plugins/module_utils/core is not there" in done.stderr


def test_this_collection_can_be_packed_and_imported(tmp_path: Path) -> None:
    pack(ROOT, tmp_path / "a.tar.gz")
    (tmp_path / "release").mkdir()
    subprocess.run(
        ["tar", "--extract", "--file", tmp_path / "a.tar.gz", "--directory", tmp_path / "release"], check=True
    )
    program = "import dra_driver, dra_driver.core; assert dra_driver.__version__ == dra_driver.core.__version__"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(tmp_path / "release")})
