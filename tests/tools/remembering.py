# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A pytest plugin for long runs: record passed modules in the ledger, and on request skip recorded ones.

It is for directories whose modules are independent of one another.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from ledger import FOLDER_VARIABLE, GO_ON_VARIABLE, Ledger, Modules  # noqa: E402  it is in the directory above


class Remembering:
    """One run. With ``go_on`` it skips the passed modules."""

    def __init__(self, ledger: Ledger, *, go_on: bool) -> None:
        self._modules = Modules(ledger)
        self._known = ledger.modules() if go_on else {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the passed modules."""
        known = [item for item in items if _module(item.nodeid) in self._known]
        if known:
            items[:] = [item for item in items if _module(item.nodeid) not in self._known]
            config.hook.pytest_deselected(items=known)
        for item in items:
            self._modules.expect(_module(item.nodeid), item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the end of a test phase."""
        self._modules.phase(
            _module(report.nodeid),
            report.nodeid,
            is_last=report.when == "teardown",
            has_passed=report.passed,
            seconds=report.duration,
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Return success if all modules were skipped because they passed."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._known:
            session.exitstatus = pytest.ExitCode.OK


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin if suites.py has set the directory."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        config.pluginmanager.register(Remembering(Ledger(Path(folder)), go_on=GO_ON_VARIABLE in os.environ), "ledger")
