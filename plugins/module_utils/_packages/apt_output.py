# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Parse the output of apt and dpkg, and plan package sources. No side effects: ``_packages/apt.py`` runs the commands."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .interface import INSTALL, MARK, OWN_FILES, PURGE, REMOVE, Change, PackageProblem, Source

#: With this priority apt installs a pinned version even if it is older than the installed one.
_PIN_PRIORITY = 1001
_CHANGE = re.compile(
    r"(?P<verb>Inst|Remv|Purg) (?P<name>\S+)(?: \[(?P<before>[^\]]+)\])?(?: \((?P<after>\S+)[^)]*\))?(?: .*)?"
)
_VERBS = {"Inst": INSTALL, "Remv": REMOVE, "Purg": PURGE}
_ONE_LINE = re.compile(
    r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<components>[^#]*)(?:#.*)?"
)

#: The first bytes of an ar archive. A .deb file is an ar archive.
_ARCHIVE = b"!<arch>\n"


def name_of_file(path: str) -> tuple[str, str] | None:
    """Return the package and the version in the name of a .deb file, or None for other files."""
    parts = posixpath.basename(path).split("_")
    if len(parts) != 3 or not parts[2].endswith(".deb"):
        return None
    return parts[0], parts[1].replace("%3a", ":").replace("%3A", ":")


def is_whole(path: Path) -> bool:
    """Return whether a .deb file has the length that its archive headers state (deb(5), ar(5)). An interrupted copy is shorter."""
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
    """Parse the name, architecture, version, and status in ``dpkg-query`` lines: return installed packages and incomplete packages."""
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
    """Parse ``apt-cache madison``: return the available versions of each package, newest first."""
    found: dict[str, dict[str, None]] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[2].endswith("Packages"):
            found.setdefault(fields[0], {})[fields[1]] = None
    return {name: tuple(versions) for name, versions in found.items()}


def parse_foreseen(text: str) -> tuple[Change, ...]:
    """Parse ``apt-get -s``: return the planned changes, in order."""
    found = []
    for line in text.splitlines():
        match = _CHANGE.fullmatch(line.strip())
        if match:
            found.append(Change(_VERBS[match["verb"]], match["name"], match["before"] or "", match["after"] or ""))
    return tuple(found)


def errors_of(text: str) -> str:
    """Return the reasons of a failure from apt's output."""
    lines = [line.strip() for line in text.splitlines()]
    reasons = [line for line in lines if line.startswith(("E:", "W:"))] or [line for line in lines if line][-3:]
    unmet = [line for line in lines if " : Depends:" in line or " but it is not" in line]
    return " | ".join([*unmet[:5], *reasons[-4:]])[-700:] or "no output"


def pins(pattern: str, versions: Sequence[str]) -> str:
    """Return preferences that pin all packages with a matching name to these versions, from any source."""
    stanzas = (
        f"Package: /{pattern}/\nPin: version /^([0-9]+:)?{re.escape(version)}(-|$)/\nPin-Priority: {_PIN_PRIORITY}\n"
        for version in versions
    )
    return "\n".join([f"{MARK}\n", *stanzas])


# Package sources


def read_sources(path: str, text: str) -> list[Source]:
    """Return the enabled sources of one of apt's files, in deb822 or one-line format."""
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
    """Return the source to write, or None if an existing definition is sufficient.

    If ``wanted`` has no URIs, the URIs of the node's source for the same suite are used. apt rejects two definitions of
    one source with different keys. Therefore the keys of an existing definition are used if ``wanted`` has none. Raises
    PackageProblem if the keys differ.
    """
    others = [source for source in present if source.path != wanted.path]
    same_suite = [source for source in others if set(wanted.suites) & set(source.suites)]
    if not wanted.uris:
        uris = next((source.uris for source in same_suite if "main" in source.components), ())
        if not uris:
            raise PackageProblem(
                f"apt has no source for {' '.join(wanted.suites)}",
                hint="Set the address of the repository.",
                code="no-mirror",
            )
        wanted = replace(wanted, uris=uris)
    rivals = [source for source in same_suite if any(_same(a, b) for a in source.uris for b in wanted.uris)]
    has = {component for source in rivals for component in source.components}
    # Sources of the other roles of this collection have a pinned key too.
    is_ours = all(posixpath.basename(source.path).startswith(OWN_FILES) for source in rivals)
    if rivals and set(wanted.components) <= has and (not wanted.signed_by or is_ours):
        return None
    keys = {source.signed_by for source in rivals}
    if wanted.signed_by and rivals:
        raise PackageProblem(
            f"{rivals[0].path} defines {wanted.uris[0]} already, with other keys",
            hint="Remove that definition, or use the present source: set the source to `configured`.",
            code="source-twice",
        )
    return replace(wanted, signed_by=wanted.signed_by or min(keys, default=""))


def unneeded_lists(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return apt's list files that no source needs any more. Both arguments map index files to their names in the repository."""

    def root(path: str, key: str) -> str:
        return path[: -len(key.replace("/", "_"))]

    needed = {root(path, key) for path, key in after.items()}
    gone = {path: key for path, key in before.items() if path not in after}
    roots = sorted({root(path, key) for path, key in gone.items()} - needed)
    return [*sorted(gone), *(f"{each}{name}" for each in roots for name in ("InRelease", "Release", "Release.gpg"))]
