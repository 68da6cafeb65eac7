# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Everything here is long: it carries the mark `prove`, so that only `make prove` runs it, beside the cluster suite: its world is
another one (``DRA_ACCELERATORS_PROVE_WORLD``, default ``prove``)."""

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
    "first_run",
    "inventory",
    "other_layout",
    "times",
    "world",
]

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def world_name() -> str:
    """The world's name."""
    return os.environ.get("DRA_ACCELERATORS_PROVE_WORLD", "prove")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, before the selection by marks is made."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.prove)
