# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Simulate the kernel's part of the PCI bus: bind and unbind devices when a program writes to the sysfs files.

The files are ordinary files, and a write is noticed when the file is closed. A kernel acts before the write returns.
Here the action follows a moment later, and a device that cannot be bound does not fail the write.
"""

from __future__ import annotations

import ctypes
import os
import posixpath
import queue
import re
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from .entries import Node
from .errors import SimulatorError
from .hardware import NPU_DRIVER
from .place import WORKSHOP, write_entry
from .trees import VFIO_DRIVER

DEVICES, DRIVERS = "/sys/bus/pci/devices", "/sys/bus/pci/drivers"
PROBE = "/sys/bus/pci/drivers_probe"
INFORMATION = "/proc/driver/nvidia/gpus"
NVIDIA = "nvidia"
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
IN_CLOSE_WRITE, IN_CLOEXEC = 0x8, 0x80000
EVENT = struct.Struct("iIII")
LOOK_SECONDS = 0.5
POLL_SECONDS = 0.02


class Bus:
    """The PCI devices of one machine below ``root`` (empty for the running system).

    The library provides three callbacks: ``in_use`` returns whether a process has a GPU open, ``attached`` is called
    after a device was bound to its driver, and ``detached`` after it was unbound. ``nodes`` are device nodes that are
    created and removed together with a device.
    """

    def __init__(
        self,
        root: str,
        majors: Mapping[str, int],
        in_use: Callable[[str], bool] = lambda _address: False,
        attached: Callable[[str], None] = lambda _address: None,
        patience: float = 600.0,
        nodes: Mapping[str, tuple[str, Node]] | None = None,
        detached: Callable[[str], None] = lambda _address: None,
    ) -> None:
        self._root = root
        self._majors = majors
        self._in_use = in_use
        self._attached = attached
        self._detached = detached
        self._patience = patience
        self._device_nodes = nodes or {}

    def path(self, path: str) -> Path:
        """Return the real path of a path of the machine."""
        return Path(self._root + path)

    def files(self) -> list[str]:
        """Return the files that trigger an action when they are written."""
        found = [f"{DRIVERS}/{driver}/{name}" for driver in self._drivers() for name in ("bind", "unbind")]
        found += [f"{DEVICES}/{address}/driver_override" for address in self.addresses()]
        return [path for path in [*found, PROBE] if self.path(path).is_file()]

    def addresses(self) -> list[str]:
        """Return the devices that can be passed to a virtual machine: those with an IOMMU group."""
        return sorted(
            each.name
            for each in self.path(DEVICES).glob("*")
            if (each / "iommu_group").is_symlink() and (each / "driver_override").is_file()
        )

    def written(self, path: str) -> list[tuple[str, Callable[[], object]]]:
        """Return the kernel's actions after a write to the file, as pairs of device address and function."""
        file = self.path(path)
        text = file.read_text(encoding="ascii", errors="replace")
        folder, name = posixpath.split(path)
        if name == "driver_override":
            if not text.strip():
                file.write_text("(null)\n", encoding="ascii")
            return []
        if text:
            file.write_text("", encoding="ascii")
        driver = posixpath.basename(folder) if name != "drivers_probe" else ""
        action = self.unbind if name == "unbind" else self.bind
        return [(address, partial(action, address, driver)) for address in ADDRESS.findall(text)]

    def driver_of(self, address: str) -> str:
        """Return the driver that a device is bound to, or an empty string."""
        link = self.path(f"{DEVICES}/{address}/driver")
        return link.readlink().name if link.is_symlink() else ""

    def bind(self, address: str, driver: str) -> bool:
        """Bind an unbound device to this driver, or to its matching driver; return whether it was bound."""
        device = self.path(f"{DEVICES}/{address}")
        if not device.is_dir() or self.driver_of(address):
            return False
        override = (device / "driver_override").read_text(encoding="ascii").strip()
        fitting = self._own_driver(device) if override == "(null)" else override
        if fitting not in self._drivers() or driver not in ("", fitting):
            return False
        if fitting == VFIO_DRIVER:
            self._nodes(address, make=True)
        elif fitting == NVIDIA:
            saved = self.path(f"{WORKSHOP}/detached/{address}")
            if saved.is_file():
                shown = self.path(f"{INFORMATION}/{address}/information")
                shown.parent.mkdir(parents=True, exist_ok=True)
                shown.write_bytes(saved.read_bytes())
            self._attached(address)
        self._link(address, fitting)  # last: other programs read this link
        return True

    def unbind(self, address: str, driver: str) -> bool:
        """Unbind a device from a driver when no process has it open; return whether it was unbound."""
        if not address or self.driver_of(address) != driver:
            return False
        until = time.monotonic() + self._patience
        while driver == NVIDIA and self._in_use(address):
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        if driver == VFIO_DRIVER:
            self._nodes(address, make=False)
        elif driver == NVIDIA:
            self._hide(address)
            self._detached(address)
        self._unlink(address, driver)
        return True

    def unplug(self, address: str) -> bool:
        """Remove a device from the machine even if it is in use; return whether it was present. A scan of the bus then
        omits it.
        """
        listed, saved = self.path(f"{DEVICES}/{address}"), self.path(f"{WORKSHOP}/unplugged/{address}")
        if not listed.is_symlink():
            return False
        driver = self.driver_of(address)
        if driver == NVIDIA:
            self._hide(address)
        elif driver == VFIO_DRIVER:
            self._nodes(address, make=False)
        if driver:
            self._unlink(address, driver)
        if address in self._device_nodes:
            self.path(self._device_nodes[address][0]).unlink(missing_ok=True)
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text(str(listed.readlink()), encoding="utf-8")
        listed.unlink()
        return True

    def plug(self, address: str) -> bool:
        """Reinsert a removed device and bind it to its own driver; return whether it had been removed."""
        saved = self.path(f"{WORKSHOP}/unplugged/{address}")
        if not saved.is_file():
            return False
        self.path(f"{DEVICES}/{address}").symlink_to(saved.read_text(encoding="utf-8"))
        saved.unlink()
        if address in self._device_nodes:
            path, node = self._device_nodes[address]
            write_entry(self.path(path), node, plain_nodes=bool(self._root))
        self.path(f"{DEVICES}/{address}/driver_override").write_text("(null)\n", encoding="ascii")
        return self.bind(address, "")

    def _drivers(self) -> list[str]:
        return sorted(
            each.name for each in self.path(DRIVERS).glob("*") if (each / "bind").is_file() and not each.is_symlink()
        )

    @staticmethod
    def _own_driver(device: Path) -> str:
        vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        if kind.startswith("0x0403"):
            return "snd_hda_intel"
        if kind.startswith("0x02"):
            return "mlx5_core"
        if vendor == "0x19e5" and kind.startswith("0x12"):
            return NPU_DRIVER
        return NVIDIA if vendor == "0x10de" and kind.startswith("0x03") else ""

    def _hide(self, address: str) -> None:
        """Remove the ``/proc`` entry of a GPU that its driver shows, and save it for the next bind."""
        shown = self.path(f"{INFORMATION}/{address}/information")
        if shown.is_file():
            saved = self.path(f"{WORKSHOP}/detached/{address}")
            saved.parent.mkdir(parents=True, exist_ok=True)
            saved.write_bytes(shown.read_bytes())
            shown.unlink()
            shown.parent.rmdir()

    def _unlink(self, address: str, driver: str) -> None:
        self.path(f"{DEVICES}/{address}/driver").unlink()
        self.path(f"{DRIVERS}/{driver}/{address}").unlink(missing_ok=True)

    def _link(self, address: str, driver: str) -> None:
        device = Path(os.path.realpath(self.path(f"{DEVICES}/{address}")))
        folder = Path(os.path.realpath(self.path(f"{DRIVERS}/{driver}")))
        (folder / address).unlink(missing_ok=True)
        (folder / address).symlink_to(os.path.relpath(device, folder))
        temporary = device / ".driver"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(folder, device))
        temporary.rename(device / "driver")

    def _nodes(self, address: str, make: bool) -> None:
        """Create or remove the device nodes of a device bound to vfio-pci: the group's, which its devices share, and
        its own.
        """
        device = self.path(f"{DEVICES}/{address}")
        group = (device / "iommu_group").readlink().name
        number = self.addresses().index(address)
        own = device / "vfio-dev" / f"vfio{number}"
        nodes = [(self.path(f"/dev/vfio/{group}"), self._majors["vfio"], int(group) & 0xFFFFF)]
        nodes.append((self.path(f"/dev/vfio/devices/vfio{number}"), self._majors["vfio-dev"], number))
        if make:
            own.mkdir(parents=True, exist_ok=True)
        elif own.is_dir():
            own.rmdir()
            own.parent.rmdir()
        members = [each.name for each in self.path(f"/sys/kernel/iommu_groups/{group}/devices").iterdir()]
        others = any(self.driver_of(each) == VFIO_DRIVER for each in members if each != address)
        for node, major, minor in nodes[1:] if others and not make else nodes:
            node.unlink(missing_ok=True)
            if make:
                node.parent.mkdir(parents=True, exist_ok=True)
                self._node(node, major, minor)

    def _node(self, node: Path, major: int, minor: int) -> None:
        if self._root:
            node.touch()
            return
        os.mknod(node, 0o020600, os.makedev(major, minor))


class Notifier:
    """Report which files were written and closed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(IN_CLOEXEC)
        if self._descriptor < 0:
            raise SimulatorError(f"inotify: {os.strerror(ctypes.get_errno())}")
        self._paths: dict[int, str] = {}

    def watch(self, path: str, name: str) -> bool:
        """Watch a file; return whether it is new. A repeated call has no effect unless another file is at the same
        path.
        """
        number = self._libc.inotify_add_watch(self._descriptor, path.encode(), IN_CLOSE_WRITE)
        new = number >= 0 and number not in self._paths
        if new:
            self._paths[number] = name
        return new

    def wait(self, seconds: float) -> list[str]:
        """Return the files that were written, each once, after at most ``seconds``."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return []
        data, offset, found = os.read(self._descriptor, 65536), 0, []
        while offset < len(data):
            number, _mask, _cookie, length = EVENT.unpack_from(data, offset)
            offset += EVENT.size + length
            if number in self._paths and self._paths[number] not in found:
                found.append(self._paths[number])
        return found


class Workers:
    """One thread per device: actions on one device run in order, and other devices do not wait for them."""

    def __init__(self) -> None:
        self._queues: dict[str, queue.Queue[Callable[[], object]]] = {}

    def do(self, address: str, action: Callable[[], object]) -> None:
        """Queue an action for a device after all earlier ones."""
        if address not in self._queues:
            self._queues[address] = queue.Queue()
            threading.Thread(target=self._work, args=(address,), daemon=True).start()
        self._queues[address].put(action)

    def _work(self, address: str) -> None:
        while True:
            action = self._queues[address].get()
            try:
                action()
            except (OSError, SimulatorError) as error:
                sys.stderr.write(f"accelerator-simulator: {address}: {error}\n")


def serve(bus: Bus, stop: Callable[[], bool] = lambda: False) -> None:
    """Run the kernel's part until ``stop`` returns true."""
    notifier, workers = Notifier(), Workers()
    while not stop():
        # A file can contain text that was written before the watch began.
        new = [path for path in bus.files() if notifier.watch(str(bus.path(path)), path)]
        for path in new or notifier.wait(LOOK_SECONDS):
            try:
                todo = bus.written(path)
            except OSError as error:
                sys.stderr.write(f"accelerator-simulator: {path}: {error}\n")
                continue
            for address, action in todo:
                workers.do(address, action)
