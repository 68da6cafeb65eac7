# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Store which steps and test modules have passed, so that an interrupted long run can resume.

The directory of the records is named after a digest of all files of the checkout. A changed file has a different
digest, so it makes all records invalid.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

#: Environment variables for a test run: the directory of the records, and whether to skip recorded modules.
RECORDS_VARIABLE, RESUME_VARIABLE = "DRA_ACCELERATORS_PASSED_RECORDS", "DRA_ACCELERATORS_RESUME"
#: The number of digests whose records are kept.
KEPT_STATES = 10
MODULES = "modules"


def digest_of_files(root: Path) -> str:
    """Return a digest of the names, modes, and contents of all files that git does not ignore, committed or not."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    ).stdout
    digest = hashlib.sha256()
    for name in sorted(set(listing.split(b"\0")) - {b""}):
        path = root / os.fsdecode(name)
        if path.is_symlink():
            content = os.fsencode(os.readlink(path))
        elif path.is_file():
            content = path.read_bytes()
        else:
            continue  # deleted, but still in the git index
        mode = b"x" if path.lstat().st_mode & 0o100 else b"-"
        digest.update(b"%s\0%s%d\0%s" % (name, mode, len(content), content))
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class PassedRecord:
    """A passed step or module: the number of tests, their duration in seconds, and the end time (seconds since the epoch)."""

    tests: int
    seconds: float
    ended: float

    def describe(self) -> str:
        """Return the end time as text."""
        return f"passed before, on {time.strftime('%d %B at %H:%M', time.localtime(self.ended))}, with the same files"


class PassedRecords:
    """The records of one state of the files, one JSON file each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def open(cls, root: Path, results: Path) -> PassedRecords | None:
        """Return the records of a checkout in the results directory. Delete the records of old states.

        Return None without a checkout, such as in an unpacked archive, because the list of its files is unknown.
        """
        all_states = results / "passed"
        try:
            records = cls(all_states / digest_of_files(root))
        except (OSError, subprocess.CalledProcessError):
            return None
        records.directory.mkdir(parents=True, exist_ok=True)
        os.utime(records.directory)
        newest_first = sorted(all_states.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old_state in newest_first[KEPT_STATES:]:
            shutil.rmtree(old_state, ignore_errors=True)
        return records

    def record_step(self, key: str, passed: PassedRecord) -> None:
        """Record a passed step by its key (``Step.record_key``)."""
        _write(self.directory, key, passed)

    def record_module(self, path: str, passed: PassedRecord) -> None:
        """Record a test module with only passed tests."""
        _write(self.directory / MODULES, path, passed)

    def passed_steps(self) -> Mapping[str, PassedRecord]:
        """Return the passed steps by key."""
        return _read(self.directory)

    def passed_modules(self) -> Mapping[str, PassedRecord]:
        """Return the passed test modules by path."""
        return _read(self.directory / MODULES)


def _write(directory: Path, name: str, passed: PassedRecord) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"name": name, **asdict(passed)}), encoding="utf-8")
    new.replace(path)


def _read(directory: Path) -> Mapping[str, PassedRecord]:
    records = {}
    for path in directory.glob("*.json"):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # an unreadable record does not count
            entry = json.loads(path.read_text(encoding="utf-8"))
            name = str(entry.pop("name"))
            records[name] = PassedRecord(**entry)
    return records
