# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The source that uses npu-smi, for a host whose library is missing or cannot be used.

The results are the same as those of the library, but slower: each query runs a program. Values that npu-smi does not
report, such as fault events and the telemetry of vNPUs, are missing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Callable

from ....errors import AcceleratorError, BackendUnavailable, DeviceFaulty, NotFound, Unsupported
from ....host import pci
from ....host.system import System
from ....model import UNKNOWN_ERROR, Process
from .. import names
from ..dcmi.boundary import refuse_container
from ..dcmi.dcmi import Spot
from ..driver_files import version_of
from ..families import DIES_AS_ONE, UNIFIED_BUS_ID, VENDOR_ID, family_of
from ..health import codes
from ..readings import MEBIBYTE, Condition, Identity, SliceReading, SliceReadings, Told, Work
from . import npu_smi_output
from .npu_smi import Tool
from .npu_smi_tables import key_values, parse_whole_number

_CHIPS = 64
_DIE = re.compile(r"[0-9A-Fa-f]{8}")


class Program:
    """The source that uses the vendor's program npu-smi."""

    name = "npu-smi"

    def __init__(self, system: System) -> None:
        self._system = system
        self._tool = Tool(system)
        self._mapped: Mapping[Spot, npu_smi_output.MappedChip] = {}
        self._is_second = False  # the syntax of the newest generation has no chip numbers on a card
        self._links: Mapping[tuple[int, int], str] | None = None
        self._numbers: dict[Spot, tuple[int, int]] = {}
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Return whether npu-smi lists the chips."""
        return self._is_open

    def open(self) -> None:
        """Read the chips that npu-smi lists. Raises BackendUnavailable."""
        refuse_container(self._system)
        try:
            self._list()
        except (AcceleratorError, ValueError) as error:
            raise BackendUnavailable(f"npu-smi does not list the NPUs: {error}", hint="Install the driver.") from error
        self._links = None
        self._numbers.clear()
        self._is_open = True

    def close(self) -> None:
        """Reject further calls."""
        self._is_open = False

    def driver_version(self) -> str:
        """Return the driver's version from its files, or else from the table of npu-smi."""
        return version_of(self._system) or npu_smi_output.parse_driver_version(
            self._tool.ask(doing="Reading the version of the driver") or ""
        )

    def spots(self) -> tuple[Spot, ...]:
        """Return the positions of the chips."""
        try:
            self._list()
        except ValueError as error:
            raise AcceleratorError(f"npu-smi does not list the NPUs: {error}", code="unread") from error
        return tuple(sorted(self._mapped))

    def uuid(self, spot: Spot) -> str:
        """Return the UUID of the chip at a position."""
        return _uuid(self._values(spot, "board", f"Reading the UUID of {spot}"), spot)

    def identity(self, spot: Spot) -> Identity:
        """Return the fixed facts of the chip at a position."""
        doing = f"Reading the facts of {spot}"
        board, memory = self._values(spot, "board", doing), self._values(spot, "memory", doing)
        physical_id, logic_id = self._ids(spot, doing)
        pod, device_id = self._output_of(spot, "spod-info", doing), _hexadecimal(board, "pci device id")
        vendor_id, bus_id = _hexadecimal(board, "pci vendor id"), board.get("pcie bus info", "")
        if self._is_second and ":" not in bus_id:
            # A chip on the unified bus.
            device_id, vendor_id, bus_id = UNIFIED_BUS_ID, VENDOR_ID, ""
        return Identity(
            physical_id=physical_id,
            logic_id=logic_id,
            uuid=_uuid(board, spot),
            model=self._mapped[spot].name.removeprefix("Ascend ") if spot in self._mapped else "",
            pci_address=pci.normalize_address(bus_id) if bus_id or not self._is_second else "",
            pci_device_id=device_id << 16 | vendor_id,
            pci_subsystem_id=_hexadecimal(board, "subsystem device id") << 16
            | _hexadecimal(board, "subsystem vendor id"),
            memory_bytes=_capacity(memory) * MEBIBYTE,
            board_id=_hexadecimal(board, "board id") if "board id" in board else None,
            product=board.get("product name", ""),
            card_serial=board.get("serial number", ""),
            super_pod=npu_smi_output.parse_super_pod(pod, family_of(device_id)) if pod is not None else None,
        )

    def link(self, one: Spot, other: Spot) -> str | None:
        """Return the link between two chips; None if it is not reported."""
        if self._links is None:
            try:
                output = self._tool.ask("-t", "topo", doing="Reading the links between the chips")
            except Unsupported:
                output = None  # some releases print no text, and only exit with the code
            self._links = npu_smi_output.parse_links(output) if output is not None else {}
        doing = f"Reading the link between {one} and {other}"
        ids = (self._ids(one, doing)[0], self._ids(other, doing)[0])
        return self._links.get(ids)

    def slices(self, spot: Spot) -> SliceReadings | None:
        """Return the resources that vNPUs of a chip share, and its vNPUs."""
        output = self._output_of(spot, "info-vnpu", f"Listing the slices of {spot}")
        if output is None:
            return None
        found = npu_smi_output.parse_vnpus(output)
        totals = {name: amount for name, amount in found.totals.items() if amount and name != "memory"}
        return SliceReadings(
            totals,
            tuple(
                SliceReading(each.slice_id, each.template, each.group, each.is_used, each.container)
                for each in found.slices
            ),
        )

    def free(self, spot: Spot) -> Mapping[str, Fraction]:
        """Return the free resources of a chip for vNPUs."""
        output = self._output_of(spot, "info-vnpu", f"Reading the free resources of {spot}")
        return (
            {name: amount for name, amount in npu_smi_output.parse_vnpus(output).free.items() if name != "memory"}
            if output
            else {}
        )

    def template_table(self, spot: Spot) -> str | None:
        """Return the table of a card's templates."""
        return self._tool.template_table(spot)

    def is_shared(self, spot: Spot) -> bool | None:
        """Return whether several containers can use a chip at a time; None if it is not reported."""
        try:
            return npu_smi_output.parse_is_shared(
                self._output_of(spot, "device-share", f"Reading whether {spot} can be shared") or ""
            )
        except npu_smi_output.UnexpectedOutput:
            return None
        except AcceleratorError as error:
            if error.code == "invalid-argument" and spot in self._mapped:
                return None  # older releases do not support the query
            raise

    def processes(self, spot: Spot) -> tuple[Process, ...]:
        """Return the processes that have a chip, or one of its vNPUs, open."""
        output = self._output_of(spot, "proc-mem", f"Reading the processes of {spot}") or ""
        pids = {int(each) for each in re.findall(r"Process id\s*:\s*(\d+)", output, re.IGNORECASE)}
        return tuple(Process(pid) for pid in sorted(pids))

    def condition(self, spot: Spot, without: Collection[str] = ()) -> Condition:  # noqa: ARG002  npu-smi reports no port
        """Return the health of a chip."""
        found = npu_smi_output.parse_health(self._output_of(spot, "health", f"Reading the health of {spot}") or "")
        return Condition(codes.level_of(found.word), found.errors)

    def work(self, spot: Spot) -> Work:
        """Return the telemetry of a chip."""
        said = self._values(spot, "common", f"Reading the telemetry of {spot}")
        rate, total = _number(said.get("aicore usage rate(%)")), _capacity(said)
        used = _number(said.get("hbm usage rate(%)", said.get("ddr usage rate(%)")))
        return Work(
            power=_number(said.get("npu real-time power(w)")),
            temperature=_number(said.get("temperature(c)")),
            memory_total=total * MEBIBYTE if total else None,
            memory_used=int(total * used / 100) * MEBIBYTE if total and used is not None else None,
            utilization=rate / 100 if rate is not None else None,
        )

    def work_of_slice(self, spot: Spot, slice_id: int) -> Work:  # noqa: ARG002  not reported
        """Return no telemetry, because npu-smi does not report it."""
        return Work()

    def create(self, spot: Spot, template: str, slice_id: int, group: int | None) -> None:
        """Create a vNPU. The caller verifies it with a new list."""
        words = ("-f", template, "-v", str(slice_id), *(("-g", str(group)) if group is not None else ()))
        self._set("create-vnpu", spot, *words, doing=f"Creating slice {slice_id} ({template}) on {spot}")

    def destroy(self, spot: Spot, slice_id: int) -> None:
        """Destroy a vNPU."""
        self._set("destroy-vnpu", spot, "-v", str(slice_id), doing=f"Destroying slice {slice_id} of {spot}")

    def reset(self, spot: Spot) -> None:
        """Reset a chip."""
        self._set("reset", spot, "-m", "1", doing=f"Resetting {spot}", answer="Y\n")

    def rescan(self, spot: Spot) -> None:
        """Do nothing, because npu-smi has no such command."""

    def associated_card(self, spot: Spot) -> int | None:  # noqa: ARG002  not reported
        """Return None, because npu-smi does not report it."""
        return None

    def is_started(self, spot: Spot) -> bool:
        """Return whether a chip has started: it is listed then."""
        return spot in self.spots()

    def hindrance(self, spot: Spot) -> str:
        """Return the mode of the host that prevents vNPUs, with the remedy; "" without one."""
        doing = "Reading the modes of the machine"
        mode = self._tool.ask("-t", "vnpu-mode", doing=doing)
        if mode is not None and not npu_smi_output.parse_is_container_mode(mode):
            return "Slices are made for virtual machines here; `npu-smi set -t vnpu-mode -d 0` has them made for containers."
        work = key_values(self._tool.ask("-t", "work-mode", "-i", str(spot.card), doing=doing) or "")
        if "SMP" in work.values():
            return "The chips work in SMP mode; the management controller sets AMP while the host is off."
        policy = self._tool.ask("-t", "multi-die-policy", doing=doing)
        with contextlib.suppress(npu_smi_output.UnexpectedOutput):
            if policy is not None and not npu_smi_output.parse_are_dies_separate(policy):
                return DIES_AS_ONE
        return ""

    def subscribe(self, callback: Callable[[Told], object]) -> bool:  # noqa: ARG002  npu-smi has no events
        """Return False, because npu-smi has no events."""
        return False

    def _list(self) -> None:
        text = self._tool.ask("-m", doing="Listing the NPUs") or ""
        self._is_second = "slot id" in text.lower()
        self._mapped = {Spot(each.card, each.chip): each for each in npu_smi_output.parse_chips(text)}

    def _place(self, spot: Spot) -> tuple[str, ...]:
        return ("-i", str(spot.card)) if self._is_second else ("-i", str(spot.card), "-c", str(spot.chip))

    def _output_of(self, spot: Spot, what: str, doing: str) -> str | None:
        try:
            return self._tool.ask("-t", what, *self._place(spot), doing=doing)
        except AcceleratorError as error:
            # npu-smi does not report which number it rejects. A chip that was listed exists.
            if error.code == "invalid-argument" and spot not in self._mapped:
                raise NotFound(error.message, hint=error.hint) from error
            raise

    def _values(self, spot: Spot, what: str, doing: str) -> Mapping[str, str]:
        return key_values(self._output_of(spot, what, doing) or "")

    def _ids(self, spot: Spot, doing: str) -> tuple[int, int]:
        """Return the physical and the logic ID of a chip. npu-smi maps physical IDs to positions only, so they are tried in turn."""
        if spot not in self._numbers:
            mapped = self._mapped[spot]
            likely = [each for each in (mapped.physical_id, mapped.logic_id, spot.card) if each is not None]
            for physical_id in dict.fromkeys((*likely, *range(_CHIPS))):
                try:
                    output = self._tool.ask("-t", "phyid-remap", "-p", str(physical_id), doing=doing)
                except AcceleratorError:
                    continue
                found = npu_smi_output.parse_chip_numbers(output or "")
                if (found.get("card"), found.get("chip", 0)) == (spot.card, spot.chip):
                    self._numbers[spot] = (physical_id, found.get("logic", physical_id))
                    break
            else:
                raise DeviceFaulty(f"{doing}: npu-smi does not report its physical id", code=UNKNOWN_ERROR)
        return self._numbers[spot]

    def _set(self, what: str, spot: Spot, *words: str, doing: str, answer: str = "") -> None:
        status, output = self._tool.run("set", "-t", what, *self._place(spot), *words, answer=answer)
        npu_smi_output.raise_failure(status, output, doing)


def _uuid(board: Mapping[str, str], spot: Spot) -> str:
    words = _DIE.findall(board.get("vdie id", ""))
    try:
        return names.chip_uuid([int(word, 16) for word in words])
    except ValueError as error:
        raise DeviceFaulty(
            f"npu-smi does not report which chip {spot} is: {error}",
            hint="Use a driver whose library can be used, or whose npu-smi reports the VDie ID.",
            code=UNKNOWN_ERROR,
        ) from error


def _hexadecimal(said: Mapping[str, str], key: str) -> int:
    try:
        return int(said.get(key, "0"), 16)
    except ValueError:
        return 0


def _capacity(said: Mapping[str, str]) -> int:
    """Return the memory of a chip in MB: that of its HBM if it has one."""
    found = (parse_whole_number(said.get(f"{kind} capacity(mb)", "")) for kind in ("hbm", "ddr"))
    return next((each for each in found if each), 0)


def _number(text: str | None) -> float | None:
    return float(Fraction(text)) if text is not None and re.fullmatch(r"\d+(\.\d+)?", text) else None
