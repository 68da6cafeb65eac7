# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The port between what is to be installed and the package manager of a node: apt, dnf or zypper. No side effects.

Words for packages are the same for all of them: ``name`` for any version, ``name=version``, the path of a file, and ``name-`` for a package
that goes in the same transaction. Versions are whole: with epoch where there is one, and with the packager's revision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from .core.errors import AcceleratorError
from .core.system import System

INSTALL, REMOVE, PURGE = "install", "remove", "purge"
#: How the names of all files begin that this collection writes for a package manager.
OWN_FILES = "dra-accelerators-"
MARK = "# Written by dra.accelerators; what is changed here is lost."
#: How long a command that only looks may take, in seconds.
LOOK_SECONDS = 120.0
#: SUSE writes the kernel that a module was built for behind the module's version: 580.95.05_k6.4.0_150600.21.
_KERNEL_MODULE = re.compile(r"_k\d.*")


class PackageProblem(AcceleratorError):
    """Packages cannot be installed or removed as they are wanted."""

    default_code = "packages"


@dataclass(frozen=True)
class Change:
    """One package that would be installed, replaced or removed; an empty version is none."""

    verb: str
    name: str
    before: str = ""
    after: str = ""

    def describe(self) -> str:
        """Say what is done."""
        if self.verb != INSTALL:
            return f"{self.verb} {self.name} {self.before}".rstrip()
        return f"install {self.name} {self.after}" + (f" in place of {self.before}" if self.before else "")


@dataclass(frozen=True)
class Packages:
    """What is installed, by name and version; what was left half-way; what is held, and what was installed for others' sake."""

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
    """One package source; ``signed_by`` is the file of the key that signs it, and empty where all keys count that the package manager trusts.

    Suites and components are Debian's. ``packages_signed`` says whether each package has a signature of its own, besides that of the index,
    which is Red Hat's and SUSE's way; the index of a source with a key is signed in any case.

    ``uris`` have no user names and passwords: ``login`` has them, for all addresses of the source.
    """

    uris: tuple[str, ...]
    suites: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    signed_by: str = ""
    path: str = ""
    packages_signed: bool = True
    login: Login | None = None

    def with_login_in_uris(self) -> Source:
        """Return the source with user name and password in its addresses, for a file in a temporary directory of root's."""
        if self.login is None:
            return self
        inserted = f"://{quote(self.login.username, safe='')}:{quote(self.login.password, safe='')}@"
        return replace(self, uris=tuple(uri.replace("://", inserted, 1) for uri in self.uris), login=None)

    def stanza(self) -> str:
        """Return it as apt reads it."""
        lines = [MARK, "Types: deb", f"URIs: {' '.join(self.uris)}", f"Suites: {' '.join(self.suites)}"]
        lines += [f"Components: {' '.join(self.components)}"] if self.components else []
        lines += [f"Signed-By: {self.signed_by}"] if self.signed_by else []
        return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class Places:
    """The files that this collection writes for one group of packages: repository, key, pins, and user name with password.

    ``pin`` and ``login`` are empty if the package manager has no such file.
    """

    source: str
    key: str
    pin: str = ""
    login: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """All of them: what is trusted before what is to be trusted by it."""
        return tuple(path for path in (self.key, self.login, self.source, self.pin) if path)

    def logins(self, text: str) -> dict[str, str]:
        """Return the text of the file with user name and password, by its path. An empty text deletes the file."""
        return {self.login: text} if self.login else {}


@dataclass(frozen=True)
class View:
    """How a package manager sees a node that is not so yet: options for its programs, and where its pins are written."""

    options: Sequence[str]
    pins: Path

    def pin(self, text: str) -> None:
        """Have it keep to these pins."""
        self.pins.write_text(text)


def upstream(version: str) -> str:
    """Return a package's version without its epoch and its revision: ``580.95.05`` of ``1:580.95.05-0ubuntu1`` and of ``3:580.95.05-1.el9``."""
    whole = version.rpartition(":")[2]
    return _KERNEL_MODULE.sub("", whole.rpartition("-")[0] or whole)


def takes(wanted: str, version: str) -> bool:
    """Whether a package's version is one that is asked for: any, the package's whole, the upstream one, or one that begins so (``1.17``)."""
    return wanted in ("", version, upstream(version)) or upstream(version).startswith(f"{wanted}.")


class PackageTool(Protocol):
    """A package manager on a node. All that fails raises PackageProblem."""

    system: System
    timeout: float
    #: What messages call it.
    title: str

    # What is there

    def packages(self) -> Packages:
        """Return what is installed."""

    def available(self, names: Sequence[str], view: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return which versions of packages the sources have, the newest first."""

    def foresee_install(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return what an installation would do, over holds and to older versions as well."""

    def foresee_removal(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return what a removal would do, with the packages that need these."""

    def orphans(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return what would go with these packages: they themselves, and what was installed for others' sake and nobody needs any more."""

    def view(
        self, *, pin_path: str, source: Source | None = None, key: str = "", refresh: bool = False
    ) -> AbstractContextManager[View]:
        """Yield how a source looks as if it were in place; ``refresh`` also asks the sources."""

    def named(self, path: str) -> tuple[str, str] | None:
        """Return the package and the version that a file holds, by itself or by its name; None where it is none of a package."""

    def kept_in(self, folder: str) -> dict[tuple[str, str], str]:
        """Return the files of packages in a folder, by package and version."""

    def cannot_hold(self) -> str:
        """Return why packages cannot be held at their version; empty where they can."""

    # Files for it

    def places(self, name: str) -> Places:
        """Return where it keeps what is written for a group of packages."""

    def plan_source(self, wanted: Source) -> Source | None:
        """Decide what is to be written so that it has a source: nothing where somebody else's definition is enough."""

    def source_text(self, source: Source) -> str:
        """Return a source as it reads it."""

    def login_text(self, source: Source | None) -> str:
        """Return the text of the file with user name and password of a source; empty without a login or a file."""

    def pins(self, pattern: str, versions: Sequence[str]) -> str:
        """Return what has it take these versions alone of all packages whose names match a pattern; empty where it knows no such file."""

    def trust(self, places: Places) -> None:
        """Have it trust the key that lies there, where it does not do so by itself."""

    def distrust(self, places: Places) -> None:
        """Have it no longer trust a key that ``trust`` has made it trust, where the key's file has gone."""

    def lists(self) -> dict[str, str]:
        """Return what it keeps of its sources, as ``forget_lists`` needs it."""

    def forget_lists(self, before: Mapping[str, str]) -> None:
        """Remove what it has kept of sources that are gone; ``before`` is what it kept while they were there."""

    # What is done

    def update(self, options: Sequence[str] = (), *, only: str = "") -> None:
        """Ask the sources what they have, or the one of this file alone."""

    def install(self, words: Sequence[str], *, keep: str = "", purge: bool = False) -> None:
        """Install packages; what is fetched for it is left in the folder ``keep``. ``purge`` also takes the configuration of what goes."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages with their configuration."""

    def download(self, words: Sequence[str], folder: str) -> None:
        """Fetch packages into a folder, and install none."""

    def finish(self) -> None:
        """Finish what was cut short."""

    def mend(self, files: Sequence[str], purge: Sequence[str]) -> None:
        """Bring what was cut short to an end: these packages take the place of what is half there, and these go."""

    def mark(self, verb: str, names: Sequence[str]) -> None:
        """Mark packages as hold, unhold or auto."""
