# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Programs out of packages of the distribution, for tests: unpacked once and kept, installed nowhere."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FETCH = "apt-get download -q {package} || (apt-get update -q && apt-get download -q {package})"


def programs(package: str) -> Path:
    """Return the folder with a package's programs; what is missing is fetched now."""
    key = hashlib.sha256(repr((package, FETCH, Path("/etc/debian_version").read_text())).encode()).hexdigest()[:12]
    cache = subprocess.run([ROOT / "tests/tools/cache"], capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(cache) / "oracles" / f"{package}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            script = FETCH.format(package=package) + f" && dpkg-deb -x {package}_*.deb root && rm *.deb"
            done = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{done.stdout}{done.stderr}"
            (folder / "complete").touch()
    return folder / "root/usr/bin"
