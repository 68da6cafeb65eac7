# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the devices of a DeviceClass are, read from its selectors where that is certain. Pure.

A device is of a class when all its selectors are true for it, so what one of them demands is true of every device of the class. Of CEL
only that is read: conditions that are joined by ``&&``, one of which holds the attribute by which a vendor tells its kinds apart against a text.
Whatever has an alternative, or a text that is not plain, says nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: By driver: which kind (see Offer.kind) devices are whose attribute, by its name without the driver's, has a value.
DeviceTypes = Mapping[str, Mapping[tuple[str, str], str]]

_GROUP, _CLASS = "resource.k8s.io/", "DeviceClass"
_ATTRIBUTE = r"device\.attributes\[(?P<q1>['\"])(?P<driver>[a-z0-9.-]+)(?P=q1)\]\.(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
_TEXT = r"(?P<q2>['\"])(?P<value>[^'\"]*)(?P=q2)"
_CONDITIONS = tuple(re.compile(rf"{one}\s*==\s*{other}") for one, other in ((_ATTRIBUTE, _TEXT), (_TEXT, _ATTRIBUTE)))
#: Where quotes do not simply end a text, or a text is none.
_NOT_PLAIN = ("\\", "'''", '"""', "//")
_OPENING, _CLOSING = "([{", ")]}"


def kinds_of_classes(documents: Iterable[Any], types: DeviceTypes) -> dict[str, str]:
    """What the devices of the DeviceClasses among some manifests are, by the class's name; those of which it is not certain are left out."""
    found = {}
    for document in _classes(documents):
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        kind = kind_of_class(document, types)
        if isinstance(name, str) and kind is not None:
            found[name] = kind
    return found


def kind_of_class(document: Mapping[str, Any], types: DeviceTypes) -> str | None:
    """What the devices of a DeviceClass are; None where its selectors do not say so for certain."""
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
    """Return the conditions that all have to be true for an expression of CEL to be; none where it is not read."""
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
