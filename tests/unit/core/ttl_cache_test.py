# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A cached answer is returned within a given time, and never after it."""

from __future__ import annotations

import pytest
from dra_driver.core.ttl_cache import TtlCache
from hypothesis import given
from hypothesis import strategies as st


@given(st.floats(0.0, 10.0), st.lists(st.floats(0.0, 5.0), max_size=30))
def test_ttl_cache_result_is_not_older_than_ttl(seconds: float, pauses: list[float]) -> None:
    now, calls = [0.0], []

    def read() -> float:
        calls.append(now[0])
        return now[0]

    cache = TtlCache(read, seconds, clock=lambda: now[0])
    for pause in pauses:
        now[0] += pause
        before = len(calls)
        due = cache.is_due
        age = now[0] - cache()
        assert age < seconds or age == 0.0
        assert due == (len(calls) > before and seconds > 0)
    if seconds == 0:
        assert len(calls) == len(pauses), "nothing is kept"


def test_ttl_cache_age_counts_from_call_start() -> None:
    now = [0.0]

    def slow() -> float:
        now[0] += 1.0
        return now[0]

    cache = TtlCache(slow, 1.5, clock=lambda: now[0])
    assert cache() == 1.0
    now[0] += 0.4
    assert cache() == 1.0
    now[0] += 0.2
    assert cache() == pytest.approx(2.6)


def test_ttl_cache_error_is_not_cached() -> None:
    answers = iter([ValueError("not there"), 5])

    def read() -> int:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return int(answer)

    cache = TtlCache(read, 60.0)
    with pytest.raises(ValueError, match="not there"):
        cache()
    assert cache.is_due and cache() == 5 and not cache.is_due
