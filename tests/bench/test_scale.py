# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a site run without changes by the number of nodes, with the installed and the lowest
ansible-core.

The nodes do not exist (``synthetic_site.py``), so the processor time is that of the Ansible controller. The test
asserts only the ratio between two runs, not durations. The run with 500 nodes is only part of ``pytest -m ""
tests/bench/test_scale.py``, because it takes up to an hour.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.figures import Figures
from tests.bench.synthetic_site import ROOT, Cost, run

SMALL = 10
#: Maximum cost of a node with many nodes, as a multiple of its cost with SMALL nodes.
MOST_RATIO = 1.5
#: Cores of the host for which the duration of a run with MANY nodes is estimated from the processor time per node.
CORES, MANY = 8, 500


def measure(folder: Path, number: int, programs: Path) -> tuple[Cost, float]:
    """Return the cost of a whole run, and the processor seconds of the preflight per node."""
    costs = []
    for name, arguments in {
        "all": [],
        "with": ["--tags", "preflight"],
        "without": ["--tags", "none", "--skip-tags", "preflight"],
    }.items():
        (folder / name).mkdir()
        costs.append(run(folder / name, number, programs, *arguments))
    return costs[0], (costs[1].processor - costs[2].processor) / number


@pytest.mark.parametrize("number", [100, pytest.param(500, marks=pytest.mark.prove)])
@pytest.mark.parametrize("version", ["installed", "lowest"])
def test_cost_of_a_node_by_the_number_of_nodes(tmp_path: Path, figures: Figures, version: str, number: int) -> None:
    programs = Path(sys.executable).parent
    if version == "lowest":
        made = subprocess.run([ROOT / "tests/tools/venv", "lowest"], check=True, capture_output=True, text=True)
        programs = Path(made.stdout.strip()) / "bin"
    costs = {}
    for size in (SMALL, number):
        (tmp_path / str(size)).mkdir()
        costs[size] = measure(tmp_path / str(size), size, programs)
    few, many = (costs[size][0].processor / size for size in (SMALL, number))
    figures.add_line(
        f"site.yml without changes, {version} ansible-core: {number} nodes cost {many / few:.2f} of {SMALL} for each node "
        f"({many:.2f} s and {few:.2f} s of processor time, preflight {costs[number][1]:.2f} s and {costs[SMALL][1]:.2f} s); "
        f"{MANY} nodes on {CORES} cores at this rate: {many * MANY / CORES / 60:.1f} min"
    )
    assert many <= MOST_RATIO * few
