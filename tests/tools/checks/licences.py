# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Every file names its licence in its first lines, and one of the two that the project uses.

Files in a format that has no comments (JSON, licence texts, changelog output) fall under the LICENSE file.
What Ansible loads into its own process is GPL-3.0-or-later, because Ansible is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from files import close, project_files, read

IDENTIFIER = re.compile(r"SPDX-License-Identifier: (\S+)")
LICENCES = {"Apache-2.0", "GPL-3.0-or-later"}
GPL_LINE = (
    "GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)"
)
WITHOUT_COMMENTS = {".json", ".txt", ".md", ".sum", ".tar", ".gz", ".png", ".mod"}
WITHOUT_COMMENTS_BY_NAME = {"LICENSE", "CHANGELOG.md", "changelog.yaml", "py.typed"}
# Folders of `plugins` whose files are not loaded into Ansible's process as plugins.
SHARED = {"module_utils"}


def problem_of(path: Path, text: str) -> str:
    """What is wrong with the header of ``path``; empty where nothing is."""
    match = IDENTIFIER.search("\n".join(text.splitlines()[:12]))
    if match is None:
        return f"{path}: no SPDX-License-Identifier in the first 12 lines"
    if match.group(1) not in LICENCES:
        return f"{path}: licence {match.group(1)}; expected one of {', '.join(sorted(LICENCES))}"
    plugin = path.parts[0] == "plugins" and path.parts[1] not in SHARED and path.suffix == ".py"
    if plugin and (match.group(1) != "GPL-3.0-or-later" or GPL_LINE not in text):
        return f"{path}: an Ansible plugin has to be GPL-3.0-or-later, with the line {GPL_LINE!r}"
    return ""


def main() -> int:
    """Look at every file and return the exit status."""
    problems, seen = [], 0
    for path in project_files():
        text = read(path)
        exempt = Path(path.name.removesuffix(".j2")).suffix in WITHOUT_COMMENTS and path.name != "requirements.txt"
        if not text or exempt or path.name in WITHOUT_COMMENTS_BY_NAME or path.parts[0] == "LICENSES":
            continue
        seen += 1
        problem = problem_of(path, text)
        if problem:
            problems.append(problem)
    return close(problems, seen, "files")


if __name__ == "__main__":
    sys.exit(main())
