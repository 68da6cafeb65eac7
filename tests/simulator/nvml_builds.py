# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The library as make builds it, one build per kind and state of the sources.

Tests of the behavior use the build with address and undefined-behavior sanitizers. Users load the plain build: tests
of the backend, the programs next to the library, and the cluster use that one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "roles/simulator/files/nvml"
COMMON = ROOT / "roles/simulator/files/common"
SANITIZERS = "address,undefined"
#: Seconds after which an unused build is deleted.
KEPT_SECONDS = 86400


@dataclass(frozen=True)
class Build:
    """One build of the library."""

    folder: Path
    sanitizers: str

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment in which a process finds a copy of this build in a directory."""
        environment = dict(os.environ, LD_LIBRARY_PATH=str(folder))
        if self.sanitizers:
            libasan = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
            environment["LD_PRELOAD"] = str(Path(libasan.stdout.strip()).resolve())
            # Memory that CPython keeps until its end is no leak of the library.
            environment["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=0:exitcode=99"
            environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
        return environment


def cache() -> Path:
    """Return the project's cache directory for these builds."""
    done = subprocess.run([ROOT / "tests/tools/cache"], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "nvml-builds"


def digest(words: Sequence[str], sources: Path) -> str:
    """Return a digest of a build's inputs: the sources and the arguments of make."""
    hashed = hashlib.sha256("\0".join(words).encode())
    for path in sorted([*sources.iterdir(), *COMMON.iterdir()]):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:20]


def prune(folder: Path) -> None:
    """Delete builds that have not been used for a day."""
    for old in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if old.is_dir() and time.time() - old.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


def build(sanitizers: str = "", *settings: str, sources: Path = SOURCES) -> Build:
    """Return the build of these sources, and create it if needed. Concurrent processes create it once."""
    words = [*settings]
    if sanitizers:
        words += [f"SANITIZE={sanitizers}", "CFLAGS=-O1 -g"]
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prune(folder)
        made = folder / digest([sources.name, *words], sources)
        if not made.is_dir():
            new = folder / f".{made.name}"
            shutil.rmtree(new, ignore_errors=True)
            command = ["make", "-s", "-j2", "-C", str(sources), f"OUT={new}", *words]
            subprocess.run(command, check=True, capture_output=True, text=True)
            shutil.rmtree(new / ".objects")
            new.rename(made)
        os.utime(made)
    return Build(made, sanitizers)
