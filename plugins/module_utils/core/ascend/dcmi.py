# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Access to DCMI, the vendor's management library, with errors turned into those of the core.

There are two interfaces: ``dcmi_*`` names a chip by its card and its place on it, ``dcmiv2_*``, which the newest generation has
alone, by one number. Which one a machine has is found when the library is opened. It has no function that closes it, so what
is opened once stays loaded: a driver that is exchanged while this process runs is met by the next one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import BackendUnavailable, DeviceFaulty, Unsupported
from ..model import UNKNOWN_ERROR
from ..system import System
from .driver_files import install_folder
from .faults import error_of

SUCCESS, NOT_FOUND, FUNCTION_NOT_FOUND = 0, -8008, -99998
LIBRARY = "libdcmi.so"
#: Below the folder of the installation, and where older releases have it.
_IN_INSTALLATION, _OF_OLDER = "driver/lib64/driver", "/usr/local/dcmi"
#: The most cards that a machine lists, and the most chips of a card.
CARDS, CHIPS_OF_CARD = 64, 4

_FIRST, _SECOND = 1, 2
_PREFIXES: Mapping[int, str] = MappingProxyType({_FIRST: "dcmi_", _SECOND: "dcmiv2_"})
#: What the second interface calls otherwise than the first.
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "get_device_die_v2": "get_device_die_id",
        "get_device_errorcode_v2": "get_device_error_code_list",
        "get_device_chip_info_v2": "get_device_chip_info",
        "get_device_pcie_info_v2": "get_device_pcie_info",
        "get_device_resource_info": "get_device_proc_mem_info",
        "get_card_elabel_v2": "get_device_elabel_info",
        "set_device_reset": "reset_device",
    }
)


@dataclass(frozen=True, order=True)
class Spot:
    """Where a chip is for the vendor's tools: the number of its card, and its own on it. The newest generation has one number alone."""

    card: int
    chip: int = 0

    def __str__(self) -> str:
        return f"chip {self.chip} of card {self.card}"


class Dcmi:
    """The library as one object. All methods may be called from several threads once it is open."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._library: Any = None
        self._interface = 0

    @property
    def is_open(self) -> bool:
        """Whether open() has succeeded."""
        return self._interface != 0

    def open(self) -> None:
        """Load and initialise the library; once more where it is open, so that it sees what has come and gone.

        Raises BackendUnavailable with the reason.
        """
        library = self._library or self._load()
        self._library = library
        codes: dict[str, int] = {}
        for interface, prefix in _PREFIXES.items():
            function = getattr(library, f"{prefix}init", None)
            if function is None:
                continue
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
        """Make no more calls; open() may follow."""
        self._interface = 0

    def spots(self) -> tuple[Spot, ...]:
        """Return where chips are, by what the library lists; asks no chip."""
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
        """Call the function of that name (without its prefix) about one chip. Raises the core's error, which begins with ``doing``."""
        self._raise(self._code(*self._named(spot, name), *arguments), doing)

    def optional(self, spot: Spot, name: str, *arguments: Any, doing: str) -> bool:
        """Call such a function; False where the chip or the library does not have it."""
        try:
            self.about(spot, name, *arguments, doing=doing)
        except Unsupported:
            return False
        return True

    def answered(self, spot: Spot, name: str, *arguments: Any, doing: str) -> bool:
        """Call a function for something that a chip does well without; False unless it is answered. A chip that is ill is ill."""
        return self._answers(self._code(*self._named(spot, name), *arguments), doing)

    def of_card(self, spot: Spot, name: str, *arguments: Any, doing: str) -> bool:
        """Call such a function that is about a whole card."""
        function, *place = self._named(spot, name)
        return self._answers(self._code(function, place[0], *arguments), doing)

    def of_machine(self, name: str, *arguments: Any) -> bool:
        """Call a function that is about no chip; False unless it is answered."""
        return self._code(f"{_PREFIXES[self._opened]}{name}", *arguments) == SUCCESS

    def logic_id(self, spot: Spot, doing: str) -> int:
        """Return the number by which events name a chip."""
        if self._opened == _SECOND:
            return spot.card
        number = ctypes.c_int(0)
        self._raise(self._code("dcmi_get_device_logic_id", ctypes.byref(number), spot.card, spot.chip), doing)
        return number.value

    def physical_id(self, logic_id: int, doing: str) -> int:
        """Return the number that is in the name of a chip's device node."""
        name = "get_device_phyid_from_logicid" if self._opened == _FIRST else "get_chip_phy_id_by_dev_id"
        number = ctypes.c_uint(0)
        prefix = _PREFIXES[self._opened]
        self._raise(self._code(f"{prefix}{name}", ctypes.c_uint(logic_id), ctypes.byref(number)), doing)
        return number.value

    def between(self, one: Spot, other: Spot, doing: str) -> int | None:
        """Return what lies between two chips, as the library numbers it; None where it does not tell."""
        if self._opened == _SECOND:
            return None
        found = ctypes.c_int(0)
        name = "dcmi_get_topo_info_by_device_id"
        code = self._code(name, one.card, one.chip, other.card, other.chip, ctypes.byref(found))
        return found.value if self._answers(code, doing) else None

    def subscribe(self, filtered: Any, told: Any) -> bool:
        """Have a function told of the faults of all chips, for as long as the process lasts; False where there is no such thing."""
        everything = (-1, -1) if self._opened == _FIRST else (-1,)
        code = self._code(f"{_PREFIXES[self._opened]}subscribe_fault_event", *everything, filtered, told)
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
        """Return the numbers of a card's chips, without its controllers. A card that tells nothing is taken to have one."""
        most, controller, processor = (ctypes.c_int(-1) for _each in range(3))
        places = (ctypes.byref(most), ctypes.byref(controller), ctypes.byref(processor))
        if self._code("dcmi_get_device_id_in_card", card, *places) == SUCCESS:
            others = {controller.value, processor.value}
            return [chip for chip in range(min(most.value, CHIPS_OF_CARD)) if chip not in others]
        if self._code("dcmi_get_device_num_in_card", card, ctypes.byref(most)) == SUCCESS:
            return range(min(most.value, CHIPS_OF_CARD))
        return (0,)

    def _code(self, function: str, *arguments: Any) -> int:
        self._opened  # noqa: B018  refuses where nothing is open
        found = getattr(self._library, function, None)
        return FUNCTION_NOT_FOUND if found is None else int(found(*arguments))

    @staticmethod
    def _answers(code: int, doing: str) -> bool:
        """Whether a call was answered; what says that it is not is no error, unless it says that the chip is ill."""
        error = error_of(code, doing) if code != SUCCESS else None
        if isinstance(error, DeviceFaulty) and error.code != UNKNOWN_ERROR:
            raise error
        return error is None

    @staticmethod
    def _raise(code: int, doing: str) -> None:
        if code != SUCCESS:
            raise error_of(code, doing)

    def _load(self) -> Any:
        """Load the library from where the driver's installation has it, else from wherever the loader finds it."""
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
