# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cache outside the checkout: finished directories keyed by their pins. A stamp in each proves that it is
complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from .progress import say

STAMP = ".stamp.json"


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """Return the directory that is kept between runs (``DRA_ACCELERATORS_CACHE``, else the XDG cache)."""
    values = os.environ if environment is None else environment
    if values.get("DRA_ACCELERATORS_CACHE"):
        return Path(values["DRA_ACCELERATORS_CACHE"]).resolve()
    base = values.get("XDG_CACHE_HOME") or str(Path(values.get("HOME") or Path.home()) / ".cache")
    return (Path(base) / "dra-accelerators").resolve()


def world_cache() -> Path:
    """Return the directory of the world's builds and images."""
    return cache_root() / "world"


def worlds_folder() -> Path:
    """Return the directory that contains one directory per world, running or not."""
    return cache_root() / "worlds"


def digest(*parts: str | bytes | Path) -> str:
    """Return twelve hexadecimal digits of a hash over strings and file contents, in the given order."""
    summary = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        summary.update(len(data).to_bytes(8, "big") + data)
    return summary.hexdigest()[:12]


def _file_digest(path: Path) -> str:
    summary = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            summary.update(block)
    return summary.hexdigest()


def describe_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """Return size, modification time, and SHA-256 of every regular file below a directory, by relative path."""
    described: dict[str, dict[str, int | str]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != STAMP:
            status = path.stat()
            described[str(path.relative_to(folder))] = {
                "size": status.st_size,
                "modified": status.st_mtime_ns,
                "sha256": _file_digest(path),
            }
    return described


def damage(folder: Path, thorough: bool = False) -> str | None:
    """Return the damage of a finished directory, or None if it is complete.

    Contents are hashed only if a file's modification time changed, or if ``thorough``.
    """
    if not folder.is_dir():
        return "is missing"
    try:
        files = json.loads((folder / STAMP).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "has no readable stamp: its build was interrupted"
    for name, expected in files.items():
        path = folder / name
        try:
            status = path.stat()
        except OSError:
            return f"lacks {name}"
        if status.st_size != expected["size"]:
            return f"has {name} with {status.st_size} bytes instead of {expected['size']}"
        if (thorough or status.st_mtime_ns != expected["modified"]) and _file_digest(path) != expected["sha256"]:
            return f"has a changed {name}"
    return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, shared by all processes. The kernel releases it when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run with the lock {path}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically: neither a reader nor a killed run ever sees a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def ensure(folder: Path, make: Callable[[Path], None], thorough: bool = False) -> bool:
    """Build ``folder`` with ``make(temporary directory)`` unless it is complete; return whether it was built.

    The build runs under a lock in a temporary directory next to the target. One rename moves it after its stamp was
    written. A killed run leaves only a ``.partial`` directory, which the next run removes.
    """
    if damage(folder, thorough) is None:
        return False
    with locked(folder.parent / f".{folder.name}.lock"):
        wrong = damage(folder, thorough)
        if wrong is None:
            return False
        partial = folder.parent / f".{folder.name}.partial"
        if folder.exists():
            say(f"{folder} {wrong}: building it again")
        if partial.exists():
            say(f"removing {partial} of an interrupted run")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        (partial / STAMP).write_text(json.dumps({"files": describe_files(partial)}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    return True
