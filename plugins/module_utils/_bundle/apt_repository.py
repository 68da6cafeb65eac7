# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define the Debian package sources and indexes of a bundle, and apt's settings for another platform. This module has no side effects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._packages.interface import INSTALL, Change, Source
from .bundle_manifest import BundleError
from .requirements import Platform, PlatformPlan

_KEYRINGS = {
    "debian": ("/usr/share/keyrings/debian-archive-keyring.gpg", "debian-archive-keyring"),
    "ubuntu": ("/usr/share/keyrings/ubuntu-archive-keyring.gpg", "ubuntu-keyring"),
}
_URI = re.compile(r"'(?P<uri>[^']+)' (?P<name>\S+) (?P<size>\d+)")
_SCHEME = re.compile(r"^[a-z0-9+]+:(//)?")


@dataclass(frozen=True)
class Archive:
    """A package source of a platform, with its trust: a keyring on this host, or a key with pinned fingerprints."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...] = ()
    keyring: str = ""
    key: str = ""
    key_url: str = ""
    fingerprints: tuple[str, ...] = ()

    def stanza(self, signed_by: str) -> str:
        """Return the source as a deb822 stanza for apt."""
        return Source(self.uris, self.suites, self.components, signed_by).stanza()


def archives(plan: PlatformPlan, mirrors: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Archive, ...]:
    """Return the package sources of a platform: the distribution's, or the replacement in ``mirrors``, and the vendors'.

    ``mirrors`` are by platform, such as ``debian_13``. Raises BundleError for an incomplete source.
    """
    platform = plan.platform
    keyring = _KEYRINGS[platform.distribution][0]
    given = mirrors.get(platform.system)
    if given is None:
        found = [_with(each, plan, keyring) for each in _distribution(platform)]
    else:
        found = [_read(each, keyring, platform) for each in given]
    found += [
        Archive((uri,), (platform.suite,), tuple(sorted({"main", *plan.components})), keyring) for uri in plan.mirrors
    ]
    for source in plan.sources:
        if not source.fingerprints:
            raise BundleError(
                f"No fingerprint is pinned of the key of {', '.join(source.uris)}",
                hint="Packages are downloaded only from sources whose key has a pinned fingerprint.",
                code="repository-key",
            )
        found.append(
            Archive(
                source.uris,
                source.suites,
                source.components,
                key=source.key,
                key_url=source.key_url,
                fingerprints=source.fingerprints,
            )
        )
    return tuple(found)


def _distribution(platform: Platform) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    suite = platform.suite
    own = (suite, f"{suite}-updates")
    if platform.distribution == "debian":
        return (
            ("http://deb.debian.org/debian", own, ("main",)),
            ("http://deb.debian.org/debian-security", (f"{suite}-security",), ("main",)),
        )
    if platform.architecture == "amd64":
        return (
            ("http://archive.ubuntu.com/ubuntu", own, ("main", "universe")),
            ("http://security.ubuntu.com/ubuntu", (f"{suite}-security",), ("main", "universe")),
        )
    return (("http://ports.ubuntu.com/ubuntu-ports", (*own, f"{suite}-security"), ("main", "universe")),)


def _with(each: tuple[str, tuple[str, ...], tuple[str, ...]], plan: PlatformPlan, keyring: str) -> Archive:
    uri, suites, components = each
    return Archive((uri,), suites, tuple(dict.fromkeys((*components, *sorted(plan.components)))), keyring)


def _read(content: Mapping[str, Any], keyring: str, platform: Platform) -> Archive:
    if not content.get("uris") or not content.get("suites"):
        raise BundleError(
            f"A mirror of {platform.system} is {dict(content)!r}, expected uris, suites and components", code="mirror"
        )
    return Archive(
        tuple(content["uris"]),
        tuple(content["suites"]),
        tuple(content.get("components") or ()),
        str(content.get("keyring") or keyring),
        fingerprints=tuple(content.get("fingerprints") or ()),
    )


def keyring_problem(archive: Archive, platform: Platform) -> BundleError:
    """Return the error for a missing distribution keyring on this host."""
    return BundleError(
        f"{archive.keyring}, which has the keys of {platform.distribution}, is not on this machine",
        hint=f"Install {_KEYRINGS[platform.distribution][1]}, or name another ring in accelerator_bundle_mirrors.",
        code="keyring",
    )


def root_settings(root: str, architecture: str) -> str:
    """Return apt's settings for the root directory of another platform. Settings such as proxies are those of this host."""
    return _settings(
        {
            "Dir": f"{root}/",
            "Dir::State::status": f"{root}/var/lib/dpkg/status",
            "Dir::Etc::main": "/etc/apt/apt.conf",
            "Dir::Etc::parts": "/etc/apt/apt.conf.d",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Sandbox::User": "root",
            "APT::Install-Recommends": "false",
            "Acquire::Languages": "none",
        }
    )


def _settings(values: Mapping[str, str]) -> str:
    lines = []
    for key, value in values.items():
        lines.append(
            f'#clear APT::Architectures;\n{key} {{ "{value}"; }};'
            if key == "APT::Architectures"
            else f'{key} "{value}";'
        )
    return "".join(f"{line}\n" for line in lines)


# apt output


@dataclass(frozen=True)
class Stanza:
    """One package of an index."""

    name: str
    version: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Return the digest in the index."""
        return self.fields.get("SHA256", "").lower()

    def text(self, path: str) -> str:
        """Return the stanza with the file at another path."""
        return "".join(f"{key}: {path if key == 'Filename' else value}\n" for key, value in self.fields.items())


def parse_stanzas(text: str) -> tuple[Stanza, ...]:
    """Read the output of ``apt-cache show``, or an index."""
    found = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line[:1].isspace() and name:
                fields[name] += f"\n{line}"
            elif ":" in line:
                name, value = line.split(":", 1)
                fields[name] = value.strip()
        if "Package" in fields and "Version" in fields and "Filename" in fields:
            found.append(Stanza(fields["Package"], fields["Version"], fields))
    return tuple(found)


def file_name(stanza: Stanza) -> str:
    """Return the name of a package file, as apt names its downloads."""
    version = stanza.version.replace(":", "%3a")
    return f"{stanza.name}_{version}_{stanza.fields.get('Architecture', 'all')}.deb"


def index_text(stanzas: Iterable[Stanza]) -> str:
    """Return the index of a flat directory that contains the files of these packages."""
    found = sorted(stanzas, key=lambda each: (each.name, each.version))
    return "\n".join(each.text(f"./{file_name(each)}") for each in found)


def parse_uris(text: str) -> dict[str, str]:
    """Read the output of ``apt-get --print-uris``: the URI of each file by its name."""
    return {match["name"]: match["uri"] for line in text.splitlines() if (match := _URI.match(line.strip()))}


def wanted_words(changes: Iterable[Change], roots: Iterable[str], available: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the packages of a platform as ``name=version``: those that apt would install, and always the requested ones."""
    found = {f"{change.name}={change.after}": None for change in changes if change.verb == INSTALL and change.after}
    for word in roots:
        name, _equals, version = word.partition("=")
        version = version or next(iter(available.get(name, ())), "")
        if version and not any(each.partition("=")[0] == name for each in found):
            found[f"{name}={version}"] = None
    return sorted(found)


def list_prefix(uri: str) -> str:
    """Return the prefix of the names of apt's lists for a source. It does not match URIs that only begin with the same characters."""
    bare = _SCHEME.sub("", uri)
    host, slash, path = bare.partition("/")
    bare = f"{host.rpartition('@')[2]}{slash}{path}".rstrip("/")
    return bare.replace("_", "%5f").replace("/", "_") + "_"


def archive_of(uri: str, found: Sequence[Archive]) -> Archive | None:
    """Return the source of a file: the one with the longest URI that is a prefix of the file's URI."""
    fitting = [
        (len(base), archive) for archive in found for base in archive.uris if uri.startswith(base.rstrip("/") + "/")
    ]
    return max(fitting, key=lambda each: each[0])[1] if fitting else None
