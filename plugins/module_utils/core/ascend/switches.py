# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What slices and shared chips depend on besides themselves, read and set through npu-smi: only whoever is asked to touches it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, TypeVar

from ..errors import AcceleratorError
from ..model import Device
from . import smi
from .families import family_of
from .tool import Tool

Answer = TypeVar("Answer")

RECOVER, SHARE = "recover", "device_share"
_TYPES: Mapping[str, str] = {RECOVER: "vnpu-cfg-recover", SHARE: "device-share"}
_QUESTION = re.compile(r"[\[(]\s*y(?:es)?\s*/\s*no?\s*[\])]\s*:?", re.IGNORECASE)
_MODES = {"amp": True, "smp": False}


@dataclass(frozen=True)
class Switch:
    """One switch that is to be turned: of one chip, or of the machine (no device)."""

    name: str
    enabled: bool
    device: Device | None = None

    def describe(self) -> str:
        """Say what is done."""
        word = "on" if self.enabled else "off"
        if self.device is None:
            return f"switch the recovery of slices after a reboot {word}"
        return f"switch sharing of {self.device.uuid} between containers {word}"

    def to_dict(self) -> dict[str, Any]:
        """Return the step as data."""
        found: dict[str, Any] = {"step": f"set_{self.name}", "enabled": self.enabled, "description": self.describe()}
        return found if self.device is None else {**found, "device_uuid": self.device.uuid}


class Switches:
    """The switches of one machine."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    def slices_are_for_containers(self) -> bool | None:
        """Whether slices are made for containers, and not for virtual machines; None where the machine does not tell."""
        return self._ask(smi.is_docker_mode, "vnpu-mode")

    def is_asymmetric(self, device: Device) -> bool | None:
        """Whether a chip works in the mode (AMP) in which it can be cut; None where it has no other."""
        card, _chip = self._place(device)
        return self._ask(lambda text: smi.word_of(text, _MODES, "work-mode"), "work-mode", "-i", card)

    def is_each_die_alone(self) -> bool | None:
        """Whether each die of a module works by itself, and can be cut; None where there are no such modules."""
        return self._ask(smi.is_each_die_alone, "multi-die-policy")

    def recovers(self) -> bool | None:
        """Whether slices are made again after a reboot; None where the machine does not tell."""
        return self._ask(smi.recovers, _TYPES[RECOVER])

    def is_shared(self, device: Device) -> bool | None:
        """Whether several containers may have a chip at a time; None where it does not tell."""
        return self._ask(smi.is_shared, _TYPES[SHARE], *self._words(device))

    def turn(self, switch: Switch) -> None:
        """Turn a switch, and see that it is turned. Raises AcceleratorError."""
        doing = f"To {switch.describe()}"
        words = ["set", "-t", _TYPES[switch.name]]
        if switch.device is not None:
            words += self._words(switch.device)
        # It asks back where chips are shared, and says what came of it on the line of its question.
        status, output = self._tool.run(*words, "-d", str(int(switch.enabled)), answer="Y\n")
        smi.refuse_failure(status, _QUESTION.sub("\n", output), doing)
        if self._is(switch) is not switch.enabled:
            raise AcceleratorError(
                f"{doing} was confirmed, and did not happen",
                hint=f"Look at npu-smi info -t {_TYPES[switch.name]}.",
                code="not-switched",
            )

    def needed(self, switch: Switch) -> bool:
        """Whether a switch is not as it is wanted. Raises AcceleratorError where the machine has no such switch."""
        found = self._is(switch)
        if found is None:
            raise AcceleratorError(
                f"To {switch.describe()}: npu-smi does not tell how it is now",
                hint="This driver or this chip does not have it. Leave the option out.",
                code="no-such-switch",
            )
        return found is not switch.enabled

    def _is(self, switch: Switch) -> bool | None:
        return self.recovers() if switch.device is None else self.is_shared(switch.device)

    def _ask(self, read: Callable[[str], Answer], kind: str, *words: str) -> Answer | None:
        text = self._tool.ask("-t", kind, *words, doing=f"Reading {kind}")
        try:
            return None if text is None else read(text)
        except smi.UnreadOutput:
            return None

    def _words(self, device: Device) -> list[str]:
        """Return how the program is told which chip is meant; the newest generation has no numbers of chips on a card."""
        card, chip = self._place(device)
        return ["-i", card, *([] if family_of(device.pci_device_id).word == "950" else ["-c", chip])]

    def _place(self, device: Device) -> tuple[str, str]:
        """Return the numbers of a chip's card, and of the chip on it, by which the program knows it."""
        doing = f"Finding {device.describe()}"
        said = smi.identity(self._tool.ask("-t", "phyid-remap", "-p", str(device.minor), doing=doing) or "")
        if "card" not in said:
            raise AcceleratorError(
                f"{doing}: npu-smi does not know the physical id {device.minor}", code="unknown-device"
            )
        return str(said["card"]), str(said.get("chip", 0))
