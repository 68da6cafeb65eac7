# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The feature gates of the world, read from the file that lists them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from .pins import WORLD_FOLDER

GATES_FILE = WORLD_FOLDER / "gates.json"


def feature_gates(path: Path = GATES_FILE) -> dict[str, bool]:
    """Return whether each gate is enabled, by name."""
    return {gate["name"]: bool(gate["on"]) for gate in json.loads(path.read_text())["gates"]}


def as_flag(gates: dict[str, bool]) -> str:
    """Return the value of a component's ``--feature-gates``."""
    return ",".join(f"{name}={str(on).lower()}" for name, on in sorted(gates.items()))


@dataclass(frozen=True)
class Served:
    """A gate as a component reports it. ``stage`` is ALPHA, BETA, DEPRECATED, or empty if it is stable."""

    stage: str
    on: bool


def read_metrics(text: str) -> dict[str, Served]:
    """Return the gates in a component's metrics (``kubernetes_feature_enabled``), by name."""
    pattern = re.compile(r'^kubernetes_feature_enabled\{name="([^"]+)",stage="([^"]*)"\} ([01])$', re.MULTILINE)
    return {name: Served(stage, value == "1") for name, stage, value in pattern.findall(text)}


def maturity(matures: dict[str, str], version: str) -> str:
    """Return the maturity of a gate in a version, from the versions at which it changes; ``absent`` before the first."""

    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    reached = [since for since in matures if number(since) <= number(version)]
    return matures[max(reached, key=number)] if reached else "absent"


def differences(metrics: str, path: Path = GATES_FILE) -> list[str]:
    """Return one line for each gate that a component does not know, or that differs from the file in value or stage."""
    described = json.loads(path.read_text())
    served = read_metrics(metrics)
    stages = {"alpha": "ALPHA", "beta": "BETA", "beta-off": "BETA", "stable": "", "locked": ""}
    lines = []
    for gate in described["gates"]:
        name, known = gate["name"], served.get(gate["name"])
        level = maturity(gate["matures"], described["kubernetes"])
        if known is None:
            lines.append(f"{name} is unknown to the component")
        elif known.on != gate["on"]:
            lines.append(f"{name} is {'on' if known.on else 'off'}, expected {'on' if gate['on'] else 'off'}")
        elif known.stage != stages.get(level):
            lines.append(f"{name} has the stage {known.stage or 'stable'}, expected {level}")
    return lines
