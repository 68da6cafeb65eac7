# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Evaluate the CEL expressions of device selectors as Kubernetes does, with Google's CEL library and the functions of Kubernetes.

Users write expressions, so each is evaluated in a separate process with time and memory limits. Regular expressions
use RE2, as in Kubernetes: its time is linear in the text. Without the package google-re2, find and findAll are not
evaluated.

Facts: k8s.io/dynamic-resource-allocation/cel (the device variable) and k8s.io/apiserver/pkg/cel (environment,
library/quantity.go, semverlib.go, lists.go, regex.go), 1.34 to 1.37. Quantities and versions are maps with one key
that expressions do not use.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._host.bounded_process import BoundedProcess, CallEnded
from ..core import quantity
from ..core.allocation.objects import Device, Json, NotJudged, SelectorFailed
from ..core.errors import AcceleratorError
from .cel_functions import NO_RE2, QUANTITY, VERSION, environment, quantity_map, version_map

try:
    from cel_expr_python import cel  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    HAS_CEL = False
    CEL_IMPORT_ERROR = traceback.format_exc()
else:
    HAS_CEL = True
    CEL_IMPORT_ERROR = ""

PACKAGE = "cel-expr-python"
#: The limits of one evaluation. The API server accepts only expressions that need at most milliseconds.
EVALUATION_SECONDS = 2.0
EVALUATION_BYTES = 512 * 1024 * 1024
#: After evaluations of this total time (seconds) were ended, the second limit (seconds) applies to each further expression.
PATIENCE_SECONDS, HURRIED_SECONDS = 20.0, 0.1
LONGEST_EXPRESSION = 10 * 1024
#: A string in brackets, or before ``in``: the domains that an expression can refer to.
_DOMAINS = re.compile(r"""\[\??\s*(?P<q>['"])(?P<a>[^'"]+)(?P=q)\s*\]|(?P<r>['"])(?P<b>[^'"]+)(?P=r)\s*in\b""")
#: A comparison of a member with a string. For a version, such a comparison is an error.
_COMPARED = re.compile(r"""(\.(?P<name>[A-Za-z_]\w*)\s*[=!]=\s*)(?P<text>"[^"\\]*"|'[^'\\]*')""")
#: Functions of Kubernetes that this evaluation does not support.
_UNKNOWN_HERE = re.compile(
    r"\b(isIP|ip|isCIDR|cidr|isURL|url|transformList|transformMap|transformMapEntry|sortBy|authorizer|format\.\w+)\s*[(.]"
    r"|\.(all|exists|existsOne)\(\s*\w+\s*,\s*\w+\s*,|\]\s*\.(indexOf|lastIndexOf)\("
)


class NoCel(AcceleratorError):
    """The Python package that evaluates CEL is missing."""

    default_code = "missing-package"


class CelJudge:
    """Evaluate selectors, and cache the results for identical devices. Raises NoCel if the package is missing."""

    def __init__(self) -> None:
        if not HAS_CEL:
            raise NoCel(
                f"The Python package {PACKAGE}, which evaluates the CEL expressions of selectors, cannot be imported",
                hint=f"Install it on the host where this runs, with Python 3.11 or newer: pip install {PACKAGE}",
            )
        self._process = BoundedProcess(_Evaluator, seconds=EVALUATION_SECONDS, memory_bytes=EVALUATION_BYTES)
        self._ended_seconds = 0.0
        # Expressions that exceeded a limit. They are not evaluated for other devices.
        self._ended: dict[str, NotJudged] = {}
        self._answers: dict[tuple[str, str], Any] = {}
        self._views: dict[int, tuple[Device, dict[str, Any], str]] = {}

    def matches(self, expression: str, device: Device) -> bool:
        """Return whether a device matches a selector. Raises SelectorFailed, NotJudged."""
        found = self._evaluated(expression, device)
        if not isinstance(found, bool):
            raise SelectorFailed(
                f"selector {expression!r} on device {'/'.join(device.key)}: it gives {_word(found)}, expected true or false"
            )
        return found

    def value(self, expression: str, device: Device) -> Json:
        """Return the value of an expression for a device, in the API's form of an attribute. Raises SelectorFailed, NotJudged."""
        found = self._evaluated(expression, device)
        if isinstance(found, (list, tuple)):
            kinds = {next(iter(_attribute(each))) for each in found}
            kind = kinds.pop() if len(kinds) == 1 else "string"
            return {f"{kind}s": [next(iter(_attribute(each).values())) for each in found]}
        return _attribute(found)

    def problem(self, expression: str) -> str:
        """Return the error in an expression, or an empty string if it is valid."""
        if len(expression.encode()) > LONGEST_EXPRESSION:
            return f"it has {len(expression.encode())} bytes, {LONGEST_EXPRESSION} are the most"
        found = self._ask(expression, None, frozenset())
        return found.message if isinstance(found, SelectorFailed) else ""

    def _evaluated(self, expression: str, device: Device) -> Any:
        view, view_key = self._view(device)
        known = self._answers.get((expression, view_key))
        if known is None:
            versions = frozenset(
                name.rpartition("/")[2] for name, each in device.attributes.items() if "version" in each
            )
            known = self._answers[expression, view_key] = self._ask(expression, view, versions)
        if isinstance(known, SelectorFailed):
            where = f"{known.message} on device {'/'.join(device.key)}"
            raise SelectorFailed(where, hint=known.hint, reason=known.reason)
        if isinstance(known, NotJudged):
            raise NotJudged(known.message)
        return known[0]

    def _ask(self, expression: str, view: dict[str, Any] | None, versions: frozenset[str]) -> Any:
        """Return the value in a tuple, or the error. Without a view the expression is only compiled."""
        if expression in self._ended:
            return self._ended[expression]
        hurried = self._ended_seconds >= PATIENCE_SECONDS
        self._process.seconds = HURRIED_SECONDS if hurried else EVALUATION_SECONDS
        try:
            answer: _Answer = self._process.call((expression, view, versions))
        except CallEnded as error:
            self._ended_seconds += self._process.seconds
            ended = self._ended[expression] = NotJudged(f"{_named(expression)} was not evaluated: {error.message}")
            return ended
        if answer.failed:
            return SelectorFailed(answer.failed, hint=answer.hint, reason=answer.reason)
        return NotJudged(answer.not_judged) if answer.not_judged else (answer.value,)

    def _view(self, device: Device) -> tuple[dict[str, Any], str]:
        known = self._views.get(id(device))
        if known is None:
            view = device_view(device)
            known = self._views[id(device)] = (device, view, json.dumps(view, sort_keys=True))
        return known[1], known[2]


@dataclass(frozen=True)
class _Answer:
    """The result of an evaluation: a value, or the message of an error."""

    value: Any = None
    failed: str = ""
    hint: str = ""
    reason: str = ""
    not_judged: str = ""


class _Evaluator:
    """Compile and evaluate expressions, in the process with limits."""

    def __init__(self) -> None:
        self._environment: Any = environment()
        self._programs: dict[str, Any] = {}

    def __call__(self, asked: tuple[str, dict[str, Any] | None, frozenset[str]]) -> _Answer:
        expression, view, versions = asked

        def compared(found: re.Match[str]) -> str:
            return f"{found[1]}noVersion({found['text']})" if found["name"] in versions else found[0]

        program = self._program(_COMPARED.sub(compared, expression) if versions else expression)
        if isinstance(program, _Answer):
            return program
        return _Answer() if view is None else _evaluation(program, expression, view)

    def _program(self, expression: str) -> Any:
        known = self._programs.get(expression)
        if known is None:
            try:
                known = self._environment.compile(expression, disable_check=True)
            except RuntimeError as error:
                said = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ERROR: <input>:")
                # Kubernetes accepts deeper expressions than this library.
                known = (
                    _Answer(not_judged=f"{_named(expression)} was not evaluated: {said}")
                    if "recursion limit" in said
                    else _Answer(
                        failed=f"selector {expression!r} is not valid CEL, at {said}", reason=f"no valid CEL, at {said}"
                    )
                )
            self._programs[expression] = known
        return known


def _named(expression: str) -> str:
    """Return a short form of an expression, so that the error has space for the reason."""
    shown = expression[:119] + "…" if len(expression) > 120 else expression
    return f"selector {shown!r}"


def _evaluation(program: Any, expression: str, view: dict[str, Any]) -> _Answer:
    try:
        found = program.eval(data={"device": _with_domains(expression, view)})
    except RuntimeError as error:
        # The library has a limit of iterations that the scheduler does not have.
        return _Answer(not_judged=f"{_named(expression)} was not evaluated: {_said(str(error))}")
    if found.type() in (cel.Type.ERROR, cel.Type.UNKNOWN):
        text = str(found.value())
        said = _said(text)
        if not said:  # the library returns no text for a MemoryError
            return _Answer(not_judged=f"{_named(expression)} was not evaluated: it needs too much memory")
        if NO_RE2 in text:
            return _Answer(not_judged=f"{_named(expression)} was not evaluated: {NO_RE2}")
        if re.search("No matching overload|No value with name", text) and _UNKNOWN_HERE.search(expression):
            return _Answer(not_judged=f"selector {expression!r} uses functions that cannot be evaluated here ({said})")
        return _Answer(failed=f"selector {expression!r}: {said}", hint=_hint(said), reason=said)
    try:
        return _Answer(found.plain_value())
    except TypeError:
        return _Answer()  # an optional, which is not a valid result


def device_view(device: Device) -> dict[str, Any]:
    """Return a device as CEL expressions see it. Names without a domain belong to the driver's domain."""
    attributes: dict[str, dict[str, Any]] = {}
    for name, value in device.attributes.items():
        domain, identifier = _split(name, device.driver)
        attributes.setdefault(domain, {})[identifier] = _attribute_value(value)
    capacity: dict[str, dict[str, Any]] = {}
    for name, entry in device.capacity.items():
        domain, identifier = _split(name, device.driver)
        capacity.setdefault(domain, {})[identifier] = quantity_map(quantity.parse(entry["value"]))
    return {
        "driver": device.driver,
        "allowMultipleAllocations": device.shared,
        "attributes": attributes,
        "capacity": capacity,
    }


def _with_domains(expression: str, view: dict[str, Any]) -> dict[str, Any]:
    """Return the view with an empty map for each domain of the expression that has no attributes, so that a lookup is not an error."""
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
        return version_map(str(found))
    if kind == "versions":
        return [version_map(str(each)) for each in found]
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
    """Return the library's error message in the scheduler's words."""
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
