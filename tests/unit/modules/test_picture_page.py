# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTML page of the fleet report: its content, and no name becomes markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
from fleet_page import SCHEMA, TAINT, Json, Page, published

from tests.fleets import BROKEN, Fleet, boards, generate_fleet
from tests.report_page import TEMPLATES, page

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(2)>" onmouseover='x' {{ 7*7 }} <!--"""


def hostile(value: Any) -> Any:
    """Return the value with hostile text instead of each string from outside."""
    if isinstance(value, dict):
        return {
            key: each if key in ("state", "source", "generated", "since") else hostile(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return HOSTILE if value and isinstance(value, str) else value


def everything() -> Json:
    fleet, devices = Fleet(), boards()
    devices[3] = replace(devices[3], health=BROKEN)
    fleet.node("node-1", devices, [{"match": {"index": 1}, "mode": "static", "partitions": {"3g.40gb": 2}}])
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-2-mig-1g10gb-19-2"))
    fleet.pending_pod("p", "c", "0/1 nodes are available")
    fleet.answers["away"] = {}
    fleet.rules = [{"metadata": {"name": "r"}, "spec": {"deviceSelector": {"device": "gpu-5"}, "taint": TAINT}}]
    picture = fleet.picture()
    picture["nodes"][1]["unread"].append("GPU 9: It does not answer")
    picture["nodes"][1]["refused"].append({"message": "It is in use", "hint": "Wait"})
    return picture


def test_page_names_never_become_markup() -> None:
    picture = everything()
    plain, bad = Page(page(picture)), Page(page(hostile(picture)))
    assert bad.tags == plain.tags
    assert {name for name, _value in bad.attributes} == {name for name, _value in plain.attributes}
    assert json.loads(bad.data) == hostile(picture) and json.loads(plain.data) == picture
    assert bad.text.count(HOSTILE) > 20 and "{{ 7*7 }}" in bad.text


def test_page_is_self_contained_and_readable_without_scripts() -> None:
    picture = everything()
    text = page(picture)
    found = Page(text)
    assert not re.search(r"""(src|href)="(?!#)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", text)
    assert len(found.ids) == len(set(found.ids))
    for word in (
        "node-1",
        "away",
        "It has fallen off the bus.",
        "0/1 nodes are available",
        "+ 3g.40gb at 0",
        "1g.20gb",
    ):
        assert word in found.text, word
    links = [str(value)[1:] for name, value in found.attributes if name == "href"]
    assert len(links) == 5 and set(links) <= set(found.ids)
    assert [tag for tag in found.tags if tag in ("header", "main", "footer", "h1")] == [
        "header",
        "h1",
        "main",
        "footer",
    ]
    assert found.tags.count("table") == found.tags.count("caption")
    # Included files pass through the template engine too.
    assert not any(re.search(r"\{[{%#]", (TEMPLATES / name).read_text()) for name in ("report.css", "report.js"))


def test_healthy_fleet_reports_no_problems() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(1))
    text = Page(page(fleet.picture())).text
    assert "All devices are healthy, and all nodes answered." in text and "No claim is pending." in text
    assert "No node has a layout." in text
    assert "The cluster was not queried." in Page(page(fleet.picture(cluster=False))).text
    assert Page(page(Fleet().picture())).ids


def test_page_data_of_generated_fleets_matches_schema() -> None:
    picture = generate_fleet(6, seed=3).picture()
    jsonschema.validate(picture, SCHEMA)
    assert Page(page(picture)).tags.count("tr") > 20
    total = picture["totals"]
    assert sum(total[state] for state in ("sick", "withheld", "full", "partly", "free")) == total["devices"] == 48
