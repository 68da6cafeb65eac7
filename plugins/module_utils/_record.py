# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Records on a node of what a module has changed there, for the way back: each is JSON with a version. No side effects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .core.errors import AcceleratorError

#: All records have their first form.
VERSION = 1
Kept = TypeVar("Kept")


def to_text(content: Mapping[str, Any]) -> str:
    """Return a record as it is written."""
    return json.dumps({"version": VERSION, **content}, indent=1) + "\n"


def read(text: str, path: str, made: Callable[[Any], Kept], *, of: str, hint: str) -> Kept:
    """Return what ``made`` makes of a record's content. ``of`` is what was changed, as it follows "in which is written what was".

    Raises AcceleratorError for what is no record, has another version, or lacks what ``made`` looks for.
    """
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        return made(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AcceleratorError(
            f"{path}, in which is written what was {of}, cannot be read: {error!r}", hint=hint, code="damaged-record"
        ) from error
