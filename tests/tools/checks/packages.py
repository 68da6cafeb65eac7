# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""pyproject.toml lists exactly the Python packages of the daemons and the core, and the collection's version."""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib
import yaml
from files import ROOT, close


def packages_under(folder: Path, name: str) -> set[str]:
    """The dotted names of the packages in ``folder``, which is itself called ``name``."""
    return {".".join((name, *path.parent.relative_to(folder).parts)) for path in folder.rglob("__init__.py")}


def main() -> int:
    """Compare the list with the folders and return the exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    mapping: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    present = {name for package, folder in mapping.items() for name in packages_under(ROOT / folder, package)}
    problems = [f"pyproject.toml: the package {name} is there and not listed" for name in sorted(present - listed)]
    problems += [f"pyproject.toml: the package {name} is listed and not there" for name in sorted(listed - present)]
    for folder in {ROOT / path for path in mapping.values()}:
        for path in folder.rglob("*.py"):
            if not (path.parent / "__init__.py").exists():
                problems.append(
                    f"{path.relative_to(ROOT)}: its folder has no __init__.py, so it would not be installed"
                )
    version = yaml.safe_load((ROOT / "galaxy.yml").read_text(encoding="utf-8"))["version"]
    if project["project"]["version"] != version:
        problems.append(f"pyproject.toml has the version {project['project']['version']}, galaxy.yml has {version}")
    return close(problems, len(present), "packages")


if __name__ == "__main__":
    sys.exit(main())
