# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define the RPM repositories of a bundle, their signing keys, and dnf's options for another platform. This module has no side effects.

dnf and zypper read the same repositories and use the same dependency solver. Therefore dnf downloads the packages for
the hosts of both.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._packages import rpm_output
from .._packages.interface import INSTALL, Change
from .bundle_manifest import BundleError
from .requirements import Platform, PlatformPlan

#: The required programs, and the packages that contain them.
PROGRAMS = {"dnf": "dnf", "createrepo_c": "createrepo-c (Debian), createrepo_c (others)", "rpmkeys": "rpm"}
_SIGNED = re.compile(r"[Ss]ignature, key (?:ID|fingerprint:?) (?P<key>[0-9a-fA-F]{8,64}): OK")


@dataclass(frozen=True)
class Repository:
    """A repository and its signing key: a text, a path, or a URL, with pinned fingerprints.

    The vendor signs the index, each package, or both.
    """

    name: str
    uris: tuple[str, ...]
    fingerprints: tuple[str, ...]
    key: str = ""
    key_file: str = ""
    key_url: str = ""
    packages_signed: bool = True
    index_signed: bool = True

    def text(self, key_path: str) -> str:
        """Return the repository file for dnf. Package signatures are verified later, with only this key."""
        lines = [f"[{self.name}]", f"name={self.name}", f"baseurl={' '.join(self.uris)}", "enabled=1", "gpgcheck=0"]
        lines += [f"repo_gpgcheck={int(self.index_signed)}", f"gpgkey=file://{key_path}"]
        # Versions are requested explicitly, independent of module streams.
        lines += ["skip_if_unavailable=0", "module_hotfixes=1"]
        return "".join(f"{line}\n" for line in lines)


def check_mirrors(platforms: Iterable[PlatformPlan], mirrors: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Reject RPM platforms without an entry for the distribution's repositories. Raises BundleError with an example of the entry."""
    for plan in platforms:
        if plan.platform.uses_rpm and mirrors.get(plan.platform.system) is None:
            roles = sorted({each.of for each in plan.drivers} | {each.of for each in plan.companions})
            names = sorted({name for group in plan.groups for name in group})
            raise BundleError(
                f"Packages for {plan.platform} are needed ({', '.join([*roles, *names])}), and accelerator_bundle_mirrors has no entry "
                f"{plan.platform.system}: the address of an RPM distribution's repositories is the site's or a subscription's",
                hint=f"Write accelerator_bundle_mirrors: {{{plan.platform.system}: [{{uris: [...], key: /path/of/the/key, fingerprints: "
                "[...]}]}, or an empty list where the hosts have all that the vendors' packages need (docs/offline.md).",
                code="mirror",
            )


def repositories(plan: PlatformPlan, mirrors: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Repository, ...]:
    """Return the repositories of a platform: those of ``mirrors`` and the vendors'. Raises BundleError for one without a pinned key or signatures."""
    check_mirrors([plan], mirrors)
    found = [_mirror(each, number, plan.platform) for number, each in enumerate(mirrors[plan.platform.system])]
    found += [
        Repository(
            f"vendor-{number}",
            source.uris,
            source.fingerprints,
            key=source.key,
            key_url=source.key_url,
            packages_signed=source.packages_signed,
        )
        for number, source in enumerate(plan.sources)
    ]
    for each in found:
        if not each.fingerprints:
            raise BundleError(
                f"No fingerprint is pinned of the key of {', '.join(each.uris)}",
                hint="Packages are downloaded only from repositories whose key has a pinned fingerprint.",
                code="repository-key",
            )
        if not each.packages_signed and not each.index_signed:
            raise BundleError(
                f"By its options, {', '.join(each.uris)} signs neither its index nor its packages",
                hint="Packages are downloaded only from signed repositories: set packages_signed or index_signed.",
                code="repository-key",
            )
    return tuple(found)


def _mirror(content: Mapping[str, Any], number: int, platform: Platform) -> Repository:
    key = str(content.get("key") or content.get("keyring") or "")
    if not content.get("uris") or not key:
        raise BundleError(
            f"A mirror of {platform.system} is {dict(content)!r}, expected uris, key (a file in ASCII armour) and fingerprints",
            code="mirror",
        )
    prints = tuple(str(each) for each in content.get("fingerprints") or ())
    return Repository(
        f"mirror-{number}",
        tuple(map(str, content["uris"])),
        prints,
        key_file=key,
        packages_signed=bool(content.get("packages_signed", True)),
        index_signed=bool(content.get("index_signed", True)),
    )


def options(root: str, platform: Platform) -> list[str]:
    """Return dnf's options for an empty system in a directory. Settings such as proxies are those of this host."""
    return [
        f"--installroot={root}/system",
        f"--forcearch={platform.machine}",
        f"--releasever={platform.release}",
        f"--setopt=reposdir={root}/repositories",
        f"--setopt=cachedir={root}/cache",
        f"--setopt=logdir={root}/log",
        f"--setopt=persistdir={root}/state",
        "--setopt=install_weak_deps=False",
        "--setopt=best=True",
        "--noplugins",
    ]


def spec(word: str) -> str:
    """Return a package specification ``name=version`` in dnf's form."""
    name, _equals, version = word.partition("=")
    return f"{name}-{version}" if version else name


def files_of(changes: Iterable[Change]) -> dict[tuple[str, str], str]:
    """Return the full versions of the packages to install, by name and version without epoch, as in file names."""
    return {
        (change.name, rpm_output.without_epoch(change.after)): change.after
        for change in changes
        if change.verb == INSTALL
    }


def addresses(text: str) -> dict[str, str]:
    """Read the URLs of packages, by file name."""
    return {
        posixpath.basename(line.strip()): line.strip() for line in text.splitlines() if line.strip().endswith(".rpm")
    }


def repository_of(address: str, found: Sequence[Repository]) -> Repository | None:
    """Return the repository of a file: the one with the longest URI that is a prefix of the file's URL."""
    fitting = [(len(base), each) for each in found for base in each.uris if address.startswith(base.rstrip("/") + "/")]
    return max(fitting, key=lambda each: each[0])[1] if fitting else None


def signers(text: str, trusted: Sequence[str]) -> tuple[str, ...]:
    """Read the keys of the valid signatures in rpm's output: fingerprints of ``trusted``, or the IDs of their subkeys."""
    ids = dict.fromkeys(match["key"].upper() for match in _SIGNED.finditer(text))
    return tuple(dict.fromkeys(next((key for key in trusted if key.endswith(each)), each) for each in ids))
