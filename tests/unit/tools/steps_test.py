# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Steps run in their lanes, wait for their requirements, and have distinct lines on the screen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import steps
import suites
from steps import Counts, Step, run_steps

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase classname="tests.cluster.test_40_kill" name="test_a[one]" time="12.5"/>
<testcase classname="tests.cluster.test_40_kill" name="test_b" time="0.5"><failure message="assert 1 == 2&#10;  at length"/></testcase>
<testcase classname="tests.unit.core.cdi_test" name="test_c" time="3.25"><skipped/></testcase>
</testsuite></testsuites>
"""


def shell(name: str, script: str, *after: str, lane: str = "") -> Step:
    return Step(name, "no time", ["sh", "-c", script], needs=after, lane=lane)


def run(tmp_path: Path, *given: Step) -> list[steps.Result]:
    return run_steps(given, tmp_path / "logs", {"PATH": os.environ["PATH"], "HERE": str(tmp_path)})


def test_lanes_run_in_parallel(tmp_path: Path) -> None:
    """Each of the two steps ends only after the other one has begun."""
    meet = "mkdir $HERE/{0}; for i in $(seq 600); do test -d $HERE/{1} && exit 0; sleep 0.05; done; exit 1"
    results = run(tmp_path, shell("one", meet.format("a", "b"), lane="x"), shell("two", meet.format("b", "a")))
    assert [result.problem for result in results] == ["", ""]


def test_one_lane_keeps_its_order(tmp_path: Path) -> None:
    run(tmp_path, *(shell(name, f"echo {name} >>$HERE/order") for name in ("one", "two", "three")))
    assert (tmp_path / "order").read_text().split() == ["one", "two", "three"]


def test_step_waits_for_a_step_in_another_lane(tmp_path: Path) -> None:
    results = run(
        tmp_path,
        shell("build", "sleep 0.3; touch $HERE/built", lane="build"),
        shell("use", "test -e $HERE/built", "build"),
    )
    assert [result.problem for result in results] == ["", ""]


def test_steps_after_a_failed_step_are_skipped_and_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        shell("build", "echo why; exit 3", lane="build"),
        shell("use", "touch $HERE/used", "build"),
        shell("use again", "touch $HERE/used", "use"),
        shell("alone", "true"),
    )
    problems = {result.step.name: result.problem for result in run(tmp_path, *given)}
    assert problems["build"] == "exit status 3"
    assert problems["use"] == "not run: it needs build, which failed"
    assert problems["use again"] == "not run: it needs use, which failed"
    assert problems["alone"] == ""
    assert not (tmp_path / "used").exists()
    printed = capsys.readouterr().out
    assert "[1/4 build] FAILED after" in printed and "    | why\n" in printed
    assert "[2/4 use] NOT RUN: it needs build" in printed


def test_step_with_a_missing_program_fails(tmp_path: Path) -> None:
    missing = Step("missing", "no time", [tmp_path / "not-there"])
    results = run(tmp_path, missing, shell("alone", "true"), shell("use", "true", "missing"))
    assert "not-there" in results[0].problem
    assert [bool(result.problem) for result in results] == [True, False, True]


@pytest.mark.parametrize("given", [("a", "a"), ("a", "b")], ids=["twice", "need that comes later"])
def test_graph_with_a_cycle_is_rejected(tmp_path: Path, given: tuple[str, str]) -> None:
    needs = ("b",) if given == ("a", "b") else ()
    with pytest.raises(ValueError, match="step a"):
        run(tmp_path, shell(given[0], "true", *needs), shell(given[1], "true"))


def test_tests_are_counted_and_the_slowest_named(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert steps.count_junit(report) == Counts(passed=1, failed=1, skipped=1)
    assert steps.slowest([report, report], 3) == [
        (12.5, "test_40_kill::test_a[one]"),
        (12.5, "test_40_kill::test_a[one]"),
        (3.25, "cdi_test::test_c"),
    ]


def test_table_shows_the_processor_time_of_a_step_and_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that sleeps takes little processor time, one whose child computes takes much."""
    busy = f"{sys.executable} -c 'sum(range(20_000_000))'; true"
    results = run(tmp_path, shell("idle", "sleep 0.5"), shell("busy", busy))
    idle, computing = (result.processor_seconds for result in results)
    assert 0 < idle < computing
    capsys.readouterr()
    steps.print_table(results)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["time", "processors"]
    assert [len(line.split()) for line in lines[1:3]] == [6, 6]
    assert lines[3] == "Processor time of all steps, without containers: 0 min"


def test_run_ends_with_the_failed_steps_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the output alone shows the failed tests and their errors."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    red = Step("cluster", "no time", ["false"], junit_report=report)
    results = [
        steps.Result(red, 1.0, "exit status 1", Counts(1, 1, 1), None),
        steps.Result(shell("lint", "false"), 1.0, "exit status 1", Counts(failed=1), None),
        steps.Result(shell("unit", "true"), 1.0, "", Counts(passed=1), None),
    ]
    steps.print_failed(results)
    assert capsys.readouterr().out.splitlines() == [
        "FAILED cluster: exit status 1",
        "  test_40_kill::test_b",
        "    assert 1 == 2",
        "FAILED lint: exit status 1",
    ]


def test_cluster_steps_run_in_parallel_with_priority(tmp_path: Path) -> None:
    given = suites.steps_of_suites(["unit", "simulator", "cluster", "molecule"], tmp_path)
    names = [step.name for step in given]
    assert names.count("world build") == 1
    lanes = {step.name: step.lane for step in given}
    assert len({lanes["unit"], lanes["world build"], lanes["cluster"], lanes["molecule simulator"]}) == 4
    assert lanes["unit"] == lanes["simulator"] and lanes["oracles"] == lanes["molecule simulator"]
    assert all("world build" in step.needs for step in given if step.name in ("oracles", "cluster", "molecule destroy"))
    first = [step.name for step in given if step.command[0] not in suites.LOW_PRIORITY]
    assert first == ["world build", "cluster"]
    in_time = next(
        step for step in suites.steps_of_suites(["release", "cluster"], tmp_path) if step.name == "galaxy-importer"
    )
    assert in_time.command[0] not in suites.LOW_PRIORITY, "its time limit is set by another program"
    assert not any(set(suites.ALL_TESTS) <= set(step.command) for step in given)


def test_single_suites_have_no_nice_value(tmp_path: Path) -> None:
    assert not [
        step.name
        for step in suites.steps_of_suites(["lint", "unit"], tmp_path)
        if step.command[0] in suites.LOW_PRIORITY
    ]


def test_nice_value_applies_with_autogroup(tmp_path: Path) -> None:
    """Niceness alone has no effect between two sessions with autogroup, and each step has its own session: the session is niced too."""
    script = "nice; cat /proc/self/autogroup 2>/dev/null || echo no autogroup"
    step = Step("polite", "no time", [*suites.LOW_PRIORITY, "sh", "-c", script])
    (result,) = run(tmp_path, step)
    assert result.log is not None and result.problem == ""
    niceness, session = result.log.read_text().splitlines()
    assert niceness == "19"
    assert session == "no autogroup" or session.endswith(" nice 19")


def test_run_that_gets_a_signal_ends_its_steps(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; import suites; from steps import Step, run_steps; suites.exit_on_signals(); "
        f"run_steps([Step('long', 'no time', ['sh', '-c', 'echo $$ >pid.new; mv pid.new pid; exec sleep 600'], "
        f"cwd=pathlib.Path({str(tmp_path)!r}))], pathlib.Path({str(tmp_path)!r}), {{'PATH': '/usr/bin:/bin'}})"
    )
    environment = {**os.environ, "PYTHONPATH": str(suites.ROOT / "tests/tools")}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL) as running:
        while not (tmp_path / "pid").exists():
            assert running.poll() is None
            time.sleep(0.05)
        running.terminate()
        assert running.wait(timeout=60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_step_that_begins_while_the_run_stops_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is stopped after a process was started, but before it was registered: the process ends."""
    step = Step("late", "no time", ["sleep", "5"], cwd=tmp_path)
    runner = steps.StepRunner([step], tmp_path, {"PATH": "/usr/bin:/bin"})
    start = subprocess.Popen

    def stopped_meanwhile(*arguments: Any, **options: Any) -> Any:
        process = start(*arguments, **options)
        runner.stop()
        return process

    monkeypatch.setattr(steps.subprocess, "Popen", stopped_meanwhile)
    (result,) = runner.run()
    assert result.problem == f"exit status {-signal.SIGTERM}"


def test_long_scenarios_are_for_proving(tmp_path: Path) -> None:
    short = {step.name for step in suites.steps_of_suites(["molecule"], tmp_path)}
    assert "molecule simulator" in short
    proved = {step.name for step in suites.steps_of_suites(["molecule", "prove"], tmp_path)}
    there = {f"molecule {name}" for name in suites.scenarios()}
    assert {name for name in proved if name.startswith("molecule ")} == there | {"molecule destroy"}
    assert short & {f"molecule {name}" for name in suites.LONG_SCENARIOS} == set()


def test_proving_runs_the_long_tests_of_every_suite(tmp_path: Path) -> None:
    given = suites.steps_of_suites(["unit", "cluster", "prove"], tmp_path)
    runs = [step for step in given if step.junit_report]
    assert {step.name for step in runs} == {
        "unit",
        "oracles",
        "cluster",
        "prove",
        "fleet",
        "planner",
        "order",
        "report",
    }
    assert all(tuple(step.command[-2:]) == suites.ALL_TESTS for step in runs)


def test_proving_runs_the_chaos_of_every_kind_of_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(suites.ROOT / "roles/simulator/files"))
    from tests.chaos.vendors import VENDORS

    steps = {step.name: step.command for step in suites.prove(tmp_path) if "tests.chaos" in step.command}
    words = [each[each.index("--vendor") + 1] if "--vendor" in each else "nvidia" for each in steps.values()]
    assert set(words) == set(VENDORS)
    for each in steps.values():
        fuzzes = "--faults" not in each
        assert "--seconds" in each and ("--fuzz-seconds" in each) == fuzzes, "none has all the time it likes"
    requested = [dict(zip(each[3::2], each[4::2])) for each in steps.values()]
    (floors,) = (each for each in requested if "--least" in each)
    assert floors["--vendor"] == "nvidia" and "--faults" not in floors and "--kinds" not in floors
    assert floors["--least"] == floors["--runs"] == "200"
    assert floors["--least-requests"] == floors["--requests"] == "100000"
    assert [each["--away"] for each in requested if each.get("--faults") == "api-away"] == ["600"]


def test_one_scenario_is_run_alone_with_what_it_needs(tmp_path: Path) -> None:
    for name in suites.scenarios():
        steps = suites.steps_of_suites([f"molecule={name}"], tmp_path)
        assert [step.command[-1] for step in steps if step.command[:2] == ["molecule", "test"]] == [name]
        names = [step.name for step in steps]
        assert all(needed in names for step in steps for needed in step.needs)


@pytest.mark.parametrize("name", ["", "no-such", "default"])
def test_unknown_scenario_is_rejected_with_the_known_ones(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert suites.main([f"molecule={name}"]) == 2
    output = capsys.readouterr().out
    assert f"no molecule scenario {name!r}" in output and "SCENARIO=NAME" in output and "nvidia_driver" in output
