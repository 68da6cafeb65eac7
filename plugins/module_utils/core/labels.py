# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the labels of a Node can say of its devices. Pure; which labels there are is each vendor's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

LONGEST_VALUE = 63
_NOT_IN_VALUES = re.compile(r"[^A-Za-z0-9_.-]+")


def value_of(text: str) -> str:
    """Return a text as the value of a label: what may not be in one becomes a dash, and what is too long is cut."""
    return _NOT_IN_VALUES.sub("-", text.strip())[:LONGEST_VALUE].strip("-_.")


def agreed(values: Iterable[object]) -> str:
    """Return the value of a label that all devices agree on; nothing where one says something else, or nothing.

    A label speaks for the whole Node, so it is left out where it would be true of some devices alone.
    """
    said = {value_of(str(value)) if value is not None else "" for value in values}
    return said.pop() if len(said) == 1 else ""


def written(found: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that have a value, in the order of their names."""
    return {name: found[name] for name in sorted(found) if found[name]}
