# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cache outside the checkout: finished folders keyed by their pins, each with a stamp that proves it is whole."""

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
    """Folder of everything that is kept between runs (``DRA_ACCELERATORS_CACHE``, else the XDG cache)."""
    values = os.environ if environment is None else environment
    if values.get("DRA_ACCELERATORS_CACHE"):
        return Path(values["DRA_ACCELERATORS_CACHE"]).resolve()
    base = values.get("XDG_CACHE_HOME") or str(Path(values.get("HOME") or Path.home()) / ".cache")
    return (Path(base) / "dra-accelerators").resolve()


def world_cache() -> Path:
    """Folder of the world's builds and images."""
    return cache_root() / "world"


def worlds_folder() -> Path:
    """Folder with one folder per world that is, or was, up."""
    return cache_root() / "worlds"


def digest(*parts: str | bytes | Path) -> str:
    """Twelve hexadecimal digits over strings and the contents of files, in the order given."""
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
    """Size, modification time and SHA-256 of every ordinary file below ``folder``, by relative path."""
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
    """What is wrong with a finished folder, or None. Contents are hashed only where a file's time changed, or if ``thorough``."""
    if not folder.is_dir():
        return "is missing"
    try:
        files = json.loads((folder / STAMP).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "has no readable stamp: its build was cut off"
    for name, expected in files.items():
        path = folder / name
        try:
            status = path.stat()
        except OSError:
            return f"lacks {name}"
        if status.st_size != expected["size"]:
            return f"has {name} with {status.st_size} bytes where {expected['size']} were built"
        if (thorough or status.st_mtime_ns != expected["modified"]) and _file_digest(path) != expected["sha256"]:
            return f"has a changed {name}"
    return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, shared by all processes; the kernel drops it when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that holds {path}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file whole: no reader, and no killed run, ever leaves half of it."""
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
    """Make ``folder`` by ``make(temporary folder)`` unless a whole one is there; return whether it was made.

    The work is done beside the target and moved over in one rename after its stamp was written, under a lock, so that a
    killed run leaves only a ``.partial`` folder, which the next run removes.
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
            say(f"removing {partial}, left by a run that was cut off")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        (partial / STAMP).write_text(json.dumps({"files": describe_files(partial)}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    return True
