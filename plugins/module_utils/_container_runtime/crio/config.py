# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read CRI-O's settings, and list the file changes that add CDI directories. This module has no side effects.

Source: CRI-O v1.34.0 (pkg/config, internal/criocli, server/inspect.go). CDI is always enabled. CRI-O supports the
kubelet's CDI devices from 1.28 on. ``cdi_spec_dirs`` in the table ``crio.runtime`` lists the directories. CRI-O reads
its main file, then every file below its drop-in directory with any name, in the order of names. A later list replaces
an earlier one. ``crio config`` prints the effective settings of the files, with defaults as comments. ``GET /config``
on the CRI socket returns the settings from the start of the process. A reload applies new directories, but that
response does not contain them, so only a restart can be verified.
"""

from __future__ import annotations

import copy
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import AcceleratorError
from ..containerd.config import MARK, Change, File, edit
from ..toml_edit import look_up, parse, set_values

TABLE = ("crio", "runtime")
DIRECTORIES_KEY = "cdi_spec_dirs"
DEFAULT_FOLDERS = ("/etc/cdi", "/var/run/cdi")
DEFAULT_SOCKET = "/var/run/crio/crio.sock"
#: The oldest release that supports the kubelet's CDI devices.
OLDEST = (1, 28, 0)
#: Names of this collection's drop-in file. The second one is used if a later file also sets CDI directories.
DROP_INS = ("60-dra-accelerators.conf", "99-dra-accelerators.conf")


class CrioError(AcceleratorError):
    """CRI-O rejects its settings, or does not run with them."""

    default_code = "cri-o"


@dataclass(frozen=True)
class Settings:
    """CRI-O's settings. ``rest`` are all settings except CDI."""

    folders: tuple[str, ...]
    socket: str
    rest: Mapping[str, Any] = field(repr=False)

    def reads(self, wanted: Sequence[str]) -> bool:
        """Return whether all these directories are read."""
        return set(wanted) <= set(self.folders)


def read_settings(text: str, source: str) -> Settings:
    """Read the output of ``crio config`` or of a running CRI-O. Missing settings have their defaults. Raises TomlError."""
    document = parse(text, source)
    folders = look_up(document, (*TABLE, DIRECTORIES_KEY))
    rest = copy.deepcopy(document)
    (look_up(rest, TABLE) or {}).pop(DIRECTORIES_KEY, None)
    return Settings(
        folders=tuple(DEFAULT_FOLDERS if folders is None else folders),
        socket=look_up(document, ("crio", "api", "listen")) or DEFAULT_SOCKET,
        rest=rest,
    )


def version_in(text: str) -> tuple[int, ...]:
    """Return the version in the output of ``crio --version``, or an empty tuple."""
    found = re.search(r"(?i)version:?\s+v?(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def refuse_old(output: str, command: str) -> None:
    """Raise CrioError if CRI-O does not support CDI devices."""
    version = version_in(output)
    if not version or version < OLDEST:
        raise CrioError(
            f"{command} is {'CRI-O ' + '.'.join(map(str, version)) if version else 'a program without a known CRI-O version'}, expected "
            f"{'.'.join(map(str, OLDEST))} or newer, because older versions do not support the kubelet's CDI devices",
            hint="Upgrade CRI-O, or set another program in container_runtime_crio_command.",
            code="too-old",
        )


def is_ours(path: str) -> bool:
    """Return whether a path is this collection's drop-in file."""
    return posixpath.basename(path) in DROP_INS


def sets_directories(file: File) -> bool:
    """Return whether a file sets CDI directories."""
    return look_up(file.document(), (*TABLE, DIRECTORIES_KEY)) is not None


def drop_in(values: Mapping[str, Any]) -> str:
    """Return the text of this collection's drop-in file."""
    text = f"# Written by {MARK} (role container_runtime). To remove this file, set container_runtime_state: absent.\n"
    return set_values(text, TABLE, values, DROP_INS[0])


def candidates(
    settings: Settings, main: File | None, files: Sequence[File], folder: str, wanted: Sequence[str]
) -> list[Change]:
    """Return the changes that can make CRI-O read the directories, the least intrusive one first.

    ``files`` are those below the drop-in directory, in the order in which they are read. A later file that sets
    directories overrides this collection's file, so the change possibly has to be made in that file.
    """
    values = {DIRECTORIES_KEY: [*settings.folders, *(each for each in wanted if each not in settings.folders)]}
    texts = {each.path: each.text for each in files}
    ours = [posixpath.join(folder, name) for name in DROP_INS]
    found = [Change(path, texts.get(path), drop_in(values)) for path in ours]
    others = [each for each in files if not is_ours(each.path) and sets_directories(each)]
    found += [
        edit(each, TABLE, values) for each in [*reversed(others), *([main] if main and sets_directories(main) else [])]
    ]
    return found


def remove_own_changes(path: str, text: str, previous: str | None) -> str | None:
    """Return the text of an edited file with the previous value of this collection's key, or None if nothing else is left."""
    value = None if previous is None else look_up(parse(previous, path), (*TABLE, DIRECTORIES_KEY))
    left = set_values(text, TABLE, {DIRECTORIES_KEY: value}, path)
    document = parse(left, path)
    return None if previous is None and document in ({}, {"crio": {"runtime": {}}}) else left


def with_changes(main: File | None, files: Sequence[File], changes: Sequence[Change]) -> tuple[str, dict[str, str]]:
    """Return the text of the main file and the texts of the other files by path, after the changes."""
    texts = {each.path: each.text for each in files}
    text = main.text if main else ""
    for each in changes:
        if main and each.path == main.path:
            text = each.after or ""
        elif each.after is None:
            texts.pop(each.path, None)
        else:
            texts[each.path] = each.after
    return text, texts
