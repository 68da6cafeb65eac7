# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Divide a long run into parts for several machines.

The division depends only on the steps, so all machines with the same files compute the same division. Each step is in
one part. A step with test modules is in all parts, and each of its modules is in one part. A part also has all steps
that its steps need.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steps import Step

_MINUTES_OF_UNIT = {"s": 1 / 60, "min": 1.0, "h": 60.0}


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

    def select_steps(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps of this part, and the steps that they need, in their order.

        The longest step is assigned first, to the part with the shortest total of usual times.
        """
        part_minutes = [0.0] * self.parts
        selected = {step.name for step in steps if step.runs_always or step.test_modules}
        for step in sorted(steps, key=lambda step: (-minutes(step.usual_time), step.name)):
            if step.name in selected:
                continue
            shortest = part_minutes.index(min(part_minutes))
            part_minutes[shortest] += minutes(step.usual_time)
            if shortest == self.number - 1:
                selected.add(step.name)
        for step in reversed(steps):  # a step follows the steps that it needs
            if step.name in selected:
                selected.update(step.needs)
        chosen = [
            self._with_own_modules(step) if step.test_modules else step for step in steps if step.name in selected
        ]
        return [step for step in chosen if step is not None]

    def _with_own_modules(self, step: Step) -> Step | None:
        """Return a step with this part's modules in place of their directory, or None if the part has no module."""
        modules = sorted(step.test_modules)[self.number - 1 :: self.parts]
        directory = step.test_modules[0].rpartition("/")[0]
        command: list[str | Path] = []
        for word in step.command:
            command += modules if str(word) == directory else [word]
        return replace(step, command=command, test_modules=tuple(modules)) if modules else None


def minutes(usual_time: str) -> float:
    """Return the minutes at the start of a step's usual time, such as 120.0 for ``2 h in parallel``."""
    found = re.match(r"([0-9]+) (s|min|h)\b", usual_time)
    return int(found[1]) * _MINUTES_OF_UNIT[found[2]] if found else 1.0
