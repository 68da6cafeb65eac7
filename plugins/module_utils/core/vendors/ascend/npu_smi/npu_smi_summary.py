# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse the table of ``npu-smi info``, and the location of a chip in a super-pod.

This module has no side effects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..attributes import SuperPod, super_pod
from ..families import Family
from .npu_smi_output import UnreadOutput
from .npu_smi_tables import Header, Row, beginning, first, header, key_values, lines_after, pair, row, whole

_BANNER = re.compile(r"npu-smi\s+v?(\S+).*?Version:\s*(\S+)")
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class SummaryRow:
    """One chip of the table. Missing values are None or "".

    ``name`` is that of the table: in the container of a vNPU it combines those of the chip and the template. Power is
    in W, temperature in degrees Celsius, memory in MB. The memory is that of the HBM if there is one, because the other
    pair is 0 then. ``busy`` is in percent, and 0 for a partitioned chip.
    """

    card: int
    chip: int
    name: str
    health: str
    physical_id: int | None = None
    logic_id: int | None = None
    bus_id: str = ""
    power: float | None = None
    temperature: float | None = None
    busy: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True)
class ProcessRow:
    """A process that has a chip open, and its memory on the chip in MB."""

    card: int
    chip: int
    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Summary:
    """The content of the table: the versions of the tool and the driver, the chips, and their processes."""

    tool: str
    driver: str
    chips: tuple[SummaryRow, ...]
    processes: tuple[ProcessRow, ...]


def summary(text: str) -> Summary:
    """Parse ``npu-smi info``. Raises UnreadOutput."""
    lines = text.splitlines()
    banner = _BANNER.search(text)
    position, upper = _find(lines, "health")
    rest = list(lines_after(lines, position))
    end = next((at for at, line in enumerate(rest) if "process id" in line.lower()), len(rest))
    lower = header(rest[0]) if rest else Header(())
    return Summary(
        banner.group(1) if banner else "",
        banner.group(2).rstrip("|") if banner else "",
        _chips(upper, lower, rest[1:end]),
        _processes(rest[end:]),
    )


def place_in_super_pod(text: str, family: Family) -> SuperPod | None:
    """Parse ``info -t spod-info``; None for a chip that is in no super-pod.

    The newest generation has no chip number in the super-pod, and prints the chassis instead of the server for servers
    in racks.
    """
    said = {re.sub(r"[\s_-]", "", key): _whole(value) for key, value in key_values(text).items()}
    return super_pod(
        family, said.get("superpodid"), said.get("serverindex"), said.get("sdid"), chassis=said.get("chassisid")
    )


def _chips(upper: Header, lower: Header, lines: list[str]) -> tuple[SummaryRow, ...]:
    found: list[SummaryRow] = []
    for line in lines:
        values = row(upper, line)
        card = whole(first(values, "NPU", "NPU ID"))
        health = first(values, "Health")
        if card is not None and re.fullmatch("[A-Za-z]+", health):
            found.append(
                SummaryRow(
                    card,
                    0,
                    first(values, "Name"),
                    health,
                    power=_measured(beginning(values, "power")),
                    temperature=_measured(beginning(values, "temp")),
                )
            )
        elif found:
            found[-1] = _completed(found[-1], row(lower, line))
    return tuple(found)


def _completed(one: SummaryRow, values: Row) -> SummaryRow:
    """Add a chip's second line, whose first column can contain several numbers."""
    name, ids = next(((key, each) for key, each in values.items() if key.startswith("chip")), ("", []))
    numbers = [whole(each) for each in ids]
    physical = whole(first(values, "Phy-ID", "Chip Phy-ID"))
    if "phy" in name and len(numbers) > 1:
        physical = numbers[1]
    pairs = [pair(beginning(values, prefix)) for prefix in ("hbm", "memory")]
    sizes = [(whole(each[0]), whole(each[1])) for each in pairs if each is not None]
    used, total = next((each for each in sizes if each[1]), (None, None))
    bus = first(values, "Bus-Id")
    return replace(
        one,
        chip=numbers[0] if numbers and numbers[0] is not None else 0,
        physical_id=physical,
        logic_id=numbers[1] if "device" in name and len(numbers) > 1 else None,
        bus_id=bus if ":" in bus else "",
        busy=_measured(beginning(values, "aicore") or beginning(values, "npu util")),
        memory_used=used,
        memory_total=total,
    )


def _processes(lines: list[str]) -> tuple[ProcessRow, ...]:
    if not lines:
        return ()
    columns = header(lines[0])
    found: list[ProcessRow] = []
    for line in lines[1:]:
        values = row(columns, line)
        ids = [
            whole(each) for key, each_row in values.items() if key.split()[0] in ("npu", "chip") for each in each_row
        ]
        pid = whole(first(values, "Process id"))
        if pid is None or not ids or ids[0] is None:
            continue
        chip = ids[1] if len(ids) > 1 and ids[1] is not None else 0
        found.append(
            ProcessRow(ids[0], chip, pid, first(values, "Process name"), whole(beginning(values, "process memory")))
        )
    return tuple(found)


def _find(lines: list[str], prefix: str) -> tuple[int, Header]:
    for position, line in enumerate(lines):
        found = header(line)
        if found.has(prefix) and any(name.lower().startswith("power") for name in found.names):
            return position, found
    raise UnreadOutput("npu-smi info: there is no table of chips in it")


def _measured(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _whole(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None
