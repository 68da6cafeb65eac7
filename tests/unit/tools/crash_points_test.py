# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Each crash point in docs/crash-points.md names an existing test, and all stages of the driver are listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from dra_driver.stages import PREPARE, UNPREPARE

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/crash-points.md"


def tables() -> dict[str, list[list[str]]]:
    """Return the cells of each row in the tables of crash points, by the section's title."""
    found = {}
    for section in PAGE.read_text("utf-8").split("\n## ")[1:]:
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines()
            if line.startswith("|") and not line.startswith(("| step |", "| --- |"))
        ]
        found[section.splitlines()[0]] = rows
    return found


def test_crash_point_names_an_existing_test() -> None:
    missing, rows = [], [row for section in tables().values() for row in section]
    for row in rows:
        assert len(row) == 4 and all(row), f"expected step, state, recovery, and test: {row}"
        named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", row[3])
        assert named, f"no test is named: {row}"
        for path, name in named:
            file = ROOT / "tests" / path
            if not file.is_file() or f"def {name}(" not in file.read_text("utf-8"):
                missing.append(f"{path}::{name}")
    assert rows and not missing


@pytest.mark.parametrize(("title", "stages"), [("Prepare", PREPARE), ("Unprepare", UNPREPARE)])
def test_crash_points_of_claims_are_the_stages_of_the_driver(title: str, stages: tuple[str, ...]) -> None:
    assert [row[0] for row in tables()[title]] == [f"`{stage}`" for stage in stages]


def test_crash_points_of_a_repartition_are_the_tasks_of_an_operation() -> None:
    """The crash points are the tasks of an operation on a GPU with unchanged settings, which the driver publishes as before."""
    blocks = yaml.safe_load((ROOT / "playbooks/tasks/repartition_operation.yml").read_text("utf-8"))
    tasks = [
        task["name"]
        for block in blocks
        for task in block.get("block", ())
        if not re.search(r"ascend|settings|tells_driver", str(task.get("when", "")))
        and "ansible.builtin.set_fact" not in task
    ]
    assert [row[0] for row in tables()["Repartition"]][: len(tasks)] == [f"`{task}`" for task in tasks]
