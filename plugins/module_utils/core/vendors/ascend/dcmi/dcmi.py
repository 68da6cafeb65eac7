# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Call DCMI, the vendor's management library, and convert its errors to those of the core.

There are two interfaces. ``dcmi_*`` selects a chip by its card and its number on the card. ``dcmiv2_*``, the only one
of the newest generation, selects it by one number. The interface is detected when the library is opened. The library
has no function to close it, so it stays loaded. If the driver is replaced while this process runs, only a new process
uses the new one.

The vendor's usage precautions exclude calls from several threads, so one thread of this process calls the library at a
time.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ....errors import BackendUnavailable, DeviceFaulty, Unsupported
from ....host.system import System
from ....model import UNKNOWN_ERROR
from ..driver_files import install_folder
from ..health.faults import TRANSIENT_CODES, error_of
from .boundary import refuse_container

SUCCESS, NOT_FOUND, FUNCTION_NOT_FOUND = 0, -8008, -99998
LIBRARY = "libdcmi.so"
#: The directories of the library: below the installation, and that of older releases.
_IN_INSTALLATION, _OF_OLDER = "driver/lib64/driver", "/usr/local/dcmi"
#: The maximum number of cards of a host, and of chips of a card.
CARDS, CHIPS_OF_CARD = 64, 4

#: The pauses, in seconds, before a read with a transient code is repeated.
READ_PAUSES = (0.05, 0.2)

_FIRST, _SECOND = 1, 2
#: Held by the thread that calls the library.
_INSIDE = threading.Lock()
_PREFIXES: Mapping[int, str] = MappingProxyType({_FIRST: "dcmi_", _SECOND: "dcmiv2_"})
#: The names that differ in the second interface.
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "get_device_die_v2": "get_device_die_id",
        "get_device_errorcode_v2": "get_device_error_code_list",
        "get_device_chip_info_v2": "get_device_chip_info",
        "get_device_pcie_info_v2": "get_device_pcie_info",
        "get_device_resource_info": "get_device_proc_mem_info",
        "get_card_elabel_v2": "get_device_elabel_info",
        "set_device_reset": "reset_device",
        "rescan_soc": "rescan_device",
    }
)


@dataclass(frozen=True, order=True)
class Spot:
    """The position of a chip for the vendor's tools: the number of its card, and its number on the card.

    The newest generation has one number only.
    """

    card: int
    chip: int = 0

    def __str__(self) -> str:
        return f"chip {self.chip} of card {self.card}"


class Dcmi:
    """The DCMI library. All methods can be called from several threads once it is open. The calls are serialized."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._library: Any = None
        self._interface = 0

    @property
    def is_open(self) -> bool:
        """Return whether DCMI is open."""
        return self._interface != 0

    @property
    def is_second(self) -> bool:
        """Return whether the library has the interface of the newest generation."""
        return self._interface == _SECOND

    def open(self) -> None:
        """Load and initialize the library. A second call finds added and removed chips.

        Raises BackendUnavailable with the reason, also in a process that the kernel driver treats as an ordinary
        container.
        """
        library = self._library or self._load()
        self._library = library
        refuse_container(self._system)
        codes: dict[str, int] = {}
        for interface, prefix in _PREFIXES.items():
            function = getattr(library, f"{prefix}init", None)
            if function is None:
                continue
            with _INSIDE:
                codes[f"{prefix}init"] = code = int(function())
            if code == SUCCESS:
                self._interface = interface
                return
        self._interface = 0
        said = " and ".join(f"{name} says {code}" for name, code in codes.items()) or "it has none of its functions"
        first = error_of(next(iter(codes.values()), FUNCTION_NOT_FOUND), "Opening DCMI")
        raise BackendUnavailable(
            f"{LIBRARY} was loaded and cannot be opened: {said}",
            hint=first.hint or "See that the driver is loaded and /dev/davinci_manager is there.",
        )

    def close(self) -> None:
        """Reject further calls. The library can be opened again."""
        self._interface = 0

    def spots(self) -> tuple[Spot, ...]:
        """Return the positions of the chips that the library lists. Does not query the chips."""
        doing = "Listing the chips"
        count, listed = ctypes.c_int(0), (ctypes.c_int * CARDS)()
        name = "dcmi_get_card_list" if self._interface == _FIRST else "dcmiv2_get_device_list"
        code = self._code(name, ctypes.byref(count), listed, CARDS)
        if code == NOT_FOUND:
            return ()
        if code != SUCCESS:
            raise error_of(code, doing)
        numbers = sorted(listed[: count.value])
        if self._interface == _SECOND:
            return tuple(Spot(number) for number in numbers)
        return tuple(Spot(card, chip) for card in numbers for chip in self._chips_of(card))

    def about(self, spot: Spot, name: str, *arguments: Any, doing: str) -> None:
        """Call a function, named without its prefix, for one chip.

        Raises the core's error, whose text begins with ``doing``.
        """
        self._raise(self._read_code(*self._named(spot, name), *arguments), doing)

    def change(self, spot: Spot, name: str, *arguments: Any, doing: str) -> None:
        """Call a function that changes a chip, without a retry, because a failed call can have had its effect.

        Raises the core's error.
        """
        self._raise(self._code(*self._named(spot, name), *arguments), doing)

    def optional(self, spot: Spot, name: str, *arguments: Any, doing: str) -> bool:
        """Call such a function. Return False if the chip or the library does not support it."""
        try:
            self.about(spot, name, *arguments, doing=doing)
        except Unsupported:
            return False
        return True

    def answered(self, spot: Spot, name: str, *arguments: Any, doing: str) -> bool:
        """Call a function for an optional value, and return whether it succeeded.

        Raises DeviceFaulty if the chip is faulty.
        """
        return self._answers(self._read_code(*self._named(spot, name), *arguments), doing)

    def of_card(self, spot: Spot, name: str, *arguments: Any, doing: str) -> bool:
        """Call such a function for a whole card."""
        function, *place = self._named(spot, name)
        return self._answers(self._code(function, place[0], *arguments), doing)

    def of_machine(self, name: str, *arguments: Any) -> bool:
        """Call a function that concerns no chip, and return whether it succeeded."""
        return self._code(f"{_PREFIXES[self._opened]}{name}", *arguments) == SUCCESS

    def logic_id(self, spot: Spot, doing: str) -> int:
        """Return the number by which events identify a chip."""
        if self._opened == _SECOND:
            return spot.card
        number = ctypes.c_int(0)
        self._raise(self._code("dcmi_get_device_logic_id", ctypes.byref(number), spot.card, spot.chip), doing)
        return number.value

    def physical_id(self, logic_id: int, doing: str) -> int:
        """Return the number in the name of a chip's device node."""
        name = "get_device_phyid_from_logicid" if self._opened == _FIRST else "get_chip_phy_id_by_dev_id"
        number = ctypes.c_uint(0)
        prefix = _PREFIXES[self._opened]
        self._raise(self._code(f"{prefix}{name}", ctypes.c_uint(logic_id), ctypes.byref(number)), doing)
        return number.value

    def between(self, one: Spot, other: Spot, doing: str) -> int | None:
        """Return the library's number for the link between two chips; None if it is not reported."""
        if self._opened == _SECOND:
            return None
        found = ctypes.c_int(0)
        name = "dcmi_get_topo_info_by_device_id"
        code = self._code(name, one.card, one.chip, other.card, other.chip, ctypes.byref(found))
        return found.value if self._answers(code, doing) else None

    def subscribe(self, filtered: Any, callback: Any) -> bool:
        """Register a function for the fault events of all chips until the process ends.

        Return False if this is not supported.
        """
        everything = (-1, -1) if self._opened == _FIRST else (-1,)
        code = self._code(f"{_PREFIXES[self._opened]}subscribe_fault_event", *everything, filtered, callback)
        return code == SUCCESS

    @property
    def _opened(self) -> int:
        if not self._interface:
            raise BackendUnavailable("DCMI is not open", hint="Open the backend first.")
        return self._interface

    def _named(self, spot: Spot, name: str) -> tuple[Any, ...]:
        if self._opened == _SECOND:
            return (f"dcmiv2_{_OTHER_NAMES.get(name, name)}", spot.card)
        return (f"dcmi_{name}", spot.card, spot.chip)

    def _chips_of(self, card: int) -> Sequence[int]:
        """Return the numbers of a card's chips, without its controllers.

        A card that reports nothing counts as one chip.
        """
        most, controller, processor = (ctypes.c_int(-1) for _each in range(3))
        places = (ctypes.byref(most), ctypes.byref(controller), ctypes.byref(processor))
        if self._code("dcmi_get_device_id_in_card", card, *places) == SUCCESS:
            others = {controller.value, processor.value}
            return [chip for chip in range(min(most.value, CHIPS_OF_CARD)) if chip not in others]
        if self._code("dcmi_get_device_num_in_card", card, ctypes.byref(most)) == SUCCESS:
            return range(min(most.value, CHIPS_OF_CARD))
        return (0,)

    def _read_code(self, function: str, *arguments: Any) -> int:
        """Call a function that reads, and repeat it while its code is transient."""
        code = self._code(function, *arguments)
        for pause in READ_PAUSES:
            if code not in TRANSIENT_CODES:
                break
            time.sleep(pause)
            code = self._code(function, *arguments)
        return code

    def _code(self, function: str, *arguments: Any) -> int:
        self._opened  # noqa: B018  refuses where nothing is open
        found = getattr(self._library, function, None)
        if found is None:
            return FUNCTION_NOT_FOUND
        with _INSIDE:
            return int(found(*arguments))

    @staticmethod
    def _answers(code: int, doing: str) -> bool:
        """Return whether a call succeeded. A failure raises an error only if it means that the chip is faulty."""
        error = error_of(code, doing) if code != SUCCESS else None
        if isinstance(error, DeviceFaulty) and error.code != UNKNOWN_ERROR:
            raise error
        return error is None

    @staticmethod
    def _raise(code: int, doing: str) -> None:
        if code != SUCCESS:
            raise error_of(code, doing)

    def _load(self) -> Any:
        """Load the library from the driver's installation, or else from the loader's path. Raises BackendUnavailable."""
        folders = (f"{install_folder(self._system)}/{_IN_INSTALLATION}", _OF_OLDER)
        paths = [f"{folder}/{LIBRARY}" for folder in folders]
        reasons = []
        for path in (*(str(self._system.path(path)) for path in paths if self._system.exists(path)), LIBRARY):
            try:
                return ctypes.CDLL(path)
            except OSError as error:
                reasons.append(str(error))
        raise BackendUnavailable(
            f"{LIBRARY} was not found in {', '.join(folders)}, nor by the loader ({'; '.join(reasons)})",
            hint="Install the driver of the NPUs.",
        )
