# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The command line of the controller: run it, or show its planned actions."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from .. import logs
from ..config import InvalidConfiguration
from ..core.errors import AcceleratorError
from . import controller_config as configured
from .controller_config import ControllerSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 success, 1 failure, 2 wrong use or wrong configuration."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except InvalidConfiguration as error:
        sys.stderr.write(f"dra-controller: {error}\n")
        return 2
    except AcceleratorError as error:
        sys.stderr.write(f"dra-controller: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dra-controller", description="The DRA controller of dra.accelerators.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the controller until it is stopped")
    run.add_argument("--dry-run", action="store_true", help="log what would be cleaned up, change nothing")
    run.set_defaults(run=_run)
    plan = commands.add_parser(
        "plan", help="show what would be cleaned up now, as if every absent node had been so for long; change nothing"
    )
    plan.set_defaults(run=_plan)
    drift = commands.add_parser("drift", help="show all current findings, also new ones; change nothing")
    drift.set_defaults(run=_drift)
    for command in (run, plan, drift):
        command.add_argument(
            "--config", default=configured.DEFAULT_PATH, help="configuration file (default %(default)s)"
        )
    return parser


def _run(options: argparse.Namespace) -> int:
    from .daemon import run_controller

    settings = configured.load(options.config)
    logs.configure(settings.log_level, settings.log_format)
    return asyncio.run(run_controller(dataclasses.replace(settings, dry_run=settings.dry_run or options.dry_run)))


def _plan(options: argparse.Namespace) -> int:
    from .daemon import show_plan

    return _print_lines(options, show_plan, "Nothing to clean up.")


def _drift(options: argparse.Namespace) -> int:
    from .daemon import show_drift

    return _print_lines(options, show_drift, "No drift found.")


def _print_lines(
    options: argparse.Namespace,
    read_lines: Callable[[ControllerSettings], Coroutine[Any, Any, list[str]]],
    no_lines: str,
) -> int:
    """Print the lines that ``read_lines`` returns for the configuration, or ``no_lines`` instead of an empty list."""
    settings = configured.load(options.config)
    logs.configure("warning", settings.log_format)
    lines = asyncio.run(read_lines(settings)) or [no_lines]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
