# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check whether the fabric manager runs, which a reset of a single GPU needs on Ampere boards with NVSwitches.

Facts: the tables of --gpu-reset in the manual of nvidia-smi. On NVSwitch systems, GPUs from Ampere on are reset
individually while the fabric manager runs. Without it, all connected GPUs are reset in one command, except that GPUs
from Hopper on are still reset individually. The program is nv-fabricmanager (Fabric Manager User Guide, "Fabric Manager
Service File"). The kernel keeps 15 characters of its name (proc(5)).
"""

from __future__ import annotations

from ....host.system import System
from ....model import Device
from ...host_texts import text_or_empty
from .nvswitch import switches

PROGRAM, UNIT = "nv-fabricmanager", "nvidia-fabricmanager"
_COMM = PROGRAM[:15]
_ARCHITECTURE = "Ampere"


class FabricProcess:
    """The process of the fabric manager on this host."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._has_switches: bool | None = None
        self._pid = ""

    def why_reset_blocked(self, device: Device) -> str:
        """Return why a GPU cannot be reset now, with a remedy; "" if it can.

        In a virtual machine without switches, the fabric manager runs outside. A process without the host's PID namespace cannot see it.
        """
        if not device.switched or device.attributes.get("architecture") != _ARCHITECTURE:
            return ""
        if self._has_switches is None:
            self._has_switches = bool(switches(self._system).on_bus)
        if not self._has_switches or self._is_first_process() or self._is_running():
            return ""
        return (
            f"The fabric manager ({PROGRAM}) does not run. Without it, no GPU of an A100 board with NVSwitches can be reset alone. "
            f"Start it with `systemctl start {UNIT}`, and try again"
        )

    def _is_running(self) -> bool:
        if self._is_program(self._pid):
            return True
        names = self._system.list_directory("/proc")
        self._pid = next((name for name in names if name.isdigit() and self._is_program(name)), "")
        return bool(self._pid)

    def _is_program(self, pid: str) -> bool:
        return bool(pid) and text_or_empty(self._system, f"/proc/{pid}/comm") == _COMM

    def _is_first_process(self) -> bool:
        """Return whether this process is the first one of a PID namespace, as in a container."""
        try:
            return self._system.path("/proc/self").readlink().name == "1"
        except OSError:
            return False
