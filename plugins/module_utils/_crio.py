# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What CRI-O is set to, and which file has to say what, so that it reads CDI files from the right folders. No side effects.

Facts, from CRI-O's sources (v1.34.0: pkg/config, internal/criocli, server/inspect.go): CDI has no switch; the kubelet's CDI devices are
honoured from 1.28 on. ``cdi_spec_dirs`` of the table ``crio.runtime`` names the folders. CRI-O reads its main file and then every file
below its folder of drop-ins, whatever the name, in the order of names; a later list replaces an earlier one. ``crio config`` prints what
the files make of it, with defaults as comments; ``GET /config`` on the CRI's own socket answers what the running process was started
with. A reload takes new folders, but that answer does not show it, so that only a restart can be proven.
"""

from __future__ import annotations

import copy
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._containerd import MARK, Change, File, edit
from ._toml import change, look_up, parse
from .core.errors import AcceleratorError

TABLE = ("crio", "runtime")
FOLDERS = "cdi_spec_dirs"
DEFAULT_FOLDERS = ("/etc/cdi", "/var/run/cdi")
DEFAULT_SOCKET = "/var/run/crio/crio.sock"
#: The oldest release that honours what the kubelet asks for.
OLDEST = (1, 28, 0)
#: Names of our drop-in file. The second one is for folders in which a later file names folders of CDI files as well.
DROP_INS = ("60-dra-accelerators.conf", "99-dra-accelerators.conf")


class CrioError(AcceleratorError):
    """CRI-O does not take its settings, or does not run with them."""

    default_code = "cri-o"


@dataclass(frozen=True)
class Settings:
    """What CRI-O is set to. ``rest`` is everything that has nothing to do with CDI."""

    folders: tuple[str, ...]
    socket: str
    rest: Mapping[str, Any] = field(repr=False)

    def reads(self, wanted: Sequence[str]) -> bool:
        """Whether files are read from all these folders."""
        return set(wanted) <= set(self.folders)


def read_settings(text: str, source: str) -> Settings:
    """Read what ``crio config`` or a running CRI-O says; what it does not say has its default. Raises TomlError."""
    document = parse(text, source)
    folders = look_up(document, (*TABLE, FOLDERS))
    rest = copy.deepcopy(document)
    (look_up(rest, TABLE) or {}).pop(FOLDERS, None)
    return Settings(
        folders=tuple(DEFAULT_FOLDERS if folders is None else folders),
        socket=look_up(document, ("crio", "api", "listen")) or DEFAULT_SOCKET,
        rest=rest,
    )


def version_in(text: str) -> tuple[int, ...]:
    """Return the version that ``crio --version`` tells; nothing where it tells none."""
    found = re.search(r"(?i)version:?\s+v?(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def refuse_old(said: str, command: str) -> None:
    """See that CRI-O honours CDI devices. Raises CrioError."""
    version = version_in(said)
    if not version or version < OLDEST:
        raise CrioError(
            f"{command} is {'CRI-O ' + '.'.join(map(str, version)) if version else 'no CRI-O whose version is known'}, expected "
            f"{'.'.join(map(str, OLDEST))} or newer: older ones take no CDI devices from a kubelet",
            hint="Upgrade CRI-O, or name another program in container_runtime_crio_command.",
            code="too-old",
        )


def is_ours(path: str) -> bool:
    """Whether a path is that of our drop-in file."""
    return posixpath.basename(path) in DROP_INS


def names_folders(file: File) -> bool:
    """Whether a file names folders of CDI files."""
    return look_up(file.document(), (*TABLE, FOLDERS)) is not None


def drop_in(values: Mapping[str, Any]) -> str:
    """Return the text of our drop-in file."""
    text = f"# Written by {MARK} (role container_runtime). It goes with container_runtime_state: absent.\n"
    return change(text, TABLE, values, DROP_INS[0])


def candidates(
    settings: Settings, main: File | None, files: Sequence[File], folder: str, wanted: Sequence[str]
) -> list[Change]:
    """Return the changes that may have CRI-O read the wanted folders, the least intrusive one first.

    ``files`` are those below the folder of drop-ins, in the order in which they are read. A file that comes after ours and names folders
    itself hides ours, so that the change may have to go into that one.
    """
    values = {FOLDERS: [*settings.folders, *(each for each in wanted if each not in settings.folders)]}
    texts = {each.path: each.text for each in files}
    ours = [posixpath.join(folder, name) for name in DROP_INS]
    found = [Change(path, texts.get(path), drop_in(values)) for path in ours]
    others = [each for each in files if not is_ours(each.path) and names_folders(each)]
    found += [
        edit(each, TABLE, values) for each in [*reversed(others), *([main] if main and names_folders(main) else [])]
    ]
    return found


def without(path: str, text: str, before: str | None) -> str | None:
    """Return the text of a file that was changed since with our key as it was; None for one that would say nothing."""
    former = None if before is None else look_up(parse(before, path), (*TABLE, FOLDERS))
    left = change(text, TABLE, {FOLDERS: former}, path)
    document = parse(left, path)
    return None if before is None and document in ({}, {"crio": {"runtime": {}}}) else left


def with_changes(main: File | None, files: Sequence[File], changes: Sequence[Change]) -> tuple[str, dict[str, str]]:
    """Return the texts of the main file and of the others, by their paths, once the changes are made."""
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
