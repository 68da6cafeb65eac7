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
from ..attributes import SuperPod, super_pod
from ..families import Family
from ..health.faults import code_of_exit, error_of
from ..templates import CORES, HELPERS, SHARED, Template
from .npu_smi_tables import (
    Header,
    key_values,
    parse_header,
    parse_row,
    parse_whole_number,
    rows_after,
    split_pair,
    value_of,
    value_with_prefix,
)

_OF_HEADERS: Mapping[str, str] = MappingProxyType(
    {"aicore": CORES, "aicpu": HELPERS, **{key: key for key in SHARED if key not in (CORES, HELPERS)}}
)
_MANAGEMENT_CONTROLLER = "mcu"
#: The first line of the table that ``npu-smi info`` prints. It contains the version of the driver.
_BANNER = re.compile(r"npu-smi\s+v?\S+.*?Version:\s*(\S+)")
_HEX = re.compile(r"(?:0x)?([0-9A-Fa-f]{6,8})")
_CHIP_LABEL = re.compile(r"(?:NPU|Phy-ID)(\d+)")
#: The container IDs of a vNPU without a container, and of a vNPU whose container has no known ID.
_NO_CONTAINER, _UNKNOWN_CONTAINER = re.compile(r"0+"), re.compile(r"[fF]+")


class UnexpectedOutput(ValueError):
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
class VnpuRow:
    """A vNPU in the list of ``info -t info-vnpu``. ``container`` is "" without a container, and for one without an ID."""

    slice_id: int
    template: str
    group: int | None
    is_used: bool
    container: str = ""


@dataclass(frozen=True)
class VnpuList:
    """The shared resources of a chip, free and total, by their published names, with memory in GiB as displayed, and its vNPUs."""

    free: Mapping[str, Fraction]
    totals: Mapping[str, Fraction]
    slices: tuple[VnpuRow, ...]


@dataclass(frozen=True)
class ChipHealth:
    """A chip's health as npu-smi prints it, and its error codes."""

    word: str
    errors: tuple[int, ...]


def parse_chips(text: str) -> tuple[MappedChip, ...]:
    """Parse ``info -m``: the chips of all cards, without the rows of management controllers. Raises UnexpectedOutput."""
    lines = text.splitlines()
    position, columns = _find_header(lines, "NPU ID", "Chip ID")
    found: list[MappedChip] = []
    for line in rows_after(lines, position):
        values = parse_row(columns, line)
        card, chip = parse_whole_number(value_of(values, "NPU ID")), parse_whole_number(value_of(values, "Chip ID"))
        name = value_of(values, "Chip Name")
        if card is None or chip is None or name.lower() == _MANAGEMENT_CONTROLLER:
            continue
        logic = parse_whole_number(value_of(values, "Chip Logic ID"))
        found.append(MappedChip(card, chip, name, logic, parse_whole_number(value_of(values, "Chip Phy-ID"))))
    return tuple(found)


def parse_chip_numbers(text: str) -> Mapping[str, int]:
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
        number = next((parse_whole_number(said[name]) for name in names if name in said), None)
        if number is not None:
            found[key] = number
    return found


def parse_templates(text: str) -> tuple[Template, ...]:
    """Parse ``info -t template-info``: two lines for each template after a header of two lines. Raises UnexpectedOutput."""
    lines = text.splitlines()
    position, upper = _find_header(lines, "Name", "AICORE")
    lower = next((parse_header(line) for line in rows_after(lines, position)), Header(()))
    found: list[tuple[str, dict[str, str]]] = []
    for line in list(rows_after(lines, position))[1:]:
        values = parse_row(upper, line)
        name = value_of(values, "Name")
        if name:
            found.append((name, {key: " ".join(each) for key, each in values.items()}))
        elif found:
            second = parse_row(lower, line)
            found[-1][1].update({key: " ".join(each) for key, each in second.items()})
    return tuple(
        Template(name, _amounts(values), _number(values.get("memory", "")) or Fraction(0)) for name, values in found
    )


def parse_vnpus(text: str) -> VnpuList:
    """Parse ``info -t info-vnpu``: free and total resources, and the vNPUs. Raises UnexpectedOutput."""
    lines = text.splitlines()
    position, columns = _find_header(lines, "AICORE", "VPC")
    pairs: dict[str, tuple[str, str]] = {}
    for line in rows_after(lines, position):
        found = {key: split_pair("".join(values)) for key, values in parse_row(columns, line).items()}
        if all(found.values()):  # a line with units can precede it
            pairs = {key.partition("(")[0]: each for key, each in found.items() if each is not None}
            break
    if not pairs:
        raise UnexpectedOutput("npu-smi info -t info-vnpu: no line has the free and total resources")
    return VnpuList(
        _amounts({key: each[0] for key, each in pairs.items()}, memory=True),
        _amounts({key: each[1] for key, each in pairs.items()}, memory=True),
        tuple(_vnpu_rows(lines)),
    )


def parse_health(text: str) -> ChipHealth:
    """Parse ``info -t health``. Raises UnexpectedOutput."""
    said = key_values(text)
    word = said.get("health status", said.get("health", ""))
    if not word:
        raise UnexpectedOutput("npu-smi info -t health: it does not say how the chip is")
    return ChipHealth(word, tuple(int(each, 16) for each in _HEX.findall(said.get("error code", ""))))


def parse_links(text: str) -> Mapping[tuple[int, int], str]:
    """Parse ``info -t topo``: the links between chips, by pairs of physical IDs. Raises UnexpectedOutput.

    Columns of network ports and processors, and the legend after the matrix, are skipped.
    """
    found: dict[tuple[int, int], str] = {}
    columns: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if not columns:
            columns = words if words and _CHIP_LABEL.fullmatch(words[0]) else []
            continue
        label = _CHIP_LABEL.fullmatch(words[0]) if words else None
        if label is None:
            continue
        for name, cell in zip(columns, words[1:]):
            other = _CHIP_LABEL.fullmatch(name)
            if other is not None:
                found[(int(label.group(1)), int(other.group(1)))] = cell
    if not columns:
        raise UnexpectedOutput("npu-smi info -t topo: there is no matrix in it")
    return found


def parse_is_container_mode(text: str) -> bool:
    """Parse ``info -t vnpu-mode``: whether vNPUs are for containers and not for virtual machines. Raises UnexpectedOutput."""
    return parse_choice(text, {"docker": True, "vm": False}, "vnpu-mode")


def parse_are_dies_separate(text: str) -> bool:
    """Parse ``info -t multi-die-policy``: whether each die of a module works separately. Raises UnexpectedOutput."""
    return parse_choice(text, {"1": True, "0": False}, "multi-die-policy")


def parse_is_recovery_on(text: str) -> bool:
    """Parse ``info -t vnpu-cfg-recover``: whether vNPUs are restored after a reboot. Raises UnexpectedOutput."""
    return parse_choice(text, {"enable": True, "disable": False}, "vnpu-cfg-recover")


def parse_is_shared(text: str) -> bool:
    """Parse ``info -t device-share``: whether several containers can use a chip at a time. Raises UnexpectedOutput."""
    truths = {"true": True, "enable": True, "enabled": True, "false": False, "disable": False, "disabled": False}
    return parse_choice(text, truths, "device-share")


def raise_failure(status: int, output: str, doing: str) -> None:
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


def parse_driver_version(text: str) -> str:
    """Parse ``npu-smi info``: the version of the driver; "" if the output has none."""
    banner = _BANNER.search(text)
    return banner.group(1).rstrip("|") if banner else ""


def parse_super_pod(text: str, family: Family) -> SuperPod | None:
    """Parse ``info -t spod-info``; None for a chip that is in no super-pod.

    The newest generation has no chip number in the super-pod, and prints the chassis instead of the server for servers
    in racks.
    """
    values = {re.sub(r"[\s_-]", "", key): _prefixed_number(value) for key, value in key_values(text).items()}
    return super_pod(
        family, values.get("superpodid"), values.get("serverindex"), values.get("sdid"), chassis=values.get("chassisid")
    )


def _prefixed_number(text: str) -> int | None:
    """Return an integer, which can be hexadecimal with the prefix 0x; None for other text."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def _find_header(lines: list[str], *names: str) -> tuple[int, Header]:
    for position, line in enumerate(lines):
        found = parse_header(line)
        if found.has(*names):
            return position, found
    raise UnexpectedOutput(f"npu-smi: no line has the columns {' and '.join(names)}")


def _vnpu_rows(lines: list[str]) -> Iterator[VnpuRow]:
    try:
        position, columns = _find_header(lines, "Vnpu ID", "Template Name")
    except UnexpectedOutput:
        return  # some releases print no table if the list is empty
    for line in rows_after(lines, position):
        values = parse_row(columns, line)
        number = parse_whole_number(value_of(values, "Vnpu ID"))
        if number is None:
            continue
        container = value_of(values, "Container ID")
        yield VnpuRow(
            number,
            value_of(values, "Template Name"),
            parse_whole_number(value_of(values, "Vgroup ID")),
            value_of(values, "Status") == "1",
            "" if _NO_CONTAINER.fullmatch(container) or _UNKNOWN_CONTAINER.fullmatch(container) else container,
        )


def _amounts(values: Mapping[str, str], memory: bool = False) -> Mapping[str, Fraction]:
    found = {published: _number(values.get(name, "")) for name, published in _OF_HEADERS.items()}
    if memory:
        found["memory"] = _number(value_with_prefix({key: [each] for key, each in values.items()}, "memory"))
    return {key: each for key, each in found.items() if each is not None}


def _number(text: str) -> Fraction | None:
    """Return the exact value of a number, including a fraction; None for NA."""
    return Fraction(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def parse_choice(text: str, words: Mapping[str, bool], asked: str) -> bool:
    """Return the meaning of an output with one of these words. Raises UnexpectedOutput."""
    for value in key_values(text).values():
        if value.lower() in words:
            return words[value.lower()]
    raise UnexpectedOutput(f"npu-smi info -t {asked}: it says none of {', '.join(words)}")
