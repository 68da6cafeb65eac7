# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Brings NVIDIA's driver to a node and away from it, proves what has become of it, and goes back where it does not become what it should."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ._driver_install import (
    COMMAND_SECONDS,
    InTheWay,
    daemon_reload,
    in_the_way,
    is_running,
    keep_record,
    last_words,
    property_of,
    systemctl,
    text_or_none,
    waits_for_restart,
)
from ._nvidia_driver import (
    FILES,
    GROUP,
    MODULE_FILES,
    PERSISTENCE_FILE,
    PERSISTENCE_UNIT,
    DriverError,
    companion_names,
    driver_packages,
    loads,
    persistence_text,
    unloads,
)
from ._nvidia_machine import LOADED_MODULES, Machine, look
from ._nvidia_record import KEPT, RECORD, Record, read_record
from ._package_files import FileChange, Keeper, Kept, write_files
from ._package_port import Change, Packages, PackageTool, upstream
from ._stopped_services import stopped_services
from .core.errors import AcceleratorError, InUse
from .core.system import LONGEST_INSTALLATION, System

_CDI_UNIT = "nvidia-cdi-refresh.service"
#: What this collection's roles have done at each start, since it is lost with the kernel modules.
LAYOUT_UNIT, SETTINGS_UNIT = "dra-accelerators-layout.service", "dra-accelerators-settings.service"
_DKMS = "/var/lib/dkms"
#: What is noted as begun while modules that are there are signed again: packages are whole then.
SIGN = "sign"
#: How Debian and its relatives make an initramfs anew, and Red Hat and SUSE.
_INITRAMFS = (["update-initramfs", "-u"], ["dracut", "--force"])
#: Whose words of a load tell that a signature was refused.
_REFUSED_KEY = "Key was rejected by service"


@dataclass(frozen=True)
class Work:
    """What is to be done, decided: packages, files, holds, and what is loaded afterwards.

    ``quiet`` has the persistence daemon not run, ``sign`` has modules that were built before signed by the key that is named now.
    """

    target: Kept
    words: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    files: tuple[FileChange, ...] = ()
    hold: tuple[str, ...] = ()
    unhold: tuple[str, ...] = ()
    load: bool = False
    reload: bool = False
    persistence: bool = False
    quiet: bool = False
    sign: bool = False
    disturbs: bool = True
    local: Mapping[str, str] = field(default_factory=dict)
    refresh: bool = False

    @property
    def added(self) -> tuple[str, ...]:
        """The packages that are not there yet."""
        return tuple(change.name for change in self.changes if change.after and not change.before)


class Installer:
    """The node's driver, and what this collection knows of it."""

    def __init__(
        self,
        system: System,
        apt: PackageTool,
        *,
        services: Sequence[str],
        state_path: str,
        keep: bool,
        restart_allowed: bool,
        kinds: Mapping[str, str],
    ) -> None:
        self.system = system
        self.apt = apt
        self.places = apt.places(GROUP)
        self.services = tuple(services)
        self.state_path = state_path
        self.keeper = Keeper(
            system,
            apt,
            KEPT,
            keep=keep,
            title="the driver",
            hint="Name that version in nvidia_driver_version, where a source still has it.",
        )
        self.restart_allowed = restart_allowed
        self.kinds = kinds

    # What is there

    def record(self) -> Record:
        """Return what is ours. Raises AcceleratorError for a record that cannot be read."""
        return read_record(text_or_none(self.system, RECORD))

    def write(self, record: Record) -> None:
        """Write the record; with one that says nothing all goes that was kept."""
        if not record:
            self.system.remove_tree(KEPT)
        keep_record(self.system, RECORD, record.to_text())

    def waits_for_restart(self, record: Record) -> bool:
        """Whether something waits for the machine to be started again."""
        return waits_for_restart(self.system, record.boot)

    def machine(self) -> Machine:
        """Return what the node is. No program is run."""
        return look(self.system)

    def files(self) -> dict[str, str | None]:
        """Return the texts of this collection's files."""
        return {path: text_or_none(self.system, path) for path in (*FILES, *self.places.all)}

    def built(self, version: str) -> str:
        """Return the version of the module that the running kernel would load: this one, if it is there at all; empty for none."""
        found = []
        for name in MODULE_FILES:
            done = self.system.run(["modinfo", "-k", os.uname().release, "-F", "version", name], COMMAND_SECONDS)
            found += done.stdout.split()[:1] if done.returncode == 0 else []
        return version if version in found else next(iter(found), "")

    def users(self) -> InTheWay:
        """Return who has GPUs; services that are stopped for it do not count."""
        names = [f"/dev/{name}" for name in self.system.list_directory("/dev") if name.startswith("nvidia")]
        names += [f"/dev/nvidia-caps/{name}" for name in self.system.list_directory("/dev/nvidia-caps")]
        return in_the_way(self.system, state_path=self.state_path, paths=names, services=self.services)

    def persists(self) -> bool:
        """Whether the persistence daemon runs now and will at the next boot, and keeps GPUs initialised."""
        return (
            is_running(self.system, PERSISTENCE_UNIT)
            and property_of(self.system, PERSISTENCE_UNIT, "UnitFileState") != "disabled"
            and (text_or_none(self.system, PERSISTENCE_FILE) or "") == self.persistence_file()
        )

    def persistence_file(self) -> str:
        """Return the drop-in that the daemon's unit needs; empty for none."""
        path = property_of(self.system, PERSISTENCE_UNIT, "FragmentPath")
        return persistence_text(text_or_none(self.system, path) if path.startswith("/") else None)

    def daemon(self) -> str:
        """Return how the persistence daemon is: words of ``enabled`` and ``active``; empty where it does not run and will not."""
        if property_of(self.system, PERSISTENCE_UNIT, "LoadState") == "not-found":
            return ""
        words = ["enabled"] if property_of(self.system, PERSISTENCE_UNIT, "UnitFileState") == "enabled" else []
        return " ".join([*words, *(["active"] if is_running(self.system, PERSISTENCE_UNIT) else [])])

    # What is done

    def mend(self) -> None:
        """Bring an earlier run that was cut short to where this one can begin: to the driver before, or to none half there. Raises PackageProblem."""
        record, packages = self.record(), self.apt.packages()
        if record.doing in ("", SIGN):
            return
        files: list[str] = []
        purge: list[str] = []
        before = self._before_interruption(record)
        if before is not None and before.complete and record.doing == "install":
            self.keeper.verify(before)
            files = [str(self.system.path(each["path"])) for each in before.packages.values()]
        else:
            ours = {*record.added, *(record.now.packages if record.now else ())}
            purge = [name for name in packages.broken if name in ours]
        self.apt.mend(files, purge)
        self.write(replace(record, doing=""))

    def carry_out(self, work: Work, record: Record) -> Record:
        """Install the driver while the services are stopped, and return the new record.

        The previous driver is recorded before the first change, so that the next run after a killed run can restore it. Raises
        AcceleratorError with the state of the node.
        """
        packages = self.apt.packages()
        former = self._former(record, packages.installed, work)
        added = tuple(dict.fromkeys((*record.added, *work.added)))
        begun = replace(record, added=added, doing="install" if work.words or not work.sign else SIGN)
        if former is not None and (record.now is None or not record.now.complete):
            begun = replace(begun, former=former)
        with stopped_services(self.system, self.services if work.disturbs else (), "nvidia"):
            waits = self._begin(work, record, begun)
            try:
                self._install(work, packages.broken)
                if work.sign:
                    self._sign(work)
                now = self._prove(work)
                waits = self._load(work) or waits
                if work.reload and not waits:
                    self._apply_again(LAYOUT_UNIT)
            except AcceleratorError as error:
                self._go_back(error, work, record, former, packages)
            changed = record.now is None or (record.now.version, record.now.modules) != (now.version, now.modules)
            boot = self.system.boot_id() if waits else ("" if work.load else record.boot)
            there = self.apt.packages().installed
            kept = tuple(name for name in added if name in there)
            done = Record(now, (former or record.former) if changed else record.former, kept, boot, "", record.daemon)
            self.write(done)
            self.keeper.forget((done.now, done.former))
            self._persist(work, waits=waits)
            if work.reload and not waits:
                self._apply_again(SETTINGS_UNIT)
        # After the services are started again, of which it is one.
        return self._switch_off(done) if work.quiet else self._forget_daemon(done, work)

    @staticmethod
    def _before_interruption(record: Record) -> Kept | None:
        """Return the driver before an interrupted run: the recorded driver, or the one that this run recorded as the previous driver."""
        now, former = record.now, record.former
        if now is None or (not now.complete and former is not None and former.version == now.version):
            return former
        return now

    def _begin(self, work: Work, record: Record, begun: Record) -> bool:
        """Record the operation, then unload the kernel modules. Return whether a restart is needed. Raises InUse with the previous record."""
        self.write(begun)
        try:
            return self._make_room(work, record)
        except AcceleratorError:
            self.write(record)
            raise

    def _former(self, record: Record, installed: Mapping[str, str], work: Work) -> Kept | None:
        """Return the installed driver with the files that restore it. Files that are not kept yet are fetched."""
        if not work.words:
            return record.now
        if record.now is not None and record.now.complete:
            return self._with_companions(record.now, installed)
        replaced = {
            change.name: change.before for change in work.changes if change.before and change.before != change.after
        }
        versions = {upstream(installed[name]) for name in replaced if name in installed}
        found = {name: version for each in versions for name, version in driver_packages(installed, each).items()}
        interrupted = self._before_interruption(record)
        if interrupted is not None and interrupted.complete and (not found or interrupted.version in versions):
            # The interrupted run recorded it while the installation was still complete.
            return interrupted
        if not found:
            return None
        self.keeper.fetch(found)
        modules = next((self.kinds[name] for name in found if name in self.kinds), "")
        return Kept(max(versions), modules, self.keeper.files_of(found))

    def _with_companions(self, kept: Kept, installed: Mapping[str, str]) -> Kept:
        """Return a driver that was kept with the programs of its version that have come since, by which it is gone back to as a whole."""
        names = [name for name in companion_names(installed) if name not in kept.packages]
        more = {name: installed[name] for name in names if upstream(installed[name]) == kept.version}
        if not more:
            return kept
        self.keeper.fetch(more)
        return replace(kept, packages={**kept.packages, **self.keeper.files_of(more)})

    def _make_room(self, work: Work, record: Record) -> bool:
        """Unload what is loaded, where something else is to be; return whether that has to wait for a restart. Raises InUse."""
        if not work.load or self.waits_for_restart(record):
            return self.waits_for_restart(record)
        machine = self.machine()
        waits = False
        for name in machine.rivals:
            waits = self.system.run(["rmmod", name], COMMAND_SECONDS).returncode != 0 or waits
        if not work.reload:
            return waits
        users = self.users()
        if users.processes and self.restart_allowed:
            return True
        users.refuse_processes("GPUs")
        gone: list[str] = []
        for name in machine.modules:
            done = self.system.run(["rmmod", name], COMMAND_SECONDS)
            if done.returncode == 0:
                gone.append(name)
                continue
            for each in reversed(gone):
                self.system.run(["modprobe", each], COMMAND_SECONDS)
            if self.restart_allowed:
                return True
            holders = ", ".join(self.system.list_directory(f"{LOADED_MODULES}/{name}/holders"))
            raise InUse(
                f"The kernel module {name} cannot be unloaded: {last_words(done.stderr)}"
                + (f"; {holders} use it" if holders else ""),
                hint="A display or another driver has it. Free it, or allow the machine to be started again: nvidia_driver_reboot: true.",
            )
        return waits

    def _install(self, work: Work, broken: Sequence[str]) -> None:
        """Write files, and have the package manager do what was decided."""
        write_files(self.system, work.files)
        self.apt.trust(self.places)
        if broken:
            self.apt.finish()
        if work.words:
            if work.refresh:
                self.apt.update(only=self.places.source if self.system.exists(self.places.source) else "")
            self.keeper.ready()
            self.apt.mark("unhold", work.unhold)
            self.apt.install(work.words, keep=self.keeper.folder)
            self.keeper.take(work.local)
        elif work.unhold:
            self.apt.mark("unhold", work.unhold)
        self.apt.mark("hold", work.hold)
        if any("/modprobe.d/" in change.path for change in work.files):
            said = self._renew_initramfs()
            if said:
                raise DriverError(said, code="initramfs")

    def _renew_initramfs(self) -> str:
        """Have what the kernel starts with know these files; return what went wrong with it, or nothing."""
        command = next((each for each in _INITRAMFS if self.system.finds(each[0])), None)
        if command is None:
            return ""
        done = self.system.run(command, self.apt.timeout, longest=LONGEST_INSTALLATION)
        return f"{command[0]} has failed: {last_words(done.stdout + done.stderr)}" if done.returncode else ""

    def _prove(self, work: Work) -> Kept:
        """See that what was wanted is there, and that the kernel would load it. Raises DriverError."""
        packages = self.apt.packages()
        wrong = [
            f"{name} {packages.installed.get(name) or 'not installed'}, expected {each['version'] or 'any'}"
            for name, each in work.target.packages.items()
            if name not in packages.installed or (each["version"] and packages.installed[name] != each["version"])
        ]
        if wrong or packages.broken:
            left = [f"{name} left half-way" for name in packages.broken]
            raise DriverError(
                f"The packages are not what they should be: {'; '.join([*wrong, *left])}", code="not-proved"
            )
        target = work.target
        if work.load:
            found = self.built(target.version)
            if found != target.version:
                raise DriverError(
                    f"There is no module {target.version} for the running kernel {os.uname().release}"
                    + (f", but {found}" if found else "")
                    + self._dkms_said(target.version),
                    hint="dkms builds it where the headers of that kernel are, which the distribution has as a package.",
                    code="no-module",
                )
        names = driver_packages(packages.installed, target.version, target.packages)
        self.keeper.fetch(names)
        return Kept(target.version, target.modules, self.keeper.files_of(names))

    def _dkms_said(self, version: str) -> str:
        """Return the end of what the build of a module has said."""
        for name in self.system.list_directory(_DKMS):
            for path in (f"{_DKMS}/{name}/{version}/build/make.log", f"{_DKMS}/{name}/{version}/log/make.log"):
                text = text_or_none(self.system, path) if name.startswith("nvidia") else None
                if text:
                    return f". {path} ends with: {last_words(text)}"
        return ""

    def _load(self, work: Work) -> bool:
        """Load the modules; return whether a restart has to do it. Raises DriverError."""
        machine = self.machine()
        if not work.load:
            return False
        if (
            machine.rivals
            or (machine.modules and machine.version != work.target.version)
            or (work.reload and machine.modules)
        ):
            return True
        for name in loads(machine.modules):
            done = self.system.run(["modprobe", name], COMMAND_SECONDS * 2)
            if done.returncode:
                said = last_words(done.stderr)
                raise DriverError(
                    f"The kernel does not load {name} {work.target.version}: {said}",
                    hint="Its signature is by a key that the firmware does not know."
                    if _REFUSED_KEY in said
                    else "Look at the kernel log.",
                    code="not-loaded",
                )
        found = self.machine().version
        if found != work.target.version:
            raise DriverError(
                f"The kernel has loaded {found or 'no version'}, expected {work.target.version}", code="not-loaded"
            )
        switched_off = property_of(self.system, _CDI_UNIT, "UnitFileState") == "disabled"
        if property_of(self.system, _CDI_UNIT, "LoadState") == "loaded" and not switched_off:
            systemctl(self.system, "restart", _CDI_UNIT)
        return False

    def _apply_again(self, unit: str) -> None:
        """Have a unit of this collection's do again what goes with the kernel modules, where it does it at each start. Raises DriverError."""
        if not is_running(self.system, unit):
            return
        try:
            systemctl(self.system, "restart", unit)
        except AcceleratorError as error:
            raise DriverError(
                f"What goes when kernel modules are unloaded did not come again: {error.message}",
                hint=f"Look at the log of {unit}.",
                code="not-applied",
            ) from error

    def _persist(self, work: Work, *, waits: bool) -> None:
        """Have the persistence daemon run, now and at each boot. Raises AcceleratorError; the driver stays all the same."""
        if not work.persistence:
            return
        if property_of(self.system, PERSISTENCE_UNIT, "LoadState") == "not-found":
            raise DriverError(
                f"The driver {work.target.version} is installed, and there is no {PERSISTENCE_UNIT}",
                hint="Set nvidia_driver_persistence to false, or name its package in a catalog of your own.",
                code="no-persistence",
            )
        text = self.persistence_file()
        differs = (text_or_none(self.system, PERSISTENCE_FILE) or "") != text
        if differs:
            self._write_persistence(text)
        if property_of(self.system, PERSISTENCE_UNIT, "UnitFileState") == "disabled":
            systemctl(self.system, "enable", PERSISTENCE_UNIT)
        if waits:
            return
        if not is_running(self.system, PERSISTENCE_UNIT):
            systemctl(self.system, "start", PERSISTENCE_UNIT)
        elif differs:
            systemctl(self.system, "restart", PERSISTENCE_UNIT)

    def _write_persistence(self, text: str) -> None:
        write_files(self.system, [FileChange(PERSISTENCE_FILE, None, text or None)])
        if not text:
            with contextlib.suppress(OSError):
                self.system.path(posixpath.dirname(PERSISTENCE_FILE)).rmdir()
        daemon_reload(self.system)

    def _switch_off(self, record: Record) -> Record:
        """Have the persistence daemon not run, now and at each boot; how it was is remembered. Raises AcceleratorError."""
        was = self.daemon()
        if not was:
            return record
        done = replace(record, daemon=record.daemon or was)
        self.write(done)
        for word, verb in (("enabled", "disable"), ("active", "stop")):
            if word in was.split():
                systemctl(self.system, verb, PERSISTENCE_UNIT)
        return done

    def _forget_daemon(self, record: Record, work: Work) -> Record:
        """Forget how the daemon was before it was switched off, where it is wanted again."""
        if not (record.daemon and work.persistence):
            return record
        done = replace(record, daemon="")
        self.write(done)
        return done

    def _sign(self, work: Work) -> None:
        """Have dkms build the modules once more, which signs them by the key that is named now. Raises DriverError."""
        kernel, version = os.uname().release, work.target.version
        names = [
            name
            for name in self.system.list_directory(_DKMS)
            if name.startswith("nvidia") and self.system.exists(f"{_DKMS}/{name}/{version}")
        ]
        if not names:
            raise DriverError(
                f"Found nothing that dkms has built of the driver {version} in {_DKMS}, expected nvidia/{version}",
                hint="Install the driver's package with the kernel modules again.",
                code="not-signed",
            )
        for name in names:
            for verb in ("build", "install"):
                words = ["dkms", verb, "--force", "-m", name, "-v", version, "-k", kernel]
                done = self.system.run(words, self.apt.timeout, longest=LONGEST_INSTALLATION)
                if done.returncode:
                    raise DriverError(
                        f"{' '.join(words)} ended with {done.returncode}: {last_words(done.stdout + done.stderr)}",
                        hint="Look at the key and the certificate, and run this again.",
                        code="not-signed",
                    )

    def _go_back(
        self, error: AcceleratorError, work: Work, record: Record, former: Kept | None, packages: Packages
    ) -> None:
        """Undo what has failed, and raise its error with what has become of the node."""
        build = self._dkms_said(work.target.version) if error.code in ("apt-failed", "not-installed") else ""
        said, code = f"{error.message.rstrip('.')}{build}", "no-module" if build else error.code
        lists = self.apt.lists() if any(each.path == self.places.source for each in work.files) else {}
        write_files(self.system, [FileChange(each.path, each.after, each.before) for each in work.files])
        self.apt.distrust(self.places)
        self.apt.forget_lists(lists)
        boot = record.boot
        if not work.words:
            now = "Its files are as before"
        elif former is None:
            self._purge_added(work)
            now = "What was installed for it was removed again"
        elif not former.complete:
            now = f"The driver before, {former.version}, cannot be gone back to: its packages were not kept, and are in no source any more"
        else:
            self.apply(former, packages)
            for name in unloads(self.system.list_directory(LOADED_MODULES)):
                self.system.run(["rmmod", name], COMMAND_SECONDS)
            waits = self._load(replace(work, target=former, reload=False)) if work.load else False
            boot = self.system.boot_id() if waits else boot
            if work.reload and not waits:
                for unit in (LAYOUT_UNIT, SETTINGS_UNIT):
                    # What failed first is what is told; the unit goes on trying by itself.
                    with contextlib.suppress(DriverError):
                        self._apply_again(unit)
            now = f"The node has the driver {former.version} again{', once it was started again' if waits else ''}"
        if former is None or former.complete or not work.words:
            self.write(replace(record, doing="", boot=boot))
            self.keeper.forget((record.now, record.former))
        raise DriverError(f"{said}. {now}.", hint=error.hint, code=code) from error

    def _purge_added(self, work: Work) -> None:
        there = self.apt.packages()
        gone = [name for name in work.added if name in there.installed or name in there.broken]
        self.apt.mark("unhold", [name for name in there.held if name in gone])
        if gone:
            self.apt.remove(gone)

    def words_for(self, former: Kept, there: Packages) -> list[str]:
        """Return what is to be installed so that a driver that was kept takes the place of what is there."""
        versions = {upstream(version) for name, version in there.installed.items() if name in self.kinds} - {
            former.version
        }
        others = {name for each in versions for name in driver_packages(there.installed, each)} | set(there.broken)
        words = [str(self.system.path(each["path"])) for each in former.packages.values()]
        return [*words, *(f"{name}-" for name in sorted(others - set(former.packages)))]

    def apply(self, former: Kept, packages: Packages) -> None:
        """Install kept packages in place of what is there, marked as they were. Raises AcceleratorError."""
        self.keeper.verify(former)
        words = self.words_for(former, self.apt.packages())
        self.apt.install(words)
        self.apt.mark("auto", [name for name in former.packages if name in packages.automatic])
        self.apt.mark("hold", [name for name in former.packages if name in packages.held])

    def remove(self, purge: Sequence[str], files: Sequence[FileChange], record: Record) -> Record:
        """Remove packages and files with the services stopped; return the record afterwards. Raises AcceleratorError."""
        work = Work(Kept("", ""), load=True, reload=True)
        before = self.apt.lists()
        with stopped_services(self.system, self.services, "nvidia"):
            waits = self._begin(work, record, replace(record, doing="remove"))
            # Before the packages go, in whose folders they lie.
            write_files(self.system, files)
            there = self.apt.packages()
            self.apt.mark("unhold", [name for name in there.held if name in purge])
            if purge:
                self.apt.remove(purge)
        self.apt.distrust(self.places)
        if any(change.path == self.places.source for change in files):
            self.apt.forget_lists(before)
        if any("/modprobe.d/" in change.path for change in files):
            self._renew_initramfs()
        if any(change.path == PERSISTENCE_FILE for change in files):
            self._write_persistence("")
        if property_of(self.system, PERSISTENCE_UNIT, "LoadState") != "not-found":
            # It is not this collection's, and is as it was.
            for word, verb in (("enabled", "enable"), ("active", "start")):
                if word in record.daemon.split():
                    systemctl(self.system, verb, PERSISTENCE_UNIT)
        done = Record(boot=self.system.boot_id() if waits else "")
        self.write(done)
        return done
