# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the changes of packages and of the files of their repository. Planning runs queries and changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ..core.host.system import System
from .interface import INSTALL, REMOVE, Change, PackageProblem, Packages, PackageTool, Places, Source, View, upstream
from .kept_packages import FileChange, Kept, file_changes


@dataclass(frozen=True)
class PackageOptions:
    """The options that all modules for vendor packages have.

    ``key`` is the text of the repository's key, ``files`` are paths of local packages. ``remove_unmanaged`` allows the change of
    packages that this collection has not installed.
    """

    source: Source | None = None
    key: str = ""
    files: Sequence[str] = ()
    hold: bool = True
    remove_unmanaged: bool = False


class PackagePlanner(ABC):
    """The queries and steps that the plans for all vendor packages have in common.

    :param title: the software, for messages
    :param pattern: a regular expression of the names of the packages to pin; empty for no pins
    :param texts: the texts of the files that this collection writes, by path
    """

    def __init__(
        self,
        system: System,
        apt: PackageTool,
        places: Places,
        options: PackageOptions,
        *,
        title: str,
        pattern: str,
        texts: Mapping[str, str | None],
    ) -> None:
        self.system = system
        self.apt = apt
        self.places = places
        self.packages: Packages = apt.packages()
        self.texts = texts
        self._package_options = options
        self._title = title
        self._pattern = pattern

    @property
    @abstractmethod
    def unfinished(self) -> bool:
        """Return whether an earlier run was interrupted."""

    # Files

    def _planned_source(self) -> Source | None:
        """Return the repository to write, or None if the node has it already or none is requested."""
        return self.apt.plan_source(self._package_options.source) if self._package_options.source else None

    def _source_files(self, source: Source | None) -> dict[str, str]:
        """Return the texts of the files of a repository, by path. An empty text removes a file."""
        return {
            self.places.key: self._package_options.key if source else "",
            **self.places.logins(self.apt.login_text(source)),
            self.places.source: self.apt.source_text(source) if source else "",
        }

    def _pins(self, version: str) -> str:
        """Return the pins that allow only this version, or an empty string for none."""
        return self.apt.pins(self._pattern, [version]) if self._pattern and version else ""

    def _pin_file(self, version: str) -> dict[str, str]:
        """Return the text of the pin file by its path, if the package manager has one. Versions are pinned only if packages are held."""
        pins = self._pins(version) if self._package_options.hold else ""
        return {self.places.pin: pins} if self.places.pin else {}

    def _file_changes(self, wanted: Mapping[str, str]) -> tuple[FileChange, ...]:
        """Return the changes of this collection's files to these texts."""
        return file_changes(self.texts, wanted)

    # Packages

    def _view(self, source: Source | None) -> AbstractContextManager[View]:
        """Return the package manager's view with the planned repository."""
        key = self._package_options.key if source and source.signed_by else ""
        return self.apt.view(pin_path=self.places.pin, source=source, key=key, refresh=not self._package_options.files)

    def _named_files(self) -> dict[str, tuple[str, str]]:
        """Return the package name and version of each local package file, by path."""
        return {path: found for path in self._package_options.files if (found := self.apt.named(path))}

    def _available(
        self, names: Iterable[str], view: View, local_files: Mapping[str, tuple[str, str]]
    ) -> dict[str, Sequence[str]]:
        """Return the available versions of packages. Local files replace the versions of the sources."""
        found: dict[str, Sequence[str]] = dict(self.apt.available([*names], view.options))
        return {**found, **{name: (version,) for name, version in local_files.values()}}

    def _ask(
        self, words: Sequence[str], view: Sequence[str] = (), local: Mapping[str, str] | None = None
    ) -> tuple[Change, ...]:
        """Return the changes of these package specifications.

        The package manager cannot plan with broken packages, which a real run repairs first, and with local files that
        are not on the node yet. Then the changes are derived from the specifications.
        """
        if not words:
            return ()
        if any(not self.system.exists(path) for path in (local or {}).values()):
            return tuple(self._derive_change(word) for word in words)
        try:
            return self.apt.foresee_install(words, view)
        except PackageProblem:
            if not self.unfinished:
                raise
            return tuple(self._derive_change(word) for word in words)

    def _derive_change(self, word: str) -> Change:
        """Return the change that a package specification names."""
        found = self.apt.named(word)
        is_gone = word.endswith("-") and not found
        name, version = found or (word.partition("=")[0].rstrip("-"), word.partition("=")[2])
        before = self.packages.installed.get(name, "")
        return Change(REMOVE if is_gone else INSTALL, name, before, "" if is_gone else version)

    def _missing_hold_support(self, hold: Sequence[str], remedy: str) -> dict[str, str]:
        """Return the missing requirement for holding packages, if there is one."""
        problem = self.apt.cannot_hold() if hold else ""
        return {"hold": f"{problem} {remedy}"} if problem else {}

    def _removal(self, names: Sequence[str], added: Collection[str]) -> tuple[tuple[str, ...], tuple[Change, ...]]:
        """Return the packages to remove, with those of ``added`` that no other package needs, and all changes.

        Raises PackageProblem if other packages would be removed too.
        """
        orphans = self.apt.orphans(names)
        purge = tuple(change.name for change in orphans if change.name in {*names, *added})
        changes = self.apt.foresee_removal(purge) if purge else ()
        further = [change.name for change in changes if change.name not in purge]
        if further:
            raise PackageProblem(
                f"{', '.join(further)} depend on {self._title} and would be removed too",
                hint="Nothing was removed. Remove these packages first.",
                code="would-remove",
            )
        return purge, changes

    def _former(self, former: Kept | None, variable: str) -> Kept:
        """Return the previous version. Raises PackageProblem if it is unknown."""
        if former is None:
            raise PackageProblem(
                f"The record has no previous version of {self._title}",
                hint=f"Set the version in {variable}, if a source still has it.",
                code="no-former",
            )
        return former

    # Description

    def _interrupted_words(self, words: Sequence[str]) -> list[str]:
        """Describe the repair of an interrupted package operation, if there is one and no other package operation is planned."""
        return ["finish the interrupted package operation"] if self.unfinished and not words else []

    def _change_words(self, version: str, changes: Sequence[Change], own: Collection[str], kind: str = "") -> list[str]:
        """Describe the package changes in one line for each verb. ``own`` are the packages to name, ``kind`` follows the version."""
        installs = [change for change in changes if change.verb == INSTALL]
        gone = [change.name for change in changes if change.verb != INSTALL]
        named = [change for change in installs if change.name in own]
        before = sorted({upstream(change.before) for change in named if change.before} - {version})
        replaced = f" in place of {', '.join(before)}" if before else ""
        others = len(installs) - len(named)
        further = f", and {others} packages for it" if others else ""
        names = ", ".join(change.name for change in named)
        return [
            *([f"install {self._title} {version}{kind}{replaced}: {names}{further}"] if installs else []),
            *([f"remove {', '.join(gone)}"] if gone else []),
        ]
