# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Reads /etc/vnpu.cfg, in which the vendor's driver keeps the slices that it makes again after a start of the machine.

It is only read: the driver writes it, under its own lock, whenever a slice comes or goes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

PATH = "/etc/vnpu.cfg"
#: The driver writes no larger file and no longer line.
MOST_BYTES = 4 * 1024 * 1024
LONGEST_LINE = 256

_SLICE = re.compile(r"\s*(\d{1,4})\s*:\s*(\d{1,5})\s*:\s*(\S.*?)\s*")
_ON, _OFF = frozenset({"1", "on", "enable", "enabled", "true"}), frozenset({"0", "off", "disable", "disabled", "false"})


@dataclass(frozen=True)
class SavedSlice:
    """A slice that is made again: of which chip, by its physical id, with which id, template and vGroup (None: not said)."""

    physical_id: int
    slice_id: int
    template: str
    group: int | None = None


@dataclass(frozen=True)
class Saved:
    """What the file says. ``recovers`` is None where it does not tell whether slices are made again, which they are by default.

    ``unread`` are lines of slices that could not be read.
    """

    recovers: bool | None = None
    slices: tuple[SavedSlice, ...] = ()
    unread: tuple[str, ...] = ()


def read(text: str) -> Saved:
    """Read the file's text. Raises ValueError for one that is too large to be the driver's."""
    if len(text.encode("utf-8", "replace")) > MOST_BYTES:
        raise ValueError(f"{PATH} has more than {MOST_BYTES} bytes, which the driver never writes")
    lines = [line for line in text.splitlines() if line.strip()]
    slices: list[SavedSlice] = []
    unread: list[str] = []
    for line in lines[1:]:
        found = _SLICE.fullmatch(line)
        if found is None:
            continue  # where the section begins and ends
        saved = _slice(int(found.group(1)), int(found.group(2)), found.group(3))
        if saved is None or len(line) > LONGEST_LINE:
            unread.append(line[:LONGEST_LINE])
        else:
            slices.append(saved)
    return Saved(_switch(lines[0]) if lines else None, tuple(slices), tuple(unread))


def orphans(saved: Saved, known: Collection[tuple[int, int]]) -> tuple[SavedSlice, ...]:
    """Return the slices that would come back although nobody has them: ``known`` are physical ids and slice ids."""
    return tuple(each for each in saved.slices if (each.physical_id, each.slice_id) not in known)


def _switch(line: str) -> bool | None:
    words = {word.lower() for word in re.findall(r"[A-Za-z]+|\d+", line)}
    if words & _OFF:
        return False
    return True if words & _ON else None


def _slice(physical_id: int, slice_id: int, command: str) -> SavedSlice | None:
    words = command.split()
    options = {words[at]: words[at + 1] for at in range(len(words) - 1) if words[at].startswith("-")}
    template, group = options.get("-f", ""), options.get("-g", "")
    if not template or template.startswith("-") or options.get("-v", str(slice_id)) != str(slice_id):
        return None
    return SavedSlice(physical_id, slice_id, template, int(group) if group.isdigit() else None)
