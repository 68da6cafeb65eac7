# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check that only the simulator mentions simulated silicon, so that tests run the same code as on hardware."""

from __future__ import annotations

import re
import sys

from files import close, project_files, read

FOLDERS = {"plugins", "roles", "playbooks"}
WORDS = re.compile(r"simulat|\bgpusim|\bfake|\bmock|libnvidia-gpusim", re.IGNORECASE)


def main() -> int:
    """Check each line of plugins, roles, and playbooks, and return the exit status."""
    problems, seen = [], 0
    for path in project_files():
        if path.parts[0] not in FOLDERS or path.parts[:2] == ("roles", "simulator"):
            continue
        seen += 1
        for number, line in enumerate((read(path) or "").splitlines(), start=1):
            match = WORDS.search(line)
            if match:
                problems.append(f"{path}:{number}: says {match.group(0)!r}: {line.strip()[:120]}")
    return close(problems, seen, "files")


if __name__ == "__main__":
    sys.exit(main())
