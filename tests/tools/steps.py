# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run named steps, show their progress, and print a table of results.

A step is a command with a name, its usual time, and a remedy for failures. Its output goes to a log file. The screen
shows a line at its start, its last line of output every 30 s, a line at its end, and the end of the log after a
failure. Each line begins with the step's number and name, because steps of different lanes run in parallel. Steps of
one lane run in order. After a failed step the others continue, unless they depend on it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

from ledger import Ledger, Passed

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
    """One command to run.

    ``usual`` is its usual time as text. ``remedy`` is the advice for a failure. ``junit`` is the report of a command
    with many tests. Without one the step counts as one test. ``expect`` and ``refuse`` are texts that the output must
    and must not contain, for commands with an unreliable exit status. ``show`` begins the paragraph of the output to
    print after success. ``after`` names the steps that have to succeed first, also in another ``lane``. A step that
    others need on this machine runs ``always``, even if it passed before. ``modules`` are the test files of a divisible
    step, whose command names their directory.
    """

    name: str
    usual: str
    command: Sequence[str | Path]
    cwd: Path = ROOT
    environment: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""
    junit: Path | None = None
    expect: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    show: str = ""
    lane: str = ""
    always: bool = False
    modules: tuple[str, ...] = ()

    @property
    def work(self) -> str:
        """Return the key of its record: its name and command, independent of the checkout's path. A name alone can stand for more work in one suite."""
        return " ".join([self.name, *map(str, self.command)]).replace(str(ROOT), ".")


@dataclass(frozen=True)
class Result:
    """The result of a step: its time in seconds, its tests, and its log. ``problem`` is empty after success. ``before``
    has the time of success if that was in an earlier run. ``processor_seconds`` is the processor time of its process and
    of all descendants with a collected exit status. Containers are not included.
    """

    step: Step
    seconds: float
    problem: str
    counts: Counts
    log: Path | None
    before: str = ""
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
    folders = [str(virtual_environment / "bin")]
    folders += [entry for entry in os.environ["PATH"].split(os.pathsep) if not entry.rstrip("/").endswith("/shims")]
    links = tree()
    environment = dict(os.environ)
    environment |= {
        "PATH": os.pathsep.join(folders),
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


def say(text: str = "") -> None:
    """Print lines at once, also to a file. The lines of one call stay together."""
    with _screen:
        print(text, flush=True)


class Run:
    """One run of a graph of steps: a thread per lane, and their shared state."""

    def __init__(
        self,
        steps: Sequence[Step],
        logs: Path,
        environment: Mapping[str, str],
        known: Mapping[str, Passed] = MappingProxyType({}),
        ledger: Ledger | None = None,
    ) -> None:
        self._known = known
        self._ledger = ledger
        self._steps = steps
        self._logs = logs
        self._environment = environment
        self._ended = {step.name: threading.Event() for step in steps}
        self._results: dict[str, Result] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped = threading.Event()

    def all(self) -> list[Result]:
        """Run each lane to its end. Return the results in the order of the steps."""
        self._logs.mkdir(parents=True, exist_ok=True)
        lanes = list(dict.fromkeys(step.lane for step in self._steps))
        with ThreadPoolExecutor(max_workers=len(lanes)) as pool:
            futures = [pool.submit(self._lane, lane) for lane in lanes]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stop()
                raise
        return [self._results[step.name] for step in self._steps]

    def _stop(self) -> None:
        """End the running processes. Waiting lanes end without starting steps."""
        self._stopped.set()
        for process in list(self._processes.values()):
            _end(process)
        for event in self._ended.values():
            event.set()

    def _lane(self, lane: str) -> None:
        for number, step in enumerate(self._steps, start=1):
            if step.lane != lane:
                continue
            place = f"{number}/{len(self._steps)} {step.name}" if len(self._steps) > 1 else step.name
            for name in step.after:
                self._ended[name].wait()
            if self._stopped.is_set():
                return
            try:
                self._results[step.name] = self._one(step, partial(_tell, place))
            except BaseException:
                self._stop()
                raise
            self._ended[step.name].set()

    def _one(self, step: Step, tell: Callable[[str], None]) -> Result:
        missing = ", ".join(name for name in step.after if self._results[name].problem)
        if missing:
            tell(f"NOT RUN: it needs {missing}")
            return Result(step, 0.0, f"not run: it needs {missing}, which failed", Counts(failed=1), None)
        if step.work in self._known and not step.always:
            passed = self._known[step.work]
            tell(passed.describe())
            return Result(step, passed.seconds, "", Counts(passed=passed.tests), None, passed.describe())
        tell(f"begins (usually {step.usual})")
        result = self._command(step, tell)
        if self._ledger is not None and not result.problem:
            self._ledger.note(step.work, Passed(result.counts.passed, result.seconds, time.time()))
        _report(result, tell)
        return result

    def _command(self, step: Step, tell: Callable[[str], None]) -> Result:
        log = self._logs / f"{step.name.replace(' ', '-')}.log"
        if step.junit is not None:
            step.junit.parent.mkdir(parents=True, exist_ok=True)
            step.junit.unlink(missing_ok=True)
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
                _end(process)
            code, processor_seconds = _wait(process, log, started, tell)
        seconds = time.monotonic() - started
        problem = _judge(step, code, log.read_text(encoding="utf-8", errors="replace"))
        return Result(step, seconds, problem, _count(step, problem), log, processor_seconds=processor_seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGTERM)


def run_steps(
    steps: Sequence[Step],
    logs: Path,
    environment: Mapping[str, str],
    known: Mapping[str, Passed] = MappingProxyType({}),
    ledger: Ledger | None = None,
) -> list[Result]:
    """Run ``steps``, print their progress, and return their results.

    Steps whose work is in ``known`` do not run again. Passed steps are recorded in the ledger.
    """
    for position, step in enumerate(steps):
        earlier = {each.name for each in steps[:position]}
        if step.name in earlier or not earlier.issuperset(step.after):
            raise ValueError(
                f"step {step.name}: its name has to be its own, and what it needs ({step.after}) comes before it"
            )
    return Run(steps, logs, environment, known, ledger).all()


def _tell(place: str, text: str) -> None:
    say(f"[{place}] {text}")


def _wait(
    process: subprocess.Popen[bytes], log: Path, started: float, tell: Callable[[str], None]
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
            tell(f"{duration(time.monotonic() - started)}: {lines[0].strip()[:140] if lines else 'no output yet'}")


def _judge(step: Step, code: int, text: str) -> str:
    if code != 0:
        return f"exit status {code}"
    for wanted in step.expect:
        if wanted not in text:
            return f"the output does not hold {wanted!r}, so it did not do its work"
    for unwanted in step.refuse:
        if unwanted in text:
            return f"the output holds {unwanted!r}"
    if step.junit is not None and not step.junit.exists():
        return f"the test run left no report in {step.junit}"
    return ""


def _count(step: Step, problem: str) -> Counts:
    if step.junit is None or not step.junit.exists():
        return Counts(failed=1) if problem else Counts(passed=1)
    counts = count_junit(step.junit)
    if problem and not counts.failed:
        return counts + Counts(failed=1)
    return counts


def count_junit(report: Path) -> Counts:
    """Return the numbers of tests in a JUnit report of pytest."""
    counts = Counts()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts += Counts(failed=1)
        elif case.find("skipped") is not None:
            counts += Counts(skipped=1)
        else:
            counts += Counts(passed=1)
    return counts


def slowest(reports: Sequence[Path], number: int) -> list[tuple[float, str]]:
    """Return the slowest tests in JUnit reports, with their fixtures: seconds and name, the slowest first."""
    found = []
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            module = case.get("classname", "").rpartition(".")[2]
            found.append((float(case.get("time", 0)), f"{module}::{case.get('name')}"))
    return sorted(found, reverse=True)[:number]


def failed(reports: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the failed tests in JUnit reports: name, and the first line of the message."""
    found = []
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            for problem in (each for tag in ("failure", "error") for each in case.findall(tag)):
                module = case.get("classname", "").rpartition(".")[2]
                why = (problem.get("message") or "no message").strip().partition("\n")[0]
                found.append((f"{module}::{case.get('name')}", why))
    return found


def _tail(log: Path, lines: int) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()][-lines:]


def _report(result: Result, tell: Callable[[str], None]) -> None:
    if not result.problem:
        lines = [f"passed in {duration(result.seconds)}"]
        if result.step.show and result.log is not None:
            text = result.log.read_text(encoding="utf-8", errors="replace")
            begin, shown = text.partition(result.step.show)[1:]
            lines += (begin + shown.partition("\n\n")[0]).splitlines()
        tell("\n    ".join(lines))
        return
    lines = [f"FAILED after {duration(result.seconds)}: {result.problem}"]
    if result.log is not None:
        lines += [f"| {line}" for line in _tail(result.log, TAIL_LINES)]
        lines.append(f"The whole log is {result.log}")
    if result.step.remedy:
        lines.append(f"What to do: {result.step.remedy}")
    tell("\n    ".join(lines))


def print_table(results: Sequence[Result]) -> None:
    """Print one line per step: its result, its duration, its processor time, and its number of tests."""
    width = max((len(result.step.name) for result in results), default=0)
    say(f"  {'':6}  {'':<{width}}  {'time':>12}  {'processors':>12}")
    for result in results:
        counts = result.counts
        tests = f"{counts.passed + counts.failed} tests, {counts.failed} failed" if result.step.junit else ""
        if counts.skipped:
            tests += f", {counts.skipped} skipped"
        verdict = "FAILED" if result.problem else "before" if result.before else "passed"
        times = f"{duration(result.seconds):>12}  {duration(result.processor_seconds):>12}"
        say(f"  {verdict}  {result.step.name:<{width}}  {times}  {tests}".rstrip())
    processors = sum(result.processor_seconds for result in results)
    say(f"Processor time of all steps, without containers: {processors / 60:.0f} min")


def print_slowest(results: Sequence[Result], number: int = 10) -> None:
    """Print the slowest tests of all suites with a report."""
    ran = [result.step.junit for result in results if not result.before]
    reports = [report for report in ran if report and report.exists()]
    lines = slowest(reports, number)
    if lines:
        say(f"The {len(lines)} slowest tests, with their setup")
    for seconds, name in lines:
        say(f"  {duration(seconds):>12}  {name}")


def print_failed(results: Sequence[Result]) -> None:
    """Print each failed step and the failed tests in its report."""
    for result in (each for each in results if each.problem):
        say(f"FAILED {result.step.name}: {result.problem}")
        report = result.step.junit
        for name, why in failed([report] if report and report.exists() else []):
            say(f"  {name}")
            say(f"    {why}")


def total(results: Sequence[Result]) -> Counts:
    """Return the sum of the tests of all steps."""
    counts = Counts()
    for result in results:
        counts += result.counts
    return counts


if __name__ == "__main__":
    sys.exit("steps.py is used by suites.py and demo.py; run `make help` to see what there is to do")
