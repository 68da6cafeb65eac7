# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""A vendor's packages that belong together and have one version, with their units: what is there, and what leads to what is wanted. No side effects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _record
from ._package_files import Kept, kept_of
from ._package_port import INSTALL, Change, PackageProblem, takes, upstream

_STATE = "/var/lib/dra-accelerators"


@dataclass(frozen=True)
class Part:
    """One package of a group, by the names that it may have, the preferred one first.

    ``own_version`` is for one with versions of its own; packages whose names fit ``replaces`` give way to it.
    """

    names: tuple[str, ...]
    own_version: bool = False
    replaces: str = ""


@dataclass(frozen=True)
class Unit:
    """A unit of a group: whether it is switched on (None leaves it as it is), whether it goes on running once it was started, and the file it makes.

    One that is off and ``masked`` nobody else starts either.
    """

    name: str
    on: bool | None = None
    stays: bool = True
    makes: str = ""
    masked: bool = False


@dataclass(frozen=True)
class Group:
    """Packages that belong together.

    ``pattern`` fits the names of all packages that are of it, whichever of them are asked for. ``traces`` are files and folders (with a slash at
    the end) that they make and no package has. ``variable`` is what the operator sets for a version. ``pinned`` has the package manager take no
    other one.
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
    def folder(self) -> str:
        """Where is written what was done."""
        return f"{_STATE}/{self.name}"

    @property
    def record(self) -> str:
        """The record."""
        return f"{self.folder}/record.json"

    @property
    def kept(self) -> str:
        """The folder with the packages for the way back."""
        return f"{self.folder}/packages"

    @property
    def names(self) -> list[str]:
        """All names that its parts may have."""
        return sorted({name for part in self.parts for name in part.names})

    def of_it(self, installed: Mapping[str, str]) -> dict[str, str]:
        """Return those of the installed packages that are of it."""
        return {name: installed[name] for name in sorted(installed) if re.fullmatch(self.pattern, name)}


# Which packages


@dataclass(frozen=True)
class Choice:
    """The packages that are chosen, each with its version; ``version`` is the upstream one that they share, ``follow`` the rest of the group's."""

    version: str
    packages: Mapping[str, str]
    follow: Mapping[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> dict[str, str]:
        """The packages that have the version."""
        return {name: each for name, each in self.packages.items() if upstream(each) == self.version}


def standing(group: Group, wanted: str, installed: Mapping[str, str]) -> Choice | None:
    """Return what is installed as a choice, if it is whole, in one version, and one that is asked for."""
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
    """Choose the newest version that is asked for and that a source has of all parts; None where there is none."""
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
    """Return a part's name and version that goes with a group's version; two empty words where there is none."""
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
    """Return the versions that further installed packages of the group get, as far as a source has them: they go with the others."""
    before = {upstream(installed[name]) for name in chosen if name in installed}
    found = {}
    for name, each in group.of_it(installed).items():
        fitting = next((new for new in available.get(name, ()) if upstream(new) == version), "")
        if name not in chosen and upstream(each) in before and fitting:
            found[name] = fitting
    return found


def not_offered(group: Group, wanted: str, available: Mapping[str, Sequence[str]]) -> PackageProblem:
    """Say why nothing was chosen."""
    seen = "; ".join(f"{name}: {', '.join(available.get(name, ())[:4]) or 'in no source'}" for name in group.names)
    return PackageProblem(
        f"No source has {group.title}{' ' + wanted if wanted else ''} whole. Looked for: {seen}",
        hint=f"Nothing was changed. Look at the source, and at {group.variable}.",
        code="not-offered",
    )


def install_words(
    group: Group, choice: Choice, installed: Mapping[str, str], files: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return what the package manager is told to install, and which packages give way: those that have another of a part's names."""
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
        # What came along is what the chosen packages need.
        named = {*choice.packages, *choice.follow}
        words += [path for name, path in sorted(files.items()) if name not in named and name not in installed]
    return [*words, *(f"{name}-" for name in gone)], gone


def refuse_removals(group: Group, changes: Iterable[Change], gone: Iterable[str]) -> None:
    """Refuse changes by which packages would go that nobody has named. Raises PackageProblem."""
    given_up = set(gone)
    others = [change.name for change in changes if change.verb != INSTALL and change.name not in given_up]
    if others:
        raise PackageProblem(
            f"{', '.join(others)} would have to go for {group.title}",
            hint="Nothing was changed. Remove them yourself, or take another version.",
            code="would-remove",
        )


# Units


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit: its LoadState, UnitFileState and ActiveState."""

    load: str
    file: str
    active: str

    @property
    def exists(self) -> bool:
        """Whether there is such a unit."""
        return self.load not in ("not-found", "")

    @property
    def is_on(self) -> bool:
        """Whether it is started at boot."""
        return self.file in ("enabled", "enabled-runtime", "static", "alias", "indirect")

    @property
    def is_masked(self) -> bool:
        """Whether nothing can start it."""
        return "masked" in (self.load, self.file)

    @property
    def is_active(self) -> bool:
        """Whether it runs, or is about to."""
        return self.active in ("active", "activating", "reloading")


def unit_verbs(unit: Unit, state: UnitState, *, renewed: bool = False, ours: bool = False) -> list[str]:
    """Return what systemd is told so that a unit is as asked for.

    ``renewed`` is for one whose program was exchanged, ``ours`` for one that this collection has masked. Raises PackageProblem for one that there is
    not, or that somebody else has masked.
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
            f"Somebody has masked {unit.name}",
            hint=f"Run `systemctl unmask {unit.name}`, and this again.",
            code="masked",
        )
    if not state.exists:
        raise PackageProblem(
            f"There is no unit {unit.name}",
            hint="This version of the packages has none. Take a newer one, or leave the unit out.",
            code="no-unit",
        )
    verbs = [] if state.is_on else ["enable"]
    if renewed:
        return [*verbs, "restart"]
    return [*verbs, "start"] if unit.stays and not state.is_active else verbs


def unit_words(
    units: Sequence[Unit], states: Mapping[str, UnitState], *, exchanged: bool, masked: Iterable[str] = ()
) -> list[str]:
    """Say what is done with units. One that comes with the packages is switched as asked for whatever the packages do with it.

    ``masked`` are those that this collection has masked.
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


# What is remembered


@dataclass(frozen=True)
class Origin:
    """What was there before this collection came: packages, holds, which units were on, and the texts of files that packages make.

    A text is None for a file that was not there. That of a folder, with a slash at the end of its path, and of a file that is made anew at each
    boot, is empty or None.
    """

    kept: Kept | None = None
    held: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as the record has it."""
        return {
            "packages": self.kept.to_dict() if self.kept else {},
            "held": list(self.held),
            "units": dict(self.units),
            "texts": dict(self.texts),
        }


@dataclass(frozen=True)
class Record:
    """What this collection has installed, what was there before the last change and before the first one, what came along, and what was begun.

    ``masked`` are units that it has masked.
    """

    now: Kept | None = None
    former: Kept | None = None
    origin: Origin | None = None
    added: tuple[str, ...] = ()
    doing: str = ""
    masked: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.now or self.former or self.origin or self.added or self.doing or self.masked)

    @property
    def unfinished(self) -> bool:
        """Whether a run was cut short."""
        return bool(self.doing or (self.origin is not None and self.now is None))

    def to_text(self) -> str:
        """Return the record as it is written; empty where it says nothing."""
        if not self:
            return ""
        return _record.to_text(
            {
                "now": self.now.to_dict() if self.now else {},
                "former": self.former.to_dict() if self.former else {},
                "origin": self.origin.to_dict() if self.origin else None,
                "added": list(self.added),
                "doing": self.doing,
                **({"masked": list(self.masked)} if self.masked else {}),
            }
        )


def read_record(text: str | None, path: str) -> Record:
    """Read a record; an empty one where there is none. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = (
        "What is installed the package manager says. Remove the record; then nothing of it counts as this collection's."
    )
    return _record.read(text, path, _record_of, of="installed", hint=hint)


def _record_of(content: Any) -> Record:
    added = tuple(str(name) for name in content["added"])
    origin = None if content["origin"] is None else _origin_of(content["origin"])
    masked = tuple(str(name) for name in content.get("masked", ()))
    return Record(kept_of(content["now"]), kept_of(content["former"]), origin, added, str(content["doing"]), masked)


def _origin_of(content: Any) -> Origin:
    texts = {str(path): None if text is None else str(text) for path, text in content["texts"].items()}
    units = {str(name): str(state) for name, state in content["units"].items()}
    return Origin(kept_of(content["packages"]), tuple(str(name) for name in content["held"]), units, texts)
