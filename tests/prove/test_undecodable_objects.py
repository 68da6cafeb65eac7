# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test undecodable API objects with every reader, on Python versions whose json modules have different recursion
limits.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.prove.test_oldest_python import ROOT, TEST_PACKAGES, interpreter

TESTS = (
    "tests/unit/core/decoding_test.py",
    "tests/unit/dra_driver/undecodable_test.py",
    "tests/unit/modules/test_undecodable.py",
)
#: ansible-core 2.17, the last one for Python 3.10, lacks this module.
PATCH_MODULE_ARGS = """\
import contextlib, json
from ansible.module_utils import basic

@contextlib.contextmanager
def patch_module_args(arguments):
    previous, basic._ANSIBLE_ARGS = basic._ANSIBLE_ARGS, json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode()
    try:
        yield
    finally:
        basic._ANSIBLE_ARGS = previous
"""


@pytest.mark.parametrize("version", ["3.10", "3.12"])
def test_undecodable_objects_on_another_python(version: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([interpreter(version), "-m", "venv", venv], check=True)
    # CEL, which why and plan need, has wheels for Python 3.11 and later.
    cel = ["cel-expr-python==0.1.3"] if version != "3.10" else []
    install = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    requirements = ROOT / "roles/python_environment/files/requirements.txt"
    subprocess.run(
        [*install, "--only-binary=:all:", "-r", requirements, *TEST_PACKAGES, "ansible-core", *cel], check=True
    )
    (packages,) = venv.glob("lib/python*/site-packages")
    shim = packages / "ansible/module_utils/testing.py"
    if not shim.exists():
        shim.write_text(PATCH_MODULE_ARGS)
    tree = subprocess.run([ROOT / "tests/tools/tree"], check=True, capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, "PYTHONPATH": f"{tree}/python:{tree}", "ANSIBLE_COLLECTIONS_PATH": tree}
    done = subprocess.run(
        [
            *(venv / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS),
            *(() if cel else ("-k", "not needs_cel")),
        ],
        cwd=ROOT,
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
