# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The host and chip settings that vNPUs and shared chips depend on, read and set with npu-smi.

They change only on request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, TypeVar

from ...errors import AcceleratorError
from ...model import Device
from .families import family_of
from .npu_smi import npu_smi_output
from .npu_smi.npu_smi import Tool

Answer = TypeVar("Answer")

RECOVER, SHARE = "recover", "device_share"
_TYPES: Mapping[str, str] = {RECOVER: "vnpu-cfg-recover", SHARE: "device-share"}
_CONFIRMATION_PROMPT = re.compile(r"[\[(]\s*y(?:es)?\s*/\s*no?\s*[\])]\s*:?", re.IGNORECASE)
_WORK_MODES = {"amp": True, "smp": False}


@dataclass(frozen=True)
class Switch:
    """A setting to change: of one chip, or of the host if ``device`` is None."""

    name: str
    enabled: bool
    device: Device | None = None

    def describe(self) -> str:
        """Return the change as text."""
        word = "on" if self.enabled else "off"
        if self.device is None:
            return f"switch the recovery of slices after a reboot {word}"
        return f"switch sharing of {self.device.uuid} between containers {word}"

    def to_dict(self) -> dict[str, Any]:
        """Return the step as a mapping for JSON."""
        found: dict[str, Any] = {"step": f"set_{self.name}", "enabled": self.enabled, "description": self.describe()}
        return found if self.device is None else {**found, "device_uuid": self.device.uuid}


class Switches:
    """The settings of one host."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    def are_vnpus_for_containers(self) -> bool | None:
        """Return whether vNPUs are for containers and not for virtual machines; None if it is not reported."""
        return self._read(npu_smi_output.parse_is_container_mode, "vnpu-mode")

    def is_asymmetric(self, device: Device) -> bool | None:
        """Return whether a chip works in AMP mode, in which it can be partitioned; None if it has no other mode."""
        card, _chip = self._card_and_chip(device)
        return self._read(
            lambda text: npu_smi_output.parse_choice(text, _WORK_MODES, "work-mode"), "work-mode", "-i", card
        )

    def are_dies_separate(self) -> bool | None:
        """Return whether each die of a module works separately, and can be partitioned; None without such modules."""
        return self._read(npu_smi_output.parse_are_dies_separate, "multi-die-policy")

    def is_recovery_on(self) -> bool | None:
        """Return whether vNPUs are restored after a reboot; None if it is not reported."""
        return self._read(npu_smi_output.parse_is_recovery_on, _TYPES[RECOVER])

    def is_shared(self, device: Device) -> bool | None:
        """Return whether several containers can use a chip at a time; None if it is not reported."""
        return self._read(npu_smi_output.parse_is_shared, _TYPES[SHARE], *self._chip_options(device))

    def apply(self, switch: Switch) -> None:
        """Change a setting, and verify the change. Raises AcceleratorError."""
        doing = f"To {switch.describe()}"
        words = ["set", "-t", _TYPES[switch.name]]
        if switch.device is not None:
            words += self._chip_options(switch.device)
        # For shared chips npu-smi asks for confirmation, and prints the result on the line of the question.
        status, output = self._tool.run(*words, "-d", str(int(switch.enabled)), answer="Y\n")
        npu_smi_output.raise_failure(status, _CONFIRMATION_PROMPT.sub("\n", output), doing)
        if self._current_state(switch) is not switch.enabled:
            raise AcceleratorError(
                f"{doing} was confirmed, and did not happen",
                hint=f"Check npu-smi info -t {_TYPES[switch.name]}.",
                code="not-switched",
            )

    def is_change_needed(self, switch: Switch) -> bool:
        """Return whether a setting differs from the requested value.

        Raises AcceleratorError if the host has no such setting.
        """
        found = self._current_state(switch)
        if found is None:
            raise AcceleratorError(
                f"To {switch.describe()}: npu-smi does not report the current state",
                hint="This driver or this chip does not have this switch. Leave the option out.",
                code="no-such-switch",
            )
        return found is not switch.enabled

    def _current_state(self, switch: Switch) -> bool | None:
        return self.is_recovery_on() if switch.device is None else self.is_shared(switch.device)

    def _read(self, read: Callable[[str], Answer], kind: str, *words: str) -> Answer | None:
        text = self._tool.ask("-t", kind, *words, doing=f"Reading {kind}")
        try:
            return None if text is None else read(text)
        except npu_smi_output.UnexpectedOutput:
            return None

    def _chip_options(self, device: Device) -> list[str]:
        """Return the options of npu-smi that select a chip. The newest generation has no chip numbers on a card."""
        card, chip = self._card_and_chip(device)
        return ["-i", card, *([] if family_of(device.pci_device_id).word == "950" else ["-c", chip])]

    def _card_and_chip(self, device: Device) -> tuple[str, str]:
        """Return the numbers of a chip's card, and of the chip on the card, for npu-smi."""
        doing = f"Finding {device.describe()}"
        numbers = npu_smi_output.parse_chip_numbers(
            self._tool.ask("-t", "phyid-remap", "-p", str(device.minor), doing=doing) or ""
        )
        if "card" not in numbers:
            raise AcceleratorError(
                f"{doing}: npu-smi does not know the physical id {device.minor}", code="unknown-device"
            )
        return str(numbers["card"]), str(numbers.get("chip", 0))
