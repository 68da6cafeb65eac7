# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Count the lines in each vendor's own files and in shared files, by part.

python tests/tools/lines.py [--files VENDOR] [--since COMMIT]

A file belongs to a vendor if its path matches a pattern below. All other files are shared. Only lines with content
count. --files lists the files of one column. --since counts the added and removed lines since a commit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = "shared"
#: By vendor: the pattern of the paths of its files.
VENDOR_PATHS: Mapping[str, re.Pattern[str]] = {
    "ascend": re.compile(
        r"ascend|dcmi|vnpu|(^|[_/-])npus?([_.-]|$)|npu_sets|chip_model|numbered_model|ring_model|bench/rings"
    ),
    "nvidia": re.compile(
        r"/files/(boards|machines)/|nvidia|nvml|(^|[_/-])mig([_.-]|$)|(^|[_/-])mps([_.-]|$)|gpu|vfio|board_model|xid"
    ),
}
#: The parts of the collection, by path prefix. The first match counts.
PARTS: Mapping[str, tuple[str, ...]] = {
    "core": ("plugins/module_utils/core/",),
    "node driver and controller": ("roles/dra_driver/files/", "roles/dra_controller/files/"),
    "simulator": ("roles/simulator/",),
    "modules and filters": ("plugins/",),
    "roles and playbooks": ("roles/", "playbooks/"),
    "tests": ("tests/", "molecule/"),
    "examples and docs": ("examples/", "docs/"),
}
COUNTED_SUFFIXES = {".py", ".c", ".h", ".yml", ".yaml", ".j2", ".json", ".md", ".service", ".sh", ".txt"}
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def part_of(path: str) -> str:
    """Return the part of a file, or "" without one."""
    return next((part for part, starts in PARTS.items() if path.startswith(starts)), "")


def vendor_of(path: str) -> str:
    """Return the vendor of a file, or the name for shared files."""
    owners = [vendor for vendor, pattern in VENDOR_PATHS.items() if pattern.search(path)]
    return owners[0] if len(owners) == 1 else SHARED


def counted_paths(paths: Iterable[str]) -> list[str]:
    """Return the paths whose lines count: not generated, and in a part."""
    return [
        path for path in paths if part_of(path) and Path(path).suffix in COUNTED_SUFFIXES and not GENERATED.search(path)
    ]


def tracked_paths() -> list[str]:
    """Return the paths in the git index."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.splitlines() if (ROOT / path).is_file()]


def lines_of(path: str) -> int:
    """Return the number of lines with content in a file."""
    return sum(1 for line in (ROOT / path).read_text("utf-8").splitlines() if line.strip())


def changed_lines(commit: str) -> dict[str, tuple[int, int]]:
    """Return the added and removed lines of each file since a commit."""
    command = ["git", "diff", "--numstat", "--no-renames", commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = {}
    for row in done.stdout.splitlines():
        added, removed, path = row.split("\t")
        if added != "-":
            found[path] = (int(added), int(removed))
    return found


def format_table(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return rows of text with a header of column names."""
    columns = [SHARED, *VENDOR_PATHS]
    widths = [max(len(name), *(len(row.get(name, "")) for row in rows.values())) for name in columns]
    first = max(map(len, rows))
    head = "  ".join(name.rjust(width) for name, width in zip(columns, widths))
    return [
        f"{'':{first}}  {head}",
        *(
            f"{part:{first}}  " + "  ".join(row.get(name, "").rjust(width) for name, width in zip(columns, widths))
            for part, row in rows.items()
        ),
    ]


def current_lines() -> dict[str, dict[str, str]]:
    """Return the lines of each part by vendor."""
    found: Counter[tuple[str, str]] = Counter()
    for path in counted_paths(tracked_paths()):
        found[part_of(path), vendor_of(path)] += lines_of(path)
    return {part: {name: str(found[part, name]) for name in (SHARED, *VENDOR_PATHS)} for part in PARTS}


def lines_since(commit: str) -> dict[str, dict[str, str]]:
    """Return the added and removed lines in each part since a commit, by vendor."""
    added: Counter[tuple[str, str]] = Counter()
    removed: Counter[tuple[str, str]] = Counter()
    changes = changed_lines(commit)
    for path in counted_paths(changes):
        key = (part_of(path), vendor_of(path))
        added[key] += changes[path][0]
        removed[key] += changes[path][1]
    return {
        part: {name: f"+{added[part, name]} -{removed[part, name]}" for name in (SHARED, *VENDOR_PATHS)}
        for part in PARTS
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", choices=[SHARED, *VENDOR_PATHS], help="list the files of one column")
    parser.add_argument("--since", metavar="COMMIT", help="count the lines changed since a commit")
    options = parser.parse_args()
    if options.files:
        print("\n".join(path for path in counted_paths(tracked_paths()) if vendor_of(path) == options.files))
        return
    print("\n".join(format_table(lines_since(options.since) if options.since else current_lines())))


if __name__ == "__main__":
    main()
