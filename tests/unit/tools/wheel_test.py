# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The daemons' distribution: one complete package from two directories, with the collection's version."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {"roles/dra_driver/files/dra_driver": "dra_driver", "plugins/module_utils/core": "dra_driver/core"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = directory.glob("*.whl")
    return made


def test_wheel_contains_both_directories_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{package}/{path.relative_to(ROOT / directory)}"
        for directory, package in FOLDERS.items()
        for path in (ROOT / directory).rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name for name in names if name.endswith(".py")} == expected
    assert {Path(name).suffix for name in names} <= {".py", ".pyi", ".proto", ".typed"}


def test_directories_with_modules_are_packages() -> None:
    for directory in FOLDERS:
        assert [path for path in (ROOT / directory).rglob("*.py") if not (path.parent / "__init__.py").exists()] == []


def test_version_is_that_of_the_collection(wheel: Path) -> None:
    version = yaml.safe_load((ROOT / "galaxy.yml").read_text(encoding="utf-8"))["version"]
    assert wheel.name == f"dra_accelerators-{version}-py3-none-any.whl"


def test_core_is_found_in_the_package(wheel: Path) -> None:
    program = "import dra_driver.core.dra.resource_slices as slices; print(slices.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {program}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == f"{wheel}/dra_driver/core/dra/resource_slices.py"
