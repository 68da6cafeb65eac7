# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A divided run: all parts together are the complete run, and each part has the steps that it needs."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import suites
from hypothesis import given
from hypothesis import strategies as st
from parts import Part, minutes
from steps import ROOT, Step

WHOLE = ["lint", "release", "unit", "simulator", "cluster", "molecule", "prove"]


def step(name: str, usual: str = "2 min", after: tuple[str, ...] = (), runs_always: bool = False) -> Step:
    return Step(name, usual, ["true"], needs=after, runs_always=runs_always)


@given(
    lengths=st.lists(st.integers(min_value=1, max_value=200), max_size=30),
    needed=st.sets(st.integers(min_value=0, max_value=29)),
    parts=st.integers(min_value=1, max_value=6),
)
def test_parts_have_each_step_once(lengths: list[int], needed: set[int], parts: int) -> None:
    """Only steps that always run, and steps that others need, are in several parts."""
    given_steps = [step("build", runs_always=True), step("tools", "1 min")]
    given_steps += [
        step(f"s{number}", f"{length} min", ("tools", "build") if number in needed else ("build",))
        for number, length in enumerate(lengths)
    ]
    divided = [Part(number + 1, parts).select_steps(given_steps) for number in range(parts)]
    names = [each.name for part in divided for each in part]
    assert sorted(name for name in names if name.startswith("s")) == sorted(f"s{n}" for n in range(len(lengths)))
    assert names.count("build") == parts and names.count("tools") >= 1
    for part in divided:
        there: set[str] = set()
        for each in part:
            assert there.issuperset(each.needs), "what a step needs comes before it, in the same part"
            there.add(each.name)


@given(
    lengths=st.lists(st.integers(min_value=1, max_value=200), min_size=1, max_size=30),
    parts=st.integers(min_value=1, max_value=6),
)
def test_parts_differ_by_at_most_one_step(lengths: list[int], parts: int) -> None:
    given_steps = [step(f"s{number}", f"{length} min") for number, length in enumerate(lengths)]
    sums = [
        sum(minutes(each.usual_time) for each in Part(n + 1, parts).select_steps(given_steps)) for n in range(parts)
    ]
    assert max(sums) - min(sums) <= max(lengths)


def test_parts_together_are_the_complete_run(tmp_path: Path) -> None:
    """The parts have each step and each module of tests/prove, and only the command of the divided step differs from the complete run."""
    whole = suites.steps_of_suites(WHOLE, tmp_path)
    divided = [Part(number, 3).select_steps(whole) for number in (1, 2, 3)]
    assert {each.name for part in divided for each in part} == {each.name for each in whole}
    commands = {each.name: each.command for each in whole}
    modules: list[str] = []
    for part in divided:
        for each in part:
            if each.test_modules:
                words = [str(word) for word in each.command]
                assert "tests/prove" not in words and set(each.test_modules) <= set(words)
                modules += [word for word in words if word.startswith("tests/prove/")]
            else:
                assert each.command == commands[each.name], "the records of the whole run have the same key"
    assert sorted(modules) == sorted(f"tests/prove/{path.name}" for path in (ROOT / "tests/prove").glob("test_*.py"))


def test_parts_separate_the_heavy_steps(tmp_path: Path) -> None:
    """Chaos and the cluster's long tests use both processors for hours: they are in different parts."""
    whole = suites.steps_of_suites(WHOLE, tmp_path)
    homes = {
        each.name: number
        for number in (1, 2, 3)
        for each in Part(number, 3).select_steps(whole)
        if each.name in ("chaos", "cluster")
    }
    assert len(set(homes.values())) == 2


def test_parts_without_a_module_have_no_step() -> None:
    divisible = Step(
        "prove", "4 h", ["pytest", "tests/prove", "-v"], test_modules=("tests/prove/a.py", "tests/prove/b.py")
    )
    found = [
        [list(map(str, each.command)) for each in Part(number, 3).select_steps([divisible])] for number in (1, 2, 3)
    ]
    assert found == [[["pytest", "tests/prove/a.py", "-v"]], [["pytest", "tests/prove/b.py", "-v"]], []]


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "2", "2/0", "a/b", "2/3/4", "-1/3"])
def test_parse_invalid_part_is_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentTypeError, match="expected K/N with K from 1 to N, such as 2/3"):
        Part.parse(text)
    with pytest.raises(SystemExit) as ended:
        suites.main([f"--part={text}", "lint"])
    assert ended.value.code == 2
    assert "is no part of a run" in capsys.readouterr().err


def test_minutes_of_a_step_are_parsed(tmp_path: Path) -> None:
    assert [minutes(words) for words in ("2 h in parallel", "10 min cold, a few seconds warm", "30 s")] == [
        120.0,
        10.0,
        0.5,
    ]
    unread = [each.name for each in suites.steps_of_suites(WHOLE, tmp_path) if not each.usual_time[:1].isdigit()]
    assert unread == []
