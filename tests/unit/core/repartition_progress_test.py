# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The recorded steps of operations on a node: which steps count, how many are kept, and that invalid content is harmless."""

from __future__ import annotations

from pathlib import Path

import pytest
from dra_driver.core.host.system import System
from dra_driver.core.repartition import progress as steps
from dra_driver.core.repartition import record as records
from dra_driver.core.repartition.progress import StartedStep, StepReader, add, begun, over, parse
from dra_driver.core.repartition.record import Record
from hypothesis import given
from hypothesis import strategies as st


def record(step: str, operation: str = "one") -> Record:
    return Record(operation, ("GPU-0",), step, 100.0, (), ())


def test_begun_returns_step_only_if_record_changed() -> None:
    first = begun(None, record(records.DRAINING), "", 1.0)
    assert first == StartedStep(1.0, "one", ("GPU-0",), records.DRAINING)
    assert begun(record(records.DRAINING), record(records.DRAINING), "", 2.0) is None, "its time was renewed"
    assert begun(record(records.DRAINING), record(records.APPLYING), "", 2.0) is not None
    assert begun(record(records.DRAINING, "two"), record(records.DRAINING), "", 2.0) is not None
    again = begun(record(records.REVERTING), record(records.REVERTING), "it failed twice", 3.0)
    assert again is not None and again.reason == "it failed twice"


@pytest.mark.parametrize(
    ("step", "reason", "end"),
    [
        (records.PUBLISHING, "", steps.RELEASED),
        (records.PUBLISHING, "the driver was not updated", steps.FAILED),
        (records.REVERTING, "refused", steps.FAILED),
        (records.DRAINING, "no pod left", steps.FAILED),
        (records.APPLYING, "", steps.ENDED),
        (records.REVERTING, "", steps.ENDED),
    ],
)
def test_over_end_depends_on_progress(step: str, reason: str, end: str) -> None:
    assert over(record(step), reason, 5.0) == StartedStep(5.0, "one", ("GPU-0",), end, reason)


def test_steps_keep_latest_in_order(tmp_path: Path) -> None:
    follow = StepReader(str(tmp_path))
    assert follow.steps() == ()
    for number in range(steps.MOST_STEPS + 3):
        add(
            System(), str(tmp_path), StartedStep(float(number), "one", ("GPU-0",), records.DRAINING, "x" * number * 100)
        )
        assert follow.steps()[-1].at == number
    assert [each.at for each in follow.steps()] == [float(number) for number in range(3, steps.MOST_STEPS + 3)]
    assert all(len(each.reason) <= steps.LONGEST_REASON for each in follow.steps())
    (tmp_path / steps.FILE).write_text("{")
    assert follow.steps() == (), "an unreadable record starts no step"
    add(System(), str(tmp_path), StartedStep(1.0, "two", (), records.DRAINING))
    assert [each.operation for each in follow.steps()] == ["two"], "and is no reason to write nothing"


@given(st.one_of(st.text(), st.binary().map(repr), st.just('{"version": 1, "steps": [{}]}')))
def test_parse_invalid_content_returns_no_steps(text: str) -> None:
    assert parse(text) == ()
