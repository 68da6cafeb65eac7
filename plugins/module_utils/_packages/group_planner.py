# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the changes to a package group from the module options and the state of the node. Planning runs queries and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .._host.driver_installation import DeviceUsers
from ..core.host.system import System, text_or_none
from .interface import Change, PackageTool, View, upstream
from .kept_packages import FileChange, Kept
from .package_group import (
    Choice,
    Group,
    Origin,
    Record,
    UnitState,
    choose,
    install_specifications,
    installed_choice,
    not_offered_error,
    read_record,
    refuse_removals,
    unit_steps,
)
from .package_installer import PackageWork
from .package_planner import PackageOptions, PackagePlanner

_STATES = ("LoadState", "UnitFileState", "ActiveState")
_SECONDS = 60.0


@dataclass(frozen=True)
class Options(PackageOptions):
    """The options of a module for a package group."""

    version: str = ""
    latest: bool = False


@dataclass(frozen=True)
class Work(PackageWork):
    """The planned changes of a group. ``target`` is None for a removal.

    ``purge`` are packages to remove. ``to_origin`` restores the state of before this collection's first change.
    """

    purge: tuple[str, ...] = ()
    to_origin: bool = False


@dataclass(frozen=True)
class Decision:
    """A plan: its steps as text, its changes, the claims and processes that block it, missing prerequisites, and packages to leave installed."""

    steps: tuple[str, ...] = ()
    work: Work = field(default_factory=Work)
    blocked_by: DeviceUsers = field(default_factory=DeviceUsers)
    lacking: Mapping[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()


def unit_states(system: System, group: Group) -> dict[str, UnitState]:
    """Return the systemd state of each unit of a group."""
    found = {}
    for unit in group.units:
        said = [
            system.run(["systemctl", "show", f"--property={name}", "--value", unit.name], _SECONDS).stdout.strip()
            for name in _STATES
        ]
        found[unit.name] = UnitState(*said)
    return found


class Planner(PackagePlanner):
    """Plan changes to a package group on one node. ``users`` returns the claims and processes that block a replacement."""

    def __init__(
        self,
        system: System,
        apt: PackageTool,
        group: Group,
        options: Options,
        users: Callable[[], DeviceUsers] = DeviceUsers,
    ) -> None:
        places = apt.places(group.name)
        texts = {path: text_or_none(system, path) for path in places.all}
        pattern = f"^({group.pattern})$" if group.pinned else ""
        super().__init__(system, apt, places, options, title=group.title, pattern=pattern, texts=texts)
        self.group = group
        self.options = options
        self.users = users
        self.record: Record = read_record(text_or_none(system, group.record), group.record)
        self.units = unit_states(system, group)

    @property
    def broken(self) -> list[str]:
        """Return the broken packages of the group."""
        ours = {*self.record.added, *self.group.installed_members(dict.fromkeys(self.packages.broken, ""))}
        return [name for name in self.packages.broken if name in ours]

    @property
    def unfinished(self) -> bool:
        """Return whether an earlier run was interrupted."""
        return self.record.unfinished or bool(self.broken)

    @property
    def version(self) -> str:
        """Return the installed upstream version, or an empty string. The first part of the group determines it, or any package if there are no parts."""
        there = self.group.installed_members(self.packages.installed)
        names = self.group.parts[0].names if self.group.parts else tuple(there)
        return next((upstream(there[name]) for name in names if name in there), "")

    # Install

    def present(self) -> Decision:
        """Plan the installation of the requested version. Raises AcceleratorError."""
        group, options = self.group, self.options
        source = self._planned_source()
        there = installed_choice(group, options.version, self.packages.installed)
        words: tuple[str, ...] = ()
        changes: tuple[Change, ...] = ()
        local: dict[str, str] = {}
        if there is not None and not options.latest and not self.unfinished:
            choice = there
        else:
            with self._view(source) as view:
                choice, words, changes, local = self._choose_packages(view)
        wanted = {**self._source_files(source), **self._pin_file(choice.version)}
        packages = {name: {"version": each, "path": "", "checksum": ""} for name, each in choice.packages.items()}
        hold, unhold = self._holds(choice.exact, bool(words))
        work = Work(
            target=Kept(choice.version, "", packages),
            words=words,
            changes=changes,
            files=self._file_changes(wanted),
            hold=hold,
            unhold=unhold,
            local=local,
            refresh=bool(words) and not options.files,
        )
        return self._decided(work)

    def _holds(self, exact: Mapping[str, str], exchanges: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the packages to hold and the packages to unhold. apt drops a hold when it overrides the hold."""
        held = self.packages.held
        group = self.group.installed_members(self.packages.installed)
        recorded = self.record.now.packages if self.record.now else {}
        ours = {*recorded} - {*(self.record.origin.held if self.record.origin else ())}
        if exchanges:
            hold = set(exact) if self.options.hold else (held & {*exact}) - ours
            return tuple(sorted(hold)), tuple(sorted(held & {*group, *exact}))
        if self.options.hold:
            return tuple(sorted(set(exact) - held)), ()
        return (), tuple(sorted(held & {*exact} & ours))

    def _choose_packages(self, view: View) -> tuple[Choice, tuple[str, ...], tuple[Change, ...], dict[str, str]]:
        """Choose packages with the planned repository, and query the changes from the package manager."""
        group, wanted, installed = self.group, self.options.version, self.packages.installed
        local_files = self._named_files()
        files = {name: path for path, (name, _version) in local_files.items()}
        available = self._available([*group.names, *group.installed_members(installed)], view, local_files)
        there = installed_choice(group, wanted, installed)
        # An interrupted run is repaired with the same version.
        same = there.version if there is not None and self.unfinished and not self.options.latest else wanted
        choice = choose(group, same, installed, available) or there
        if choice is None:
            raise not_offered_error(group, wanted, available)
        words, gone = install_specifications(group, choice, installed, files)
        view.pin(self._pins(choice.version))
        local = {name: path for name, path in files.items() if path in words}
        changes = self._ask(words, view.options, local)
        refuse_removals(group, changes, gone)
        return choice, tuple(words), changes, local

    # Rollback to the previous version

    def previous(self) -> Decision:
        """Plan the return to the previous version. Raises AcceleratorError."""
        former = self._former(self.record.former, self.group.variable)
        words, gone = self.words_for(former)
        changes = self._ask(words)
        refuse_removals(self.group, changes, gone)
        exact = {name: each["version"] for name, each in former.packages.items()}
        hold, unhold = self._holds({n: v for n, v in exact.items() if upstream(v) == former.version}, exchanges=True)
        files = self._file_changes(self._pin_file(former.version))
        return self._decided(Work(former, tuple(words), changes=changes, files=files, hold=hold, unhold=unhold))

    def words_for(self, former: Kept) -> tuple[list[str], list[str]]:
        """Return the package specifications that restore the kept packages, and the names of the packages to remove."""
        there = self.group.installed_members(self.packages.installed)
        gone = sorted({*there, *self.broken} - set(former.packages))
        words = [str(self.system.path(each["path"])) for each in former.packages.values()]
        return [*words, *(f"{name}-" for name in gone)], gone

    def _decided(self, work: Work) -> Decision:
        target = work.target
        version = target.version if target else ""
        steps = [
            *(each.describe() for each in work.files),
            *self._change_words(
                version, work.changes, self.group.installed_members({each.name: "" for each in work.changes})
            ),
            *self._interrupted_words(work.words),
            *([f"hold {', '.join(work.hold)} at {version}"] if work.hold and (work.words or not work.unhold) else []),
            *([f"hold {', '.join(work.unhold)} no longer"] if work.unhold and not work.hold else []),
            *unit_steps(self.group.units, self.units, exchanged=bool(work.words), masked=self.record.masked),
        ]
        disturbs = bool(work.words) or any(word.startswith("switch ") for word in steps)
        lacking = self._missing_hold_support(work.hold, "Or do not hold the packages.")
        return Decision(tuple(steps), work, self.users() if disturbs else DeviceUsers(), lacking)

    # Removal, or return to the original packages

    def absent(self) -> Decision:
        """Plan the removal. Packages that this collection did not install stay. Raises PackageProblem."""
        group, record = self.group, self.record
        there = group.installed_members(self.packages.installed)
        if not record and not self.options.remove_unmanaged:
            return Decision(left=tuple(f"{name} {each}" for name, each in there.items()))
        files = self._file_changes(dict.fromkeys(self.texts, ""))
        origin = record.origin or Origin()
        if origin.kept is not None and not self.options.remove_unmanaged:
            return self._restore_origin(origin, origin.kept, there, files)
        if record.doing:
            # Broken packages can be present, for which apt reports no changes. A real run repairs them first.
            ours = {*there, *self.broken, *(name for name in record.added if name in self.packages.installed)}
            work = Work(purge=tuple(sorted(ours)), files=files)
            return Decision(
                (f"finish the interrupted package operation, and remove {group.title}",), work, self._disturbed(there)
            )
        top = sorted({*there, *self.broken})
        purge, changes = self._removal(top, record.added)
        versions = ", ".join(sorted({upstream(each) for each in there.values()}))
        steps = [
            *([f"remove {group.title} {versions}: {', '.join(purge)}"] if purge else []),
            *(each.describe() for each in files),
            *(["delete the record of the installation"] if record and not purge else []),
        ]
        return Decision(tuple(steps), Work(purge=purge, changes=changes, files=files), self._disturbed(there))

    def _disturbed(self, there: Mapping[str, str]) -> DeviceUsers:
        return self.users() if there else DeviceUsers()

    def _restore_origin(
        self, origin: Origin, kept: Kept, there: Mapping[str, str], files: tuple[FileChange, ...]
    ) -> Decision:
        """Plan the return to the packages that were installed before this collection's first change."""
        versions = {name: each["version"] for name, each in kept.packages.items()}
        words: list[str] = []
        gone: list[str] = []
        changes: tuple[Change, ...] = ()
        if dict(there) != versions or self.unfinished:
            words, gone = self.words_for(kept)
            changes = self._ask(words) if kept.complete else ()
            refuse_removals(self.group, changes, gone)
        unhold = tuple(sorted((self.packages.held & {*there, *versions}) - {*origin.held}))
        back = f"go back to {self.group.title} {kept.version}, which was here before"
        units = [
            f"switch {name} {'on' if state == 'enabled' else 'off'}"
            for name, state in origin.units.items()
            if (now := self.units.get(name)) is not None and now.exists and now.is_on != (state == "enabled")
        ]
        steps = [
            *([back] if words else []),
            *(each.describe() for each in files),
            *([f"hold {', '.join(unhold)} no longer"] if unhold else []),
            *units,
        ]
        work = Work(
            target=kept,
            words=tuple(words),
            changes=changes,
            files=files,
            hold=origin.held,
            unhold=unhold,
            to_origin=True,
        )
        steps = steps or ["delete the record of the changes"]
        return Decision(tuple(steps), work, self._disturbed(there) if words else DeviceUsers())
