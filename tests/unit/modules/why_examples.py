# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The examples of docs/why.md: their common cluster, and the manifests and the explanation of each example."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).resolve().parents[3] / "docs" / "why.md"
Json = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A section of the page: its heading, its manifests as text, and the expected text."""

    title: str
    manifests: str
    text: str

    @property
    def documents(self) -> list[Json]:
        return list(yaml.safe_load_all(self.manifests))


def cluster() -> list[Json]:
    """Return the objects of the cluster."""
    (found,) = re.findall(r"<details>.*?```yaml\n(.*?)```.*?</details>", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    items: list[Json] = yaml.safe_load(found)["items"]
    return items


def with_answers() -> tuple[str, str, str]:
    """Return the section about devices that have to be partitioned: its manifest, and its texts with and without node reports."""
    page = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(r"\n## Partitions that do not exist yet\n(.*?)\n## ", page, re.DOTALL)
    (manifest,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    with_reports, without_reports = re.findall(r"```text\n(.*?)\n?```", section, re.DOTALL)
    return manifest, with_reports, without_reports


def examples() -> list[Example]:
    """Return all examples in order."""
    sections = PAGE.read_text(encoding="utf-8").split("\n### ")[1:]
    found = []
    for section in sections:
        blocks = re.fullmatch(r"([^\n]+)\n.*?```yaml\n(.*?)```\s+```text\n(.*?)\n?```\s*", section, re.DOTALL)
        assert blocks, f"{section.splitlines()[0]}: a block of yaml and one of text after it, and nothing behind them"
        found.append(Example(*blocks.groups()))
    return found
