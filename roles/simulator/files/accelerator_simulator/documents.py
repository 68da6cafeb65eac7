# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read JSON files and validate their fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import DescriptionError


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. A DescriptionError names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DescriptionError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DescriptionError(f"{path}: not JSON: {error}") from error


def take(data: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    """Return a required field of a type. The DescriptionError for a missing one names ``where``."""
    value = data.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DescriptionError(f"{where}: {key} is {value!r}, expected {getattr(kind, '__name__', kind)}")
    return value
