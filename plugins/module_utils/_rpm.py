# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What rpm, dnf and zypper say, as data, and repositories as text. No side effects; ``_rpm_tool.py`` and its neighbours run them."""

from __future__ import annotations

import configparser
import functools
import html
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ._package_port import INSTALL, MARK, OWN_FILES, REMOVE, Change, PackageProblem, Source

#: What rpm is asked of each package: tabs lie between, because versions have none.
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
    """Return what os-release says that a system is, and what it is like, in small letters: ``rocky``, ``rhel``, ``centos``, ``fedora``."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _equals, value = line.partition("=")
        found[key.strip()] = value.strip().strip("\"'").lower()
    words = [found.get("ID", ""), *found.get("ID_LIKE", "").split()]
    # openSUSE calls itself opensuse-leap and opensuse-tumbleweed.
    return tuple(dict.fromkeys(each for word in words if word for each in (word, word.partition("-")[0])))


# Versions


def whole_version(text: str) -> str:
    """Return a version as rpm's EVR has it, without an epoch that says nothing."""
    return re.sub(r"^(0|\(none\)):", "", text)


def without_epoch(version: str) -> str:
    """Return a version as names of files have it."""
    return version.partition(":")[2] or version


def compare(one: str, other: str) -> int:
    """Compare two versions, with epochs and releases, as rpm does: negative where the first one is older."""
    left, right = _parts(one), _parts(other)
    return next((found for a, b in zip(left, right) if (found := _compare_part(a, b))), 0)


def _parts(version: str) -> tuple[str, str, str]:
    epoch, colon, rest = version.rpartition(":")
    whole, dash, release = rest.rpartition("-")
    return (epoch if colon else "0", whole, release) if dash else (epoch if colon else "0", rest, "")


def _compare_part(one: str, other: str) -> int:
    """Compare segment by segment: digits as numbers, which are newer than letters; a tilde is older than nothing at all, a caret newer."""
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
        # A tilde is older than whatever else, and so is a caret than a segment that goes on.
        if mark in (a, b):
            return -1 if a == mark else 1
    if a.isdigit() != b.isdigit():
        return 1 if a.isdigit() else -1
    left, right = (int(a), int(b)) if a.isdigit() else (a, b)
    return (left > right) - (left < right)  # type: ignore[operator]


def newest_first(versions: Iterable[str]) -> tuple[str, ...]:
    """Return versions in rpm's order, each once."""
    return tuple(sorted(dict.fromkeys(versions), key=functools.cmp_to_key(compare), reverse=True))


def name_of_file(path: str) -> tuple[str, str] | None:
    """Return the package and the version that a file's name says, without the epoch, which no name has; None where it is none of a package."""
    match = _FILE.fullmatch(posixpath.basename(path))
    return (match["name"], f"{match['version']}-{match['release']}") if match else None


# What rpm says


def parse_installed(text: str, architecture: str) -> tuple[dict[str, str], list[str]]:
    """Read lines of ``FORMAT``: what is installed, and the packages of which there are two, as after a transaction that was cut short.

    Of packages such as kernels there may be several; whoever asks leaves them out. Keys, which rpm counts among the packages, are left out here.
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
    """Read lines of name and version: the versions of each package, the newest first."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, tab, version = line.strip().partition("\t")
        if tab:
            found.setdefault(name, []).append(whole_version(version.partition("\t")[0]))
    return {name: newest_first(versions) for name, versions in found.items()}


# What dnf says


def parse_transaction(text: str, installed: Mapping[str, str]) -> tuple[Change, ...]:
    """Read the table in which dnf says what it would do, in order.

    A package's name that is too long for its column has a line of its own.
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
    """Return what dnf gives as the reason of a failure; empty where it gives none but that it was not to do it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if line.startswith(("Error:", "error:"))), None)
    missing = [line for line in lines if line.startswith(("No match for argument", "Unable to"))]
    if first is None or lines[first].removeprefix("Error:").strip() == "Operation aborted.":
        return ""
    return " | ".join(dict.fromkeys([*missing[:3], *lines[first : first + 5]]))[-700:]


def parse_locks(text: str) -> dict[str, str]:
    """Read dnf's list of locked versions: by package the line that locks it. Lines that exclude a version are others'."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(?P<name>[^!#\s].*)-\d+:[^-\s]+-[^-\s]+", line.strip())
        if match:
            found[match["name"]] = line.strip()
    return found


def lock_of(name: str, version: str) -> str:
    """Return what locks a package at a version, as dnf's list has it."""
    epoch, colon, rest = version.partition(":")
    return f"{name}-{epoch if colon else '0'}:{rest if colon else version}.*"


# What zypper says


def parse_summary(text: str) -> tuple[Change, ...]:
    """Read what zypper would do, out of its XML."""
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
    """Read the versions of packages that zypper has found in repositories, the newest first, out of its XML."""
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
    """Return what zypper gives as the reason of a failure."""
    said = [html.unescape(one or other).strip() for one, other in _XML_MESSAGE.findall(text)]
    lines = [line.strip() for each in said for line in each.splitlines() if line.strip()]
    plain = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("<")]
    return " | ".join(dict.fromkeys(lines or plain[-4:]))[-700:] or "it said nothing"


def parse_zypper_locks(text: str) -> frozenset[str]:
    """Read the names of packages that zypper's file of locks has, whole ones alone."""
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
    """One repository that is switched on, as dnf's and zypper's files have it."""

    name: str
    urls: tuple[str, ...]
    path: str


def read_repositories(path: str, text: str) -> list[Repository]:
    """Read a file of repositories; what is switched off is left out, and so is a file that cannot be read, as dnf does."""
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
    """Return a source as dnf and zypper read it; ``more`` are settings that one of them alone knows.

    The index has to be signed by the source's own key, and so have the packages where the vendor signs them: those of an index that is signed
    are vouched for by their digests in it.
    """
    name = repository_of(source.path)
    lines = [MARK, f"[{name}]", f"name={name}", f"baseurl={' '.join(source.uris)}", "enabled=1"]
    lines += [f"gpgcheck={int(source.packages_signed)}", "repo_gpgcheck=1", f"gpgkey=file://{source.signed_by}"]
    if source.login is not None:
        lines += [f"username={source.login.username}", f"password={source.login.password}"]
    return "".join(f"{line}\n" for line in [*lines, *(f"{key}={value}" for key, value in more.items())])


def plan_source(wanted: Source, present: Iterable[Repository], architecture: str) -> Source | None:
    """Decide what is to be written so that a repository is there: nothing where this collection has it already, under another name.

    Raises PackageProblem where no address or no key is given, or somebody else has defined the same one, with other keys or none.
    """
    if not wanted.uris:
        raise PackageProblem(
            "No address of a repository is named", hint="Set the repository's address.", code="no-mirror"
        )

    if not wanted.signed_by:
        raise PackageProblem(
            f"No key is given by which {wanted.uris[0]} is signed",
            hint="Give it with its fingerprint: a repository that nobody signs is set up on no node.",
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
            hint="Remove that definition, or have the source that is there be used, with `configured` as the source.",
            code="source-twice",
        )
    return None if rivals else wanted
