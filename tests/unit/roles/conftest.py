# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Fixtures for tests of the roles' own programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster_playbooks import ClusterServer
from token_server import TokenServer


@pytest.fixture
def server() -> Iterator[TokenServer]:
    """Yield an API server that issues tokens."""
    with TokenServer() as running:
        yield running


@pytest.fixture
def clusters() -> Iterator[tuple[ClusterServer, ClusterServer]]:
    """Yield the API servers of two clusters: the Nodes a1 and a2, and the Nodes b1 and b2."""
    with ClusterServer("a1", "a2") as first, ClusterServer("b1", "b2") as second:
        yield first, second
