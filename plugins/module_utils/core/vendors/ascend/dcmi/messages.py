# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The protocol of the DCMI helper: one JSON object per line.

A request names a method of ``Source``. The reply has its result or its error. METHODS lists the allowed methods with
the types of their arguments. All other requests are rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Callable

from .... import errors
from ....errors import AcceleratorError, InUse
from ....model import Process
from ..attributes import SuperPod
from ..readings import NETWORK, Condition, Identity, SliceReading, SliceReadings, Told, Work
from .dcmi import Spot

SOCKET = "/run/dra-accelerators/dcmi/socket"
#: The version of the protocol. Helper and client of different versions reject each other.
VERSION = 1
#: The maximum number of bytes of a request and of a reply.
LONGEST_REQUEST, LONGEST_REPLY = 4096, 1 << 20
OPEN = "open"
#: The kinds of deadlines.
READ, CHANGE, RESET = "read", "change", "reset"


@dataclass(frozen=True)
class Method:
    """A method of ``Source`` that clients may call: the types of its arguments, and its kind of deadline."""

    arguments: tuple[str, ...] = ()
    deadline: str = READ


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        OPEN: Method(),
        "driver_version": Method(),
        "spots": Method(),
        "uuid": Method(("spot",)),
        "identity": Method(("spot",)),
        "link": Method(("spot", "spot")),
        "slices": Method(("spot",)),
        "free": Method(("spot",)),
        "template_table": Method(("spot",)),
        "is_shared": Method(("spot",)),
        "processes": Method(("spot",)),
        "condition": Method(("spot", "parts")),
        "work": Method(("spot",)),
        "work_of_slice": Method(("spot", "number")),
        "create": Method(("spot", "template", "number", "group"), CHANGE),
        "destroy": Method(("spot", "number"), CHANGE),
        "reset": Method(("spot",), RESET),
        "rescan": Method(("spot",), CHANGE),
        "associated_card": Method(("spot",)),
        "is_started": Method(("spot",)),
        "hindrance": Method(("spot",)),
    }
)
_DATA = {
    each.__name__: each
    for each in (Spot, Identity, SuperPod, SliceReading, SliceReadings, Condition, Work, Told, Process)
}
_ERRORS: Mapping[str, type[AcceleratorError]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, AcceleratorError)
}


class InvalidRequest(AcceleratorError):
    """A request or a reply does not conform to the protocol."""

    default_code = "invalid-request"


def request(method: str, arguments: Sequence[Any]) -> bytes:
    """Return the line of a request."""
    plain = [[each.card, each.chip] if isinstance(each, Spot) else pack(each) for each in arguments]
    return _line({"version": VERSION, "method": method, "arguments": plain})


def parse_request(line: bytes) -> tuple[str, tuple[Any, ...]]:
    """Return the method and the arguments of a request. Raises InvalidRequest."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The request is not JSON") from error
    if not isinstance(document, dict) or set(document) != {"version", "method", "arguments"}:
        raise InvalidRequest("The request is not a mapping with version, method, and arguments")
    if document["version"] != VERSION:
        raise InvalidRequest(
            f"The request has version {document['version']!r} of the protocol, expected {VERSION}",
            hint="Run the role dra.accelerators.dra_driver again, which restarts driver and helper.",
        )
    name, given = document["method"], document["arguments"]
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise InvalidRequest("The request names no method of the protocol")
    if not isinstance(given, list) or len(given) != len(method.arguments):
        raise InvalidRequest(f"{name} has {len(method.arguments)} arguments")
    return name, tuple(_argument(name, kind, value) for kind, value in zip(method.arguments, given))


def result(value: Any) -> bytes:
    """Return the line of a reply with a result."""
    return _line({"result": pack(value)})


def failure(error: AcceleratorError) -> bytes:
    """Return the line of a reply with an error."""
    kind = next(
        (name for name in (each.__name__ for each in type(error).__mro__) if name in _ERRORS), "AcceleratorError"
    )
    document: dict[str, Any] = {"class": kind, "message": error.message, "hint": error.hint, "code": error.code}
    if isinstance(error, InUse):
        document["pids"] = list(error.pids)
    return _line({"error": document})


def event(fault_event: Told) -> bytes:
    """Return the line of a fault event."""
    return _line({"event": pack(fault_event)})


def parse_reply(line: bytes) -> Any:
    """Return the result of a reply. Raises the error of the reply, or InvalidRequest."""
    try:
        document = json.loads(line)
        if "error" in document:
            details = dict(document["error"])
            kind = _ERRORS[details.pop("class")]
            raise kind(details.pop("message"), **details)
        return unpack(document["event"] if "event" in document else document["result"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"The reply of the DCMI helper is not of the protocol: {line[:200]!r}") from error


def pack(value: Any) -> Any:
    """Return a value of ``readings`` as a JSON value."""
    if isinstance(value, Fraction):
        return {"type": "Fraction", "fields": str(value)}
    if is_dataclass(value):
        return {
            "type": type(value).__name__,
            "fields": {each.name: pack(getattr(value, each.name)) for each in fields(value)},
        }
    if isinstance(value, Mapping):
        return {"type": "mapping", "fields": {key: pack(each) for key, each in value.items()}}
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        return [pack(each) for each in value]
    return value


def unpack(value: Any) -> Any:
    """Return the value of a ``pack`` result. Lists become tuples. Raises KeyError, TypeError, or ValueError."""
    if isinstance(value, list):
        return tuple(unpack(each) for each in value)
    if not isinstance(value, dict):
        return value
    kind, content = value["type"], value["fields"]
    if kind == "Fraction":
        return Fraction(content)
    named = {key: unpack(each) for key, each in content.items()}
    return named if kind == "mapping" else _DATA[kind](**named)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _is_number(value: Any, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest


_CHECKS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "spot": lambda value: (
            isinstance(value, list) and len(value) == 2 and all(_is_number(each, 65535) for each in value)
        ),
        "number": lambda value: _is_number(value, (1 << 31) - 1),
        "group": lambda value: value is None or _is_number(value, 255),
        "parts": lambda value: isinstance(value, list) and all(each == NETWORK for each in value) and len(value) <= 1,
        "template": lambda value: isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,31}", value) is not None,
    }
)


def _argument(method: str, kind: str, value: Any) -> Any:
    if not _CHECKS[kind](value):
        raise InvalidRequest(f"An argument of {method} is not a {kind}")
    return Spot(*value) if kind == "spot" else tuple(value) if kind == "parts" else value
