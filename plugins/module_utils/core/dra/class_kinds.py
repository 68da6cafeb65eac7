# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Determine the kind of a DeviceClass's devices from its selectors, if it is certain. No side effects.

A device belongs to a class if all selectors are true for it, so a condition in one of them is true for every device of
the class. Only this part of CEL is parsed: conditions joined by ``&&``, one of which compares the attribute that
distinguishes a vendor's kinds with a string. Expressions with alternatives or complex strings give no result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Maps a driver to the kind (Offer.kind) of devices, by the attribute's name without the driver's domain and its value.
DeviceTypes = Mapping[str, Mapping[tuple[str, str], str]]

_GROUP, _CLASS = "resource.k8s.io/", "DeviceClass"
_ATTRIBUTE = r"device\.attributes\[(?P<q1>['\"])(?P<driver>[a-z0-9.-]+)(?P=q1)\]\.(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
_TEXT = r"(?P<q2>['\"])(?P<value>[^'\"]*)(?P=q2)"
_CONDITIONS = tuple(re.compile(rf"{one}\s*==\s*{other}") for one, other in ((_ATTRIBUTE, _TEXT), (_TEXT, _ATTRIBUTE)))
#: Marks with which quotes may not end a string, or text is not a string.
_NOT_PLAIN = ("\\", "'''", '"""', "//")
_OPENING, _CLOSING = "([{", ")]}"


def kinds_of_classes(documents: Iterable[Any], types: DeviceTypes) -> dict[str, str]:
    """Return the kinds of the devices of the DeviceClasses in some manifests, by class name.

    Uncertain classes are omitted.
    """
    found = {}
    for document in _classes(documents):
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        kind = kind_of_class(document, types)
        if isinstance(name, str) and kind is not None:
            found[name] = kind
    return found


def kind_of_class(document: Mapping[str, Any], types: DeviceTypes) -> str | None:
    """Return the kind of a DeviceClass's devices; None if its selectors do not determine it."""
    spec = document.get("spec")
    selectors = spec.get("selectors") if isinstance(spec, Mapping) else None
    kinds = set()
    for selector in selectors if isinstance(selectors, list) else ():
        cel = selector.get("cel") if isinstance(selector, Mapping) else None
        expression = cel.get("expression") if isinstance(cel, Mapping) else None
        if isinstance(expression, str):
            kinds |= {kind for condition in conditions(expression) if (kind := _kind(condition, types)) is not None}
    return kinds.pop() if len(kinds) == 1 else None


def conditions(expression: str) -> list[str]:
    """Return the conditions that must all be true for a CEL expression to be true; empty if it cannot be parsed."""
    if any(mark in expression for mark in _NOT_PLAIN):
        return []
    found, begin, depth, quote = [], 0, 0, ""
    for place, letter in enumerate(expression):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _OPENING or letter in _CLOSING:
            depth += 1 if letter in _OPENING else -1
        elif depth == 0 and (letter == "?" or expression.startswith("||", place)):
            return []
        elif depth == 0 and expression.startswith("&&", place):
            found.append(expression[begin:place])
            begin = place + 2
    if quote or depth:
        return []
    return [each.strip() for each in (*found, expression[begin:])]


def _classes(documents: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for document in documents:
        if not isinstance(document, Mapping):
            continue
        items = document.get("items")
        if isinstance(items, list):
            yield from _classes(items)
        elif document.get("kind") == _CLASS and str(document.get("apiVersion")).startswith(_GROUP):
            yield document


def _kind(condition: str, types: DeviceTypes) -> str | None:
    for form in _CONDITIONS:
        found = form.fullmatch(condition)
        if found is not None:
            return types.get(found["driver"], {}).get((found["name"], found["value"]))
    return None
