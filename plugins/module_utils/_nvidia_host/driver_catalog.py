# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Select the NVIDIA driver's packages, kernel modules, and configuration files. This module has no side effects."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._packages.interface import INSTALL, MARK, Change, upstream
from ..core.errors import AcceleratorError
from ..core.vendors.nvidia.generations import BusGpu, fitting_modules, objections

AUTO = "auto"
MODULES_FILE = "/etc/modprobe.d/dra-accelerators-nvidia.conf"
#: Drop-in that enables persistence mode if the unit of the persistence daemon disables it.
PERSISTENCE_FILE = "/etc/systemd/system/nvidia-persistenced.service.d/dra-accelerators.conf"
SIGNING_FILE = "/etc/dkms/framework.conf.d/dra-accelerators.conf"
FILES = (MODULES_FILE, SIGNING_FILE, PERSISTENCE_FILE)
#: Name of the driver's package group, which is part of the names of its package manager files.
GROUP = "nvidia"
PERSISTENCE_UNIT = "nvidia-persistenced.service"
NO_PERSISTENCE = "--no-persistence-mode"

#: Names of driver packages from any packager. Packages of the container toolkit have their own versions.
NAMES = r"nvidia|^cuda-drivers|^libcuda1|^libnv|^libxnvctrl|^firmware-nvidia"
_NAMED = re.compile(NAMES)
_NOT_OF_DRIVER = re.compile(r"container|cuda-toolkit|nvidia-cuda|nvidia-fs|gds")
#: Other packages that a driver installation may remove: Debian's packages that select one of several drivers.
_ALTERNATIVES = re.compile(r"^glx-(alternative|diversions)|^update-glx")
#: Packages that need the exact driver version and that other roles install.
_COMPANIONS = re.compile(r"^(nvidia-fabric-?manager|libnvidia-nscq|nvidia-imex|libnvsdm)(-\d+)?$")
#: The kernel modules in unload order.
UNLOADED = ("nvidia_peermem", "nvidia_fs", "gdrdrv", "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia")
LOADED = ("nvidia", "nvidia_uvm")
#: Names of the kernel module's file: the vendor's name and Debian's names.
MODULE_FILES = ("nvidia", "nvidia-current", "nvidia-current-open")
_GENERATION = re.compile(r"-G(\d\d)(?=-|$)")
#: Suffixes of a kernel release that the versions of its packages do not have, on Red Hat and on SUSE.
_KERNEL_ENDING = re.compile(r"(\.(x86_64|aarch64)(\+\w+)?|-(default|64kb|azure|rt))$")
#: Suffix of a kernel release that names its Red Hat release.
_KERNEL_MARK = re.compile(r"\.el\d+(_\d+)?$")
#: A full driver version, not only a branch.
_EXACT = re.compile(r"\d+\.\d+(\.\d+)?")
#: A branch, a version, or a full package version with epoch and revision.
_VERSION = re.compile(r"(\d+:)?\d+(\.\d+){0,2}(-[\w.+~]+)?")
#: Other kernel drivers that can bind the GPUs.
RIVALS = ("nouveau", "nova_core")


class DriverError(AcceleratorError):
    """A driver change cannot be planned or has failed."""

    default_code = "driver"


@dataclass(frozen=True)
class Offer:
    """One way to install a driver.

    ``packages`` have the driver's version, ``also`` any version. ``persistence`` are the packages of the persistence
    daemon.
    """

    modules: str
    build: str
    components: str
    packages: tuple[str, ...]
    also: tuple[str, ...] = ()
    persistence: tuple[str, ...] = ()

    def others(self, persistence: bool) -> tuple[str, ...]:
        """Return the packages that can have any version."""
        return self.also + (self.persistence if persistence else ())


def read_offers(
    catalog: Iterable[Mapping[str, Any]], *, branch: str, kernel: str, versions: Iterable[str] = ()
) -> tuple[Offer, ...]:
    """Return the offers of a platform's catalog that apply to a kernel and a branch.

    The placeholders in package names are replaced with the branch, the kernel, and the version. Without a branch,
    entries whose names contain it are skipped. An entry with ``{version}`` in its names yields one offer for each of
    ``versions`` in the branch. Entries for other kernels are skipped.
    """
    words = {
        "{branch}": branch,
        "{kernel}": kernel,
        "{kernel_version}": _KERNEL_MARK.sub("", release_of(kernel)),
        "{flavour}": flavour_of(kernel),
    }
    fitting = [version for version in versions if branch in ("", version.partition(".")[0])]
    found = []
    for entry in catalog:
        lowest, highest = int(entry.get("from") or 0), int(entry.get("to") or 100000)
        if branch and not lowest <= int(branch) <= highest:
            continue
        if entry.get("kernels") and not re.search(entry["kernels"], kernel):
            continue
        has_version = any("{version}" in name for name in entry.get("packages", ()))
        for version in fitting if has_version else [""]:
            offer = _offer(entry, {**words, "{version}": version})
            found += [offer] if offer else []
    return tuple(found)


def _offer(entry: Mapping[str, Any], words: Mapping[str, str]) -> Offer | None:
    """Return the offer of a catalog entry, or None if the value of a placeholder is unknown."""
    names = {
        key: tuple(_filled(str(name), words) for name in entry.get(key, ()))
        for key in ("packages", "also", "persistence")
    }
    if any("{" in name for each in names.values() for name in each):
        return None
    return Offer(str(entry["modules"]), str(entry["build"]), str(entry["components"]), **names)


def versions_of(installed: Mapping[str, str], wanted: Wanted) -> list[str]:
    """Return the versions to insert into catalog names: the requested exact version, and those of installed drivers."""
    asked = upstream(wanted.version)
    there = {upstream(each) for name, each in installed.items() if "nvidia" in name}
    return [
        *([asked] if _EXACT.fullmatch(asked) else []),
        *sorted(each for each in there - {asked} if _EXACT.fullmatch(each) and branch_of(each) >= 100),
    ]


def flavour_of(kernel: str) -> str:
    """Return the flavor at the end of a kernel release, as on Ubuntu and SUSE: ``generic``, ``default``."""
    return kernel.rpartition("-")[2]


def release_of(kernel: str) -> str:
    """Return a kernel release without architecture and flavor. The versions of the kernel's packages start with it."""
    return _KERNEL_ENDING.sub("", kernel)


def header_name(name: str, kernel: str) -> str:
    """Return the name of the package with a kernel's headers."""
    return name.partition("=")[0].replace("{kernel}", kernel).replace("{flavour}", flavour_of(kernel))


def headers_of(
    name: str, kernel: str, installed: Mapping[str, str], available: Mapping[str, Sequence[str]]
) -> tuple[str, str] | None:
    """Return the name and version of the package with a kernel's headers, or None if there is no such package.

    ``name`` contains ``{kernel}``, or a version after an equals sign. The package version can have an additional build
    number. The returned version is empty if the name already identifies the kernel.
    """
    plain, wanted = header_name(name, kernel), name.partition("=")[2]
    if not wanted:
        return (plain, "") if plain in available or plain in installed else None
    wanted = wanted.replace("{kernel_release}", release_of(kernel))
    found = next((each for each in available.get(plain, ()) if f"{each}.".startswith(f"{wanted}.")), "")
    return (plain, found) if found else None


def _filled(name: str, words: Mapping[str, str]) -> str:
    for place, word in words.items():
        if word:
            name = name.replace(place, word)
    return name


@dataclass(frozen=True)
class Wanted:
    """The requested driver. An empty version matches any installed version, otherwise the newest available one."""

    version: str = ""
    latest: bool = False
    modules: str = AUTO
    build: str = "dkms"
    components: str = "compute"
    persistence: bool = True

    def __post_init__(self) -> None:
        """Reject an invalid version. Raises DriverError."""
        if self.version and not _VERSION.fullmatch(self.version):
            raise DriverError(
                f"{self.version!r} is not a version of NVIDIA's driver",
                hint="Expected a branch such as 580, a version such as 580.95.05, or the whole version of a package such as 580.95.05-0ubuntu1. "
                "Leave the version empty for the newest one; latest: true also replaces an older driver of the same branch.",
                code="version",
            )

    @property
    def branch(self) -> str:
        """Return the requested branch, or an empty string."""
        return upstream(self.version).partition(".")[0]

    def matches(self, version: str) -> bool:
        """Return whether a package version matches the request: any version, a branch, an upstream version, or a full version."""
        return not self.version or self.version in (version, upstream(version), upstream(version).partition(".")[0])


@dataclass(frozen=True)
class Choice:
    """The chosen packages with their versions, and the driver's version in ``version``. An empty package version means any version."""

    offer: Offer
    version: str
    packages: Mapping[str, str]

    @property
    def branch(self) -> int:
        """Return the branch of the driver."""
        return branch_of(self.version)


def branch_of(version: str) -> int:
    """Return the branch of a driver version, or 0 if it has none."""
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def choose(
    offers: Sequence[Offer],
    wanted: Wanted,
    gpus: Sequence[BusGpu],
    installed: Mapping[str, str],
    available: Mapping[str, Sequence[str]],
) -> Choice | None:
    """Choose packages. Installed packages are preferred if they match the request. Return None if no offer matches.

    Raises DriverError if no matching offer supports these GPUs.
    """
    found: list[tuple[tuple[bool, int, int], Choice]] = []
    reasons: list[str] = []
    for place, offer in enumerate(offers):
        if (offer.build, offer.components) != (wanted.build, wanted.components) or wanted.modules not in (
            AUTO,
            offer.modules,
        ):
            continue
        choice, is_there = _version_of(offer, wanted, installed, available)
        if choice is None:
            continue
        against = objections(gpus, choice.branch, offer.modules)
        if against:
            reasons += [each for each in against if each not in reasons]
            continue
        order = fitting_modules(gpus, choice.branch)
        found.append(((not is_there, order.index(offer.modules), place), choice))
    if found:
        return min(found, key=lambda each: each[0])[1]
    if reasons:
        raise DriverError(" ".join(reasons), hint="Nothing was changed.", code="gpus")
    return None


def _version_of(
    offer: Offer, wanted: Wanted, installed: Mapping[str, str], available: Mapping[str, Sequence[str]]
) -> tuple[Choice | None, bool]:
    """Return the choice for an offer, and whether it is already installed."""
    others = offer.others(wanted.persistence)
    first = offer.packages[0]
    there = installed.get(first, "")
    newest = next((version for version in available.get(first, ()) if wanted.matches(version)), "")
    if there and wanted.matches(there) and not (wanted.latest and newest and newest != there):
        version = upstream(there)
        if all(upstream(installed.get(name, "")) == version for name in offer.packages) and all(
            name in installed for name in others
        ):
            packages = {name: installed[name] for name in offer.packages}
            return Choice(offer, version, {**packages, **dict.fromkeys(others, "")}), True
    if any(name not in installed and name not in available for name in others):
        return None, False
    for candidate in available.get(first, ()):
        if not wanted.matches(candidate):
            continue
        version = upstream(candidate)
        packages = {
            name: next((each for each in available.get(name, ()) if upstream(each) == version), "")
            for name in offer.packages
        }
        packages[first] = candidate
        if all(packages.values()):
            # Some distributions use separate versions for these packages.
            along = {
                name: next((each for each in available.get(name, ()) if upstream(each) == version), "")
                for name in others
            }
            return Choice(offer, version, {**packages, **along}), False
    return None, False


def names_of(offers: Iterable[Offer], wanted: Wanted) -> list[str]:
    """Return all package names to query from the sources."""
    fitting = [offer for offer in offers if (offer.build, offer.components) == (wanted.build, wanted.components)]
    return sorted({name for offer in fitting for name in (*offer.packages, *offer.others(wanted.persistence))})


def not_offered(
    offers: Sequence[Offer], wanted: Wanted, available: Mapping[str, Sequence[str]], kernel: str = ""
) -> DriverError:
    """Return the error for a request without a matching offer. ``kernel`` is the running kernel."""
    what = f"a driver{' ' + wanted.version if wanted.version else ''} with {wanted.modules} kernel modules ({wanted.build}, {wanted.components})"
    fitting = names_of(offers, wanted)
    if not fitting:
        return DriverError(
            f"This platform's catalog has no packages for {what}",
            hint="Some sources have packages for a named branch or an exact version alone, some no precompiled modules. Set nvidia_driver_version, or "
            "another build.",
            code="not-offered",
        )
    lacks = [
        name
        for offer in offers
        if offer.build == wanted.build == "precompiled" and offer.components == wanted.components
        for name in (*offer.packages[1:], *offer.also)
        if name not in available and any(wanted.matches(each) for each in available.get(offer.packages[0], ()))
    ]
    if lacks and kernel:
        return DriverError(
            f"No source has {what} for the kernel that runs, {kernel}: {', '.join(dict.fromkeys(lacks))} is not there",
            hint="Nothing was changed. Boot a kernel that the distribution has modules for, or build them on the node: "
            "nvidia_driver_build: dkms.",
            code="no-precompiled",
        )
    seen = "; ".join(f"{name}: {', '.join(available.get(name, ())[:4]) or 'in no source'}" for name in fitting[:8])
    return DriverError(
        f"No source has {what}. Looked for: {seen}",
        hint="Nothing was changed. Check nvidia_driver_source and the version.",
        code="not-offered",
    )


def kinds(
    catalog: Sequence[Mapping[str, Any]], kernel: str, branches: Iterable[str], versions: Sequence[str] = ()
) -> dict[str, str]:
    """Return the kind of kernel modules by package, for packages that occur with only one kind."""
    found: dict[str, set[str]] = {}
    for branch in ("", *branches):
        for offer in read_offers(catalog, branch=branch, kernel=kernel, versions=versions):
            for name in offer.packages:
                found.setdefault(name, set()).add(offer.modules)
    return {name: min(each) for name, each in found.items() if len(each) == 1}


# Driver packages


def is_of_driver(name: str, version: str, drivers: Collection[str]) -> bool:
    """Return whether a package belongs to a driver of one of these versions."""
    return upstream(version) in drivers and bool(_NAMED.search(name)) and not _NOT_OF_DRIVER.search(name)


def driver_packages(installed: Mapping[str, str], version: str, chosen: Iterable[str] = ()) -> dict[str, str]:
    """Return the installed packages of a driver version, and the packages that were chosen for it."""
    names = set(chosen)
    return {
        name: each for name, each in sorted(installed.items()) if name in names or is_of_driver(name, each, (version,))
    }


def present_driver_packages(installed: Mapping[str, str], catalog_names: Collection[str]) -> dict[str, str]:
    """Return the packages of an installed driver, from any source: packages with the same version as an installed catalog package."""
    versions = {upstream(installed[name]) for name in catalog_names if name in installed}
    return {name: each for name, each in sorted(installed.items()) if is_of_driver(name, each, versions)}


def matching_updates(there: Mapping[str, str], version: str, available: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the new versions of an installed driver's other packages, if the sources have them. apt does not update held packages."""
    fitting = {
        name: next((each for each in available.get(name, ()) if upstream(each) == version), "") for name in there
    }
    return {name: each for name, each in fitting.items() if each}


def superseded(there: Iterable[str], chosen: Iterable[str]) -> list[str]:
    """Return installed driver packages of another generation than the chosen ones, such as SUSE's G06 compared with G07."""
    wanted = {found for name in chosen for found in _GENERATION.findall(name)}
    return sorted(
        name for name in there if wanted and _GENERATION.findall(name) and not wanted & {*_GENERATION.findall(name)}
    )


def companions(installed: Mapping[str, str], version: str, available: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the new versions of programs that need the exact driver version. Raises DriverError if no source has the version."""
    found = {}
    for name, before in installed.items():
        if not _COMPANIONS.fullmatch(name) or upstream(before) == version:
            continue
        fitting, new = next(
            (
                (each, other)
                for other in successor_names(name, version.partition(".")[0])
                for each in available.get(other, ())
                if upstream(each) == version
            ),
            ("", ""),
        )
        if not fitting:
            raise DriverError(
                f"{name} {before} is installed and has to have the driver's exact version, and no source has {version} of it",
                hint="Nothing was changed. Take a version that the source has of both, or remove it first.",
                code="companion",
            )
        found[new] = fitting
    return found


def successor_names(name: str, branch: str) -> list[str]:
    """Return the possible names of a program that needs the driver's version, for a driver of another branch. The current name is first."""
    base = name.rstrip("0123456789").rstrip("-")
    return list(dict.fromkeys((name, base, *([f"{base}-{branch}"] if branch else []))))


def companion_names(installed: Iterable[str]) -> list[str]:
    """Return the installed programs that need the exact driver version."""
    return sorted(name for name in installed if _COMPANIONS.fullmatch(name))


def install_words(
    choice: Choice,
    offers: Iterable[Offer],
    installed: Mapping[str, str],
    further: Mapping[str, str],
    files: Mapping[str, str],
) -> list[str]:
    """Return the package specifications to install, and those of the other kind's kernel modules to remove. Empty if nothing changes."""
    words = []
    for name, version in {**choice.packages, **further}.items():
        if name not in installed or (version and installed[name] != version):
            words.append(files.get(name) or (f"{name}={version}" if version else name))
    own = {*choice.packages}
    of_other_kind = {
        name
        for offer in offers
        if (offer.modules, offer.build) != (choice.offer.modules, choice.offer.build)
        for name in offer.packages
    }
    words += [f"{name}-" for name in sorted(of_other_kind - own) if name in installed]
    if words and files:
        # The other local files are dependencies of the chosen packages.
        named = {*choice.packages, *further}
        words += [path for name, path in sorted(files.items()) if name not in named and name not in installed]
    return words


def outdated(there: Mapping[str, str], choice: Choice) -> list[str]:
    """Return installed driver packages that have a version in their names and that the chosen packages replace.

    Precompiled packages of the same version stay, because they are for other installed kernels.
    """
    stays = choice.version if choice.offer.build == "precompiled" else ""
    return sorted(
        name
        for name, each in there.items()
        if upstream(each) in name and upstream(each) != stays and name not in choice.packages
    )


def refuse_removals(changes: Iterable[Change]) -> None:
    """Refuse changes that remove packages other than driver packages. Raises DriverError with their names."""
    others = [
        change.name
        for change in changes
        if change.verb != INSTALL and not (_NAMED.search(change.name) or _ALTERNATIVES.search(change.name))
    ]
    if others:
        raise DriverError(
            f"{', '.join(others)} would have to go for this driver",
            hint="Nothing was changed. Remove them yourself, or take another driver.",
            code="would-remove",
        )


def after_changes(installed: Mapping[str, str], changes: Iterable[Change]) -> dict[str, str]:
    """Return the installed packages after the changes."""
    found = dict(installed)
    for change in changes:
        if change.verb == INSTALL:
            found[change.name] = change.after
        else:
            found.pop(change.name, None)
    return found


# Files


def modules_text(parameters: Mapping[str, Mapping[str, Any]], *, keep_rivals: bool) -> str:
    """Return the modprobe.d file with blocked kernel modules and module parameters. Empty without either.

    ``parameters`` are by module: ``nvidia``, ``nvidia_drm``, ``nvidia_modeset``, ``nvidia_uvm``. Debian uses other file
    names, so each option is written for every name. Options for a missing module have no effect.
    """
    lines = [] if keep_rivals else [f"blacklist {name}" for name in RIVALS] + ["options nouveau modeset=0"]
    for name, values in sorted(parameters.items()):
        said = " ".join(
            f"{key}={int(value) if isinstance(value, bool) else value}" for key, value in sorted(values.items())
        )
        ending = name.replace("_", "-").partition("nvidia")[2]
        lines += [f"options {file}{ending} {said}" for file in MODULE_FILES] if said else []
    return "".join(f"{line}\n" for line in (MARK, *lines)) if lines else ""


def signing_text(key: str, certificate: str) -> str:
    """Return the dkms configuration with the signing key, or an empty string without a key."""
    return f'{MARK}\nmok_signing_key="{key}"\nmok_certificate="{certificate}"\n' if key else ""


def persistence_text(unit: str | None) -> str:
    """Return the drop-in that enables persistence mode if the daemon's unit disables it. Empty if none is needed.

    The units of some distributions use --no-persistence-mode. The daemon then runs, but the GPUs are still initialized
    for each first user.
    """
    starts = [
        line.partition("=")[2].strip() for line in (unit or "").splitlines() if line.strip().startswith("ExecStart=")
    ]
    wanted = [" ".join(word for word in each.split() if word != NO_PERSISTENCE) for each in starts]
    if not any(NO_PERSISTENCE in each.split() for each in starts):
        return ""
    return "".join(f"{line}\n" for line in (MARK, "[Service]", "ExecStart=", *(f"ExecStart={each}" for each in wanted)))


# Kernel modules


def secure_boot_problem(*, is_on: bool, build: str, key: str, enrolled: bool | None, certificate: str) -> str:
    """Return why Secure Boot would reject kernel modules that are built on the node. Empty if it would accept them.

    ``enrolled`` is None if the certificate is missing or cannot be read.
    """
    if not is_on or build != "dkms":
        return ""
    if not key:
        return (
            "Secure Boot is on, so that the kernel loads signed modules alone, and no key is named to sign them with. "
            "Set nvidia_driver_signing_key and nvidia_driver_signing_certificate, or take precompiled modules that the distribution has signed."
        )
    if enrolled is None:
        return f"Secure Boot is on, and {certificate} or {key} is not on the node."
    if not enrolled:
        return (
            f"Secure Boot is on, and the firmware does not know {certificate}. Run `mokutil --import {certificate}`, start the machine again "
            "and confirm at its console."
        )
    return ""


def modules_to_unload(modules: Collection[str]) -> list[str]:
    """Return the loaded modules to unload, in order."""
    return [name for name in UNLOADED if name in modules]


def modules_to_load(before: Collection[str]) -> list[str]:
    """Return the modules to load: those that compute workloads need, and those that were loaded before."""
    return list(dict.fromkeys((*LOADED, *(name for name in reversed(UNLOADED) if name in before))))
