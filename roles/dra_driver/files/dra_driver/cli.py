# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The command line: the node daemon, the node's layout, and a look at what is prepared."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from . import __version__, config, logs
from .core.errors import AcceleratorError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 success, 1 failure, 2 wrong use or wrong configuration."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except config.InvalidConfiguration as error:
        sys.stderr.write(f"dra-driver: {error}\n")
        return 2
    except AcceleratorError as error:
        sys.stderr.write(f"dra-driver: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dra-driver", description="The DRA node driver of dra.accelerators.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    node = commands.add_parser("node", help="run the node driver until it is stopped")
    node.add_argument("--config", default=config.DEFAULT_PATH, help="configuration file (default %(default)s)")
    node.set_defaults(run=_node)

    layout = commands.add_parser("layout", help="show or make the wanted partitions of this node's devices")
    actions = layout.add_subparsers(required=True, metavar="ACTION")
    for name, text in (("plan", "show the steps, change nothing"), ("apply", "take the steps")):
        action = actions.add_parser(name, help=text)
        action.add_argument("--file", required=True, help="JSON file with the list of layout rules")
        action.add_argument("--config", default=config.DEFAULT_PATH, help="the driver's configuration, for its state")
        action.add_argument(
            "--wait",
            type=float,
            default=60.0,
            metavar="SECONDS",
            help="wait so long for the vendor's driver (default 60)",
        )
        action.add_argument("--json", action="store_true", help="print the result as JSON")
        action.set_defaults(run=_layout, apply=name == "apply")

    status = commands.add_parser("status", help="show the driver's sockets and the claims prepared on this node")
    status.add_argument("--config", default=config.DEFAULT_PATH, help="configuration file (default %(default)s)")
    status.add_argument("--json", action="store_true", help="print JSON instead of a table")
    status.set_defaults(run=_status)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _node(options: argparse.Namespace) -> int:
    from .node import run_node

    configuration = config.load(options.config)
    logs.configure(configuration.log.level, configuration.log.format)
    return asyncio.run(run_node(configuration))


def _layout(options: argparse.Namespace) -> int:
    from .layout_command import run_layout

    return run_layout(options.file, options.config, apply=options.apply, wait=options.wait, as_json=options.json)


def _status(options: argparse.Namespace) -> int:
    from .status_command import run_status

    return run_status(options.config, as_json=options.json)


def _version(options: argparse.Namespace) -> int:
    del options
    sys.stdout.write(f"{__version__}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
