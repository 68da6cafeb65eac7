# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Unpack packages of the distribution into the cache, for tests that run their programs. Nothing is installed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = Path("/etc/debian_version")
FETCH = "apt-get download -q {package} || (apt-get update -q && apt-get download -q {package})"
#: Downloads and unpacks the packages that apt would install on this machine, with their dependencies.
FETCH_WITH_DEPENDENCIES = """
plan() {{ apt-get -s --no-install-recommends install {names} | awk '/^Inst/ {{ print $2 }}'; }}
found=$(plan) && [ -n "$found" ] && apt-get download -q $found || (apt-get update -q && apt-get download -q $(plan))
mkdir root
for package in *.deb; do dpkg-deb -x "$package" root; done
rm *.deb
"""


def programs(package: str) -> Path:
    """Return the directory with a package's programs. Downloads the package unless it is in the cache."""
    directory = _cache_directory(package, (package, FETCH, SYSTEM.read_text()))
    with _locked(directory):
        if not (directory / "complete").exists():
            _create(directory, FETCH.format(package=package) + f" && dpkg-deb -x {package}_*.deb root && rm *.deb")
    return directory / "root/usr/bin"


def unpacked_packages(names: str) -> Path:
    """Return a directory with the files of packages and of their dependencies that this machine lacks.

    ``names``: the packages, separated by spaces. Downloads the packages unless they are in the cache.
    """
    directory = _cache_directory(names.split()[0] + "-with-needs", (names, FETCH_WITH_DEPENDENCIES, SYSTEM.read_text()))
    with _locked(directory):
        if not (directory / "complete").exists():
            _create(directory, FETCH_WITH_DEPENDENCIES.format(names=names))
    return directory / "root"


def _cache_directory(name: str, parts: tuple[str, ...]) -> Path:
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    cache = subprocess.run([ROOT / "tests/tools/cache"], capture_output=True, text=True, check=True).stdout.strip()
    directory = Path(cache) / "oracles" / f"{name}-{key}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _create(directory: Path, script: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    done = subprocess.run(["sh", "-ec", script], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (directory / "complete").touch()
