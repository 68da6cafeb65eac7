# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Fixtures for tests of the roles' own programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from token_server import TokenServer


@pytest.fixture
def server() -> Iterator[TokenServer]:
    """Yield an API server that issues tokens."""
    with TokenServer() as running:
        yield running
