# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The part of CEL that most selectors of devices are made of; whatever else there is, is said not to have been evaluated.

``device.driver == 'd'``, ``device.attributes['d'].name == value`` and its comparisons, ``device.capacity['d'].name.compareTo(
quantity('40Gi')) >= 0``, ``has(device.attributes['d'].name)``, ``'name' in device.attributes['d']``, joined by &&. The scheduler evaluates all of CEL.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..core.published import attribute_of
from ..core.quantity import compare

_VALUE = r"(?P<value>'[^']*'|\"[^\"]*\"|-?\d+|true|false)"
_COMPARES: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_DRIVER = re.compile(r"device\.driver (?P<compare>==|!=) " + _VALUE)
_ATTRIBUTE = re.compile(
    r"device\.attributes\[['\"](?P<domain>[^'\"]+)['\"]\]\.(?P<name>\w+) (?P<compare>==|!=|>=|<=|>|<) " + _VALUE
)
_CAPACITY = re.compile(
    r"device\.capacity\[['\"](?P<domain>[^'\"]+)['\"]\]\.(?P<name>\w+)\.compareTo\(quantity\(['\"](?P<quantity>[^'\"]+)['\"]\)\)"
    r" (?P<compare>==|!=|>=|<=|>|<) 0"
)
_HAS = re.compile(r"(?P<absent>!)?has\(device\.attributes\[['\"](?P<domain>[^'\"]+)['\"]\]\.(?P<name>\w+)\)")
_PRESENCE = re.compile(
    r"(?P<absent>!)?\(?['\"](?P<name>\w+)['\"] in device\.attributes\[['\"](?P<domain>[^'\"]+)['\"]\]\)?"
)


class _Version(str):
    """A semantic version, which CEL compares in its own way."""


def fits(expression: str, device: Mapping[str, Any], driver: str) -> bool | None:
    """Whether a selector is true for a device of a slice; None for one that is not evaluated here."""
    answers = [_term(" ".join(term.split()), device, driver) for term in expression.split("&&")]
    if False in answers:
        return False
    return None if None in answers else True


def _term(text: str, device: Mapping[str, Any], driver: str) -> bool | None:
    found = _DRIVER.fullmatch(text)
    if found:
        return _COMPARES[found["compare"]](driver, _literal(found["value"]))
    found = _PRESENCE.fullmatch(text) or _HAS.fullmatch(text)
    if found:
        return (_attribute(device, driver, found["domain"], found["name"]) is not None) != bool(found["absent"])
    found = _ATTRIBUTE.fullmatch(text)
    if found:
        value, wanted = _attribute(device, driver, found["domain"], found["name"]), _literal(found["value"])
        if isinstance(value, _Version):
            return None
        if type(value) is not type(wanted):
            return False  # the scheduler takes an error for no
        return _COMPARES[found["compare"]](value, wanted)
    found = _CAPACITY.fullmatch(text)
    if found:
        capacity = attribute_of(device.get("capacity") or {}, driver, f"{found['domain']}/{found['name']}")
        try:
            return capacity is not None and _COMPARES[found["compare"]](
                compare(str(capacity["value"]), found["quantity"]), 0
            )
        except ValueError:
            return None
    return None


def _attribute(device: Mapping[str, Any], driver: str, domain: str, name: str) -> Any:
    entry = attribute_of(device.get("attributes") or {}, driver, f"{domain}/{name}")
    if entry is None:
        return None
    return _Version(entry["version"]) if "version" in entry else next(iter(entry.values()), None)


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return text[1:-1] if text[0] in "'\"" else int(text)
