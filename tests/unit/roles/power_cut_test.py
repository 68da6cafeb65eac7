# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Power cuts after the role python_environment, and its next run: empty programs are not taken for complete ones.

The role installs on ext4 in an image file. A copy of the image, made while the file system is mounted, is the disk after a power cut.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils import _node
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System
from package_index import PASSWORD, USER, PackageIndex
from python_environment_test import VERSIONS, run

#: ext4 writes its journal every 5 s, and data that no program syncs after about 30 s.
JOURNAL_SECONDS = 8.0


def contents(directory: Path) -> dict[str, bytes]:
    """Return the content of each file but those in ``__pycache__``, by its path in the directory."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths if "__pycache__" not in path.parts}


@contextlib.contextmanager
def mounted(image: Path, directory: Path) -> Iterator[Path]:
    """Mount an image, and unmount it at the end."""
    directory.mkdir()
    subprocess.run(["mount", "-o", "loop", image, directory], check=True, timeout=60)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True, timeout=120)


@pytest.mark.prove
def test_programs_after_a_power_cut_are_those_of_the_stamp(tmp_path: Path) -> None:
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(512 * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=60)
    with mounted(image, tmp_path / "node") as node, PackageIndex(VERSIONS) as index:
        settings = {
            "python_environment_index_url": f"http://{USER}:{PASSWORD}@{index.address}/simple",
            "python_environment_root": str(node / "opt"),
            "python_environment_require_hashes": False,
        }
        done = run(tmp_path, settings)
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.copyfile(image, tmp_path / "disk-0")
        time.sleep(JOURNAL_SECONDS)
        shutil.copyfile(image, tmp_path / "disk-1")
        links = [(node / "opt" / name).readlink() for name in ("current", "venv")]
        written = {link: contents(node / "opt" / link) for link in links}
    for number in range(2):
        with mounted(tmp_path / f"disk-{number}", tmp_path / f"cut-{number}") as node:
            found = _node.ask_root(System(), str(node / "opt"))
            assert [found["releases"], found["environments"]] == [[link.name] for link in links]
            assert {link: contents(node / "opt" / link) for link in links} == written


@pytest.mark.prove
def test_next_run_installs_emptied_programs_again(tmp_path: Path) -> None:
    with PackageIndex(VERSIONS) as index:
        settings = {
            "python_environment_index_url": f"http://{USER}:{PASSWORD}@{index.address}/simple",
            "python_environment_require_hashes": False,
        }
        first = run(tmp_path, settings)
        assert first.returncode == 0, first.stdout + first.stderr
        release = (tmp_path / "opt/current").resolve()
        written = contents(release)
        for directory in (release, (tmp_path / "opt/venv").resolve()):
            for path in directory.rglob("*.py"):
                path.write_bytes(b"")
        told = run(tmp_path, settings, "--check")
        assert re.search(r"changed=[1-9].*failed=0", told.stdout), told.stdout
        second = run(tmp_path, settings)
        assert second.returncode == 0, second.stdout + second.stderr
        third = run(tmp_path, settings)
    assert contents(release) == written
    program = tmp_path / "opt/venv/bin/python"
    imported = [program, "-c", "import dra_driver; print(dra_driver.__version__)"]
    answer = subprocess.run(imported, env={"PYTHONPATH": str(release)}, capture_output=True, text=True, check=True)
    assert answer.stdout.strip()
    assert re.search(r"changed=0 .*failed=0", third.stdout), third.stdout
