# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The programs of a release import nothing from the working directory or from PYTHONPATH."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import dra_driver
import pytest

RUN = Path(dra_driver.__path__[0]) / "run.py"
PLANTED = "import sys\nsys.stderr.write('PLANTED CODE RAN')\nraise SystemExit(3)\n"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A directory with modules that Python's standard library and the driver import."""
    for name in ("argparse", "json", "asyncio", "logging", "yaml", "sitecustomize", "usercustomize", "dra_driver"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    return tmp_path


def run(planted: Path, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-IB", str(RUN), *arguments],
        cwd=planted,
        env={"PATH": "/usr/bin:/bin", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("module", ["dra_driver.cli", "dra_driver.controller"])
def test_planted_modules_in_the_working_directory_are_not_imported(planted: Path, module: str) -> None:
    done = run(planted, module, "--help")
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr
    assert "PLANTED" not in done.stderr


def test_planted_modules_on_pythonpath_are_not_imported(planted: Path) -> None:
    done = run(planted, "dra_driver.cli", "--help", environment={"PYTHONPATH": str(planted)})
    assert done.returncode == 0 and "PLANTED" not in done.stderr, done.stderr


def test_run_without_a_module_explains_its_use(planted: Path) -> None:
    done = run(planted)
    assert done.returncode == 1 and "usage: python -I run.py MODULE" in done.stderr


@pytest.mark.parametrize("earlier", ["dra_driver.core.ascend", "dra_driver.core.vendors.ascend"])
def test_unit_of_an_earlier_release_starts_the_moved_dcmi_helper(planted: Path, earlier: str) -> None:
    """``current`` names the new release before the role writes the new unit. In between, systemd can restart the helper."""
    done = run(planted, f"{earlier}.helper_server", "--help")
    assert done.returncode == 0 and "--concurrency" in done.stdout, done.stderr


def test_running_process_imports_from_the_release_that_it_was_started_from(tmp_path: Path) -> None:
    """The role switches the link ``current`` before it restarts the process: late imports come from the release of the start."""
    for name in ("old", "new"):
        package = tmp_path / name / "dra_driver"
        package.mkdir(parents=True)
        shutil.copy(RUN, package / "run.py")
        (package / "__init__.py").touch()
        (package / "late.py").write_text(f"RELEASE = {name!r}\n")
        (package / "started.py").write_text(
            "import sys\nprint('started', flush=True)\nsys.stdin.readline()\nfrom . import late\nprint(late.RELEASE, flush=True)\n"
        )
    current = tmp_path / "current"
    current.symlink_to("old")
    command = [sys.executable, "-IB", str(current / "dra_driver" / "run.py"), "dra_driver.started"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "started\n"
        current.unlink()
        current.symlink_to("new")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "old\n"
