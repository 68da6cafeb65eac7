# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Puts the collection and the daemons' package where tests import them from, under the names they have in use.

`tests/tools/tree` makes the links. Programs that a test starts find the same through the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
TREE = Path(subprocess.run([ROOT / "tests/tools/tree"], check=True, capture_output=True, text=True).stdout.strip())

for folder in (TREE / "python", TREE):
    sys.path.insert(0, str(folder))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TREE), str(TREE / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ["ANSIBLE_COLLECTIONS_PATH"] = str(TREE)
# Hypothesis stores its examples in the cache, like all generated files.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(TREE.parent / "hypothesis"))

# No deadlines: other work on the machine determines the duration of an example.
for name, examples in (("quick", 30), ("prove", 200)):
    settings.register_profile(name, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Try properties with more examples where the tests marked `prove` run as well."""
    if config.getoption("markexpr") != "not prove":
        settings.load_profile("prove")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a case of bytes by its argument and number.

    pytest would take the bytes themselves for the test's name. Where a time or a random number is in them (gzip writes
    the second of packing), the processes that share a suite collect tests of different names, and refuse to begin: but
    only when they happen to pack in different seconds.
    """
    return argname if isinstance(val, bytes) else None
