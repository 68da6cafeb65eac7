# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keep the numbers of GPUs by PCI address: the index, the number in published names, and the number for virtual machines.

NVML numbers the GPUs that it finds. After the removal of a GPU, the others get different numbers, and layout rules
would match different GPUs. The kernel gives a GPU the lowest free minor each time that NVIDIA's driver is bound to it,
so names with minors would move to different GPUs. Here a GPU keeps its first numbers in this process, and through a
file of the node driver in all later ones.

Facts: kernel-open/nvidia/nv.c of open-gpu-kernel-modules (nv_linux_add_device_locked, nv_linux_remove_device_locked).
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

from ...host import pci
from ...host.system import System
from . import sysfs
from .vendor import FACTS

LOG = logging.getLogger(__name__)

FILE = "numbers.json"
VERSION = 1
DIRECTORY = f"/var/lib/kubelet/plugins/{FACTS.driver_name}"


class Numbering:
    """The numbers by PCI address. Safe for threads. Only the node driver writes the file. All other programs read it."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._lock = threading.Lock()
        self._path = f"{DIRECTORY}/{FILE}"
        self._writes = False
        self._had_read_error = False  # the numbers of the file are unknown
        self._indices: dict[str, int] = {}
        self._passthrough_numbers: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._written: dict[str, Any] | None = None

    def use(self, directory: str, *, writes: bool) -> None:
        """Use the file in the driver's state directory. ``writes`` enables ``write``."""
        with self._lock:
            path = f"{directory}/{FILE}"
            if path != self._path or (writes and not self._writes):  # the previous driver can have changed the file
                self._path, self._written, self._had_read_error = path, None, False
                self._indices.clear()
                self._passthrough_numbers.clear()
                self._names.clear()
            self._writes = self._writes or writes
        self.read()

    def forget_indices(self) -> None:
        """Delete all numbers except those in published names, also in the file. GPUs then get new numbers."""
        with self._lock:
            self._indices.clear()
            self._passthrough_numbers.clear()
            self._write()

    def read(self) -> None:
        """Read the file. Numbers that this process already has stay. A file with invalid content counts as empty.

        After a read error this process does not write the file, so that the next start finds its numbers.
        """
        try:
            content = json.loads(self._system.read_text(self._path))
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']} instead of {VERSION}")
            indices, passthrough = _numbers(content["indices"]), _numbers(content["virtual_machines"])
            named = _by_address(content.get("names", {}))  # files of previous releases have no names
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            LOG.warning("%s cannot be read, GPUs without a number get new ones: %r", self._path, error)
            self._had_read_error = self._had_read_error or isinstance(error, OSError)
            return
        addresses = {*indices, *named}
        if addresses and not any(self._system.exists(f"{pci.DEVICES}/{address}") for address in addresses):
            return  # the file is from another host, or all PCI buses were renumbered
        with self._lock:
            for known, read in (
                (self._indices, indices),
                (self._passthrough_numbers, passthrough),
                (self._names, named),
            ):
                for address, number in read.items():
                    if number not in known.values():
                        known.setdefault(address, number)
            self._written = content

    def write(self) -> None:
        """Write the numbers if they have changed. An error is logged, and the numbers stay valid in this process."""
        with self._lock:
            if self._indices:
                self._write()

    def _write(self) -> None:
        content = {
            "version": VERSION,
            "indices": dict(self._indices),
            "virtual_machines": dict(self._passthrough_numbers),
            "names": dict(self._names),
        }
        if not self._writes or self._had_read_error or content == self._written:
            return
        try:
            self._system.write_atomic(self._path, (json.dumps(content, indent=1) + "\n").encode(), mode=0o600)
        except OSError as error:
            LOG.warning("%s cannot be written: %s", self._path, error)
        else:
            self._written = content

    def index(self, address: str, preferred: int) -> int:
        """Return the index of a GPU. A GPU without one gets the preferred index, or the lowest free one."""
        with self._lock:
            return _number(self._indices, address, itertools.chain([preferred], itertools.count()))

    def passthrough_number(self, address: str, position: int) -> int:
        """Return a GPU's number for virtual machines: its first position on the bus, or a number beyond all positions."""
        positions = len(sysfs.gpus_on_the_bus(self._system))
        with self._lock:
            return _number(self._passthrough_numbers, address, itertools.chain([position], itertools.count(positions)))

    def name(self, address: str, minor: int) -> int:
        """Return the number in the published names of a GPU: its first minor, or a number beyond all minors.

        Names of previous releases have the minor, so the first start of this release changes no name.
        """
        positions = len(sysfs.gpus_on_the_bus(self._system))
        with self._lock:
            return _number(self._names, address, itertools.chain([minor], itertools.count(positions)))

    def adopt(self, address: str, index: int, number: int | None) -> int:
        """Adopt the numbers of a GPU from a claim's record, and return its index.

        The pod knows the GPU by its number for virtual machines. If an old file gives this number to another GPU, that
        GPU gets a new one.
        """
        with self._lock:
            if number is not None:
                for other in [
                    each for each, taken in self._passthrough_numbers.items() if taken == number and each != address
                ]:
                    del self._passthrough_numbers[other]
                self._passthrough_numbers[address] = number
            return _number(self._indices, address, itertools.chain([index], itertools.count()))

    def indices(self, count: int, known: Mapping[int, str], detached: Collection[str]) -> tuple[int, ...]:
        """Return a unique index for each GPU in NVML's list.

        ``known`` are the PCI addresses of GPUs that were read before, by position. The other addresses come from the
        kernel's list if it has the same length as NVML's. Otherwise the other positions get the indices of GPUs that were
        not read and are not ``detached``.
        """
        addresses = [known.get(position) for position in range(count)]
        if None in addresses:
            listed = [gpu.address for gpu in sysfs.kernel_gpus(self._system)]
            if len(listed) == count and all(address in (None, listed[each]) for each, address in enumerate(addresses)):
                addresses = list(listed)
        with self._lock:
            found = [None if each is None else _number(self._indices, each, itertools.count()) for each in addresses]
            used = set(self._indices.values())
            of_detached = {self._indices[each] for each in detached if each in self._indices}
            unread = sorted(used - {number for number in found if number is not None} - of_detached)
            free = itertools.chain(unread, (number for number in itertools.count() if number not in used))
            return tuple(next(free) if number is None else number for number in found)


def _number(known: MutableMapping[str, int], address: str, choices: Iterator[int]) -> int:
    if address not in known:
        taken = set(known.values())
        known[address] = next(number for number in choices if number not in taken)
    return known[address]


def _numbers(content: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers by address. Raises ValueError if two addresses share a number."""
    found = _by_address(content)
    if len(set(found.values())) < len(found):
        raise ValueError("two GPUs have one number")
    return found


def _by_address(content: Mapping[str, int]) -> dict[str, int]:
    return {pci.normalize_address(address): int(number) for address, number in content.items()}
