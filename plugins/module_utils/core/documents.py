# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Documents that people write, decoded strictly: what one may hold is data, and all that is wrong with it is said at once.

A field decodes a value as JSON has it (text, number, truth value, list, mapping) to the value that programs use: always the
same for what means the same. ``null`` is as if the field were left out.
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
    """One thing that is wrong: in which field (dotted, "" for the whole document), what was found, what is expected."""

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
    """What a value may be."""

    @property
    def expected(self) -> str:
        """What is expected, in words."""

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the decoded value; what is wrong is added to ``problems``, and the result is then of no use."""


def decode(allowed: Field, document: Any) -> Any:
    """Decode a whole document. Raises InvalidDocument with everything that is wrong with it."""
    problems: list[Problem] = []
    decoded = allowed.decode(document, "", problems)
    if problems:
        raise InvalidDocument(problems)
    return decoded


def shown(value: Any, longest: int = 40) -> str:
    """A value as a message shows it: not at any length, for who wrote it may be anybody."""
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
    """``a, b or c``."""
    *first, last = words or (empty,)
    return f"{', '.join(first)} or {last}" if first else last


def below(path: str, name: str) -> str:
    """The path of a field in the mapping at ``path``."""
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class Choice:
    """One of some words, as they are written."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        return any_of(self.words)

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the word."""
        if not isinstance(value, str) or value not in self.words:
            problems.append(Problem(path, shown(value), self.expected))
        return value


@dataclass(frozen=True)
class Word:
    """A text that matches ``pattern``, which is ``expected`` in words."""

    pattern: str
    expected: str

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the text."""
        if not isinstance(value, str) or re.fullmatch(self.pattern, value) is None:
            problems.append(Problem(path, shown(value), self.expected))
        return value


@dataclass(frozen=True)
class Several:
    """A list of one or more different texts, in any order."""

    each: Field
    most: int = 32

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        return f"a list with 1 to {self.most} different ones of: {self.each.expected}"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the texts, sorted."""
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= self.most:
            found = f"a list of {len(value)}" if isinstance(value, (list, tuple)) else shown(value)
            problems.append(Problem(path, found, self.expected))
            return value
        before = len(problems)
        decoded = [self.each.decode(each, f"{path}[{index}]", problems) for index, each in enumerate(value)]
        if len(problems) > before:
            return decoded
        if len(set(decoded)) < len(decoded):
            twice = next(each for each in decoded if decoded.count(each) > 1)
            problems.append(Problem(path, f"a list with {shown(twice)} more than once", self.expected))
        return sorted(decoded)


@dataclass(frozen=True)
class Whole:
    """A whole number from ``least`` to ``most``, in ``unit``."""

    least: int
    most: int
    unit: str = ""

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        return f"a whole number from {self.least} to {self.most} {self.unit}".rstrip()

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the number. 5.0 is 5: what writes JSON may make the one of the other."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            problems.append(Problem(path, shown(value), self.expected))
        return value


@dataclass(frozen=True)
class Truth:
    """True or false."""

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        return "true or false"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the value."""
        if not isinstance(value, bool):
            problems.append(Problem(path, shown(value), self.expected))
        return value


@dataclass(frozen=True)
class Size:
    """An amount of memory as Kubernetes writes it (``4Gi``, ``500M``, a number of bytes), from ``least`` bytes on."""

    least: int = 0
    most: int = 2**63 - 1

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        return f"an amount of memory such as 4Gi or 500M, {quantity.format_bytes(self.least)} at least"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the number of bytes; a part of a byte counts as one, as it does for the API server."""
        try:
            exact = quantity.parse(value)
        except ValueError:
            problems.append(Problem(path, shown(value), self.expected))
            return value
        size = -(-exact.numerator // exact.denominator)
        if not self.least <= size <= self.most:
            problems.append(Problem(path, shown(value), self.expected))
        return size


@dataclass(frozen=True)
class Entries:
    """A mapping whose keys its writer chooses: each matches ``key``, which is ``key_expected`` in words."""

    key: str
    key_expected: str
    value: Field
    most: int = 128

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        return f"a mapping with {self.key_expected} as keys, {self.most} at most"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the mapping, ordered by its keys."""
        if not isinstance(value, Mapping) or len(value) > self.most:
            problems.append(Problem(path, shown(value), self.expected))
            return value
        decoded = {}
        for name, each in value.items():
            if not isinstance(name, str) or re.fullmatch(self.key, name) is None:
                problems.append(Problem(path, f"a mapping with the key {shown(name)}", self.key_expected))
            else:
                decoded[name] = self.value.decode(each, below(path, name), problems)
        return dict(sorted(decoded.items()))


#: Looks at a decoded record whose fields are right one by one, and tells what does not go together.
Check = Callable[[Mapping[str, Any], str], Iterator[Problem]]


@dataclass(frozen=True)
class Record:
    """A mapping with these fields and no others; ``required`` ones have to be there.

    ``defaults`` stand for fields that are left out; one without a default is not in the result then.
    """

    fields: Mapping[str, Field]
    required: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    check: Check | None = None

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        return f"a mapping with {any_of(tuple(self.fields), empty='no field')}"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the record with its defaults, in the order of ``fields``."""
        if not isinstance(value, Mapping):
            problems.append(Problem(path, shown(value), self.expected))
            return value
        before = len(problems)
        unknown = [name for name in value if name not in self.fields]
        known = any_of(tuple(self.fields), empty="no field at all") if unknown else ""
        named = unknown
        if len(unknown) > MOST_PROBLEMS:
            # The total comes first: texts are cut after MOST_PROBLEMS problems.
            problems.append(Problem(path, f"a mapping with {len(unknown)} unknown fields", known))
            named = unknown[: MOST_PROBLEMS - 1]
        problems += [Problem(below(path, shown(name).strip("'")), "unknown", known) for name in named]
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
