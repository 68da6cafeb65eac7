# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A cached answer is returned within a given time, and never after it."""

from __future__ import annotations

import pytest
from dra_driver.core.ttl_cache import TtlCache
from hypothesis import given
from hypothesis import strategies as st


@given(st.floats(0.0, 10.0), st.lists(st.floats(0.0, 5.0), max_size=30))
def test_an_answer_is_not_older_than_the_seconds(seconds: float, pauses: list[float]) -> None:
    now, asked = [0.0], []

    def look() -> float:
        asked.append(now[0])
        return now[0]

    lately = TtlCache(look, seconds, clock=lambda: now[0])
    for pause in pauses:
        now[0] += pause
        before = len(asked)
        due = lately.is_due
        age = now[0] - lately()
        assert age < seconds or age == 0.0
        assert due == (len(asked) > before and seconds > 0)
    if seconds == 0:
        assert len(asked) == len(pauses), "nothing is kept"


def test_an_answer_is_as_old_as_the_beginning_of_its_call() -> None:
    now = [0.0]

    def slow() -> float:
        now[0] += 1.0
        return now[0]

    lately = TtlCache(slow, 1.5, clock=lambda: now[0])
    assert lately() == 1.0
    now[0] += 0.4
    assert lately() == 1.0
    now[0] += 0.2
    assert lately() == pytest.approx(2.6)


def test_an_error_is_not_kept() -> None:
    answers = iter([ValueError("not there"), 5])

    def look() -> int:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return int(answer)

    lately = TtlCache(look, 60.0)
    with pytest.raises(ValueError, match="not there"):
        lately()
    assert lately.is_due and lately() == 5 and not lately.is_due
