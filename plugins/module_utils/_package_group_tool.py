# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Brings a group of packages to a node and away from it, proves what has become of it, and goes back where it does not become what it should."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from ._driver_install import COMMAND_SECONDS, keep_record, last_words, systemctl, text_or_none
from ._package_files import FileChange, Keeper, Kept, write_files
from ._package_group import Group, Origin, Record, Unit, UnitState, read_record, unit_verbs
from ._package_group_plan import Work, unit_states
from ._package_port import PackageProblem, Packages, PackageTool, upstream
from .core.errors import AcceleratorError
from .core.system import System

#: What is made anew at each boot.
_VOLATILE = ("/run/", "/var/run/")


class GroupInstaller:
    """A group of packages on a node, and what this collection knows of it.

    ``proof`` is called when packages and units are as they should be, and raises AcceleratorError where they do not work.
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
        self.keeper = Keeper(system, apt, group.kept, keep=keep, title=group.title, hint=hint)

    def record(self) -> Record:
        """Return what is ours. Raises AcceleratorError for a record that cannot be read."""
        return read_record(text_or_none(self.system, self.group.record), self.group.record)

    def write(self, record: Record) -> None:
        """Write the record; with one that says nothing all goes that was kept."""
        if not record:
            self.system.remove_tree(self.group.kept)
        keep_record(self.system, self.group.record, record.to_text())

    def mend(self) -> None:
        """Bring an earlier run that was cut short to where this one can begin: to the version before, or to none half there. Raises PackageProblem."""
        record, packages = self.record(), self.apt.packages()
        if not record.doing:
            return
        base = record.now or (record.origin.kept if record.origin else None)
        files: list[str] = []
        purge: list[str] = []
        if base is not None and base.complete and record.doing == "install":
            self.keeper.verify(base)
            files = [str(self.system.path(each["path"])) for each in base.packages.values()]
        else:
            ours = {*record.added, *self.group.of_it(dict.fromkeys(packages.broken, ""))}
            purge = [name for name in packages.broken if name in ours]
        self.apt.mend(files, purge)
        self.write(replace(record, doing=""))

    # To a version

    def carry_out(self, work: Work) -> Record:
        """Do the work; return the record afterwards. Raises AcceleratorError, saying what became of the node."""
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
                # What somebody else has installed may be in the sources that came just now.
                origin = replace(origin, kept=self._completed(origin.kept))
                former = self._completed(former)
                self.write(replace(record, origin=origin, added=added, doing="install", masked=masked))
            self._install(work, packages.broken)
            self._switch(masked, exchanged=bool(work.words))
            now = self._prove(target)
            self.proof()
        except AcceleratorError as error:
            self._go_back(error, work, record, former, packages, units)
        changed = record.now is None or record.now.version != now.version
        there = self.apt.packages().installed
        kept = tuple(name for name in added if name in there)
        # What was there before this collection came is gone back to by its removal; before the first change of a version there is nothing else.
        before = (former or record.former) if changed and former != now else record.former
        on = {unit.name for unit in self.group.units if unit.on}
        done = Record(now, before, origin, kept, masked=tuple(name for name in masked if name not in on))
        self.write(done)
        self.keeper.forget((done.now, done.former, origin.kept))
        return done

    def _masked(self, record: Record, units: dict[str, UnitState]) -> tuple[str, ...]:
        """Return the units whose mask is this collection's, or will be. One that somebody else has masked is not among them."""
        new = (unit.name for unit in self.group.units if unit.masked and not units[unit.name].is_masked)
        return tuple(dict.fromkeys((*record.masked, *new)))

    def _origin(self, packages: Packages, units: dict[str, UnitState]) -> Origin:
        """Return what is there before the first change."""
        there = self.group.of_it(packages.installed)
        kept = None
        if there:
            self.keeper.fetch(there)
            kept = Kept(max(_versions(there)), "", self.keeper.files_of(there))
        texts: dict[str, str | None] = {}
        for path in self.group.traces:
            if path.endswith("/") or path.startswith(_VOLATILE):
                texts[path] = "" if self.system.exists(path) else None
            else:
                texts[path] = text_or_none(self.system, path)
        held = tuple(sorted(packages.held & {*there}))
        return Origin(kept, held, {name: state.file for name, state in units.items() if state.exists}, texts)

    def _former(self, record: Record, packages: Packages, work: Work) -> Kept | None:
        """Return what is there now, with the files by which it can be gone back to; what is not kept yet is fetched."""
        if not work.words:
            return record.now
        there = self.group.of_it(packages.installed)
        recorded = {name: each["version"] for name, each in record.now.packages.items()} if record.now else {}
        if record.now is not None and record.now.complete and recorded == there:
            return record.now
        if not there:
            return None
        self.keeper.fetch(there)
        return Kept(max(_versions(there)), "", self.keeper.files_of(there))

    def _bring_sources(self, work: Work) -> None:
        """Write files, and have apt read the source that is among them."""
        write_files(self.system, work.files)
        self.apt.trust(self.places)
        if work.words and work.refresh:
            source = self.places.source
            self.apt.update(only=source if self.system.exists(source) else "")

    def _completed(self, kept: Kept | None) -> Kept | None:
        """Return what is gone back to with the files that a source has now."""
        if kept is None or kept.complete:
            return kept
        there = {name: each["version"] for name, each in kept.packages.items()}
        self.keeper.fetch(there)
        return replace(kept, packages=self.keeper.files_of(there))

    def _install(self, work: Work, broken: Sequence[str]) -> None:
        """Have the package manager do what was decided."""
        if broken:
            self.apt.finish()
        if work.words:
            self.keeper.ready()
            self.apt.mark("unhold", work.unhold)
            self.apt.install(work.words, keep=self.keeper.folder)
            self.keeper.take(work.local)
        elif work.unhold:
            self.apt.mark("unhold", work.unhold)
        self.apt.mark("hold", work.hold)

    def _switch(self, masked: Sequence[str], *, exchanged: bool) -> None:
        """Bring the units to what is asked for, and see that they are; ``masked`` are those whose mask is ours. Raises PackageProblem."""
        if exchanged and self.group.units:
            self._said(["systemctl", "daemon-reload"])
        states = unit_states(self.system, self.group)
        for unit in self.group.units:
            state = states[unit.name]
            if unit.on is False and not state.exists:
                continue
            # What runs is the program of before.
            renewed = exchanged and unit.on is True and state.is_active and unit.stays
            verbs = unit_verbs(unit, state, renewed=renewed, ours=unit.name in masked)
            for verb in verbs:
                self._tell(verb, unit)
            if verbs and unit.makes and not unit.on:
                # Nobody would make it anew from now on.
                self.system.remove(unit.makes)
        after = unit_states(self.system, self.group)
        wrong = [self._wrong(unit, after[unit.name]) for unit in self.group.units if unit.on is not None]
        if any(wrong):
            raise PackageProblem("; ".join(each for each in wrong if each), code="unit")

    def _tell(self, verb: str, unit: Unit) -> None:
        try:
            systemctl(self.system, verb, unit.name)
        except AcceleratorError as error:
            raise PackageProblem(f"{error.message}. {self._journal(unit.name)}", code="unit") from error

    def _wrong(self, unit: Unit, state: UnitState) -> str:
        """Return how a unit is not as it was asked for; empty where it is."""
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
        """Return the end of what a unit has said."""
        with contextlib.suppress(OSError):
            done = self.system.run(["journalctl", "-u", unit, "-n", "5", "-o", "cat", "--no-pager"], COMMAND_SECONDS)
            return f"Its journal ends with: {last_words(done.stdout)}"
        return ""

    def _said(self, argv: Sequence[str]) -> None:
        done = self.system.run(argv, COMMAND_SECONDS * 5)
        if done.returncode:
            raise PackageProblem(f"{' '.join(argv)} ended with {done.returncode}: {last_words(done.stderr)}")

    def _prove(self, target: Kept) -> Kept:
        """See that what was wanted is there. Raises PackageProblem."""
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
        self.keeper.fetch(there)
        return Kept(target.version, "", self.keeper.files_of(there))

    def _go_back(
        self,
        error: AcceleratorError,
        work: Work,
        record: Record,
        former: Kept | None,
        packages: Packages,
        units: dict[str, UnitState],
    ) -> None:
        """Undo what has failed, and raise its error with what has become of the node."""
        lists = self.apt.lists() if any(each.path == self.places.source for each in work.files) else {}
        write_files(self.system, [FileChange(each.path, each.after, each.before) for each in work.files])
        self.apt.distrust(self.places)
        self.apt.forget_lists(lists)
        origin = self.record().origin
        if not work.words:
            now = "Its packages and files are as before"
            self.apt.mark("unhold", [name for name in work.hold if name not in packages.held])
            self.apt.mark("hold", [name for name in work.unhold if name in packages.held])
        elif former is None:
            self._purge([change.name for change in work.changes if change.after and not change.before])
            self._restore_traces(origin or Origin())
            now = "What was installed for it was removed again"
        elif not former.complete:
            now = f"{former.version}, which was there before, cannot be gone back to: its packages were not kept, and are in no source any more"
        else:
            self._apply(former, packages)
            now = f"The node has {former.version} again"
        self._units_back({name: state.file for name, state in units.items() if state.exists})
        if not work.words or former is None or former.complete:
            self.write(replace(record, doing=""))
            self.keeper.forget((record.now, record.former, record.origin.kept if record.origin else None))
        raise PackageProblem(f"{error.message.rstrip('.')}. {now}.", hint=error.hint, code=error.code) from error

    def _apply(self, kept: Kept, packages: Packages) -> None:
        """Install kept packages in place of what is there, marked as they were. Raises AcceleratorError."""
        self.keeper.verify(kept)
        there = self.apt.packages()
        mine = {*self.group.of_it(there.installed), *self.group.of_it(dict.fromkeys(there.broken, ""))}
        words = [str(self.system.path(each["path"])) for each in kept.packages.values()]
        self.apt.install([*words, *(f"{name}-" for name in sorted(mine - set(kept.packages)))])
        self.apt.mark("auto", [name for name in kept.packages if name in packages.automatic])
        self.apt.mark("hold", [name for name in kept.packages if name in packages.held])

    def _units_back(self, files: dict[str, str]) -> None:
        """Switch units back to whether they were on, or masked; one that has gone is left."""
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
                self._tell(verb, Unit(name))

    def _unmask(self, names: Sequence[str]) -> None:
        """Take the masks of units away, as far as they are there."""
        states = unit_states(self.system, self.group)
        for name in names:
            if name in states and states[name].is_masked:
                self._tell("unmask", Unit(name))

    # Away

    def _purge(self, names: Sequence[str]) -> None:
        """Remove packages, and before that what switches their units on, which they leave behind."""
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
                self._tell(verb, Unit(name))

    def _restore_traces(self, origin: Origin) -> None:
        """Bring back the files that packages make as they were before this collection came, and take their empty folders away."""
        for path in sorted(self.group.traces, key=len, reverse=True):
            text = origin.texts.get(path)
            if path.endswith("/"):
                with contextlib.suppress(OSError):
                    # Whatever somebody has put there stays, and the folder with it.
                    if text is None:
                        self.system.path(path).rmdir()
            elif text is None:
                self.system.remove(path)
            elif not path.startswith(_VOLATILE) and text_or_none(self.system, path) != text:
                self.system.write_atomic(path, text.encode())

    def _remove(self, work: Work) -> Record:
        record, before = self.record(), self.apt.lists()
        self.write(replace(record, origin=record.origin or Origin(), doing="remove"))
        self._purge(work.purge)
        self._restore_traces(record.origin or Origin())
        return self._forget(work, before)

    def _to_origin(self, work: Work, kept: Kept) -> Record:
        """Go back to what was there before this collection came."""
        record, before = self.record(), self.apt.lists()
        origin = record.origin or Origin()
        if work.words:
            self.keeper.verify(kept)
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
