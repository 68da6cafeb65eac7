# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet report for tests: its schema, published names of a fleet, and the page as a browser parses it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.fleets import Fleet

Json = dict[str, Any]
SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs/report.schema.json").read_text(encoding="utf-8"))
TAINT = {"key": "example.com/firmware", "value": "update", "effect": "NoSchedule"}


def published(fleet: Fleet, node: str, start: str) -> str:
    """Return the only published name on a node with this start."""
    (name,) = [
        each["name"]
        for one in fleet.slices
        if one["spec"]["pool"]["name"] == node
        for each in one["spec"].get("devices", ())
        if each["name"] == start
    ]
    return str(name)


class Page(HTMLParser):
    """Parse the page as a browser does: its elements, their attributes, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.data = ""
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "each opened element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag not in ("meta", "br", "input", "link", "img"):
            self._open.append(f"{tag}#data" if ("id", "data") in attrs else tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().removesuffix("#data") == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script#data":
            self.data += data
        elif self._open and self._open[-1] not in ("script", "style"):
            self.text += data
