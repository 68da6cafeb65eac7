# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the contents of an offline bundle from the needs of the hosts, and report what a bundle lacks. This module has no side effects.

A need has a kind: ``packages``, ``driver``, ``group``, ``wheels``, ``image``, or ``file``. ``of`` is the role that
reports it.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._nvidia_host.driver_catalog import (
    AUTO,
    Choice,
    DriverError,
    Offer,
    Wanted,
    choose,
    header_name,
    headers_of,
    names_of,
    read_offers,
    versions_of,
)
from .._packages import package_group
from .bundle_manifest import FILE, IMAGE, BundleError, Manifest, digest_of_text

PACKAGES, DRIVER, GROUP, WHEELS = "packages", "driver", "group", "wheels"
_KEYS = {
    PACKAGES: ("of", "platform", "names"),
    DRIVER: ("of", "platform", "wanted", "catalog"),
    GROUP: ("of", "platform", "parts"),
    WHEELS: ("of", "python", "machine", "requirements"),
    IMAGE: ("of", "reference"),
    FILE: ("of", "path"),
}
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: Debian and Ubuntu releases with supported bundles, and the names of their suites.
SUITES = {
    "debian_12": "bookworm",
    "debian_13": "trixie",
    "ubuntu_22": "jammy",
    "ubuntu_24": "noble",
}
#: Distributions with RPM packages: their IDs in os-release, in lowercase.
RPM_DISTRIBUTIONS = frozenset({"rhel", "rocky", "almalinux", "centos", "ol", "sles", "opensuse-leap", "openeuler"})


@dataclass(frozen=True)
class Platform:
    """A distribution release on an architecture."""

    distribution: str
    release: str
    machine: str

    @property
    def system(self) -> str:
        """Return distribution and release as one string, as in the names of the roles' variable files."""
        return f"{self.distribution}_{self.release}"

    @property
    def key(self) -> str:
        """Return the platform as one string."""
        return f"{self.system}_{self.machine}"

    @property
    def uses_rpm(self) -> bool:
        """Return whether the distribution uses RPM packages."""
        return self.distribution in RPM_DISTRIBUTIONS

    @property
    def architecture(self) -> str:
        """Return dpkg's name of the architecture. Raises BundleError for an unknown one."""
        if self.machine not in _ARCHITECTURES:
            raise BundleError(
                f"The machine {self.machine} is known by no package name, expected {' or '.join(_ARCHITECTURES)}",
                code="platform",
            )
        return _ARCHITECTURES[self.machine]

    @property
    def suite(self) -> str:
        """Return the code name of the release. Raises BundleError for an unsupported distribution."""
        if self.system not in SUITES:
            raise BundleError(
                f"No packages can be gathered for {self.distribution} {self.release}, only for {', '.join(SUITES)}".replace(
                    "_", " "
                )
                + f", and releases of {', '.join(sorted(RPM_DISTRIBUTIONS))}",
                hint="Packages of other distributions have to be on the nodes beforehand, or come from a mirror of the site's.",
                code="platform",
            )
        return SUITES[self.system]

    def __str__(self) -> str:
        return f"{self.distribution} {self.release} ({self.machine})"


def read_platform(content: Any, whose: str) -> Platform:
    """Read a platform. ``whose`` names its owner in errors. Raises BundleError."""
    if not isinstance(content, Mapping) or not all(content.get(key) for key in ("distribution", "release", "machine")):
        raise BundleError(
            f"The platform of {whose} is {content!r}, expected a distribution, a release and a machine",
            hint="Write it down as accelerator_platform: {distribution: debian, release: 13, machine: x86_64}.",
            code="platform",
        )
    release = str(content["release"]).partition(".")[0]
    return Platform(str(content["distribution"]).lower(), release, str(content["machine"]))


def wheelhouse_key(python: str, machine: str) -> str:
    """Return the key for the wheels of a Python version (``3.13`` or ``3.13.5``) on an architecture."""
    parts = str(python).split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise BundleError(f"{python!r} is no version of Python, expected one such as 3.13", code="platform")
    return f"cp{parts[0]}{parts[1]}-{machine}"


@dataclass(frozen=True)
class DriverNeed:
    """A driver that a platform needs, from the package plan of its role."""

    of: str
    wanted: Wanted
    catalog: tuple[Mapping[str, Any], ...]
    kernel: str
    headers: tuple[str, ...]

    def offers(self) -> tuple[Offer, ...]:
        """Return the ways to install the driver."""
        versions = versions_of({}, self.wanted)
        return read_offers(self.catalog, branch=self.wanted.branch, kernel=self.kernel, versions=versions)

    def names(self) -> list[str]:
        """Return all package names to query from the sources."""
        return [*names_of(self.offers(), self.wanted), *self.header_names()]

    def header_names(self) -> list[str]:
        """Return the names of the packages with the kernel's headers."""
        return [header_name(name, self.kernel) for name in self.headers]

    def header_words(self, available: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
        """Return the kernel header packages as ``name`` or ``name=version``, and the titles of those that no source has for this kernel."""
        found = {name: headers_of(name, self.kernel, {}, available) for name in self.headers}
        words = [f"{each[0]}={each[1]}" if each[1] else each[0] for each in found.values() if each]
        return words, [self._header_title(name) for name, each in found.items() if not each]

    def _header_title(self, name: str) -> str:
        return f"{header_name(name, self.kernel)} of the kernel {self.kernel}" if "=" in name else name

    def choices(self, available: Mapping[str, Sequence[str]]) -> tuple[Choice, ...]:
        """Choose packages as the role does. AUTO selects both kinds of kernel modules, because the GPUs are unknown here."""
        kinds = ("open", "proprietary") if self.wanted.modules == AUTO else (self.wanted.modules,)
        return tuple(choice for kind in kinds if (choice := self._choice(kind, available)) is not None)

    def _choice(self, kind: str, available: Mapping[str, Sequence[str]]) -> Choice | None:
        try:
            return choose(self.offers(), self._of(kind), (), {}, available)
        except DriverError:
            # The branch has no modules of this kind. The other kind is tried, or the caller reports the driver as
            # missing.
            return None

    def _of(self, kind: str) -> Wanted:
        wanted = self.wanted
        return Wanted(wanted.version, wanted.latest, kind, wanted.build, wanted.components, wanted.persistence)

    def __str__(self) -> str:
        wanted = self.wanted
        version = f" {wanted.version}" if wanted.version else ""
        return f"the driver{version} with {wanted.modules} kernel modules ({wanted.build}, {wanted.components})"


@dataclass(frozen=True)
class GroupNeed:
    """Packages with one common version, each with its possible names. ``{branch}`` in a name is replaced with the branch of the version.

    Without a version, any version matches. With ``follows``, the packages have the version of the platform's drivers.
    ``also`` are optional packages with their own versions.
    """

    of: str
    parts: tuple[tuple[str, ...], ...]
    version: str = ""
    follows: bool = False
    also: tuple[str, ...] = ()

    def versions(self, of_drivers: Sequence[str]) -> tuple[str, ...]:
        """Return the versions to query."""
        return tuple(dict.fromkeys(of_drivers)) if self.follows and of_drivers else (self.version,)

    def names(self, version: str) -> list[str]:
        """Return all package names to query from the sources."""
        return [*(name for part in self._filled(version) for name in part), *self.also]

    def words(self, version: str, available: Mapping[str, Sequence[str]]) -> list[str]:
        """Choose packages as the role does, as ``name=version``. Empty if no version is available for all parts."""
        parts = tuple(package_group.Part(names) for names in self._filled(version))
        group = package_group.Group(self.of, self.of, "", parts, "")
        found = package_group.choose(group, version, {}, available)
        also = {name: available[name][0] for name in self.also if available.get(name)}
        return [f"{name}={each}" for name, each in {**found.packages, **also}.items()] if found else []

    def _filled(self, version: str) -> tuple[tuple[str, ...], ...]:
        branch = version.partition(".")[0]
        filled = (tuple(name.replace("{branch}", branch) for name in part) for part in self.parts)
        return tuple(tuple(name for name in part if not name.endswith("-") and "{" not in name) for part in filled)

    def __str__(self) -> str:
        names = ", ".join(part[0] for part in self.parts)
        return names + (f" {self.version}" if self.version else " of the driver's version" if self.follows else "")


@dataclass(frozen=True)
class SourceNeed:
    """A vendor's package source: URIs, suites, the signing key (its text or its URL), and the accepted fingerprints."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...] = ()
    key: str = ""
    key_url: str = ""
    fingerprints: tuple[str, ...] = ()
    packages_signed: bool = True


@dataclass
class PlatformPlan:
    """The needs of one platform: groups of packages that are installed together, drivers, and sources in addition to the distribution's."""

    platform: Platform
    groups: list[tuple[str, ...]] = field(default_factory=list)
    drivers: list[DriverNeed] = field(default_factory=list)
    companions: list[GroupNeed] = field(default_factory=list)
    sources: list[SourceNeed] = field(default_factory=list)
    components: set[str] = field(default_factory=set)
    mirrors: list[str] = field(default_factory=list)
    status: str = ""


@dataclass(frozen=True)
class WheelsPlan:
    """The wheels for one Python version on one architecture: all requirement lists."""

    key: str
    python: str
    machine: str
    requirements: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The contents that a fleet needs from external sources."""

    needs: tuple[Mapping[str, Any], ...]
    platforms: tuple[PlatformPlan, ...]
    wheels: tuple[WheelsPlan, ...]
    images: tuple[str, ...]
    files: tuple[tuple[str, str], ...]

    def describe(self) -> list[str]:
        """Return the plan as text lines."""
        lines = []
        for each in self.platforms:
            words = [name for group in each.groups for name in group]
            words += map(str, (*each.drivers, *each.companions))
            lines.append(f"gather packages for {each.platform}: {', '.join(dict.fromkeys(words))}")
        lines += [f"gather wheels for Python {each.python} ({each.machine})" for each in self.wheels]
        lines += [f"save the image {each}" for each in self.images]
        return lines + [f"take {path}" for path, _checksum in self.files]


def redacted(value: Any) -> Any:
    """Return data without the credentials in URLs, because a bundle must not contain them."""
    if isinstance(value, str):
        return _CREDENTIALS.sub("://", value)
    if isinstance(value, Mapping):
        return {key: redacted(each) for key, each in value.items()}
    return [redacted(each) for each in value] if isinstance(value, (list, tuple)) else value


def normalized(needs: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return sorted needs without duplicates. Raises BundleError for an invalid need."""
    found: dict[str, Mapping[str, Any]] = {}
    for need in needs:
        kind = need.get("kind") if isinstance(need, Mapping) else None
        if kind not in _KEYS:
            raise BundleError(f"{need!r} is no need, expected one of {', '.join(_KEYS)}", code="need")
        lacking = [key for key in _KEYS[kind] if key not in need]
        if lacking:
            raise BundleError(f"The need {kind} has no {' and no '.join(lacking)}: {need!r}", code="need")
        found.setdefault(json.dumps(need, sort_keys=True), need)
    return tuple(found[key] for key in sorted(found))


def plan(needs: Iterable[Mapping[str, Any]]) -> Plan:
    """Return the plan for all needs. Raises BundleError for invalid or contradictory needs."""
    all_needs = normalized(needs)
    platforms: dict[str, PlatformPlan] = {}
    wheels: dict[str, tuple[str, str, set[str]]] = {}
    images: dict[str, None] = {}
    files: dict[str, tuple[str, str]] = {}
    for need in all_needs:
        if need["kind"] in (PACKAGES, DRIVER, GROUP):
            platform = read_platform(need["platform"], need["of"])
            _add_packages(platforms.setdefault(platform.key, PlatformPlan(platform)), need)
        elif need["kind"] == WHEELS:
            key = wheelhouse_key(need["python"], need["machine"])
            python = ".".join(str(need["python"]).split(".")[:2])
            wheels.setdefault(key, (python, str(need["machine"]), set()))[2].add(str(need["requirements"]))
        elif need["kind"] == IMAGE:
            images[str(need["reference"])] = None
        else:
            _add_file(files, need)
    return Plan(
        tuple(redacted(need) for need in all_needs),
        tuple(platforms[key] for key in sorted(platforms)),
        tuple(
            WheelsPlan(key, python, machine, tuple(sorted(texts)))
            for key, (python, machine, texts) in sorted(wheels.items())
        ),
        tuple(images),
        tuple(files[name] for name in sorted(files)),
    )


def _add_packages(found: PlatformPlan, need: Mapping[str, Any]) -> None:
    if not found.platform.uses_rpm:
        # Both properties raise BundleError for unsupported platforms.
        _known = (found.platform.suite, found.platform.architecture)
    elif need.get("status"):
        raise BundleError(
            f"accelerator_platform has a package status for {found.platform} ({need['of']}), and rpm has no such file",
            hint="Leave `status` out of accelerator_platform: for RPM the bundle gets all dependencies.",
            code="platform",
        )
    if need["kind"] == PACKAGES:
        group = tuple(map(str, need["names"]))
        if group and group not in found.groups:
            found.groups.append(group)
    elif need["kind"] == DRIVER:
        found.drivers.append(driver_of(need))
    else:
        found.companions.append(group_of(need))
    source = need.get("source") or {}
    if source.get("suites"):
        each = SourceNeed(
            tuple(source["uris"]),
            tuple(source["suites"]),
            tuple(source.get("components") or ()),
            source.get("key") or "",
            source.get("key_url") or "",
            tuple(source.get("fingerprints") or ()),
            bool(source.get("packages_signed", True)),
        )
        if each not in found.sources:
            found.sources.append(each)
    found.components.update(source.get("more_components") or ())
    for mirror in source.get("mirrors") or ():
        if mirror not in found.mirrors:
            found.mirrors.append(str(mirror))
    found.status = found.status or str(need.get("status") or "")


def driver_of(need: Mapping[str, Any]) -> DriverNeed:
    """Read a driver need."""
    wanted, kernel = need["wanted"], str(need.get("kernel") or "")
    return DriverNeed(
        str(need["of"]),
        Wanted(
            version=str(wanted.get("version") or ""),
            modules=str(wanted.get("kernel_modules") or AUTO),
            build=str(wanted.get("build") or "dkms"),
            components=str(wanted.get("components") or "compute"),
            persistence=bool(wanted.get("persistence", True)),
        ),
        tuple(need["catalog"]),
        kernel,
        tuple(str(name).replace("{kernel}", kernel) for name in need.get("headers") or ()) if kernel else (),
    )


def group_of(need: Mapping[str, Any]) -> GroupNeed:
    """Read a group need."""
    return GroupNeed(
        str(need["of"]),
        tuple(tuple(map(str, part)) for part in need["parts"]),
        str(need.get("version") or ""),
        bool(need.get("follows")),
        tuple(map(str, need.get("also") or ())),
    )


def _add_file(files: dict[str, tuple[str, str]], need: Mapping[str, Any]) -> None:
    path, checksum = str(need["path"]), str(need.get("sha256") or "").lower()
    name = posixpath.basename(path)
    there = files.setdefault(name, (path, checksum))
    if there != (path, checksum):
        raise BundleError(
            f"Two files are called {name}: {there[0]} and {path}"
            if there[0] != path
            else f"{path} has two expected digests: {there[1] or 'none'} and {checksum or 'none'}",
            hint="A bundle cannot have two files with one name. Rename one, or state one digest.",
            code="need",
        )


# Missing contents


def missing(needs: Iterable[Mapping[str, Any]], manifest: Manifest) -> list[str]:
    """Return the needs that a bundle does not satisfy, as text. Raises BundleError for an invalid need."""
    found: list[str] = []
    all_needs = normalized(needs)
    for need in all_needs:
        found += (
            _lacks_group(need, manifest, all_needs) if need["kind"] == GROUP else _LACKS[need["kind"]](need, manifest)
        )
    return list(dict.fromkeys(found))


def refuse_missing(needs: Iterable[Mapping[str, Any]], manifest: Manifest, where: str, whose: str) -> None:
    """Reject an incomplete bundle. Raises BundleError with the missing contents and the roles that need them."""
    lacking = missing(needs, manifest)
    if lacking:
        raise BundleError(
            f"{where} does not have what {whose} needs: {'; '.join(lacking)}",
            hint="Nothing was changed. Create the bundle again, from an inventory with the current state of these hosts (docs/offline.md).",
            code="bundle-lacks",
        )


def _lacks_packages(need: Mapping[str, Any], manifest: Manifest) -> list[str]:
    platform = read_platform(need["platform"], need["of"])
    there = manifest.versions(platform.key)
    return [f"the package {name} for {platform} ({need['of']})" for name in need["names"] if name not in there]


def _lacks_driver(need: Mapping[str, Any], manifest: Manifest) -> list[str]:
    platform = read_platform(need["platform"], need["of"])
    there = manifest.versions(platform.key)
    driver = driver_of(need)
    found = [] if driver.choices(there) else [f"{driver} for {platform} ({need['of']})"]
    return found + [f"the package {name} for {platform} ({need['of']})" for name in driver.header_words(there)[1]]


def _lacks_group(need: Mapping[str, Any], manifest: Manifest, all_needs: Sequence[Mapping[str, Any]]) -> list[str]:
    platform = read_platform(need["platform"], need["of"])
    there = manifest.versions(platform.key)
    group = group_of(need)
    drivers = [driver_of(each) for each in all_needs if each["kind"] == DRIVER and each["platform"] == need["platform"]]
    of_drivers = [choice.version for driver in drivers for choice in driver.choices(there)]
    if group.follows and drivers and not of_drivers:
        # The missing driver is reported separately.
        return []
    versions = group.versions(of_drivers)
    return [] if any(group.words(each, there) for each in versions) else [f"{group} for {platform} ({need['of']})"]


def _lacks_wheels(need: Mapping[str, Any], manifest: Manifest) -> list[str]:
    key = wheelhouse_key(need["python"], need["machine"])
    if key not in manifest.wheelhouses:
        has = ", ".join(sorted(manifest.wheelhouses)) or "none"
        return [f"the wheels of {key} ({need['of']}), it has those of {has}"]
    if digest_of_text(str(need["requirements"])) not in manifest.wheelhouses[key]:
        return [f"the wheels of {key} by the present list of requirements ({need['of']}), it has those of another list"]
    return []


def _lacks_image(need: Mapping[str, Any], manifest: Manifest) -> list[str]:
    there = [item.name for item in manifest.of(IMAGE)]
    if need["reference"] in there:
        return []
    return [f"the image {need['reference']} ({need['of']}), it has {', '.join(there) or 'none'}"]


def _lacks_file(need: Mapping[str, Any], manifest: Manifest) -> list[str]:
    name, wanted = posixpath.basename(str(need["path"])), str(need.get("sha256") or "").lower()
    there = {item.name: item.sha256 for item in manifest.of(FILE)}
    if name not in there:
        return [f"the file {name} ({need['of']})"]
    if wanted and there[name] != wanted:
        return [f"the file {name} with the digest {wanted} ({need['of']}), it has {there[name]}"]
    return []


_LACKS = {
    PACKAGES: _lacks_packages,
    DRIVER: _lacks_driver,
    WHEELS: _lacks_wheels,
    IMAGE: _lacks_image,
    FILE: _lacks_file,
}
