# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Install and remove a package group on a node, verify the result, and roll back a failed change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from .._host.driver_installation import COMMAND_SECONDS, keep_record, last_words, systemctl
from .._host.file_restore import not_undone, reason, restore_all
from ..core.errors import AcceleratorError, as_failure
from ..core.host.system import System, text_or_none
from .group_planner import Work, unit_states
from .interface import PackageProblem, Packages, PackageTool, upstream
from .kept_packages import FileChange, Kept, PackageStore, write_files
from .package_group import Group, Origin, Record, Unit, UnitState, read_record, unit_verbs

#: Files in these directories are recreated at each boot.
_VOLATILE = ("/run/", "/var/run/")


class GroupInstaller:
    """Install and remove one package group on a node, and keep its record.

    ``proof`` is called after packages and units have reached the desired state. It raises AcceleratorError if they do
    not work.
    """

    def __init__(
        self, system: System, apt: PackageTool, group: Group, *, keep: bool, proof: Callable[[], None] = lambda: None
    ) -> None:
        self.system = system
        self.apt = apt
        self.group = group
        self.places = apt.places(group.name)
        self.proof = proof
        hint = f"Name that version in {group.variable}, where a source still has it."
        self.package_store = PackageStore(system, apt, group.kept, keep=keep, title=group.title, hint=hint)

    def record(self) -> Record:
        """Return the record. Raises AcceleratorError if it cannot be read."""
        return read_record(text_or_none(self.system, self.group.record), self.group.record)

    def write(self, record: Record) -> None:
        """Write the record. An empty record also deletes the kept packages."""
        if not record:
            self.system.remove_tree(self.group.kept)
        keep_record(self.system, self.group.record, record.to_text(), doing=record.doing)

    def mend(self) -> None:
        """Repair the packages of an interrupted run: reinstall the last known version, or remove the broken packages. Raises PackageProblem."""
        record, packages = self.record(), self.apt.packages()
        if not record.doing:
            return
        base = record.now or (record.origin.kept if record.origin else None)
        files: list[str] = []
        purge: list[str] = []
        if base is not None and base.complete and record.doing == "install":
            self.package_store.verify(base)
            files = [str(self.system.path(each["path"])) for each in base.packages.values()]
        else:
            ours = {*record.added, *self.group.of_it(dict.fromkeys(packages.broken, ""))}
            purge = [name for name in packages.broken if name in ours]
        self.apt.mend(files, purge)
        self.write(replace(record, doing=""))

    # Install

    def carry_out(self, work: Work) -> Record:
        """Apply the planned work and return the new record. Raises AcceleratorError with the resulting state of the node."""
        target = work.target
        if target is None:
            return self._remove(work)
        if work.to_origin:
            return self._to_origin(work, target)
        record, packages, units = self.record(), self.apt.packages(), unit_states(self.system, self.group)
        origin = record.origin or self._origin(packages, units)
        former = self._former(record, packages, work)
        new = (change.name for change in work.changes if change.after and not change.before)
        added = tuple(dict.fromkeys((*record.added, *new)))
        masked = self._masked(record, units)
        self.write(replace(record, origin=origin, added=added, doing="install", masked=masked))
        try:
            self._bring_sources(work)
            if work.words and not all(each is None or each.complete for each in (origin.kept, former)):
                # The new sources can contain the packages that were installed before.
                origin = replace(origin, kept=self._completed(origin.kept))
                former = self._completed(former)
                self.write(replace(record, origin=origin, added=added, doing="install", masked=masked))
            self._install(work, packages.broken)
            self._switch(masked, exchanged=bool(work.words))
            now = self._prove(target)
            self.proof()
        except (AcceleratorError, OSError) as error:
            self._go_back(as_failure(error), work, record, former, packages, units)
        changed = record.now is None or record.now.version != now.version
        # A removal restores the original packages. Before the first version change, the record has no other previous
        # version.
        before = (former or record.former) if changed and former != now else record.former
        on = {unit.name for unit in self.group.units if unit.on}
        return self._complete_record(
            Record(now, before, origin, added, masked=tuple(name for name in masked if name not in on))
        )

    def _complete_record(self, record: Record) -> Record:
        """Write the record of a successful installation. Raises PackageProblem with the state of the node."""
        try:
            there = self.apt.packages().installed
            done = replace(record, added=tuple(name for name in record.added if name in there))
            self.write(done)
            self.package_store.forget((done.now, done.former, done.origin.kept if done.origin else None))
        except (AcceleratorError, OSError) as error:
            failed = as_failure(error)
            raise PackageProblem(
                f"The installation has succeeded, but {self.group.record} was not completed: {failed.message.rstrip('.')}. {self._state()}.",
                hint="Solve the problem, and run this again.",
                code=failed.code,
            ) from error
        return done

    def _state(self) -> str:
        """Return a sentence with the installed packages of the node."""
        try:
            there = self.group.of_it(self.apt.packages().installed)
        except (AcceleratorError, OSError) as error:
            return f"The installed packages cannot be read: {reason(error)}"
        return f"Installed: {', '.join(f'{name} {version}' for name, version in sorted(there.items())) or 'no package'}"

    def _masked(self, record: Record, units: dict[str, UnitState]) -> tuple[str, ...]:
        """Return the units that this collection has masked or will mask. Units that others have masked are not included."""
        new = (unit.name for unit in self.group.units if unit.masked and not units[unit.name].is_masked)
        return tuple(dict.fromkeys((*record.masked, *new)))

    def _origin(self, packages: Packages, units: dict[str, UnitState]) -> Origin:
        """Return the state of the node before the first change."""
        there = self.group.of_it(packages.installed)
        kept = None
        if there:
            self.package_store.fetch(there)
            kept = Kept(max(_versions(there)), "", self.package_store.files_of(there))
        texts: dict[str, str | None] = {}
        for path in self.group.traces:
            if path.endswith("/") or path.startswith(_VOLATILE):
                texts[path] = "" if self.system.exists(path) else None
            else:
                texts[path] = text_or_none(self.system, path)
        held = tuple(sorted(packages.held & {*there}))
        return Origin(kept, held, {name: state.file for name, state in units.items() if state.exists}, texts)

    def _former(self, record: Record, packages: Packages, work: Work) -> Kept | None:
        """Return the installed packages with their kept files, as the previous version. Missing files are downloaded."""
        if not work.words:
            return record.now
        there = self.group.of_it(packages.installed)
        recorded = {name: each["version"] for name, each in record.now.packages.items()} if record.now else {}
        if record.now is not None and record.now.complete and recorded == there:
            return record.now
        if not there:
            return None
        self.package_store.fetch(there)
        return Kept(max(_versions(there)), "", self.package_store.files_of(there))

    def _bring_sources(self, work: Work) -> None:
        """Write the planned files, and update the package lists of the source among them."""
        write_files(self.system, work.files)
        self.apt.trust(self.places)
        if work.words and work.refresh:
            source = self.places.source
            self.apt.update(only=source if self.system.exists(source) else "")

    def _completed(self, kept: Kept | None) -> Kept | None:
        """Return the kept packages with the files that the sources now offer."""
        if kept is None or kept.complete:
            return kept
        there = {name: each["version"] for name, each in kept.packages.items()}
        self.package_store.fetch(there)
        return replace(kept, packages=self.package_store.files_of(there))

    def _install(self, work: Work, broken: Sequence[str]) -> None:
        """Run the planned package operations."""
        if broken:
            self.apt.finish()
        if work.words:
            self.package_store.ready()
            self.apt.mark("unhold", work.unhold)
            self.apt.install(work.words, keep=self.package_store.folder)
            self.package_store.take(work.local)
        elif work.unhold:
            self.apt.mark("unhold", work.unhold)
        self.apt.mark("hold", work.hold)

    def _switch(self, masked: Sequence[str], *, exchanged: bool) -> None:
        """Bring the units to their desired state and verify it. ``masked`` are the units that this collection masked. Raises PackageProblem."""
        if exchanged and self.group.units:
            self._said(["systemctl", "daemon-reload"])
        states = unit_states(self.system, self.group)
        for unit in self.group.units:
            state = states[unit.name]
            if unit.on is False and not state.exists:
                continue
            # The running process still uses the old program.
            renewed = exchanged and unit.on is True and state.is_active and unit.stays
            verbs = unit_verbs(unit, state, renewed=renewed, ours=unit.name in masked)
            for verb in verbs:
                self._notify_systemd(verb, unit)
            if verbs and unit.makes and not unit.on:
                # No process recreates the file from now on.
                self.system.remove(unit.makes)
        after = unit_states(self.system, self.group)
        wrong = [self._wrong(unit, after[unit.name]) for unit in self.group.units if unit.on is not None]
        if any(wrong):
            raise PackageProblem("; ".join(each for each in wrong if each), code="unit")

    def _notify_systemd(self, verb: str, unit: Unit) -> None:
        try:
            systemctl(self.system, verb, unit.name)
        except AcceleratorError as error:
            raise PackageProblem(f"{error.message}. {self._journal(unit.name)}", code="unit") from error

    def _wrong(self, unit: Unit, state: UnitState) -> str:
        """Return how a unit differs from its desired state, or an empty string."""
        if not unit.on:
            wanted = (
                "masked" if unit.masked and state.exists and not state.is_masked else "off" if state.is_active else ""
            )
            return f"{unit.name} is {state.file} and {state.active}, expected {wanted}" if wanted else ""
        if not state.is_on:
            return f"{unit.name} is {state.file or 'not there'}, expected enabled"
        if unit.stays and not state.is_active:
            return f"{unit.name} is {state.active}, expected active. {self._journal(unit.name)}"
        return ""

    def _journal(self, unit: str) -> str:
        """Return the end of a unit's journal."""
        with contextlib.suppress(OSError):
            done = self.system.run(["journalctl", "-u", unit, "-n", "5", "-o", "cat", "--no-pager"], COMMAND_SECONDS)
            return f"Its journal ends with: {last_words(done.stdout)}"
        return ""

    def _said(self, argv: Sequence[str]) -> None:
        done = self.system.run(argv, COMMAND_SECONDS * 5)
        if done.returncode:
            raise PackageProblem(f"{' '.join(argv)} ended with {done.returncode}: {last_words(done.stderr)}")

    def _prove(self, target: Kept) -> Kept:
        """Verify the installed packages and return them as a kept version. Raises PackageProblem."""
        packages = self.apt.packages()
        wrong = [
            f"{name} {packages.installed.get(name) or 'not installed'}, expected {each['version']}"
            for name, each in target.packages.items()
            if packages.installed.get(name) != each["version"]
        ]
        left = [f"{name} left half-way" for name in packages.broken]
        if wrong or left:
            raise PackageProblem(
                f"The packages are not what they should be: {'; '.join([*wrong, *left])}", code="not-proved"
            )
        there = self.group.of_it(packages.installed)
        self.package_store.fetch(there)
        return Kept(target.version, "", self.package_store.files_of(there))

    def _go_back(
        self,
        error: AcceleratorError,
        work: Work,
        record: Record,
        former: Kept | None,
        packages: Packages,
        units: dict[str, UnitState],
    ) -> NoReturn:
        """Roll back a failed change, and raise its error with the state of the node. A failed step does not end the rollback."""
        is_possible = not work.words or former is None or former.complete
        problems = restore_all(self._steps_back(work, former, packages, units))
        if is_possible and not problems:
            problems = restore_all([(self.group.record, partial(self._record_back, record))])
        if not work.words:
            now = "Its packages and files are as before"
        elif former is None:
            now = "The packages that were installed for it were removed again"
        elif not former.complete:
            now = f"The previous version, {former.version}, cannot be restored: its packages were not kept, and are in no source any more"
        else:
            now = f"The node has {former.version} again"
        if problems:
            now = f"{not_undone(problems)}. The next run undoes it first"
        state = "" if is_possible and not problems else f" {self._state()}."
        raise PackageProblem(f"{error.message.rstrip('.')}. {now}.{state}", hint=error.hint, code=error.code) from error

    def _steps_back(
        self, work: Work, former: Kept | None, packages: Packages, units: dict[str, UnitState]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the steps of a rollback."""
        lists: dict[str, str] = {}
        if any(each.path == self.places.source for each in work.files):
            yield "package lists", lambda: lists.update(self.apt.lists())
        for each in work.files:
            change = FileChange(each.path, each.after, each.before)
            yield each.path, partial(write_files, self.system, [change])
        yield "repository key", partial(self.apt.distrust, self.places)
        yield "package lists", lambda: self.apt.forget_lists(lists)
        if not work.words:
            held = [name for name in work.hold if name not in packages.held]
            yield "holds", partial(self.apt.mark, "unhold", held)
            yield "holds", partial(self.apt.mark, "hold", [name for name in work.unhold if name in packages.held])
        elif former is None:
            yield (
                "packages",
                partial(self._purge, [change.name for change in work.changes if change.after and not change.before]),
            )
            yield "files of packages", lambda: self._restore_traces(self.record().origin or Origin())
        elif former.complete:
            yield "packages", partial(self._apply, former, packages)
        yield "units", partial(self._units_back, {name: state.file for name, state in units.items() if state.exists})

    def _record_back(self, record: Record) -> None:
        self.write(replace(record, doing=""))
        self.package_store.forget((record.now, record.former, record.origin.kept if record.origin else None))

    def _apply(self, kept: Kept, packages: Packages) -> None:
        """Install kept packages over the installed ones, and restore their marks. Raises AcceleratorError."""
        self.package_store.verify(kept)
        there = self.apt.packages()
        mine = {*self.group.of_it(there.installed), *self.group.of_it(dict.fromkeys(there.broken, ""))}
        words = [str(self.system.path(each["path"])) for each in kept.packages.values()]
        self.apt.install([*words, *(f"{name}-" for name in sorted(mine - set(kept.packages)))])
        self.apt.mark("auto", [name for name in kept.packages if name in packages.automatic])
        self.apt.mark("hold", [name for name in kept.packages if name in packages.held])

    def _units_back(self, files: dict[str, str]) -> None:
        """Restore the enabled, disabled, or masked state of units. Units that no longer exist are skipped."""
        states = unit_states(self.system, self.group)
        self._unmask(
            [name for name, file in files.items() if name in states and states[name].is_masked and file != "masked"]
        )
        states = unit_states(self.system, self.group)
        for name, file in files.items():
            state = states.get(name)
            if state is None or not state.exists or file not in ("enabled", "disabled", "masked"):
                continue
            stays = next((unit.stays for unit in self.group.units if unit.name == name), True)
            for verb in unit_verbs(Unit(name, file == "enabled", stays, masked=file == "masked"), state):
                self._notify_systemd(verb, Unit(name))

    def _unmask(self, names: Sequence[str]) -> None:
        """Unmask those of the units that are masked."""
        states = unit_states(self.system, self.group)
        for name in names:
            if name in states and states[name].is_masked:
                self._notify_systemd("unmask", Unit(name))

    # Remove

    def _purge(self, names: Sequence[str]) -> None:
        """Remove packages. Their units are disabled first, because the package manager does not remove the symlinks that enable them."""
        self._switch_off([unit.name for unit in self.group.units])
        self._unmask(self.record().masked)
        there = self.apt.packages()
        gone = [name for name in names if name in there.installed or name in there.broken]
        self.apt.mark("unhold", [name for name in there.held if name in gone])
        if gone:
            self.apt.remove(gone)
            if self.group.units:
                self._said(["systemctl", "daemon-reload"])

    def _switch_off(self, names: Sequence[str]) -> None:
        for name, state in unit_states(self.system, self.group).items():
            for verb in unit_verbs(Unit(name, False), state) if name in names and state.exists else ():
                self._notify_systemd(verb, Unit(name))

    def _restore_traces(self, origin: Origin) -> None:
        """Restore the files that packages create to their original text, and remove the packages' empty directories."""
        for path in sorted(self.group.traces, key=len, reverse=True):
            text = origin.texts.get(path)
            if path.endswith("/"):
                with contextlib.suppress(OSError):
                    # A directory with files of others stays.
                    if text is None:
                        self.system.path(path).rmdir()
            elif text is None:
                self.system.remove(path)
            elif not path.startswith(_VOLATILE) and text_or_none(self.system, path) != text:
                self.system.replace_text(path, text)

    def _remove(self, work: Work) -> Record:
        record, before = self.record(), self.apt.lists()
        self.write(replace(record, origin=record.origin or Origin(), doing="remove"))
        self._purge(work.purge)
        self._restore_traces(record.origin or Origin())
        return self._forget(work, before)

    def _to_origin(self, work: Work, kept: Kept) -> Record:
        """Return to the packages and units that the node had before this collection's first change."""
        record, before = self.record(), self.apt.lists()
        origin = record.origin or Origin()
        if work.words:
            self.package_store.verify(kept)
        self.write(replace(record, doing="remove"))
        self.apt.mark("unhold", work.unhold)
        if work.words:
            self._switch_off([name for name in unit_states(self.system, self.group) if name not in origin.units])
            self._unmask(record.masked)
            self.apt.install(work.words, purge=True)
        held = self.apt.packages().held
        self.apt.mark("hold", [name for name in origin.held if name not in held])
        self._units_back(dict(origin.units))
        self._restore_traces(origin)
        return self._forget(work, before)

    def _forget(self, work: Work, lists: dict[str, str]) -> Record:
        write_files(self.system, work.files)
        self.apt.distrust(self.places)
        if any(change.path == self.places.source for change in work.files):
            self.apt.forget_lists(lists)
        done = Record()
        self.write(done)
        return done


def _versions(there: dict[str, str]) -> list[str]:
    """Return the upstream versions of packages."""
    return [upstream(each) for each in there.values()]
