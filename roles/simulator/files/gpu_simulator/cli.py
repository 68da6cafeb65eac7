# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The command ``gpu-simulator``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .errors import SimulatorError
from .library import DEFAULT_FOLDER, Library, find_library
from .power import CONFIGURATION, Power, read_configuration

FAULT_HELP = """\
faults (GPU is an index, a UUID, a PCI address, several by commas, or all):
  fault GPU xid N [GI CI]               an XID event
  fault GPU ecc sbe|dbe [COUNT]         ECC errors
  fault GPU row-remap pending|failure   row remapping
  fault GPU lost                        the GPU falls off the bus
  fault GPU thermal                     thermal slowdown
  fault GPU process PID [GI CI] [memory MIB]
  fault GPU call FUNCTION fail CODE [nth N]
  fault GPU call FUNCTION delay SECONDS [nth N]
  fault GPU nvlink LINK down|up
  fault GPU recovery-action N
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="gpu-simulator",
        description="Simulated NVIDIA GPUs: power, state and faults.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=FAULT_HELP,
    )
    top.add_argument("--root", type=Path, help="make everything as plain files under this folder, without privileges")
    top.add_argument("--configuration", type=Path, help=f"configuration file (default {CONFIGURATION})")
    top.add_argument("--library-folder", type=Path, help=f"folder of the simulated library (default {DEFAULT_FOLDER})")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    on = commands.add_parser(
        "power-on", help="place the machine's files; load the library, or power-cycle it after a boot"
    )
    on.add_argument("--machine", help="machine profile, such as 8xH100")
    on.add_argument(
        "--identity", help="text that makes UUIDs and serial numbers differ between machines (default: host name)"
    )
    on.add_argument("--check", action="store_true", help="only say what would be done")
    on.add_argument("--no-library", action="store_true", help="place files only")
    off = commands.add_parser("power-off", help="take the files away; the boards keep their state")
    off.add_argument("--forget", action="store_true", help="remove what power-on recorded as well")
    fault = commands.add_parser("fault", help="inject a fault (see below)")
    fault.add_argument("words", nargs=argparse.REMAINDER, metavar="GPU FAULT …")
    clear = commands.add_parser("clear", help="clear all injected faults and processes")
    clear.add_argument("gpu", nargs="?", default="all")
    reset = commands.add_parser("reset", help="reset GPUs, as nvidia-smi --gpu-reset does")
    reset.add_argument("gpu", help="index, UUID or PCI address, several by commas")
    show = commands.add_parser("show", help="show the boards and their state")
    show.add_argument("--json", action="store_true", help="everything, as JSON")
    machines = commands.add_parser("machines", help="list the machine profiles")
    machines.add_argument("--json", action="store_true")
    return top


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of even width; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows) + "\n"


def describe_gpu(gpu: Mapping[str, Any]) -> list[str]:
    """One line of ``show``."""
    mig = gpu.get("mig", {})
    instances = [
        f"{instance.get('profile', instance.get('name', '?'))}@{instance.get('start', instance.get('placement', {}).get('start', '?'))}"
        for instance in gpu.get("gpu_instances", ())
    ]
    return [
        str(gpu.get("index", "")),
        str(gpu.get("minor", "")),
        str(gpu.get("pci_address", "")),
        str(gpu.get("name", "")),
        str(gpu.get("uuid", "")),
        str(mig.get("mode", mig.get("current", "-"))),
        " ".join(instances) or "-",
        " ".join(map(str, gpu.get("faults", ()))) or "-",
    ]


def run(arguments: argparse.Namespace, output: TextIO) -> int:
    """Executes one command; errors are raised."""
    configuration_path = arguments.configuration or Path(str(arguments.root or "") + CONFIGURATION)
    folder = arguments.library_folder or Path(str(arguments.root or "") + DEFAULT_FOLDER)
    if arguments.command in ("fault", "clear", "reset", "show"):
        library = Library(find_library(folder))
        text = {
            "fault": lambda: "fault " + " ".join(arguments.words),
            "clear": lambda: "clear " + arguments.gpu,
            "reset": lambda: "gpu-reset " + arguments.gpu,
            "show": lambda: "show",
        }[arguments.command]()
        answer = library.command(text)
        if arguments.command != "show" or arguments.json:
            output.write(json.dumps(answer, indent=2) + "\n")
        else:
            heading = ["INDEX", "MINOR", "PCI ADDRESS", "NAME", "UUID", "MIG", "INSTANCES", "FAULTS"]
            output.write(table([heading] + [describe_gpu(gpu) for gpu in answer.get("gpus", ())]))
        return 0
    overrides: dict[str, Any] = {}
    if arguments.command == "power-on":
        overrides = {"machine": arguments.machine, "identity": arguments.identity}
    power = Power(
        read_configuration(configuration_path, overrides),
        root=arguments.root,
        library_folder=folder,
        use_library=not getattr(arguments, "no_library", False),
    )
    if arguments.command == "machines":
        return list_machines(arguments.json, output)
    if arguments.command == "power-off":
        changed = power.power_off()
        changed = (power.forget() if arguments.forget else False) or changed
        output.write(json.dumps({"changed": changed}) + "\n")
        return 0
    plan = power.power_on(check=arguments.check)
    output.write(
        json.dumps(
            {
                "changed": plan.changes,
                "machine": power.machine.name,
                "place": plan.place,
                "library": plan.library,
                "reason": plan.reason,
            }
        )
        + "\n"
    )
    return 0


def list_machines(as_json: bool, output: TextIO) -> int:
    """All machine profiles with the products in them."""
    from .hardware import load_catalogue, load_machine
    from .power import DATA

    catalogue = load_catalogue(DATA)
    names = sorted(path.stem for path in (DATA / "machines").glob("*.json"))
    machines = [load_machine(DATA, name, catalogue) for name in names]
    if as_json:
        output.write(
            json.dumps(
                [
                    {"machine": machine.name, "product": machine.product, "gpus": len(machine.gpus)}
                    for machine in machines
                ],
                indent=2,
            )
            + "\n"
        )
    else:
        output.write(
            table(
                [["MACHINE", "GPUS", "PRODUCT"]]
                + [[machine.name, str(len(machine.gpus)), machine.product] for machine in machines]
            )
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0, or 1 with one line on standard error."""
    try:
        return run(parser().parse_args(argv), sys.stdout)
    except (SimulatorError, OSError) as error:
        sys.stderr.write(f"gpu-simulator: {error}\n")
        return 1
