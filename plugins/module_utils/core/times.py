# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert times to and from the Kubernetes format: RFC 3339, in UTC, with a resolution of one second."""

from __future__ import annotations

import time
from datetime import datetime, timezone

FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def text_of(seconds: float) -> str:
    """Return seconds since 1970 as text; fractions of a second are omitted."""
    return time.strftime(FORMAT, time.gmtime(seconds))


def seconds_of(text: str) -> float | None:
    """Return a text as seconds since 1970; None for a text that is not a time with an offset."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo is not None else None


def now_text() -> str:
    """Return the current time as text."""
    return datetime.now(timezone.utc).strftime(FORMAT)
