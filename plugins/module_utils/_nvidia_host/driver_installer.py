# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Install and remove the NVIDIA driver on a node, verify the result, and roll back a failed change."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from .._host.driver_installation import (
    DeviceUsers,
    daemon_reload,
    find_users,
    is_running,
    property_of,
    systemctl,
    waits_for_restart,
)
from .._host.file_restore import add_texts, not_undone, restore_all
from .._host.stopped_services import stopped_services
from .._packages.interface import Packages, PackageTool, upstream
from .._packages.kept_packages import FileChange, Kept, write_files
from .._packages.package_installer import PackageInstaller, PackageWork
from ..core.errors import AcceleratorError, as_failure
from ..core.host.system import System, text_or_none
from .driver_catalog import (
    FILES,
    GROUP,
    PERSISTENCE_FILE,
    PERSISTENCE_UNIT,
    DriverError,
    companion_names,
    driver_packages,
    persistence_text,
)
from .driver_facts import Machine, read_machine
from .driver_record import RECORD, Record, read_record
from .kernel_modules import KernelModules

#: Units of this collection that apply settings at each boot. The settings are lost when the kernel modules are
#: unloaded.
LAYOUT_UNIT, SETTINGS_UNIT = "dra-accelerators-layout.service", "dra-accelerators-settings.service"
#: Operation in the record while existing modules are signed again. The packages are complete during it.
SIGN = "sign"


@dataclass(frozen=True)
class Work(PackageWork):
    """The planned changes of the driver: packages, files, holds, and the kernel modules to load.

    ``load`` is whether the kernel modules are loaded, ``reload`` whether loaded ones are unloaded first. ``persistence``
    starts the persistence daemon, ``quiet`` stops it. ``sign`` signs existing modules with the configured key.
    ``disturbs`` stops the services that use GPUs.
    """

    target: Kept = field()
    load: bool = False
    reload: bool = False
    persistence: bool = False
    quiet: bool = False
    sign: bool = False
    disturbs: bool = True


class Installer(PackageInstaller[Record]):
    """Install and remove the driver of one node, and keep its record."""

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
        hint = "Name that version in nvidia_driver_version, where a source still has it."
        super().__init__(system, apt, GROUP, title="the driver", keep=keep, hint=hint)
        self.services = tuple(services)
        self.state_path = state_path
        self.modules = KernelModules(system, timeout=apt.timeout, restart_allowed=restart_allowed)
        self.kinds = kinds

    # Queries

    def record(self) -> Record:
        """Return the record. Raises AcceleratorError if it cannot be read."""
        return read_record(text_or_none(self.system, RECORD))

    def state(self) -> str:
        """Return a sentence with the kernel modules of the node."""
        return self.modules.state()

    def waits_for_restart(self, record: Record) -> bool:
        """Return whether a change is pending until the next reboot."""
        return waits_for_restart(self.system, record.boot)

    def machine(self) -> Machine:
        """Return the facts about the node. No program is run."""
        return read_machine(self.system)

    def files(self) -> dict[str, str | None]:
        """Return the texts of this collection's files by path."""
        return {path: text_or_none(self.system, path) for path in (*FILES, *self.places.all)}

    def users(self) -> DeviceUsers:
        """Return the claims and processes that use GPUs. Services that are stopped for the change are excluded."""
        names = [f"/dev/{name}" for name in self.system.list_directory("/dev") if name.startswith("nvidia")]
        names += [f"/dev/nvidia-caps/{name}" for name in self.system.list_directory("/dev/nvidia-caps")]
        return find_users(self.system, state_path=self.state_path, paths=names, services=self.services)

    def is_persistence_configured(self) -> bool:
        """Return whether the persistence daemon is running, starts at boot, and keeps GPUs initialized."""
        return (
            is_running(self.system, PERSISTENCE_UNIT)
            and property_of(self.system, PERSISTENCE_UNIT, "UnitFileState") != "disabled"
            and (text_or_none(self.system, PERSISTENCE_FILE) or "") == self.persistence_text()
        )

    def persistence_text(self) -> str:
        """Return the text of the drop-in that the daemon's unit needs. Empty for none."""
        path = property_of(self.system, PERSISTENCE_UNIT, "FragmentPath")
        return persistence_text(text_or_none(self.system, path) if path.startswith("/") else None)

    def persistence_state(self) -> str:
        """Return the state of the persistence daemon: ``enabled``, ``active``, both, or an empty string."""
        if property_of(self.system, PERSISTENCE_UNIT, "LoadState") == "not-found":
            return ""
        words = ["enabled"] if property_of(self.system, PERSISTENCE_UNIT, "UnitFileState") == "enabled" else []
        return " ".join([*words, *(["active"] if is_running(self.system, PERSISTENCE_UNIT) else [])])

    # Actions

    def mend(self) -> None:
        """Repair the packages of an interrupted run: reinstall the previous driver, or remove the broken packages. Raises PackageProblem."""
        record = self.record()
        if record.doing not in ("", SIGN):
            ours = {*record.added, *(record.now.packages if record.now else ())}
            self._repair(record, self._driver_before_interruption(record), ours)

    def carry_out(self, work: Work, record: Record) -> Record:
        """Install the driver while the services are stopped, and return the new record.

        The previous driver is recorded before the first change, so that the run after a killed run can restore it.
        Raises AcceleratorError with the state of the node.
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
                    self.modules.sign(work.target.version)
                now = self._verify(work)
                if work.load:
                    waits = self.modules.load(work.target.version, reload=work.reload) or waits
                if work.reload and not waits:
                    self._restart_if_active(LAYOUT_UNIT)
            except (AcceleratorError, OSError) as error:
                self._roll_back(as_failure(error), work, record, former, packages)
            changed = record.now is None or (record.now.version, record.now.modules) != (now.version, now.modules)
            boot = self.system.boot_id() if waits else ("" if work.load else record.boot)
            before = (former or record.former) if changed else record.former
            done = self._complete_record(Record(now, before, added, boot=boot, daemon=record.daemon))
            self._persist(work, waits=waits)
            if work.reload and not waits:
                self._restart_if_active(SETTINGS_UNIT)
        # The persistence daemon is one of the services, which are now started again.
        return self._disable_persistence(done) if work.quiet else self._forget_daemon(done, work)

    @staticmethod
    def _driver_before_interruption(record: Record) -> Kept | None:
        """Return the driver before an interrupted run: the recorded driver, or the one that this run recorded as the previous driver."""
        now, former = record.now, record.former
        if now is None or (not now.complete and former is not None and former.version == now.version):
            return former
        return now

    def _begin(self, work: Work, record: Record, begun: Record) -> bool:
        """Record the operation, then unload the kernel modules. Return whether a reboot is needed.

        If it fails, it restores the previous record and the previous kernel modules. Raises InUse and other errors.
        """
        self.write(begun)
        try:
            if not work.load or self.waits_for_restart(record):
                return self.waits_for_restart(record)
            return self.modules.unload_conflicting(self.users, reload=work.reload)
        except (AcceleratorError, OSError) as error:
            failed = as_failure(error)
            add_texts(failed, [not_undone(restore_all([(RECORD, partial(self.write, record))]))])
            raise failed from error.__cause__

    def _former(self, record: Record, installed: Mapping[str, str], work: Work) -> Kept | None:
        """Return the installed driver with the files that restore it. Missing files are downloaded."""
        if not work.words:
            return record.now
        if record.now is not None and record.now.complete:
            return self._with_companions(record.now, installed)
        replaced = {
            change.name: change.before for change in work.changes if change.before and change.before != change.after
        }
        versions = {upstream(installed[name]) for name in replaced if name in installed}
        found = {name: version for each in versions for name, version in driver_packages(installed, each).items()}
        interrupted = self._driver_before_interruption(record)
        if interrupted is not None and interrupted.complete and (not found or interrupted.version in versions):
            # The interrupted run recorded this driver before it changed any package.
            return interrupted
        if not found:
            return None
        return self._keep_packages(
            max(versions), found, next((self.kinds[name] for name in found if name in self.kinds), "")
        )

    def _with_companions(self, kept: Kept, installed: Mapping[str, str]) -> Kept:
        """Return a kept driver with the programs of its version that were installed later, so that a rollback restores all of them."""
        names = [name for name in companion_names(installed) if name not in kept.packages]
        more = {name: installed[name] for name in names if upstream(installed[name]) == kept.version}
        if not more:
            return kept
        return replace(kept, packages={**kept.packages, **self._keep_packages(kept.version, more).packages})

    def _install(self, work: Work, broken: Sequence[str]) -> None:
        """Write the files, run the planned package operations, and rebuild the initramfs if needed."""
        self._set_up_sources(work, broken)
        self._change_packages(work)
        if any("/modprobe.d/" in change.path for change in work.files):
            said = self.modules.renew_initramfs()
            if said:
                raise DriverError(said, code="initramfs")

    def _verify(self, work: Work) -> Kept:
        """Verify the installed packages and the kernel module, and return them as a kept version. Raises AcceleratorError."""
        packages = self._verify_packages(work.target)
        target = work.target
        if work.load:
            found = self.modules.built_version(target.version)
            if found != target.version:
                raise DriverError(
                    f"There is no module {target.version} for the running kernel {os.uname().release}"
                    + (f", but {found}" if found else "")
                    + self.modules.build_log(target.version),
                    hint="dkms builds it where the headers of that kernel are, which the distribution has as a package.",
                    code="no-module",
                )
        names = driver_packages(packages.installed, target.version, target.packages)
        return self._keep_packages(target.version, names, target.modules)

    def _restart_if_active(self, unit: str) -> None:
        """Restart an active unit of this collection that applies settings to the kernel modules. Raises DriverError."""
        if not is_running(self.system, unit):
            return
        try:
            systemctl(self.system, "restart", unit)
        except AcceleratorError as error:
            raise DriverError(
                f"A service that depends on the kernel modules did not start again: {error.message}",
                hint=f"Check the log of {unit}.",
                code="not-applied",
            ) from error

    def _persist(self, work: Work, *, waits: bool) -> None:
        """Enable and start the persistence daemon. Raises AcceleratorError, but the driver stays installed."""
        if not work.persistence:
            return
        if property_of(self.system, PERSISTENCE_UNIT, "LoadState") == "not-found":
            raise DriverError(
                f"The driver {work.target.version} is installed, and there is no {PERSISTENCE_UNIT}",
                hint="Set nvidia_driver_persistence to false, or name its package in a catalog of your own.",
                code="no-persistence",
            )
        text = self.persistence_text()
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

    def _disable_persistence(self, record: Record) -> Record:
        """Disable and stop the persistence daemon, and record its previous state. Raises AcceleratorError."""
        was = self.persistence_state()
        if not was:
            return record
        done = replace(record, daemon=record.daemon or was)
        self.write(done)
        for word, verb in (("enabled", "disable"), ("active", "stop")):
            if word in was.split():
                systemctl(self.system, verb, PERSISTENCE_UNIT)
        return done

    def _forget_daemon(self, record: Record, work: Work) -> Record:
        """Delete the recorded state of the persistence daemon if the daemon is requested again."""
        if not (record.daemon and work.persistence):
            return record
        done = replace(record, daemon="")
        self.write(done)
        return done

    def _roll_back(
        self, error: AcceleratorError, work: Work, record: Record, former: Kept | None, packages: Packages
    ) -> NoReturn:
        """Roll back the change and raise its error with the state of the node. A failed step does not end the rollback."""
        build = ""
        if error.code in ("apt-failed", "not-installed"):
            with contextlib.suppress(OSError):
                build = self.modules.build_log(work.target.version)
        said, code = f"{error.message.rstrip('.')}{build}", "no-module" if build else error.code
        waits: list[bool] = []
        steps = self._rollback_steps(error, work, former, packages, waits)
        now, state = self._undo(work, former, steps, lambda: self._restore_driver_record(record, waits))
        if any(waits) and not state:
            now += ". The next reboot loads its kernel modules"
        raise DriverError(f"{said}. {now}.{state}", hint=error.hint, code=code) from error

    def _rollback_steps(
        self, error: AcceleratorError, work: Work, former: Kept | None, packages: Packages, waits: list[bool]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the steps of a rollback. The last one adds to ``waits`` whether the kernel modules need a reboot."""
        yield from self._undo_sources(work)
        if not work.words:
            yield from self._undo_holds(work, packages)
            if work.reload and error.code not in ("no-module", "not-loaded"):
                yield "kernel modules", partial(self._restore_modules, work, work.target)
        elif former is None:
            yield "packages", partial(self._remove_packages, work.added)
        elif former.complete:
            yield "packages", partial(self._install_kept, former, partial(self.replaced, former), packages)
            yield "kernel modules", lambda: waits.append(self._restore_modules(work, former))

    def _restore_modules(self, work: Work, former: Kept) -> bool:
        """Load the kernel modules of the previous driver. Return whether a reboot is needed for it. Raises DriverError."""
        if work.words:
            self.modules.unload_all()
        if not work.load:
            return False
        found = self.modules.built_version(former.version)
        if found != former.version:
            raise DriverError(
                f"the running kernel has the module {found or 'of no version'}, expected {former.version}"
            )
        waits = self.modules.load(former.version, reload=False)
        if work.reload and not waits:
            for unit in (LAYOUT_UNIT, SETTINGS_UNIT):
                # Only the error that caused the rollback is reported. systemd starts the unit again.
                with contextlib.suppress(DriverError):
                    self._restart_if_active(unit)
        return waits

    def _restore_driver_record(self, record: Record, waits: Sequence[bool]) -> None:
        self._restore_record(replace(record, boot=self.system.boot_id()) if any(waits) else record)

    def replaced(self, former: Kept, there: Packages) -> set[str]:
        """Return the packages of other drivers, which a kept driver replaces."""
        versions = {upstream(version) for name, version in there.installed.items() if name in self.kinds}
        others = {name for each in versions - {former.version} for name in driver_packages(there.installed, each)}
        return {*others, *there.broken} - set(former.packages)

    def remove(self, purge: Sequence[str], files: Sequence[FileChange], record: Record) -> Record:
        """Remove packages and files while the services are stopped, and return the new record. Raises AcceleratorError."""
        work = Work(Kept("", ""), load=True, reload=True)
        before = self.apt.lists()
        with stopped_services(self.system, self.services, "nvidia"):
            waits = self._begin(work, record, replace(record, doing="remove"))
            # Remove the files before the packages that own their directories.
            write_files(self.system, files)
            self._remove_packages(purge)
        self._forget_sources(files, before)
        if any("/modprobe.d/" in change.path for change in files):
            self.modules.renew_initramfs()
        if any(change.path == PERSISTENCE_FILE for change in files):
            self._write_persistence("")
        if property_of(self.system, PERSISTENCE_UNIT, "LoadState") != "not-found":
            # Restore the daemon's original state, because this collection did not install it.
            for word, verb in (("enabled", "enable"), ("active", "start")):
                if word in record.daemon.split():
                    systemctl(self.system, verb, PERSISTENCE_UNIT)
        done = Record(boot=self.system.boot_id() if waits else "")
        self.write(done)
        return done
