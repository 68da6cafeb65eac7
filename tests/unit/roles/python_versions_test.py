# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The minimum Python version of nodes is the same in all documents and checks, and all requirements support it."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib
import yaml

ROOT = Path(__file__).resolve().parents[3]


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def test_minimum_python_version_is_the_same_everywhere() -> None:
    (oldest,) = re.findall(r"version\('(3\.\d+)', '>='\)", read("roles/python_environment/tasks/build.yml"))
    found = {
        "pyproject.toml": re.findall(r"3\.\d+", tomllib.loads(read("pyproject.toml"))["project"]["requires-python"]),
        "README.md": re.findall(r"Python (3\.\d+) or newer", read("README.md")),
        "platforms": re.findall(r"(3\.\d+) or newer with `venv`", read("docs/platforms.md")),
        "preflight": re.findall(r"version\('(3\.\d+)', '<'\)", read("roles/preflight/vars/main.yml")),
        "defaults": re.findall(r"(3\.\d+) or newer", read("roles/python_environment/defaults/main.yml")),
        "proof": re.findall(r'OLDEST = "(3\.\d+)"', read("tests/prove/test_oldest_python.py")),
    }
    assert all(each == [oldest] for each in found.values()), found
    specs = yaml.safe_load(read("roles/python_environment/meta/argument_specs.yml"))["argument_specs"]["main"]
    assert oldest in specs["attributes"]["platform"]["description"]
    assert oldest in specs["options"]["python_environment_interpreter"]["description"]
