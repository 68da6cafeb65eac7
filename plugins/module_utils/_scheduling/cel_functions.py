# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The CEL functions of Kubernetes: quantities, versions, lists, sets, and regular expressions.

Facts: k8s.io/apiserver/pkg/cel (environment, library/quantity.go, semverlib.go, lists.go, regex.go), 1.34 to 1.37.
Quantities and versions are maps with one key that expressions do not use. Regular expressions use RE2, as in Kubernetes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ..core import quantity

with contextlib.suppress(ImportError):  # the importing module reports the missing package
    from cel_expr_python import cel  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from cel_expr_python.ext import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        ext_bindings,
        ext_optional,
        ext_strings,
    )

try:
    import re2  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    re2 = None

RE2_PACKAGE = "google-re2"
QUANTITY, VERSION = "@quantity", "@version"
_LARGEST, _SMALLEST = 2**63 - 1, -(2**63)
_IDENTIFIER = r"(?:0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)"
_SEMVER = re.compile(
    rf"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-({_IDENTIFIER}(?:\.{_IDENTIFIER})*))?(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?"
)


def quantity_map(value: Fraction) -> dict[str, str]:
    return {QUANTITY: f"{value.numerator}/{value.denominator}"}


def _amount(found: Any) -> Fraction:
    if not isinstance(found, Mapping) or QUANTITY not in found:
        raise ValueError("no such overload")
    return Fraction(found[QUANTITY])


def _parsed_quantity(text: str) -> dict[str, str]:
    return quantity_map(quantity.parse(text))


def version_map(text: str) -> dict[str, str]:
    found = _SEMVER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no semantic version")
    return {VERSION: f"{found[1]}.{found[2]}.{found[3]}" + (f"-{found[4]}" if found[4] else "")}


def _normalized(text: str) -> str:
    parts = text.removeprefix("v").split(".", 2)
    for place, part in enumerate(parts):
        if len(part) > 1:
            bare = part.lstrip("0")
            parts[place] = bare if bare[:1].isdecimal() else f"0{bare}"
    if len(parts) < 3 and any(sign in parts[-1] for sign in "+-"):
        raise ValueError("a short version cannot have a prerelease or build metadata")
    return ".".join((*parts, "0", "0")[:3] if len(parts) < 3 else parts)


def _rank(found: Any) -> tuple[Any, ...]:
    """Return the sort key of a version. A prerelease sorts before its release, and numeric identifiers before alphanumeric ones."""
    if not isinstance(found, Mapping) or VERSION not in found:
        raise ValueError("no such overload")
    core, _dash, prerelease = str(found[VERSION]).partition("-")
    words = tuple(
        (0, int(each), "") if each.isdecimal() else (1, 0, each) for each in prerelease.split(".") if prerelease
    )
    return (*map(int, core.split(".")), not prerelease, words)


def _order(left: Any, right: Any) -> int:
    both = [left, right]
    if all(isinstance(each, Mapping) and VERSION in each for each in both):
        first, second = _rank(left), _rank(right)
        return (first > second) - (first < second)
    one, other = _amount(left), _amount(right)
    return (one > other) - (one < other)


def _whole(found: Any) -> int:
    value = _amount(found)
    if value.denominator != 1 or not _SMALLEST <= value <= _LARGEST:
        raise ValueError("cannot convert value to integer")
    return int(value)


def _succeeds(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        function(*arguments)
    except ValueError:
        return False
    return True


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return isinstance(left, bool) and isinstance(right, bool) and left == right
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def _has(items: Sequence[Any], item: Any) -> bool:
    return any(_same(each, item) for each in items)


def _includes(target: Any, item: Any) -> bool:
    return _has(target, item) if isinstance(target, (list, tuple)) else _same(target, item)


def _distinct(items: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for each in items:
        if not _has(found, each):
            found.append(each)
    return found


def _flat(items: Sequence[Any]) -> list[Any]:
    return [each for item in items for each in (item if isinstance(item, (list, tuple)) else [item])]


def _slice(items: Sequence[Any], start: int, end: int) -> list[Any]:
    if not 0 <= start <= end <= len(items):
        raise ValueError(f"cannot slice({start}, {end}), list is length {len(items)}")
    return list(items[start:end])


def _least(items: Sequence[Any], pick: Callable[..., Any]) -> Any:
    if not items:
        raise ValueError("min or max called on empty list")
    return pick(items)


def _no_version(_text: str) -> bool:
    raise ValueError("a version is not a text (no such overload)")


NO_RE2 = f"find and findAll need the Python package {RE2_PACKAGE}"


def _compiled(pattern: str) -> Any:
    if re2 is None:
        raise ValueError(NO_RE2)
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise ValueError(f"invalid regular expression: {error}") from error


def _matched(text: str, pattern: str) -> str:
    found = _compiled(pattern).search(text)
    return str(found[0]) if found else ""


def _all_matched(text: str, pattern: str, most: int = -1) -> list[str]:
    found = (str(each[0]) for each in _compiled(pattern).finditer(text))
    return list(found if most < 0 else itertools.islice(found, most))


def environment() -> Any:
    """Return the CEL environment of Kubernetes. Types are not checked: the API server has checked stored expressions."""
    kinds = cel.Type
    text, whole, truth, some = kinds.STRING, kinds.INT, kinds.BOOL, kinds.DYN
    own, items = kinds.Map(some, some), kinds.List(some)
    scalars = (text, whole, truth, own)

    def function(name: str, *forms: tuple[bool, list[Any], Any, Callable[..., Any]]) -> Any:
        overloads = [
            cel.Overload(f"{name}_{number}", return_type=gives, parameters=takes, is_member=member, impl=does)
            for number, (member, takes, gives, does) in enumerate(forms)
        ]
        return cel.FunctionDecl(name, overloads)

    functions = [
        function("quantity", (False, [text], own, _parsed_quantity)),
        function("isQuantity", (False, [text], truth, lambda one: _succeeds(quantity.parse, one))),
        function("sign", (True, [own], whole, lambda one: (_amount(one) > 0) - (_amount(one) < 0))),
        function("isInteger", (True, [own], truth, lambda one: _succeeds(_whole, one))),
        function("asInteger", (True, [own], whole, _whole)),
        function("asApproximateFloat", (True, [own], kinds.DOUBLE, lambda one: float(_amount(one)))),
        function(
            "add",
            (True, [own, own], own, lambda one, other: quantity_map(_amount(one) + _amount(other))),
            (True, [own, whole], own, lambda one, other: quantity_map(_amount(one) + other)),
        ),
        function(
            "sub",
            (True, [own, own], own, lambda one, other: quantity_map(_amount(one) - _amount(other))),
            (True, [own, whole], own, lambda one, other: quantity_map(_amount(one) - other)),
        ),
        function(
            "semver",
            (False, [text], own, version_map),
            (False, [text, truth], own, lambda one, loose: version_map(_normalized(one) if loose else one)),
        ),
        function(
            "isSemver",
            (False, [text], truth, lambda one: _succeeds(version_map, one)),
            (
                False,
                [text, truth],
                truth,
                lambda one, loose: _succeeds(lambda: version_map(_normalized(one) if loose else one)),
            ),
        ),
        *(
            function(name, (True, [own], whole, lambda one, place=place: _rank(one)[place]))
            for place, name in enumerate(("major", "minor", "patch"))
        ),
        function("compareTo", (True, [own, own], whole, _order)),
        function("isGreaterThan", (True, [own, own], truth, lambda one, other: _order(one, other) > 0)),
        function("isLessThan", (True, [own, own], truth, lambda one, other: _order(one, other) < 0)),
        function("noVersion", (False, [text], truth, _no_version)),
        function("sets.contains", (False, [items, items], truth, lambda a, b: all(_has(a, each) for each in b))),
        function("sets.intersects", (False, [items, items], truth, lambda a, b: any(_has(a, each) for each in b))),
        function(
            "sets.equivalent",
            (
                False,
                [items, items],
                truth,
                lambda a, b: all(_has(a, each) for each in b) and all(_has(b, each) for each in a),
            ),
        ),
        function("isSorted", (True, [items], truth, lambda one: list(one) == sorted(one))),
        function("sum", (True, [items], some, sum)),
        function("min", (True, [items], some, lambda one: _least(one, min))),
        function("max", (True, [items], some, lambda one: _least(one, max))),
        function("distinct", (True, [items], items, _distinct)),
        function("flatten", (True, [items], items, _flat)),
        function("sort", (True, [items], items, sorted)),
        function("slice", (True, [items, whole, whole], items, _slice)),
        function("lists.range", (False, [whole], items, lambda one: list(range(one)))),
        function(
            "includes", *((True, [one, other], truth, _includes) for one in (*scalars, items) for other in scalars)
        ),
        function("find", (True, [text, text], text, _matched)),
        function(
            "findAll",
            (True, [text, text], items, _all_matched),
            (True, [text, text, whole], items, _all_matched),
        ),
    ]
    return cel.NewEnv(
        variables={"device": some},
        functions=functions,
        extensions=[ext_bindings.ExtBindings(), ext_optional.ExtOptional(), ext_strings.ExtStrings()],
    )
