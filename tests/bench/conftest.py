# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The world of the benchmarks: one node with sixteen H100, installed by the site playbook."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.bench.figures import Figures
from tests.cluster.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # Simulated boards have no delay here: the benchmarks measure the driver, not the second that a real GPU needs for
    # a partition.
    os.environ.setdefault("DRA_ACCELERATORS_OPERATION_DELAY", "0")
    made = Cluster(os.environ.get("DRA_ACCELERATORS_BENCH_WORLD", "bench"))
    kept = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
    if not kept:
        made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "16xH100", timeout=3000)
    made.kubectl("label", "namespace", "default", "resource.kubernetes.io/admin-access=true", "--overwrite")
    yield made
    if not kept:
        made.world("down")


@pytest.fixture(scope="session")
def figures() -> Iterator[Figures]:
    """Collect the measurements of the tests, and print one table at the end."""
    collected = Figures()
    yield collected
    collected.print()
