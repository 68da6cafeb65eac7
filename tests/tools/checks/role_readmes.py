# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check the generated part of each role's README: the table of variables, check mode, diff, and idempotence.

python tests/tools/checks/role_readmes.py [--write]

The part is between two comment lines and is generated from the argument specs. People write the rest. Without --write
no file changes, and the exit status shows whether one would.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml
from files import ROOT, close

BEGIN = "<!-- begin: generated from meta/argument_specs.yml by tests/tools/checks/role_readmes.py --write -->"
END = "<!-- end: generated -->"
#: Attributes that each role documents, with their names in the README.
ATTRIBUTES = {"check_mode": "check mode", "diff_mode": "diff mode", "idempotent": "idempotent", "platform": "platform"}
COLLECTION = "dra.accelerators."


def plain(text: str) -> str:
    """Return Ansible's markup as Markdown: C(), V(), O(), E(), M(), P(), and R() become code."""

    def code(found: re.Match[str]) -> str:
        value = found.group(2)
        if found.group(1) in "OR" and ":" in value:
            value = value.rpartition(":")[2]
        if found.group(1) in "PM":
            value = value.partition("#")[0].removeprefix(COLLECTION)
        return f"`{value}`"

    text = re.sub(r"\b([CVOEPMR])\(((?:[^()\\]|\\.)*)\)", code, text)
    text = re.sub(r"\bL\(([^,()]*), *([^()]*)\)", r"[\1](\2)", text)
    return re.sub(r"\b[BI]\(([^()]*)\)", r"\1", text)


def sentences(description: str | list[str]) -> str:
    """Return a description as one line of Markdown."""
    parts = [description] if isinstance(description, str) else description
    return plain(" ".join(" ".join(part.split()) for part in parts))


def type_of(option: dict[str, Any]) -> str:
    """Return the type of an option as text."""
    name = option.get("type", "str")
    return f"{name} of {option['elements']}" if "elements" in option else str(name)


def value_of(value: Any) -> str:
    """Return a default or a choice as Markdown."""
    if value in (None, ""):
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (list, dict)):
        flow = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
        return f"`{flow}`"
    return f"`{value}`"


def row(name: str, option: dict[str, Any]) -> str:
    """Return one line of the table."""
    meaning = sentences(option["description"])
    if option.get("choices"):
        meaning += f" One of {', '.join(value_of(choice) for choice in option['choices'])}."
    if option.get("options"):
        keys = [f"`{key}`" + (" (required)" if each.get("required") else "") for key, each in option["options"].items()]
        meaning += f" Keys: {', '.join(keys)}."
    default = value_of(option["default"]) if "default" in option else "see the text"
    default = "required" if option.get("required") else default
    return f"| `{name}` | {type_of(option)} | {default} | {meaning.replace('|', chr(92) + '|')} |"


def generated(role: Path) -> str:
    """Return the generated part for one role, with its two comment lines."""
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]["main"]
    options: dict[str, dict[str, Any]] = specs.get("options") or {}
    lines = [BEGIN, "## Variables", "", "| variable | type | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [row(name, option) for name, option in options.items()]
    lines += ["", "## Check mode, diff, repetition", ""]
    for key, words in ATTRIBUTES.items():
        attribute = specs["attributes"][key]
        support = "" if key == "platform" else f" ({attribute['support']})"
        lines.append(f"* {words}{support}: {sentences(attribute['description'])}")
    return "\n".join([*lines, END])


def renewed(role: Path, text: str) -> str | None:
    """Return the README with the current generated part, or None without the two comment lines."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        return None
    return text[:begin] + generated(role) + text[end + len(END) :]


def main(arguments: list[str]) -> int:
    """Compare or write the parts, and return the exit status."""
    write = arguments == ["--write"]
    if arguments and not write:
        print(__doc__)
        return 2
    problems: list[str] = []
    roles = sorted(path.parents[1] for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"))
    for role in roles:
        readme = role / "README.md"
        text = readme.read_text(encoding="utf-8")
        new = renewed(role, text)
        if new is None:
            problems.append(f"roles/{role.name}/README.md: expected the lines {BEGIN} and {END}")
        elif new != text and write:
            readme.write_text(new, encoding="utf-8")
            print(f"roles/{role.name}/README.md: written")
        elif new != text:
            problems.append(f"roles/{role.name}/README.md: differs from what its argument specs say")
    return close(problems, len(roles), "roles")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
