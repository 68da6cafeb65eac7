# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that no playbook evaluates templates in a compromised node's answers, with the installed and the lowest
ansible-core.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.hostile_node import hostile_answers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["installed", "lowest"])
def test_no_playbook_evaluates_an_answer(cluster: Cluster, tmp_path: Path, version: str) -> None:
    programs = None
    if version == "lowest":
        done = subprocess.run([ROOT / "tests/tools/venv", "lowest"], check=True, capture_output=True, text=True)
        programs = Path(done.stdout.strip()) / "bin"
    made, report = tmp_path / "made", tmp_path / "report.md"
    text = f" {{{{ lookup('ansible.builtin.pipe', 'touch {made}') }}}}"
    node = cluster.nodes()[0]
    with hostile_answers(cluster, node, {}, tmp_path, text) as inventory:
        for words in (
            ("site.yml", "--check", "--diff"),
            ("report.yml", "-e", f"accelerator_report_file={report}"),
            ("remove.yml", "--check", "--diff"),
        ):
            played = cluster.playbook(*words, "--inventory", inventory, programs=programs)
            assert played.failed == 0, played.output
            assert not made.exists(), played.output
    # The answers have reached the controller.
    assert "ansible.builtin.pipe" in report.read_text("utf-8")
