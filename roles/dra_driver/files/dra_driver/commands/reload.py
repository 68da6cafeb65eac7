# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``dra-driver reload``: apply the configuration file to the running driver, or report why it cannot be applied."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from .. import config
from ..config import Configuration
from ..core.host.system import System
from ..core.texts import join_problems
from ..core.vendors.registry import create
from ..status_command import instance_status

# Seconds between queries of the drivers' status.
POLL_SECONDS = 0.2
# The driver of a pod restarts itself to apply a configuration that it cannot change while it runs.
RESTART_NOTE = "; the driver is in a pod, and restarts automatically within seconds"


def reload(config_path: str, seconds: float) -> tuple[str, ...]:
    """Signal the drivers, wait until they use the file, and return the problems; empty without problems.

    ``seconds`` is the timeout. Raises InvalidConfiguration for an invalid file; then no driver is signaled.
    """
    configuration = config.load(config_path)
    names = sorted({configuration.driver_name or create(each, System()).driver_name for each in configuration.backends})
    statuses = {name: instance_status(configuration, name) for name in names}
    not_running = [f"{name}: {'; '.join(each['problems'])}" for name, each in statuses.items() if not each["pid"]]
    if not_running:
        return tuple(not_running)
    for process in {each["pid"] for each in statuses.values()}:
        os.kill(process, signal.SIGHUP)
    until, problems = time.monotonic() + seconds, [""]
    while problems and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        statuses = {name: instance_status(configuration, name) for name in names}
        refused = [
            f"{name}: {each['refused']['problem']}{RESTART_NOTE if each['instance'] else ''}"
            for name, each in statuses.items()
            if _has_refused(each, configuration)
        ]
        if refused:
            return tuple(refused)
        problems = [
            f"{name}: {_problem(each, configuration)}"
            for name, each in statuses.items()
            if _problem(each, configuration)
        ]
    return tuple(problems)


def _has_refused(status: dict[str, Any], configuration: Configuration) -> bool:
    return bool(status["refused"].get("digest") == configuration.digest)


def _problem(status: dict[str, Any], configuration: Configuration) -> str:
    """Return why a driver does not use the configuration; "" if it does."""
    if status["configuration"] == configuration.digest and status["ready"]:
        return ""
    return join_problems(status["problems"]) or "it does not use the file yet"
