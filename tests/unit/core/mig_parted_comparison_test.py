# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare plans with the steps of nvidia-mig-parted: a plan never disturbs more, and docs/repartition.md has the resulting table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.layout_model import Outcome, disturbances_of_collection, disturbances_of_mig_parted, node
from tests.bench.layouts import BOARD, MIXED_COUNTS, MIXED_PLACEMENTS, SMALL, compare_typical_changes
from tests.unit.core.board_model import Place, all_states, profiles

ROOT = Path(__file__).resolve().parents[3]


def layouts(board: str) -> st.SearchStrategy[list[tuple[Place, ...] | None]]:
    return st.lists(st.none() | st.sampled_from(all_states(board)), min_size=4, max_size=4)


@given(
    st.sampled_from([(BOARD, False), (SMALL, False), (SMALL, True)]), st.sampled_from(["pods", "partitions"]), st.data()
)
def test_plan_disturbs_no_more_than_mig_parted(kind: tuple[str, bool], prefer: str, data: st.DataObject) -> None:
    board, pairs = kind
    now, then = data.draw(layouts(board)), data.draw(layouts(board))
    names = {each.profile_id: each.name for each in profiles(board)}
    wanted = [None if each is None else Counter(names[profile] for profile, _start in each) for each in then]
    gpus = node(board, now, pairs)
    mine, theirs = disturbances_of_collection(gpus, wanted, prefer), disturbances_of_mig_parted(gpus, wanted)
    assert mine.destroyed <= theirs.destroyed and mine.pods <= theirs.pods
    assert mine.touched <= theirs.touched


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        # Only one GPU differs: it is cleared, and its partitions are created again.
        ([{"1g.10gb": 7}, MIXED_COUNTS], Outcome(5, 1, 5)),
        # The mode of one GPU differs: both are cleared.
        ([None, MIXED_COUNTS], Outcome(10, 2, 10)),
        ([MIXED_COUNTS, MIXED_COUNTS], Outcome()),
    ],
)
def test_steps_of_nvidia_mig_parted(wanted: list[dict[str, int] | None], found: Outcome) -> None:
    assert disturbances_of_mig_parted(node(BOARD, [MIXED_PLACEMENTS, MIXED_PLACEMENTS]), wanted) == found


def test_repartition_page_has_computed_table() -> None:
    page = (ROOT / "docs/repartition.md").read_text(encoding="utf-8")
    for name, mine, theirs in compare_typical_changes():
        cells = zip((mine.destroyed, mine.touched, mine.pods), (theirs.destroyed, theirs.touched, theirs.pods))
        assert f"| {name} | " + " | ".join(f"{one} / {other}" for one, other in cells) + " |" in page
