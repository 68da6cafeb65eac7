# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read containerd's settings, and list the file changes that can enable CDI. This module has no side effects.

Releases differ. The table with ``enable_cdi`` has one name in configuration version 2 (containerd 1.x) and another one
from version 3 on. Imported files replace the whole table of a plugin before containerd 2.1, and are merged from 2.1 on.
Therefore this module does not predict the effect of a change. It lists possible changes, the least intrusive first, and
containerd's own dump verifies each of them.
"""

from __future__ import annotations

import copy
import fnmatch
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..toml_edit import TomlError, look_up, parse, set_values

ENABLE_KEY = "enable_cdi"
DIRECTORIES_KEY = "cdi_spec_dirs"
#: Name of this collection's drop-in file, and the mark in the lines that it writes.
DROP_IN = "60-dra-accelerators.toml"
MARK = "dra.accelerators"
_SHOWN_DIFFERENCES = 5

#: Name of the CRI plugin, by the lowest configuration version that uses the name.
_PLUGINS = ((3, "io.containerd.cri.v1.runtime"), (2, "io.containerd.grpc.v1.cri"), (0, "cri"))
#: Names of the plugins that a kubelet needs, in containerd 1.x and 2.x. The first one is for configuration version 1.
_KUBELET_PLUGINS = ("cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images")
#: Keys of the containerd socket's address, the newest configuration version first.
_ADDRESSES = (("plugins", "io.containerd.server.v1.grpc", "address"), ("grpc", "address"))


def table_of(version: int) -> tuple[str, ...]:
    """Return the path of the table with the CDI settings in a file of a configuration version."""
    return ("plugins", next(name for lowest, name in _PLUGINS if version >= lowest))


def version_of(document: Mapping[str, Any]) -> int:
    """Return the version of a configuration file, or 1 if it has none."""
    version = document.get("version", 1)
    return version if isinstance(version, int) else 1


@dataclass(frozen=True)
class Settings:
    """containerd's settings from its dump. ``rest`` are all settings except CDI.

    ``has_cdi_settings`` is whether the dump has CDI settings and no plugin that a kubelet needs is disabled. Otherwise
    containerd is too old for CDI, or serves no kubelet.

    ``disabled`` are the plugins in disabled_plugins that a kubelet needs. The dump of containerd 2.x contains CDI
    settings even for a disabled plugin.
    """

    version: int
    has_cdi_settings: bool
    enabled: bool
    folders: tuple[str, ...]
    address: str
    rest: Mapping[str, Any] = field(repr=False)
    disabled: tuple[str, ...] = ()

    def reads(self, folders: Sequence[str]) -> bool:
        """Return whether CDI is enabled and all these directories are read."""
        return self.enabled and set(folders) <= set(self.folders)


def read_dump(text: str) -> Settings:
    """Read the output of ``containerd config dump``. Raises TomlError."""
    document = parse(text, "the output of `containerd config dump`")
    version = version_of(document)
    path = table_of(version)
    table = look_up(document, path)
    disabled = tuple(name for name in document.get("disabled_plugins") or () if name in _KUBELET_PLUGINS)
    has_cdi_settings = isinstance(table, Mapping) and DIRECTORIES_KEY in table and not disabled
    # A release whose dump has directories but no `enable_cdi` always has CDI enabled.
    enabled = has_cdi_settings and bool(table.get(ENABLE_KEY, True))
    rest = copy.deepcopy(document)
    rest.pop("imports", None)
    for key in (ENABLE_KEY, DIRECTORIES_KEY):
        (look_up(rest, path) or {}).pop(key, None)
    return Settings(
        version=version,
        has_cdi_settings=has_cdi_settings,
        enabled=enabled,
        folders=tuple(table[DIRECTORIES_KEY]) if has_cdi_settings else (),
        address=next((found for found in (look_up(document, path) for path in _ADDRESSES) if found), ""),
        rest=rest,
        disabled=disabled,
    )


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the name of each value that differs between two documents. The values are omitted, because they can be passwords."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield f"{path} would be lost" if after is None else f"{path} would change"


def shorten_differences(texts: Sequence[str]) -> str:
    """Return the first differences as one text, each with at most 200 characters."""
    shown = "; ".join(each[:200] for each in texts[:_SHOWN_DIFFERENCES])
    return shown if len(texts) <= _SHOWN_DIFFERENCES else f"{shown}; and {len(texts) - _SHOWN_DIFFERENCES} more"


@dataclass(frozen=True)
class File:
    """One configuration file on disk."""

    path: str
    text: str

    def document(self) -> dict[str, Any]:
        """Return the parsed file. Raises TomlError."""
        return parse(self.text, self.path)

    def table(self) -> tuple[str, ...]:
        """Return the path of the table with the CDI settings in this file."""
        return table_of(version_of(self.document()))

    def has_cri_settings(self) -> bool:
        """Return whether the file has settings of the CRI plugin."""
        return look_up(self.document(), self.table()) is not None


@dataclass(frozen=True)
class Change:
    """A change of one file: its text before (None: it does not exist) and after (None: it is removed).

    ``problem`` is the reason why the file cannot be edited line by line. Its text after the change is then unknown.
    """

    path: str
    before: str | None
    after: str | None
    problem: str = ""


def edit(file: File, table: Sequence[str], values: Mapping[str, Any]) -> Change:
    """Return the change that sets values in a table of a file, or a change with the reason why the file needs manual editing."""
    try:
        return Change(file.path, file.text, set_values(file.text, table, values, file.path, remark=MARK))
    except TomlError as error:
        return Change(file.path, file.text, None, str(error))


def patterns(main: File | None, path: str) -> list[str]:
    """Return the imports of the main file at ``path`` as absolute patterns, in the order in which they are read.

    The dump of containerd 2.2 or newer always contains /etc/containerd/conf.d, but containerd reads that directory only
    if the main file imports it.
    """
    own = (main.document().get("imports") or []) if main else []
    return list(dict.fromkeys(posixpath.join(posixpath.dirname(path), each) for each in own))


def drop_in_folder(imported: Sequence[str], preferred: str) -> str | None:
    """Return a drop-in directory that containerd reads: the preferred one if possible, otherwise the first one."""
    folders = [posixpath.dirname(each) for each in imported if fnmatch.fnmatch(DROP_IN, posixpath.basename(each))]
    readable = [folder for folder in folders if "*" not in folder]
    return preferred if preferred in readable else readable[0] if readable else None


def drop_in(version: int, values: Mapping[str, Any]) -> str:
    """Return the text of this collection's drop-in file."""
    text = f"# Written by {MARK} (role container_runtime). To remove this file, set container_runtime_state: absent.\nversion = {version}\n"
    return set_values(text, table_of(version), values, DROP_IN)


def candidates(
    settings: Settings,
    main: File | None,
    path: str,
    imported: Sequence[File],
    folder: str | None,
    wanted: Sequence[str],
) -> list[Change]:
    """Return the changes that can enable CDI, the least intrusive one first.

    ``imported`` are the files that the main file imports, in the order in which they are read. ``folder`` is the
    directory for a drop-in file, from the import patterns of the main file, or None if no pattern matches such a file.
    Before containerd 2.1, the table of a later file hides the table of earlier files, so the change possibly has to be
    made in the last file.
    """
    values: dict[str, Any] = {ENABLE_KEY: True}
    missing = [each for each in wanted if each not in settings.folders]
    if missing:
        values[DIRECTORIES_KEY] = [*settings.folders, *missing]
    found = []
    if folder is not None:
        own_path = posixpath.join(folder, DROP_IN)
        present = next((each.text for each in imported if each.path == own_path), None)
        found.append(Change(own_path, present, drop_in(min(max(settings.version, 2), 3), values)))
    others = [each for each in imported if not each.path.endswith("/" + DROP_IN) and each.has_cri_settings()]
    found += [edit(each, each.table(), values) for each in [*reversed(others), *([main] if main else [])]]
    if main is None:
        found.append(Change(path, None, drop_in(min(max(settings.version, 2), 3), values)))
    return found


def restore_values(file: File, before: Mapping[str, Any]) -> str:
    """Return the text of an edited file with the previous values of this collection's keys. None removes a key."""
    return set_values(file.text, file.table(), before, file.path)


def read_cdi_values(file: File) -> dict[str, Any]:
    """Return the values of the two keys in a file, or None for a missing key."""
    table = look_up(file.document(), file.table()) or {}
    return {key: table.get(key) for key in (ENABLE_KEY, DIRECTORIES_KEY)}


def has_no_settings(file: File) -> bool:
    """Return whether a file contains only a version and an empty table of the plugin."""
    document = file.document()
    document.pop("version", None)
    table = look_up(document, file.table())
    return document in ({}, {"plugins": {file.table()[-1]: {}}}) and not table
