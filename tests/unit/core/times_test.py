# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Times as text."""

from __future__ import annotations

import pytest
from dra_driver.core.times import now_text, seconds_of, text_of
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 4102444800))
def test_seconds_of_round_trips(seconds: int) -> None:
    assert seconds_of(text_of(seconds)) == seconds


def test_text_of_drops_fractions() -> None:
    assert text_of(1.9) == "1970-01-01T00:00:01Z"


def test_now_is_a_time() -> None:
    assert seconds_of(now_text()) is not None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1970-01-01T01:00:00+01:00", 0.0), ("1970-01-01T00:00:00.500000Z", 0.5), ("1970-01-01T00:00:00", None)],
)
def test_seconds_of_foreign_formats(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "Z", "2026-13-01T00:00:00Z"])
def test_seconds_of_invalid_text_is_rejected(text: str) -> None:
    assert seconds_of(text) is None
