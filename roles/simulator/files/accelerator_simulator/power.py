# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Power the machine on and off. A plan is computed first from the placed and loaded state, and then applied."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import persistence_daemon
from .ascend_files import NODE_MODE, OWNER, chip_node
from .boards import ARCHITECTURES
from .bus import Bus
from .description import Settings, render
from .entries import Node, Tree
from .errors import DescriptionError, SimulatorError
from .fabric_manager import Member
from .hardware import Catalogue, Device, Machine, load_catalogue, load_machine
from .host import Majors, Surroundings, choose_majors
from .kernel_module import KernelModule
from .library import NVIDIA, VENDORS, Library, Vendor, find_library, folder_of, library_of, loaded_libraries
from .npu_description import NpuSettings, render_npus
from .nvidia_files import MIG_CONFIG_MINOR, MIG_MONITOR_MINOR, UVM_NODES, capability
from .place import Folder, System, write_tree
from .trees import whole_tree

CONFIGURATION = "/etc/accelerator-simulator/machine.json"
STATE_FOLDER = "/var/lib/accelerator-simulator"
RECORD = f"{STATE_FOLDER}/power.json"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
DATA = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Configuration:
    """The administrator's configuration. ``library`` holds more statements for the library (``operation-delay`` …).

    Fields that begin with ``ascend`` apply to NPUs, the others to GPUs or to both. ``nvidia_module`` is the path of
    the simulated NVIDIA kernel module (kernel_module.py), which determines whether the driver is loaded, and its
    version. If it is empty, ``driver_version`` is always loaded.
    """

    machine: str = "8xH100"
    identity: str = ""
    driver_version: str = "580.95.05"
    cuda_version: str = "13.0"
    cluster_uuid: str | None = None
    clique: int | None = None
    pci_domain_offset: int = 0
    library: Mapping[str, Any] = field(default_factory=dict)
    ascend_driver_version: str = "25.2.0"
    ascend_library: Mapping[str, Any] = field(default_factory=dict)
    nvidia_module: str = ""


@dataclass(frozen=True)
class Plan:
    """The actions of a power-on. ``library`` is ``load``, ``power-cycle``, or None, for each vendor's library."""

    place: bool
    withdraw: bool
    library: str | None
    reason: str

    @property
    def changes(self) -> bool:
        """Return whether the plan contains an action."""
        return self.place or self.withdraw or self.library is not None


def read_configuration(path: Path, overrides: Mapping[str, Any]) -> Configuration:
    """Return the configuration file's values, if it exists, overridden by the command line."""
    values: dict[str, Any] = {}
    if path.is_file():
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DescriptionError(f"{path}: not JSON: {error}") from error
    values.update({key: value for key, value in overrides.items() if value is not None})
    # Ansible before 2.19 cannot write a null
    values = {key: value for key, value in values.items() if value not in (None, "")}
    known = {entry.name for entry in dataclasses.fields(Configuration)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise DescriptionError(
            f"{path}: unknown keys {', '.join(unknown)}, expected some of {', '.join(sorted(known))}"
        )
    return Configuration(**values)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a power-on; empty if it is missing or not readable."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:
        return {}


def shift_domain(machine: Machine, offset: int) -> Machine:
    """Return the machine with every PCI domain raised by ``offset``, for hosts whose own devices use the same
    addresses.
    """
    if not offset:
        return machine

    def moved(text: str) -> str:
        prefix, rest = ("pci", text[3:]) if text.startswith("pci") else ("", text)
        return f"{prefix}{int(rest[:4], 16) + offset:04x}{rest[4:]}"

    def moved_device(device: Device) -> Device:
        return dataclasses.replace(
            device, address=moved(device.address), path=tuple(moved(part) for part in device.path)
        )

    return dataclasses.replace(
        machine,
        roots=tuple((moved(bus), node) for bus, node in machine.roots),
        devices=tuple(moved_device(device) for device in machine.devices),
        nvlink_pairs=tuple((moved(first), moved(second)) for first, second in machine.nvlink_pairs),
    )


def plan_power_on(
    previous: Mapping[str, Any], fingerprint: str, description: str, boot_id: str, placed: bool, loaded: bool
) -> Plan:
    """Return the plan of a power-on.

    ``previous`` is the record of the last one: ``boot_id``, ``fingerprint`` of the trees, and ``description`` (a
    digest of the loaded text). ``placed`` and ``loaded`` are the current state.
    """
    fits = previous.get("fingerprint") == fingerprint and previous.get("boot_id") == boot_id
    same_trees = placed and fits
    if not loaded:
        library, reason = "load", "no machine was loaded"
    elif previous.get("description") != description:
        library, reason = "load", "the machine differs from the one that was loaded"
    elif previous.get("boot_id") != boot_id:
        library, reason = "power-cycle", "the system has booted since"
    else:
        library, reason = None, "powered on already" if same_trees else "files are placed again"
    return Plan(place=not same_trees, withdraw=placed and not same_trees, library=library, reason=reason)


class Power:
    """One simulated machine on this system, or below a directory (``root``)."""

    def __init__(
        self,
        configuration: Configuration,
        root: Path | None = None,
        data: Path = DATA,
        library_folder: Path | None = None,
        use_library: bool = True,
    ) -> None:
        self.configuration = configuration
        self.root = "" if root is None else str(root.resolve())
        self.placer: Folder | System = System() if root is None else Folder(root.resolve())
        self.library_folder = library_folder
        self.use_library = use_library
        self.catalogue: Catalogue = load_catalogue(data)
        self.machine = shift_domain(
            load_machine(data, configuration.machine, self.catalogue), configuration.pci_domain_offset
        )
        self.module = KernelModule(self.root, configuration.nvidia_module) if configuration.nvidia_module else None
        self.record_path = Path(self.root + RECORD)
        self.description_paths = {
            vendor: Path(self.root + STATE_FOLDER) / f"{vendor}.txt" for vendor in self.machine.vendors
        }

    @property
    def nvidia_version(self) -> str:
        """Return the version of the loaded NVIDIA driver; empty if none is loaded."""
        return self.configuration.driver_version if self.module is None else self.module.version()

    def settings(self, majors: Majors) -> Settings:
        """Return the configuration as settings of the description."""
        chosen = self.configuration
        return Settings(
            identity=chosen.identity or os.uname().nodename,
            driver_version=self.nvidia_version,
            cuda_version=chosen.cuda_version,
            proc_root=self.root + "/proc/driver/nvidia",
            dev_root=self.root + "/dev",
            sys_root=self.root + "/sys",
            caps_major=majors.by_name.get("nvidia-caps", 0),
            cluster_uuid=chosen.cluster_uuid,
            clique=chosen.clique,
            library=chosen.library,
            ascend_driver_version=chosen.ascend_driver_version,
        )

    def fabric_members(self) -> list[Member]:
        """Return the GPUs as the fabric manager reports them: from Hopper on only by module ID."""
        library = Library(find_library(folder_of(NVIDIA, self.root, self.library_folder)))
        uuids = {str(gpu["pci_address"]).lower()[-12:]: str(gpu["uuid"]) for gpu in library.devices()}
        found = []
        for device in self.machine.gpus:
            if device.module is None or device.board is None:
                continue
            if ARCHITECTURES[self.catalogue.boards[device.board].architecture] < ARCHITECTURES["hopper"]:
                # The fabric manager prints the domain with eight digits.
                found.append(Member(device.module, uuids[device.address], f"0000{device.address}".upper()))
            else:
                found.append(Member(device.module))
        return sorted(found, key=lambda member: member.module)

    def descriptions(self, majors: Majors) -> dict[str, str]:
        """Return the text that each vendor's library loads."""
        settings, texts = self.settings(majors), {}
        if self.machine.gpus and settings.driver_version:
            texts["nvidia"] = render(self.machine, self.catalogue, settings)
        if self.machine.npus:
            npu_settings = NpuSettings(
                identity=settings.identity,
                driver_version=settings.ascend_driver_version,
                dev_root=settings.dev_root,
                sys_root=settings.sys_root,
                etc_root=self.root + "/etc",
                slice_major=majors.by_name["vdavinci"],
                library=self.configuration.ascend_library,
            )
            texts["ascend"] = render_npus(self.machine, self.catalogue, npu_settings)
        return texts

    def libraries(self) -> dict[str, Library]:
        """Return the libraries of this machine's vendors, if libraries are used.

        NVIDIA's library belongs to its driver. It is omitted if the driver is not loaded or the library is not
        installed.
        """
        if not self.use_library:
            return {}
        vendors = [VENDORS[word] for word in self.machine.vendors if self.has_library(VENDORS[word])]
        return {
            vendor.word: Library(find_library(folder_of(vendor, self.root, self.library_folder), vendor), vendor)
            for vendor in vendors
        }

    def has_library(self, vendor: Vendor) -> bool:
        """Return whether a vendor's library can be used: always, unless its driver is installed separately."""
        if vendor is not NVIDIA or self.module is None:
            return True
        folder = folder_of(vendor, self.root, self.library_folder)
        return bool(self.nvidia_version) and (folder / f"libnvidia-ml.so.{self.nvidia_version}").exists()

    def is_loaded(self, library: Library) -> bool:
        """Return whether a library of the configured version has a loaded machine."""
        chosen = self.configuration
        version = self.nvidia_version if library.vendor is NVIDIA else chosen.ascend_driver_version
        folder = folder_of(library.vendor, self.root, self.library_folder)
        return (folder / (library.vendor.state % version)).exists() and library.loaded() is not None

    def boot_id(self) -> str:
        """Return the system's boot ID, which distinguishes a power cycle from a second power-on."""
        return Path(BOOT_ID).read_text(encoding="ascii").strip()

    def record(self) -> dict[str, Any]:
        """Return the record of the last power-on; empty before the first."""
        return read_record(self.record_path)

    def surroundings(self) -> Surroundings:
        """Return the host's own state. Do not read it while a tree is mounted over it."""
        if self.root:
            return Surroundings()
        folder = Path("/sys/kernel/iommu_groups")
        groups = [int(group.name) for group in folder.iterdir()] if folder.is_dir() else []
        modules = Path("/proc/modules")
        return Surroundings(
            proc_devices=Path("/proc/devices").read_text(encoding="ascii"),
            proc_modules=modules.read_text(encoding="ascii") if modules.is_file() else None,
            iommu_base=max(groups, default=-1) + 1,
            vfio=not Path("/sys/bus/pci/drivers/vfio-pci").exists(),
        )

    def power_on(self, check: bool = False) -> Plan:
        """Place the files, and load or power-cycle the libraries, as needed. Return the plan, which ``check`` only
        computes.
        """
        previous, boot_id, fingerprint = self.record(), self.boot_id(), self.fingerprint()
        placed, libraries = bool(self.placer.placed()), self.libraries()
        loaded = all(self.is_loaded(library) for library in libraries.values())
        # The placed trees hide the host's own majors, but these have been chosen already.
        vendors, chosen = self.machine.vendors, previous.get("majors")
        majors = (
            Majors({**choose_majors("", vendors=vendors).by_name, **chosen})
            if placed and chosen
            else choose_majors(self.surroundings().proc_devices, chosen, vendors)
        )
        texts = self.descriptions(majors)
        described = digest("".join(texts.values()))
        plan = plan_power_on(previous, fingerprint, described, boot_id, placed, loaded)
        if not libraries:
            plan = dataclasses.replace(plan, library=None)
        if check:
            return plan
        if self.module is not None:
            self.module.begin()
        if not plan.changes:
            return plan
        if previous.get("boot_id") != boot_id:
            for path in UVM_NODES:  # other programs created them in an earlier boot
                Path(self.root + path).unlink(missing_ok=True)
        if plan.withdraw:
            self.placer.remove()
        if plan.place:
            self.refuse_real_silicon()
            self.placer.place(
                whole_tree(self.machine, self.catalogue, self.settings(majors), majors, self.surroundings())
            )
        self.forget_descriptions(but=texts)
        for vendor, text in texts.items():
            self.description_paths[vendor].parent.mkdir(parents=True, exist_ok=True)
            self.description_paths[vendor].write_text(text, encoding="utf-8")
        for vendor, library in libraries.items():
            if plan.library is not None:
                path = self.description_paths[vendor]
                library.command(f"load {path}" if plan.library == "load" else plan.library)
            else:
                self.restore(library, majors)
        written = {
            "boot_id": boot_id,
            "fingerprint": fingerprint,
            "description": described,
            "machine": self.machine.name,
            "majors": dict(majors.by_name),
        }
        self.record_path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.record_path.with_suffix(".new")
        temporary.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.record_path)
        return plan

    def refuse_real_silicon(self) -> None:
        """Raise a SimulatorError if a vendor's own driver is loaded on this system."""
        signs = {"NVIDIA": "/proc/driver/nvidia/version", "Ascend": "/dev/davinci_manager"}
        for name, sign in signs.items():
            if not self.root and Path(sign).exists():
                raise SimulatorError(
                    f"{sign} exists: a real {name} driver is loaded here; simulate on a machine without one"
                )

    def bus(self) -> Bus:
        """Return the simulated PCI bus of the machine that is powered on."""
        library = self.libraries().get("nvidia")

        def in_use(address: str) -> bool:
            gpu = of(address)
            held = gpu.get("persistence_mode") and persistence_daemon.is_running(self.root)
            return bool(gpu.get("open") or gpu.get("processes") or held)

        def of(address: str) -> Mapping[str, Any]:
            shown = library.devices() if library is not None else ()
            return next((gpu for gpu in shown if short_address(gpu) == address), {})

        def told(command: str, address: str) -> None:
            if library is not None:
                library.command(f"{command} {address}")

        majors = self.placed_majors()
        nodes = {device.address: chip_node(npu.physical, majors) for device, npu in self.machine.chips}
        attached, detached = partial(told, "driver-bind"), partial(told, "driver-unbind")
        return Bus(self.root, majors.by_name, in_use, attached, nodes=nodes, detached=detached)

    def placed_majors(self) -> Majors:
        """Return the majors of the machine that is powered on."""
        first = choose_majors("", vendors=self.machine.vendors).by_name
        return Majors({**first, **self.record().get("majors", {})})

    def load_driver(self) -> Plan:
        """Load NVIDIA's driver like modprobe. Raise a SimulatorError if that is not possible."""
        self._module().load()
        return self.power_on()

    def unload_driver(self) -> Plan:
        """Unload NVIDIA's driver like rmmod. Raise a SimulatorError if a GPU is in use."""
        module = self._module()
        library = self.libraries().get("nvidia")
        held = (
            [short_address(gpu) for gpu in library.devices() if gpu.get("open") or gpu.get("processes")]
            if library
            else []
        )
        if held:
            raise SimulatorError(f"NVIDIA's driver is in use: programs have {', '.join(held)} open")
        module.unload()
        return self.power_on()

    def _module(self) -> KernelModule:
        if self.module is None:
            raise SimulatorError(
                "the driver of this machine's GPUs is always loaded; name a kernel module with nvidia_module in its configuration"
            )
        return self.module

    def unplug(self, selection: str, vendor: str | None = None) -> list[str]:
        """Remove devices from the running machine; return their addresses. The selection has the form of a fault's."""
        return self._move(selection, vendor, present=False)

    def plug(self, selection: str, vendor: str | None = None) -> list[str]:
        """Insert removed devices again; return their addresses."""
        return self._move(selection, vendor, present=True)

    def _move(self, selection: str, vendor: str | None, present: bool) -> list[str]:
        library, bus = library_of(loaded_libraries(self.root, self.library_folder), selection, vendor), self.bus()
        before = library.devices()
        library.command(f"{'plug' if present else 'unplug'} {selection}")
        moved = [
            short_address(now) for was, now in zip(before, library.devices()) if was["unplugged"] != now["unplugged"]
        ]
        return [address for address in moved if (bus.plug(address) if present else bus.unplug(address))]

    def fingerprint(self) -> str:
        """Return a digest of the placed files and of the way they are placed, so that an unchanged machine is not
        placed again.
        """
        majors = choose_majors("", vendors=self.machine.vendors)
        tree = whole_tree(self.machine, self.catalogue, self.settings(majors), majors, Surroundings())
        way = (Path(__file__).resolve().parent / "place.py").read_bytes()
        return hashlib.sha256(repr(sorted(tree.items())).encode() + way).hexdigest()

    def restore(self, library: Library, majors: Majors) -> None:
        """Write the files of existing partitions. Needed if files are placed again without a power cycle."""
        shown = library.command("show")
        if library.vendor is NVIDIA:
            tree, plain = capability_files(shown), True
        else:
            tree, plain = slice_nodes(shown, majors), bool(self.root)
        write_tree("", tree, list(tree), plain_nodes=plain)

    def power_off(self) -> bool:
        """Remove the files. The library keeps its state, like boards in a machine that is switched off."""
        return self.placer.remove()

    def forget(self) -> bool:
        """Remove the record of :meth:`power_on`, after :meth:`power_off`."""
        found = False
        if self.record_path.exists():
            self.record_path.unlink()
            found = True
        return self.forget_descriptions() or found

    def forget_descriptions(self, but: Iterable[str] = ()) -> bool:
        """Remove the texts that libraries loaded, except for the vendors in ``but``; return whether there were any."""
        paths = [Path(self.root + STATE_FOLDER) / f"{vendor}.txt" for vendor in VENDORS if vendor not in but]
        there = [path for path in paths if path.exists()]
        for path in there:
            path.unlink()
        return bool(there)


def digest(text: str) -> str:
    """Return the SHA-256 of a text in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def short_address(device: Mapping[str, Any]) -> str:
    """Return the PCI address of a device as in sysfs. NVML's has four more digits of the domain."""
    return str(device["pci_address"]).lower()[-len("0000:00:00.0") :]


def slice_nodes(shown: Mapping[str, Any], majors: Majors) -> Tree:
    """Return the device nodes of the vNPUs that ``show`` lists."""
    return {
        f"{shown['dev_root']}/vdavinci{each['vid']}": Node(majors.by_name["vdavinci"], each["vid"], NODE_MODE, OWNER)
        for npu in shown["npus"]
        for each in npu["slices"]
    }


def capability_files(shown: Mapping[str, Any]) -> Tree:
    """Return /proc/driver/nvidia/capabilities for the listed state: each partitionable GPU and its existing instances."""
    tree: Tree = {}
    for gpu in shown["gpus"]:
        if gpu["mig"] == "none":
            continue
        folder = f"{shown['proc_root']}/capabilities/gpu{gpu['minor']}/mig"
        tree[f"{folder}/config"] = capability(MIG_CONFIG_MINOR, 0o400)
        tree[f"{folder}/monitor"] = capability(MIG_MONITOR_MINOR, 0o444)
        for instance in gpu["gpu_instances"]:
            for entry in (instance, *instance["compute_instances"]):
                tree[entry["capability"]] = capability(entry["capability_minor"], 0o444)
    return tree
