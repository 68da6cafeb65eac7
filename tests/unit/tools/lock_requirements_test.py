# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The lock of the packages on a node: each wheel has a digest, and requirements.txt, the lock, and the SBOM agree."""

from __future__ import annotations

import json
import re

import lock_requirements
import pytest
from audit_requirements import findings
from packaging.requirements import Requirement
from packaging.version import Version

LOCK = (lock_requirements.FILES / "requirements.lock").read_text("utf-8")


def test_lock_satisfies_the_requirements_and_the_sbom_is_of_the_lock() -> None:
    assert lock_requirements.find_problems() == []


def test_lock_every_line_is_pinned_with_digests_and_names_no_index() -> None:
    found = lock_requirements.parse_lock(LOCK)
    assert len(found) >= 30
    for line, digests in found.items():
        assert re.match(r"[a-z0-9-]+==[0-9][^ ]*( ; python_full_version [<>=]+ '3\.\d+')?$", line), line
        assert digests and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in digests)
    assert "://" not in LOCK


@pytest.mark.parametrize("python", ["3.10.0", "3.11.0", "3.12.0", "3.13.0"])
def test_lock_has_one_version_of_each_package_for_each_python(python: str) -> None:
    versions: dict[str, str] = {}
    for line in lock_requirements.parse_lock(LOCK):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_full_version": python}):
            assert requirement.name not in versions
            versions[requirement.name] = str(Version(next(iter(requirement.specifier)).version))
    assert {"grpcio", "protobuf", "aiohttp", "kubernetes", "cryptography"} <= versions.keys()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("grpcio-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("cryptography-1-cp311-abi3-manylinux_2_28_aarch64.whl", True),
        ("kubernetes-1-py2.py3-none-any.whl", True),
        ("grpcio-1-cp313-cp313t-manylinux_2_17_x86_64.whl", False),
        ("grpcio-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("grpcio-1-cp312-cp312-macosx_11_0_universal2.whl", False),
        ("cffi-1-pp311-pypy311_pp73-manylinux_2_17_x86_64.whl", False),
        ("grpcio-1.tar.gz", False),
    ],
)
def test_wheel_selection(file: str, expected: bool) -> None:
    assert lock_requirements.is_wheel_for_a_node(file) == expected


ADVISORIES = {
    "advisories": [
        {"id": "EXAMPLE-1", "package": "PyYAML", "affected": "<7", "fixed": "7.0", "summary": "an example"},
        {"id": "EXAMPLE-2", "package": "grpcio", "affected": "<1.0", "fixed": "1.0", "summary": "old"},
        {"id": "EXAMPLE-3", "package": "not-installed", "affected": ">=0", "fixed": "", "summary": "none"},
    ]
}


def test_audit_of_a_local_file_names_affected_packages() -> None:
    (found,) = findings(LOCK, json.dumps(ADVISORIES))
    assert found.startswith("pyyaml ") and "EXAMPLE-1" in found and "fixed in 7.0" in found


def test_audit_of_a_file_that_is_no_list_of_advisories_fails() -> None:
    with pytest.raises(SystemExit, match="expected"):
        findings(LOCK, "{}")
