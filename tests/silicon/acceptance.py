# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Questions that public sources do not settle, answered by the hardware of this host.

Usage: python tests/silicon/acceptance.py [--change]     (as root; README.md of tests names the packages)

Each line has a question's name, the answer of this host, and `as simulated` or `DIFFERS`. Without --change nothing is
changed. With it, slices are created and destroyed on idle NPUs without slices, idle NPUs are reset, memory clocks of
idle GPUs are locked and unlocked, persistence mode of an idle GPU is switched off and on, an idle GPU is reset,
settings of one are changed and restored, and two MPS servers compute on an idle GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra_driver.core.errors import AcceleratorError, Unsupported
from dra_driver.core.host.device_users import find_device_users
from dra_driver.core.host.system import DeviceNumber
from dra_driver.core.model import Device, devices_of
from dra_driver.core.settings.knobs import COMPUTE_MODE, COMPUTE_MODES, MEMORY_CLOCKS, PERSISTENCE
from dra_driver.core.vendors.ascend.backend import AscendBackend
from dra_driver.core.vendors.ascend.dcmi.dcmi_source import Library
from dra_driver.core.vendors.ascend.dcmi.structures import UnifiedBusInfo
from dra_driver.core.vendors.ascend.driver_files import install_folder, slice_node
from dra_driver.core.vendors.ascend.families import UNKNOWN, family_of
from dra_driver.core.vendors.ascend.npu_smi.npu_smi_source import Program
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.nvidia.container.container_edits import character_major
from dra_driver.core.vendors.nvidia.container.driver_files import PERSISTENCE_SOCKET, UVM_NODES
from dra_driver.core.vendors.nvidia.mps import TOOL
from dra_driver.core.vendors.nvidia.vendor import FACTS

sys.path.insert(0, str(Path(__file__).parent))

from mps_servers import measure
from persistence import blocked_by_daemon, lost_without_mode

NOT_ASKED = "not asked: "
#: `__dra_driver_npu_locks` of the role dra_driver.
LOCKS = {f"/run/{name}_cfg_lock" for name in ("vnpu", "npu_dev_syslog", "custom_op", "op_timeout", "device_share")}


@dataclass(frozen=True)
class Question:
    """A question. ``expected`` is the simulator's answer, ``changes`` is whether the question changes the host."""

    name: str
    expected: str
    ask: Callable[[Any], str]
    changes: bool = False


def idle(backend: AscendBackend) -> Iterator[Device]:
    """Yield the idle NPUs that support slices."""
    for device in devices_of(backend.discover()):
        if not device.processes and not device.partitions and device.profiles and not device.partitioning.blocked:
            yield device


def create_too_many(backend: AscendBackend) -> str:
    """Fill a chip with its largest vNPUs, and return the answer to one more."""
    device = next(idle(backend), None)
    if device is None:
        return NOT_ASKED + "no idle NPU can have slices"
    profile, chip = device.profiles[-1], backend._chips.chip(device.uuid)
    placements = profile.placements
    made = []
    try:
        for _each in range(profile.maximum):
            placement = next(
                each for each in placements if not any(each.conflicts_with(other.placement) for other in made)
            )
            taken = backend.choose_id(backend.device(device.uuid), placement)
            made.append(backend.create_partition(device.uuid, profile.profile_id, placement, taken))
        used = {each.instance_id for each in made}
        number = next(each for each in range(100 + 16 * device.minor, 116 + 16 * device.minor) if each not in used)
        try:
            backend._source.create(chip.spot, profile.name, number, None)
        except AcceleratorError as error:
            return error.code
        backend._source.destroy(chip.spot, number)
        return "created"
    finally:
        for each in made:
            backend.destroy_partition(device.uuid, each.instance_id)


def create_on_busy(backend: AscendBackend) -> str:
    """Return the answer to the creation of a vNPU on a chip that a process has open."""
    for device in devices_of(backend.discover()):
        if device.processes and not device.partitions and device.profiles:
            chip = backend._chips.chip(device.uuid)
            number = 100 + 16 * device.minor
            try:
                backend._source.create(chip.spot, device.profiles[0].name, number, None)
            except AcceleratorError as error:
                return error.code
            backend._source.destroy(chip.spot, number)
            return "created"
    return NOT_ASKED + "start a program that uses one NPU, and run this again"


def compare_links(backend: AscendBackend) -> str:
    """Return whether DCMI and npu-smi name the same links between chips."""
    library, program = Library(backend._system), Program(backend._system)
    try:
        library.open()
        program.open()
    except AcceleratorError as error:
        return f"{NOT_ASKED}{error}"
    spots = library.spots()
    differing = {
        f"{by_library} is {by_program} in npu-smi"
        for one, other in itertools.combinations(spots, 2)
        if (by_library := library.link(one, other)) != (by_program := program.link(one, other))
        and None not in (by_library, by_program)
    }
    return "; ".join(sorted(differing)) or "the same"


def read_owner(backend: AscendBackend) -> str:
    """Return UID, GID, and mode of the first NPU's device node."""
    device = devices_of(backend.discover())[0]
    status = backend._system.path(f"/dev/davinci{device.minor}").stat()
    return f"{status.st_uid}:{status.st_gid} {stat.S_IMODE(status.st_mode):o}"


def count_reset(backend: AscendBackend) -> str:
    """Reset the first unit of idle chips, and return whether exactly its chips were away during the reset."""
    devices = devices_of(backend.discover())
    if any(device.processes or device.partitions for device in devices):
        return NOT_ASKED + "end all programs and destroy all slices"
    unit = backend._chips.reset_unit(devices[0].uuid)
    nodes = {f"/dev/davinci{device.minor}": device.uuid for device in devices}
    gone: set[str] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            gone.update(uuid for path, uuid in nodes.items() if not backend._system.exists(path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        backend.reset(unit)
    finally:
        is_over.set()
        watcher.join()
    others = gone - set(unit)
    return f"also {', '.join(sorted(others))}" if others else "only those of the unit"


def find_unknown(backend: AscendBackend) -> str:
    """Return the NPUs with PCI ids whose generation the product does not know."""
    found = {
        f"{device.pci_device_id >> 16:04x} ({device.product})"
        for device in devices_of(backend.discover())
        if family_of(device.pci_device_id) is UNKNOWN
    }
    return ", ".join(sorted(found)) or "none"


def find_locks(backend: AscendBackend) -> str:
    """Return the directories of locks in the installed library that the role does not create."""
    library = f"{install_folder(backend._system)}/driver/lib64/driver/libdcmi.so"
    if not backend._system.exists(library):
        return f"{NOT_ASKED}{library} is missing"
    named = {each.decode() for each in re.findall(rb"/run/[a-z_]+_lock(?=\0)", backend._system.read_bytes(library))}
    return ", ".join(sorted(named - LOCKS)) or "none"


def tell_links(backend: AscendBackend) -> str:
    """Return whether DCMI reports the link between the first two NPUs. Without it, the rings of the generation are
    used.
    """
    library = Library(backend._system)
    try:
        library.open()
    except AcceleratorError as error:
        return f"{NOT_ASKED}{error}"
    spots = library.spots()
    if len(spots) < 2 or library._dcmi.is_second:
        return NOT_ASKED + "there is one NPU, or its generation has no such question"
    return "reported" if library.link(spots[0], spots[1]) is not None else "not reported"


def read_slice_owner(backend: AscendBackend) -> str:
    """Return whether the device nodes of slices have owner, group, and mode of their chip's node."""
    found = set()
    for device in devices_of(backend.discover()):
        for each in device.partitions:
            paths = (f"/dev/davinci{device.minor}", slice_node(each.instance_id))
            one, other = (backend._system.path(path).stat() for path in paths)
            is_same = (one.st_uid, one.st_gid, one.st_mode) == (other.st_uid, other.st_gid, other.st_mode)
            found.add("as the chip's" if is_same else f"{other.st_uid}:{other.st_gid} {stat.S_IMODE(other.st_mode):o}")
    return ", ".join(sorted(found)) or NOT_ASKED + "create a slice, and run this again"


def read_unified_bus(backend: AscendBackend) -> str:
    """Return the IDs that NPUs without a PCI address report: device, vendor, module, and the module's vendor."""
    spots = [chip.spot for chip in backend._chips.cached_facts() if not chip.identity.pci_address]
    if not spots:
        return NOT_ASKED + "all NPUs have PCI addresses"
    library, found = Library(backend._system), set()
    try:
        library.open()
    except AcceleratorError as error:
        return f"{NOT_ASKED}{error}"
    for spot in spots:
        ids = UnifiedBusInfo()
        reported = library._dcmi.answered(spot, "get_device_ub_id_info", ctypes.byref(ids), doing="Asking for the ids")
        found.add(f"{ids.device:04x} {ids.vendor:04x} {ids.module:04x} {ids.module_vendor:04x}" if reported else "none")
    return ", ".join(sorted(found))


def find_package(backend: AscendBackend) -> str:
    """Return the deb or rpm packages that own the driver; the role knows them by this file and by names like ``ascend-hdk-CHIP-npu-driver``."""
    system = backend._system
    path = f"{install_folder(system)}/driver/version.info"
    commands = (["dpkg-query", "-S", path], ["rpm", "-qf", path])
    done = [system.run(argv, 60) for argv in commands if system.finds(argv[0])]
    return ", ".join(each.stdout.strip() for each in done if each.returncode == 0) or "none"


def lock_memory_clocks(backend: NvidiaBackend) -> str:
    """Lock memory clocks of idle GPUs, and return the boards that accept it although the product refuses it, or the reverse."""
    differing = set()
    for device in devices_of(backend.discover()):
        if device.processes:
            continue
        offered = MEMORY_CLOCKS in backend.knobs(device.uuid, [MEMORY_CLOCKS])
        try:
            handle = backend._boards.board(device.uuid).handle
            clock = max(backend._nvml.call("nvmlDeviceGetSupportedMemoryClocks", handle))
            backend.set_knobs(device.uuid, {MEMORY_CLOCKS: {"minimum": clock, "maximum": clock}})
        except Unsupported:
            if offered:
                differing.add(f"{device.product} is not locked")
        else:
            backend.set_knobs(device.uuid, {MEMORY_CLOCKS: None})
            if not offered:
                differing.add(f"{device.product} is locked")
    return ", ".join(sorted(differing)) or "as offered"


def read_uvm(backend: NvidiaBackend) -> str:
    """Return whether the kernel module nvidia-uvm is loaded, and its device nodes exist with its numbers."""
    major = character_major(backend._system, "nvidia-uvm")
    if major is None:
        return "not loaded"
    found = [backend._system.device_number(path) for path in UVM_NODES]
    return "loaded" + (
        "" if found == [DeviceNumber("c", major, minor) for minor in range(2)] else ", without its nodes"
    )


def close_by_daemon(backend: NvidiaBackend) -> str:
    """Switch persistence mode of an idle GPU off and on, and return whether the persistence daemon closes the GPU in between."""
    system = backend._system
    if not system.is_socket(PERSISTENCE_SOCKET):
        return NOT_ASKED + "nvidia-persistenced does not run"
    for device in devices_of(backend.discover()):
        knob = backend.knobs(device.uuid, [PERSISTENCE]).get(PERSISTENCE)
        numbers = [number for path in backend.device_nodes(device) if (number := system.device_number(path))]
        if device.processes or knob is None or knob.blocked or not knob.value:
            continue
        if FACTS.persistence_daemon not in {process.name for process in find_device_users(system, numbers)}:
            return "not open"
        backend.set_knobs(device.uuid, {PERSISTENCE: False})
        try:
            return (
                "open"
                if FACTS.persistence_daemon in {process.name for process in find_device_users(system, numbers)}
                else "closed"
            )
        finally:
            backend.set_knobs(device.uuid, {PERSISTENCE: True})
    return NOT_ASKED + "no idle GPU is in persistence mode"


def find_blocked_by_daemon(backend: NvidiaBackend) -> str:
    """Return whether the persistence daemon blocks a change of the MIG mode, and a reset."""
    return blocked_by_daemon(backend) or NOT_ASKED + "the persistence daemon has no idle GPU open"


def find_lost_settings(backend: NvidiaBackend) -> str:
    """Return the settings that a GPU without persistence mode loses when its last client ends."""
    return lost_without_mode(backend) or NOT_ASKED + "no idle GPU is in persistence mode"


def divide_by_servers(backend: NvidiaBackend) -> str:
    """Return whether thread percentages of two MPS servers divide the multiprocessors of an idle GPU twice."""
    if not backend._system.finds(TOOL):
        return f"{NOT_ASKED}{TOOL} is not installed"
    for device in devices_of(backend.discover()):
        mode = backend.knobs(device.uuid, [COMPUTE_MODE]).get(COMPUTE_MODE)
        if device.processes or device.partitioning.enabled or mode is None or mode.value != COMPUTE_MODES[0]:
            continue
        try:
            return measure(device.uuid)
        except (OSError, RuntimeError, ValueError) as error:
            return f"{NOT_ASKED}{error}"
    return NOT_ASKED + "no idle GPU is in the compute mode Default without MIG"


QUESTIONS: tuple[Question, ...] = (
    Question("ascend: error of a slice that does not fit", "invalid-argument", create_too_many, changes=True),
    Question("ascend: error of a slice on a busy chip", "in-use", create_on_busy, changes=True),
    Question("ascend: chips away during a reset", "only those of the unit", count_reset, changes=True),
    Question("ascend: NPUs of unknown generations", "none", find_unknown),
    Question("ascend: lock directories that the role does not create", "none", find_locks),
    Question("ascend: link between two NPUs by DCMI", "reported", tell_links),
    Question("ascend: owner and mode of the nodes of slices", "as the chip's", read_slice_owner),
    Question("ascend: ids of NPUs on the unified bus", "d806 19e5 1000 19e5", read_unified_bus),
    Question("ascend: packages of the distribution with the driver", "none", find_package),
    Question("ascend: owner and mode of a device node", "1000:1000 660", read_owner),
    Question("ascend: link types of DCMI and of npu-smi", "the same", compare_links),
    Question("nvidia: module nvidia-uvm, after a boot without the node driver", "loaded, without its nodes", read_uvm),
    Question(
        "nvidia: GPU of the persistence daemon, after persistence mode is off", "closed", close_by_daemon, changes=True
    ),
    Question(
        "nvidia: changes of a GPU that the persistence daemon has open",
        "MIG mode in use, reset in use",
        find_blocked_by_daemon,
        changes=True,
    ),
    Question(
        "nvidia: settings that are lost with the last client, without persistence mode",
        "computeMode, graphicsClocks, powerLimit, timeSlice",
        find_lost_settings,
        changes=True,
    ),
    Question(
        "nvidia: multiprocessors of MPS servers with percentages", "divided twice", divide_by_servers, changes=True
    ),
    Question("nvidia: boards that lock memory clocks", "as offered", lock_memory_clocks, changes=True),
)


def answers(backend: AscendBackend | NvidiaBackend, changes: bool) -> Iterator[tuple[Question, str]]:
    """Ask each question about the backend's vendor."""
    for question in QUESTIONS:
        if not question.name.startswith(f"{backend.vendor}:"):
            continue
        if question.changes and not changes:
            yield question, NOT_ASKED + "it needs --change"
            continue
        try:
            yield question, question.ask(backend)
        except AcceleratorError as error:
            yield question, f"{NOT_ASKED}{error}"


def main() -> int:
    """Print the answers, and return 1 if one differs from the simulator's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--change", action="store_true")
    changes = parser.parse_args().change
    asked = []
    for backend in (AscendBackend(), NvidiaBackend()):
        try:
            backend.open()
        except AcceleratorError as error:
            print(f"{backend.vendor}: {NOT_ASKED}{error}")
        else:
            asked += answers(backend, changes)
    differs = False
    for question, answer in asked:
        same = answer == question.expected or answer.startswith(NOT_ASKED)
        differs |= not same
        print(
            f"{question.name}: {answer}"
            + ("" if answer.startswith(NOT_ASKED) else f" ({'as simulated' if same else 'DIFFERS'})")
        )
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
