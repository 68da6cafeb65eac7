# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Mark all tests of this directory with `prove`, because they take long: only `make prove` runs them, next to the
cluster tests.

They use another world (``DRA_ACCELERATORS_PROVE_WORLD``, default ``prove``).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.conftest import (
    ansible,
    bare,
    before,
    checked_run,
    clean,
    cluster,
    controller,
    first_run,
    inventory,
    other_layout,
    times,
    world,
)

__all__ = [
    "ansible",
    "bare",
    "before",
    "checked_run",
    "clean",
    "cluster",
    "controller",
    "first_run",
    "inventory",
    "other_layout",
    "times",
    "world",
]

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def world_name() -> str:
    """Return the world's name."""
    return os.environ.get("DRA_ACCELERATORS_PROVE_WORLD", "prove")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory before tests are selected by marks."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.prove)
