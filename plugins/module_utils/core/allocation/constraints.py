# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check the attributes that must be equal, or different, for the devices of a claim. No side effects.

Source: KEP-4381 (matchAttribute), KEP-5075 (distinctAttribute), KEP-5491 (lists of values: a single value is a list of
one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from .objects import Constraint, Device, Json, Request

#: The name of the type, and the values.
Values = tuple[str, frozenset[Any]]
#: A function that returns an attribute of a device for a request, which can derive it. Raises like a Judge.
Lookup = Callable[[Request, Device, str], Optional[Json]]
_TYPES = (("ints", "int"), ("bools", "bool"), ("strings", "string"), ("versions", "version"))


def values_of(attribute: Json | None) -> Values | None:
    """Return an attribute's values as a set with their type; None without values."""
    for many, one in _TYPES:
        if attribute and attribute.get(many):
            return one, frozenset(attribute[many])
    for _many, one in _TYPES:
        if attribute and attribute.get(one) is not None:
            return one, frozenset([attribute[one]])
    return None


def text_of(values: Values | None) -> str:
    """Return values as text."""
    if values is None:
        return "nothing"
    return ", ".join(sorted(str(each).lower() if isinstance(each, bool) else str(each) for each in values[1]))


class Bound:
    """A constraint with the devices that were added to it; the last added device is removed first."""

    def __init__(self, constraint: Constraint, lookup: Lookup) -> None:
        self.constraint = constraint
        self._lookup = lookup
        self._taken: list[Values] = []

    def add(self, request: Request, device: Device) -> bool:
        """Add a device if it meets the constraint. Return whether it does."""
        if not request.is_named_by(self.constraint.requests):
            return True
        values = values_of(self._lookup(request, device, self.constraint.attribute))
        if values is None:
            return False
        if self.constraint.distinct:
            if any(kind == values[0] and those & values[1] for kind, those in self._taken):
                return False
        elif self._taken:
            kind, those = self._taken[-1]
            values = (kind, those & values[1])
            if not values[1] or kind != self._kind(request, device):
                return False
        self._taken.append(values)
        return True

    def remove(self, request: Request) -> None:
        """Remove the device that was added last."""
        if request.is_named_by(self.constraint.requests):
            self._taken.pop()

    def _kind(self, request: Request, device: Device) -> str:
        values = values_of(self._lookup(request, device, self.constraint.attribute))
        return values[0] if values else ""
