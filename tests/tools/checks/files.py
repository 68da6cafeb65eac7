# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the checks share: which files belong to the project, and how a check ends."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def project_files() -> list[Path]:
    """Every file of the checkout that Git tracks or would track, relative to its root; links are not followed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    names = sorted({name.decode() for name in listing.split(b"\0") if name})
    return [Path(name) for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def read(path: Path) -> str | None:
    """The text of a file of the project; None where it is not text."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def close(problems: Sequence[str], looked_at: int, what: str) -> int:
    """Print the problems and how much was looked at; the exit status is 1 where there are any, or nothing to look at."""
    for problem in problems:
        print(problem)
    print(f"{looked_at} {what} looked at, {len(problems)} problems")
    return 1 if problems or not looked_at else 0
