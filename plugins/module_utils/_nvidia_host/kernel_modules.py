# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Build, sign, load, and unload the kernel modules of the NVIDIA driver."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from .._host.driver_installation import COMMAND_SECONDS, DeviceUsers, last_words, property_of, systemctl
from .._host.file_restore import add_texts, not_undone, reason, restore_all
from ..core.errors import AcceleratorError, InUse, as_failure
from ..core.host.system import LONGEST_INSTALLATION, System, text_or_none
from .driver_catalog import MODULE_FILES, DriverError, modules_to_load, modules_to_unload
from .driver_facts import LOADED_MODULES, read_machine

_CDI_UNIT = "nvidia-cdi-refresh.service"
_DKMS = "/var/lib/dkms"
#: Commands that rebuild the initramfs: on Debian and derivatives, and on Red Hat and SUSE.
_INITRAMFS = (["update-initramfs", "-u"], ["dracut", "--force"])
#: Message of modprobe for a rejected signature.
_REFUSED_KEY = "Key was rejected by service"


class KernelModules:
    """The kernel modules of the NVIDIA driver on one node.

    ``timeout`` applies to one build, in seconds. ``restart_allowed`` is whether modules in use can wait for a reboot.
    """

    def __init__(self, system: System, *, timeout: float, restart_allowed: bool) -> None:
        self.system = system
        self.timeout = timeout
        self.restart_allowed = restart_allowed

    # Queries

    def built_version(self, version: str) -> str:
        """Return the module version that the running kernel would load, or an empty string. This version is preferred."""
        found = []
        for name in MODULE_FILES:
            done = self.system.run(["modinfo", "-k", os.uname().release, "-F", "version", name], COMMAND_SECONDS)
            found += done.stdout.split()[:1] if done.returncode == 0 else []
        return version if version in found else next(iter(found), "")

    def state(self) -> str:
        """Return a sentence with the loaded driver version."""
        try:
            machine = read_machine(self.system)
        except OSError as error:
            return f"The loaded kernel modules cannot be read: {reason(error)}"
        if not machine.modules:
            return "The kernel has loaded no NVIDIA kernel module, so no program can use the GPUs"
        return f"The kernel has loaded the driver {machine.version}"

    def build_log(self, version: str) -> str:
        """Return the end of the log of a module build."""
        for name in self.system.list_directory(_DKMS):
            for path in (f"{_DKMS}/{name}/{version}/build/make.log", f"{_DKMS}/{name}/{version}/log/make.log"):
                text = text_or_none(self.system, path) if name.startswith("nvidia") else None
                if text:
                    return f". {path} ends with: {last_words(text)}"
        return ""

    # Actions

    def unload_conflicting(self, users: Callable[[], DeviceUsers], *, reload: bool) -> bool:
        """Unload the modules of other drivers, and with ``reload`` those of the NVIDIA driver.

        ``users`` reads the users of the GPUs. Return whether the unload needs a reboot. Raises InUse.
        """
        machine = read_machine(self.system)
        waits = False
        for name in machine.rivals:
            waits = self.system.run(["rmmod", name], COMMAND_SECONDS).returncode != 0 or waits
        if not reload:
            return waits
        found = users()
        if found.processes and self.restart_allowed:
            return True
        found.refuse_processes("GPUs")
        gone: list[str] = []
        try:
            for name in machine.modules:
                self._unload(name)
                gone.append(name)
        except (AcceleratorError, OSError) as error:
            failed = as_failure(error)
            problems = restore_all((name, partial(self._modprobe, name)) for name in reversed(gone))
            if isinstance(failed, InUse) and self.restart_allowed and not problems:
                return True
            add_texts(failed, [not_undone(problems)])
            raise failed from error.__cause__
        return waits

    def _unload(self, name: str) -> None:
        """Unload a kernel module. Raises InUse."""
        done = self.system.run(["rmmod", name], COMMAND_SECONDS)
        if done.returncode:
            holders = ", ".join(self.system.list_directory(f"{LOADED_MODULES}/{name}/holders"))
            raise InUse(
                f"The kernel module {name} cannot be unloaded: {last_words(done.stderr)}"
                + (f"; {holders} use it" if holders else ""),
                hint="A display or another driver has it. Free it, or allow the machine to be started again: nvidia_driver_reboot: true.",
            )

    def unload_all(self) -> None:
        """Unload the modules of the NVIDIA driver as far as possible."""
        for name in modules_to_unload(self.system.list_directory(LOADED_MODULES)):
            self.system.run(["rmmod", name], COMMAND_SECONDS)

    def _modprobe(self, name: str, version: str = "") -> None:
        """Load a kernel module. Raises DriverError."""
        done = self.system.run(["modprobe", name], COMMAND_SECONDS * 2)
        if done.returncode:
            said = last_words(done.stderr)
            raise DriverError(
                f"The kernel does not load {f'{name} {version}'.rstrip()}: {said}",
                hint="Its signature is by a key that the firmware does not know."
                if _REFUSED_KEY in said
                else "Check the kernel log.",
                code="not-loaded",
            )

    def load(self, version: str, *, reload: bool) -> bool:
        """Load the modules of a driver version. Return whether a reboot is needed for it. Raises DriverError."""
        machine = read_machine(self.system)
        if machine.rivals or (machine.modules and machine.version != version) or (reload and machine.modules):
            return True
        for name in modules_to_load(machine.modules):
            self._modprobe(name, version)
        found = read_machine(self.system).version
        if found != version:
            raise DriverError(f"The kernel has loaded {found or 'no version'}, expected {version}", code="not-loaded")
        switched_off = property_of(self.system, _CDI_UNIT, "UnitFileState") == "disabled"
        if property_of(self.system, _CDI_UNIT, "LoadState") == "loaded" and not switched_off:
            systemctl(self.system, "restart", _CDI_UNIT)
        return False

    def sign(self, version: str) -> None:
        """Rebuild the modules with dkms, which signs them with the configured key. Raises DriverError."""
        kernel = os.uname().release
        names = [
            name
            for name in self.system.list_directory(_DKMS)
            if name.startswith("nvidia") and self.system.exists(f"{_DKMS}/{name}/{version}")
        ]
        if not names:
            raise DriverError(
                f"Found nothing that dkms has built of the driver {version} in {_DKMS}, expected nvidia/{version}",
                hint="Install the driver's package with the kernel modules again.",
                code="not-signed",
            )
        for name in names:
            for verb in ("build", "install"):
                words = ["dkms", verb, "--force", "-m", name, "-v", version, "-k", kernel]
                done = self.system.run(words, self.timeout, longest=LONGEST_INSTALLATION)
                if done.returncode:
                    raise DriverError(
                        f"{' '.join(words)} ended with {done.returncode}: {last_words(done.stdout + done.stderr)}",
                        hint="Check the key and the certificate, and run this again.",
                        code="not-signed",
                    )

    def renew_initramfs(self) -> str:
        """Rebuild the initramfs with the modprobe.d files. Return the error, or an empty string."""
        command = next((each for each in _INITRAMFS if self.system.finds(each[0])), None)
        if command is None:
            return ""
        done = self.system.run(command, self.timeout, longest=LONGEST_INSTALLATION)
        return f"{command[0]} has failed: {last_words(done.stdout + done.stderr)}" if done.returncode else ""
