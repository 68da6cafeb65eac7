# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Bind the numbers of GPUs to their PCI addresses: the index, and the number of a GPU for virtual machines.

NVML numbers the GPUs that it finds. When a GPU is removed it gives the others other numbers, and layout rules would match
other GPUs. A GPU keeps its first number here, in this process and, by a file of the node driver, in all later ones.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping

from .. import pci
from ..system import System
from . import names
from .vendor import FACTS

LOG = logging.getLogger(__name__)

FILE = "numbers.json"
VERSION = 1
DIRECTORY = f"/var/lib/kubelet/plugins/{FACTS.driver_name}"


class Numbering:
    """The numbers by PCI address. Safe for threads. Only the node driver writes the file; all others read it."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._lock = threading.Lock()
        self._path = f"{DIRECTORY}/{FILE}"
        self._writes = False
        self._indices: dict[str, int] = {}
        self._machines: dict[str, int] = {}
        self._written: tuple[dict[str, int], dict[str, int]] | None = None

    def use(self, directory: str, *, writes: bool) -> None:
        """Use the file in the state directory of the driver. With ``writes`` ``write`` writes it."""
        with self._lock:
            path = f"{directory}/{FILE}"
            if path != self._path:
                self._path, self._written = path, None
                self._indices.clear()
                self._machines.clear()
            self._writes = self._writes or writes
        self.read()

    def forget(self) -> None:
        """Delete all numbers, in the file as well. GPUs then get new numbers."""
        with self._lock:
            self._indices.clear()
            self._machines.clear()
            self._written = None
            try:
                self._system.remove(self._path)
            except OSError as error:
                LOG.warning("%s cannot be removed: %s", self._path, error)

    def read(self) -> None:
        """Read the file. What this process knows already stays. A file that cannot be read counts as empty."""
        try:
            content = json.loads(self._system.read_text(self._path))
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']} instead of {VERSION}")
            found = _numbers(content["indices"]), _numbers(content["virtual_machines"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            LOG.warning("%s cannot be read, GPUs without a number get new ones: %r", self._path, error)
            return
        if found[0] and not any(self._system.exists(f"{pci.DEVICES}/{address}") for address in found[0]):
            return  # it is of another machine, or all buses have other numbers now
        with self._lock:
            for known, read in zip((self._indices, self._machines), found):
                for address, number in read.items():
                    if number not in known.values():
                        known.setdefault(address, number)
            self._written = found

    def write(self) -> None:
        """Write the numbers where they have changed. An error is logged: the numbers hold in this process nevertheless."""
        with self._lock:
            present = dict(self._indices), dict(self._machines)
            if not self._writes or present == self._written or not present[0]:
                return
            content = {"version": VERSION, "indices": present[0], "virtual_machines": present[1]}
            try:
                self._system.write_atomic(self._path, (json.dumps(content, indent=1) + "\n").encode(), mode=0o600)
            except OSError as error:
                LOG.warning("%s cannot be written: %s", self._path, error)
            else:
                self._written = present

    def index(self, address: str, preferred: int) -> int:
        """Return the index of a GPU; one without a number gets the preferred one, or the lowest that is free."""
        with self._lock:
            return _number(self._indices, address, itertools.chain([preferred], itertools.count()))

    def machine(self, address: str, place: int) -> int:
        """Return the number of a GPU for virtual machines: its place on the bus when it was met first, or one beyond all places."""
        places = len(names.gpus_on_the_bus(self._system))
        with self._lock:
            return _number(self._machines, address, itertools.chain([place], itertools.count(places)))

    def learn(self, address: str, index: int, number: int | None) -> int:
        """Adopt the numbers of a GPU from a claim's record. Returns its index.

        The pod knows the GPU by its number for virtual machines. Another GPU with this number, from an old file, gets a new one.
        """
        with self._lock:
            if number is not None:
                for other in [each for each, taken in self._machines.items() if taken == number and each != address]:
                    del self._machines[other]
                self._machines[address] = number
            return _number(self._indices, address, itertools.chain([index], itertools.count()))

    def indices(self, count: int, places: Mapping[int, str], away: Collection[str]) -> tuple[int, ...]:
        """Return the index of each GPU of NVML's list, each another one.

        ``places`` are the addresses of GPUs that were met, by position. The addresses of the others come from the kernel's
        list, where that is as long as NVML's. Otherwise they count as the known GPUs that were not met and are not ``away``.
        """
        addresses = [places.get(position) for position in range(count)]
        if None in addresses:
            listed = [gpu.address for gpu in names.kernel_gpus(self._system)]
            if len(listed) == count and all(met in (None, listed[each]) for each, met in enumerate(addresses)):
                addresses = list(listed)
        with self._lock:
            found = [None if each is None else _number(self._indices, each, itertools.count()) for each in addresses]
            met = {number for number in found if number is not None}
            taken = {self._indices[each] for each in away if each in self._indices}
            known = sorted(set(self._indices.values()) - met - taken)
            used = {*self._indices.values()}
            free = itertools.chain(known, (number for number in itertools.count() if number not in used))
            return tuple(next(free) if number is None else number for number in found)


def _number(known: MutableMapping[str, int], address: str, choices: Iterator[int]) -> int:
    if address not in known:
        taken = set(known.values())
        known[address] = next(number for number in choices if number not in taken)
    return known[address]


def _numbers(content: Mapping[str, int]) -> dict[str, int]:
    """Return numbers by address. Raises ValueError where two addresses have one number."""
    found = {pci.normalise_bus_id(address): int(number) for address, number in content.items()}
    if len(set(found.values())) < len(found):
        raise ValueError("two GPUs have one number")
    return found
