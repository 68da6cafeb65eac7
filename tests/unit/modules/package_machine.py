# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A system in a directory on which packages with units are installed: answers of apt and systemd, and package scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import Change, PackageProblem
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed
from nvidia_machine import FakeApt, Machine

#: A package script, called with the system and the version. The version is empty for a removal.
Script = Callable[["UnitMachine", str], None]


class UnitMachine(Machine):
    """A system whose units are installed with packages. ``units`` has by name whether each is enabled."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.units: dict[str, bool] = {}
        self.masked: set[str] = set()
        self.failing: set[str] = set()
        self.started: dict[str, Callable[[], None]] = {}
        self.programs: dict[str, Callable[[list[str]], Completed]] = {}

    def run(self, argv: Sequence[str], timeout: float, *more: Any, **words: Any) -> Completed:
        if argv[0] in self.programs:
            return self.programs[argv[0]](list(argv[1:]))
        if argv[0].startswith("/"):
            return Completed(127, "", f"{argv[0]}: not found")
        return super().run(argv, timeout, *more, **words)

    def _journalctl(self, words: list[str]) -> Completed:
        return Completed(0, "it said why\n", "")

    def _systemctl(self, words: list[str]) -> Completed:
        verb, unit = words[0], words[-1]
        exists = unit in self.units or unit in self.masked
        if verb == "show":
            answers = {
                "LoadState": "masked" if unit in self.masked else "loaded" if exists else "not-found",
                "UnitFileState": "masked"
                if unit in self.masked
                else ""
                if not exists
                else "enabled"
                if self.units[unit]
                else "disabled",
                "ActiveState": "active" if unit in self.running else "inactive",
                "MainPID": "0",
            }
            return Completed(0, answers[words[1].partition("=")[2]] + "\n", "")
        if verb == "is-active":
            return Completed(0, "active\n" if unit in self.running else "inactive\n", "")
        if verb == "daemon-reload":
            return Completed(0, "", "")
        assert exists, f"{words} of a unit that there is not"
        self.log.append(f"{verb} {unit}")
        if verb in ("mask", "unmask"):
            (self.masked.add if verb == "mask" else self.masked.discard)(unit)
        elif verb in ("enable", "start", "restart") and unit in self.masked:
            return Completed(1, "", f"Unit {unit} is masked.")
        elif verb in ("enable", "disable"):
            self.units[unit] = verb == "enable"
        elif verb == "stop":
            self.running.discard(unit)
        elif unit in self.failing:
            self.running.discard(unit)
            return Completed(1, "", f"Job for {unit} failed")
        else:
            self.running.add(unit)
            self.started.get(unit, lambda: None)()
        return Completed(0, "", "")


class GroupApt(FakeApt):
    """An apt model with versions of each package by name, and scripts of the packages."""

    machine: UnitMachine

    def __init__(self, machine: UnitMachine, source: dict[str, list[str]], needs: dict[str, tuple[str, ...]]) -> None:
        super().__init__(machine, [])
        self.source = source
        self.needs = needs
        self.scripts: dict[str, Script] = {}
        self.dependents: dict[str, tuple[str, ...]] = {}

    def available(self, names: Sequence[str], view: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        return {name: tuple(self.source[name]) for name in names if name in self.source}

    def download(self, words: Sequence[str], folder: str) -> None:
        for word in words:
            name, _equals, version = word.partition("=")
            if not self.updates:
                raise PackageProblem("no source was read yet", code="download")
            if version not in self.source.get(name, ()):
                raise PackageProblem("gone", code="download")
            (Path(folder) / f"{name}_{version}_amd64.deb").write_text(word)

    def finish(self) -> None:
        """Do nothing: this model unpacks and configures packages in one step."""

    def foresee(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        if self.broken:
            raise PackageProblem(f"unmet dependencies: {self.broken}", code="no-way")
        if "purge" in words:
            return tuple(Change("purge", name, self.installed[name]) for name in words if name in self.installed)
        return super().foresee(words, view)

    def orphans(self, names: Sequence[str]) -> tuple[Change, ...]:
        alone = [name for name in self.automatic if name not in names and name in self.installed]
        return tuple(Change("purge", name, self.installed[name]) for name in [*names, *alone] if name in self.installed)

    def _build(self, name: str, version: str) -> None:
        self.scripts.get(name, lambda _machine, _version: None)(self.machine, version)

    def _unbuild(self, name: str) -> None:
        self._build(name, "")
