# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define the interface to the package manager of a node (apt, dnf, or zypper). This module has no side effects.

A package specification has the same form for every package manager. ``name`` selects any version, ``name=version`` one
version, and the path of a package file that file. ``name-`` removes a package in the same transaction. A full version
includes the epoch, if any, and the packager's revision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from ..core.errors import AcceleratorError
from ..core.host.system import System

INSTALL, REMOVE, PURGE = "install", "remove", "purge"
#: Prefix of the names of all files that this collection writes for a package manager.
OWN_FILES = "dra-accelerators-"
MARK = "# Written by dra.accelerators; what is changed here is lost."
#: Timeout of a query command, in seconds.
QUERY_SECONDS = 120.0
#: SUSE appends the kernel version to the version of a kernel module package: 580.95.05_k6.4.0_150600.21.
_KERNEL_MODULE = re.compile(r"_k\d.*")


class PackageProblem(AcceleratorError):
    """A package operation cannot be planned or has failed."""

    default_code = "packages"


@dataclass(frozen=True)
class Change:
    """One package to install, replace, or remove. An empty version means that the package is not installed."""

    verb: str
    name: str
    before: str = ""
    after: str = ""

    def describe(self) -> str:
        """Return a short description of the change."""
        if self.verb != INSTALL:
            return f"{self.verb} {self.name} {self.before}".rstrip()
        return f"install {self.name} {self.after}" + (f" in place of {self.before}" if self.before else "")


@dataclass(frozen=True)
class Packages:
    """The packages of a node: installed versions by name, broken packages, held packages, and packages installed only as dependencies."""

    installed: Mapping[str, str]
    broken: Sequence[str] = ()
    held: frozenset[str] = frozenset()
    automatic: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Login:
    """A user name and a password for a repository."""

    username: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Source:
    """One package source (repository).

    ``signed_by`` is the file of the signing key. If it is empty, the package manager accepts every key that it trusts.

    ``suites`` and ``components`` apply to Debian repositories. ``packages_signed`` states whether each package has a
    signature in addition to the signed index, as on Red Hat and SUSE. The index of a source with a key is always
    signed.

    ``uris`` contain no credentials. ``login`` has the credentials for all URIs of the source.
    """

    uris: tuple[str, ...]
    suites: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    signed_by: str = ""
    path: str = ""
    packages_signed: bool = True
    login: Login | None = None

    def with_login_in_uris(self) -> Source:
        """Return the source with the credentials in its URIs, for a file in a temporary directory that only root can read."""
        if self.login is None:
            return self
        inserted = f"://{quote(self.login.username, safe='')}:{quote(self.login.password, safe='')}@"
        return replace(self, uris=tuple(uri.replace("://", inserted, 1) for uri in self.uris), login=None)

    def stanza(self) -> str:
        """Return the source as a deb822 stanza for apt."""
        lines = [MARK, "Types: deb", f"URIs: {' '.join(self.uris)}", f"Suites: {' '.join(self.suites)}"]
        lines += [f"Components: {' '.join(self.components)}"] if self.components else []
        lines += [f"Signed-By: {self.signed_by}"] if self.signed_by else []
        return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class Places:
    """The paths of the files that this collection writes for one package group: repository, key, pins, and login.

    ``pin`` and ``login`` are empty if the package manager has no such file.
    """

    source: str
    key: str
    pin: str = ""
    login: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """Return all paths. The key and the login come before the repository that uses them."""
        return tuple(path for path in (self.key, self.login, self.source, self.pin) if path)

    def logins(self, text: str) -> dict[str, str]:
        """Return the text of the login file by its path. An empty text deletes the file."""
        return {self.login: text} if self.login else {}


@dataclass(frozen=True)
class View:
    """A package manager's view of a planned configuration: options for its programs, and the file for its pins."""

    options: Sequence[str]
    pins: Path

    def pin(self, text: str) -> None:
        """Write the pins for this view."""
        self.pins.write_text(text)


def upstream(version: str) -> str:
    """Return a version without epoch and revision: ``580.95.05`` for ``1:580.95.05-0ubuntu1`` and for ``3:580.95.05-1.el9``."""
    whole = version.rpartition(":")[2]
    return _KERNEL_MODULE.sub("", whole.rpartition("-")[0] or whole)


def takes(wanted: str, version: str) -> bool:
    """Return whether a package version matches the requested version.

    An empty request matches every version. Otherwise the request is the full version, the upstream version, or a prefix
    of it (``1.17``).
    """
    return wanted in ("", version, upstream(version)) or upstream(version).startswith(f"{wanted}.")


class PackageTool(Protocol):
    """A package manager on a node. All methods raise PackageProblem if they fail."""

    system: System
    timeout: float
    #: The name of the package manager in messages.
    title: str

    # Queries

    def packages(self) -> Packages:
        """Return the installed packages."""

    def available(self, names: Sequence[str], view: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return the available versions of packages, newest first."""

    def foresee_install(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return the changes that an installation would make. Holds are ignored, and downgrades are allowed."""

    def foresee_removal(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return the changes that a removal would make, including dependent packages."""

    def orphans(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return the removals for these packages and for the dependencies that no other package needs."""

    def view(
        self, *, pin_path: str, source: Source | None = None, key: str = "", refresh: bool = False
    ) -> AbstractContextManager[View]:
        """Yield a view of the package manager as if the source were configured. ``refresh`` also downloads the index of the source."""

    def named(self, path: str) -> tuple[str, str] | None:
        """Return the package name and version of a file, from its content or its name. Return None if the file is not a package."""

    def kept_in(self, folder: str) -> dict[tuple[str, str], str]:
        """Return the paths of the package files in a directory, by package name and version."""

    def cannot_hold(self) -> str:
        """Return the reason why packages cannot be held, or an empty string if they can."""

    # Configuration files

    def places(self, name: str) -> Places:
        """Return the paths of the files that this collection writes for a package group."""

    def plan_source(self, wanted: Source) -> Source | None:
        """Return the source to write, or None if an existing definition is sufficient."""

    def source_text(self, source: Source) -> str:
        """Return the text of the file that defines a source."""

    def login_text(self, source: Source | None) -> str:
        """Return the text of the login file of a source. It is empty if there is no login or no such file."""

    def pins(self, pattern: str, versions: Sequence[str]) -> str:
        """Return pins that allow only these versions of all packages with a matching name. It is empty if there is no pin file."""

    def trust(self, places: Places) -> None:
        """Make the package manager trust the key file of these places, if it does not read the file itself."""

    def distrust(self, places: Places) -> None:
        """Revoke the trust that ``trust`` added, if the key file no longer exists."""

    def lists(self) -> dict[str, str]:
        """Return the cached data of the sources, as input for ``forget_lists``."""

    def forget_lists(self, before: Mapping[str, str]) -> None:
        """Remove the cached data of deleted sources. ``before`` is the cached data before the deletion."""

    # Actions

    def update(self, options: Sequence[str] = (), *, only: str = "") -> None:
        """Download the index of all sources, or only of the source in the file ``only``."""

    def install(self, words: Sequence[str], *, keep: str = "", purge: bool = False) -> None:
        """Install packages. Downloaded files stay in the directory ``keep``. ``purge`` also removes the configuration of removed packages."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages with their configuration."""

    def download(self, words: Sequence[str], folder: str) -> None:
        """Download packages to a directory without installing them."""

    def finish(self) -> None:
        """Finish an interrupted package operation."""

    def mend(self, files: Sequence[str], purge: Sequence[str]) -> None:
        """Repair an interrupted installation: install these package files over the broken packages, and purge the packages in ``purge``."""

    def mark(self, verb: str, names: Sequence[str]) -> None:
        """Mark packages. The verb is ``hold``, ``unhold``, or ``auto``."""
