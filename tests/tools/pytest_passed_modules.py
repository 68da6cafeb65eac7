# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A pytest plugin for long runs: record each test module that has passed, and skip recorded modules if requested.

A module has passed when the setup, the call, and the teardown of all its tests have. The plugin is for directories whose
modules are independent of one another. suites.py enables it with an environment variable.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from passed_records import (  # noqa: E402  the directory of this file has to be in the search path first
    RECORDS_VARIABLE,
    RESUME_VARIABLE,
    PassedRecord,
    PassedRecords,
)


class ModuleRecorder:
    """The modules of one test run: their running tests, and which of them have passed."""

    def __init__(self, records: PassedRecords, *, skip_passed: bool) -> None:
        self._records = records
        self._modules_to_skip = records.passed_modules() if skip_passed else {}
        self._running_tests: defaultdict[str, set[str]] = defaultdict(set)
        self._failed_modules: set[str] = set()
        self._tests: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the modules to skip, and register the tests of the others."""
        skipped = [item for item in items if _module(item.nodeid) in self._modules_to_skip]
        if skipped:
            items[:] = [item for item in items if _module(item.nodeid) not in self._modules_to_skip]
            config.hook.pytest_deselected(items=skipped)
        for item in items:
            self._running_tests[_module(item.nodeid)].add(item.nodeid)
            self._tests[_module(item.nodeid)] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the module after the teardown of its last test, if everything has passed."""
        module = _module(report.nodeid)
        self._seconds[module] += report.duration
        if not report.passed:
            self._failed_modules.add(module)
        if report.when != "teardown" or module not in self._running_tests:
            return
        self._running_tests[module].discard(report.nodeid)
        if not self._running_tests[module] and module not in self._failed_modules:
            self._records.record_module(module, PassedRecord(self._tests[module], self._seconds[module], time.time()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Return success if all modules were skipped because they had passed."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._modules_to_skip:
            session.exitstatus = pytest.ExitCode.OK


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin if suites.py has set the directory of the records."""
    directory = os.environ.get(RECORDS_VARIABLE)
    if directory:
        recorder = ModuleRecorder(PassedRecords(Path(directory)), skip_passed=RESUME_VARIABLE in os.environ)
        config.pluginmanager.register(recorder, "passed-modules")
