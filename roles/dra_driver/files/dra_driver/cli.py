# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The command line of the driver: the node daemon, layout and settings commands, and diagnostics."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
    node.add_argument("--config", default=config.default_path(), help="configuration file (default %(default)s)")
    node.set_defaults(run=_node)

    def add_plan_and_apply(name: str, text: str, rules: str, run: Callable[[argparse.Namespace], int]) -> None:
        actions = commands.add_parser(name, help=text).add_subparsers(required=True, metavar="ACTION")
        for action, description in (("plan", "show the steps, change nothing"), ("apply", "take the steps")):
            add_rules_arguments(actions.add_parser(action, help=description), rules, run, apply=action == "apply")

    def add_rules_arguments(
        action: argparse.ArgumentParser, rules: str, run: Callable[[argparse.Namespace], int], *, apply: bool
    ) -> None:
        action.add_argument("--file", required=True, help=f"JSON file with the list of {rules} rules")
        action.add_argument("--config", default=config.default_path(), help="the driver's configuration, for its state")
        action.add_argument(
            "--vendor",
            action="append",
            metavar="VENDOR",
            help="only this vendor's devices; can be repeated (default: the vendors with devices on the node)",
        )
        action.add_argument(
            "--wait",
            type=float,
            default=60.0,
            metavar="SECONDS",
            help="wait so long for the vendor's driver (default 60)",
        )
        action.add_argument("--json", action="store_true", help="print the result as JSON")
        action.set_defaults(run=run, apply=apply)

    add_plan_and_apply("layout", "show or make the wanted partitions of this node's devices", "layout", _layout)
    add_plan_and_apply("settings", "show or make the settings of this node's devices", "settings", _settings)

    def add_report_command(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text)
        found.add_argument("--config", default=config.default_path(), help="configuration file (default %(default)s)")
        found.add_argument("--output", choices=("text", "json"), default="text", help="for people, or for programs")
        found.add_argument(
            "--json", dest="output", action="store_const", const="json", help="the same as --output json"
        )
        found.set_defaults(run=run)
        return found

    add_report_command("status", "show how the driver is, and the claims prepared on this node", _status)
    add_report_command("claims", "show the claims of this node, their devices, programs and containers", _claims)
    add_report_command("devices", "show this node's devices, their faults, and their users", _devices)
    explain = add_report_command("explain", "show why a claim is, or is not, prepared on this node", _explain)
    explain.add_argument("claim", metavar="CLAIM", help="NAMESPACE/NAME, NAME or UID")
    explain.add_argument("--kubeconfig", default="", help="who to ask the API server as (default: as the driver)")
    probe = add_report_command("probe", "end with 0 where the driver lives, or is ready to prepare claims", _probe)
    probe.add_argument("what", choices=("liveness", "readiness"))
    probe.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="wait so long (default 5)")

    collect = commands.add_parser(
        "collect", help="write what a helper needs to know of this node into a file, without secrets"
    )
    collect.add_argument("--config", default=config.default_path(), help="configuration file (default %(default)s)")
    collect.add_argument(
        "--file", default="", help="the .tar.gz to write (default: named by node and time, in the current directory)"
    )
    collect.set_defaults(run=_collect)

    reload = commands.add_parser("reload", help="apply the current configuration file to the running driver")
    reload.add_argument("--config", default=config.default_path(), help="configuration file (default %(default)s)")
    reload.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="wait so long (default 60)")
    reload.set_defaults(run=_reload)

    recovered = commands.add_parser(
        "recovered", help="report that devices were reset or repaired by hand, which ends their reported faults"
    )
    recovered.add_argument("device", nargs="+", metavar="UUID", help="a device's UUID, or all")
    recovered.add_argument("--config", default=config.default_path(), help="configuration file (default %(default)s)")
    recovered.set_defaults(run=_recovered)

    machine = commands.add_parser(
        "machine",
        help="show or change the machine that the driver's state belongs to, for copied disks and replaced hardware",
    )
    machine.add_argument(
        "action",
        choices=("show", "accept", "reset"),
        help="show: print both identities; accept: this is the same node with new hardware; reset: this machine is a copy, delete the copied state",
    )
    machine.add_argument("--config", default=config.default_path(), help="configuration file (default %(default)s)")
    machine.set_defaults(run=_machine)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _node(options: argparse.Namespace) -> int:
    from .node import run_node

    configuration = config.load(options.config)
    faulthandler.enable()  # on a crash or a systemd watchdog timeout, the journal gets the stack traces
    logs.configure(configuration.log.level, configuration.log.format)
    # Imported modules stay in memory until the process ends. Freezing them keeps the garbage collector from scanning
    # them during a claim.
    gc.collect()
    gc.freeze()
    return asyncio.run(run_node(configuration, options.config))


def _recovered(options: argparse.Namespace) -> int:
    from .commands.recovered import report_repairs

    sys.stdout.write("".join(f"{line}\n" for line in report_repairs(options.config, options.device)))
    return 0


def _machine(options: argparse.Namespace) -> int:
    from .commands.machine import run_action

    sys.stdout.write("".join(f"{line}\n" for line in run_action(options.action, options.config)))
    return 0


def _layout(options: argparse.Namespace) -> int:
    from .layout_command import run_layout

    return _run_plan_or_apply(run_layout, options)


def _settings(options: argparse.Namespace) -> int:
    from .settings_command import run_settings

    return _run_plan_or_apply(run_settings, options)


def _run_plan_or_apply(run: Callable[..., int], options: argparse.Namespace) -> int:
    return run(
        options.file,
        options.config,
        apply=options.apply,
        wait=options.wait,
        as_json=options.json,
        vendors=options.vendor or (),
    )


def _status(options: argparse.Namespace) -> int:
    from .status_command import run_status

    return run_status(options.config, as_json=options.output == "json")


def _claims(options: argparse.Namespace) -> int:
    from .commands import claims, node, output

    found = node.read_node(options.config)
    listed = claims.claims(found)
    problems = [driver.stored.problem for driver in found.drivers if driver.stored.problem]
    output.write(listed, options.output, claims.claims_text(listed, problems))
    return 0


def _devices(options: argparse.Namespace) -> int:
    from .commands import claims, node, output

    listed = claims.devices(node.read_node(options.config))
    output.write(listed, options.output, claims.devices_text(listed))
    return 0


def _explain(options: argparse.Namespace) -> int:
    from .commands import explain, gather, node, output

    answers = [
        explain.explain(facts)
        for facts in gather.facts_of(node.read_node(options.config), options.claim, options.kubeconfig)
    ]
    output.write(answers, options.output, "\n".join(map(output.outline, answers)))
    return 0 if any(answer["verdict"] == "prepared" for answer in answers) else 1


def _probe(options: argparse.Namespace) -> int:
    from .commands import node, output, probe

    problems = []
    for driver in node.read_node(options.config).drivers:
        found = probe.check_driver(options.what, driver.status, driver.socket, options.timeout)
        problems += [f"{driver.name}: {each}" for each in found]
    output.write({"ok": not problems, "problems": problems}, options.output, "\n".join(problems or ["ok"]) + "\n")
    return 1 if problems else 0


def _collect(options: argparse.Namespace) -> int:
    from .commands import collect, node

    found = node.read_node(options.config)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = Path(options.file or f"dra-accelerators-{found.configuration.node_name}-{stamp}.tar.gz")
    missing = collect.collect(found, options.config, target)
    sys.stdout.write("".join(f"not there: {line}\n" for line in missing) + f"{target}\n")
    return 0


def _reload(options: argparse.Namespace) -> int:
    from .commands import reload

    problems = reload.reload(options.config, options.timeout)
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


def _version(options: argparse.Namespace) -> int:
    del options
    sys.stdout.write(f"{__version__}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
