# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Minimises convex functions with corners over numbers that are not negative: the subgradient method with dilation of the space.

N. Z. Shor's r-algorithm ("Minimization Methods for Non-Differentiable Functions", 1985): the space is stretched along the difference of two
successive subgradients, so that steps follow the bottom of a valley instead of bouncing between its sides. Few dozen variables at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Function = Callable[[Sequence[float]], "tuple[float, list[float]]"]

_DILATION = 2.5
_SHORTER, _LONGER, _PATIENCE = 0.95, 1.2, 3
_TINY = 1e-12


def minimise(
    function: Function, start: Sequence[float], *, steps: int, enough: float = -math.inf, step: float = 0.3
) -> tuple[float, list[float]]:
    """Return the least value that was found, and where. ``function`` returns the value at a point and a subgradient there.

    It is evaluated ``steps`` times at most, and until a value is less than ``enough``. Every value returned is one of the function.
    """
    size = len(start)
    space = [[float(row == column) for column in range(size)] for row in range(size)]
    best, where = math.inf, list(start)
    penalty = 0.0
    evaluated = 0

    def look(point: Sequence[float]) -> list[float]:
        nonlocal best, where, penalty, evaluated
        inside = [max(each, 0.0) for each in point]
        value, slope = function(inside)
        evaluated += 1
        penalty = max(penalty, 2 * max((abs(each) for each in slope), default=0.0))
        if value < best:
            best, where = value, inside
        # Outside the function goes up again, steeper than it goes down anywhere.
        return [each if at >= 0 else -penalty for at, each in zip(point, slope)]

    point = list(start)
    slope = look(point)
    while evaluated < steps and best >= enough:
        turned = [sum(space[row][column] * slope[row] for row in range(size)) for column in range(size)]
        length = math.sqrt(sum(each * each for each in turned))
        if length < _TINY:
            break
        direction = [sum(space[row][column] * turned[column] for column in range(size)) / length for row in range(size)]
        before, taken = slope, 0
        while True:
            point = [at - step * each for at, each in zip(point, direction)]
            slope = look(point)
            taken += 1
            downhill = sum(one * other for one, other in zip(direction, slope)) > 0
            if not downhill or evaluated >= steps or best < enough:
                break
            if taken % _PATIENCE == 0:
                step *= _LONGER
        if taken == 1:
            step *= _SHORTER
        change = [slope[row] - before[row] for row in range(size)]
        turned = [sum(space[row][column] * change[row] for row in range(size)) for column in range(size)]
        length = math.sqrt(sum(each * each for each in turned))
        if length > _TINY:
            turned = [each / length for each in turned]
            along = [sum(space[row][column] * turned[column] for column in range(size)) for row in range(size)]
            for row in range(size):
                for column in range(size):
                    space[row][column] += (1 / _DILATION - 1) * along[row] * turned[column]
    return best, where
