# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``dra-driver reload``: the running driver works by the configuration file as it is now, or says why not."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from .. import config
from ..config import Configuration
from ..core.backend import create
from ..core.system import System
from ..core.texts import join_problems
from ..status_command import instance_of

POLL_SECONDS = 0.2
AGAIN = "; it is a pod's, which starts again by itself within seconds"


def reload(config_path: str, seconds: float) -> tuple[str, ...]:
    """Tell the driver and wait until it works by the file; returns what is wrong, nothing where it does.

    Raises InvalidConfiguration for a file that no driver would take: nobody is told then.
    """
    configuration = config.load(config_path)
    names = sorted({configuration.driver_name or create(each, System()).driver_name for each in configuration.backends})
    told = {name: instance_of(configuration, name) for name in names}
    silent = [f"{name}: {'; '.join(each['problems'])}" for name, each in told.items() if not each["pid"]]
    if silent:
        return tuple(silent)
    for process in {each["pid"] for each in told.values()}:
        os.kill(process, signal.SIGHUP)
    until, problems = time.monotonic() + seconds, [""]
    while problems and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        told = {name: instance_of(configuration, name) for name in names}
        refused = [
            f"{name}: {each['refused']['problem']}{AGAIN if each['instance'] else ''}"
            for name, each in told.items()
            if _refuses(each, configuration)
        ]
        if refused:
            return tuple(refused)
        problems = [
            f"{name}: {_problem(each, configuration)}" for name, each in told.items() if _problem(each, configuration)
        ]
    return tuple(problems)


def _refuses(told: dict[str, Any], configuration: Configuration) -> bool:
    return bool(told["refused"].get("digest") == configuration.digest)


def _problem(told: dict[str, Any], configuration: Configuration) -> str:
    """Return why a driver does not work by the configuration; "" where it does."""
    if told["configuration"] == configuration.digest and told["ready"]:
        return ""
    return join_problems(told["problems"]) or "it does not work by the file yet"
