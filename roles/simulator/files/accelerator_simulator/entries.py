# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files, links, directories, and device nodes of a machine as values by path."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Union


@dataclass(frozen=True)
class File:
    """A regular file."""

    content: bytes
    mode: int = 0o444


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Directory:
    """A directory that would otherwise be empty."""

    mode: int = 0o755


@dataclass(frozen=True)
class Node:
    """A character device. It belongs to root if ``owner`` (a user with a group of the same name) is empty or unknown."""

    major: int
    minor: int
    mode: int = 0o666
    owner: str = ""


Entry = Union[File, Link, Directory, Node]
Tree = dict[str, Entry]


def text(value: Any, mode: int = 0o444) -> File:
    """Return a file with one line."""
    return File(f"{value}\n".encode(), mode)


def relative(path: str, target: str) -> Link:
    """Return a link at ``path`` with a relative target."""
    return Link(posixpath.relpath(target, posixpath.dirname(path)))


def directories_above(paths: Iterable[str]) -> list[str]:
    """Return every directory that the paths need, parents first."""
    found = set()
    for path in paths:
        parent = posixpath.dirname(path)
        while parent not in ("", "/"):
            found.add(parent)
            parent = posixpath.dirname(parent)
    return sorted(found)
