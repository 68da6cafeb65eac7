# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Power cuts after the role python_environment, and its next run: empty programs do not count as complete.

The role installs on a file system in an image, see tests/prove/power_cuts.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._host import node_facts
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from package_index import PASSWORD, USER, PackageIndex
from python_environment_test import VERSIONS, run

from tests.prove.power_cuts import KINDS, ROOT, Disk

SPEC = importlib.util.spec_from_file_location("stamp", ROOT / "roles/python_environment/files/stamp.py")
assert SPEC is not None and SPEC.loader is not None
stamp = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stamp)


def contents(directory: Path) -> dict[str, bytes]:
    """Return the content of each file by its path in the directory, without ``__pycache__``."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths if "__pycache__" not in path.parts}


@pytest.mark.prove
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_programs_after_a_power_cut_are_those_of_the_stamp(tmp_path: Path, kind: str) -> None:
    disk = Disk(tmp_path, kind)
    with disk.mounted() as node, PackageIndex(VERSIONS) as index:
        settings = {
            "python_environment_index_url": f"http://{USER}:{PASSWORD}@{index.address}/simple",
            "python_environment_root": str(node / "opt"),
            "python_environment_require_hashes": False,
        }
        done = run(tmp_path, settings)
        assert done.returncode == 0, done.stdout + done.stderr
        disk.cut(0)
        disk.commit_journal()
        disk.cut(1)
        links = [(node / "opt" / name).readlink() for name in ("current", "venv")]
        written = {link: contents(node / "opt" / link) for link in links}
        for number in range(2):
            with disk.after(number) as after:
                found = node_facts.read_program_facts(System(), str(after / "opt"))
                assert [found["releases"], found["environments"]] == [[link.name] for link in links]
                assert {link: contents(after / "opt" / link) for link in links} == written


@pytest.mark.prove
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_power_cut_at_each_step_leaves_no_stamp_without_its_programs(tmp_path: Path, kind: str) -> None:
    disk = Disk(tmp_path, kind)

    def unpack(release: Path) -> None:
        release.mkdir(parents=True)
        for number in range(5):
            (release / f"program-{number}.py").write_text(f"print({number})\n" * 100)
        stamp.write_stamp(release)
        (release.parent / "current").symlink_to(release.name)

    with disk.mounted() as node:
        steps = []
        for step, after in disk.cut_at_each_step(lambda: unpack(node / "releases/2")):
            steps.append(step)
            release = after / "releases/2"
            assert not (after / "releases/current").is_symlink() or (release / "complete").exists(), step
            if (release / "complete").exists():
                sizes = json.loads((release / "complete").read_text())["sizes"]
                assert sizes == {path.name: path.stat().st_size for path in release.glob("*.py")}, step
                assert len(sizes) == 5 and all(sizes.values())
        assert any("os.symlink" in step for step in steps)


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
        reported = run(tmp_path, settings, "--check")
        assert re.search(r"changed=[1-9].*failed=0", reported.stdout), reported.stdout
        second = run(tmp_path, settings)
        assert second.returncode == 0, second.stdout + second.stderr
        third = run(tmp_path, settings)
    assert contents(release) == written
    program = tmp_path / "opt/venv/bin/python"
    imported = [program, "-c", "import dra_driver; print(dra_driver.__version__)"]
    answer = subprocess.run(imported, env={"PYTHONPATH": str(release)}, capture_output=True, text=True, check=True)
    assert answer.stdout.strip()
    assert re.search(r"changed=0 .*failed=0", third.stdout), third.stdout
