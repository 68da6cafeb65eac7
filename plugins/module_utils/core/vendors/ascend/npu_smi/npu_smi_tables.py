# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse the tables that npu-smi prints: header, rules, and rows, by the names and positions in the header.

Releases differ in rules, in extra columns, and in the lines that have inner bars. So a value belongs to the header name
that begins nearest to it. If header and row have equally many bars, only names between the same two bars count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_RULE = re.compile(r"\s*[|+]?[=+\-|]{5,}[|+]?\s*")
_PAIR = re.compile(r"(\d+)(\s*)/(\s*)(\d+)")
_HEADER_CELL = re.compile(r"\S+(?: \S+)*")
_VALUE = re.compile(r"\S+")
_KEY_VALUE = re.compile(r"\s*([^:|+]*[^:|+\s])\s*:\s?(.*?)\s*")

Row = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Header:
    """The names of a header with their start columns, grouped by the parts between bars."""

    parts: tuple[tuple[tuple[int, str], ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names from left to right."""
        return tuple(name for part in self.parts for _start, name in part)

    def has(self, *names: str) -> bool:
        """Return whether the header contains all these names, in any case."""
        return {name.lower() for name in names} <= {name.lower() for name in self.names}


def parse_header(line: str) -> Header:
    """Parse a header. Words of a name are separated by one space, names by more than one."""
    return Header(
        tuple(
            tuple((start + found.start(), found.group()) for found in _HEADER_CELL.finditer(text))
            for start, text in _parts(line)
        )
    )


def parse_row(columns: Header, line: str) -> Row:
    """Return the values of a line by the names of its header in lower case, without names that have no value."""
    parts = _parts(_without_spaces_in_pairs(line))
    if len(parts) == len(columns.parts):
        pairs = list(zip(columns.parts, parts))
    else:
        every = tuple(cell for part in columns.parts for cell in part)
        pairs = [(every, part) for part in parts]
    found: dict[str, list[str]] = {}
    for cells, (start, text) in pairs:
        for value in _VALUE.finditer(text) if cells else ():
            at = start + value.start()
            name = min(cells, key=lambda cell: abs(cell[0] - at))[1]
            found.setdefault(name.lower(), []).append(value.group())
    return found


def key_values(text: str) -> Mapping[str, str]:
    """Return the values of lines such as ``Chip ID : 0``, by key in lower case. The last value of a key counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        pair = _KEY_VALUE.fullmatch(line)
        if pair is not None:
            found[pair.group(1).lower()] = pair.group(2)
    return found


def value_of(values: Row, *names: str) -> str:
    """Return the value of the first of these names that has one; "" without any."""
    return next((" ".join(values[name.lower()]) for name in names if values.get(name.lower())), "")


def value_with_prefix(values: Row, prefix: str) -> str:
    """Return the value of the first name with this prefix, because some names have a unit after it."""
    return next((" ".join(found) for name, found in values.items() if name.startswith(prefix.lower())), "")


def parse_whole_number(text: str) -> int | None:
    """Return a whole number; None for other text, such as NA or a dash."""
    return int(text) if re.fullmatch(r"\d+", text.strip()) else None


def split_pair(text: str) -> tuple[str, str] | None:
    """Return the two halves of ``free/total`` or ``used/total``; None for other text."""
    one, slash, other = text.replace(" ", "").partition("/")
    return (one, other) if slash and one and other else None


def rows_after(lines: Sequence[str], position: int) -> Iterable[str]:
    """Return the rows after a position, without rules and empty lines."""
    return (line for line in lines[position + 1 :] if line.strip(" |+") and not _RULE.fullmatch(line))


def _without_spaces_in_pairs(line: str) -> str:
    """Move the spaces inside ``0    / 0`` behind it, so that later values keep their positions."""
    return _PAIR.sub(lambda found: f"{found[1]}/{found[4]}{' ' * (len(found[2]) + len(found[3]))}", line)


def _parts(line: str) -> list[tuple[int, str]]:
    """Return the parts between the bars with their start positions, without the outer bars of the box."""
    text = line.expandtabs()
    found: list[tuple[int, str]] = []
    start = 0
    for piece in text.split("|"):
        found.append((start, piece))
        start += len(piece) + 1
    if len(found) > 1 and not found[0][1].strip():
        found = found[1:]
    if len(found) > 1 and not found[-1][1].strip():
        found = found[:-1]
    return found
