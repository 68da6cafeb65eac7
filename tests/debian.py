# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Programs out of packages of the distribution, for tests: unpacked once and kept, installed nowhere."""

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
#: The packages that apt would install, one by one: unpacked they are together what it would make of this machine.
NEEDS = """
plan() {{ apt-get -s --no-install-recommends install {names} | awk '/^Inst/ {{ print $2 }}'; }}
found=$(plan) && [ -n "$found" ] && apt-get download -q $found || (apt-get update -q && apt-get download -q $(plan))
mkdir root
for package in *.deb; do dpkg-deb -x "$package" root; done
rm *.deb
"""


def programs(package: str) -> Path:
    """Return the folder with a package's programs; what is missing is fetched now."""
    folder = _folder(package, (package, FETCH, SYSTEM.read_text()))
    with _held(folder):
        if not (folder / "complete").exists():
            _fill(folder, FETCH.format(package=package) + f" && dpkg-deb -x {package}_*.deb root && rm *.deb")
    return folder / "root/usr/bin"


def with_needs(names: str) -> Path:
    """Return a folder in which packages lie unpacked over each other, with all that this machine lacks for them; what is missing is fetched now."""
    folder = _folder(names.split()[0] + "-with-needs", (names, NEEDS, SYSTEM.read_text()))
    with _held(folder):
        if not (folder / "complete").exists():
            _fill(folder, NEEDS.format(names=names))
    return folder / "root"


def _folder(name: str, parts: tuple[str, ...]) -> Path:
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    cache = subprocess.run([ROOT / "tests/tools/cache"], capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(cache) / "oracles" / f"{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(folder: Path, script: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    done = subprocess.run(["sh", "-ec", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (folder / "complete").touch()
