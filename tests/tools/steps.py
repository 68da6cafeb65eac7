# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run named steps, show their progress, and print a table of results.

A step is a command with a name, its usual time, and a remedy for failures. Its output is in a log file. The screen
shows a line at its start, its last line of output every 30 s, a line at its end, and the end of the log after a
failure. Each line begins with the step's number and name, because lanes run in parallel: a lane is a list of steps that
run one after the other. After a failed step the others continue, unless they need it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

from passed_records import PassedRecord, PassedRecords

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 40
HEARTBEAT_SECONDS = 30.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Counts:
    """The numbers of tests by result. A skipped test has not run."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


@dataclass(frozen=True)
class Step:
    """One command to run. Without a JUnit report it counts as one test."""

    name: str
    #: Its usual time as text, such as ``2 min``.
    usual_time: str
    command: Sequence[str | Path]
    cwd: Path = ROOT
    #: Variables in addition to the environment of the run.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Advice for a failure.
    remedy: str = ""
    #: The JUnit report that the command writes.
    junit_report: Path | None = None
    #: Texts that the output must contain, and must not contain. For commands with an unreliable exit status.
    expected_output: tuple[str, ...] = ()
    rejected_output: tuple[str, ...] = ()
    #: The names of earlier steps that have to succeed first. They can be in other lanes.
    needs: tuple[str, ...] = ()
    #: The first words of the paragraph of the output to print after success.
    shown_heading: str = ""
    #: The steps of one lane run one after the other, in parallel with other lanes.
    lane: str = ""
    #: Whether the step runs even if it passed in an earlier run, because other steps need its effect on this machine.
    runs_always: bool = False
    #: The test modules of a step that can be divided (parts.py). Its command has their directory.
    test_modules: tuple[str, ...] = ()

    @property
    def record_key(self) -> str:
        """Return the key of its record: the name and the command, without the path of the checkout.

        The name alone is not enough, because the command of a step differs between `make test` and `make prove`.
        """
        return " ".join([self.name, *map(str, self.command)]).replace(str(ROOT), ".")


@dataclass(frozen=True)
class Result:
    """The result of a step, with its time and its processor time in seconds.

    The processor time is the time of the process and of all descendants with a collected exit status, without containers.
    """

    step: Step
    seconds: float
    #: The reason of a failure, or "".
    problem: str
    counts: Counts
    log: Path | None
    #: When the step passed in an earlier run, as text. Empty if it ran in this run.
    earlier_run: str = ""
    processor_seconds: float = 0.0


def cache() -> Path:
    """Return the cache root of the project, as ``tests/tools/cache`` prints it."""
    return Path(_output(ROOT / "tests/tools/cache"))


def tree() -> Path:
    """Return the tree of links of this checkout, as ``tests/tools/tree`` prints it."""
    return Path(_output(ROOT / "tests/tools/tree"))


def _output(program: Path) -> str:
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.strip()


def tool_environment(virtual_environment: Path) -> dict[str, str]:
    """Return the environment in which tools of ``virtual_environment`` find each other and only this collection.

    The shims of Python version managers are removed from PATH, because Ansible treats them as interpreters.
    """
    directories = [str(virtual_environment / "bin")]
    directories += [entry for entry in os.environ["PATH"].split(os.pathsep) if not entry.rstrip("/").endswith("/shims")]
    links = tree()
    environment = dict(os.environ)
    environment |= {
        "PATH": os.pathsep.join(directories),
        "ANSIBLE_COLLECTIONS_PATH": str(links),
        "ANSIBLE_NOCOLOR": "1",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(links), str(links / "python")]),
    }
    return environment


def duration(seconds: float) -> str:
    """Return ``seconds`` as text: 0.4 s, 17 s, 3 min 05 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


_screen = threading.Lock()


def print_lines(text: str = "") -> None:
    """Print lines and flush. The lines of one call stay together."""
    with _screen:
        print(text, flush=True)


class StepRunner:
    """Run steps with one thread per lane.

    A step whose key is in ``passed_before`` does not run again. A step that passes is added to ``records``.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        logs: Path,
        environment: Mapping[str, str],
        passed_before: Mapping[str, PassedRecord] = MappingProxyType({}),
        records: PassedRecords | None = None,
    ) -> None:
        self._passed_before = passed_before
        self._records = records
        self._steps = steps
        self._logs = logs
        self._environment = environment
        self._ended = {step.name: threading.Event() for step in steps}
        self._results: dict[str, Result] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped = threading.Event()

    def run(self) -> list[Result]:
        """Run all steps. Return the results in the order of the steps."""
        self._logs.mkdir(parents=True, exist_ok=True)
        lanes = list(dict.fromkeys(step.lane for step in self._steps))
        with ThreadPoolExecutor(max_workers=len(lanes)) as pool:
            futures = [pool.submit(self._run_lane, lane) for lane in lanes]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self.stop()
                raise
        return [self._results[step.name] for step in self._steps]

    def stop(self) -> None:
        """End the running processes. Waiting lanes end without starting steps."""
        self._stopped.set()
        for process in list(self._processes.values()):
            _terminate(process)
        for event in self._ended.values():
            event.set()

    def _run_lane(self, lane: str) -> None:
        for number, step in enumerate(self._steps, start=1):
            if step.lane != lane:
                continue
            label = f"{number}/{len(self._steps)} {step.name}" if len(self._steps) > 1 else step.name
            for name in step.needs:
                self._ended[name].wait()
            if self._stopped.is_set():
                return
            try:
                self._results[step.name] = self._run_step(step, partial(_print_labeled, label))
            except BaseException:
                self.stop()
                raise
            self._ended[step.name].set()

    def _run_step(self, step: Step, report: Callable[[str], None]) -> Result:
        missing = ", ".join(name for name in step.needs if self._results[name].problem)
        if missing:
            report(f"NOT RUN: it needs {missing}")
            return Result(step, 0.0, f"not run: it needs {missing}, which failed", Counts(failed=1), None)
        if step.record_key in self._passed_before and not step.runs_always:
            passed = self._passed_before[step.record_key]
            report(passed.describe())
            return Result(step, passed.seconds, "", Counts(passed=passed.tests), None, passed.describe())
        report(f"begins (usually {step.usual_time})")
        result = self._run_command(step, report)
        if self._records is not None and not result.problem:
            self._records.record_step(step.record_key, PassedRecord(result.counts.passed, result.seconds, time.time()))
        _report_result(result, report)
        return result

    def _run_command(self, step: Step, report: Callable[[str], None]) -> Result:
        log = self._logs / f"{step.name.replace(' ', '-')}.log"
        if step.junit_report is not None:
            step.junit_report.parent.mkdir(parents=True, exist_ok=True)
            step.junit_report.unlink(missing_ok=True)
        started = time.monotonic()
        with log.open("wb") as stream:
            try:
                process = subprocess.Popen(
                    [str(word) for word in step.command],
                    cwd=step.cwd,
                    env={**self._environment, **step.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return Result(step, 0.0, f"{step.command[0]} could not be started: {error}", Counts(failed=1), None)
            self._processes[step.name] = process
            if self._stopped.is_set():  # the run may have been stopped before this process was registered
                _terminate(process)
            code, processor_seconds = _wait(process, log, started, report)
        seconds = time.monotonic() - started
        problem = _find_problem(step, code, log.read_text(encoding="utf-8", errors="replace"))
        return Result(step, seconds, problem, _count(step, problem), log, processor_seconds=processor_seconds)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGTERM)


def run_steps(
    steps: Sequence[Step],
    logs: Path,
    environment: Mapping[str, str],
    passed_before: Mapping[str, PassedRecord] = MappingProxyType({}),
    records: PassedRecords | None = None,
) -> list[Result]:
    """Run ``steps`` with a StepRunner, print their progress, and return their results.

    Raise ValueError if two steps have one name, or if a step does not follow the steps that it needs.
    """
    for position, step in enumerate(steps):
        earlier = {each.name for each in steps[:position]}
        if step.name in earlier or not earlier.issuperset(step.needs):
            raise ValueError(
                f"step {step.name}: expected a unique name, and the needed steps {step.needs} before it in the list"
            )
    return StepRunner(steps, logs, environment, passed_before, records).run()


def _print_labeled(label: str, text: str) -> None:
    print_lines(f"[{label}] {text}")


def _wait(
    process: subprocess.Popen[bytes], log: Path, started: float, report: Callable[[str], None]
) -> tuple[int, float]:
    """Wait for the end of a process. Return its exit status and its processor time in seconds."""
    next_line = started + HEARTBEAT_SECONDS
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)  # Popen.wait() does not return the usage
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        time.sleep(POLL_SECONDS)
        if time.monotonic() >= next_line:
            next_line += HEARTBEAT_SECONDS
            lines = _tail(log, 1)
            report(f"{duration(time.monotonic() - started)}: {lines[0].strip()[:140] if lines else 'no output yet'}")


def _find_problem(step: Step, code: int, text: str) -> str:
    if code != 0:
        return f"exit status {code}"
    for wanted in step.expected_output:
        if wanted not in text:
            return f"the output does not contain {wanted!r}, so the command did not do its work"
    for unwanted in step.rejected_output:
        if unwanted in text:
            return f"the output contains {unwanted!r}"
    if step.junit_report is not None and not step.junit_report.exists():
        return f"the test run wrote no report to {step.junit_report}"
    return ""


def _count(step: Step, problem: str) -> Counts:
    if step.junit_report is None or not step.junit_report.exists():
        return Counts(failed=1) if problem else Counts(passed=1)
    counts = count_junit(step.junit_report)
    if problem and not counts.failed:
        return counts + Counts(failed=1)
    return counts


def count_junit(report: Path) -> Counts:
    """Return the numbers of tests in a JUnit report of pytest."""
    counts = Counts()
    for case in _test_cases(report):
        if case.find("failure") is not None or case.find("error") is not None:
            counts += Counts(failed=1)
        elif case.find("skipped") is not None:
            counts += Counts(skipped=1)
        else:
            counts += Counts(passed=1)
    return counts


def slowest(reports: Sequence[Path], number: int) -> list[tuple[float, str]]:
    """Return the slowest tests in JUnit reports, with their fixtures: seconds and name, the slowest first."""
    times = [(float(case.get("time", 0)), _test_name(case)) for report in reports for case in _test_cases(report)]
    return sorted(times, reverse=True)[:number]


def failed(report: Path) -> list[tuple[str, str]]:
    """Return the failed tests in a JUnit report: name, and the first line of the message."""
    return [
        (_test_name(case), (problem.get("message") or "no message").strip().partition("\n")[0])
        for case in _test_cases(report)
        for tag in ("failure", "error")
        for problem in case.findall(tag)
    ]


def _test_cases(report: Path) -> Iterator[ElementTree.Element]:
    return ElementTree.parse(report).getroot().iter("testcase")


def _test_name(case: ElementTree.Element) -> str:
    module = case.get("classname", "").rpartition(".")[2]
    return f"{module}::{case.get('name')}"


def _tail(log: Path, lines: int) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()][-lines:]


def _report_result(result: Result, report: Callable[[str], None]) -> None:
    if not result.problem:
        lines = [f"passed in {duration(result.seconds)}"]
        if result.step.shown_heading and result.log is not None:
            text = result.log.read_text(encoding="utf-8", errors="replace")
            heading, below = text.partition(result.step.shown_heading)[1:]
            lines += (heading + below.partition("\n\n")[0]).splitlines()
        report("\n    ".join(lines))
        return
    lines = [f"FAILED after {duration(result.seconds)}: {result.problem}"]
    if result.log is not None:
        lines += [f"| {line}" for line in _tail(result.log, TAIL_LINES)]
        lines.append(f"The whole log is {result.log}")
    if result.step.remedy:
        lines.append(f"What to do: {result.step.remedy}")
    report("\n    ".join(lines))


def print_table(results: Sequence[Result]) -> None:
    """Print one line per step: its result, its duration, its processor time, and its number of tests."""
    width = max((len(result.step.name) for result in results), default=0)
    print_lines(f"  {'':6}  {'':<{width}}  {'time':>12}  {'processors':>12}")
    for result in results:
        counts = result.counts
        tests = f"{counts.passed + counts.failed} tests, {counts.failed} failed" if result.step.junit_report else ""
        if counts.skipped:
            tests += f", {counts.skipped} skipped"
        verdict = "FAILED" if result.problem else "before" if result.earlier_run else "passed"
        times = f"{duration(result.seconds):>12}  {duration(result.processor_seconds):>12}"
        print_lines(f"  {verdict}  {result.step.name:<{width}}  {times}  {tests}".rstrip())
    processors = sum(result.processor_seconds for result in results)
    print_lines(f"Processor time of all steps, without containers: {processors / 60:.0f} min")


def print_slowest(results: Sequence[Result], number: int = 10) -> None:
    """Print the slowest tests of all suites with a report."""
    ran = [result.step.junit_report for result in results if not result.earlier_run]
    reports = [report for report in ran if report and report.exists()]
    lines = slowest(reports, number)
    if lines:
        print_lines(f"The {len(lines)} slowest tests, with their setup")
    for seconds, name in lines:
        print_lines(f"  {duration(seconds):>12}  {name}")


def print_failed(results: Sequence[Result]) -> None:
    """Print each failed step and the failed tests in its report."""
    for result in (each for each in results if each.problem):
        print_lines(f"FAILED {result.step.name}: {result.problem}")
        report = result.step.junit_report
        for name, why in failed(report) if report and report.exists() else []:
            print_lines(f"  {name}")
            print_lines(f"    {why}")


def total(results: Sequence[Result]) -> Counts:
    """Return the sum of the tests of all steps."""
    counts = Counts()
    for result in results:
        counts += result.counts
    return counts


if __name__ == "__main__":
    sys.exit("steps.py is used by suites.py and demo.py; run `make help` for the list of targets")
