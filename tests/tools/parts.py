# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Divide a long run into parts for several machines: the steps of a part, and its modules of a divisible step.

The division depends on the steps only, so each machine with the same files computes the same one. Together the parts
are the complete run: each step and each module is in one part. A step that others need is in each part with these
steps.
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
    """Part ``number`` of ``parts``, counted from one."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse ``2/3``. Raise ArgumentTypeError, which states the expected form."""
        found = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", text)
        if found is None or int(found[1]) > int(found[2]):
            raise ArgumentTypeError(f"{text!r} is no part of a run; expected K/N with K from 1 to N, such as 2/3")
        return cls(int(found[1]), int(found[2]))

    def of_modules(self, modules: Sequence[str]) -> list[str]:
        """Return the modules of this part."""
        return sorted(modules)[self.number - 1 :: self.parts]

    def of_steps(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps of this part in their order, and the steps that they need.

        The longest step is assigned first, to the part with the shortest total of usual times.
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
        for step in reversed(steps):  # a step follows the steps that it needs
            if step.name in mine:
                mine.update(step.after)
        return [self._within(step) for step in steps if step.name in mine and self._has_of(step)]

    def _has_of(self, step: Step) -> bool:
        """Return whether this part has work in a step: there can be more parts than modules."""
        return not step.modules or bool(self.of_modules(step.modules))

    def _within(self, step: Step) -> Step:
        """Return a divisible step with its modules of this part instead of their directory."""
        if not step.modules:
            return step
        modules = self.of_modules(step.modules)
        folder = step.modules[0].rpartition("/")[0]
        command: list[str | Path] = []
        for word in step.command:
            command += modules if str(word) == folder else [word]
        return replace(step, command=command, modules=tuple(modules))


def minutes(usual: str) -> float:
    """Return the usual time of a step in minutes, from the start of its text, such as ``2 h in parallel``."""
    found = re.match(r"([0-9]+) (s|min|h)\b", usual)
    return int(found[1]) * _MINUTES[found[2]] if found else 1.0
