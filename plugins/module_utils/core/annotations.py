# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Notes that are written as annotations of an object, beside those of others.

A note is a key and a text; "" is for one that is not to be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_noted(metadata: Mapping[str, Any], notes: Mapping[str, str]) -> bool:
    """Whether an object has the notes, and none that is not to be there, by its metadata."""
    there = metadata.get("annotations") or {}
    return all(there.get(key, "") == text for key, text in notes.items())


def noted(metadata: Mapping[str, Any], notes: Mapping[str, str]) -> dict[str, Any]:
    """Return an object's metadata with the notes, and without those that are not to be there."""
    there = {**(metadata.get("annotations") or {}), **notes}
    kept = {key: text for key, text in there.items() if text or key not in notes}
    rest = {key: value for key, value in metadata.items() if key != "annotations"}
    return {**rest, **({"annotations": kept} if kept else {})}
