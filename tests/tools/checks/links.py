# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check that each link in the Markdown files leads to an existing file, directory, or heading."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from files import ROOT, close, project_files, read

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings in a Markdown text, in the form of Git hosts."""
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        for heading in HEADING.findall(FENCE.sub("", text))
    }


def problem_of(path: Path, target: str) -> str:
    """Return the problem of the link from ``path`` to ``target``, or ""."""
    name, _separator, anchor = target.partition("#")
    resolved = (ROOT / path.parent / name).resolve() if name else ROOT / path
    if not resolved.exists():
        return f"{path}: the link {target} leads nowhere"
    if not resolved.is_relative_to(ROOT):
        return f"{path}: the link {target} leads out of the project"
    if anchor and resolved.suffix == ".md" and anchor not in anchors(resolved.read_text(encoding="utf-8")):
        return f"{path}: {name or path} has no heading for #{anchor}"
    return ""


def main() -> int:
    """Check each link and return the exit status."""
    problems, seen = [], 0
    for path in project_files():
        if path.suffix != ".md":
            continue
        for target in LINK.findall(FENCE.sub("", read(path) or "")):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            seen += 1
            problem = problem_of(path, target)
            if problem:
                problems.append(problem)
    return close(problems, seen, "links")


if __name__ == "__main__":
    sys.exit(main())
