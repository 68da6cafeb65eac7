# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define the common part of dnf and zypper: installed packages, trusted keys, and repository files."""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._host import change_record
from ..core.host.system import LONGEST_INSTALLATION, Completed, System, text_or_none
from . import openpgp, rpm_output
from .interface import OWN_FILES, QUERY_SECONDS, PackageProblem, Places, Source

#: Record of the keys that this collection imported to rpm, and of the key files for which it did.
_TRUSTED = "/var/lib/dra-accelerators/rpm-keys"
#: Record of an import in progress: the key file, and the keys in rpm before it.
_PENDING = f"{_TRUSTED}/import.json"
#: Suffixes of repository names in cache directories.
_OF_CACHE = r"(-[0-9a-f]{16}|(-[a-z]+)?\.solvx?)?"
_QUIET = {"LC_ALL": "C", "LANG": "C"}
#: Seconds that zypper waits while another program manages packages. Its default is 0. dnf always waits.
_ZYPPER_LOCK = {"ZYPP_LOCK_TIMEOUT": "300"}
#: Capabilities of packages that can have several installed versions: kernels and packages for one kernel.
_SEVERAL = ("installonlypkg(", "multiversion(")


class RpmTool(abc.ABC):
    """rpm on a node and its repository files. Subclasses implement dnf and zypper."""

    #: Directories of the repository files and the key files.
    repositories = ""
    keys = ""
    title = "rpm"

    def __init__(self, system: System, *, timeout: float, bundle: str = "") -> None:
        self.system = system
        self.timeout = timeout
        #: Directory of an offline bundle's repository. If set, the node's repositories are not used.
        self.bundle = bundle
        self.architecture = os.uname().machine

    # Queries

    def installed(self) -> tuple[dict[str, str], list[str]]:
        """Return the installed packages, and those with an unexpected second version. Raises PackageProblem."""
        installed, twice = read_installed(self.system, self.architecture)
        return installed, [name for name in twice if not self._may_be_several(name)]

    def _may_be_several(self, name: str) -> bool:
        provided = self.system.run(["rpm", "-q", "--provides", name], QUERY_SECONDS, environment=_QUIET).stdout
        return name.startswith("kernel") or any(word in provided for word in _SEVERAL)

    def named(self, path: str) -> tuple[str, str] | None:
        """Return the package and version of a file. For a file that does not exist yet, they come from its name."""
        return self._read([path]).get(path) if path.endswith(".rpm") else None

    def kept_in(self, folder: str) -> dict[tuple[str, str], str]:
        """Return the paths of the complete package files in a directory, by package and version."""
        paths = [f"{folder}/{name}" for name in self.system.list_directory(folder) if name.endswith(".rpm")]
        paths = [path for path in paths if self._is_whole(path)]
        return {named: path for path, named in self._read(paths).items()}

    def _is_whole(self, path: str) -> bool:
        """Return whether a file matches the digests that it contains. An interrupted copy does not."""
        words = ["rpm", "-K", "--nosignature", str(self.system.path(path))]
        return self.system.run(words, QUERY_SECONDS, environment=_QUIET).returncode == 0

    def _read(self, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return package and version of files. The version comes from the file's content, because file names contain no epoch."""
        found = {path: named for path in paths if (named := rpm_output.name_of_file(path))}
        for path in paths:
            if not self.system.exists(path):
                continue
            words = ["rpm", "-qp", "--nosignature", "--queryformat", rpm_output.FORMAT, str(self.system.path(path))]
            fields = self.system.run(words, QUERY_SECONDS, environment=_QUIET).stdout.strip().split("\t")
            if len(fields) == 3:
                found[path] = (fields[0], rpm_output.whole_version(fields[1]))
        return found

    # Repositories

    def places(self, name: str) -> Places:
        """Return the paths of the repository and key files. dnf and zypper have no pin file."""
        return Places(f"{self.repositories}/{OWN_FILES}{name}.repo", f"{self.keys}/{OWN_FILES}{name}.asc")

    def login_text(self, source: Source | None) -> str:  # noqa: ARG002 (PackageTool has it)
        """Return an empty string: dnf's credentials are in the repository file, which only root can read."""
        return ""

    def pins(self, pattern: str, versions: Sequence[str]) -> str:  # noqa: ARG002 (PackageTool has them)
        """Return an empty string: dnf and zypper have no pin file and lock single packages instead."""
        return ""

    def defined(self) -> list[rpm_output.Repository]:
        """Return the enabled repositories."""
        names = [name for name in self.system.list_directory(self.repositories) if name.endswith(".repo")]
        paths = [f"{self.repositories}/{name}" for name in names]
        return [each for path in paths for each in rpm_output.read_repositories(path, self.system.read_text(path))]

    def plan_source(self, wanted: Source) -> Source | None:
        """Return the repository to write, or None if it is already defined."""
        return rpm_output.plan_source(wanted, self.defined(), self.architecture)

    def ours(self, folder: str) -> list[str]:
        """Return the entries of a cache directory that belong to this collection's repositories."""
        return [name for name in self.system.list_directory(folder) if name.startswith(OWN_FILES)]

    def is_gone(self, name: str) -> bool:
        """Return whether a cache entry belongs to a repository of this collection that is no longer defined."""
        there = [each.name for each in self.defined() if each.name.startswith(OWN_FILES)]
        return not any(self.is_of(name, each) for each in there)

    @staticmethod
    def is_of(name: str, repository: str) -> bool:
        """Return whether a cache entry belongs to a repository."""
        return bool(re.fullmatch(rf"{re.escape(repository)}{_OF_CACHE}", name))

    # Keys

    def trust(self, places: Places) -> None:
        """Import the key file to rpm, and record the import if the key is new to rpm. Raises PackageProblem."""
        if not self.system.exists(places.key):
            return
        text = self.system.read_text(places.key)
        ids = {each[-8:].lower() for each in openpgp.fingerprints(text)}
        for name, users in self._remembered().items():
            if places.key in users and not any(name.startswith(f"{rpm_output.KEY}-{each}") for each in ids):
                # The previous key of this file.
                self._forget(name, places.key, users)
        for name in self._interrupted():
            self._remember(name, self._remembered()[name])
        before = self._keys()
        # The import is recorded first, because a killed run cannot determine afterwards which key it has imported.
        pending = {"key": places.key, "ids": sorted(ids), "before": sorted(before)}
        self.system.write_atomic(_PENDING, change_record.to_text(pending).encode(), mode=0o600, directory_mode=0o700)
        self.said(["rpm", "--import", str(self.system.path(places.key))])
        for name in sorted(self._keys() - before):
            self._remember(name, [places.key])
        for name, users in self._remembered().items():
            if name in before and places.key not in users and self._is_same(places.key, users):
                self._remember(name, [*users, places.key])
        self._end_import()

    def distrust(self, places: Places) -> None:
        """Remove the key of this file from rpm, if the file does not exist and this collection imported the key. Raises PackageProblem."""
        if not self.system.exists(places.key):
            self.forget_key(places.key)

    def forget_key(self, key: str) -> None:
        """Remove the key of this file from rpm, if this collection imported it for this file and for no other one. Raises PackageProblem."""
        for name, users in self._remembered().items():
            if key in users:
                self._forget(name, key, users)
        if not self._interrupted():
            self._end_import()

    def _end_import(self) -> None:
        """Delete the record of the import, and the directory if this collection has imported no key."""
        self.system.remove(_PENDING)
        if not self._remembered():
            self.system.remove_tree(_TRUSTED)

    def _forget(self, name: str, key: str, users: Sequence[str]) -> None:
        left = [each for each in users if each != key]
        if left:
            self._remember(name, left)
            return
        if name in self._keys():
            self.said(["rpm", "-e", "--allmatches", name])
        self.system.remove(f"{_TRUSTED}/{name}")

    def _is_same(self, key: str, users: Sequence[str]) -> bool:
        text = self.system.read_text(key)
        return any(self.system.exists(each) and self.system.read_text(each) == text for each in users)

    def _keys(self) -> set[str]:
        done = self.system.run(["rpm", "-q", rpm_output.KEY], QUERY_SECONDS, environment=_QUIET)
        return {word for word in done.stdout.split() if word.startswith(f"{rpm_output.KEY}-")}

    def _remembered(self) -> dict[str, list[str]]:
        names = [name for name in self.system.list_directory(_TRUSTED) if name.startswith(f"{rpm_output.KEY}-")]
        recorded = {name: self.system.read_text(f"{_TRUSTED}/{name}").split() for name in names}
        return {**self._interrupted(), **recorded}

    def _interrupted(self) -> dict[str, list[str]]:
        """Return the keys that an interrupted run has imported but not recorded, each with its file."""
        text = text_or_none(self.system, _PENDING)
        if text is None:
            return {}
        key, ids, before = change_record.read(text, _PENDING, _import_of, of="imported keys", hint="Remove the file.")
        new = self._keys() - before
        return {
            name: [key] for name in new if name.split("-")[2] in ids and not self.system.exists(f"{_TRUSTED}/{name}")
        }

    def _remember(self, name: str, users: Sequence[str]) -> None:
        text = "".join(f"{user}\n" for user in users)
        self.system.write_atomic(f"{_TRUSTED}/{name}", text.encode(), mode=0o600, directory_mode=0o700)

    # Actions

    def finish(self) -> None:  # noqa: B027  nothing to do
        """Do nothing: rpm has no state between unpacking and configuration."""

    def mend(self, files: Sequence[str], purge: Sequence[str]) -> None:
        """Complete an interrupted transaction: of packages with two versions, the older one is removed. Raises PackageProblem."""
        if files:
            self.did(["rpm", "-U", "--oldpackage", "--replacepkgs", "--nosignature", *files])
        gone = [name for name in purge if name in self.installed()[0]]
        if gone:
            self.did(["rpm", "-e", "--allmatches", *gone])
        for name in self.installed()[1]:
            text = self.said(["rpm", "-q", "--queryformat", "%{NAME}\\t%{EVR}\\n", name])
            for version in rpm_output.parse_versions(text)[name][1:]:
                self.did(["rpm", "-e", "--nodeps", "--justdb", f"{name}-{rpm_output.without_epoch(version)}"])

    # Commands

    @abc.abstractmethod
    def bundle_options(self) -> Sequence[str]:
        """Return options that restrict the package manager to the bundle's repository, with a cache in the bundle's directory."""

    def run(
        self, argv: Sequence[str], *, seconds: float = 0.0, environment: Mapping[str, str] | None = None
    ) -> Completed:
        """Run a program without input."""
        if self.bundle and argv[0] == self.title:
            argv = [argv[0], *self.bundle_options(), *argv[1:]]
        variables = {**_QUIET, **_ZYPPER_LOCK, **(environment or {})}
        return self.system.run(
            argv, seconds or self.timeout, input="", environment=variables, longest=LONGEST_INSTALLATION
        )

    def said(self, argv: Sequence[str]) -> str:
        """Return the output of a query command. Raises PackageProblem."""
        done = self.run(argv, seconds=QUERY_SECONDS)
        if done.returncode:
            raise PackageProblem(f"{' '.join(argv[:2])} ended with {done.returncode}: {_last(done)}")
        return done.stdout

    def did(self, argv: Sequence[str]) -> None:
        """Run a command that changes the node. Raises PackageProblem."""
        done = self.run(argv)
        if done.returncode:
            raise PackageProblem(f"{' '.join(argv[:2])} has failed: {_last(done)}", code="not-installed")


def read_installed(
    system: System, architecture: str, *, refuse_messages: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Return the installed packages with their versions, and those with two versions. Raises PackageProblem.

    For a damaged database, rpm can list no packages and exit with 0 after an error message. With ``refuse_messages``
    such a message is an error.
    """
    root = [] if system.root == "/" else ["--root", system.root]
    argv = ["rpm", *root, "-qa", "--queryformat", rpm_output.FORMAT]
    done = system.run(argv, QUERY_SECONDS, input="", environment=_QUIET, longest=LONGEST_INSTALLATION)
    has_message = refuse_messages and any(line.startswith("error:") for line in done.stderr.splitlines())
    if done.returncode or has_message:
        raise PackageProblem(f"rpm -qa ended with {done.returncode}: {_last(done)}")
    return rpm_output.parse_installed(done.stdout, architecture)


def _import_of(content: Any) -> tuple[str, set[str], set[str]]:
    """Return the key file, the IDs of its keys, and the keys that rpm had before the import."""
    return str(content["key"]), {*map(str, content["ids"])}, {*map(str, content["before"])}


def _last(done: Completed) -> str:
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return " | ".join(lines[-4:])[-500:] or "no output"


def wanted(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Return the parts of package specifications: names with versions, files, and names to remove."""
    names, files, gone = [], [], []
    for word in words:
        if "/" in word or word.endswith(".rpm"):
            files.append(word)
        elif word.endswith("-"):
            gone.append(word[:-1])
        else:
            name, _equals, version = word.partition("=")
            names.append((name, version))
    return names, files, gone
