# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A passed step is known for exactly the same files, and a resumed run skips only known steps."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import suites
from passed_records import KEPT_STATES, RECORDS_VARIABLE, RESUME_VARIABLE, PassedRecord, PassedRecords, digest_of_files
from steps import ROOT, Counts, Result, Step, print_table, run_steps

PASSED = PassedRecord(3, 12.5, 1_800_000_000.0)


def git(directory: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "checkout"
    directory.mkdir()
    git(directory, "init", "--quiet")
    (directory / ".gitignore").write_text("*.log\n")
    (directory / "a").write_text("1")
    (directory / "link").symlink_to("a")
    git(directory, "add", "--all")
    return directory


def test_digest_covers_all_files_that_git_does_not_ignore(checkout: Path) -> None:
    before = digest_of_files(checkout)
    (checkout / "x.log").write_text("ignored")
    git(
        checkout,
        "-c",
        "user.name=n",
        "-c",
        "user.email=e@example.com",
        "commit",
        "--quiet",
        "--message",
        "committed or not",
    )
    assert digest_of_files(checkout) == before

    seen = {before}

    def is_new() -> bool:
        found = digest_of_files(checkout)
        is_new = found not in seen
        seen.add(found)
        return is_new

    (checkout / "a").write_text("2")
    assert is_new()
    (checkout / "a").chmod(0o755)
    assert is_new()
    (checkout / "link").unlink()
    (checkout / "link").symlink_to("b")
    assert is_new()
    (checkout / "untracked").write_text("")
    assert is_new()
    (checkout / "a").unlink()
    assert is_new()


def test_results_are_known_only_for_the_same_files(checkout: Path, tmp_path: Path) -> None:
    records = PassedRecords.open(checkout, tmp_path / "results")
    assert records is not None
    assert (records.passed_steps(), records.passed_modules()) == ({}, {})
    records.record_step("molecule a/b", PASSED)
    records.record_module("tests/prove/test_x.py", PASSED)
    (records.directory / "cut-short.json").write_text('{"name": "x"')
    (records.directory / "of-another-time.json").write_text('{"name": "x", "more": 1}')
    again = PassedRecords.open(checkout, tmp_path / "results")
    assert again.passed_steps() == {"molecule a/b": PASSED} and again.passed_modules() == {
        "tests/prove/test_x.py": PASSED
    }
    (checkout / "a").write_text("changed")
    assert not PassedRecords.open(checkout, tmp_path / "results").passed_steps()
    (checkout / "a").write_text("1")
    assert PassedRecords.open(checkout, tmp_path / "results").passed_steps()


def test_directory_without_a_checkout_is_tested_without_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unpacked").mkdir()
    assert PassedRecords.open(tmp_path / "unpacked", tmp_path / "results") is None
    assert PassedRecords.open(tmp_path / "not there", tmp_path / "results") is None
    assert suites.find_earlier_runs(None, resume=True) == suites.EarlierRuns()
    assert "All steps run" in capsys.readouterr().out


def test_old_states_are_deleted(checkout: Path, tmp_path: Path) -> None:
    for number in range(KEPT_STATES + 3):
        (checkout / "a").write_text(str(number))
        records = PassedRecords.open(checkout, tmp_path / "results")
        os.utime(records.directory, (number, number))
    records = PassedRecords.open(checkout, tmp_path / "results")
    assert len(list((tmp_path / "results/passed").iterdir())) == KEPT_STATES and records.directory.is_dir()


def test_passed_step_is_skipped_unless_others_need_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(name: str, script: str, *after: str, runs_always: bool = False) -> Step:
        return Step(
            name,
            "no time",
            ["sh", "-c", f"echo {name} >>{tmp_path}/run; {script}"],
            needs=after,
            runs_always=runs_always,
        )

    steps = [step("build", ":", runs_always=True), step("good", ":", "build"), step("bad", "exit 1", "build")]
    records, environment = PassedRecords(tmp_path / "records"), {"PATH": os.environ["PATH"]}

    def again() -> list[tuple[str, Counts, bool]]:
        (tmp_path / "run").write_text("")
        results = run_steps(steps, tmp_path / "logs", environment, records.passed_steps(), records)
        print_table(results)
        return [(result.problem, result.counts, bool(result.earlier_run)) for result in results]

    first = again()
    assert first == [("", Counts(1), False), ("", Counts(1), False), ("exit status 1", Counts(failed=1), False)]
    assert set(records.passed_steps()) == {steps[0].record_key, steps[1].record_key}
    second = again()
    assert second == [("", Counts(1), False), ("", Counts(1), True), ("exit status 1", Counts(failed=1), False)]
    assert (tmp_path / "run").read_text().split() == ["build", "bad"]
    # A step with the same name and more work is a different step.
    steps[1] = replace(steps[1], command=[*steps[1].command, "more"])
    assert again()[1] == ("", Counts(1), False)
    shown = capsys.readouterr().out
    assert "before  good" in shown and "passed before, on" in shown and "before  build" not in shown


def test_resumed_test_run_skips_passed_modules(tmp_path: Path) -> None:
    modules = {
        "test_good": "def test_one(): pass\ndef test_two(): pass\n",
        "test_half": "import os\ndef test_one(): pass\ndef test_two(): assert 'WELL' in os.environ\n",
        "test_untidy": "import os, pytest\n@pytest.fixture\ndef tidy():\n    yield\n    assert 'WELL' in os.environ\ndef test_one(tidy): pass\n",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(**more: str) -> tuple[int, str]:
        environment = {**os.environ, RECORDS_VARIABLE: str(tmp_path / "records"), "PYTHONPATH": str(ROOT), **more}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.tools.pytest_passed_modules",
            "-p",
            "no:cacheprovider",
            ".",
        ]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip().splitlines()[-1]

    code, line = run()
    assert code == 1 and "1 failed, 4 passed, 1 error" in line
    assert {name: passed.tests for name, passed in PassedRecords(tmp_path / "records").passed_modules().items()} == {
        "test_good.py": 2
    }
    resume = {RESUME_VARIABLE: "1"}
    code, line = run(**resume)
    assert code == 1 and "1 failed, 2 passed, 2 deselected, 1 error" in line, "a module is run whole"
    code, line = run(**resume, WELL="1")
    assert code == 0 and "3 passed, 2 deselected" in line
    code, line = run(**resume)
    assert code == 0 and "5 deselected" in line, "nothing is left to run"
    code, line = run()
    assert code == 1 and "4 passed" in line, "without an option to resume, all steps run"


def test_step_is_the_same_in_another_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Step("a", "no time", [ROOT / "tests/tools/low_priority", "pytest"]).record_key
    monkeypatch.setattr("steps.ROOT", Path("/elsewhere"))
    assert (
        here
        == Step("a", "no time", ["/elsewhere/tests/tools/low_priority", "pytest"]).record_key
        == "a ./tests/tools/low_priority pytest"
    )


def test_result_counts_only_passed_modules_of_its_step() -> None:
    """A part of a run has only some of the recorded modules: only the modules of its step count."""
    ours = Step("prove", "4 h", ["true"], test_modules=("tests/prove/a.py", "tests/prove/b.py"))
    results = [
        Result(ours, 1.0, "", Counts(passed=3), None),
        Result(Step("unit", "1 min", ["true"]), 1.0, "", Counts(passed=7), None),
        Result(ours, 0.0, "", Counts(passed=9), None, earlier_run="yesterday"),
    ]
    known = {"tests/prove/a.py": PassedRecord(4, 1.0, 0.0), "tests/prove/elsewhere.py": PassedRecord(100, 1.0, 0.0)}
    assert [each.counts.passed for each in suites.add_earlier_tests(results, known)] == [7, 7, 9]
