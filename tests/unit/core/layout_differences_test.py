# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Differences of devices from a layout, as text that fits into a slice's annotation and can be parsed again."""

from __future__ import annotations

import json
from typing import Any

import board_model
from dra_driver.core.partitioning import layout_differences
from dra_driver.core.partitioning.layout_differences import (
    ANNOTATION,
    LONGEST_TEXT,
    MOST_DEVICES,
    MOST_STEPS,
    annotation_text,
    compare,
    differences_in_slices,
    parse_annotation,
    summarize_difference,
)
from dra_driver.core.partitioning.rules import parse_rules
from hypothesis import given
from hypothesis import strategies as st

SMALL, LARGE = 19, 9
STATIC = parse_rules([{"match": {}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 1}}])
placements = st.builds(lambda start: {"start": start, "size": 1}, st.integers(0, 7))
parts = st.builds(lambda profile, placement: {"profile": profile, "placement": placement}, st.text(), placements)
entries = st.builds(
    lambda number, requested, missing, surplus, error: {
        "index": number,
        "uuid": f"GPU-{number}",
        "requested": requested,
        "mode": {"found": number % 2 == 0, "requested": True},
        "missing": missing,
        "surplus": surplus,
        "held_by": ["claim team-a/secret"],
        "error": {"message": error} if error else None,
    },
    st.integers(0, 200),
    st.text(max_size=300),
    st.lists(parts, max_size=20),
    st.lists(parts, max_size=20),
    st.text(max_size=300),
)


def test_note_of_differences_is_short_and_round_trips() -> None:
    devices = [board_model.device("h100-80", places=((LARGE, 0), (SMALL, 4), (SMALL, 5)))]
    devices += [board_model.device("h100-80", 1), board_model.device("h100-80", 2, places=((LARGE, 0), (SMALL, 4)))]
    found = compare(devices, STATIC)
    assert [each["index"] for each in found] == [0, 1]
    noted = parse_annotation(annotation_text(found))
    assert [noted[device.uuid]["steps"] for device in devices[:2]] == [
        ["− 1g.10gb at 5"],
        ["partitioning on", "+ 3g.40gb at 4", "+ 1g.10gb at 0"],
    ]
    for each in found:
        assert noted[each["uuid"]] == {**summarize_difference(each), "index": each["index"], "held_by": []}
    assert annotation_text([]) == "" and parse_annotation("") == {}


@given(st.lists(entries, unique_by=lambda each: each["uuid"], max_size=80))
def test_note_of_is_bounded_and_names_no_claims(found: list[Any]) -> None:
    text = annotation_text(found)
    noted = parse_annotation(text)
    assert list(noted) == sorted(each["uuid"] for each in found[:MOST_DEVICES])
    for each in noted.values():
        assert len(each["steps"]) <= MOST_STEPS + 1
        assert all(len(one) <= LONGEST_TEXT for one in (*each["steps"], each["wanted"], each["error"]))
    assert "team-a/secret" not in json.dumps(noted)
    # At most four bytes per character, and 256 KiB for all annotations of an object.
    assert len(text) * 4 < 128 * MOST_DEVICES + 4 * MOST_DEVICES * (MOST_STEPS + 4) * 2 * LONGEST_TEXT
    assert annotation_text(reversed(found[:MOST_DEVICES])) == text, "the order of the devices makes no other note"


@given(st.one_of(st.text(), st.recursive(st.none() | st.text(), st.lists).map(json.dumps)))
def test_read_note_invalid_text_returns_nothing(text: str) -> None:
    assert parse_annotation(text) == {} or isinstance(json.loads(text), dict)


def a_slice(node: str, generation: int, note: str | None) -> dict[str, Any]:
    pool = {"name": node, "generation": generation}
    annotations = {} if note is None else {ANNOTATION: note}
    return {
        "metadata": {"annotations": annotations},
        "spec": {"driver": "gpu.nvidia.com", "nodeName": node, "pool": pool},
    }


def test_notes_of_slices_use_newest_generation() -> None:
    one = annotation_text(compare([board_model.device("h100-80")], STATIC))
    slices = [
        a_slice("node-1", 1, one),
        a_slice("node-1", 2, None),
        a_slice("node-2", 2, one),
        a_slice("node-2", 2, None),
    ]
    assert list(differences_in_slices(slices)) == ["node-2"]
    assert differences_in_slices([a_slice("node-1", 1, "{")]) == {"node-1": {}}


def test_annotation_name_is_published() -> None:
    assert layout_differences.ANNOTATION == "dra.accelerators/layout-differs"
