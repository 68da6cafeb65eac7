# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The VFIO driver of a PCI device: vfio-pci, or a variant driver that the kernel has for this device.

Some boards work in a virtual machine only with their variant driver: it shows memory that vfio-pci does not. Facts: the
kernel lists the devices of each variant driver in ``modules.alias`` with the prefix ``vfio_pci:``
(include/linux/mod_devicetable.h, scripts/mod/file2alias.c). As libvirt does, the entry with the fewest wildcards is chosen.
"""

from __future__ import annotations

import fnmatch

from ..errors import AcceleratorError, NotPermitted
from . import pci
from .system import System

VFIO_PCI = "vfio-pci"
_ALIAS_PREFIX = "vfio_pci:"
_RELEASE = "/proc/sys/kernel/osrelease"
# The second path is for a service that sees an empty /lib/modules (ProtectKernelModules in its systemd unit).
_ALIASES = ("/lib/modules/{release}/modules.alias", "/proc/1/root/lib/modules/{release}/modules.alias")


def is_vfio(driver: str) -> bool:
    """Return whether a driver gives devices to virtual machines: vfio-pci or a variant of it."""
    return driver.replace("_", "-").endswith(VFIO_PCI)


def best_driver(system: System, address: str) -> str:
    """Return the name of the VFIO driver for a device. Raises AcceleratorError, such as NotPermitted, if the kernel's list cannot be read."""
    alias = pci.modalias_of(system, address)
    if not alias.startswith("pci:"):
        return VFIO_PCI
    wanted = _ALIAS_PREFIX + alias.removeprefix("pci:")
    found = [
        (pattern.count("*"), module)
        for pattern, module in _parse_aliases(_read_aliases(system, address))
        if fnmatch.fnmatchcase(wanted, pattern)
    ]
    return _driver_of_module(system, min(found)[1]) if found else VFIO_PCI


def _read_aliases(system: System, address: str) -> str:
    try:
        release = system.read_text(_RELEASE).strip()
        for path in _ALIASES:
            try:
                return system.read_text(path.format(release=release))
            except (FileNotFoundError, NotADirectoryError):
                continue
    except PermissionError as error:
        raise NotPermitted(
            f"Device {address} cannot be passed through: the kernel's list of VFIO drivers cannot be read ({error.filename})",
            hint="Give the driver CAP_SYS_PTRACE: the role dra_driver does so where the layout has passthrough.",
        ) from error
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # vfio-pci in place of the board's own driver would hide memory from the virtual machine
        raise AcceleratorError(
            f"Device {address} cannot be passed through: the kernel's list of VFIO drivers cannot be read: {error}",
            hint="Check the file system of the node. The kubelet retries the request.",
            code="vfio-drivers-unreadable",
        ) from error
    return ""  # a kernel without modules has no variant drivers to load


def _parse_aliases(text: str) -> list[tuple[str, str]]:
    lines = (line.split() for line in text.splitlines() if line.startswith(f"alias {_ALIAS_PREFIX}"))
    return [(words[1], words[2]) for words in lines if len(words) == 3]


def _driver_of_module(system: System, module: str) -> str:
    """Return the name of a module's PCI driver, from sysfs if the module is loaded."""
    names = [name for name in system.list_directory(f"/sys/module/{module}/drivers") if name.startswith("pci:")]
    return names[0].removeprefix("pci:") if len(names) == 1 else module.replace("_", "-")
