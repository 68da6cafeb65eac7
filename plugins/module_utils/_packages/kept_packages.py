# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define the common part of modules that install vendor packages: file changes, and packages that are kept for a rollback."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._host.driver_installation import digest_of
from .._host.secret_masking import MASK, mask_secrets
from ..core.host.system import System
from .interface import PackageProblem, PackageTool

#: Directory of downloads. Only complete packages are moved to the directory of the kept packages.
_INCOMING = ".incoming"
#: Suffix of repository key files.
_KEY = ".asc"
#: A line of apt's auth.conf.d.
_MACHINE = re.compile(r"(?m)^(machine \S+ login \S+ password )\S+$")


@dataclass(frozen=True)
class FileChange:
    """A change of a file's text. None means that the file does not exist."""

    path: str
    before: str | None
    after: str | None

    def describe(self) -> str:
        """Return a short description of the change."""
        return f"{'remove' if self.after is None else 'write'} {self.path}"

    def to_diff(self) -> dict[str, str]:
        """Return the change for Ansible's diff mode, without keys and passwords."""
        is_key = self.path.endswith(_KEY)
        shown = [
            "(a key)\n" if text and is_key else _without_password(text or "") for text in (self.before, self.after)
        ]
        return {"before_header": self.path, "after_header": self.path, "before": shown[0], "after": shown[1]}


def _without_password(text: str) -> str:
    return _MACHINE.sub(rf"\1{MASK}", mask_secrets(text))


def file_changes(present: Mapping[str, str | None], wanted: Mapping[str, str]) -> tuple[FileChange, ...]:
    """Return the changed files. An empty text removes a file."""
    return tuple(
        FileChange(path, present.get(path), text or None)
        for path, text in wanted.items()
        if (present.get(path) or "") != text
    )


@dataclass(frozen=True)
class Kept:
    """An installed version: the version, the kind of kernel modules of a driver, and the packages.

    Each package has its version, the path of its kept file (empty for none), and the digest of the file.
    """

    version: str
    modules: str
    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the data in the format of the record."""
        packages = {name: dict(each) for name, each in self.packages.items()}
        return {"version": self.version, "modules": self.modules, "packages": packages}

    @property
    def complete(self) -> bool:
        """Return whether every package was kept."""
        return bool(self.packages) and all(each["path"] for each in self.packages.values())


def kept_of(content: Any) -> Kept | None:
    """Read a kept version from a record. Raises KeyError, TypeError, or AttributeError for incomplete data."""
    if not content:
        return None
    packages = {
        str(name): {key: str(each[key]) for key in ("version", "path", "checksum")}
        for name, each in content["packages"].items()
    }
    return Kept(str(content["version"]), str(content["modules"]), packages)


def write_files(system: System, changes: Iterable[FileChange]) -> None:
    """Write or remove the changed files."""
    for change in changes:
        if change.after is None:
            system.remove(change.path)
        else:
            mode = 0o644 if _without_password(change.after) == change.after else 0o600
            system.write_atomic(change.path, change.after.encode(), mode=mode)


class PackageStore:
    """The directory of kept packages. ``title`` names their software, ``hint`` is the hint of the error for a missing package."""

    def __init__(self, system: System, apt: PackageTool, folder: str, *, keep: bool, title: str, hint: str) -> None:
        self.system = system
        self.apt = apt
        self.folder = folder
        self.keep = keep
        self.title = title
        self.hint = hint

    def ready(self) -> None:
        """Create the directory."""
        self.system.make_directory(f"{self.folder}/partial", 0o700)

    def fetch(self, packages: Mapping[str, str]) -> None:
        """Download the files of packages that are not kept yet, as far as a source has them."""
        if self.keep:
            self._copy_from_other_groups(packages)
        there = self.files_of(packages) if self.keep else {}
        words = [f"{name}={each['version']}" for name, each in there.items() if not each["path"]]
        if words:
            self.ready()
            self._download(words)

    def _download(self, words: Sequence[str]) -> None:
        """Download packages to a separate directory and move the complete ones, so that an interrupted download leaves no incomplete package."""
        incoming = f"{self.folder}/{_INCOMING}"
        self.system.remove_tree(incoming)
        self.system.path(incoming).mkdir(mode=0o700)
        with contextlib.suppress(PackageProblem):
            # If the source no longer has the previous version, it cannot be restored. The module continues, and its
            # result reports it.
            self.apt.download(words, str(self.system.path(incoming)))
        for path in self.apt.kept_in(incoming).values():
            self.system.move(path, f"{self.folder}/{posixpath.basename(path)}")
        self.system.remove_tree(incoming)

    def _copy_from_other_groups(self, packages: Mapping[str, str]) -> None:
        """Copy files that another role of this collection has already kept: a driver rollback includes programs that need its version."""
        wanted = {(name.partition(":")[0], each) for name, each in packages.items()}
        base = posixpath.dirname(posixpath.dirname(self.folder))
        own = {posixpath.basename(path) for path in self.apt.kept_in(self.folder).values()}
        for other in self.system.list_directory(base):
            folder = f"{base}/{other}/{posixpath.basename(self.folder)}"
            for named, path in self.apt.kept_in(folder).items() if folder != self.folder else ():
                name = posixpath.basename(path)
                if named in wanted and name not in own:
                    self.ready()
                    self.system.copy(path, f"{self.folder}/{name}")

    def take(self, local: Mapping[str, str]) -> None:
        """Copy local package files to the directory."""
        for name, path in local.items():
            target = f"{self.folder}/{posixpath.basename(path)}"
            if name and target != path:
                self.system.copy(path, target)

    def files_of(self, packages: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Return the kept files of packages with these versions. The files are synced to disk."""
        there = self.apt.kept_in(self.folder) if self.keep else {}
        if there:
            self.system.sync(self.folder)
        found = {}
        for name, version in packages.items():
            path = there.get((name.partition(":")[0], version), "")
            if path:
                # The caller writes the path to a record.
                self.system.sync(path)
            checksum = digest_of(self.system, path) if path else ""
            found[name] = {"version": version, "path": path, "checksum": checksum}
        return found

    def verify(self, kept: Kept) -> None:
        """Verify that kept packages exist and are unchanged. Raises PackageProblem."""
        for name, each in kept.packages.items():
            if not each["path"] or not self.system.exists(each["path"]):
                raise PackageProblem(
                    f"No file of {name} {each['version']} was kept, so {self.title} {kept.version} cannot be restored",
                    hint=self.hint,
                    code="no-former",
                )
            if digest_of(self.system, each["path"]) != each["checksum"]:
                raise PackageProblem(f"{each['path']} is no longer the file that was kept", code="checksum")

    def forget(self, needed: Iterable[Kept | None]) -> None:
        """Remove the files that no rollback needs."""
        names = {
            posixpath.basename(each["path"]) for kept in needed if kept is not None for each in kept.packages.values()
        }
        for name in self.system.list_directory(self.folder):
            if name == _INCOMING:
                self.system.remove_tree(f"{self.folder}/{name}")
            elif name not in names and name not in ("partial", "lock"):
                self.system.remove(f"{self.folder}/{name}")
