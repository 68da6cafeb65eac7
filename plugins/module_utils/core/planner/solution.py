# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the solution of a planning problem. No side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .problem import Amounts

#: Used instead of a demand number for a moved claim at its new place.
MOVED = -1


@dataclass(frozen=True)
class Use:
    """One allocation on a device: the numbers of the demand (MOVED for an existing claim), of its part, and of the item."""

    demand: int
    part: int
    item: int


@dataclass(frozen=True)
class Solution:
    """The allocations of each device, the claims that leave it by item, and the number of served claims of each demand.

    ``bounds`` contains, for each priority from the highest, an upper limit for the served claims of this priority over
    all plans that serve at least as many claims of each higher priority.
    """

    uses: Mapping[int, tuple[Use, ...]]
    gone: Mapping[int, Amounts]
    served: tuple[int, ...]
    bounds: tuple[int, ...]
