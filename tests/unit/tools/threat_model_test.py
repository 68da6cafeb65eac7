# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Each row of the threat model names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/threat-model.md").read_text("utf-8")


def test_threat_model_every_attack_names_existing_tests() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (?!attack|asset|---)", line) and line.count("|") == 4]
    assert len(rows) >= 30
    missing = []
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row.split("|")[3])
        assert named, f"no test is named: {row}"
        for path, name in named:
            file = ROOT / path
            if not file.is_file() or (name and f"def {name}(" not in file.read_text("utf-8")):
                missing.append(f"{path}::{name}")
    assert not missing


def test_threat_model_every_attacker_has_a_list_of_remaining_risks() -> None:
    sections = re.split(r"\n## ", PAGE)
    attackers = [each for each in sections if re.match(r"\([a-g]\)", each)]
    assert len(attackers) == 7 and all("\nNot prevented: " in each for each in attackers)
