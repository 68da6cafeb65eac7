# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The requirements of the daemons are listed for a node, for the distribution, and with the versions of the test environment.

An environment with a manually added package would pass without the third list until it is rebuilt. Each imported
package therefore has to follow from the listed requirements, whether it is installed or not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

import tomllib
from files import ROOT, project_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ON_A_NODE = "roles/python_environment/files/requirements.txt"
OF_TESTS = "tests/tools/requirements.txt"


def requirements(lines: Iterable[str]) -> dict[str, Requirement]:
    """Return the requirements by name, without those for other Python versions than that of the tests."""
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {
        canonicalize_name(each.name): each
        for each in found
        if each.marker is None or each.marker.evaluate({"python_version": "3.11"})
    }


def listed(path: str) -> dict[str, Requirement]:
    """Return the requirements in a file."""
    return requirements((ROOT / path).read_text(encoding="utf-8").splitlines())


def test_test_environment_has_node_packages_in_allowed_versions() -> None:
    tests = listed(OF_TESTS)
    node = listed(ON_A_NODE)
    assert len(node) >= 9
    wrong = {
        name: f"{OF_TESTS} has {tests.get(name)}, {ON_A_NODE} wants {wanted}"
        for name, wanted in node.items()
        if name not in tests or not wanted.specifier.contains(str(tests[name].specifier).removeprefix("=="))
    }
    assert not wrong


def test_distribution_requires_the_packages_of_a_node() -> None:
    output = requirements(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    )
    node = listed(ON_A_NODE)
    assert {name: each.specifier for name, each in output.items()} == {
        name: each.specifier for name, each in node.items()
    }


def imported() -> Iterator[tuple[str, str]]:
    """Yield the top-level name of each third-party import in the repository's Python files, and the file."""
    files = [each for each in project_files() if each.suffix == ".py"]
    ours = {each.stem for each in files} | {part for each in files for part in each.parent.parts}
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in {each.partition(".")[0] for each in names} - ours - sys.stdlib_module_names:
                yield name, str(file)


def brought() -> set[str]:
    """Return the packages that the requirements install, with all dependencies."""
    found: set[str] = set()
    left = [*listed(OF_TESTS)]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for each in map(Requirement, wanted):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                left.append(each.name)
    return found


def test_imported_packages_come_with_the_requirements() -> None:
    there = brought()
    assert len(there) > 50
    distributions = metadata.packages_distributions()
    missing = {
        name: file
        for name, file in imported()
        if not any(canonicalize_name(each) in there for each in distributions.get(name, ()))
    }
    assert not missing, f"add to {OF_TESTS} what brings it, and run make venv"
