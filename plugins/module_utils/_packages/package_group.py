# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define a group of vendor packages with one common version and their systemd units, and compare it with a node. This module has no side effects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._host import change_record
from .interface import INSTALL, Change, PackageProblem, takes, upstream
from .kept_packages import Kept, kept_of
from .package_record import PackageRecord, common_fields, record_path


@dataclass(frozen=True)
class Part:
    """One package of a group, by its possible names, the preferred name first.

    ``own_version`` marks a package with its own versions. Packages whose names match ``replaces`` are removed in favor
    of this part.
    """

    names: tuple[str, ...]
    own_version: bool = False
    replaces: str = ""


@dataclass(frozen=True)
class Unit:
    """A systemd unit of a group.

    ``on`` is the desired state, where None means unmanaged. ``stays`` states whether the unit stays active after its
    start. ``makes`` is the file that the unit creates. If ``masked`` is set, a disabled unit is also masked, so that no
    other unit can start it.
    """

    name: str
    on: bool | None = None
    stays: bool = True
    makes: str = ""
    masked: bool = False


@dataclass(frozen=True)
class Group:
    """A group of related packages.

    ``pattern`` matches the names of all packages of the group, requested or not. ``traces`` are files and directories
    (with a trailing slash) that the packages create, but that belong to no package. ``variable`` is the Ansible
    variable for the version. ``pinned`` restricts the package manager to the chosen version.
    """

    name: str
    title: str
    pattern: str
    parts: tuple[Part, ...]
    variable: str
    units: tuple[Unit, ...] = ()
    traces: tuple[str, ...] = ()
    pinned: bool = True

    @property
    def record(self) -> str:
        """Return the path of the record."""
        return record_path(self.name)

    @property
    def names(self) -> list[str]:
        """Return all possible names of the parts."""
        return sorted({name for part in self.parts for name in part.names})

    def installed_members(self, installed: Mapping[str, str]) -> dict[str, str]:
        """Return the installed packages that belong to the group."""
        return {name: installed[name] for name in sorted(installed) if re.fullmatch(self.pattern, name)}


# Package selection


@dataclass(frozen=True)
class Choice:
    """The chosen packages with their versions.

    ``version`` is the common upstream version. ``follow`` are the other installed packages of the group that change
    with them.
    """

    version: str
    packages: Mapping[str, str]
    follow: Mapping[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> dict[str, str]:
        """Return the packages with the common version."""
        return {name: each for name, each in self.packages.items() if upstream(each) == self.version}


def installed_choice(group: Group, wanted: str, installed: Mapping[str, str]) -> Choice | None:
    """Return the installed packages as a choice, or None if parts are missing, versions differ, or the version does not match the request."""
    found: dict[str, str] = {}
    versions = set()
    for part in group.parts:
        name = next((name for name in part.names if name in installed), "")
        if not name or not (part.own_version or takes(wanted, installed[name])):
            return None
        found[name] = installed[name]
        versions |= set() if part.own_version else {upstream(installed[name])}
    return Choice(versions.pop(), found) if len(versions) == 1 else None


def choose(
    group: Group, wanted: str, installed: Mapping[str, str], available: Mapping[str, Sequence[str]]
) -> Choice | None:
    """Choose the newest matching version for which the sources have all parts. Return None if there is no such version."""
    first = next(part for part in group.parts if not part.own_version)
    for lead in first.names:
        for candidate in available.get(lead, ()):
            if not takes(wanted, candidate):
                continue
            version = upstream(candidate)
            found = {
                name: each
                for part in group.parts
                for name, each in [
                    (lead, candidate) if part is first else _of_part(part, version, installed, available)
                ]
            }
            if all(found):
                return Choice(version, found, _followers(group, found, version, installed, available))
    return None


def _of_part(
    part: Part, version: str, installed: Mapping[str, str], available: Mapping[str, Sequence[str]]
) -> tuple[str, str]:
    """Return the name and version of a part for a version of the group, or two empty strings if no source has it."""
    for name in part.names:
        for each in available.get(name, ()):
            if part.own_version or upstream(each) == version:
                return name, each
    if part.own_version:
        return next(((name, installed[name]) for name in part.names if name in installed), ("", ""))
    return "", ""


def _followers(
    group: Group,
    chosen: Mapping[str, str],
    version: str,
    installed: Mapping[str, str],
    available: Mapping[str, Sequence[str]],
) -> dict[str, str]:
    """Return new versions for the other installed packages of the group, as far as a source has them."""
    before = {upstream(installed[name]) for name in chosen if name in installed}
    found = {}
    for name, each in group.installed_members(installed).items():
        fitting = next((new for new in available.get(name, ()) if upstream(new) == version), "")
        if name not in chosen and upstream(each) in before and fitting:
            found[name] = fitting
    return found


def not_offered_error(group: Group, wanted: str, available: Mapping[str, Sequence[str]]) -> PackageProblem:
    """Return the error for a version that no source has completely."""
    offered = "; ".join(f"{name}: {', '.join(available.get(name, ())[:4]) or 'in no source'}" for name in group.names)
    return PackageProblem(
        f"No source has {group.title}{' ' + wanted if wanted else ''} whole. Looked for: {offered}",
        hint=f"Nothing was changed. Check the source and {group.variable}.",
        code="not-offered",
    )


def install_specifications(
    group: Group, choice: Choice, installed: Mapping[str, str], files: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the package specifications to install, and the installed packages to remove because a chosen package replaces them."""
    words = [
        files.get(name) or f"{name}={version}"
        for name, version in {**choice.packages, **choice.follow}.items()
        if installed.get(name) != version
    ]
    rivals = {
        name
        for part in group.parts
        for name in installed
        if name in part.names or (part.replaces and re.fullmatch(part.replaces, name))
    }
    gone = sorted(rivals - {*choice.packages, *choice.follow})
    if words and files:
        # The other local files are dependencies of the chosen packages.
        named = {*choice.packages, *choice.follow}
        words += [path for name, path in sorted(files.items()) if name not in named and name not in installed]
    return [*words, *(f"{name}-" for name in gone)], gone


def refuse_removals(group: Group, changes: Iterable[Change], gone: Iterable[str]) -> None:
    """Refuse changes that remove packages other than ``gone``. Raises PackageProblem."""
    given_up = set(gone)
    others = [change.name for change in changes if change.verb != INSTALL and change.name not in given_up]
    if others:
        raise PackageProblem(
            f"The change of {group.title} would remove {', '.join(others)}",
            hint="Nothing was changed. Remove these packages first, or set another version.",
            code="would-remove",
        )


# systemd units


@dataclass(frozen=True)
class UnitState:
    """The systemd state of a unit: LoadState, UnitFileState, and ActiveState."""

    load: str
    file: str
    active: str

    @property
    def exists(self) -> bool:
        """Return whether the unit exists."""
        return self.load not in ("not-found", "")

    @property
    def is_on(self) -> bool:
        """Return whether the unit starts at boot."""
        return self.file in ("enabled", "enabled-runtime", "static", "alias", "indirect")

    @property
    def is_masked(self) -> bool:
        """Return whether the unit is masked."""
        return "masked" in (self.load, self.file)

    @property
    def is_active(self) -> bool:
        """Return whether the unit is active, starting, or reloading."""
        return self.active in ("active", "activating", "reloading")


def unit_verbs(unit: Unit, state: UnitState, *, renewed: bool = False, ours: bool = False) -> list[str]:
    """Return the systemctl verbs that bring a unit to its desired state.

    ``renewed`` marks a unit whose program was replaced, ``ours`` a unit that this collection has masked. Raises
    PackageProblem if the unit does not exist, or if it was masked by an administrator or other software.
    """
    if unit.on is None:
        return []
    if not unit.on:
        return [
            *(["stop"] if state.is_active else []),
            *(["disable"] if state.is_on and state.file != "static" else []),
            *(["mask"] if unit.masked and not state.is_masked else []),
        ]
    if state.is_masked and ours:
        return ["unmask", "enable", *(["start"] if unit.stays else [])]
    if state.is_masked:
        raise PackageProblem(
            f"{unit.name} is masked, and not by this collection",
            hint=f"Run `systemctl unmask {unit.name}`, and then run this again.",
            code="masked",
        )
    if not state.exists:
        raise PackageProblem(
            f"The unit {unit.name} does not exist",
            hint="This version of the packages does not contain it. Install a newer version, or do not enable the unit.",
            code="no-unit",
        )
    verbs = [] if state.is_on else ["enable"]
    if renewed:
        return [*verbs, "restart"]
    return [*verbs, "start"] if unit.stays and not state.is_active else verbs


def unit_steps(
    units: Sequence[Unit], states: Mapping[str, UnitState], *, exchanged: bool, masked: Iterable[str] = ()
) -> list[str]:
    """Describe the changes to units. The packages' default state of a new unit has no influence.

    ``masked`` are the units that this collection has masked.
    """
    words = []
    ours = {*masked}
    for unit in units:
        state = states[unit.name]
        comes = exchanged and not state.exists
        if unit.on is None or (not unit.on and not state.exists and not (comes and unit.masked)):
            continue
        verbs = unit_verbs(unit, state, ours=unit.name in ours) if unit.on is False or not comes else ["enable"]
        if {*verbs} - {"mask", "unmask"}:
            words.append(f"switch {unit.name} {'on' if unit.on else 'off'}")
        if "mask" in verbs:
            words.append(f"mask {unit.name}")
    return words


# Record


@dataclass(frozen=True)
class Origin:
    """The state before this collection's first change: packages, holds, enabled units, and the texts of files that packages create.

    The text of a missing file is None. For a directory (with a trailing slash) and for a file that is recreated at each
    boot, the text is empty if it exists, otherwise None.
    """

    kept: Kept | None = None
    held: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the state in the format of the record."""
        return {
            "packages": self.kept.to_dict() if self.kept else {},
            "held": list(self.held),
            "units": dict(self.units),
            "texts": dict(self.texts),
        }


@dataclass(frozen=True)
class Record(PackageRecord):
    """The record of a group. ``origin`` is the state before the first change, ``masked`` are units that this collection has masked."""

    origin: Origin | None = None
    masked: tuple[str, ...] = ()

    @property
    def unfinished(self) -> bool:
        """Return whether a run was interrupted."""
        return bool(self.doing or (self.origin is not None and self.now is None))

    def versions(self) -> tuple[Kept | None, ...]:
        """Return the versions that a rollback or a removal can restore."""
        return (*super().versions(), self.origin.kept if self.origin else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the data in the format of the record."""
        masked = {"masked": list(self.masked)} if self.masked else {}
        return {**super().to_dict(), "origin": self.origin.to_dict() if self.origin else None, **masked}


def read_record(text: str | None, path: str) -> Record:
    """Read a record. Return an empty record if there is no text. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = "Delete the record. The module then treats all packages as not installed by this collection."
    return change_record.read(text, path, _record_of, of="installed packages", hint=hint)


def _record_of(content: Any) -> Record:
    origin = None if content["origin"] is None else _origin_of(content["origin"])
    masked = tuple(str(name) for name in content.get("masked", ()))
    return Record(**common_fields(content), origin=origin, masked=masked)


def _origin_of(content: Any) -> Origin:
    texts = {str(path): None if text is None else str(text) for path, text in content["texts"].items()}
    units = {str(name): str(state) for name, state in content["units"].items()}
    return Origin(kept_of(content["packages"]), tuple(str(name) for name in content["held"]), units, texts)
