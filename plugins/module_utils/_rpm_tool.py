# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What dnf and zypper share: rpm's list of what is installed, keys that rpm trusts, and repositories as files."""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Mapping, Sequence

from . import _openpgp, _rpm
from ._package_port import LOOK_SECONDS, OWN_FILES, PackageProblem, Places, Source
from .core.system import LONGEST_INSTALLATION, Completed, System

#: Which keys this collection has had rpm trust, and for which of its files.
_TRUSTED = "/var/lib/dra-accelerators/rpm-keys"
#: What the names of files and folders have, in caches, behind the name of a repository.
_OF_CACHE = r"(-[0-9a-f]{16}|(-[a-z]+)?\.solvx?)?"
_QUIET = {"LC_ALL": "C", "LANG": "C"}
#: Seconds that zypper waits while another program manages packages. Its default is 0. dnf always waits.
_ZYPPER_LOCK = {"ZYPP_LOCK_TIMEOUT": "300"}
#: What several of a package may be installed of, in several versions: kernels and what is built for one.
_SEVERAL = ("installonlypkg(", "multiversion(")


class RpmTool(abc.ABC):
    """rpm of a node, and the files beside it; what dnf and zypper differ in each of them adds."""

    #: Where repositories are defined, and keys lie.
    repositories = ""
    keys = ""
    title = "rpm"

    def __init__(self, system: System, *, timeout: float, bundle: str = "") -> None:
        self.system = system
        self.timeout = timeout
        #: The folder of a bundle's repository; with one, the repositories of the node do not count.
        self.bundle = bundle
        self.architecture = os.uname().machine

    # What is there

    def installed(self) -> tuple[dict[str, str], list[str]]:
        """Return what is installed, and the packages that are there twice though they may not. Raises PackageProblem."""
        text = self.said(["rpm", "-qa", "--queryformat", _rpm.FORMAT])
        installed, twice = _rpm.parse_installed(text, self.architecture)
        return installed, [name for name in twice if not self._may_be_several(name)]

    def _may_be_several(self, name: str) -> bool:
        provided = self.system.run(["rpm", "-q", "--provides", name], LOOK_SECONDS, environment=_QUIET).stdout
        return name.startswith("kernel") or any(word in provided for word in _SEVERAL)

    def named(self, path: str) -> tuple[str, str] | None:
        """Return the package and the version that a file holds; of one that is not here yet, what its name says."""
        return self._read([path]).get(path) if path.endswith(".rpm") else None

    def kept_in(self, folder: str) -> dict[tuple[str, str], str]:
        """Return the complete files of packages in a folder, by package and version."""
        paths = [f"{folder}/{name}" for name in self.system.list_directory(folder) if name.endswith(".rpm")]
        paths = [path for path in paths if self._is_whole(path)]
        return {named: path for path, named in self._read(paths).items()}

    def _is_whole(self, path: str) -> bool:
        """Whether a file has the digests that it contains. A killed copy leaves one that does not."""
        words = ["rpm", "-K", "--nosignature", str(self.system.path(path))]
        return self.system.run(words, LOOK_SECONDS, environment=_QUIET).returncode == 0

    def _read(self, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return package and version of files: names have no epoch, which makes a version another one."""
        found = {path: named for path in paths if (named := _rpm.name_of_file(path))}
        for path in paths:
            if not self.system.exists(path):
                continue
            words = ["rpm", "-qp", "--nosignature", "--queryformat", _rpm.FORMAT, str(self.system.path(path))]
            fields = self.system.run(words, LOOK_SECONDS, environment=_QUIET).stdout.strip().split("\t")
            if len(fields) == 3:
                found[path] = (fields[0], _rpm.whole_version(fields[1]))
        return found

    # Repositories

    def places(self, name: str) -> Places:
        """Return where a repository and its key are written; a version is held without a file of its own."""
        return Places(f"{self.repositories}/{OWN_FILES}{name}.repo", f"{self.keys}/{OWN_FILES}{name}.asc")

    def login_text(self, source: Source | None) -> str:  # noqa: ARG002 (the port has it)
        """For dnf the repository's file contains user name and password, and only root can read it."""
        return ""

    def pins(self, pattern: str, versions: Sequence[str]) -> str:  # noqa: ARG002 (the port has them)
        """Neither dnf nor zypper has such a file: packages are locked one by one."""
        return ""

    def defined(self) -> list[_rpm.Repository]:
        """Return the repositories that are switched on."""
        names = [name for name in self.system.list_directory(self.repositories) if name.endswith(".repo")]
        paths = [f"{self.repositories}/{name}" for name in names]
        return [each for path in paths for each in _rpm.read_repositories(path, self.system.read_text(path))]

    def plan_source(self, wanted: Source) -> Source | None:
        """Decide what is to be written so that a repository is there."""
        return _rpm.plan_source(wanted, self.defined(), self.architecture)

    def ours(self, folder: str) -> list[str]:
        """Return what a cache's folder has of this collection's repositories."""
        return [name for name in self.system.list_directory(folder) if name.startswith(OWN_FILES)]

    def is_gone(self, name: str) -> bool:
        """Whether a file or folder of a cache is of a repository of this collection that is no longer defined."""
        there = [each.name for each in self.defined() if each.name.startswith(OWN_FILES)]
        return not any(self.is_of(name, each) for each in there)

    @staticmethod
    def is_of(name: str, repository: str) -> bool:
        """Whether a file or folder of a cache is of a repository."""
        return bool(re.fullmatch(rf"{re.escape(repository)}{_OF_CACHE}", name))

    # Keys

    def trust(self, places: Places) -> None:
        """Have rpm trust the key that lies there, and remember where it did not before. Raises PackageProblem."""
        if not self.system.exists(places.key):
            return
        text = self.system.read_text(places.key)
        ids = {each[-8:].lower() for each in _openpgp.fingerprints(text)}
        for name, users in self._remembered().items():
            if places.key in users and not any(name.startswith(f"{_rpm.KEY}-{each}") for each in ids):
                # The one that lay there before.
                self._forget(name, places.key, users)
        before = self._keys()
        self.said(["rpm", "--import", str(self.system.path(places.key))])
        for name in sorted(self._keys() - before):
            self._remember(name, [places.key])
        for name, users in self._remembered().items():
            if name in before and places.key not in users and self._is_same(places.key, users):
                self._remember(name, [*users, places.key])

    def distrust(self, places: Places) -> None:
        """Remove the key of this file from rpm, if the file does not exist and this collection imported the key. Raises PackageProblem."""
        if not self.system.exists(places.key):
            self.forget_key(places.key)

    def forget_key(self, key: str) -> None:
        """Remove the key of this file from rpm, if this collection imported it for that file and for no other one. Raises PackageProblem."""
        for name, users in self._remembered().items():
            if key in users:
                self._forget(name, key, users)
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
        done = self.system.run(["rpm", "-q", _rpm.KEY], LOOK_SECONDS, environment=_QUIET)
        return {word for word in done.stdout.split() if word.startswith(f"{_rpm.KEY}-")}

    def _remembered(self) -> dict[str, list[str]]:
        names = self.system.list_directory(_TRUSTED)
        return {name: self.system.read_text(f"{_TRUSTED}/{name}").split() for name in names}

    def _remember(self, name: str, users: Sequence[str]) -> None:
        text = "".join(f"{user}\n" for user in users)
        self.system.write_atomic(f"{_TRUSTED}/{name}", text.encode(), mode=0o600, directory_mode=0o700)

    # What is done

    def finish(self) -> None:  # noqa: B027  nothing to do
        """rpm leaves no package unpacked and not set up."""

    def mend(self, files: Sequence[str], purge: Sequence[str]) -> None:
        """Bring a transaction that was cut short to its end: of packages that are there twice the older one goes. Raises PackageProblem."""
        if files:
            self.did(["rpm", "-U", "--oldpackage", "--replacepkgs", "--nosignature", *files])
        gone = [name for name in purge if name in self.installed()[0]]
        if gone:
            self.did(["rpm", "-e", "--allmatches", *gone])
        for name in self.installed()[1]:
            text = self.said(["rpm", "-q", "--queryformat", "%{NAME}\\t%{EVR}\\n", name])
            for version in _rpm.parse_versions(text)[name][1:]:
                self.did(["rpm", "-e", "--nodeps", "--justdb", f"{name}-{_rpm.without_epoch(version)}"])

    # Programs

    @abc.abstractmethod
    def bundle_options(self) -> Sequence[str]:
        """Return what has the package manager know the bundle's repository alone, and keep nothing of it elsewhere."""

    def run(
        self, argv: Sequence[str], *, seconds: float = 0.0, environment: Mapping[str, str] | None = None
    ) -> Completed:
        """Run a program that asks nothing."""
        if self.bundle and argv[0] == self.title:
            argv = [argv[0], *self.bundle_options(), *argv[1:]]
        variables = {**_QUIET, **_ZYPPER_LOCK, **(environment or {})}
        return self.system.run(
            argv, seconds or self.timeout, input="", environment=variables, longest=LONGEST_INSTALLATION
        )

    def said(self, argv: Sequence[str]) -> str:
        """Return what a program says. Raises PackageProblem."""
        done = self.run(argv, seconds=LOOK_SECONDS)
        if done.returncode:
            raise PackageProblem(f"{' '.join(argv[:2])} ended with {done.returncode}: {_last(done)}")
        return done.stdout

    def did(self, argv: Sequence[str]) -> None:
        """Have a program change something. Raises PackageProblem."""
        done = self.run(argv)
        if done.returncode:
            raise PackageProblem(f"{' '.join(argv[:2])} has failed: {_last(done)}", code="not-installed")


def _last(done: Completed) -> str:
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return " | ".join(lines[-4:])[-500:] or "it said nothing"


def wanted(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Return what words ask for: names with versions, files, and names that go."""
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
