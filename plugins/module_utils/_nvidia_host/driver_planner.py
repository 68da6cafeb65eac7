# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the changes to a node's NVIDIA driver: query the package manager, and reject impossible changes. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._host.driver_installation import DeviceUsers, is_running
from .._packages.interface import Change, View, upstream
from .._packages.kept_packages import FileChange, Kept
from .._packages.package_planner import PackageOptions, PackagePlanner
from .driver_catalog import (
    MODULES_FILE,
    NAMES,
    PERSISTENCE_UNIT,
    SIGNING_FILE,
    Choice,
    DriverError,
    Offer,
    Wanted,
    after_changes,
    choose,
    companion_heirs,
    companion_names,
    companions,
    driver_packages,
    followers,
    foreign,
    header_name,
    headers_of,
    install_words,
    modules_text,
    names_of,
    not_offered,
    outdated,
    read_offers,
    refuse_removals,
    secure_boot_problem,
    signing_text,
    superseded,
    versions_of,
)
from .driver_facts import Machine, is_enrolled
from .driver_installer import SIGN, Installer, Work
from .driver_record import Record


@dataclass(frozen=True)
class Options(PackageOptions):
    """The options of the module, with the requested driver."""

    wanted: Wanted = field(default_factory=Wanted)
    catalog: Sequence[Mapping[str, Any]] = ()
    headers: Sequence[str] = ()
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    keep_rivals: bool = False
    signing_key: str = ""
    signing_certificate: str = ""
    load: bool = True


@dataclass(frozen=True)
class Decision:
    """The planned changes as text and as work, and the users that block them."""

    steps: tuple[str, ...]
    work: Work | None = None
    purge: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    files: tuple[FileChange, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)
    blocked_by: DeviceUsers = field(default_factory=DeviceUsers)
    disturbs: bool = False
    unloads: bool = False


@dataclass(frozen=True)
class Packed:
    """The packages of a choice: the package specifications, the planned changes, and the local files."""

    choice: Choice
    words: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    local: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    refresh: bool = False


class Planner(PackagePlanner):
    """Plan the changes for one node, without any change there."""

    def __init__(self, installer: Installer, options: Options) -> None:
        super().__init__(
            installer.system,
            installer.apt,
            installer.places,
            options,
            title="the driver",
            pattern=NAMES,
            texts=installer.files(),
        )
        self.installer = installer
        self.options = options
        self.record: Record = installer.record()
        self.machine: Machine = installer.machine()

    @property
    def unfinished(self) -> bool:
        """Return whether an earlier run was interrupted."""
        begun = self.record.doing not in ("", SIGN)
        return bool(begun or self.packages.broken or (self.record.added and self.record.now is None))

    # Install

    def present(self) -> Decision:
        """Plan the installation of the requested driver. Raises AcceleratorError."""
        if self.machine.run_file and not self.options.remove_unmanaged:
            raise DriverError(
                "A driver was installed here by the vendor's .run file, and packages do not work together with it",
                hint="Run nvidia-uninstall, and then this again.",
                code="run-file",
            )
        source = self._planned_source()
        offers = self._offers()
        wanted = self.options.wanted
        standing = choose(offers, wanted, self.machine.gpus, self.packages.installed, {})
        if standing is not None and not wanted.latest and not self.unfinished:
            packed = Packed(standing)
        else:
            with self._view(source) as view:
                packed = replace(self._pack_by(view, offers), refresh=not self.options.files)
        choice = packed.choice
        target = Kept(
            choice.version,
            choice.offer.modules,
            {name: {"version": each, "path": "", "checksum": ""} for name, each in choice.packages.items()},
        )
        files = self._file_changes({**self._source_files(source), **self._own_files(choice)})
        return self._decide(target, packed, files, self._hold(choice, packed))

    def _offers(self) -> tuple[Offer, ...]:
        wanted = self.options.wanted
        versions = versions_of(self.packages.installed, wanted)
        return read_offers(self.options.catalog, branch=wanted.branch, kernel=self.machine.kernel, versions=versions)

    def _own_files(self, choice: Choice) -> dict[str, str]:
        """Return the texts of the files other than those of the repository, by path."""
        options = self.options
        signs = choice.offer.build == "dkms"
        return {
            MODULES_FILE: modules_text(options.parameters, keep_rivals=options.keep_rivals),
            SIGNING_FILE: signing_text(options.signing_key, options.signing_certificate) if signs else "",
            **self._pin_file(choice.version),
        }

    def _pack_by(self, view: View, offers: Sequence[Offer]) -> Packed:
        wanted, installed = self.options.wanted, self.packages.installed
        local_files = self._named_files()
        files = {name: path for path, (name, _version) in local_files.items()}
        headers = self._headers()
        own = {name for offer in offers for name in offer.packages} if self.unfinished else set()
        there = foreign(installed, {*self.installer.kinds, *own})
        programs = companion_names(installed)
        heirs = [heir for name in programs for heir in companion_heirs(name, wanted.branch)]
        header_names = [header_name(name, self.machine.kernel) for name in headers]
        names = [*names_of(offers, wanted), *header_names, *heirs, *there]
        available = self._available(names, view, local_files)
        choice = self._choose(offers, available)
        if choice is None:
            raise not_offered(offers, wanted, available, self.machine.kernel)
        others = {
            name: each
            for name, each in there.items()
            if not choice.packages.get(name)
            and self.installer.kinds.get(name, choice.offer.modules) == choice.offer.modules
        }
        further = {
            **followers(others, choice.version, available),
            **companions(installed, choice.version, available),
        }
        lacking: dict[str, str] = {}
        if headers and self.installer.modules.built(choice.version) != choice.version:
            of_kernel = [headers_of(name, self.machine.kernel, installed, available) for name in headers]
            unknown = [name for name, each in zip(header_names, of_kernel) if each is None]
            if unknown:
                lacking["headers"] = (
                    f"The kernel that runs is {self.machine.kernel}, and its headers, without which dkms builds no module, are neither in "
                    f"/lib/modules/{self.machine.kernel}/build nor in any source ({', '.join(unknown)}). Start a kernel whose headers there are, "
                    "or take precompiled modules."
                )
            else:
                further = {**dict(each for each in of_kernel if each), **further}
        words = install_words(choice, offers, installed, further, files)
        gives_way = [*superseded(there, choice.packages), *outdated(there, choice)]
        words += [word for word in dict.fromkeys(f"{name}-" for name in gives_way) if word not in words]
        # A program whose name has another branch is replaced by its successor.
        words += [f"{n}-" for n in programs if n not in further and upstream(installed[n]) != choice.version]
        view.pin(self._pins(choice.version))
        local = {name: path for name, path in files.items() if path in words}
        changes = self._ask(words, view.options, local)
        refuse_removals(changes)
        return Packed(choice, tuple(words), changes, local, lacking)

    def _choose(self, offers: Sequence[Offer], available: Mapping[str, Sequence[str]]) -> Choice | None:
        """Choose packages. After an interrupted run, all packages get the same version again."""
        wanted, gpus, installed = self.options.wanted, self.machine.gpus, self.packages.installed
        if not self.unfinished:
            return choose(offers, wanted, gpus, installed, available)
        standing = choose(offers, wanted, gpus, installed, {})
        same = replace(wanted, version=standing.version) if standing else wanted
        return choose(offers, same, gpus, {}, available) or standing

    def _headers(self) -> list[str]:
        needs = self.options.load and self.options.wanted.build == "dkms" and not self.machine.headers
        return list(self.options.headers) if needs else []

    def _hold(self, choice: Choice, packed: Packed) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the packages to hold, and the packages to release."""
        after = after_changes(self.packages.installed, packed.changes)
        exact = [name for name, version in choice.packages.items() if version]
        names = set(driver_packages(after, choice.version, exact))
        held = self.packages.held
        if packed.words:
            # apt removes the hold of a package when it replaces the package.
            there = foreign(self.packages.installed, self.installer.kinds)
            return (tuple(sorted(names)) if self.options.hold else ()), tuple(sorted(held & {*there, *names}))
        if self.options.hold:
            return tuple(sorted(names - held)), ()
        recorded = self.record.now.packages if self.record.now else ()
        return (), tuple(sorted(held & names & set(recorded)))

    # Roll back

    def previous(self) -> Decision:
        """Plan the installation of the previous driver. Raises AcceleratorError."""
        former = self._former(self.record.former, "nvidia_driver_version")
        self.installer.package_store.verify(former)
        words = tuple(self.installer.kept_words(former, self.installer.replaced(former, self.packages)))
        changes = self._ask(words)
        refuse_removals(changes)
        there = foreign(self.packages.installed, self.installer.kinds)
        held = tuple(sorted(self.packages.held & {*there, *former.packages}))
        offer = Offer(former.modules, "", "", ())
        packed = Packed(Choice(offer, former.version, {}), words, changes)
        return self._decide(
            former,
            packed,
            self._file_changes(self._pin_file(former.version)),
            (tuple(former.packages) if self.options.hold else (), held),
        )

    # Common steps

    def _decide(
        self, target: Kept, packed: Packed, files: Sequence[FileChange], holds: tuple[tuple[str, ...], tuple[str, ...]]
    ) -> Decision:
        options, machine = self.options, self.machine
        waits = self.installer.waits_for_restart(self.record) and not packed.words
        parameters = any(each.path == MODULES_FILE and _options(each.before) != _options(each.after) for each in files)
        is_current = machine.version == target.version
        reload = (
            options.load
            and bool(machine.modules)
            and not waits
            and (bool(packed.words) or parameters or not is_current)
        )
        loads = (
            options.load
            and not waits
            and (reload or not is_current or bool(machine.rivals and not options.keep_rivals))
        )
        persistence = options.wanted.persistence and options.load
        starts = persistence and not waits and not self.installer.persists()
        daemon = self.installer.daemon() if options.load and not options.wanted.persistence else ""
        # New packages are built and signed during their installation.
        signs = (
            bool(options.signing_key)
            and packed.choice.offer.build == "dkms"
            and not packed.words
            and (self.record.doing == SIGN or any(each.path == SIGNING_FILE for each in files))
        )
        hold, unhold = holds
        lacking = dict(packed.lacking)
        problem = secure_boot_problem(
            is_on=machine.secure_boot and options.load,
            build=packed.choice.offer.build,
            key=options.signing_key,
            enrolled=is_enrolled(self.installer.system, options.signing_certificate, options.signing_key)
            if options.signing_key
            else False,
            certificate=options.signing_certificate,
        )
        if problem and (packed.words or signs):
            lacking["secure-boot"] = problem
        lacking.update(self._missing_hold_support(hold, "Or set nvidia_driver_hold to false."))
        disturbs = bool(packed.words) or reload or loads
        kind = f" with {target.modules} kernel modules" if target.modules else ""
        steps = [
            *(each.describe() for each in files),
            *self._change_words(target.version, packed.changes, target.packages, kind),
            *self._interrupted_words(packed.words),
            *([f"hold {len(hold)} packages at {target.version}"] if hold else []),
            *([f"hold {len(unhold)} packages no longer"] if unhold and not hold else []),
            *([f"unload the kernel modules {machine.version}".rstrip()] if reload else []),
            *([f"load the kernel modules {target.version}"] if loads else []),
            *(["sign the kernel modules again"] if signs else []),
            *([self._persistence_words()] if starts else []),
            *(["stop the persistence daemon, and start it no more"] if daemon else []),
        ]
        work = Work(
            target=target,
            words=packed.words,
            changes=packed.changes,
            files=tuple(files),
            hold=hold,
            unhold=unhold,
            load=options.load and not waits,
            reload=reload,
            persistence=persistence,
            quiet=options.load and not options.wanted.persistence,
            sign=signs,
            disturbs=disturbs,
            local=packed.local,
            refresh=packed.refresh,
        )
        blocked_by = self.installer.users() if machine.modules and disturbs else DeviceUsers()
        return Decision(
            tuple(steps),
            work if steps else None,
            (),
            packed.changes,
            tuple(files),
            lacking,
            blocked_by,
            disturbs,
            reload,
        )

    def _persistence_words(self) -> str:
        if is_running(self.installer.system, PERSISTENCE_UNIT):
            return "configure the persistence daemon to keep GPUs initialized, now and after each start"
        return "start the persistence daemon"

    # Remove

    def absent(self) -> Decision:
        """Plan the removal of the driver. Raises DriverError for packages that this collection has not installed."""
        installed = self.packages.installed
        versions = versions_of(installed, self.options.wanted)
        offers = [
            offer
            for branch in {"", *_branches(installed)}
            for offer in read_offers(self.options.catalog, branch=branch, kernel=self.machine.kernel, versions=versions)
        ]
        there = foreign(installed, {name for offer in offers for name in offer.packages})
        ours = {*(self.record.now.packages if self.record.now else ()), *self.record.added}
        others = sorted(set(there) - ours)
        if there and others and not self.options.remove_unmanaged:
            raise DriverError(
                f"Not installed by this collection: {', '.join(f'{name} {there[name]}' for name in others[:6])}",
                hint="They depend on this driver. Remove them first, for example with the role nvidia_fabric_manager, or set remove_unmanaged to true."
                if companion_names(others) == others
                else "To remove it anyway, set remove_unmanaged to true.",
                code="foreign",
            )
        driver = {*there, *(self.record.now.packages if self.record.now else ())}
        top = sorted(name for name in driver if name in installed or name in self.packages.broken)
        left = [name for name in self.record.added if name in self.packages.broken]
        names = [*top, *(name for name in left if name not in top)]
        if self.record.doing:
            # Packages can be incomplete, and apt cannot plan with them. A real run repairs them first.
            purge = tuple(dict.fromkeys((*names, *(name for name in self.record.added if name in installed))))
            return Decision(
                ("finish the interrupted package operation, and remove the driver",), None, purge, disturbs=True
            )
        purge, changes = self._removal(names, {*driver, *self.record.added})
        files = self._file_changes(dict.fromkeys(self.texts, ""))
        versions = sorted({upstream(version) for version in there.values()})
        loaded = bool(self.machine.modules) and bool(purge)
        steps = [
            *([f"remove the driver {', '.join(versions)}: {len(purge)} packages"] if purge else []),
            *(each.describe() for each in files),
            *([f"unload the kernel modules {self.machine.version}"] if loaded else []),
        ]
        blocked_by = self.installer.users() if loaded else DeviceUsers()
        return Decision(tuple(steps), None, purge, changes, files, {}, blocked_by, bool(purge), loaded)


def _options(text: str | None) -> list[str]:
    return [line for line in (text or "").splitlines() if line.startswith("options nvidia")]


def _branches(installed: Mapping[str, str]) -> set[str]:
    """Return the branches of all drivers whose packages are installed."""
    found = {upstream(version).partition(".")[0] for name, version in installed.items() if "nvidia" in name}
    return {each for each in found if each.isdecimal() and len(each) == 3}


def branches_of(installed: Mapping[str, str], wanted: Wanted) -> list[str]:
    """Return the branches that package names of the catalog can have on this node."""
    return sorted({*_branches(installed), *([wanted.branch] if wanted.branch.isdecimal() else [])})


def kernel_release() -> str:
    """Return the release of the running kernel."""
    return os.uname().release
