# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Set the import paths so that tests import the collection and the daemons' package by their installed names.

`tests/tools/tree` creates the links. Environment variables set the same paths for programs that a test starts.
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

for directory in (TREE / "python", TREE):
    sys.path.insert(0, str(directory))
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
    """Use more examples for property tests if the tests marked `prove` run too."""
    if config.getoption("markexpr") != "not prove":
        settings.load_profile("prove")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Return the name of the argument as the ID of a parameter with bytes, to which pytest adds a number.

    By default the ID contains the bytes. Bytes with a time or a random number differ between the processes of pytest-xdist,
    for example the time in a gzip header. Then the processes collect tests with different names, which is an error.
    """
    return argname if isinstance(val, bytes) else None
