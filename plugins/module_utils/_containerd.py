# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What containerd is set to, and which files have to say what, so that it hands CDI devices to containers. No side effects.

Releases differ: the table that holds the switch has one name up to version 2 of the configuration (containerd 1.x) and
another one from 3 on; files that the main file imports replace a whole plugin's table before 2.1 and are merged from then
on. So nothing is foretold here: possible changes are listed, the least one first, and containerd's own dump judges each.
"""

from __future__ import annotations

import copy
import fnmatch
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._toml import TomlError, change, look_up, parse

SWITCH = "enable_cdi"
FOLDERS = "cdi_spec_dirs"
#: Name of our file among containerd's drop-in files, and the words by which our lines are known.
DROP_IN = "60-dra-accelerators.toml"
MARK = "dra.accelerators"

#: The plugin that serves the kubelet, by the lowest version of a configuration file that calls it so.
_PLUGINS = ((3, "io.containerd.cri.v1.runtime"), (2, "io.containerd.grpc.v1.cri"), (0, "cri"))
#: The names of the plugins that a kubelet needs, in containerd 1.x and 2.x; the first one is that of version 1 of the configuration.
_KUBELET_PLUGINS = ("cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images")
#: Where the address of containerd's socket stands, from the newest version to the oldest.
_ADDRESSES = (("plugins", "io.containerd.server.v1.grpc", "address"), ("grpc", "address"))


def table_of(version: int) -> tuple[str, ...]:
    """Return the path of the table that holds the switch, in a file of that version."""
    return ("plugins", next(name for lowest, name in _PLUGINS if version >= lowest))


def version_of(document: Mapping[str, Any]) -> int:
    """Return the version that a configuration file says it has; 1 where it says none."""
    version = document.get("version", 1)
    return version if isinstance(version, int) else 1


@dataclass(frozen=True)
class Settings:
    """What containerd is set to, by its own dump. ``rest`` is everything that has nothing to do with CDI.

    ``disabled`` are the plugins that a kubelet needs and that disabled_plugins names. The dump of containerd 2.x shows the CDI settings of a
    plugin that is disabled as well.
    """

    version: int
    known: bool
    enabled: bool
    folders: tuple[str, ...]
    address: str
    rest: Mapping[str, Any] = field(repr=False)
    disabled: tuple[str, ...] = ()

    def reads(self, folders: Sequence[str]) -> bool:
        """Whether CDI is on and files are read from all these folders."""
        return self.enabled and set(folders) <= set(self.folders)


def read_dump(text: str) -> Settings:
    """Read what ``containerd config dump`` says. Raises TomlError."""
    document = parse(text, "what `containerd config dump` says")
    version = version_of(document)
    path = table_of(version)
    table = look_up(document, path)
    disabled = tuple(name for name in document.get("disabled_plugins") or () if name in _KUBELET_PLUGINS)
    known = isinstance(table, Mapping) and FOLDERS in table and not disabled
    # A release whose dump has folders and no switch has none: CDI is always on there.
    enabled = known and bool(table.get(SWITCH, True))
    rest = copy.deepcopy(document)
    rest.pop("imports", None)
    for key in (SWITCH, FOLDERS):
        (look_up(rest, path) or {}).pop(key, None)
    return Settings(
        version=version,
        known=known,
        enabled=enabled,
        folders=tuple(table[FOLDERS]) if known else (),
        address=next((found for found in (look_up(document, path) for path in _ADDRESSES) if found), ""),
        rest=rest,
        disabled=disabled,
    )


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the name of each value that differs between two documents; never the value, which may be a password."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield f"{path} would be lost" if after is None else f"{path} would change"


@dataclass(frozen=True)
class File:
    """One configuration file as it is on the disk."""

    path: str
    text: str

    def document(self) -> dict[str, Any]:
        """What the file says. Raises TomlError."""
        return parse(self.text, self.path)

    def table(self) -> tuple[str, ...]:
        """Path of the table that holds the switch in this file."""
        return table_of(version_of(self.document()))

    def defines(self) -> bool:
        """Whether the file says anything of the plugin that serves the kubelet."""
        return look_up(self.document(), self.table()) is not None


@dataclass(frozen=True)
class Change:
    """One file that is to be different: its text before (None: it is not there) and after (None: it goes).

    ``problem`` says why the file cannot be changed line by line; nothing is known of its text after then.
    """

    path: str
    before: str | None
    after: str | None
    problem: str = ""


def edit(file: File, table: Sequence[str], values: Mapping[str, Any]) -> Change:
    """Return the change that sets values in a table of a file, or the reason why only a person should edit that file."""
    try:
        return Change(file.path, file.text, change(file.text, table, values, file.path, remark=MARK))
    except TomlError as error:
        return Change(file.path, file.text, None, str(error))


def patterns(main: File | None, path: str) -> list[str]:
    """Return which files the main file at ``path`` imports, as absolute patterns in the order in which they are read.

    The dump of a containerd from 2.2 on names /etc/containerd/conf.d always; it reads that folder only where the main
    file says so.
    """
    own = (main.document().get("imports") or []) if main else []
    return list(dict.fromkeys(posixpath.join(posixpath.dirname(path), each) for each in own))


def drop_in_folder(imported: Sequence[str], preferred: str) -> str | None:
    """Return a folder whose files containerd reads: the preferred one if it does, else the first one that it reads."""
    folders = [posixpath.dirname(each) for each in imported if fnmatch.fnmatch(DROP_IN, posixpath.basename(each))]
    readable = [folder for folder in folders if "*" not in folder]
    return preferred if preferred in readable else readable[0] if readable else None


def drop_in(version: int, values: Mapping[str, Any]) -> str:
    """Return the text of our drop-in file."""
    text = f"# Written by {MARK} (role container_runtime). It goes with container_runtime_state: absent.\nversion = {version}\n"
    return change(text, table_of(version), values, DROP_IN)


def candidates(
    settings: Settings,
    main: File | None,
    path: str,
    imported: Sequence[File],
    folder: str | None,
    wanted: Sequence[str],
) -> list[Change]:
    """Return the changes that may switch CDI on, the least intrusive one first.

    ``imported`` are the files that the main file imports, in the order in which they are read; ``folder`` is one of
    those that they lie in. What is in a table of a release before 2.1 hides what files read earlier say of it, so that a
    change may have to go into the file that is read last.
    """
    values: dict[str, Any] = {SWITCH: True}
    missing = [each for each in wanted if each not in settings.folders]
    if missing:
        values[FOLDERS] = [*settings.folders, *missing]
    found = []
    if folder is not None:
        ours = posixpath.join(folder, DROP_IN)
        present = next((each.text for each in imported if each.path == ours), None)
        found.append(Change(ours, present, drop_in(min(max(settings.version, 2), 3), values)))
    others = [each for each in imported if not each.path.endswith("/" + DROP_IN) and each.defines()]
    found += [edit(each, each.table(), values) for each in [*reversed(others), *([main] if main else [])]]
    if main is None:
        found.append(Change(path, None, drop_in(min(max(settings.version, 2), 3), values)))
    return found


def taken_back(file: File, before: Mapping[str, Any]) -> str:
    """Return the text of a file that was changed since with our keys as they were: a value, or None for no key."""
    return change(file.text, file.table(), before, file.path)


def values_in(file: File) -> dict[str, Any]:
    """Return what a file says of the two keys; None for a key that it does not have."""
    table = look_up(file.document(), file.table()) or {}
    return {key: table.get(key) for key in (SWITCH, FOLDERS)}


def says_nothing(file: File) -> bool:
    """Whether a file holds nothing but a version and an empty table of the plugin."""
    document = file.document()
    document.pop("version", None)
    table = look_up(document, file.table())
    return document in ({}, {"plugins": {file.table()[-1]: {}}}) and not table
