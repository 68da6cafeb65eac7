# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the changes to a node's NVIDIA driver: query the package manager, and reject impossible changes. Changes nothing."""

from __future__ import annotations

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
    companion_names,
    companions,
    driver_packages,
    header_name,
    headers_of,
    install_words,
    matching_updates,
    modules_text,
    names_of,
    not_offered,
    outdated,
    present_driver_packages,
    read_offers,
    refuse_removals,
    secure_boot_problem,
    signing_text,
    successor_names,
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
    """The planned changes as text (``steps``) and as work, and the users of GPUs that block them.

    ``purge`` are the packages to remove. ``lacking`` are messages about unmet requirements, by their code. ``disturbs``
    is whether the changes affect programs that use GPUs, and ``unloads`` whether kernel modules are unloaded.
    """

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
class PackagePlan:
    """The packages of a choice, and their changes.

    ``words`` are the package specifications for the package manager. ``local`` are files of packages on the node, by
    package name. ``lacking`` is as in Decision. ``refresh`` is whether the package lists are updated first.
    """

    choice: Choice
    words: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    local: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    refresh: bool = False


@dataclass(frozen=True)
class ModuleActions:
    """What the change does to the kernel modules, and whether it waits for a reboot."""

    waits: bool
    unload: bool
    load: bool
    sign: bool


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
        installed = choose(offers, wanted, self.machine.gpus, self.packages.installed, {})
        if installed is not None and not wanted.latest and not self.unfinished:
            plan = PackagePlan(installed)
        else:
            with self._view(source) as view:
                plan = replace(self._plan_packages(view, offers), refresh=not self.options.files)
        choice = plan.choice
        target = Kept(
            choice.version,
            choice.offer.modules,
            {name: {"version": each, "path": "", "checksum": ""} for name, each in choice.packages.items()},
        )
        files = self._file_changes({**self._source_files(source), **self._own_files(choice)})
        return self._decide(target, plan, files, *self._hold(choice, plan))

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

    def _plan_packages(self, view: View, offers: Sequence[Offer]) -> PackagePlan:
        """Choose packages from the sources of a view, and plan their installation. Raises AcceleratorError."""
        wanted, installed = self.options.wanted, self.packages.installed
        local_files = self._named_files()
        files = {name: path for path, (name, _version) in local_files.items()}
        headers = self._headers()
        own = {name for offer in offers for name in offer.packages} if self.unfinished else set()
        there = present_driver_packages(installed, {*self.installer.kinds, *own})
        programs = companion_names(installed)
        successors = [each for name in programs for each in successor_names(name, wanted.branch)]
        header_names = [header_name(name, self.machine.kernel) for name in headers]
        names = [*names_of(offers, wanted), *header_names, *successors, *there]
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
            **matching_updates(others, choice.version, available),
            **companions(installed, choice.version, available),
        }
        header_packages, lacking = self._header_packages(headers, choice, available)
        further = {**header_packages, **further}
        words = install_words(choice, offers, installed, further, files)
        replaced = [*superseded(there, choice.packages), *outdated(there, choice)]
        words += [word for word in dict.fromkeys(f"{name}-" for name in replaced) if word not in words]
        # A program whose name has another branch is replaced by its successor.
        words += [
            f"{name}-" for name in programs if name not in further and upstream(installed[name]) != choice.version
        ]
        view.pin(self._pins(choice.version))
        local = {name: path for name, path in files.items() if path in words}
        changes = self._ask(words, view.options, local)
        refuse_removals(changes)
        return PackagePlan(choice, tuple(words), changes, local, lacking)

    def _header_packages(
        self, headers: Sequence[str], choice: Choice, available: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the packages of the kernel's headers with their versions, and a message if a source lacks one.

        Both are empty if dkms has already built the kernel module.
        """
        if not headers or self.installer.modules.built_version(choice.version) == choice.version:
            return {}, {}
        kernel = self.machine.kernel
        found = {name: headers_of(name, kernel, self.packages.installed, available) for name in headers}
        missing = [header_name(name, kernel) for name, package in found.items() if package is None]
        if not missing:
            return dict(package for package in found.values() if package), {}
        message = (
            f"The kernel that runs is {kernel}, and its headers, without which dkms builds no module, are neither in "
            f"/lib/modules/{kernel}/build nor in any source ({', '.join(missing)}). Start a kernel whose headers there are, "
            "or take precompiled modules."
        )
        return {}, {"headers": message}

    def _choose(self, offers: Sequence[Offer], available: Mapping[str, Sequence[str]]) -> Choice | None:
        """Choose packages. After an interrupted run, all packages get the same version again."""
        wanted, gpus, installed = self.options.wanted, self.machine.gpus, self.packages.installed
        if not self.unfinished:
            return choose(offers, wanted, gpus, installed, available)
        present = choose(offers, wanted, gpus, installed, {})
        same = replace(wanted, version=present.version) if present else wanted
        return choose(offers, same, gpus, {}, available) or present

    def _headers(self) -> list[str]:
        """Return the options' names of header packages if dkms has to build modules, and the headers are missing."""
        needs = self.options.load and self.options.wanted.build == "dkms" and not self.machine.headers
        return list(self.options.headers) if needs else []

    def _hold(self, choice: Choice, plan: PackagePlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the packages to hold, and the packages to release."""
        after = after_changes(self.packages.installed, plan.changes)
        exact = [name for name, version in choice.packages.items() if version]
        names = set(driver_packages(after, choice.version, exact))
        held = self.packages.held
        if plan.words:
            # apt removes the hold of a package when it replaces the package.
            there = present_driver_packages(self.packages.installed, self.installer.kinds)
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
        there = present_driver_packages(self.packages.installed, self.installer.kinds)
        held = tuple(sorted(self.packages.held & {*there, *former.packages}))
        offer = Offer(former.modules, "", "", ())
        plan = PackagePlan(Choice(offer, former.version, {}), words, changes)
        hold = tuple(former.packages) if self.options.hold else ()
        return self._decide(former, plan, self._file_changes(self._pin_file(former.version)), hold, held)

    # Common steps

    def _decide(
        self,
        target: Kept,
        plan: PackagePlan,
        files: Sequence[FileChange],
        hold: tuple[str, ...],
        release: tuple[str, ...],
    ) -> Decision:
        """Return the decision for planned packages and files. ``hold`` and ``release`` are packages, by their names."""
        options, machine = self.options, self.machine
        modules = self._module_actions(target, plan, files)
        disturbs = bool(plan.words) or modules.unload or modules.load
        lacking = dict(plan.lacking)
        problem = self._secure_boot_problem(plan.choice.offer.build)
        if problem and (plan.words or modules.sign):
            lacking["secure-boot"] = problem
        lacking.update(self._missing_hold_support(hold, "Or set nvidia_driver_hold to false."))
        steps = (
            *(each.describe() for each in files),
            *self._package_steps(target, plan, hold, release),
            *([f"unload the kernel modules {machine.version}".rstrip()] if modules.unload else []),
            *([f"load the kernel modules {target.version}"] if modules.load else []),
            *(["sign the kernel modules again"] if modules.sign else []),
            *self._persistence_steps(waits=modules.waits),
        )
        work = Work(
            target=target,
            words=plan.words,
            changes=plan.changes,
            files=tuple(files),
            hold=hold,
            unhold=release,
            load=options.load and not modules.waits,
            reload=modules.unload,
            persistence=options.wanted.persistence and options.load,
            quiet=options.load and not options.wanted.persistence,
            sign=modules.sign,
            disturbs=disturbs,
            local=plan.local,
            refresh=plan.refresh,
        )
        return Decision(
            steps,
            work if steps else None,
            changes=plan.changes,
            files=tuple(files),
            lacking=lacking,
            blocked_by=self.installer.users() if machine.modules and disturbs else DeviceUsers(),
            disturbs=disturbs,
            unloads=modules.unload,
        )

    def _module_actions(self, target: Kept, plan: PackagePlan, files: Sequence[FileChange]) -> ModuleActions:
        options, machine = self.options, self.machine
        waits = self.installer.waits_for_restart(self.record) and not plan.words
        parameters_change = any(
            each.path == MODULES_FILE and _module_parameters(each.before) != _module_parameters(each.after)
            for each in files
        )
        is_other_version = machine.version != target.version
        may_load = options.load and not waits
        unload = may_load and bool(machine.modules) and (bool(plan.words) or parameters_change or is_other_version)
        has_rivals = bool(machine.rivals) and not options.keep_rivals
        # New packages are built and signed during their installation.
        signs_existing = bool(options.signing_key) and plan.choice.offer.build == "dkms" and not plan.words
        return ModuleActions(
            waits,
            unload=unload,
            load=may_load and (unload or is_other_version or has_rivals),
            sign=signs_existing and (self.record.doing == SIGN or any(each.path == SIGNING_FILE for each in files)),
        )

    def _secure_boot_problem(self, build: str) -> str:
        """Return why Secure Boot would reject kernel modules of this build; "" if it would accept them."""
        options = self.options
        key, certificate = options.signing_key, options.signing_certificate
        return secure_boot_problem(
            is_on=self.machine.secure_boot and options.load,
            build=build,
            key=key,
            enrolled=is_enrolled(self.installer.system, certificate, key) if key else False,
            certificate=certificate,
        )

    def _package_steps(
        self, target: Kept, plan: PackagePlan, hold: tuple[str, ...], release: tuple[str, ...]
    ) -> list[str]:
        kind = f" with {target.modules} kernel modules" if target.modules else ""
        return [
            *self._change_words(target.version, plan.changes, target.packages, kind),
            *self._interrupted_words(plan.words),
            *([f"hold {len(hold)} packages at {target.version}"] if hold else []),
            *([f"hold {len(release)} packages no longer"] if release and not hold else []),
        ]

    def _persistence_steps(self, *, waits: bool) -> list[str]:
        """Return the step for the persistence daemon, if it has to start, to change its mode, or to stop."""
        if not self.options.load:
            return []
        if not self.options.wanted.persistence:
            return ["stop the persistence daemon, and start it no more"] if self.installer.persistence_state() else []
        return [self._persistence_words()] if not waits and not self.installer.is_persistence_configured() else []

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
        there = present_driver_packages(installed, {name for offer in offers for name in offer.packages})
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
        known = sorted(name for name in driver if name in installed or name in self.packages.broken)
        incomplete = [name for name in self.record.added if name in self.packages.broken]
        names = list(dict.fromkeys((*known, *incomplete)))
        if self.record.doing:
            # Packages can be incomplete, and apt cannot plan with them. A real run repairs them first.
            purge = tuple(dict.fromkeys((*names, *(name for name in self.record.added if name in installed))))
            step = "finish the interrupted package operation, and remove the driver"
            return Decision((step,), purge=purge, disturbs=True)
        purge, changes = self._removal(names, {*driver, *self.record.added})
        files = self._file_changes(dict.fromkeys(self.texts, ""))
        versions = sorted({upstream(version) for version in there.values()})
        unloads = bool(self.machine.modules) and bool(purge)
        steps = (
            *([f"remove the driver {', '.join(versions)}: {len(purge)} packages"] if purge else []),
            *(each.describe() for each in files),
            *([f"unload the kernel modules {self.machine.version}"] if unloads else []),
        )
        return Decision(
            steps,
            purge=purge,
            changes=changes,
            files=files,
            blocked_by=self.installer.users() if unloads else DeviceUsers(),
            disturbs=bool(purge),
            unloads=unloads,
        )


def _module_parameters(text: str | None) -> list[str]:
    """Return the lines with parameters of the driver's modules in a modprobe.d file."""
    return [line for line in (text or "").splitlines() if line.startswith("options nvidia")]


def _branches(installed: Mapping[str, str]) -> set[str]:
    """Return the branches of all drivers whose packages are installed."""
    found = {upstream(version).partition(".")[0] for name, version in installed.items() if "nvidia" in name}
    return {each for each in found if each.isdecimal() and len(each) == 3}


def branches_of(installed: Mapping[str, str], wanted: Wanted) -> list[str]:
    """Return the branches that package names of the catalog can have on this node."""
    return sorted({*_branches(installed), *([wanted.branch] if wanted.branch.isdecimal() else [])})
