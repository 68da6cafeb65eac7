# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Structured logs: one line per event, JSON or text, with the id of the operation that it belongs to.

An operation (one prepare, one unprepare, one publish …) opens ``operation(...)``; every line logged inside, also from
tasks that it starts, carries its id. Values go in as ``extra={"fields": {...}}`` through ``fields(...)``.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterator
from typing import Any

_OPERATION: contextvars.ContextVar[str] = contextvars.ContextVar("operation", default="")

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Make the ``extra`` argument of a logging call out of named values."""
    return {"fields": values}


@contextlib.contextmanager
def operation(identifier: str | None = None) -> Iterator[str]:
    """Give every line logged inside one operation id (8 hexadecimal digits unless given) and yield it."""
    token = _OPERATION.set(identifier or secrets.token_hex(4))
    try:
        yield _OPERATION.get()
    finally:
        _OPERATION.reset(token)


def current_operation() -> str:
    """Return the id of the operation that is under way here; "" where none is."""
    return _OPERATION.get()


class _Formatter(logging.Formatter):
    """Common parts of both formats."""

    def parts(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the named values of a record, exception included."""
        values: dict[str, Any] = {}
        identifier = _OPERATION.get()
        if identifier:
            values["operation"] = identifier
        values.update(getattr(record, "fields", {}))
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return values


# What a value of a text line has that makes it stand in quotes.
_QUOTED = re.compile(r'[ "=\n]')


class JsonFormatter(_Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, message, logger, then the named values."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
            **self.parts(record),
        }
        return json.dumps(line, default=str, separators=(",", ":"))


class TextFormatter(_Formatter):
    """Level, message and name=value pairs. The journal adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        values = self.parts(record)
        exception = values.pop("exception", "")
        pairs = "".join(f" {name}={self._value(value)}" for name, value in values.items())
        return f"{record.levelname.lower()}: {record.getMessage()}{pairs}" + (f"\n{exception}" if exception else "")

    @staticmethod
    def _value(value: Any) -> str:
        if isinstance(value, float):  # most of what a claim's line has
            return repr(value)
        text = value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))
        return json.dumps(text) if not text or _QUOTED.search(text) else text


def configure(level: str = "info", style: str = "text") -> None:
    """Send all logs to standard error in the given format. ``level`` is one of LEVELS, ``style`` one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("aiohttp", "asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


class StateLog:
    """Logs the state of one thing once per change, however often it is reported."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: str | None = None

    def report(self, state: str, *, level: int = logging.INFO, **values: Any) -> bool:
        """Log ``state`` if it differs from the last one and return whether it did."""
        if state == self._last:
            return False
        self._last = state
        self._logger.log(level, state, extra=fields(**values))
        return True
