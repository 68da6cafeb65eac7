# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The control function of the simulated libraries: text commands in, JSON out (``nvml/MACHINE_FORMAT.md``,
``dcmi/MACHINE_FORMAT.md``).
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import LibraryError

REPLY_SIZE = 4 << 20


@dataclass(frozen=True)
class Vendor:
    """A vendor's management library: its name, its directory, and the key of its devices.

    ``state`` is the name of the state file next to it, which contains the driver's version.
    """

    word: str
    interface: str
    soname: str
    folder: str
    state: str
    devices: str


NVIDIA = Vendor("nvidia", "NVML", "libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu", "libnvidia-gpusim.so.%s", "gpus")
ASCEND = Vendor("ascend", "DCMI", "libdcmi.so", "/usr/local/Ascend/driver/lib64/driver", "libdcmi-sim.so.%s", "npus")
VENDORS = {vendor.word: vendor for vendor in (NVIDIA, ASCEND)}


class Library:
    """One loaded library. Its state file is in the library's directory."""

    def __init__(self, path: Path, vendor: Vendor = NVIDIA) -> None:
        self.vendor = vendor
        self.path = path
        try:
            self._function = ctypes.CDLL(str(path)).acceleratorSimulatorControl
        except (OSError, AttributeError) as error:
            raise LibraryError(
                f"{path}: not the simulated library ({error}); the role dra.accelerators.simulator installs it"
            ) from error
        self._function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint]
        self._function.restype = ctypes.c_int

    def command(self, text: str) -> dict[str, Any]:
        """Run one command and return its answer. A refusal raises a LibraryError with the library's message."""
        reply = ctypes.create_string_buffer(REPLY_SIZE)
        code = self._function(text.encode(), reply, REPLY_SIZE)
        try:
            answer = json.loads(reply.value.decode("utf-8"))
        except ValueError as error:
            raise LibraryError(f"{text!r}: the library answered {int(code)} and no JSON: {error}") from error
        if code != 0 or not answer.get("ok"):
            raise LibraryError(
                f"{text.split()[0]}: {answer.get('error', 'refused')} ({self.vendor.interface} error {int(code)})"
            )
        return dict(answer)

    def loaded(self) -> dict[str, Any] | None:
        """Return the output of ``show``, or None if no machine is loaded."""
        try:
            answer = self.command("show")
        except LibraryError:
            return None
        return answer if answer.get(self.vendor.devices) else None

    def devices(self) -> list[dict[str, Any]]:
        """Return the output of ``show`` for each device."""
        return list(self.command("show")[self.vendor.devices])


def find_library(folder: Path, vendor: Vendor = NVIDIA) -> Path:
    """Return the path of the library in a directory. Raise a LibraryError with a remedy if it does not exist."""
    path = folder / vendor.soname
    if not path.exists():
        raise LibraryError(
            f"{path} does not exist: run the role dra.accelerators.simulator, or set --library-folder to the libraries' directory"
        )
    return path


def folder_of(vendor: Vendor, root: str, folder: Path | None) -> Path:
    """Return the directory of a vendor's library: the given one, or that of the vendor's driver."""
    return folder or Path(root + vendor.folder)


def loaded_libraries(root: str, folder: Path | None) -> list[Library]:
    """Return the libraries with a loaded machine, else the first existing one. Raise a LibraryError without any
    library.
    """
    found = [
        Library(path, vendor)
        for vendor in VENDORS.values()
        if (path := folder_of(vendor, root, folder) / vendor.soname).exists()
    ]
    if not found:
        find_library(folder_of(NVIDIA, root, folder))
    return [library for library in found if library.loaded() is not None] or found[:1]


def library_of(libraries: list[Library], selection: str, vendor: str | None = None) -> Library:
    """Return the library of the selected devices. With two libraries, ``vendor`` or a device identity must distinguish
    them.
    """
    fitting = [each for each in libraries if vendor in (None, each.vendor.word)]
    if len(fitting) > 1:
        word = selection.partition(",")[0].lower()
        fitting = [
            each
            for each in fitting
            if len(word) > 3 and any(word in known for device in each.devices() for known in _identities(device))
        ]
    if len(fitting) != 1:
        raise LibraryError(
            f"{selection}: this machine has devices of {' and '.join(each.vendor.word for each in libraries)}; "
            "name one with --vendor, or the device by its PCI address or UUID"
        )
    return fitting[0]


def _identities(device: dict[str, Any]) -> list[str]:
    return [str(device[key]).lower() for key in ("uuid", "vdie", "pci_address") if key in device]
