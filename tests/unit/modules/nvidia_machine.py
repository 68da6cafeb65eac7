# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A system in a directory on which driver packages are installed: apt with a table of answers, and a kernel that loads built modules."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.dra.accelerators.plugins.module_utils._packages.apt import AptForm
from ansible_collections.dra.accelerators.plugins.module_utils._packages.apt_output import name_of_file
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import (
    Change,
    PackageProblem,
    Packages,
    Source,
    View,
    upstream,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, DeviceNumber, System

from tests.unit.crash_steps import step

OPEN, PROPRIETARY = "nvidia-kernel-open-dkms", "nvidia-kernel-dkms"
NAMES = ("nvidia-driver-cuda", "libcuda1", "libnvidia-ml1", OPEN, PROPRIETARY, "nvidia-persistenced")
#: Dependencies of each package, in the same version.
NEEDS = {"nvidia-driver-cuda": ("libcuda1", "libnvidia-ml1"), OPEN: ("gcc",), PROPRIETARY: ("gcc",)}
H100, V100, B200 = "0x2330", "0x1db5", "0x2901"


class Machine(System):
    """The system: loaded modules, running units, the current boot, and a log of all actions."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.boot = "boot-1"
        self.running: set[str] = set()
        self.enabled: set[str] = set()
        self.switched_off: set[str] = set()
        self.held_modules: set[str] = set()
        self.broken_loads: set[str] = set()
        self.dkms_fails = False
        self.broken_units: set[str] = set()
        self.log: list[str] = []
        self.put_file("/proc/self/none", "")
        self.put_file(f"/lib/modules/{os.uname().release}/build/none", "")

    def put_file(self, path: str, text: str) -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def gpu(self, address: str, device: str) -> None:
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", device)):
            self.put_file(f"/sys/bus/pci/devices/{address}/{name}", f"{text}\n")

    def loaded(self) -> str:
        path = self.path("/sys/module/nvidia/version")
        return path.read_text().strip() if path.exists() else ""

    def boot_id(self) -> str:
        return self.boot

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber("c", 1, 3) if self.exists(path) else None

    def sync_all(self) -> None:
        """Skip the sync, so that the file systems of this machine are not synced."""

    def finds(self, program: str) -> bool:
        return program == "update-initramfs"

    def run(self, argv: Sequence[str], timeout: float, **_options: Any) -> Completed:
        if argv[0] != "modinfo" and argv[1] not in ("show", "is-active"):
            step(" ".join(argv))
        return getattr(self, "_" + argv[0].replace("-", "_"))(list(argv[1:]))

    def _update_initramfs(self, words: list[str]) -> Completed:
        self.log.append("initramfs")
        return Completed(0, "", "")

    def _built(self) -> Path:
        return self.path(f"/lib/modules/{os.uname().release}/nvidia.ko")

    def _modinfo(self, words: list[str]) -> Completed:
        built = self._built()
        return Completed(0, built.read_text(), "") if words[-1] == "nvidia" and built.exists() else Completed(1, "", "")

    def _modprobe(self, words: list[str]) -> Completed:
        version = self._built().read_text() if self._built().exists() else ""
        if not version or version in self.broken_loads:
            return Completed(1, "", f"modprobe: ERROR: could not insert '{words[0]}': Key was rejected by service")
        if not self.exists(f"/sys/module/{words[0]}"):
            self.put_file(f"/sys/module/{words[0]}/version", f"{version}\n")
            self.log.append(f"load {words[0]} {version}")
        return Completed(0, "", "")

    def _rmmod(self, words: list[str]) -> Completed:
        if words[0] in self.held_modules:
            return Completed(1, "", f"rmmod: ERROR: Module {words[0]} is in use")
        self.remove_tree(f"/sys/module/{words[0]}")
        self.log.append(f"unload {words[0]}")
        return Completed(0, "", "")

    def _dkms(self, words: list[str]) -> Completed:
        self.log.append(f"dkms {' '.join(words)}")
        return Completed(1 if self.dkms_fails else 0, "", "the key cannot be read" if self.dkms_fails else "")

    def _systemctl(self, words: list[str]) -> Completed:
        verb, unit = words[0], words[-1]
        if verb == "show":
            exists = unit in self.enabled
            file = "disabled" if unit in self.switched_off else "enabled"
            path = f"/lib/systemd/system/{unit}" if exists else ""
            answers = {
                "LoadState": "loaded" if exists else "not-found",
                "UnitFileState": file,
                "MainPID": "0",
                "FragmentPath": path,
            }
            return Completed(0, answers[words[1].partition("=")[2]] + "\n", "")
        if verb == "is-active":
            return Completed(0, "active\n" if unit in self.running else "inactive\n", "")
        self.log.append(f"{verb} {unit}" if verb != unit else verb)
        if verb in ("enable", "disable"):
            (self.switched_off.add if verb == "disable" else self.switched_off.discard)(unit)
            return Completed(0, "", "")
        if verb == "daemon-reload":
            return Completed(0, "", "")
        if verb in ("start", "restart") and unit in self.broken_units:
            return Completed(1, "", "the job has failed")
        (self.running.add if verb in ("start", "restart") else self.running.discard)(unit)
        return Completed(0, "", "")


class FakeApt(AptForm):
    """An apt model with a source of versions and installed packages. Kernel modules of the versions in ``fails`` do not build."""

    def __init__(self, machine: Machine, versions: Sequence[str]) -> None:
        self.machine = machine
        self.system: System = machine
        self.names = set(NAMES)
        self.needs: dict[str, tuple[str, ...]] = dict(NEEDS)
        self.timeout = 1.0
        self.versions = list(versions)
        self.installed: dict[str, str] = {"bash": "5.2-1"}
        self.held: set[str] = set()
        self.automatic: set[str] = set()
        self.broken: list[str] = []
        self.fails: set[str] = set()
        self.killed_at = ""
        self.pinned = ""
        self.known = [Source(("http://mirror/debian",), ("bookworm",), ("main",))]
        self.updates: list[str] = []

    def packages(self) -> Packages:
        return Packages(dict(self.installed), tuple(self.broken), frozenset(self.held), frozenset(self.automatic))

    def sources(self) -> list[Source]:
        return self.known

    def available(self, names: Sequence[str], view: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        mine = tuple(f"{version}-1" for version in self.versions)
        return {name: mine for name in names if name in self.names} if mine else {}

    @contextlib.contextmanager
    def view(self, **_: Any) -> Iterator[View]:
        folder = self.machine.path("/view")
        folder.mkdir(parents=True, exist_ok=True)
        yield View([], folder / "pins")

    def update(self, options: Sequence[str] = (), *, only: str = "") -> None:
        self.updates.append(only)

    def lists(self) -> dict[str, str]:
        return {}

    def download(self, words: Sequence[str], folder: str) -> None:
        for word in words:
            name, _equals, version = word.partition("=")
            if upstream(version) not in self.versions:
                raise PackageProblem("gone", code="download")
            (Path(folder) / f"{name}_{version}_amd64.deb").write_text(word)

    def mark(self, verb: str, names: Sequence[str]) -> None:
        step(f"mark {verb}")
        change = {"hold": self.held.update, "unhold": self.held.difference_update}
        change.get(verb, self.automatic.update)(names)

    def foresee(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        words = [word for word in words if not word.startswith("--")]
        if words[0] == "purge":
            return tuple(Change("purge", name, self.installed.get(name, "")) for name in words[1:])
        wanted: dict[str, str] = {}
        changes = []
        for word in words[1:]:
            if word.endswith("-") and "=" not in word:
                changes.append(Change("remove", word[:-1], self.installed[word[:-1]]))
                continue
            found = name_of_file(word)
            name, version = found or (word.partition("=")[0], word.partition("=")[2] or f"{self.versions[0]}-1")
            wanted[name] = version
            for other in self.needs.get(name, ()):
                wanted.setdefault(other, "12" if other == "gcc" else version)
        changes += [
            Change("install", n, self.installed.get(n, ""), v) for n, v in wanted.items() if self.installed.get(n) != v
        ]
        return tuple(changes)

    def orphans(self, names: Sequence[str]) -> tuple[Change, ...]:
        gone = list(names)
        if not {OPEN, PROPRIETARY} & (set(self.installed) - set(names)) and "gcc" in self.automatic:
            gone.append("gcc")
        return tuple(Change("purge", name, self.installed.get(name, "")) for name in gone if name in self.installed)

    def mend(self, files: Sequence[str], purge: Sequence[str]) -> None:
        for path in files:
            step(f"mend {Path(path).name}")
            found = name_of_file(path)
            assert found is not None and Path(path).exists()
            self.installed[found[0]] = found[1]
            self._build(found[0], upstream(found[1]))
        for name in purge:
            self.installed.pop(name, None)
        self.broken.clear()

    def finish(self) -> None:
        self.broken.clear()

    def act(self, verb: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
        if verb == "purge":
            for name in words:
                step(f"purge {name}")
                self.installed.pop(name, None)
                self._unbuild(name)
            self.broken = [name for name in self.broken if name not in words]
            return ""
        for change in self.foresee(["install", *words]):
            step(f"{change.verb} {change.name}")
            if change.verb == "remove":
                self.installed.pop(change.name)
                self._unbuild(change.name)
                continue
            if change.name == self.killed_at:
                self.killed_at = ""
                raise KeyboardInterrupt
            if not change.before and change.name not in [word.partition("=")[0] for word in words]:
                self.automatic.add(change.name)
            self.installed[change.name] = change.after
            self._build(change.name, upstream(change.after))
        return ""

    def _build(self, name: str, version: str) -> None:
        if name == "nvidia-persistenced":
            self.machine.enabled.add("nvidia-persistenced.service")
        if name not in (OPEN, PROPRIETARY):
            return
        if version in self.fails:
            self.machine.put_file(f"/var/lib/dkms/nvidia/{version}/build/make.log", "error: no member named foo\n")
            self.installed.pop(name)
            self.broken.append(name)
            raise PackageProblem("apt-get install has failed: E: Sub-process", code="apt-failed")
        self.broken = [each for each in self.broken if each not in (OPEN, PROPRIETARY)]
        self.machine.put_file(f"/lib/modules/{os.uname().release}/nvidia.ko", version)
        self.machine.put_file(f"/var/lib/dkms/nvidia/{version}/source/none", "")

    def _unbuild(self, name: str) -> None:
        if name in (OPEN, PROPRIETARY):
            self.machine._built().unlink(missing_ok=True)
