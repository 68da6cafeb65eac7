# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write notes as annotations of an object, in addition to the annotations of others.

A note is a key and a value. The value "" means that the annotation must not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def has_annotations(metadata: Mapping[str, Any], notes: Mapping[str, str]) -> bool:
    """Return whether an object, given its metadata, has all notes, and no annotation that must not exist."""
    existing = metadata.get("annotations") or {}
    return all(existing.get(key, "") == text for key, text in notes.items())


def with_annotations(metadata: Mapping[str, Any], notes: Mapping[str, str]) -> dict[str, Any]:
    """Return an object's metadata with the notes, and without annotations that must not exist."""
    existing = {**(metadata.get("annotations") or {}), **notes}
    kept = {key: text for key, text in existing.items() if text or key not in notes}
    rest = {key: value for key, value in metadata.items() if key != "annotations"}
    return {**rest, **({"annotations": kept} if kept else {})}
