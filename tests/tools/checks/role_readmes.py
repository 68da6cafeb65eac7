# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The README of a role says what its argument specs say: written by this program, and compared by the gate.

usage: role_readmes.py [--write]

A README that does not begin with the mark of this program was written by hand and is left alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from files import ROOT, close

MARK = "<!-- Written by `make readmes` from meta/argument_specs.yml: change it there. -->"
MACROS = (
    (re.compile(r"\b[CVOERI]\(([^()]*)\)"), r"`\1`"),
    (re.compile(r"\bM\(([^()]*)\)"), r"`\1`"),
    (re.compile(r"\bP\(([^()#]*)#\w+\)"), r"`\1`"),
    (re.compile(r"\bB\(([^()]*)\)"), r"**\1**"),
    (re.compile(r"\bL\(([^(),]*),\s*([^()]*)\)"), r"[\1](\2)"),
    (re.compile(r"\bU\(([^()]*)\)"), r"<\1>"),
)


def text_of(description: str | list[str] | None) -> str:
    """A description of Ansible's documentation as one line of Markdown."""
    joined = " ".join(description) if isinstance(description, list) else description or ""
    for pattern, replacement in MACROS:
        joined = pattern.sub(replacement, joined)
    return " ".join(joined.split())


def shown(value: Any) -> str:
    """A default as it would be written in a variable file."""
    if isinstance(value, str):
        return f'`"{value}"`' if value == "" else f"`{value}`"
    return f"`{json.dumps(value)}`"


def rows(options: dict[str, dict[str, Any]], depth: int = 0) -> list[str]:
    """One line of the table for each option, those inside it below it."""
    lines = []
    for name, option in options.items():
        kind = option.get("type", "str")
        if option.get("elements"):
            kind += f" of {option['elements']}"
        default = "**required**" if option.get("required") else shown(option["default"]) if "default" in option else ""
        description = text_of(option.get("description"))
        if option.get("choices"):
            description += " One of " + ", ".join(f"`{choice}`" for choice in option["choices"]) + "."
        label = "&nbsp;&nbsp;" * depth + f"`{name}`"
        lines.append(f"| {label} | {kind} | {default} | {description.replace('|', chr(92) + '|')} |")
        lines += rows(option.get("options") or {}, depth + 1)
    return lines


def readme(role: str, spec: dict[str, Any]) -> str:
    """The README of ``role`` out of the entry point ``main`` of its argument specs."""
    title = f"# Role dra.accelerators.{role}"
    parts = [MARK, "", title, "", text_of(spec["short_description"]) + ".", ""]
    parts += [f"* {text_of(paragraph)}" for paragraph in spec.get("description", [])]
    parts += ["", "## Variables", "", "| variable | type | default | meaning |", "| --- | --- | --- | --- |"]
    parts += rows(spec.get("options") or {})
    if spec.get("attributes"):
        parts += ["", "## How it behaves", "", "| | support | |", "| --- | --- | --- |"]
        for name, attribute in spec["attributes"].items():
            behaviour = text_of(attribute.get("description"))
            parts.append(f"| {name.replace('_', ' ')} | {attribute.get('support', '')} | {behaviour} |")
    play = [
        "```yaml",
        "- name: Use the role",
        "  hosts: accelerator_nodes",
        "  become: true",
        "  tasks:",
        f"    - name: Use {role}",
        "      ansible.builtin.include_role:",
        f"        name: dra.accelerators.{role}",
        "```",
    ]
    return "\n".join([*parts, "", "## Example", "", *play, ""])


def main(write: bool) -> int:
    """Write the READMEs, or compare them with what would be written; returns the exit status."""
    problems, seen = [], 0
    for specs in sorted((ROOT / "roles").glob("*/meta/argument_specs.yml")):
        role = specs.parents[1]
        target: Path = role / "README.md"
        present = target.read_text(encoding="utf-8") if target.exists() else ""
        if present and not present.startswith(MARK):
            continue
        seen += 1
        wanted = readme(role.name, yaml.safe_load(specs.read_text(encoding="utf-8"))["argument_specs"]["main"])
        if write:
            target.write_text(wanted, encoding="utf-8")
        elif present != wanted:
            problems.append(f"{target.relative_to(ROOT)}: differs from the argument specs; run `make readmes`")
    return close(problems, seen, "READMEs")


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
