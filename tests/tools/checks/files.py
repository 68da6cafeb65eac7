# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Functions that the checks share: the files of the project, and the end of a check."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def project_files() -> list[Path]:
    """Return the files of the checkout that git tracks or does not ignore, relative to its root. Links are not followed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    names = sorted({name.decode() for name in listing.split(b"\0") if name})
    return [Path(name) for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def read(path: Path) -> str | None:
    """Return the text of a file of the project, or None for a binary file."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def close(problems: Sequence[str], checked: int, what: str) -> int:
    """Print the problems and the number of checked items. Return 1 if there are problems, or no items."""
    for problem in problems:
        print(problem)
    print(f"{checked} {what} checked, {len(problems)} problems")
    return 1 if problems or not checked else 0
