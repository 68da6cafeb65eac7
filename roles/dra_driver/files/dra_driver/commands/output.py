# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Output of commands: JSON, or text as lines and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def write(answer: Any, style: str, text: str) -> None:
    """Print ``answer`` as JSON if ``style`` is "json", else print ``text``."""
    sys.stdout.write(json.dumps(answer, indent=2, default=str) + "\n" if style == "json" else text)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows as aligned columns. The first row is the heading. Without other rows the result is ""."""
    if len(rows) < 2:
        return ""
    texts = [[str(cell) if cell not in (None, "") else "-" for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() + "\n" for row in texts)


def outline(value: Any, indent: int = 0) -> str:
    """Return nested values as indented lines, without empty values."""
    space = "  " * indent
    if isinstance(value, Mapping):
        lines = []
        for key, entry in value.items():
            if entry in (None, "", [], {}, ()):
                continue
            if isinstance(entry, (Mapping, list, tuple)):
                lines.append(f"{space}{key}:\n{outline(entry, indent + 1)}")
            else:
                lines.append(f"{space}{key}: {_scalar(entry)}\n")
        return "".join(lines)
    if isinstance(value, (list, tuple)):
        lines = []
        for entry in value:
            if isinstance(entry, Mapping):
                text = outline(entry, indent + 1)
                lines.append(f"{space}- {text[2 * (indent + 1) :]}")
            else:
                lines.append(f"{space}- {_scalar(entry)}\n")
        return "".join(lines)
    return f"{space}{_scalar(value)}\n"


def _scalar(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
