# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Answers questions about chips by npu-smi: for a machine whose library is missing or cannot be used. The same answers, more slowly.

It runs a program for each question. What it does not tell (faults without being asked, what slices do) nobody learns.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Callable

from .. import pci
from ..errors import AcceleratorError, BackendUnavailable, DeviceFaulty, NotFound
from ..model import UNKNOWN_ERROR, Process
from ..system import System
from . import codes, names, smi, summary
from .dcmi import Spot
from .driver_files import version_of
from .families import DIES_AS_ONE, family_of
from .readings import MEBIBYTE, Condition, Identity, SliceReading, SliceReadings, Told, Work
from .tables import key_values, whole
from .tool import Tool

_CHIPS = 64
_DIE = re.compile(r"[0-9A-Fa-f]{8}")
_HUNDRED = 100


class Program:
    """The source that is the vendor's program."""

    name = "npu-smi"

    def __init__(self, system: System) -> None:
        self._system = system
        self._tool = Tool(system)
        self._mapped: Mapping[Spot, smi.MappedChip] = {}
        self._is_second = False  # the grammar of the newest generation has no numbers of chips on a card
        self._links: Mapping[tuple[int, int], str] | None = None
        self._numbers: dict[Spot, tuple[int, int]] = {}
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether open() has succeeded."""
        return self._is_open

    def open(self) -> None:
        """See which chips the program lists. Raises BackendUnavailable."""
        try:
            self._list()
        except (AcceleratorError, ValueError) as error:
            raise BackendUnavailable(f"npu-smi does not list the NPUs: {error}", hint="Install the driver.") from error
        self._links = None
        self._numbers.clear()
        self._is_open = True

    def close(self) -> None:
        """Ask nothing more."""
        self._is_open = False

    def driver_version(self) -> str:
        """Return the driver's version by its files, else as the table has it."""
        version = version_of(self._system)
        if version:
            return version
        try:
            return summary.summary(self._tool.ask(doing="Reading the version of the driver") or "").driver
        except ValueError:
            return ""

    def spots(self) -> tuple[Spot, ...]:
        """Return where chips are."""
        try:
            self._list()
        except ValueError as error:
            raise AcceleratorError(f"npu-smi does not list the NPUs: {error}", code="unread") from error
        return tuple(sorted(self._mapped))

    def uuid(self, spot: Spot) -> str:
        """Return the UUID of the chip at a spot."""
        return _uuid(self._said(spot, "board", f"Asking {spot} who it is"), spot)

    def identity(self, spot: Spot) -> Identity:
        """Return all that does not change about the chip at a spot."""
        doing = f"Reading the facts of {spot}"
        board, memory = self._said(spot, "board", doing), self._said(spot, "memory", doing)
        physical_id, logic_id = self._ids(spot, doing)
        pod, device_id = self._told(spot, "spod-info", doing), _hexadecimal(board, "pci device id")
        return Identity(
            physical_id=physical_id,
            logic_id=logic_id,
            uuid=_uuid(board, spot),
            model=self._mapped[spot].name.removeprefix("Ascend ") if spot in self._mapped else "",
            pci_address=pci.normalise_bus_id(board.get("pcie bus info", "")),
            pci_device_id=device_id << 16 | _hexadecimal(board, "pci vendor id"),
            pci_subsystem_id=_hexadecimal(board, "subsystem device id") << 16
            | _hexadecimal(board, "subsystem vendor id"),
            memory_bytes=_capacity(memory) * MEBIBYTE,
            board_id=_hexadecimal(board, "board id") if "board id" in board else None,
            product=board.get("product name", ""),
            card_serial=board.get("serial number", ""),
            super_pod=summary.place_in_super_pod(pod, family_of(device_id)) if pod is not None else None,
        )

    def link(self, one: Spot, other: Spot) -> str | None:
        """Return what lies between two chips."""
        if self._links is None:
            told = self._tool.ask("-t", "topo", doing="Reading how the chips lie to each other")
            self._links = smi.links(told).between if told is not None else {}
        doing = f"Asking what lies between {one} and {other}"
        ids = (self._ids(one, doing)[0], self._ids(other, doing)[0])
        return self._links.get(ids)

    def slices(self, spot: Spot) -> SliceReadings | None:
        """Return what a chip shares out, and its slices."""
        told = self._told(spot, "info-vnpu", f"Listing the slices of {spot}")
        if told is None:
            return None
        found = smi.slices(told)
        totals = {name: amount for name, amount in found.totals.items() if amount and name != "memory"}
        return SliceReadings(
            totals,
            tuple(
                SliceReading(each.slice_id, each.template, each.group, each.is_used, each.container)
                for each in found.slices
            ),
        )

    def is_shared(self, spot: Spot) -> bool | None:
        """Whether several containers may have a chip at a time."""
        try:
            return smi.is_shared(self._told(spot, "device-share", f"Asking whether {spot} can be shared") or "")
        except smi.UnreadOutput:
            return None
        except AcceleratorError as error:
            if error.code == "invalid-argument" and spot in self._mapped:
                return None  # an older one does not know the question
            raise

    def processes(self, spot: Spot) -> tuple[Process, ...]:
        """Return the processes that have a chip, or a slice of it, open."""
        told = self._told(spot, "proc-mem", f"Reading the processes of {spot}") or ""
        pids = {int(each) for each in re.findall(r"Process id\s*:\s*(\d+)", told, re.IGNORECASE)}
        return tuple(Process(pid) for pid in sorted(pids))

    def condition(self, spot: Spot, without: Collection[str] = ()) -> Condition:  # noqa: ARG002  it tells of no port
        """Return what a chip says of its health."""
        found = smi.health(self._told(spot, "health", f"Asking {spot} how it is") or "")
        return Condition(codes.level_of(found.word), found.errors)

    def work(self, spot: Spot) -> Work:
        """Return what a chip tells of its present work."""
        said = self._said(spot, "common", f"Reading what {spot} does")
        rate, total = _number(said.get("aicore usage rate(%)")), _capacity(said)
        used = _number(said.get("hbm usage rate(%)", said.get("ddr usage rate(%)")))
        return Work(
            power=_number(said.get("npu real-time power(w)")),
            temperature=_number(said.get("temperature(c)")),
            memory_total=total * MEBIBYTE if total else None,
            memory_used=int(total * used / _HUNDRED) * MEBIBYTE if total and used is not None else None,
            utilization=rate / _HUNDRED if rate is not None else None,
        )

    def work_of_slice(self, spot: Spot, slice_id: int) -> Work:  # noqa: ARG002  it does not tell
        """Return nothing."""
        return Work()

    def create(self, spot: Spot, template: str, slice_id: int, group: int | None) -> None:
        """Make a slice. Whether it is there is for a list that is taken afterwards to say."""
        words = ("-f", template, "-v", str(slice_id), *(("-g", str(group)) if group is not None else ()))
        doing = f"Creating slice {slice_id} ({template}) on {spot}"
        try:
            self._set("create-vnpu", spot, *words, doing=doing)
        except AcceleratorError as error:
            # It ends with "not supported" where a chip has no room, and says of what there is too little.
            if " free" in error.message:
                raise AcceleratorError(error.message, hint=error.hint, code="partition") from error
            raise

    def destroy(self, spot: Spot, slice_id: int) -> None:
        """Destroy a slice."""
        self._set("destroy-vnpu", spot, "-v", str(slice_id), doing=f"Destroying slice {slice_id} of {spot}")

    def reset(self, spot: Spot) -> None:
        """Reset a chip."""
        self._set("reset", spot, "-m", "1", doing=f"Resetting {spot}", answer="Y\n")

    def is_started(self, spot: Spot) -> bool:
        """Whether a chip has come up: it is listed then."""
        return spot in self.spots()

    def hindrance(self, spot: Spot) -> str:
        """Return what of the machine's modes keeps a chip from being cut."""
        doing = "Reading the modes of the machine"
        mode = self._tool.ask("-t", "vnpu-mode", doing=doing)
        if mode is not None and not smi.is_docker_mode(mode):
            return "Slices are made for virtual machines here; `npu-smi set -t vnpu-mode -d 0` has them made for containers."
        work = key_values(self._tool.ask("-t", "work-mode", "-i", str(spot.card), doing=doing) or "")
        if "SMP" in work.values():
            return "The chips work in SMP mode; the management controller sets AMP while the host is off."
        policy = self._tool.ask("-t", "multi-die-policy", doing=doing)
        with contextlib.suppress(smi.UnreadOutput):
            if policy is not None and not smi.is_each_die_alone(policy):
                return DIES_AS_ONE
        return ""

    def subscribe(self, told: Callable[[Told], object]) -> bool:  # noqa: ARG002  it tells when it is asked
        """Tell nothing."""
        return False

    def _list(self) -> None:
        text = self._tool.ask("-m", doing="Listing the NPUs") or ""
        self._is_second = "slot id" in text.lower()
        self._mapped = {Spot(each.card, each.chip): each for each in smi.chips(text)}

    def _place(self, spot: Spot) -> tuple[str, ...]:
        return ("-i", str(spot.card)) if self._is_second else ("-i", str(spot.card), "-c", str(spot.chip))

    def _told(self, spot: Spot, what: str, doing: str) -> str | None:
        try:
            return self._tool.ask("-t", what, *self._place(spot), doing=doing)
        except AcceleratorError as error:
            # Which of the numbers it does not know it does not say; that it was listed is known.
            if error.code == "invalid-argument" and spot not in self._mapped:
                raise NotFound(error.message, hint=error.hint) from error
            raise

    def _said(self, spot: Spot, what: str, doing: str) -> Mapping[str, str]:
        return key_values(self._told(spot, what, doing) or "")

    def _ids(self, spot: Spot, doing: str) -> tuple[int, int]:
        """Return a chip's physical and logic id. The program tells of a physical id which chip it is, and not the other way."""
        if spot not in self._numbers:
            mapped = self._mapped[spot]
            likely = [each for each in (mapped.physical_id, mapped.logic_id, spot.card) if each is not None]
            for physical_id in dict.fromkeys((*likely, *range(_CHIPS))):
                try:
                    told = self._tool.ask("-t", "phyid-remap", "-p", str(physical_id), doing=doing)
                except AcceleratorError:
                    continue
                found = smi.identity(told or "")
                if (found.get("card"), found.get("chip", 0)) == (spot.card, spot.chip):
                    self._numbers[spot] = (physical_id, found.get("logic", physical_id))
                    break
            else:
                raise DeviceFaulty(f"{doing}: npu-smi does not tell its physical id", code=UNKNOWN_ERROR)
        return self._numbers[spot]

    def _set(self, what: str, spot: Spot, *words: str, doing: str, answer: str = "") -> None:
        status, output = self._tool.run("set", "-t", what, *self._place(spot), *words, answer=answer)
        smi.refuse_failure(status, output, doing)


def _uuid(board: Mapping[str, str], spot: Spot) -> str:
    words = _DIE.findall(board.get("vdie id", ""))
    try:
        return names.chip_uuid([int(word, 16) for word in words])
    except ValueError as error:
        raise DeviceFaulty(
            f"npu-smi does not tell which chip {spot} is: {error}",
            hint="Use a driver whose library can be used, or whose npu-smi tells the VDie ID.",
            code=UNKNOWN_ERROR,
        ) from error


def _hexadecimal(said: Mapping[str, str], key: str) -> int:
    try:
        return int(said.get(key, "0"), 16)
    except ValueError:
        return 0


def _capacity(said: Mapping[str, str]) -> int:
    """Return a chip's memory in MB: of its HBM, where it has one."""
    found = (whole(said.get(f"{kind} capacity(mb)", "")) for kind in ("hbm", "ddr"))
    return next((each for each in found if each), 0)


def _number(text: str | None) -> float | None:
    return float(Fraction(text)) if text is not None and re.fullmatch(r"\d+(\.\d+)?", text) else None
