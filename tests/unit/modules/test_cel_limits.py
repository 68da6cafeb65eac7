# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Users' expressions have limits of time and memory, and no expression affects another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._host.bounded_process import BoundedProcess, CallEnded
from ansible_collections.dra.accelerators.plugins.module_utils._scheduling import cel, cel_functions
from ansible_collections.dra.accelerators.plugins.module_utils.core.allocation.objects import (
    Device,
    NotJudged,
    SelectorFailed,
)

DEVICE = Device("gpu.example.com", "n", {"name": "gpu-0", "attributes": {"model": {"string": "H100"}}})
#: A text on which a backtracking engine needs exponential time.
TEXT, PATTERN = "a" * 40 + "!", "^(a+)+$"
#: Its length is two to the power of the number of names.
DOUBLED = "".join(f"cel.bind(x{n + 1}, x{n} + x{n}, " for n in range(20))
SLOW = "lists.range(30000).distinct().size() == 1"


@pytest.fixture
def judge() -> Iterator[cel.CelJudge]:
    made = cel.CelJudge()
    yield made
    made._process.close()


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        (f"'{TEXT}'.find('{PATTERN}') == ''", True),
        (f"'{TEXT}'.findAll('{PATTERN}').size() == 0", True),
        (f"'{TEXT}'.matches('{PATTERN}')", False),
        ("'abc 123 def 456'.find('[0-9]+') == '123'", True),
        ("'123 abc 456'.findAll('[0-9]+') == ['123', '456']", True),
        ("'123 abc 456'.findAll('[0-9]+', 1) == ['123']", True),
        ("'123 abc 456'.findAll('[0-9]+', 0) == []", True),
        ("'abc'.find('z') == ''", True),
        ("'Käse'.find('[[:alpha:]]+') == 'K'", True),
        (r"'\u00e4b'.find('(?i)\\pL+') == '\u00e4b'", True),
    ],
)
def test_regular_expressions_have_re2_semantics(judge: cel.CelJudge, expression: str, answer: bool) -> None:
    assert judge.matches(expression, DEVICE) is answer


@pytest.mark.parametrize("function", ["find", "findAll", "matches"])
def test_regular_expression_rejected_by_re2_is_a_selector_error(judge: cel.CelJudge, function: str) -> None:
    with pytest.raises(SelectorFailed, match="invalid"):
        judge.matches(f"'x'.{function}('(?=a)') == ''", DEVICE)


def test_without_re2_find_is_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cel_functions, "re2", None)
    judge = cel.CelJudge()
    for expression in ("'a'.find('a') == 'a'", "'a'.findAll('a') == ['a']"):
        with pytest.raises(NotJudged, match="google-re2"):
            judge.matches(expression, DEVICE)
    assert judge.matches("'a'.matches('a')", DEVICE)


@pytest.mark.parametrize(
    "expression",
    [SLOW, f"cel.bind(x0, '{'x' * 8000}', {DOUBLED}x20.size() > 0{')' * 21}", "lists.range(1000000000).size() > 0"],
    ids=["time", "doubled text", "long list"],
)
def test_expression_beyond_the_limits_is_not_evaluated(
    judge: cel.CelJudge, monkeypatch: pytest.MonkeyPatch, expression: str
) -> None:
    monkeypatch.setattr(cel, "EVALUATION_SECONDS", 0.5)
    assert judge.matches("true", DEVICE)
    with pytest.raises(NotJudged, match="was not evaluated"):
        judge.matches(expression, DEVICE)
    assert judge.matches("device.attributes['gpu.example.com'].model == 'H100'", DEVICE), "others are"


def test_timed_out_expression_is_evaluated_for_no_other_device(
    judge: cel.CelJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cel, "EVALUATION_SECONDS", 0.2)
    calls: list[object] = []
    call = judge._process.call
    monkeypatch.setattr(judge._process, "call", lambda argument: calls.append(argument) or call(argument))
    for number in range(20):
        with pytest.raises(NotJudged):
            judge.matches(
                SLOW, Device("gpu.example.com", "n", {"name": f"gpu-{number}", "attributes": {"n": {"int": number}}})
            )
    assert len(calls) == 1


def test_many_slow_expressions_have_a_shorter_limit(judge: cel.CelJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cel, "EVALUATION_SECONDS", 0.2)
    monkeypatch.setattr(cel, "PATIENCE_SECONDS", 0.4)
    monkeypatch.setattr(cel, "HURRIED_SECONDS", 0.05)
    limits = []
    for number in range(4):
        with pytest.raises(NotJudged) as found:
            judge.matches(f"{SLOW} || {number} == 0", DEVICE)
        limits.append(found.value.message.rpartition("more than ")[2])
    assert limits == ["0.2 s", "0.2 s", "0.05 s", "0.05 s"]
    assert judge.matches("true", DEVICE)


def test_expression_nested_too_deep_is_not_evaluated(judge: cel.CelJudge) -> None:
    deep = "".join(f"cel.bind(x{n}, true, " for n in range(60)) + "x1" + ")" * 60
    with pytest.raises(NotJudged, match="recursion limit"):
        judge.matches(deep, DEVICE)
    assert judge.problem(deep) == ""


def test_iterations_beyond_the_budget_are_not_evaluated(judge: cel.CelJudge) -> None:
    many = f"[{','.join(map(str, range(60)))}]"
    nested = f"{many}.all(a, {many}.all(b, {many}.all(c, {many}.all(d, a + b + c + d >= 0))))"
    with pytest.raises(NotJudged, match="budget"):
        judge.matches(nested, DEVICE)


def test_exception_of_a_bounded_function_is_raised() -> None:
    process = BoundedProcess(lambda: lambda number: 1 / number, seconds=5, memory_bytes=1 << 28)
    assert process.call(2) == 0.5
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        process.call(0)
    process.close()


def test_bounded_process_restarts_after_its_end() -> None:
    process = BoundedProcess(lambda: lambda number: os.kill(os.getpid(), number), seconds=5, memory_bytes=1 << 28)
    with pytest.raises(CallEnded, match="its process ended"):
        process.call(signal.SIGKILL)
    assert process.call(0) is None
    process.close()


PARENT = """
import time
from ansible_collections.dra.accelerators.plugins.module_utils._host.bounded_process import BoundedProcess
process = BoundedProcess(lambda: lambda numbers: sum(range(numbers)), seconds=1, memory_bytes=1 << 28)
process.call(0)
print(process._process.pid, flush=True)
process._connection.send((1, 10**15))
time.sleep(1000)
"""


def test_bounded_process_ends_after_its_parent_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 30
    while os.path.exists(f"/proc/{child}") and open(f"/proc/{child}/stat").read().split()[2] != "Z":  # noqa: SIM115
        assert time.monotonic() < end
        time.sleep(0.05)
