# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Structured logs: one line per event, JSON or text, with the id of the operation that it belongs to.

An operation (one prepare, one unprepare, one publish …) opens ``operation(...)``; every line logged inside, also from
tasks that it starts, carries its id. Values go in as ``extra={"fields": {...}}`` through ``fields(...)``.

Messages and values can contain text from claims, containers, tools and servers. Control characters in them are escaped, so that
such a text can neither start a log line nor drive a terminal.
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
        for name, value in getattr(record, "fields", {}).items():
            values[name] = _bounded(value)
        if record.exc_info:
            values["exception"] = _shortened(self.formatException(record.exc_info), _LONGEST_EXCEPTION)
        return values


#: Characters that end a line, drive a terminal, or reorder text: C0, DEL, C1, line separators, bidirectional controls.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A value of a text line that contains one of these is quoted.
_QUOTED = re.compile(r'[ "=\\]|' + _CONTROL.pattern)
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
#: The maximum number of characters of a message or value. journald splits longer lines (LineMax, 48 KiB), and a part would look like a line.
_LONGEST = 4096
_LONGEST_EXCEPTION = 16384


def escape(text: str) -> str:
    """Return a text with each control character as a backslash escape."""
    return _CONTROL.sub(lambda found: _SHORT_ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04x}", text)


def _shortened(text: str, longest: int = _LONGEST) -> str:
    """Return the beginning and the end of a text that is too long."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}…[{len(text) - 2 * half} characters]…{text[-half:]}"


def _dumped(value: Any) -> str:
    """Return a value as JSON in one line, ASCII only."""
    return json.dumps(value, default=str, separators=(",", ":")).replace("\x7f", "\\u007f")


def _bounded(value: Any) -> Any:
    """Return a value, or the shortened text of one whose text is too long."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else _dumped(value)
    return value if len(text) <= _LONGEST else _shortened(text)


class JsonFormatter(_Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, message, logger, then the named values."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": _shortened(record.getMessage()),
            "logger": record.name,
            **self.parts(record),
        }
        return _dumped(line)


class TextFormatter(_Formatter):
    """Level, message and name=value pairs in one line. The journal adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        pairs = "".join(f" {name}={self._value(value)}" for name, value in self.parts(record).items())
        return f"{record.levelname.lower()}: {escape(_shortened(record.getMessage()))}{pairs}"

    @staticmethod
    def _value(value: Any) -> str:
        if isinstance(value, float):  # most of what a claim's line has
            return repr(value)
        text = value if isinstance(value, str) else _dumped(value)
        return _dumped(text) if not text or _QUOTED.search(text) else text


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
