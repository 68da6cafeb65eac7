# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Divides a run of hours among machines, or evenings: which of its steps are the second of three parts, and which modules of a divisible one.

The division follows from the steps alone, so that every machine with the same files makes the same one, and all parts together are the
whole run: each step and each module is in one part. What others need is in each part that has them.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steps import Step

_MINUTES = {"s": 1 / 60, "min": 1.0, "h": 60.0}


@dataclass(frozen=True)
class Part:
    """The ``number``-th of so many parts, counted from one."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read ``2/3``. Raises ArgumentTypeError, which says what was expected."""
        found = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", text)
        if found is None or int(found[1]) > int(found[2]):
            raise ArgumentTypeError(f"{text!r} is no part of a run; expected K/N with K from 1 to N, such as 2/3")
        return cls(int(found[1]), int(found[2]))

    def of_modules(self, modules: Sequence[str]) -> list[str]:
        """The modules that are this part's."""
        return sorted(modules)[self.number - 1 :: self.parts]

    def of_steps(self, steps: Sequence[Step]) -> list[Step]:
        """The steps that are this part's, in their order, and those that these need.

        The longest goes first to the part that has least, by the time that each usually takes.
        """
        loads = [0.0] * self.parts
        mine = {step.name for step in steps if step.always or step.modules}
        for step in sorted(steps, key=lambda step: (-minutes(step.usual), step.name)):
            if step.name in mine:
                continue
            lightest = loads.index(min(loads))
            loads[lightest] += minutes(step.usual)
            if lightest == self.number - 1:
                mine.add(step.name)
        for step in reversed(steps):  # what a step needs stands before it
            if step.name in mine:
                mine.update(step.after)
        return [self._within(step) for step in steps if step.name in mine and self._has_of(step)]

    def _has_of(self, step: Step) -> bool:
        """Whether anything of a step is left for this part: there may be more parts than modules."""
        return not step.modules or bool(self.of_modules(step.modules))

    def _within(self, step: Step) -> Step:
        """A divisible step with its modules of this part in place of their folder."""
        if not step.modules:
            return step
        modules = self.of_modules(step.modules)
        folder = step.modules[0].rpartition("/")[0]
        command: list[str | Path] = []
        for word in step.command:
            command += modules if str(word) == folder else [word]
        return replace(step, command=command, modules=tuple(modules))


def minutes(usual: str) -> float:
    """The time that a step usually takes: what its words begin with, such as ``2 h beside the others``."""
    found = re.match(r"([0-9]+) (s|min|h)\b", usual)
    return int(found[1]) * _MINUTES[found[2]] if found else 1.0
