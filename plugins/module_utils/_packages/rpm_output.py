# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Parse the output of rpm, dnf, and zypper, and create repository files. This module has no side effects: ``_packages/rpm_base.py`` runs the programs."""

from __future__ import annotations

import configparser
import functools
import html
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .interface import INSTALL, MARK, OWN_FILES, REMOVE, Change, PackageProblem, Source

#: Query format for each package. Tabs are the separator, because versions contain none.
FORMAT = "%{NAME}\\t%{EVR}\\t%{ARCH}\\n"
KEY = "gpg-pubkey"
_FILE = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)-(?P<release>[^-]+)\.(?P<architecture>[^.-]+)\.rpm")
_SEGMENT = re.compile(r"~|\^|[0-9]+|[A-Za-z]+")
_INSTALLS = re.compile(r"(Installing|Upgrading|Downgrading|Reinstalling)\b.*:")
_REMOVES = re.compile(r"Removing\b.*:")
_XML_BLOCK = re.compile(r"<to-(?P<what>[a-z-]+)>(?P<body>.*?)</to-(?P=what)>", re.DOTALL)
_XML_SOLVABLE = re.compile(r"<solvable (?P<attributes>[^>]*?)/?>")
_XML_ATTRIBUTE = re.compile(r"([a-z-]+)=\"([^\"]*)\"")
_XML_MESSAGE = re.compile(r"<message type=\"error\">(.*?)</message>|<description>(.*?)</description>", re.DOTALL)


def os_names(text: str) -> tuple[str, ...]:
    """Return the names of a system and of similar systems from os-release, in lowercase: ``rocky``, ``rhel``, ``centos``, ``fedora``."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _equals, value = line.partition("=")
        found[key.strip()] = value.strip().strip("\"'").lower()
    words = [found.get("ID", ""), *found.get("ID_LIKE", "").split()]
    # The IDs of openSUSE are opensuse-leap and opensuse-tumbleweed.
    return tuple(dict.fromkeys(each for word in words if word for each in (word, word.partition("-")[0])))


# Versions


def whole_version(text: str) -> str:
    """Return a version in rpm's EVR form without an empty or zero epoch."""
    return re.sub(r"^(0|\(none\)):", "", text)


def without_epoch(version: str) -> str:
    """Return a version without epoch, as in file names."""
    return version.partition(":")[2] or version


def compare(one: str, other: str) -> int:
    """Compare two versions with epoch and release as rpm does. The result is negative if the first one is older."""
    left, right = _parts(one), _parts(other)
    return next((found for a, b in zip(left, right) if (found := _compare_part(a, b))), 0)


def _parts(version: str) -> tuple[str, str, str]:
    epoch, colon, rest = version.rpartition(":")
    whole, dash, release = rest.rpartition("-")
    return (epoch if colon else "0", whole, release) if dash else (epoch if colon else "0", rest, "")


def _compare_part(one: str, other: str) -> int:
    """Compare segment by segment: numbers are newer than letters, a tilde is older than the end of the version, a caret is newer."""
    left, right = _SEGMENT.findall(one), _SEGMENT.findall(other)
    for a, b in zip(left, right):
        found = _compare_segment(a, b)
        if found:
            return found
    if len(left) == len(right):
        return 0
    longer, sign = (left, 1) if len(left) > len(right) else (right, -1)
    return -sign if longer[min(len(left), len(right))] == "~" else sign


def _compare_segment(a: str, b: str) -> int:
    if a == b:
        return 0
    for mark in ("~", "^"):
        # A tilde is older than any segment, and a caret is older than any segment except a tilde.
        if mark in (a, b):
            return -1 if a == mark else 1
    if a.isdecimal() != b.isdecimal():
        return 1 if a.isdecimal() else -1
    left, right = (int(a), int(b)) if a.isdecimal() else (a, b)
    return (left > right) - (left < right)  # type: ignore[operator]


def newest_first(versions: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct versions in rpm's order, newest first."""
    return tuple(sorted(dict.fromkeys(versions), key=functools.cmp_to_key(compare), reverse=True))


def name_of_file(path: str) -> tuple[str, str] | None:
    """Return the package and version in a file's name, which has no epoch. Return None if it is not a package."""
    match = _FILE.fullmatch(posixpath.basename(path))
    return (match["name"], f"{match['version']}-{match['release']}") if match else None


# rpm output


def parse_installed(text: str, architecture: str) -> tuple[dict[str, str], list[str]]:
    """Read lines of ``FORMAT``: the installed packages, and those with two versions, as after an interrupted transaction.

    Packages such as kernels can have several versions, which the caller excludes. Keys, which rpm lists as packages,
    are excluded here.
    """
    installed: dict[str, str] = {}
    twice = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 3 or fields[0] == KEY:
            continue
        name = fields[0] if fields[2] in (architecture, "noarch") else f"{fields[0]}.{fields[2]}"
        version = whole_version(fields[1])
        if name in installed and installed[name] != version:
            twice.append(name)
            version = newest_first((version, installed[name]))[0]
        installed[name] = version
    return installed, sorted(set(twice))


def parse_versions(text: str) -> dict[str, tuple[str, ...]]:
    """Read lines of name and version. Return the versions of each package, newest first."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, tab, version = line.strip().partition("\t")
        if tab:
            found.setdefault(name, []).append(whole_version(version.partition("\t")[0]))
    return {name: newest_first(versions) for name, versions in found.items()}


# dnf output


def parse_transaction(text: str, installed: Mapping[str, str]) -> tuple[Change, ...]:
    """Read dnf's table of planned changes, in order.

    A name that is too long for its column is on a separate line.
    """
    found: dict[str, Change] = {}
    verb, waiting = "", ""
    for line in text.splitlines():
        if _INSTALLS.fullmatch(line) or _REMOVES.fullmatch(line):
            verb = INSTALL if _INSTALLS.fullmatch(line) else REMOVE
            continue
        fields = line.split()
        if not line.startswith(" ") or not fields:
            verb = "" if line.startswith("Transaction Summary") else verb
            continue
        if not verb or fields[0] == "replacing":
            if verb and len(fields) > 1:
                gone = fields[1].rpartition(".")[0]
                found[gone] = Change(REMOVE, gone, installed.get(gone, ""))
            continue
        if len(fields) == 1:
            waiting = fields[0]
            continue
        fields = [waiting, *fields] if waiting else fields
        waiting = ""
        if len(fields) < 3:  # a row has at least name, architecture, and version
            continue
        name = fields[0]
        before = installed.get(name, "")
        found[name] = (
            Change(INSTALL, name, before, whole_version(fields[2]))
            if verb == INSTALL
            else Change(REMOVE, name, before or whole_version(fields[2]))
        )
    return tuple(found.values())


def dnf_errors(text: str) -> str:
    """Return the reason of a failure in dnf's output. Empty without an error, or for the expected abort of a dry run."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if line.startswith(("Error:", "error:"))), None)
    missing = [line for line in lines if line.startswith(("No match for argument", "Unable to"))]
    if first is None or lines[first].removeprefix("Error:").strip() == "Operation aborted.":
        return ""
    return " | ".join(dict.fromkeys([*missing[:3], *lines[first : first + 5]]))[-700:]


def parse_locks(text: str) -> dict[str, str]:
    """Read dnf's list of locked versions: the line of each package. Lines that exclude a version are not this collection's."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(?P<name>[^!#\s].*)-\d+:[^-\s]+-[^-\s]+", line.strip())
        if match:
            found[match["name"]] = line.strip()
    return found


def lock_of(name: str, version: str) -> str:
    """Return the entry of dnf's list that locks a package at a version."""
    epoch, colon, rest = version.partition(":")
    return f"{name}-{epoch if colon else '0'}:{rest if colon else version}.*"


# zypper output


def parse_summary(text: str) -> tuple[Change, ...]:
    """Read the planned changes in zypper's XML output."""
    found = []
    for block in _XML_BLOCK.finditer(text):
        for attributes in _solvables(block["body"]):
            if attributes.get("type") == "package":
                version, before = attributes.get("edition", ""), attributes.get("edition-old", "")
                gone = block["what"] == "remove"
                found.append(
                    Change(REMOVE, attributes["name"], whole_version(version))
                    if gone
                    else Change(INSTALL, attributes["name"], whole_version(before), whole_version(version))
                )
    return tuple(found)


def parse_search(text: str) -> dict[str, tuple[str, ...]]:
    """Read the package versions in repositories from zypper's XML output, newest first."""
    found: dict[str, list[str]] = {}
    for attributes in _solvables(text):
        if attributes.get("kind") == "package" and attributes.get("repository") != "(System Packages)":
            found.setdefault(attributes["name"], []).append(whole_version(attributes["edition"]))
    return {name: newest_first(versions) for name, versions in found.items()}


def _solvables(text: str) -> list[dict[str, str]]:
    return [
        {key: html.unescape(value) for key, value in _XML_ATTRIBUTE.findall(match["attributes"])}
        for match in _XML_SOLVABLE.finditer(text)
    ]


def zypper_errors(text: str) -> str:
    """Return the reason of a failure in zypper's output."""
    said = [html.unescape(one or other).strip() for one, other in _XML_MESSAGE.findall(text)]
    lines = [line.strip() for each in said for line in each.splitlines() if line.strip()]
    plain = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("<")]
    return " | ".join(dict.fromkeys(lines or plain[-4:]))[-700:] or "no output"


def parse_zypper_locks(text: str) -> frozenset[str]:
    """Read the names of locked packages in zypper's lock file. Locks of other types are ignored."""
    found = set()
    for stanza in re.split(r"\n\s*\n", text):
        fields = dict(line.split(":", 1) for line in stanza.splitlines() if ":" in line and not line.startswith("#"))
        name = fields.get("solvable_name", "").strip()
        if name and fields.get("type", "package").strip() == "package":
            found.add(name)
    return frozenset(found)


# Repositories


@dataclass(frozen=True)
class Repository:
    """One enabled repository in the files of dnf or zypper."""

    name: str
    urls: tuple[str, ...]
    path: str


def read_repositories(path: str, text: str) -> list[Repository]:
    """Read the enabled repositories in a file. An invalid file has none, as for dnf."""
    parser = configparser.RawConfigParser(strict=False, default_section="")
    try:
        parser.read_string(text)
    except configparser.Error:
        return []
    return [
        Repository(name, tuple(parser.get(name, "baseurl", fallback="").split()), path)
        for name in parser.sections()
        if parser.get(name, "enabled", fallback="1").strip().lower() in ("1", "true", "yes", "on")
    ]


def repository_of(path: str) -> str:
    """Return the name of the repository that this collection writes to a file."""
    return posixpath.basename(path).rpartition(".")[0]


def repository_text(source: Source, *, more: Mapping[str, str]) -> str:
    """Return the repository file for dnf and zypper. ``more`` are settings that only one of them supports.

    The index must be signed with the source's key, and so must the packages if the vendor signs them. A signed index
    contains the digests of its packages.
    """
    name = repository_of(source.path)
    lines = [MARK, f"[{name}]", f"name={name}", f"baseurl={' '.join(source.uris)}", "enabled=1"]
    lines += [f"gpgcheck={int(source.packages_signed)}", "repo_gpgcheck=1", f"gpgkey=file://{source.signed_by}"]
    if source.login is not None:
        lines += [f"username={source.login.username}", f"password={source.login.password}"]
    return "".join(f"{line}\n" for line in [*lines, *(f"{key}={value}" for key, value in more.items())])


def plan_source(wanted: Source, present: Iterable[Repository], architecture: str) -> Source | None:
    """Return the source to write, or None if this collection has already defined it under another name.

    Raises PackageProblem if the URI or the key is missing, or if a file of others defines the same repository.
    """
    if not wanted.uris:
        raise PackageProblem(
            "No address of a repository is named", hint="Set the address of the repository.", code="no-mirror"
        )

    if not wanted.signed_by:
        raise PackageProblem(
            f"There is no key for the signatures of {wanted.uris[0]}",
            hint="Set the key and its fingerprint: unsigned repositories are not set up on nodes.",
            code="repository-key",
        )

    def plain(url: str) -> str:
        return url.replace("$basearch", architecture).rstrip("/")

    addresses = {plain(url) for url in wanted.uris}
    rivals = [each for each in present if each.path != wanted.path and addresses & {plain(url) for url in each.urls}]
    others = [each for each in rivals if not posixpath.basename(each.path).startswith(OWN_FILES)]
    if others:
        raise PackageProblem(
            f"{others[0].path} defines {wanted.uris[0]} already",
            hint="Remove that definition, or use the present source: set the source to `configured`.",
            code="source-twice",
        )
    return None if rivals else wanted
