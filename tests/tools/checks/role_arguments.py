# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check that defaults, argument specs, and README of each role agree.

Each variable in defaults/main.yml is an option of the `main` entry point with the same default. Each option with a
default is in defaults. The role's README names each option. Variables whose names begin with two underscores are
internal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from files import ROOT, close


def load(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, or an empty one for a missing or empty file."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path.exists() else {}


def problems_of(role: Path) -> list[str]:
    """Return the differences between defaults, argument specs, and README of ``role``."""
    name = f"roles/{role.name}"
    specs = load(role / "meta/argument_specs.yml").get("argument_specs", {})
    if "main" not in specs:
        return [f"{name}: meta/argument_specs.yml does not describe the entry point main"]
    options: dict[str, dict[str, Any]] = specs["main"].get("options") or {}
    defaults = {key: value for key, value in load(role / "defaults/main.yml").items() if not key.startswith("__")}
    problems = [
        f"{name}: {key} has a default and is not in the argument specs" for key in defaults.keys() - options.keys()
    ]
    for key, option in options.items():
        if "default" in option and key not in defaults:
            problems.append(
                f"{name}: {key} has the default {option['default']!r} in the argument specs and none in defaults"
            )
        elif key in defaults and "{{" not in str(defaults[key]):
            documented, actual = option.get("default"), defaults[key]
            if documented != actual and not (documented is None and actual in ("", [], {}, None)):
                problems.append(f"{name}: the default of {key} is {actual!r} and documented as {documented!r}")
        if not key.startswith(f"{role.name}_") and not key.startswith("accelerator_"):
            problems.append(f"{name}: {key} does not begin with {role.name}_ or accelerator_")
    readme = role / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    problems += [f"{name}: README.md does not name {key}" for key in options if f"`{key}`" not in text]
    return problems


def main() -> int:
    """Check each role and return the exit status."""
    roles = sorted(path.parents[1] for path in (ROOT / "roles").glob("*/tasks/main.yml"))
    problems = [problem for role in roles for problem in sorted(problems_of(role))]
    return close(problems, len(roles), "roles")


if __name__ == "__main__":
    sys.exit(main())
