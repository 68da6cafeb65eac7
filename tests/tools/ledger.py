# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Record passed steps and modules for exactly the current files, so that an interrupted long run can resume.

A passed step is recorded. For a step with many modules, each module is recorded when all its tests have passed. The
records belong to the content of all files of the checkout: after any change there are no records.
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

#: Environment variables: the directory of the ledger, and whether to skip recorded modules.
FOLDER_VARIABLE, GO_ON_VARIABLE = "DRA_ACCELERATORS_LEDGER", "DRA_ACCELERATORS_GO_ON"
#: The number of file states with records.
KEPT = 10
MODULES = "modules"


def digest_of(root: Path) -> str:
    """Return a digest of all files of a checkout that git does not ignore, committed or not."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    )
    found = hashlib.sha256()
    for name in sorted(set(listed.stdout.split(b"\0")) - {b""}):
        path = root / os.fsdecode(name)
        if path.is_symlink():
            content = os.fsencode(os.readlink(path))
        elif path.is_file():
            content = path.read_bytes()
        else:
            continue  # deleted, but still in the git index
        mode = b"x" if path.lstat().st_mode & 0o100 else b"-"
        found.update(b"%s\0%s%d\0%s" % (name, mode, len(content), content))
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Passed:
    """A passed step or module: the number of tests, their duration in seconds, and the end time (seconds since the epoch)."""

    tests: int
    seconds: float
    ended: float

    def describe(self) -> str:
        """Return the time as text."""
        return f"passed before, on {time.strftime('%d %B at %H:%M', time.localtime(self.ended))}, with the same files"


class Ledger:
    """Passed steps and modules for one state of the files. The directory belongs to that state only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, root: Path, results: Path) -> Ledger | None:
        """Return the ledger of the current checkout in the results directory, and remove those of old states.

        Return None without a checkout, such as in an unpacked archive, because the list of its files is unknown.
        """
        above = results / "passed"
        try:
            ledger = cls(above / digest_of(root))
        except (OSError, subprocess.CalledProcessError):
            return None
        ledger.folder.mkdir(parents=True, exist_ok=True)
        os.utime(ledger.folder)
        for former in sorted(above.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
            shutil.rmtree(former, ignore_errors=True)
        return ledger

    def note(self, name: str, passed: Passed) -> None:
        """Record a step by its work."""
        self._note(self.folder, name, passed)

    def note_module(self, name: str, passed: Passed) -> None:
        """Record a module."""
        self._note(self.folder / MODULES, name, passed)

    def steps(self) -> Mapping[str, Passed]:
        """Return the passed steps by their work."""
        return self._read(self.folder)

    def modules(self) -> Mapping[str, Passed]:
        """Return the passed modules by path."""
        return self._read(self.folder / MODULES)

    @staticmethod
    def _note(folder: Path, name: str, passed: Passed) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"name": name, **asdict(passed)}), encoding="utf-8")
        new.replace(path)

    @staticmethod
    def _read(folder: Path) -> Mapping[str, Passed]:
        found = {}
        for path in folder.glob("*.json"):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # an unreadable record does not count
                entry = json.loads(path.read_text(encoding="utf-8"))
                name = str(entry.pop("name"))
                found[name] = Passed(**entry)
        return found


class Modules:
    """Record the modules of one test run. A module has passed when all phases of all its tests have."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: dict[str, set[str]] = {}
        self._failed: set[str] = set()
        self._tests: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def expect(self, module: str, test: str) -> None:
        """Register a test that will run."""
        self._waiting.setdefault(module, set()).add(test)
        self._tests[module] = self._tests.get(module, 0) + 1

    def phase(self, module: str, test: str, *, is_last: bool, has_passed: bool, seconds: float) -> None:
        """Record the end of a test phase."""
        self._seconds[module] = self._seconds.get(module, 0.0) + seconds
        if not has_passed:
            self._failed.add(module)
        if not is_last or module not in self._waiting:
            return
        self._waiting[module].discard(test)
        if not self._waiting[module] and module not in self._failed:
            self._ledger.note_module(module, Passed(self._tests[module], self._seconds[module], time.time()))
