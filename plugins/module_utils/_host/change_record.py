# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read and write the records of a module's changes to a node, for their removal. Records are JSON with a version. No side effects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..core.errors import AcceleratorError

#: The current format. No other format has existed.
VERSION = 1
Kept = TypeVar("Kept")


def to_text(content: Mapping[str, Any]) -> str:
    """Return the text of a record."""
    return json.dumps({"version": VERSION, **content}, indent=1) + "\n"


def read(text: str, path: str, made: Callable[[Any], Kept], *, of: str, hint: str) -> Kept:
    """Return the result of ``made`` for a record's content. ``of`` is the subject of the record, for the error.

    Raises AcceleratorError for text that is not a record, for another version, or if ``made`` misses a key.
    """
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        return made(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AcceleratorError(
            f"The record {path} of {of} cannot be read: {error!r}", hint=hint, code="damaged-record"
        ) from error
