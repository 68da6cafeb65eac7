# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Evaluates the CEL of selectors as Kubernetes does: Google's own CEL, with Kubernetes' functions for quantities, versions, lists and sets.

Facts: k8s.io/dynamic-resource-allocation/cel (what a device looks like in an expression) and k8s.io/apiserver/pkg/cel (environment, library/quantity.go,
semverlib.go, lists.go, regex.go), 1.34 to 1.37. Quantities and versions are maps with one key that no expression names.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from .core import quantity
from .core.allocation.objects import Device, Json, NotJudged, SelectorFailed
from .core.errors import AcceleratorError

try:
    from cel_expr_python import cel  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from cel_expr_python.ext import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        ext_bindings,
        ext_optional,
        ext_strings,
    )
except ImportError:
    HAS_CEL = False
    CEL_IMPORT_ERROR = traceback.format_exc()
else:
    HAS_CEL = True
    CEL_IMPORT_ERROR = ""

PACKAGE = "cel-expr-python"
LONGEST_EXPRESSION = 10 * 1024
QUANTITY, VERSION = "@quantity", "@version"
_LARGEST, _SMALLEST = 2**63 - 1, -(2**63)
_IDENTIFIER = r"(?:0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)"
_SEMVER = re.compile(
    rf"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-({_IDENTIFIER}(?:\.{_IDENTIFIER})*))?(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?"
)
#: A text in brackets, or before ``in``: which domains an expression may ask for.
_DOMAINS = re.compile(r"""\[\??\s*(?P<q>['"])(?P<a>[^'"]+)(?P=q)\s*\]|(?P<r>['"])(?P<b>[^'"]+)(?P=r)\s*in\b""")
#: A member that is compared with a text, which for a version is an error.
_COMPARED = re.compile(r"""(\.(?P<name>[A-Za-z_]\w*)\s*[=!]=\s*)(?P<text>"[^"\\]*"|'[^'\\]*')""")
#: What Kubernetes has and this does not.
_UNKNOWN_HERE = re.compile(
    r"\b(isIP|ip|isCIDR|cidr|isURL|url|transformList|transformMap|transformMapEntry|sortBy|authorizer|format\.\w+)\s*[(.]"
    r"|\.(all|exists|existsOne)\(\s*\w+\s*,\s*\w+\s*,|\]\s*\.(indexOf|lastIndexOf)\("
)


class NoCel(AcceleratorError):
    """The package that evaluates CEL is not there."""

    default_code = "missing-package"


class CelJudge:
    """Judges selectors; a device that looks as another one did is not asked again. Raises NoCel where the package is missing."""

    def __init__(self) -> None:
        if not HAS_CEL:
            raise NoCel(
                f"Selectors are written in CEL, and the Python package {PACKAGE} that evaluates it cannot be imported",
                hint=f"Install it where this runs, with Python 3.11 or newer: pip install {PACKAGE}",
            )
        self._environment: Any = _environment()
        self._programs: dict[str, Any] = {}
        self._answers: dict[tuple[str, str], Any] = {}
        self._views: dict[int, tuple[Device, dict[str, Any], str]] = {}

    def matches(self, expression: str, device: Device) -> bool:
        """Whether a selector is true of a device. Raises SelectorFailed, NotJudged."""
        found = self._evaluated(expression, device)
        if not isinstance(found, bool):
            raise SelectorFailed(
                f"selector {expression!r} on device {'/'.join(device.key)}: it gives {_word(found)}, expected true or false"
            )
        return found

    def value(self, expression: str, device: Device) -> Json:
        """What an expression makes of a device, as an attribute's value in the API's form. Raises SelectorFailed, NotJudged."""
        found = self._evaluated(expression, device)
        if isinstance(found, (list, tuple)):
            kinds = {next(iter(_attribute(each))) for each in found}
            kind = kinds.pop() if len(kinds) == 1 else "string"
            return {f"{kind}s": [next(iter(_attribute(each).values())) for each in found]}
        return _attribute(found)

    def problem(self, expression: str) -> str:
        """Return what is wrong with an expression as it is written; empty where nothing is."""
        if len(expression.encode()) > LONGEST_EXPRESSION:
            return f"it has {len(expression.encode())} bytes, {LONGEST_EXPRESSION} are the most"
        try:
            self._program(expression)
        except SelectorFailed as error:
            return str(error)
        return ""

    def _evaluated(self, expression: str, device: Device) -> Any:
        view, look = self._view(device)
        known = self._answers.get((expression, look))
        if known is None:
            known = self._answers[expression, look] = self._ask(expression, device, view)
        if isinstance(known, SelectorFailed):
            where = f"{known.message} on device {'/'.join(device.key)}"
            raise SelectorFailed(where, hint=known.hint, reason=known.reason)
        if isinstance(known, NotJudged):
            raise NotJudged(known.message)
        return known[0]

    def _ask(self, expression: str, device: Device, view: dict[str, Any]) -> Any:
        """The value in a tuple, or the error."""
        versions = {name.rpartition("/")[2] for name, each in device.attributes.items() if "version" in each}

        def compared(found: re.Match[str]) -> str:
            return f"{found[1]}noVersion({found['text']})" if found["name"] in versions else found[0]

        try:
            program = self._program(_COMPARED.sub(compared, expression) if versions else expression)
        except SelectorFailed as error:
            return error
        found = program.eval(data={"device": _with_domains(expression, view)})
        if found.type() in (cel.Type.ERROR, cel.Type.UNKNOWN):
            text = str(found.value())
            said = _said(text)
            if re.search("No matching overload|No value with name", text) and _UNKNOWN_HERE.search(expression):
                return NotJudged(f"selector {expression!r} uses what cannot be evaluated here ({said})")
            return SelectorFailed(f"selector {expression!r}: {said}", hint=_hint(said), reason=said)
        try:
            return (found.plain_value(),)
        except TypeError:
            return (None,)  # an optional, which is no answer of an expression

    def _program(self, expression: str) -> Any:
        known = self._programs.get(expression)
        if known is None:
            try:
                known = self._environment.compile(expression, disable_check=True)
            except RuntimeError as error:
                said = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ERROR: <input>:")
                known = SelectorFailed(
                    f"selector {expression!r} is not valid CEL, at {said}", reason=f"no valid CEL, at {said}"
                )
            self._programs[expression] = known
        if isinstance(known, SelectorFailed):
            raise SelectorFailed(known.message, hint=known.hint, reason=known.reason)
        return known

    def _view(self, device: Device) -> tuple[dict[str, Any], str]:
        known = self._views.get(id(device))
        if known is None:
            view = device_view(device)
            known = self._views[id(device)] = (device, view, json.dumps(view, sort_keys=True))
        return known[1], known[2]


def device_view(device: Device) -> dict[str, Any]:
    """Return a device as expressions see it: what has no domain is in the driver's."""
    attributes: dict[str, dict[str, Any]] = {}
    for name, value in device.attributes.items():
        domain, identifier = _split(name, device.driver)
        attributes.setdefault(domain, {})[identifier] = _attribute_value(value)
    capacity: dict[str, dict[str, Any]] = {}
    for name, entry in device.capacity.items():
        domain, identifier = _split(name, device.driver)
        capacity.setdefault(domain, {})[identifier] = _quantity(quantity.parse(entry["value"]))
    return {
        "driver": device.driver,
        "allowMultipleAllocations": device.shared,
        "attributes": attributes,
        "capacity": capacity,
    }


def _with_domains(expression: str, view: dict[str, Any]) -> dict[str, Any]:
    """What nobody publishes anything of is an empty map for an expression that asks for it, not an error."""
    named = {found["a"] or found["b"] for found in _DOMAINS.finditer(expression)} | {view["driver"]}
    return {
        **view,
        "attributes": {**{domain: {} for domain in named}, **view["attributes"]},
        "capacity": {**{domain: {} for domain in named}, **view["capacity"]},
    }


def _split(name: str, driver: str) -> tuple[str, str]:
    domain, slash, identifier = name.partition("/")
    return (domain, identifier) if slash else (driver, name)


def _attribute_value(value: Mapping[str, Any]) -> Any:
    kind, found = next(iter(value.items()))
    if kind == "version":
        return _version(str(found))
    if kind == "versions":
        return [_version(str(each)) for each in found]
    return list(found) if isinstance(found, (list, tuple)) else found


def _attribute(found: Any) -> dict[str, Any]:
    if isinstance(found, bool):
        return {"bool": found}
    if isinstance(found, int):
        return {"int": found}
    if isinstance(found, Mapping) and VERSION in found:
        return {"version": str(found[VERSION])}
    if isinstance(found, str):
        return {"string": found}
    raise SelectorFailed(
        f"a derived attribute gives {_word(found)}, expected a number, a text, a version, true or false"
    )


def _word(found: Any) -> str:
    words = {str: "a text", int: "a number", float: "a number", list: "a list", type(None): "nothing"}
    if isinstance(found, Mapping):
        return "a quantity" if QUANTITY in found else "a version" if VERSION in found else "a map"
    return words.get(type(found), type(found).__name__)


def _said(text: str) -> str:
    """The library's words for an error, as the scheduler says the same."""
    found = re.fullmatch(r'NOT_FOUND: Key not found in map : "(.*)"', text)
    if found:
        return f"no such key: {found[1]}"
    if "No matching overloads found" in text:
        return f"no such overload: {text.rpartition(': ')[2]}" if "noVersion" not in text else "no such overload"
    return re.sub(r"^[A-Z_]+: ", "", text)


def _hint(said: str) -> str:
    if said.startswith("no such key: "):
        name = said.removeprefix("no such key: ")
        return f"Ask for what may be missing with .?{name}.orValue(…), or first with has()."
    if said.startswith("a version is not a text"):
        return "Compare it with semver(…): .compareTo(semver(…)) == 0, or isGreaterThan and isLessThan."
    return ""


# ---------------------------------------------------------------------- Kubernetes' functions


def _quantity(value: Fraction) -> dict[str, str]:
    return {QUANTITY: f"{value.numerator}/{value.denominator}"}


def _amount(found: Any) -> Fraction:
    if not isinstance(found, Mapping) or QUANTITY not in found:
        raise ValueError("no such overload")
    return Fraction(found[QUANTITY])


def _parsed_quantity(text: str) -> dict[str, str]:
    return _quantity(quantity.parse(text))


def _version(text: str) -> dict[str, str]:
    found = _SEMVER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no semantic version")
    return {VERSION: f"{found[1]}.{found[2]}.{found[3]}" + (f"-{found[4]}" if found[4] else "")}


def _normalized(text: str) -> str:
    parts = text.removeprefix("v").split(".", 2)
    for place, part in enumerate(parts):
        if len(part) > 1:
            bare = part.lstrip("0")
            parts[place] = bare if bare[:1].isdigit() else f"0{bare}"
    if len(parts) < 3 and any(sign in parts[-1] for sign in "+-"):
        raise ValueError("a short version cannot have a prerelease or build metadata")
    return ".".join((*parts, "0", "0")[:3] if len(parts) < 3 else parts)


def _rank(found: Any) -> tuple[Any, ...]:
    """By what versions are ordered: a prerelease comes before what it leads to, numbers in it before words."""
    if not isinstance(found, Mapping) or VERSION not in found:
        raise ValueError("no such overload")
    core, _dash, prerelease = str(found[VERSION]).partition("-")
    words = tuple(
        (0, int(each), "") if each.isdigit() else (1, 0, each) for each in prerelease.split(".") if prerelease
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


def _matched(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    return found[0] if found else ""


def _all_matched(text: str, pattern: str, most: int = -1) -> list[str]:
    found = [each[0] for each in re.finditer(pattern, text)]
    return found if most < 0 else found[:most]


def _environment() -> Any:
    """Kubernetes' environment; types are not checked, as the API server has done that for what it stores."""
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
            (True, [own, own], own, lambda one, other: _quantity(_amount(one) + _amount(other))),
            (True, [own, whole], own, lambda one, other: _quantity(_amount(one) + other)),
        ),
        function(
            "sub",
            (True, [own, own], own, lambda one, other: _quantity(_amount(one) - _amount(other))),
            (True, [own, whole], own, lambda one, other: _quantity(_amount(one) - other)),
        ),
        function(
            "semver",
            (False, [text], own, _version),
            (False, [text, truth], own, lambda one, loose: _version(_normalized(one) if loose else one)),
        ),
        function(
            "isSemver",
            (False, [text], truth, lambda one: _succeeds(_version, one)),
            (
                False,
                [text, truth],
                truth,
                lambda one, loose: _succeeds(lambda: _version(_normalized(one) if loose else one)),
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
