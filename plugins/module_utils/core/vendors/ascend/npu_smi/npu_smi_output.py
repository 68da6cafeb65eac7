# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse the output of npu-smi, and check whether its commands succeeded.

npu-smi is used if DCMI is missing or does not report a value. Some of its failures exit with 0, and the command that
creates a vNPU does not print which vNPU was created. So a change counts as successful if the exit status is 0, a line
contains OK, and a new list confirms it. This module has no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from ....errors import AcceleratorError
from ..health.faults import code_of_exit, error_of
from ..templates import CORES, HELPERS, SHARED, Template
from .npu_smi_tables import Header, beginning, first, header, key_values, lines_after, pair, row, whole

_OF_HEADERS: Mapping[str, str] = MappingProxyType(
    {"aicore": CORES, "aicpu": HELPERS, **{key: key for key in SHARED if key not in (CORES, HELPERS)}}
)
_MCU = "mcu"
_HEX = re.compile(r"(?:0x)?([0-9A-Fa-f]{6,8})")
_CHIP_LABEL = re.compile(r"(?:NPU|Phy-ID)(\d+)")
_NOBODY, _SOMEBODY = re.compile(r"0+"), re.compile(r"[fF]+")


class UnreadOutput(ValueError):
    """The output of npu-smi has an unknown format: the expected value is missing."""


@dataclass(frozen=True)
class MappedChip:
    """A row of ``info -m``. ``logic_id`` and ``physical_id`` are None if the row has no such value."""

    card: int
    chip: int
    name: str
    logic_id: int | None = None
    physical_id: int | None = None


@dataclass(frozen=True)
class SliceRow:
    """A vNPU in the list of ``info -t info-vnpu``. ``container`` is "" without a container, and for one without an ID."""

    slice_id: int
    template: str
    group: int | None
    is_used: bool
    container: str = ""


@dataclass(frozen=True)
class SliceInfo:
    """The shared resources of a chip, free and total, by their published names, with memory in GiB as displayed, and its vNPUs."""

    free: Mapping[str, Fraction]
    totals: Mapping[str, Fraction]
    slices: tuple[SliceRow, ...]


@dataclass(frozen=True)
class ChipHealth:
    """A chip's health as npu-smi prints it, and its error codes."""

    word: str
    errors: tuple[int, ...]


@dataclass(frozen=True)
class Links:
    """The links between chips by pairs of physical IDs, and the processors that are close to each chip."""

    between: Mapping[tuple[int, int], str]
    processors: Mapping[int, str]


def chips(text: str) -> tuple[MappedChip, ...]:
    """Parse ``info -m``: the chips of all cards, without the rows of management controllers. Raises UnreadOutput."""
    lines = text.splitlines()
    position, columns = _find(lines, "NPU ID", "Chip ID")
    found: list[MappedChip] = []
    for line in lines_after(lines, position):
        values = row(columns, line)
        card, chip = whole(first(values, "NPU ID")), whole(first(values, "Chip ID"))
        name = first(values, "Chip Name")
        if card is None or chip is None or name.lower() == _MCU:
            continue
        logic = whole(first(values, "Chip Logic ID"))
        found.append(MappedChip(card, chip, name, logic, whole(first(values, "Chip Phy-ID"))))
    return tuple(found)


def identity(text: str) -> Mapping[str, int]:
    """Parse ``info -t phyid-remap``: the numbers of one chip, by the keys physical, logic, card, and chip."""
    said = key_values(text)
    spellings = {
        "physical": ("chip physical id", "phy-id"),
        "logic": ("chip logic id",),
        "card": ("npu id",),
        "chip": ("chip id",),
    }
    found = {}
    for key, names in spellings.items():
        number = next((whole(said[name]) for name in names if name in said), None)
        if number is not None:
            found[key] = number
    return found


def templates(text: str) -> tuple[Template, ...]:
    """Parse ``info -t template-info``: two lines for each template after a header of two lines. Raises UnreadOutput."""
    lines = text.splitlines()
    position, upper = _find(lines, "Name", "AICORE")
    lower = next((header(line) for line in lines_after(lines, position)), Header(()))
    found: list[tuple[str, dict[str, str]]] = []
    for line in list(lines_after(lines, position))[1:]:
        values = row(upper, line)
        name = first(values, "Name")
        if name:
            found.append((name, {key: " ".join(each) for key, each in values.items()}))
        elif found:
            second = row(lower, line)
            found[-1][1].update({key: " ".join(each) for key, each in second.items()})
    return tuple(
        Template(name, _amounts(values), _number(values.get("memory", "")) or Fraction(0)) for name, values in found
    )


def slices(text: str) -> SliceInfo:
    """Parse ``info -t info-vnpu``: free and total resources, and the vNPUs. Raises UnreadOutput."""
    lines = text.splitlines()
    position, columns = _find(lines, "AICORE", "VPC")
    pairs: dict[str, tuple[str, str]] = {}
    for line in lines_after(lines, position):
        found = {key: pair("".join(values)) for key, values in row(columns, line).items()}
        if all(found.values()):  # a line with units can precede it
            pairs = {key.partition("(")[0]: each for key, each in found.items() if each is not None}
            break
    if not pairs:
        raise UnreadOutput("npu-smi info -t info-vnpu: no line has the free and total resources")
    return SliceInfo(
        _amounts({key: each[0] for key, each in pairs.items()}, memory=True),
        _amounts({key: each[1] for key, each in pairs.items()}, memory=True),
        tuple(_slice_rows(lines)),
    )


def health(text: str) -> ChipHealth:
    """Parse ``info -t health``. Raises UnreadOutput."""
    said = key_values(text)
    word = said.get("health status", said.get("health", ""))
    if not word:
        raise UnreadOutput("npu-smi info -t health: it does not say how the chip is")
    return ChipHealth(word, tuple(int(each, 16) for each in _HEX.findall(said.get("error code", ""))))


def links(text: str) -> Links:
    """Parse ``info -t topo``: the matrix, without columns of network ports and without the legend. Raises UnreadOutput."""
    between: dict[tuple[int, int], str] = {}
    processors: dict[int, str] = {}
    columns: list[str] = []
    for line in text.splitlines():
        words = line.replace("CPU Affinity", "CPU-Affinity").split()
        if not columns:
            columns = words if words and _CHIP_LABEL.fullmatch(words[0]) else []
            continue
        label = _CHIP_LABEL.fullmatch(words[0]) if words else None
        if label is None:
            continue
        for name, cell in zip(columns, words[1:]):
            other = _CHIP_LABEL.fullmatch(name)
            if other is not None:
                between[(int(label.group(1)), int(other.group(1)))] = cell
            elif name.lower().startswith("cpu"):
                processors[int(label.group(1))] = cell
    if not columns:
        raise UnreadOutput("npu-smi info -t topo: there is no matrix in it")
    return Links(between, processors)


def is_docker_mode(text: str) -> bool:
    """Parse ``info -t vnpu-mode``: whether vNPUs are for containers and not for virtual machines. Raises UnreadOutput."""
    return word_of(text, {"docker": True, "vm": False}, "vnpu-mode")


def is_each_die_alone(text: str) -> bool:
    """Parse ``info -t multi-die-policy``: whether each die of a module works separately. Raises UnreadOutput."""
    return word_of(text, {"1": True, "0": False}, "multi-die-policy")


def recovers(text: str) -> bool:
    """Parse ``info -t vnpu-cfg-recover``: whether vNPUs are restored after a reboot. Raises UnreadOutput."""
    return word_of(text, {"enable": True, "disable": False}, "vnpu-cfg-recover")


def is_shared(text: str) -> bool:
    """Parse ``info -t device-share``: whether several containers can use a chip at a time. Raises UnreadOutput."""
    truths = {"true": True, "enable": True, "enabled": True, "false": False, "disable": False, "disabled": False}
    return word_of(text, truths, "device-share")


def refuse_failure(status: int, output: str, doing: str) -> None:
    """Raise the error of a changing command, unless it exited with 0 and printed OK. ``doing`` begins the text."""
    said = key_values(output)
    if status == 0 and said.get("status", "").upper() == "OK":
        return
    printed = said.get("message", "") or " ".join(line.strip() for line in output.splitlines() if line.strip())[:300]
    code = code_of_exit(status)
    if status and code is not None:
        error = error_of(code, doing)
        raise type(error)(f"{error.message}: {printed}" if printed else error.message, hint=error.hint, code=error.code)
    raise AcceleratorError(
        f"{doing} failed: npu-smi exited with {status} and printed {printed!r}",
        hint="It exits with 0 for some failures as well. Only its output shows the cause.",
        code="refused",
    )


def _find(lines: list[str], *names: str) -> tuple[int, Header]:
    for position, line in enumerate(lines):
        found = header(line)
        if found.has(*names):
            return position, found
    raise UnreadOutput(f"npu-smi: no line has the columns {' and '.join(names)}")


def _slice_rows(lines: list[str]) -> Iterator[SliceRow]:
    try:
        position, columns = _find(lines, "Vnpu ID", "Template Name")
    except UnreadOutput:
        return  # some releases print no table if the list is empty
    for line in lines_after(lines, position):
        values = row(columns, line)
        number = whole(first(values, "Vnpu ID"))
        if number is None:
            continue
        container = first(values, "Container ID")
        yield SliceRow(
            number,
            first(values, "Template Name"),
            whole(first(values, "Vgroup ID")),
            first(values, "Status") == "1",
            "" if _NOBODY.fullmatch(container) or _SOMEBODY.fullmatch(container) else container,
        )


def _amounts(values: Mapping[str, str], memory: bool = False) -> Mapping[str, Fraction]:
    found = {published: _number(values.get(name, "")) for name, published in _OF_HEADERS.items()}
    if memory:
        found["memory"] = _number(beginning({key: [each] for key, each in values.items()}, "memory"))
    return {key: each for key, each in found.items() if each is not None}


def _number(text: str) -> Fraction | None:
    """Return the exact value of a number, including a fraction; None for NA."""
    return Fraction(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def word_of(text: str, words: Mapping[str, bool], asked: str) -> bool:
    """Return the meaning of an output with one of these words. Raises UnreadOutput."""
    for value in key_values(text).values():
        if value.lower() in words:
            return words[value.lower()]
    raise UnreadOutput(f"npu-smi info -t {asked}: it says none of {', '.join(words)}")
