# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The command ``accelerator-simulator``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from . import fabric_manager, persistence_daemon
from .bus import serve
from .errors import SimulatorError
from .hardware import load_catalogue, load_machine, machine_names
from .library import ASCEND, VENDORS, Library, library_of, loaded_libraries
from .power import CONFIGURATION, DATA, RECORD, Power, read_configuration, read_record

FAULT_HELP = """\
faults of GPUs (GPU is an index, a UUID, a PCI address, several by commas, or all):
  fault GPU xid N [GI CI]               an XID event
  fault GPU event retirement-failure|fatal-poison|unavailable
  fault GPU ecc sbe|dbe [COUNT]         ECC errors
  fault GPU row-remap pending|failure   row remapping
  fault GPU lost                        the GPU falls off the bus
  fault GPU thermal                     thermal slowdown
  fault GPU slowdown hardware|power-brake
  fault GPU fabric not-started|joining|failed|routes|mending|place|bandwidth
  fault GPU process PID [GI CI] [memory MIB]
  fault GPU call FUNCTION fail CODE [nth N]
  fault GPU call FUNCTION delay SECONDS [nth N]
  fault GPU call FUNCTION hang [nth N]  until it is cleared
  fault GPU nvlink LINK down|up
  fault GPU recovery-action N
  fault all confidential-computing on|protected-pcie|off

faults of NPUs (NPU is a physical id, the VDIE, a PCI address, several by commas, or all):
  fault NPU health ok|warning|alarm|critical
  fault NPU error CODE [warning|alarm|critical]
  fault NPU network RESULT              of the test of its port: 0 well, 1 to 8
  fault NPU traffic SENT RECEIVED [BAD] over its port: MB/s, and bad packets that came
  fault NPU hccs LINK ERRORS            wrong checksums on a link to another chip
  fault NPU sio ERRORS                  wrong checksums on the link to the other die
  fault NPU lost                        every call fails until the fault is cleared
  fault NPU fragmented                  free resources are fragmented: only an empty chip accepts a slice
  fault NPU process PID [VID] [memory MIB]
  fault NPU call FUNCTION fail CODE|delay SECONDS|hang [nth N]

On a machine with devices of two vendors, --vendor before the command says whose are meant.
"""
# Fields of a device in the library's answer to `show` that are false or zero without a fault
TROUBLES = (
    "lost",
    "fragmented",
    "unplugged",
    "thermal",
    "slowdown",
    "fabric_fault",
    "ecc_corrected",
    "ecc_uncorrected",
    "row_remap_pending",
    "row_remap_failure",
    "recovery_action",
)


GPU_HEADING = ["INDEX", "MINOR", "PCI ADDRESS", "NAME", "UUID", "MIG", "INSTANCES", "STATE"]
NPU_HEADING = ["NUMBER", "CARD", "CHIP", "PCI ADDRESS", "NAME", "VDIE", "SLICES", "STATE"]
# dcmi_get_device_health without 0, which is healthy
HEALTH = {1: "warning", 2: "alarm", 3: "critical"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="accelerator-simulator",
        description="Simulated GPUs and NPUs: power, state and faults.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=FAULT_HELP,
    )
    top.add_argument("--root", type=Path, help="create everything as plain files in this directory, without privileges")
    top.add_argument("--configuration", type=Path, help=f"configuration file (default {CONFIGURATION})")
    top.add_argument(
        "--library-folder", type=Path, help="directory of the simulated libraries (default: the drivers' directories)"
    )
    top.add_argument("--vendor", choices=sorted(VENDORS), help="whose devices are meant, on a machine of two vendors")
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
    fault.add_argument("words", nargs=argparse.REMAINDER, metavar="DEVICE FAULT …")
    clear = commands.add_parser("clear", help="clear all injected faults and processes")
    clear.add_argument("gpu", nargs="?", default="all")
    reset = commands.add_parser("reset", help="reset GPUs, as nvidia-smi --gpu-reset does")
    reset.add_argument("gpu", help="index, UUID or PCI address, several by commas")
    unplug = commands.add_parser("unplug", help="take devices out of the machine, whoever uses them")
    unplug.add_argument("gpu", metavar="DEVICE", help="as for a fault, several by commas")
    plug = commands.add_parser("plug", help="put devices in again that were taken out")
    plug.add_argument("gpu", metavar="DEVICE", help="as for a fault, several by commas")
    driver = commands.add_parser(
        "driver", help="load or unload NVIDIA's driver, on a machine where it is installed separately"
    )
    driver.add_argument("change", choices=("load", "unload"))
    calls = commands.add_parser(
        "calls", help="count the libraries' calls since the machine was loaded, or since the last reset"
    )
    calls.add_argument("--reset", action="store_true", help="show the counts and reset them")
    show = commands.add_parser("show", help="show the boards and their state")
    show.add_argument("--json", action="store_true", help="everything, as JSON")
    bus = commands.add_parser("bus", help="bind devices to drivers as the kernel does, until it is ended")
    bus.add_argument("--no-library", action="store_true", help="files only")
    fabric = commands.add_parser(
        "fabric-manager", help="serve the partitions of the NVSwitch fabric to libnvfm.so.1, until it is ended"
    )
    fabric.add_argument(
        "-c", "--fabric-configuration", type=Path, help="its configuration file (default: NVIDIA's own)"
    )
    commands.add_parser("persistence-daemon", help="have GPUs open as nvidia-persistenced does, until it is ended")
    machines = commands.add_parser("machines", help="list the machine profiles")
    machines.add_argument("--json", action="store_true")
    return top


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns of equal width. The first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows) + "\n"


def describe_gpu(gpu: Mapping[str, Any]) -> list[str]:
    """Return one line of ``show``: the GPU, its partitions, and its faults."""
    mig = "-"
    if gpu["mig"] != "none":
        mig = "on" if gpu["mig_mode_current"] else "off"
        mig += " (reset needed)" if gpu["mig_mode_current"] != gpu["mig_mode_pending"] else ""
    instances = " ".join(f"{entry['profile']}@{entry['start']}" for entry in gpu["gpu_instances"])
    troubles = [name.replace("_", "-") for name in TROUBLES if gpu.get(name)]
    users = [f"pid {process['pid']}" for process in gpu["processes"]]
    facts = [str(gpu[key]) for key in ("index", "minor", "pci_address", "name", "uuid")]
    return [*facts, mig, instances or "-", ", ".join(troubles + users) or "-"]


def describe_npu(npu: Mapping[str, Any]) -> list[str]:
    """Return one line of ``show``: the chip, its vNPUs, and its faults."""
    slices = " ".join(f"{entry['template']}@{entry['vid']}" for entry in npu["slices"])
    troubles = [name.replace("_", "-") for name in TROUBLES if npu.get(name)]
    troubles += [HEALTH[npu["health"]]] if npu["health"] in HEALTH else []
    troubles += [f"error {code:#010x}" for code in npu["errors"]]
    troubles += [f"network {npu['network']}"] if npu["network"] else []
    users = [f"pid {process['pid']}" for process in npu["processes"]]
    facts = [str(npu[key]) for key in ("physical", "card", "chip", "pci_address", "name", "vdie")]
    return [*facts, slices or "-", ", ".join(troubles + users) or "-"]


def control(arguments: argparse.Namespace, libraries: list[Library], output: TextIO) -> None:
    """Run the commands of the libraries: those for devices in one library, those for the machine in each."""
    if arguments.command == "fault":
        selection, text = (arguments.words or [""])[0], " ".join(["fault", *arguments.words])
    elif arguments.command == "reset":
        selection, text = arguments.gpu, f"gpu-reset {arguments.gpu}"
    elif arguments.command == "clear":
        selection, text = arguments.gpu, f"clear {arguments.gpu}"
    else:
        selection, text = "all", "calls reset" if getattr(arguments, "reset", False) else arguments.command
    if arguments.command in ("fault", "reset") or selection != "all":
        libraries = [library_of(libraries, selection, arguments.vendor)]
    libraries = [each for each in libraries if arguments.vendor in (None, each.vendor.word)]
    answers = {library.vendor.word: library.command(text) for library in libraries}
    if arguments.command != "show" or arguments.json:
        # One vendor: print its answer. Several vendors: print the answers by vendor.
        answer = answers if len(answers) > 1 else next(iter(answers.values()), {})
        output.write(json.dumps(answer, indent=2) + "\n")
        return
    for word, shown in answers.items():
        heading, describe = (NPU_HEADING, describe_npu) if word == ASCEND.word else (GPU_HEADING, describe_gpu)
        output.write(table([heading, *(describe(each) for each in shown.get(VENDORS[word].devices, ()))]))


def run(arguments: argparse.Namespace, output: TextIO) -> None:
    """Execute one command; errors are raised."""
    root = str(arguments.root or "")
    folder = arguments.library_folder
    if arguments.command == "machines":
        list_machines(arguments.json, output)
        return
    if arguments.command in ("fault", "clear", "reset", "calls", "show"):
        control(arguments, loaded_libraries(root, folder), output)
        return
    overrides = {key: getattr(arguments, key, None) for key in ("machine", "identity")}
    if arguments.command != "power-on":
        # The machine that is powered on, whatever the configuration is now
        overrides["machine"] = read_record(Path(root + RECORD)).get("machine")
    configuration = read_configuration(arguments.configuration or Path(root + CONFIGURATION), overrides)
    power = Power(
        configuration, arguments.root, library_folder=folder, use_library=not getattr(arguments, "no_library", False)
    )
    if arguments.command == "bus":
        serve(power.bus())
        return
    if arguments.command == "persistence-daemon":
        nvidia = power.libraries()["nvidia"]
        persistence_daemon.serve(root, nvidia.devices, nvidia.path.resolve().parent)
        return
    if arguments.command == "fabric-manager":
        path = arguments.fabric_configuration or Path(root + fabric_manager.CONFIGURATION)
        options = fabric_manager.read_options(path.read_text(encoding="utf-8"))
        with fabric_manager.running(root, power.libraries()["nvidia"].path.resolve().parent):
            fabric_manager.serve(options, power.fabric_members())
        return
    if arguments.command in ("unplug", "plug"):
        move = power.unplug if arguments.command == "unplug" else power.plug
        output.write(json.dumps({arguments.command: move(arguments.gpu, arguments.vendor)}) + "\n")
        return
    if arguments.command == "driver":
        plan = power.load_driver() if arguments.change == "load" else power.unload_driver()
        output.write(json.dumps({"changed": plan.changes, "driver": power.nvidia_version}) + "\n")
        return
    if arguments.command == "power-off":
        done = [power.power_off(), arguments.forget and power.forget()]
        answer: dict[str, Any] = {"changed": any(done)}
    else:
        plan = power.power_on(check=arguments.check)
        answer = {"changed": plan.changes, "machine": power.machine.name, **vars(plan)}
    output.write(json.dumps(answer) + "\n")


def list_machines(as_json: bool, output: TextIO) -> None:
    """Print all machine profiles with their products."""
    catalogue = load_catalogue(DATA)
    machines = [load_machine(DATA, name, catalogue) for name in machine_names(DATA)]
    if as_json:
        rows = [
            {"machine": entry.name, "gpus": len(entry.gpus), "npus": len(entry.npus), "product": entry.product}
            for entry in machines
        ]
        output.write(json.dumps(rows, indent=2) + "\n")
        return
    heading = ["MACHINE", "GPUS", "NPUS", "PRODUCT"]
    counted = ([entry.name, str(len(entry.gpus)), str(len(entry.npus)), entry.product] for entry in machines)
    output.write(table([heading, *counted]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 1 with one line on standard error."""
    try:
        run(parser().parse_args(argv), sys.stdout)
    except (SimulatorError, OSError) as error:
        sys.stderr.write(f"accelerator-simulator: {error}\n")
        return 1
    return 0
