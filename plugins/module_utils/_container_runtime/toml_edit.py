# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read TOML with a library, and change single keys of a file without changing any other line.

Comments, order, and spelling stay. The library verifies every change: only these keys may differ afterwards. Otherwise
the change is rejected.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ..core.errors import AcceleratorError

#: Libraries that read TOML. The first is part of Python from 3.11 on.
READERS = ("tomllib", "tomli")

Document = dict[str, Any]


class TomlError(AcceleratorError):
    """A text is not TOML, or its lines cannot be changed."""

    default_code = "invalid-toml"


def reader() -> ModuleType | None:
    """Return a library that reads TOML, or None if there is no such library."""
    for name in READERS:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def parse(text: str, source: str) -> Document:
    """Return the document of a TOML text. ``source`` names it in errors. Raises TomlError."""
    library = reader()
    if library is None:
        raise TomlError(
            "No library that reads TOML was found", hint="Expected Python 3.11 or newer, or the package tomli."
        )
    try:
        document: Document = library.loads(text)
    except ValueError as error:
        raise TomlError(f"{source} is not TOML: {error}", hint="Fix the file. Nothing was changed.") from error
    return document


def look_up(document: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at a path of keys, or None."""
    value: Any = document
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def write_value(value: bool | int | str | Sequence[str]) -> str:
    """Return a value in TOML syntax."""
    return json.dumps(value if isinstance(value, (bool, int, str)) else list(value), ensure_ascii=False)


def header_of(path: Sequence[str]) -> str:
    """Return the header line of a table."""
    return "[" + ".".join(key if key.isidentifier() and key.isascii() else json.dumps(key) for key in path) + "]"


def set_values(text: str, path: Sequence[str], values: Mapping[str, Any], source: str, remark: str = "") -> str:
    """Return the text with these keys of the table at ``path`` set. The value None removes a key. Raises TomlError.

    An existing key is changed in its line. A new key is added below the table's header, with ``remark`` as a comment in
    the same line. A missing table is added at the end. An empty path means the keys before all tables.
    """
    before = parse(text, source)
    wanted = _expected(before, path, values)
    lines = text.splitlines(keepends=True)
    start, end = _body_of(lines, path)
    if start < 0:
        new = {key: value for key, value in values.items() if value is not None}
        changed = text if not new else _with_table(text, path, new, remark)
    else:
        changed = "".join(lines[:start] + _body(lines[start:end], values, remark) + lines[end:])
    if not _says(changed, wanted):
        place = header_of(path) if path else "the first lines"
        raise TomlError(
            f"{', '.join(values)} cannot be set in {place} of {source} without changing other settings: its format "
            "requires manual editing",
            hint=f"Write the table with a separate header line, {place}, or set the keys manually." if path else "",
            code="unsafe-edit",
        )
    return changed


def _says(text: str, wanted: Document) -> bool:
    try:
        return parse(text, "the changed text") == wanted
    except TomlError:
        return False


def _expected(before: Document, path: Sequence[str], values: Mapping[str, Any]) -> Document:
    after = copy.deepcopy(before)
    table = after
    for key in path:
        if key not in table and all(value is None for value in values.values()):
            return after
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise TomlError(f"{header_of(path)} is not a table: {key} has a value of another type")
    for key, value in values.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value if isinstance(value, (bool, int, str)) else list(value)
    return after


def _header_path(line: str) -> tuple[str, ...] | None:
    """Return the keys of a table's header line, read by the library, or None for any other line."""
    if not line.lstrip().startswith("["):
        return None
    try:
        node: Any = parse(line, "a line")
    except TomlError:
        return None
    path: list[str] = []
    while isinstance(node, dict) and node:
        ((key, node),) = node.items()
        path.append(key)
    return tuple(path) if node == {} else ("", *path)  # an array of tables gets a path that matches no table


def _body_of(lines: Sequence[str], path: Sequence[str]) -> tuple[int, int]:
    """Return the first line of a table's body and the line after it, or -1 as the first line if the table has no header."""
    start = 0 if not path else -1
    for number, line in enumerate(lines):
        found = _header_path(line)
        if found is None:
            continue
        if start >= 0:
            return start, number
        if found == tuple(path):
            start = number + 1
    return start, len(lines)


def _body(lines: Sequence[str], values: Mapping[str, Any], remark: str) -> list[str]:
    """Return the lines of a table's body with the keys changed."""
    left = dict(values)
    result: list[str] = []
    indent = ""
    number = 0
    while number < len(lines):
        line = lines[number]
        length, keys = _assignment(lines, number)
        if length:
            indent = line[: len(line) - len(line.lstrip())]
        if len(keys) == 1 and keys[0] in values:
            value = left.pop(keys[0], None)
            if value is not None:
                result.append(f"{indent}{keys[0]} = {write_value(value)}{_comment(remark)}\n")
        else:
            result += lines[number : number + max(length, 1)]
        number += max(length, 1)
    new = [
        f"{indent}{key} = {write_value(value)}{_comment(remark)}\n" for key, value in left.items() if value is not None
    ]
    # Insert below the header: comments at the end can belong to the next table.
    return new + result


def _comment(remark: str) -> str:
    return f"  # {remark}" if remark else ""


def _assignment(lines: Sequence[str], number: int) -> tuple[int, tuple[str, ...]]:
    """Return the number of lines of the assignment that begins here and its key, or 0 lines if no assignment begins here."""
    if not lines[number].strip() or lines[number].lstrip().startswith("#"):
        return 0, ()
    for length in range(1, len(lines) - number + 1):
        try:
            found = parse("".join(lines[number : number + length]), "a line")
        except TomlError:
            continue
        path: list[str] = []
        node: Any = found
        while isinstance(node, dict) and len(node) == 1:
            ((key, node),) = node.items()
            path.append(key)
        return length, tuple(path)
    return 0, ()


def _with_table(text: str, path: Sequence[str], values: Mapping[str, Any], remark: str) -> str:
    lines = [f"{key} = {write_value(value)}{_comment(remark)}\n" for key, value in values.items()]
    if not path:
        return "".join(lines) + text
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    return text + gap + header_of(path) + "\n" + "".join(f"  {line}" for line in lines)
