# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The feature gates of the world, read from the one file that lists them."""

from __future__ import annotations

import json
from pathlib import Path

from .pins import WORLD_FOLDER

GATES_FILE = WORLD_FOLDER / "gates.json"


def feature_gates(path: Path = GATES_FILE) -> dict[str, bool]:
    """Gate -> whether it is on."""
    return {gate["name"]: bool(gate["on"]) for gate in json.loads(path.read_text())["gates"]}


def as_flag(gates: dict[str, bool]) -> str:
    """The value of a component's ``--feature-gates``."""
    return ",".join(f"{name}={str(on).lower()}" for name, on in sorted(gates.items()))
