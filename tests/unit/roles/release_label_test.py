# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The release that a node reports becomes a label of its Node only if it is a valid label value."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from playing import play

TASKS = Path(__file__).resolve().parents[3] / "roles/dra_driver/tasks/main.yml"


@pytest.mark.parametrize(
    ("release", "accepted"),
    [
        ("", True),
        ("1.0.0", True),
        ("0.1.0-0a1b2c3d", True),
        ("1.0.0_dirty", True),
        ("x" * 64, False),
        ("-1", False),
        ("1 2", False),
        ("1\n2", False),
        ("{{ 1 }}", False),
    ],
)
def test_release_is_the_value_of_a_label(tmp_path: Path, release: str, accepted: bool) -> None:
    name = "Reject a release that is not a release of the collection"
    tasks = [each for part in yaml.safe_load(TASKS.read_text("utf-8")) for each in (part, *part.get("block", ()))]
    (task,) = [each for each in tasks if each.get("name") == name]
    # The form of a module's answer: text that is not a template.
    program = ["printf", "%s", release]
    requested = {"ansible.builtin.command": {"argv": program}, "register": "asked", "changed_when": False}
    if "{{" in release:
        requested["ansible.builtin.command"]["argv"] = ["printf", "%b", "\\x7b\\x7b 1 }}"]
    label = {"__dra_driver_release_label": "dra.accelerators/release"}
    variables = {"__dra_driver_release_value": "{{ asked.stdout }}", **label}
    played = play(tmp_path, [requested, task], {"n1": variables})
    assert (played.status == 0) is accepted, played.output
    if not accepted:
        assert "expected the value of a label" in " ".join(played.failed["n1"]["msg"].split())
