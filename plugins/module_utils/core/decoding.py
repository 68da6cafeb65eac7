# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decode JSON from the Kubernetes API so that one bad object affects no other object.

Users can store values that Python's ``json`` module cannot decode or that later code cannot process: thousands of nested
arrays, integers of thousands of digits, numbers that a float cannot hold, unpaired surrogates, bytes that are not UTF-8. The API
server returns these fields as it received them: ``opaque.parameters`` and ``status.devices[].data`` of claims, and ``fieldsV1`` of ``managedFields``.

Facts: ``runtime.RawExtension`` of k8s.io/apimachinery; k8s.io/api/resource/v1/types.go; CPython's ``Modules/_json.c``, whose
recursion limit differs between versions.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union
from urllib.parse import unquote

from .errors import AcceleratorError

Json = dict[str, Any]
Path = tuple[Union[str, int], ...]
#: Nested objects and arrays of one API object. The deepest fields of the Kubernetes API, in managedFields, have about 20.
MAX_LEVELS = 100
#: Digits of an integer. Kubernetes' own integers have at most 19, and one of more than 308 cannot become a float.
MAX_DIGITS = 300
#: Objects that one warning names, and characters of each name or reason.
MAX_NAMED, MAX_CHARACTERS = 20, 300

# A list has two levels around each object, a watch event one.
_OUTER_LEVELS = 2
# A string without an end is one token up to the end of the text. Otherwise each escaped quote in it would be tried as the start of a string.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
# The API server writes the driver before the parameters. Inside a JSON string every quote has a backslash.
_OPAQUE = re.compile(r'(?<!\\)"opaque":\s*\{\s*"driver":\s*"([^"\\]*)",\s*"parameters":\s*(?=[\[{])')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_CONTAINERS = (dict, list)


class UndecodableObject(AcceleratorError, ValueError):
    """One API object cannot be decoded."""

    default_code = "undecodable-object"


@dataclass(frozen=True)
class SkippedObject:
    """An object that was left out of a list or a watch: its kind and name, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name[:MAX_CHARACTERS]} ({self.reason[:MAX_CHARACTERS]})"


@dataclass(frozen=True)
class Decoded:
    """A decoded answer. ``value`` lacks the objects of ``skipped``; a watch event keeps the metadata of its skipped object."""

    value: Any
    skipped: tuple[SkippedObject, ...] = ()


class _NotDecoded:
    """Replaces a value that was not decoded, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


_TOO_DEEP = _NotDecoded(f"nested more than {MAX_LEVELS} levels deep")
_TOO_LONG = _NotDecoded(f"an integer of more than {MAX_DIGITS} digits")
_TOO_LARGE = _NotDecoded("a number beyond the range of a float (1.8e308)")


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(_TOO_LONG.reason)
    return int(digits)


def _float(digits: str) -> float:
    """Return the number. Raises ValueError where float() would return infinity, which JSON does not have."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(_TOO_LARGE.reason)
    return value


def _parse_or_replace(parse: Callable[[str], Any], replacement: _NotDecoded) -> Callable[[str], Any]:
    def parse_number(digits: str) -> Any:
        try:
            return parse(digits)
        except ValueError:
            return replacement

    return parse_number


# CPython's scanner keeps the interpreter lock until it calls a Python function. For texts above this number of characters it calls one after
# each object, so that other threads, such as one with an event loop, can run during the decoding.
_LONG_TEXT = 1024 * 1024


def _return_unchanged(value: Json) -> Json:
    return value


_FAST_DECODER = json.JSONDecoder(parse_constant=_reject_constant, parse_int=_integer, parse_float=_float)
_YIELDING_DECODER = json.JSONDecoder(
    parse_constant=_reject_constant, parse_int=_integer, parse_float=_float, object_hook=_return_unchanged
)
# Replaces each value that cannot be used by a _NotDecoded. JSON has no NaN, so NaN stands for the removed parts of the text.
_REPLACING_DECODER = json.JSONDecoder(
    parse_constant=lambda _name: _TOO_DEEP,
    parse_int=_parse_or_replace(_integer, _TOO_LONG),
    parse_float=_parse_or_replace(_float, _TOO_LARGE),
    object_hook=_return_unchanged,
)


def loads(text: str) -> Any:
    """Decode JSON that a user or a node wrote into one text, such as an annotation.

    Raises ValueError for text that is not JSON or that ``decode`` would skip.
    """
    value, checked = _decode_text(text, MAX_LEVELS)
    if not checked:
        _require_usable(value)
    return value


def decode(payload: bytes, *, opaque_of: Collection[str] | None = None) -> Decoded:
    """Decode an API object, a list, or a watch event.

    ``opaque_of`` names the drivers whose opaque parameters of claims are decoded; those of other drivers become ``{}``. None
    decodes the parameters of all drivers. Objects that cannot be decoded are left out of a list, and a watch event keeps only
    their metadata. Raises ValueError for a payload that is not JSON, UndecodableObject for a single object.
    """
    text = payload.decode("utf-8", "replace")
    if opaque_of is not None:
        text = _without_opaque_parameters(text, opaque_of)
    value, checked = _decode_text(text, MAX_LEVELS + _OUTER_LEVELS)
    if checked:
        return Decoded(value)
    if not isinstance(value, dict):
        _require_usable(value)
        return Decoded(value)
    if isinstance(value.get("items"), list):
        return _repaired_list(value, opaque_of)
    if isinstance(value.get("object"), dict) and isinstance(value.get("type"), str):
        return _repaired_event(value, opaque_of)
    reason = _repair(value, opaque_of)
    if reason:
        raise UndecodableObject(
            f"{SkippedObject(_kind_and_name(value), reason)} cannot be decoded",
            hint="Delete it, or correct the named field.",
        )
    return Decoded(value)


def status_reason(answer: Mapping[str, Any], path: str) -> str:
    """Return the reason of a Status object, with which the API server at ``path`` rejected a request; an empty string for other answers.

    Other programs, such as load balancers, can answer with status 404 too. So the reason NotFound counts only if ``details.name`` is the
    name of the object or of its namespace in the path (k8s.io/apimachinery NewNotFound).
    """
    if answer.get("kind") != "Status":
        return ""
    reason, details = str(answer.get("reason") or ""), answer.get("details")
    name = details.get("name") if isinstance(details, dict) else None
    return "" if reason == "NotFound" and name not in unquote(path).split("/") else reason


def describe_skipped(skipped: Sequence[SkippedObject]) -> str:
    """Return one sentence with the skipped objects and the remedy."""
    named = "; ".join(map(str, skipped[:MAX_NAMED]))
    more = f"; and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
    return f"Skipped API objects that cannot be decoded: {named}{more}. Delete them, or correct the named fields."


def _decode_text(text: str, levels: int) -> tuple[Any, bool]:
    """Decode a text, and return whether the whole value is known to be usable. Raises ValueError for text that is not JSON."""
    try:
        value = (_YIELDING_DECODER if len(text) > _LONG_TEXT else _FAST_DECODER).decode(text)
        if not _is_nested_deeper(value, levels) and not _SURROGATE.search(text):
            return value, True
    except (ValueError, RecursionError):
        pass  # Not JSON, or nested too deep, or a long integer: the bounded decoder distinguishes these.
    return _REPLACING_DECODER.decode(_replace_deep_containers(text, levels)), False


def _is_nested_deeper(value: Any, levels: int) -> bool:
    """Return whether containers are nested more than ``levels`` deep. Reads one level after the other, without recursion."""
    found = [value] if isinstance(value, _CONTAINERS) else []
    for _level in range(levels):
        if not found:
            return False
        inner = itertools.chain.from_iterable(each.values() if isinstance(each, dict) else each for each in found)
        found = [each for each in inner if isinstance(each, _CONTAINERS)]
    return bool(found)


def _replace_deep_containers(text: str, levels: int) -> str:
    """Return the text with NaN in place of every container below this many levels."""
    parts: list[str] = []
    depth = done = 0
    for token in _TOKEN.finditer(text):
        sign = text[token.start()]
        if sign in "[{":
            depth += 1
            if depth == levels + 1:
                parts += (text[done : token.start()], "NaN")
        elif sign in "]}":
            if depth == levels + 1:
                done = token.end()
            depth -= 1
    if depth > levels:
        raise ValueError("an array or object has no end")
    return "".join((*parts, text[done:]))


def _without_opaque_parameters(text: str, opaque_of: Collection[str]) -> str:
    """Return the text with ``{}`` in place of the opaque parameters of other drivers."""
    parts: list[str] = []
    done = 0
    for found in _OPAQUE.finditer(text):
        if found.start() < done or found[1] in opaque_of:
            continue
        depth = 0
        for token in _TOKEN.finditer(text, found.end()):
            sign = text[token.start()]
            depth += (sign in "[{") - (sign in "]}")
            if depth == 0:
                parts += (text[done : found.end()], "{}")
                done = token.end()
                break
        else:
            break  # The parameters have no end, so the text is not JSON.
    return "".join((*parts, text[done:]))


def _require_usable(value: Any) -> None:
    for path, reason in _problems(value):
        raise ValueError(f"{_path_text(path) or 'the value'} is {reason}")


def _repaired_event(value: Json, opaque_of: Collection[str] | None) -> Decoded:
    item = value["object"]
    _require_usable({**value, "object": None})
    reason = _repair(item, opaque_of)
    if not reason:
        return Decoded(value)
    kind = {key: item[key] for key in ("kind", "apiVersion") if isinstance(item.get(key), str)}
    stub = {**kind, "metadata": _identifying_metadata(item)}
    return Decoded({**value, "object": stub}, (SkippedObject(_kind_and_name(item), reason),))


def _repaired_list(value: Json, opaque_of: Collection[str] | None) -> Decoded:
    kind = str(value.get("kind") or "").removesuffix("List")
    _require_usable({**value, "items": None})
    items, skipped = [], []
    for item in value["items"]:
        reason = _repair(item, opaque_of)
        if reason:
            skipped.append(SkippedObject(_kind_and_name(item, kind), reason))
        else:
            items.append(item)
    return Decoded({**value, "items": items}, tuple(skipped))


def _repair(item: Any, opaque_of: Collection[str] | None) -> str:
    """Replace undecodable values that this collection does not read by ``{}``. Return the first other problem, or ""."""
    for path, reason in list(_problems(item)):
        unread_path = _unread_part(path, item, opaque_of)
        if not unread_path:
            return f"{_path_text(path) or 'the value'} is {reason}"
        holder = item
        for key in unread_path[:-1]:
            holder = holder[key]
        holder[unread_path[-1]] = {}
    return ""


def _unread_part(path: Path, item: Any, opaque_of: Collection[str] | None) -> Path:
    """Return the beginning of a path that leads to a value that this collection never reads; () if it reads the value."""
    start = 2 if path[:1] == ("request",) else 0  # an AdmissionReview
    below = path[start:]
    if below[:2] in (("metadata", "managedFields"), ("status", "devices")) and below[3:4] in (("fieldsV1",), ("data",)):
        return path[: start + 4]
    for prefix in (("spec", "devices"), ("spec", "spec", "devices"), ("status", "allocation", "devices")):
        end = len(prefix) + 4
        names = below[: len(prefix)], below[len(prefix) : len(prefix) + 1], below[end - 2 : end]
        if opaque_of is not None and names == (prefix, ("config",), ("opaque", "parameters")):
            holder = item
            for key in path[: start + end - 1]:
                holder = holder[key]
            return path[: start + end] if holder.get("driver") not in opaque_of else ()
    return ()


def _problems(value: Any) -> Iterator[tuple[Path, str]]:
    """Yield the path of each value that cannot be used, and the reason."""
    pending: list[tuple[Path, Any]] = [((), value)]
    while pending:
        path, each = pending.pop()
        if isinstance(each, _NotDecoded):
            yield path, each.reason
        elif isinstance(each, str):
            if not _is_text(each):
                yield path, "text with an unpaired surrogate"
        elif isinstance(each, dict):
            if not all(map(_is_text, each)):
                yield path, "an object with an unpaired surrogate in a key"
            pending += [((*path, key), inner) for key, inner in each.items()]
        elif isinstance(each, list):
            pending += [((*path, number), inner) for number, inner in enumerate(each)]


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _path_text(path: Path) -> str:
    named = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path[:12])
    return ascii((named + ("..." if len(path) > 12 else "")).removeprefix("."))[1:-1]


def _identifying_metadata(item: Any) -> dict[str, str]:
    found = item.get("metadata") if isinstance(item, Mapping) else None
    metadata = found if isinstance(found, Mapping) else {}
    names = ("namespace", "name", "generateName", "uid", "resourceVersion")
    return {name: metadata[name] for name in names if isinstance(metadata.get(name), str)}


def _kind_and_name(item: Any, kind: str = "") -> str:
    if isinstance(item, Mapping) and isinstance(item.get("request"), Mapping):
        item = item["request"].get("object")  # an AdmissionReview
    metadata = _identifying_metadata(item)
    own = item.get("kind") if isinstance(item, Mapping) else None
    name = metadata.get("name") or metadata.get("generateName") or "without a name"
    return f"{own if isinstance(own, str) else kind or 'object'} " + "/".join(
        filter(None, (metadata.get("namespace"), name))
    )
