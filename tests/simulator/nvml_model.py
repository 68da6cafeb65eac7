# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Brute-force model of MIG partitioning: sets of memory slices and exhaustive search, without code shared with the
library.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

MEDIA = ("decoder", "encoder", "jpeg", "ofa")


def cells(start: int, size: int) -> frozenset[int]:
    """Return the memory slices of a placement."""
    return frozenset(range(start, start + size))


@dataclass
class Model:
    """One GPU: its instances, and those that can be added."""

    board: dict[str, Any]
    instances: dict[int, tuple[int, int]] = field(default_factory=dict)
    """GPU instance id → (profile enum, start)"""

    def row(self, enum: int) -> dict[str, Any]:
        """Return a profile's table row."""
        return dict(self.board["profiles"][enum])

    def occupied(self) -> frozenset[int]:
        """Return all memory slices in use."""
        used = [cells(start, self.row(enum)["size"]) for enum, start in self.instances.values()]
        return frozenset().union(*used) if used else frozenset()

    def free(self, enum: int, start: int) -> bool:
        """Return whether the memory slices of a listed placement are free."""
        return not cells(start, self.row(enum)["size"]) & self.occupied()

    def media_left(self, enum: int) -> bool:
        """Return whether enough of each fixed-function engine is left for the profile."""
        for engine in MEDIA:
            used = sum(self.row(other)["engines"].get(engine, 0) for other, _start in self.instances.values())
            if used + self.row(enum)["engines"].get(engine, 0) > self.board["engines"].get(engine, 0):
                return False
        return True

    def fits(self, enum: int, start: int) -> bool:
        """Return whether an instance can be created at a start."""
        row = self.row(enum)
        present = sum(other == enum for other, _start in self.instances.values())
        return start in row["starts"] and present < row["maximum"] and self.free(enum, start) and self.media_left(enum)

    def still_possible(self) -> set[tuple[int, int]]:
        """Return every (profile, start) whose memory slices are free."""
        rows = self.board["profiles"].items()
        return {(enum, start) for enum, row in rows for start in row["starts"] if self.free(enum, start)}

    def choices(self, enum: int) -> list[int]:
        """Return the possible starts, the driver's choice first: fewest other placements lost, then lowest."""
        before = self.still_possible()

        def lost(start: int) -> int:
            after = Model(self.board, {**self.instances, -1: (enum, start)})
            return len(before) - len(after.still_possible())

        return sorted((s for s in self.row(enum)["starts"] if self.fits(enum, s)), key=lambda s: (lost(s), s))

    def identifier(self, enum: int, start: int) -> int:
        """Return the instance ID: whole 0, halves 1 and 2, quarters 3 to 6, eighths 7 to 14."""
        whole, size = self.board["memory_slices"], self.row(enum)["size"]
        ids = {1: [0], 2: [1, 2], 4: [3, 4, 5, 6], 8: list(range(7, 15))}[whole // size]
        if self.board.get("order") == "reversed":
            half = len(ids) // 2
            ids = ids[half:] + ids[:half] if half else ids
        chosen: int = ids[start // size]
        return chosen

    def remaining(self, enum: int) -> int:
        """Return the maximum number of further instances of the profile that fit together, by trying every set of
        starts.
        """
        starts = [start for start in self.row(enum)["starts"] if self.fits(enum, start)]
        for count in range(len(starts), 0, -1):
            for chosen in itertools.combinations(starts, count):
                trial = Model(self.board, dict(self.instances))
                for number, start in enumerate(chosen):
                    if not trial.fits(enum, start):
                        break
                    trial.instances[-1 - number] = (enum, start)
                else:
                    return count
        return 0

    def create(self, enum: int, start: int) -> int:
        """Add an instance; return its ID."""
        identifier = self.identifier(enum, start)
        assert identifier not in self.instances
        self.instances[identifier] = (enum, start)
        return identifier
