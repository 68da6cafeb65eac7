# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decode user-written documents strictly.

Fields describe the allowed values, and an error lists all problems of a document. A field decodes a JSON value (string,
number, boolean, list, mapping) to the internal value. Values with the same meaning are decoded to the same result.
``null`` is the same as a missing field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import quantity
from .texts import MOST_PROBLEMS, join_problems


@dataclass(frozen=True)
class Problem:
    """One problem: the field (dotted path, "" for the whole document), the found value, and the expected value."""

    path: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.path or 'the document'} is {self.found}; expected {self.expected}"


class InvalidDocument(ValueError):
    """A document with invalid fields. ``problems`` lists them in the order of the document."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(join_problems(problems))
        self.problems = tuple(problems)


class Field(Protocol):
    """The allowed values of a field."""

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the decoded value. Append problems to ``problems``; the result is then invalid."""


def decode(allowed: Field, document: Any) -> Any:
    """Decode a whole document. Raises InvalidDocument with all problems."""
    problems: list[Problem] = []
    decoded = allowed.decode(document, "", problems)
    if problems:
        raise InvalidDocument(problems)
    return decoded


def value_text(value: Any, longest: int = 40) -> str:
    """Return a value as text for messages. The length is limited, because the document can come from any user."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 39 digits"
    text = repr(value[: longest + 1] if isinstance(value, str) else value)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def any_of(words: Sequence[str], empty: str = "nothing") -> str:
    """Return words joined as ``a, b or c``."""
    *first, last = words or (empty,)
    return f"{', '.join(first)} or {last}" if first else last


def below(path: str, name: str) -> str:
    """Return the path of a field in the mapping at ``path``."""
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class Choice:
    """One string from a fixed list."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""
        return any_of(self.words)

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the string."""
        if not isinstance(value, str) or value not in self.words:
            problems.append(Problem(path, value_text(value), self.expected))
        return value


@dataclass(frozen=True)
class MatchingString:
    """A string that matches ``pattern``; ``expected`` describes it."""

    pattern: str
    expected: str

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the string."""
        if not isinstance(value, str) or re.fullmatch(self.pattern, value) is None:
            problems.append(Problem(path, value_text(value), self.expected))
        return value


@dataclass(frozen=True)
class UniqueStrings:
    """A list of one or more different strings, in any order."""

    each: Field
    most: int = 32

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""
        return f"a list with 1 to {self.most} different ones of: {self.each.expected}"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the strings, sorted."""
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= self.most:
            found = f"a list of {len(value)}" if isinstance(value, (list, tuple)) else value_text(value)
            problems.append(Problem(path, found, self.expected))
            return value
        before = len(problems)
        decoded = [self.each.decode(each, f"{path}[{index}]", problems) for index, each in enumerate(value)]
        if len(problems) > before:
            return decoded
        if len(set(decoded)) < len(decoded):
            twice = next(each for each in decoded if decoded.count(each) > 1)
            problems.append(Problem(path, f"a list with {value_text(twice)} more than once", self.expected))
        return sorted(decoded)


@dataclass(frozen=True)
class Integer:
    """An integer from ``least`` to ``most``, in ``unit``."""

    least: int
    most: int
    unit: str = ""

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""
        return f"a whole number from {self.least} to {self.most} {self.unit}".rstrip()

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the integer. 5.0 is accepted as 5, because JSON writers can convert one to the other."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            problems.append(Problem(path, value_text(value), self.expected))
        return value


@dataclass(frozen=True)
class Boolean:
    """A boolean."""

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""
        return "true or false"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the boolean."""
        if not isinstance(value, bool):
            problems.append(Problem(path, value_text(value), self.expected))
        return value


@dataclass(frozen=True)
class MemorySize:
    """An amount of memory in Kubernetes notation (``4Gi``, ``500M``, a number of bytes), at least ``least`` bytes."""

    least: int = 0
    most: int = 2**63 - 1

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""
        return f"an amount of memory such as 4Gi or 500M, {quantity.format_bytes(self.least)} at least"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the number of bytes. Fractions of a byte are rounded up, as in the API server."""
        try:
            size = quantity.parse_rounded_up(value)
        except ValueError:
            problems.append(Problem(path, value_text(value), self.expected))
            return value
        if not self.least <= size <= self.most:
            problems.append(Problem(path, value_text(value), self.expected))
        return size


@dataclass(frozen=True)
class Entries:
    """A mapping with user-defined keys, which match ``key``; ``key_expected`` describes them."""

    key: str
    key_expected: str
    value: Field
    most: int = 128

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""
        return f"a mapping with {self.key_expected} as keys, {self.most} at most"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the mapping, sorted by key."""
        if not isinstance(value, Mapping) or len(value) > self.most:
            problems.append(Problem(path, value_text(value), self.expected))
            return value
        decoded = {}
        for name, each in value.items():
            if not isinstance(name, str) or re.fullmatch(self.key, name) is None:
                problems.append(Problem(path, f"a mapping with the key {value_text(name)}", self.key_expected))
            else:
                decoded[name] = self.value.decode(each, below(path, name), problems)
        return dict(sorted(decoded.items()))


#: Checks a decoded record whose fields are valid one by one, and yields problems with their combination.
Check = Callable[[Mapping[str, Any], str], Iterator[Problem]]


@dataclass(frozen=True)
class Record:
    """A mapping with only these fields; ``required`` fields must be present.

    ``defaults`` are the values of missing fields. A missing field without a default is not in the result.
    """

    fields: Mapping[str, Field]
    required: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    check: Check | None = None

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""
        return f"a mapping with {any_of(tuple(self.fields), empty='no field')}"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the record with its defaults, in the order of ``fields``."""
        if not isinstance(value, Mapping):
            problems.append(Problem(path, value_text(value), self.expected))
            return value
        before = len(problems)
        unknown = [name for name in value if name not in self.fields]
        known = any_of(tuple(self.fields), empty="no field at all") if unknown else ""
        named = unknown
        if len(unknown) > MOST_PROBLEMS:
            # The total comes first: texts are cut after MOST_PROBLEMS problems.
            problems.append(Problem(path, f"a mapping with {len(unknown)} unknown fields", known))
            named = unknown[: MOST_PROBLEMS - 1]
        problems += [Problem(below(path, value_text(name).strip("'")), "unknown", known) for name in named]
        decoded = {}
        for name, allowed in self.fields.items():
            given = value.get(name)
            if given is not None:
                decoded[name] = allowed.decode(given, below(path, name), problems)
            elif name in self.required:
                problems.append(Problem(below(path, name), "missing", allowed.expected))
            elif name in self.defaults:
                decoded[name] = self.defaults[name]
        if self.check is not None and len(problems) == before:
            problems.extend(self.check(decoded, path))
        return decoded
