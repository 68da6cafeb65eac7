# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What apt and dpkg say, as data, and package sources as text. No side effects; ``_apt_tool.py`` runs them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ._package_port import INSTALL, MARK, OWN_FILES, PURGE, REMOVE, Change, PackageProblem, Source

#: Above it a version is taken even where it is older than what is installed.
_PIN_PRIORITY = 1001
_CHANGE = re.compile(
    r"(?P<verb>Inst|Remv|Purg) (?P<name>\S+)(?: \[(?P<before>[^\]]+)\])?(?: \((?P<after>\S+)[^)]*\))?(?: .*)?"
)
_VERBS = {"Inst": INSTALL, "Remv": REMOVE, "Purg": PURGE}
_ONE_LINE = re.compile(
    r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<components>[^#]*)(?:#.*)?"
)

#: How an ar archive begins, which a package's file is.
_ARCHIVE = b"!<arch>\n"


def name_of_file(path: str) -> tuple[str, str] | None:
    """Return the package and the version that a file's name says, or None where it is none of a package."""
    parts = posixpath.basename(path).split("_")
    if len(parts) != 3 or not parts[2].endswith(".deb"):
        return None
    return parts[0], parts[1].replace("%3a", ":").replace("%3A", ":")


def is_whole(path: Path) -> bool:
    """Whether a package's file has the length that the headers of its archive give (deb(5), ar(5)). A killed copy leaves a shorter one."""
    size, end = path.stat().st_size, len(_ARCHIVE)
    with path.open("rb") as file:
        if file.read(end) != _ARCHIVE:
            return False
        while end < size:
            file.seek(end)
            header = file.read(60)
            if len(header) < 60 or header[58:] != b"`\n" or not header[48:58].strip().isdigit():
                return False
            length = int(header[48:58])
            end += 60 + length
            if end == size:  # the last member can lack the byte that makes its length even
                return True
            end += length % 2
    return end == size > len(_ARCHIVE)


def parse_status(text: str, architecture: str) -> tuple[dict[str, str], list[str]]:
    """Read ``dpkg-query``'s lines of name, architecture, version and status: what is installed, and what was left half-way."""
    installed: dict[str, str] = {}
    broken = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 4:
            continue
        name = fields[0] if fields[1] in (architecture, "all") else f"{fields[0]}:{fields[1]}"
        if fields[3] == "installed":
            installed[name] = fields[2]
        elif fields[3] not in ("not-installed", "config-files"):
            broken.append(name)
    return installed, broken


def parse_available(text: str) -> dict[str, tuple[str, ...]]:
    """Read ``apt-cache madison``: the versions of each package that a source has, the newest first."""
    found: dict[str, dict[str, None]] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[2].endswith("Packages"):
            found.setdefault(fields[0], {})[fields[1]] = None
    return {name: tuple(versions) for name, versions in found.items()}


def parse_foreseen(text: str) -> tuple[Change, ...]:
    """Read ``apt-get -s``: what would be done, in order."""
    found = []
    for line in text.splitlines():
        match = _CHANGE.fullmatch(line.strip())
        if match:
            found.append(Change(_VERBS[match["verb"]], match["name"], match["before"] or "", match["after"] or ""))
    return tuple(found)


def errors_of(text: str) -> str:
    """Return what apt gives as the reason of a failure."""
    lines = [line.strip() for line in text.splitlines()]
    reasons = [line for line in lines if line.startswith(("E:", "W:"))] or [line for line in lines if line][-3:]
    unmet = [line for line in lines if " : Depends:" in line or " but it is not" in line]
    return " | ".join([*unmet[:5], *reasons[-4:]])[-700:] or "it said nothing"


def pins(pattern: str, versions: Sequence[str]) -> str:
    """Return preferences that hold all packages whose names match a pattern to these versions, wherever they come from."""
    stanzas = (
        f"Package: /{pattern}/\nPin: version /^([0-9]+:)?{re.escape(version)}(-|$)/\nPin-Priority: {_PIN_PRIORITY}\n"
        for version in versions
    )
    return "\n".join([f"{MARK}\n", *stanzas])


# Package sources


def read_sources(path: str, text: str) -> list[Source]:
    """Read a file of apt's, of either form; what is switched off is left out."""
    return _stanzas(path, text) if path.endswith(".sources") else _lines(path, text)


def _stanzas(path: str, text: str) -> list[Source]:
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and name:
                fields[name] += f"\n{line.strip()}"
            elif ":" in line:
                name, value = line.split(":", 1)
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() != "no":
            uris, suites, components = (tuple(fields.get(key, "").split()) for key in ("uris", "suites", "components"))
            found.append(Source(uris, suites, components, fields.get("signed-by", ""), path))
    return found


def _lines(path: str, text: str) -> list[Source]:
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.strip())
        if match:
            options = dict(each.split("=", 1) for each in (match["options"] or "").split() if "=" in each)
            signed_by = options.get("signed-by", "").replace(",", " ")
            found.append(
                Source((match["uri"],), (match["suite"],), tuple(match["components"].split()), signed_by, path)
            )
    return found


def _same(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


def plan_source(wanted: Source, present: Iterable[Source]) -> Source | None:
    """Decide what is to be written so that apt has a source: nothing where somebody else's definition is enough.

    A mirror that is given as none is the one that the node has for the same suite. apt refuses two definitions of a source with other keys,
    so that an existing definition's keys are taken over where ``wanted`` names none. Raises PackageProblem where they contradict each other.
    """
    others = [source for source in present if source.path != wanted.path]
    same_suite = [source for source in others if set(wanted.suites) & set(source.suites)]
    if not wanted.uris:
        uris = next((source.uris for source in same_suite if "main" in source.components), ())
        if not uris:
            raise PackageProblem(
                f"apt knows no mirror of {' '.join(wanted.suites)}",
                hint="Set the repository's address.",
                code="no-mirror",
            )
        wanted = replace(wanted, uris=uris)
    rivals = [source for source in same_suite if any(_same(a, b) for a in source.uris for b in wanted.uris)]
    has = {component for source in rivals for component in source.components}
    # What another role of this collection has defined has a key that is pinned as well.
    is_ours = all(posixpath.basename(source.path).startswith(OWN_FILES) for source in rivals)
    if rivals and set(wanted.components) <= has and (not wanted.signed_by or is_ours):
        return None
    keys = {source.signed_by for source in rivals}
    if wanted.signed_by and rivals:
        raise PackageProblem(
            f"{rivals[0].path} defines {wanted.uris[0]} already, with other keys",
            hint="Remove that definition, or have the source that is there be used, with `configured` as the source.",
            code="source-twice",
        )
    return replace(wanted, signed_by=wanted.signed_by or min(keys, default=""))


def unneeded_lists(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the files of apt's lists that no source needs any more; both are indexes' files, each with its name in the repository."""

    def root(path: str, key: str) -> str:
        return path[: -len(key.replace("/", "_"))]

    needed = {root(path, key) for path, key in after.items()}
    gone = {path: key for path, key in before.items() if path not in after}
    roots = sorted({root(path, key) for path, key in gone.items()} - needed)
    return [*sorted(gone), *(f"{each}{name}" for each in roots for name in ("InRelease", "Release", "Release.gpg"))]
