# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A small parser of npu-smi's output formats."""

from __future__ import annotations

import re
from typing import Any


def pairs(text: str) -> list[tuple[str, str]]:
    """Return the key-value lines: a tab, a key in thirty columns, a space, a colon, and a space."""
    found = []
    for line in text.splitlines():
        if not line.strip():
            continue
        match = re.fullmatch(r"\t(?P<key>\S.{29,}?) : ?(?P<value>.*)", line)
        assert match, repr(line)
        found.append((match["key"].rstrip(), match["value"]))
    return found


def columns(header: str) -> list[tuple[str, int, int]]:
    """Return the names in a header that are more than one space apart, with the start of each and of the next."""
    matches = list(re.finditer(r"\S+(?: \S+)*", header))
    ends = [match.start() for match in matches[1:]] + [10**6]
    return [(match[0], match.start(), end) for match, end in zip(matches, ends)]


def table_of_map(text: str) -> list[dict[str, str]]:
    """Parse ``info -m``."""
    header, *rows = text.splitlines()
    assert header.startswith("\t")
    names = columns(header)
    return [{name: row[start:end].strip() for name, start, end in names} for row in rows]


def boxed(text: str) -> list[str]:
    """Return the text between the bars of a box without its horizontal lines; assert that all lines are equally wide."""
    lines = [line for line in text.splitlines() if line]
    assert len({len(line) for line in lines}) == 1, text
    assert all(line[0] in "|+" and line[-1] in "|+" for line in lines)
    return [line[1:-1] for line in lines if not re.fullmatch(r"[|+][-=+]+[|+]", line)]


def templates(text: str) -> dict[str, dict[str, str]]:
    """Parse ``info -t template-info``: two headers, and two lines per template."""
    _title, first, second, *rows = boxed(text)
    found = {}
    assert len(rows) % 2 == 0
    for one, two in zip(rows[::2], rows[1::2]):
        name = one.split()[0]
        values = {key: one[start:end].strip() for key, start, end in columns(first)}
        values |= {key: two[start:end].strip() for key, start, end in columns(second) if key != "GB"}
        assert not two.split()[0].startswith("vir")
        found[name] = values
    return found


def slices(text: str) -> tuple[dict[str, tuple[str, str]], list[dict[str, str]]]:
    """Parse ``info -t info-vnpu``: free and total resources, and the vNPUs."""
    _title, form, header, row, count, names, *rows = boxed(text)
    assert form.strip() == "Format: Free/Total"
    amounts = {}
    for name, start, end in columns(header):
        free, total = row[start:end].strip().split("/")
        amounts[name] = (free, total)
    heads = [name.strip() for name in names.split("|")]
    listed = [dict(zip(heads, (cell.strip() for cell in line.split("|")))) for line in rows]
    assert int(count.split(":")[1]) == len(listed)
    return amounts, listed


def summary(text: str) -> list[dict[str, Any]]:
    """Parse ``info``: the two rows of each chip."""
    lines = boxed("\n".join(line for line in text.splitlines() if line[0] in "|+"))
    heads, found = lines[1:3], []
    end = next(index for index, line in enumerate(lines) if "Process id" in line)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[3:end]]
    for one, two in zip(rows[::2], rows[1::2]):
        numbers = re.findall(r"(\d+) / (\d+)", two[2])
        found.append(
            {
                "first": one[0].split(),
                "health": one[1],
                "second": two[0].split(),
                "bus": two[1],
                "usages": numbers,
                "power": one[2].split()[0],
                "heads": heads,
            }
        )
    return found
