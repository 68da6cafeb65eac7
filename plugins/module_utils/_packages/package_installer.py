# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Change packages and the files of their repository on a node, verify the result, and undo a failed change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from .._host.driver_installation import keep_record
from .._host.file_restore import not_undone, restore_all
from ..core.errors import AcceleratorError, as_failure
from ..core.host.system import System
from .interface import Change, PackageProblem, Packages, PackageTool
from .kept_packages import FileChange, Kept, PackageStore, write_files
from .package_record import PackageRecord, kept_path, record_path

AnyRecord = TypeVar("AnyRecord", bound=PackageRecord)


@dataclass(frozen=True)
class PackageWork:
    """The planned changes of packages and files.

    ``words`` are package specifications for the package manager, ``changes`` its answer, ``local`` the paths of local
    package files by package. ``refresh`` updates the package lists before.
    """

    target: Kept | None = None
    words: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    files: tuple[FileChange, ...] = ()
    hold: tuple[str, ...] = ()
    unhold: tuple[str, ...] = ()
    local: Mapping[str, str] = field(default_factory=dict)
    refresh: bool = False

    @property
    def added(self) -> tuple[str, ...]:
        """Return the packages that are not installed yet."""
        return tuple(change.name for change in self.changes if change.after and not change.before)


class PackageInstaller(ABC, Generic[AnyRecord]):
    """Implement the common steps of installers of vendor packages. The record is written before and after them.

    :param name: the name of the package group, which is part of the paths of its files
    :param title: the software, for messages
    :param keep: whether to keep packages for a rollback
    :param hint: what to do if a kept package is missing
    """

    def __init__(self, system: System, apt: PackageTool, name: str, *, title: str, keep: bool, hint: str) -> None:
        self.system = system
        self.apt = apt
        self.title = title
        self.places = apt.places(name)
        self.record_path = record_path(name)
        self.package_store = PackageStore(system, apt, kept_path(name), keep=keep, title=title, hint=hint)

    @abstractmethod
    def state(self) -> str:
        """Return a sentence with the installed software, for messages."""

    # Record

    def write(self, record: AnyRecord) -> None:
        """Write the record. An empty record also deletes the kept packages."""
        if not record:
            self.system.remove_tree(self.package_store.folder)
        keep_record(self.system, self.record_path, record.to_text(), doing=record.doing)

    def _complete_record(self, record: AnyRecord) -> AnyRecord:
        """Write the record of a successful installation. Raises PackageProblem with the state of the node."""
        try:
            there = self.apt.packages().installed
            done = replace(record, added=tuple(name for name in record.added if name in there))
            self.write(done)
            self.package_store.forget(done.versions())
        except (AcceleratorError, OSError) as error:
            failed = as_failure(error)
            raise PackageProblem(
                f"The installation has succeeded, but {self.record_path} was not completed: {failed.message.rstrip('.')}. {self.state()}.",
                hint="Correct the problem, and run this again.",
                code=failed.code,
            ) from error
        return done

    def _restore_record(self, record: AnyRecord) -> None:
        """Write the previous record after a rollback."""
        self.write(replace(record, doing=""))
        self.package_store.forget(record.versions())

    # Changes

    def _repair(self, record: AnyRecord, before: Kept | None, ours: Collection[str]) -> None:
        """Repair the packages of an interrupted run: reinstall the version ``before``, or remove those of ``ours`` that are broken.

        Raises PackageProblem.
        """
        if before is not None and before.complete and record.doing == "install":
            self.package_store.verify(before)
            self.apt.mend(self.kept_words(before), [])
        else:
            self.apt.mend([], [name for name in self.apt.packages().broken if name in ours])
        self.write(replace(record, doing=""))

    def _set_up_sources(self, work: PackageWork, broken: Sequence[str]) -> None:
        """Write the planned files, and update the package lists of the source among them.

        An update can fail. Therefore an interrupted package operation is finished before, so that a rollback can run.
        """
        if broken:
            self.apt.finish()
        write_files(self.system, work.files)
        self.apt.trust(self.places)
        if work.words and work.refresh:
            source = self.places.source
            self.apt.update(only=source if self.system.exists(source) else "")

    def _change_packages(self, work: PackageWork) -> None:
        """Run the planned package operations."""
        if work.words:
            self.package_store.ready()
            self.apt.mark("unhold", work.unhold)
            self.apt.install(work.words, keep=self.package_store.folder)
            self.package_store.take(work.local)
        elif work.unhold:
            self.apt.mark("unhold", work.unhold)
        self.apt.mark("hold", work.hold)

    def _remove_packages(self, names: Collection[str]) -> list[str]:
        """Remove the packages that are there, held or not, and return their names."""
        there = self.apt.packages()
        gone = [name for name in names if name in there.installed or name in there.broken]
        self.apt.mark("unhold", [name for name in there.held if name in gone])
        if gone:
            self.apt.remove(gone)
        return gone

    def _verify_packages(self, target: Kept) -> Packages:
        """Return the packages of the node. Raises PackageProblem if they differ from ``target``. An empty version matches any version."""
        packages = self.apt.packages()
        wrong = [
            f"{name} {packages.installed.get(name) or 'not installed'}, expected {each['version'] or 'any version'}"
            for name, each in target.packages.items()
            if name not in packages.installed
            or packages.installed[name] != (each["version"] or packages.installed[name])
        ]
        wrong += [f"{name} is not completely installed" for name in packages.broken]
        if wrong:
            raise PackageProblem(
                f"The installed packages are not the expected ones: {'; '.join(wrong)}", code="not-proved"
            )
        return packages

    def _keep_packages(self, version: str, packages: Mapping[str, str], modules: str = "") -> Kept:
        """Return installed packages as a kept version. Files that are not kept yet are downloaded, as far as a source has them."""
        self.package_store.fetch(packages)
        return Kept(version, modules, self.package_store.files_of(packages))

    # Undo

    def kept_words(self, kept: Kept, gone: Collection[str] = ()) -> list[str]:
        """Return the package specifications that install kept packages, and remove the packages in ``gone``."""
        words = [str(self.system.path(each["path"])) for each in kept.packages.values()]
        return [*words, *(f"{name}-" for name in sorted(gone))]

    def _install_kept(self, kept: Kept, gone: Callable[[Packages], Collection[str]], before: Packages) -> None:
        """Install kept packages over the installed ones, and restore their marks. ``gone`` returns the packages to remove.

        Raises AcceleratorError.
        """
        self.package_store.verify(kept)
        self.apt.install(self.kept_words(kept, gone(self.apt.packages())))
        self.apt.mark("auto", [name for name in kept.packages if name in before.automatic])
        self.apt.mark("hold", [name for name in kept.packages if name in before.held])

    def _undo_sources(self, work: PackageWork) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the steps that restore the files of a repository, and the lists of its packages."""
        lists: dict[str, str] = {}
        if any(each.path == self.places.source for each in work.files):
            yield "package lists", lambda: lists.update(self.apt.lists())
        for each in work.files:
            change = FileChange(each.path, each.after, each.before)
            yield each.path, partial(write_files, self.system, [change])
        yield "repository key", partial(self.apt.distrust, self.places)
        yield "package lists", lambda: self.apt.forget_lists(lists)

    def _undo(
        self,
        work: PackageWork,
        previous: Kept | None,
        steps: Iterator[tuple[str, Callable[[], object]]],
        restore_record: Callable[[], object],
    ) -> tuple[str, str]:
        """Run the steps of a rollback. Return its result, and the state of the node if the rollback is incomplete.

        A failed step does not end the rollback. The record is restored only if all steps succeeded.
        """
        is_possible = not work.words or previous is None or previous.complete
        problems = restore_all(steps)
        if is_possible and not problems:
            problems = restore_all([(self.record_path, restore_record)])
        if problems:
            now = f"{not_undone(problems)}. The next run undoes it first"
        elif not work.words:
            now = "The packages and files are as before"
        elif previous is None:
            now = "The packages that were installed for it were removed again"
        elif not previous.complete:
            now = f"The previous version of {self.title}, {previous.version}, cannot be restored: its packages were not kept, and no source has them"
        else:
            now = f"The node has {self.title} {previous.version} again"
        return now, "" if is_possible and not problems else f" {self.state()}."

    def _undo_holds(self, work: PackageWork, before: Packages) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the steps that restore the holds of packages."""
        held = [name for name in work.hold if name not in before.held]
        yield "holds", partial(self.apt.mark, "unhold", held)
        yield "holds", partial(self.apt.mark, "hold", [name for name in work.unhold if name in before.held])

    def _forget_sources(self, files: Sequence[FileChange], lists: Mapping[str, str]) -> None:
        """Delete the keys and package lists of removed sources. ``lists`` are the package lists before the change."""
        self.apt.distrust(self.places)
        if any(change.path == self.places.source for change in files):
            self.apt.forget_lists(lists)
