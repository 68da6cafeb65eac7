# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Structured logs: one line per event, as JSON or text, with the ID of its operation.

An operation, such as one prepare or one publish, runs inside ``operation(...)``. Every line that is logged inside, also
by tasks started there, has the operation's ID. Pass values with ``extra=fields(...)``.

Messages and values can contain text from claims, containers, tools, and servers. Control characters in them are
escaped, so that this text cannot start a new log line or control a terminal.
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
    """Return the ``extra`` argument of a logging call for named values."""
    return {"fields": values}


@contextlib.contextmanager
def operation(identifier: str | None = None) -> Iterator[str]:
    """Set the operation ID for all lines logged inside the context, and yield it.

    The default is 8 random hexadecimal digits.
    """
    token = _OPERATION.set(identifier or secrets.token_hex(4))
    try:
        yield _OPERATION.get()
    finally:
        _OPERATION.reset(token)


def current_operation() -> str:
    """Return the ID of the current operation; "" without one."""
    return _OPERATION.get()


class _Formatter(logging.Formatter):
    """Common parts of both formats."""

    def parts(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the named values of a record, including its exception."""
        values: dict[str, Any] = {}
        identifier = _OPERATION.get()
        if identifier:
            values["operation"] = identifier
        for name, value in getattr(record, "fields", {}).items():
            values[name] = _loggable(value)
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
    """Return the text with each control character replaced by a backslash escape."""
    return _CONTROL.sub(lambda found: _SHORT_ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04x}", text)


def _shortened(text: str, longest: int = _LONGEST) -> str:
    """Return the text, or its beginning and end if it has more than ``longest`` characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}…[{len(text) - 2 * half} characters]…{text[-half:]}"


def _as_json(value: Any) -> str:
    """Return the value as JSON in one line, ASCII only."""
    return json.dumps(value, default=str, separators=(",", ":")).replace("\x7f", "\\u007f")


def _loggable(value: Any) -> Any:
    """Return the value, or a shortened string if its text is too long."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else _as_json(value)
    return value if len(text) <= _LONGEST else _shortened(text)


class JsonFormatter(_Formatter):
    """Format a record as one JSON object per line: time (RFC 3339, UTC), level, message, logger, and the named values."""

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
        return _as_json(line)


class TextFormatter(_Formatter):
    """Format a record as one line with level, message, and name=value pairs. The journal adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        pairs = "".join(f" {name}={self._value(value)}" for name, value in self.parts(record).items())
        return f"{record.levelname.lower()}: {escape(_shortened(record.getMessage()))}{pairs}"

    @staticmethod
    def _value(value: Any) -> str:
        if isinstance(value, float):  # most values of a claim's line are numbers
            return repr(value)
        text = value if isinstance(value, str) else _as_json(value)
        return _as_json(text) if not text or _QUOTED.search(text) else text


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
    """Log the state of an object only when it changes."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: str | None = None

    def report(self, state: str, *, level: int = logging.INFO, **values: Any) -> bool:
        """Log ``state`` if it differs from the previous one, and return whether it differs."""
        if state == self._last:
            return False
        self._last = state
        self._logger.log(level, state, extra=fields(**values))
        return True
