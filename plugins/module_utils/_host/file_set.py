# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Compare a set of files with its desired state, and plan the changes."""

from __future__ import annotations

import base64
import grp
import os
import pwd
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import AcceleratorError
from .secret_masking import SHORTEST, contains_any, find_secrets

NOT_SHOWN = "(not shown)\n"
ABSENT, FILE, DIRECTORY, LINK, OTHER = "absent", "file", "directory", "link", "other"


@dataclass(frozen=True)
class Entry:
    """The current entry at a path. Links are not followed. ``names`` are the entries of a directory."""

    kind: str = ABSENT
    content: bytes = b""
    target: str = ""
    mode: int | None = None
    owner: str = ""
    group: str = ""
    names: tuple[str, ...] = ()
    hard_links: int = 1


@dataclass(frozen=True)
class DesiredEntry:
    """The desired entry at a path. None for a property means that it is not changed.

    ``secret``: the result and the diff contain neither the current nor the desired content.
    ``marker``: a file is removed only if it contains this text.
    """

    path: str
    kind: str
    content: bytes | None = None
    secret: bool = False
    target: str = ""
    mode: int | None = None
    owner: str | None = None
    group: str | None = None
    marker: str = ""


@dataclass(frozen=True)
class Change:
    """A path with its current and its desired entry.

    ``what`` names the properties that differ. ``parents`` are the missing parent directories to create, the outermost first.
    """

    wanted: DesiredEntry
    before: Entry
    what: tuple[str, ...]
    parents: tuple[str, ...] = ()

    @property
    def rewrites(self) -> bool:
        """Return whether an entry is created, replaced, or removed, instead of only a change of mode or owner."""
        return bool({"kind", "content", "target"} & set(self.what))


class FileSetError(AcceleratorError):
    """An unexpected entry is at a path, and this set of files may not replace it."""

    default_code = "file-set"


def read_entry(path: str) -> Entry:
    """Return the entry at a path. Raises OSError if it cannot be read."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return Entry()
    facts: dict[str, Any] = {
        "mode": stat.S_IMODE(found.st_mode),
        "owner": _name_or_number(pwd.getpwuid, found.st_uid),
        "group": _name_or_number(grp.getgrgid, found.st_gid),
    }
    if stat.S_ISLNK(found.st_mode):
        return Entry(kind=LINK, target=str(Path(path).readlink()), **facts)
    if stat.S_ISDIR(found.st_mode):
        return Entry(kind=DIRECTORY, names=tuple(sorted(one.name for one in Path(path).iterdir())), **facts)
    if stat.S_ISREG(found.st_mode):
        return Entry(kind=FILE, content=Path(path).read_bytes(), hard_links=found.st_nlink, **facts)
    return Entry(kind=OTHER, **facts)


def owner_of(wanted: DesiredEntry) -> tuple[int, int]:
    """Return the numbers of the desired user and group, and -1 for an unchanged one. Raises FileSetError for an unknown name."""
    return (
        _number(pwd.getpwnam, wanted.path, "owner", wanted.owner),
        _number(grp.getgrnam, wanted.path, "group", wanted.group),
    )


def with_known_owner(wanted: DesiredEntry) -> DesiredEntry:
    """Return the desired entry with names of user and group instead of numbers, as ``read_entry`` returns them. Raises FileSetError."""
    user, group = owner_of(wanted)
    return replace(
        wanted,
        owner=None if user == -1 else _name_or_number(pwd.getpwuid, user),
        group=None if group == -1 else _name_or_number(grp.getgrgid, group),
    )


def _number(find: Any, path: str, what: str, name: str | None) -> int:
    """Return the number of a user or group, and -1 without a name. ``find`` is getpwnam or getgrnam. Raises FileSetError."""
    if name is None:
        return -1
    try:
        return int(find(name)[2])
    except KeyError as error:
        if name.isdigit():
            return int(name)
        raise FileSetError(
            f"{path} has the {what} {name!r}, which does not exist on this node",
            hint=f"Create the {'user' if what == 'owner' else 'group'} first, or correct the name. Nothing was changed.",
        ) from error


def with_parents(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return the changes with the missing parent directories of each entry that is created.

    Raises FileSetError for a parent that exists and is not a directory, such as a link to a directory that is not mounted.
    """
    made: set[str] = set()
    removed: set[str] = set()
    found = []
    for change in changes:
        parents: tuple[str, ...] = ()
        if change.wanted.kind == ABSENT:
            removed.add(change.wanted.path)
        elif change.before.kind == ABSENT:
            above = (str(parent) for parent in reversed(Path(change.wanted.path).parents))
            parents = tuple(parent for parent in above if parent not in made and _is_missing(parent, made, removed))
            made |= {*parents, change.wanted.path}
        else:
            made.add(change.wanted.path)
        found.append(replace(change, parents=parents))
    return tuple(found)


def _is_missing(parent: str, made: set[str], removed: set[str]) -> bool:
    """Return whether a parent must be created, after the changes that create and remove these paths. Raises FileSetError."""
    if parent in removed or not os.path.lexists(parent):
        return True
    if not Path(parent).is_dir() and os.path.realpath(parent) not in made:
        entry = read_entry(parent)
        what = (
            f"a link to {entry.target}, which does not lead to a directory" if entry.kind == LINK else "not a directory"
        )
        raise FileSetError(
            f"{parent} is {what}; expected a directory or nothing",
            hint="Mount or create the directory, or remove the present entry. Nothing was changed.",
        )
    return False


def _name_or_number(find: Any, number: int) -> str:
    """Return the name of a user or group, or its number if the node has no such name. ``find`` is getpwuid or getgrgid."""
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


def known_secrets(wanted: Sequence[DesiredEntry], present: Mapping[str, Entry]) -> frozenset[str]:
    """Return the secret values of a set of files.

    They are the contents of the entries marked secret, and the tokens, keys, and passwords in all contents.
    """
    found: set[str] = set()
    for one in wanted:
        for content in (one.content or b"", present.get(one.path, Entry()).content):
            text = content.decode("utf-8", "replace")
            found |= find_secrets(text)
            if one.secret and len(text.strip()) >= SHORTEST:
                found.add(text.strip())
    return frozenset(found)


def mark_secret(
    wanted: Sequence[DesiredEntry], present: Mapping[str, Entry], secrets: Iterable[str]
) -> tuple[DesiredEntry, ...]:
    """Return the set with every entry marked secret whose current or desired content contains one of the secrets.

    Ansible masks these values in results. A content with masked parts must not be returned: it would be restored with the masks.
    """
    values = tuple(secrets)

    def has_secret(one: DesiredEntry) -> bool:
        contents = (one.content or b"", present.get(one.path, Entry()).content)
        return any(contains_any(content.decode("utf-8", "replace"), values) for content in contents)

    return tuple(one if one.secret or not has_secret(one) else replace(one, secret=True) for one in wanted)


def plan(wanted: Sequence[DesiredEntry], present: Mapping[str, Entry]) -> tuple[Change, ...]:
    """Return the required changes in the given order. Raises FileSetError for an entry that this set may not replace or remove."""
    changes = (_change(one, present.get(one.path, Entry())) for one in wanted)
    return tuple(change for change in changes if change.what)


def _change(wanted: DesiredEntry, before: Entry) -> Change:
    if wanted.kind == ABSENT:
        return Change(wanted, before, () if before.kind == ABSENT or not _removable(wanted, before) else ("kind",))
    if before.kind != wanted.kind:
        if before.kind not in (ABSENT, LINK) or (before.kind == LINK and wanted.kind == DIRECTORY):
            raise FileSetError(
                f"{wanted.path} is a {before.kind}, expected a {wanted.kind} or nothing",
                hint="Move it to another path, and run this again.",
            )
        if wanted.kind == FILE and wanted.content is None:
            raise FileSetError(
                f"{wanted.path} is not a file yet, and its entry has no content",
                hint="Set content, or remove the entry.",
            )
        return Change(wanted, before, ("kind",))
    what = []
    if wanted.content is not None and wanted.content != before.content:
        what.append("content")
    if wanted.kind == LINK and wanted.target != before.target:
        what.append("target")
    if wanted.kind != LINK and wanted.mode is not None and wanted.mode != before.mode:
        what.append("mode")
    for name in ("owner", "group"):
        value = getattr(wanted, name)
        if value is not None and value != getattr(before, name):
            what.append(name)
    return Change(wanted, before, tuple(what))


def _removable(wanted: DesiredEntry, before: Entry) -> bool:
    """Return whether the current entry may be removed: a directory if it is empty, a file if it contains the marker."""
    if before.kind == DIRECTORY:
        return not before.names
    if wanted.marker and before.kind == FILE:
        return wanted.marker.encode() in before.content
    return True


def entries_after_removals(wanted: Sequence[DesiredEntry], present: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the current entries, with the contents of directories after the removals that precede them."""
    after = dict(present)
    removed: set[str] = set()
    for one in wanted:
        if one.kind != ABSENT:
            continue
        entry = after.get(one.path, Entry())
        if entry.kind == DIRECTORY:
            left = tuple(name for name in entry.names if f"{one.path}/{name}" not in removed)
            entry = replace(entry, names=left)
            after[one.path] = entry
        if entry.kind == ABSENT or _removable(one, entry):
            removed.add(one.path)
    return after


def describe(entry: Entry, *, secret: bool) -> str:
    """Return the text of an entry in the diff."""
    if entry.kind == FILE:
        if secret:
            return NOT_SHOWN
        text = entry.content.decode("utf-8", "replace")
        return text if text.endswith("\n") or not text else text + "\n"
    return {ABSENT: "", DIRECTORY: "(folder)\n", LINK: f"-> {entry.target}\n"}.get(entry.kind, f"({entry.kind})\n")


def result_of(change: Change) -> Entry:
    """Return the entry at the path after the change."""
    wanted, before = change.wanted, change.before
    if wanted.kind == ABSENT:
        return Entry()
    content = wanted.content if wanted.content is not None else before.content
    return Entry(
        kind=wanted.kind,
        content=content if wanted.kind == FILE else b"",
        target=wanted.target,
        mode=wanted.mode if wanted.mode is not None else before.mode,
        owner=wanted.owner or before.owner,
        group=wanted.group or before.group,
    )


def differences(changes: Sequence[Change]) -> list[dict[str, str]]:
    """Return the diff of all changes in Ansible's form: contents, or modes and owners if only these change."""
    shown = []
    for change in changes:
        after = result_of(change)
        texts = []
        for entry in (change.before, after):
            text = describe(entry, secret=change.wanted.secret)
            if not change.rewrites:
                text = f"mode {entry.mode or 0:04o}, owner {entry.owner}, group {entry.group}\n"
            elif change.wanted.secret and entry is after and "content" in change.what:
                text = "(not shown, changed)\n"
            texts.append(text)
        shown.append(
            {
                "before": texts[0],
                "after": texts[1],
                "before_header": change.wanted.path,
                "after_header": change.wanted.path,
            }
        )
    return shown


def restoring_entries(changes: Sequence[Change]) -> tuple[DesiredEntry, ...]:
    """Return the entries that restore the previous state, last change first, so that a directory is emptied before it is removed.

    Other kinds of entries, such as sockets, cannot be created again and are left out.
    """
    entries: list[DesiredEntry] = []
    for change in reversed(changes):
        before, wanted = change.before, change.wanted
        facts: dict[str, Any] = {}
        if before.kind == FILE:
            facts["content"] = before.content
        if before.kind == LINK:
            facts["target"] = before.target
        if before.kind in (FILE, DIRECTORY):
            facts.update(mode=before.mode, owner=before.owner, group=before.group)
        if before.kind != OTHER:
            entries.append(DesiredEntry(wanted.path, before.kind, secret=wanted.secret, **facts))
        entries += [DesiredEntry(parent, ABSENT) for parent in reversed(change.parents)]
    return tuple(entries)


def restoring_options(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Return the entries that restore the previous state, in the form of the module's option. Secret entries are left out."""
    options: list[dict[str, Any]] = []
    for entry in restoring_entries(changes):
        if entry.secret:
            continue
        one: dict[str, Any] = {"path": entry.path, "state": entry.kind}
        if entry.kind == FILE:
            one.update(_encoded(entry.content or b""))
        if entry.kind == LINK:
            one["target"] = entry.target
        if entry.kind in (FILE, DIRECTORY):
            one.update(mode=f"{entry.mode:04o}", owner=entry.owner, group=entry.group)
        options.append(one)
    return options


def _encoded(content: bytes) -> dict[str, str]:
    """Return the options for a content, in Base64 if the content is not UTF-8."""
    try:
        return {"content": content.decode()}
    except UnicodeDecodeError:
        return {"content": base64.b64encode(content).decode(), "encoding": "base64"}
