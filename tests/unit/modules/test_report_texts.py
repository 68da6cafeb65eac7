# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reports escape text from nodes and users in Markdown, and the HTML page never runs such text as a script."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.filter.csp_hash import csp_hash
from ansible_collections.dra.accelerators.plugins.filter.markdown_text import markdown_text
from hypothesis import given
from hypothesis import strategies as st
from test_accelerator_report import LARGE, STATIC, allocated, fleet, gpu, published, rendered, report, slices
from test_picture_page import everything, hostile

from tests.report_page import TEMPLATES, page

HOSTILE = (
    "x\n\n# Injected\n| a | b |\n\n![i](https://a.example/i.png) [l](javascript:1) <img src=x onerror=a> `c` **b** "
    "www.a.example @me\r\n- list"
)
CONTROL = r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+"
ZERO_WIDTH_SPACE = "&#8203;"


def with_hostile_texts(value: Any) -> Any:
    """Return the value with hostile text instead of each text that is not empty."""
    if isinstance(value, dict):
        return {key: with_hostile_texts(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_hostile_texts(each) for each in value]
    return HOSTILE if value and isinstance(value, str) else value


def lines(text: str) -> list[tuple[str, int]]:
    """Return the start of each line, and its number of unescaped bars."""
    return [
        (line[:2] if line[:1] in ("#", "*", "|") else "", len(re.findall(r"(?<!\\)\|", line)))
        for line in text.splitlines()
    ]


def test_markdown_report_with_hostile_texts_has_the_same_lines() -> None:
    first, second = gpu(0, (LARGE, 4)), gpu(1)
    objects = [slices("node-1", published("gpu-0", first.uuid), published("gpu-1", second.uuid))]
    answers = {"node-1": report(first, second, rules=[STATIC]), "node-2": {}}
    found = fleet(answers, objects, [allocated("a", "node-1", "gpu-0")])
    found["nodes"]["node-1"]["unread"] = ["GPU 9 does not answer"]
    old = {"index": 0, "as_of": {"at": "now"}, "health": [{"message": "ill"}], "drift": {"steps": ["s"]}}
    found["picture"] = {"nodes": [{"name": "old", "devices": [old]}]}
    found["versions"], found["products"] = {"a": {"b": ["c"]}}, {"p": 1}
    bad = with_hostile_texts(found)
    bad["versions"], bad["products"] = {HOSTILE: {HOSTILE: [HOSTILE]}}, {HOSTILE: 1}
    bad["nodes"] = {f"{HOSTILE}{number}": each for number, each in enumerate(bad["nodes"].values())}
    plain, injected = rendered(found), rendered(bad)
    assert lines(injected) == lines(plain)
    assert not re.search(r"(?<!\\)[<`\[]|://\w|www\.|@\w", injected)
    assert injected.count("Injected") > 10


@given(st.text() | st.text(alphabet="-+#>=12.) []<>!`|&;@:/w\\_*~$\n\t"))
def test_markdown_text_renders_as_the_text_itself(text: str) -> None:
    escaped = markdown_text(text)
    unescaped = re.sub(r"\\([\\`*_{}\[\]<>|~#$!+=:-])", r"\1", escaped.replace(ZERO_WIDTH_SPACE, ""))
    assert html.unescape(unescaped.replace("&amp;", "\0")).replace("\0", "&") == re.sub(CONTROL, " ", text).strip()
    assert not re.search(CONTROL, escaped)
    assert not re.match(r"[-+=:#>|]|\d+[.)](\s|$)|\s", escaped)


@pytest.mark.parametrize("text", ["580.95.5", "NVIDIA H100 80GB HBM3", "team-a/training", "3g.40gb at 0"])
def test_markdown_text_usual_texts_are_unchanged(text: str) -> None:
    assert markdown_text(text) == text


class PageParser(HTMLParser):
    """The content security policy of a page, and the parts that it controls: contents of elements, and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.policy = ""
        self.contents: dict[str, list[str]] = {"style": [], "script": []}
        self.attributes: set[str] = set()
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.attributes |= set(found)
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(found["content"])
        self._open = tag if tag in self.contents and "type" not in found else ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.contents[self._open].append(data)

    def handle_endtag(self, _tag: str) -> None:
        self._open = ""


@pytest.mark.parametrize("picture", [everything(), hostile(everything())], ids=["plain", "hostile"])
def test_page_policy_allows_only_its_own_style_and_script(picture: dict[str, Any]) -> None:
    found = PageParser(page(picture))
    allowed = dict(each.strip().split(" ", 1) for each in found.policy.split(";"))
    assert allowed["default-src"] == allowed["base-uri"] == allowed["form-action"] == "'none'"
    for element in ("style", "script"):
        (content,) = found.contents[element]
        assert allowed[f"{element}-src"] == csp_hash(content)
    assert "unsafe" not in found.policy
    assert not {each for each in found.attributes if each == "style" or each.startswith("on")}


def test_page_policy_is_the_same_for_every_fleet() -> None:
    assert PageParser(page(everything())).policy == PageParser(page(hostile(everything()))).policy


def test_script_sets_styles_without_the_style_attribute() -> None:
    """The policy of the page blocks style attributes, but allows ``style.cssText``."""
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    assert not re.search(r"""setAttribute\(["']style|innerHTML|insertAdjacentHTML|document\.write""", script)
    for name in ("element", "drawn"):
        body = script.partition(f"function {name}(")[2].partition("return made;")[0]
        assert 'key === "style"' in body and "style.cssText" in body


def test_csp_hash_of_empty_text_is_the_known_one() -> None:
    assert csp_hash("") == "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    assert csp_hash("a\r\nb") == csp_hash("a\nb")
