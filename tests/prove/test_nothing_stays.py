# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that the nodes' files and the API objects are the same before the site playbook and after the removal."""

from __future__ import annotations

from tests.cluster.cluster import Cluster


def test_install_and_removal_leave_nothing() -> None:
    cluster = Cluster("bare")
    cluster.world("down")
    cluster.world("up", "--nodes", "1", "--silicon", "8xH100", timeout=3000)
    try:
        before = cluster.footprint()
        assert before
        for name in ("site.yml", "remove.yml"):
            recap = cluster.playbook(name, "-e", "accelerator_remove_reset_layout=true")
            assert not recap.failed, recap.output
        after = cluster.footprint()
    finally:
        cluster.world("down")
    difference = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
    assert {key: both for key, both in difference.items() if both[0] != both[1]} == {}
