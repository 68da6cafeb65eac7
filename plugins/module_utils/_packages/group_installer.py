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

from .._host.driver_installation import COMMAND_SECONDS, daemon_reload, last_words, systemctl
from .._host.file_restore import reason
from ..core.errors import AcceleratorError, as_failure
from ..core.host.system import System, text_or_none
from .group_planner import Work, unit_states
from .interface import PackageProblem, Packages, PackageTool, upstream
from .kept_packages import Kept, write_files
from .package_group import Group, Origin, Record, Unit, UnitState, read_record, unit_verbs
from .package_installer import PackageInstaller

#: Files in these directories are recreated at each boot.
_VOLATILE = ("/run/", "/var/run/")


class GroupInstaller(PackageInstaller[Record]):
    """Install and remove one package group on a node, and keep its record.

    ``proof`` is called after packages and units have reached the desired state. It raises AcceleratorError if they do
    not work.
    """

    def __init__(
        self, system: System, apt: PackageTool, group: Group, *, keep: bool, proof: Callable[[], None] = lambda: None
    ) -> None:
        hint = f"Set that version in {group.variable}, if a source still has it."
        super().__init__(system, apt, group.name, title=group.title, keep=keep, hint=hint)
        self.group = group
        self.proof = proof

    def record(self) -> Record:
        """Return the record. Raises AcceleratorError if it cannot be read."""
        return read_record(text_or_none(self.system, self.record_path), self.record_path)

    def state(self) -> str:
        """Return a sentence with the installed packages of the node."""
        try:
            there = self.group.installed_members(self.apt.packages().installed)
        except (AcceleratorError, OSError) as error:
            return f"The installed packages cannot be read: {reason(error)}"
        return f"Installed: {', '.join(f'{name} {version}' for name, version in sorted(there.items())) or 'no package'}"

    def mend(self) -> None:
        """Repair the packages of an interrupted run: reinstall the last known version, or remove the broken packages. Raises PackageProblem."""
        record = self.record()
        if record.doing:
            base = record.now or (record.origin.kept if record.origin else None)
            broken = self.group.installed_members(dict.fromkeys(self.apt.packages().broken, ""))
            self._repair(record, base, {*record.added, *broken})

    # Install

    def carry_out(self, work: Work) -> Record:
        """Apply the planned work and return the new record. Raises AcceleratorError with the resulting state of the node."""
        target = work.target
        if target is None:
            return self._remove(work)
        if work.to_origin:
            return self._restore_origin(work, target)
        record, packages, units = self.record(), self.apt.packages(), unit_states(self.system, self.group)
        origin = record.origin or self._origin(packages, units)
        former = self._former(record, packages, work)
        added = tuple(dict.fromkeys((*record.added, *work.added)))
        masked = self._masked(record, units)
        self.write(replace(record, origin=origin, added=added, doing="install", masked=masked))
        try:
            self._set_up_sources(work, packages.broken)
            if work.words and not all(each is None or each.complete for each in (origin.kept, former)):
                # The new sources can contain the packages that were installed before.
                origin = replace(origin, kept=self._completed(origin.kept))
                former = self._completed(former)
                self.write(replace(record, origin=origin, added=added, doing="install", masked=masked))
            self._change_packages(work)
            self._set_units(masked, exchanged=bool(work.words))
            now = self._verify_result(target)
            self.proof()
        except (AcceleratorError, OSError) as error:
            self._roll_back(as_failure(error), work, record, former, packages, units)
        changed = record.now is None or record.now.version != now.version
        # A removal restores the original packages. Before the first version change, the record has no other previous
        # version.
        before = (former or record.former) if changed and former != now else record.former
        on = {unit.name for unit in self.group.units if unit.on}
        return self._complete_record(
            Record(now, before, added, origin=origin, masked=tuple(name for name in masked if name not in on))
        )

    def _masked(self, record: Record, units: dict[str, UnitState]) -> tuple[str, ...]:
        """Return the units that this collection has masked or will mask. Units that others have masked are not included."""
        new = (unit.name for unit in self.group.units if unit.masked and not units[unit.name].is_masked)
        return tuple(dict.fromkeys((*record.masked, *new)))

    def _origin(self, packages: Packages, units: dict[str, UnitState]) -> Origin:
        """Return the state of the node before the first change."""
        there = self.group.installed_members(packages.installed)
        kept = None
        if there:
            kept = self._keep_packages(max(_versions(there)), there)
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
        there = self.group.installed_members(packages.installed)
        recorded = {name: each["version"] for name, each in record.now.packages.items()} if record.now else {}
        if record.now is not None and record.now.complete and recorded == there:
            return record.now
        return self._keep_packages(max(_versions(there)), there) if there else None

    def _completed(self, kept: Kept | None) -> Kept | None:
        """Return the kept packages with the files that the sources now offer."""
        if kept is None or kept.complete:
            return kept
        return self._keep_packages(kept.version, {name: each["version"] for name, each in kept.packages.items()})

    def _set_units(self, masked: Sequence[str], *, exchanged: bool) -> None:
        """Bring the units to their desired state and verify it. ``masked`` are the units that this collection masked. Raises PackageProblem."""
        if exchanged and self.group.units:
            daemon_reload(self.system)
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

    def _verify_result(self, target: Kept) -> Kept:
        """Verify the installed packages and return them as a kept version. Raises PackageProblem."""
        there = self.group.installed_members(self._verify_packages(target).installed)
        return self._keep_packages(target.version, there)

    def _roll_back(
        self,
        error: AcceleratorError,
        work: Work,
        record: Record,
        former: Kept | None,
        packages: Packages,
        units: dict[str, UnitState],
    ) -> NoReturn:
        """Roll back a failed change, and raise its error with the state of the node. A failed step does not end the rollback."""
        steps = self._rollback_steps(work, former, packages, units)
        now, state = self._undo(work, former, steps, partial(self._restore_record, record))
        raise PackageProblem(f"{error.message.rstrip('.')}. {now}.{state}", hint=error.hint, code=error.code) from error

    def _rollback_steps(
        self, work: Work, former: Kept | None, packages: Packages, units: dict[str, UnitState]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the steps of a rollback."""
        yield from self._undo_sources(work)
        if not work.words:
            yield from self._undo_holds(work, packages)
        elif former is None:
            yield "packages", partial(self._purge, work.added)
            yield "files of packages", lambda: self._restore_traces(self.record().origin or Origin())
        elif former.complete:
            yield "packages", partial(self._install_kept, former, partial(self._replaced, former), packages)
        yield "units", partial(self._restore_units, {name: state.file for name, state in units.items() if state.exists})

    def _replaced(self, kept: Kept, there: Packages) -> set[str]:
        """Return the packages of the group that are not among the kept ones."""
        return {*self.group.installed_members({**there.installed, **dict.fromkeys(there.broken, "")})} - set(
            kept.packages
        )

    def _restore_units(self, files: dict[str, str]) -> None:
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
        if self._remove_packages(names) and self.group.units:
            daemon_reload(self.system)

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

    def _restore_origin(self, work: Work, kept: Kept) -> Record:
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
        self._restore_units(dict(origin.units))
        self._restore_traces(origin)
        return self._forget(work, before)

    def _forget(self, work: Work, lists: dict[str, str]) -> Record:
        write_files(self.system, work.files)
        self._forget_sources(work.files, lists)
        done = Record()
        self.write(done)
        return done


def _versions(there: dict[str, str]) -> list[str]:
    """Return the upstream versions of packages."""
    return [upstream(each) for each in there.values()]
