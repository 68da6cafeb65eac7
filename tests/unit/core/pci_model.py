# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A PCI bus for tests: sysfs as files and links in a directory, and a kernel that binds and unbinds on writes.

The state is in the files, so that it survives a killed process, as on a real bus.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from dra_driver.core.host.passthrough import CONTROL_NODE, DRIVER, IOMMU_NODE
from dra_driver.core.host.pci import DEVICES, DRIVERS
from dra_driver.core.host.system import DeviceNumber, System

GPU_CLASS = "0x030200"


class PciSystem(System):
    """A system with such a bus. The kernel does not unbind the addresses in ``stuck``. Drivers in ``refuses`` do not bind."""

    def __init__(self, root: str, own_driver: str = "nvidia") -> None:
        super().__init__(root)
        self.own_driver = own_driver
        self.stuck: set[str] = set()
        self.refuses: set[str] = set()
        self.written: list[tuple[str, str]] = []
        self.iommufd = False
        self.vfio_drivers = {DRIVER}

    def add(self, address: str, group: str | None, driver: str, kind: str = GPU_CLASS, vendor: str = "0x10de") -> None:
        """Add a device to the bus. An existing device does not change."""
        here = self.path(f"{DEVICES}/{address}")
        if here.is_dir():
            return
        here.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("driver_override", "(null)")):
            (here / name).write_text(f"{text}\n")
        for each in (driver, DRIVER, self.own_driver):
            if each:
                self.path(f"{DRIVERS}/{each}").mkdir(parents=True, exist_ok=True)
        if driver:
            (here / "driver").symlink_to(os.path.relpath(self.path(f"{DRIVERS}/{driver}"), here))
        if group is not None:
            members = self.path(f"/sys/kernel/iommu_groups/{group}/devices")
            members.mkdir(parents=True, exist_ok=True)
            (members / address).touch()
            (here / "iommu_group").symlink_to(os.path.relpath(members.parent, here))

    def add_variant(self, address: str, driver: str, *aliases: str, loaded: bool = True) -> None:
        """Add a VFIO variant driver with the aliases of its devices to the kernel, and a modalias to a device."""
        release = self.path("/proc/sys/kernel/osrelease")
        release.parent.mkdir(parents=True, exist_ok=True)
        release.write_text("6.17.0\n")
        modules = self.path("/lib/modules/6.17.0/modules.alias")
        modules.parent.mkdir(parents=True, exist_ok=True)
        module = driver.replace("-", "_")
        lines = [
            "# Aliases extracted from modules themselves.",
            "alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia",
            *(f"alias {alias} {module}" for alias in aliases),
            "alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci",
        ]
        modules.write_text("\n".join(lines) + "\n")
        modalias = "pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00\n"
        self.path(f"{DEVICES}/{address}/modalias").write_text(modalias)
        if loaded:
            self.path(f"{DRIVERS}/{driver}").mkdir()
            self.path(f"/sys/module/{module}/drivers/pci:{driver}").mkdir(parents=True)
        self.vfio_drivers.add(driver)

    def boot(self, addresses: Iterable[str]) -> None:
        """Reboot: each device has its own driver and no override."""
        for address in addresses:
            here = self.path(f"{DEVICES}/{address}")
            (here / "driver_override").write_text("(null)\n")
            (here / "driver").unlink(missing_ok=True)
            self._bind(here, self.own_driver)

    def put(self, path: str, text: str) -> None:
        """Write a file and act as the kernel does."""
        self.written.append((path, text))
        directory, _slash, name = path.rpartition("/")
        if name == "driver_override":
            self.path(path).write_text(f"{text or '(null)'}\n")
            return
        here = self.path(f"{DEVICES}/{text}")
        driver = directory.rpartition("/")[2]
        if name == "unbind":
            if self._driver(here) != driver:
                raise OSError(19, "No such device")
            if text in self.stuck:
                return
            (here / "driver").unlink()
            shutil.rmtree(here / "vfio-dev", ignore_errors=True)
            return
        override = (here / "driver_override").read_text().strip()
        if self._driver(here) or driver in self.refuses or (driver in self.vfio_drivers) != (override == driver):
            raise OSError(19, "No such device")
        self._bind(here, driver)

    def device_number(self, path: str) -> DeviceNumber | None:
        """Return the number of a VFIO device node, which exists while devices are bound to VFIO."""
        if path in (CONTROL_NODE, IOMMU_NODE):
            return DeviceNumber("c", 10, 196) if path == CONTROL_NODE or self.iommufd else None
        if path.startswith("/dev/vfio/"):
            name = path.rpartition("/")[2]
            bound = [each for each in self.path(DEVICES).iterdir() if self._driver(each) in self.vfio_drivers]
            groups = {os.path.realpath(each / "iommu_group").rpartition("/")[2] for each in bound}
            nodes = {entry.name for each in bound for entry in (each / "vfio-dev").glob("*")}
            found = name in nodes if "/devices/" in path else name in groups
            return DeviceNumber("c", 511 if "/devices/" in path else 236, 1) if found else None
        return super().device_number(path)

    def driver(self, address: str) -> str:
        """Return the driver that a device is bound to."""
        return self._driver(self.path(f"{DEVICES}/{address}"))

    def _bind(self, here: Path, driver: str) -> None:
        (here / "driver").symlink_to(os.path.relpath(self.path(f"{DRIVERS}/{driver}"), here))
        if driver in self.vfio_drivers and self.iommufd:
            (here / "vfio-dev" / f"vfio{sorted(each.name for each in here.parent.iterdir()).index(here.name)}").mkdir(
                parents=True
            )

    @staticmethod
    def _driver(here: Path) -> str:
        link = here / "driver"
        return os.path.realpath(link).rpartition("/")[2] if link.is_symlink() else ""
