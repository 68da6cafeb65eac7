# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files of each machine agree with its description, and the plan for their overlay on a system is correct."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest
from accelerator_simulator import nvidia_files
from accelerator_simulator.description import Settings, gpu_uuid
from accelerator_simulator.entries import Link, Node, Tree
from accelerator_simulator.errors import SimulatorError
from accelerator_simulator.hardware import Machine, load_catalogue, load_machine
from accelerator_simulator.host import Surroundings, choose_majors, merge_proc_devices
from accelerator_simulator.place import Folder, Layer, Original, plan_layers
from accelerator_simulator.trees import cpu_mask, cpu_numbers, whole_tree

FILES = Path(__file__).resolve().parents[3] / "roles" / "simulator" / "files"
CATALOGUE = load_catalogue(FILES)
NAMES = sorted(path.stem for path in (FILES / "machines").glob("*.json"))
SETTINGS = Settings(identity="node1", driver_version="580.95.05", cuda_version="13.0")
HOST_DEVICES = "Character devices:\n  1 mem\n236 ttyHOST\n254 ndctl\n\nBlock devices:\n  7 loop\n"


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def tree_of(machine: Machine) -> Tree:
    return whole_tree(
        machine,
        CATALOGUE,
        SETTINGS,
        choose_majors(HOST_DEVICES, vendors=machine.vendors),
        Surroundings(HOST_DEVICES, "loop 1 0 - Live 0x0\n", 12),
    )


@pytest.fixture(scope="module", params=NAMES)
def placed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, Path]:
    """Return a machine and the directory with its files. Tests only read it."""
    machine = load_machine(FILES, request.param, CATALOGUE)
    root = tmp_path_factory.mktemp("root")
    Folder(root).place(tree_of(machine))
    return machine, root


def test_the_real_path_of_each_function_starts_at_its_root_bus(placed: tuple[Machine, Path]) -> None:
    machine, root = placed
    numa = dict(machine.roots)
    shown = sorted(names(root / "sys/bus/pci/devices"))
    assert shown == sorted(device.address for device in machine.devices)
    for address in shown:
        real = os.path.realpath(root / "sys/bus/pci/devices" / address)
        parts = Path(real).relative_to(root / "sys").parts
        assert parts[0] == "devices"
        assert re.fullmatch(r"pci[0-9a-f]{4}:[0-9a-f]{2}", parts[1])
        assert parts[-1] == address
        assert int(Path(real, "numa_node").read_text()) == numa[parts[1]]


def test_sysfs_of_a_gpu_agrees_with_its_board(placed: tuple[Machine, Path]) -> None:
    machine, root = placed
    for gpu in machine.gpus:
        board = CATALOGUE.boards[gpu.board or ""]
        here = root / "sys/bus/pci/devices" / gpu.address
        assert (here / "vendor").read_text().strip() == "0x10de"
        assert (here / "device").read_text().strip() == board.pci["device"]
        assert (here / "class").read_text().strip() == board.pci["class"]
        assert (here / "local_cpulist").read_text().strip() == machine.numa_node(gpu.numa).cpus
        assert (here / "driver").resolve() == root / "sys/bus/pci/drivers/nvidia"
        assert (root / "sys/bus/pci/drivers/nvidia" / gpu.address).resolve() == here.resolve()
        group = (here / "iommu_group").resolve()
        assert (group / "devices" / gpu.address).resolve() == here.resolve()
        uevent = dict(line.split("=", 1) for line in (here / "uevent").read_text().splitlines())
        assert uevent["PCI_SLOT_NAME"] == gpu.address
        assert uevent["PCI_ID"].lower() == f"10de:{board.pci['device'][2:]}"


def test_configuration_space_repeats_the_other_files(placed: tuple[Machine, Path]) -> None:
    machine, root = placed
    speeds = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
    for device in machine.devices:
        here = root / "sys/bus/pci/devices" / device.address
        space = (here / "config").read_bytes()
        vendor, product = struct.unpack_from("<HH", space, 0)
        assert f"0x{vendor:04x}" == (here / "vendor").read_text().strip()
        assert f"0x{product:04x}" == (here / "device").read_text().strip()
        assert f"0x{int.from_bytes(space[9:12], 'little'):06x}" == (here / "class").read_text().strip()
        capability = space[0x34]
        while space[capability] != 0x10:
            capability = space[capability + 1]
            assert capability, "no PCI Express capability in the list"
        (link,) = struct.unpack_from("<H", space, capability + 0x12)
        assert (here / "current_link_speed").read_text().startswith(speeds[link & 0xF] + " GT/s")
        assert (here / "current_link_width").read_text().strip() == str(link >> 4 & 0x3F)
        if space[0x0E] & 0x7F == 1:
            below = {path.name for path in here.resolve().iterdir() if re.match(r"[0-9a-f]{4}:", path.name)}
            assert below
            assert {int(name[5:7], 16) for name in below} == {space[0x19]}
            assert (here / "secondary_bus_number").read_text().strip() == str(space[0x19])


def test_memory_windows_do_not_overlap(placed: tuple[Machine, Path]) -> None:
    machine, root = placed
    windows = []
    for device in machine.devices:
        for line in (root / "sys/bus/pci/devices" / device.address / "resource").read_text().splitlines():
            start, end, flags = (int(word, 16) for word in line.split())
            if flags:
                assert start % (end - start + 1) == 0, "a window is aligned to its size"
                windows.append((start, end))
    windows.sort()
    assert windows
    assert all(before[1] < after[0] for before, after in zip(windows, windows[1:]))


def test_proc_names_every_gpu_with_its_identity(placed: tuple[Machine, Path]) -> None:
    machine, root = placed
    assert sorted(names(root / "proc/driver/nvidia/gpus")) == sorted(gpu.address for gpu in machine.gpus)
    for gpu in machine.gpus:
        lines = (root / "proc/driver/nvidia/gpus" / gpu.address / "information").read_text().splitlines()
        facts = {key.strip(): value.strip() for key, value in (line.split(":", 1) for line in lines)}
        assert facts["GPU UUID"] == gpu_uuid("node1", gpu.address)
        assert facts["Device Minor"] == str(gpu.minor)
        assert facts["Bus Location"] == gpu.address
        assert facts["Model"] == CATALOGUE.boards[gpu.board or ""].name
        numa = root / "proc/driver/nvidia/gpus" / gpu.address / "numa_status"
        assert numa.exists() == (gpu.memory_numa is not None)
    partitioned = {gpu.minor for gpu in machine.gpus if CATALOGUE.boards[gpu.board or ""].mig}
    shown = {int(name[3:]) for name in names(root / "proc/driver/nvidia/capabilities") if name.startswith("gpu")}
    assert shown == partitioned
    assert "580.95.05" in (root / "proc/driver/nvidia/version").read_text()
    assert (root / "proc/modules").read_text().splitlines()[-1].startswith("loop ")


def test_placing_twice_changes_nothing_and_removal_is_complete(tmp_path: Path) -> None:
    tree = tree_of(load_machine(FILES, "mixed", CATALOGUE))
    directory = Folder(tmp_path)
    assert set(directory.place(tree)) >= {path for path, entry in tree.items() if isinstance(entry, Node)}
    assert directory.place(tree) == []
    (tmp_path / "dev/nvidia0").unlink()
    assert directory.place(tree) == ["/dev/nvidia0"]
    assert directory.remove()
    assert not directory.remove()
    assert sorted(names(tmp_path)) == ["run"]


def test_another_machine_leaves_no_trace_of_the_one_before(tmp_path: Path) -> None:
    directory = Folder(tmp_path)
    for name in ("8xH100", "1xL4"):
        tree = tree_of(load_machine(FILES, name, CATALOGUE))
        directory.place(tree)
    present = {
        "/" + str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_symlink() or path.is_file()
    }
    assert present == {path for path in tree if not (tmp_path / path[1:]).is_dir() or isinstance(tree[path], Link)} | {
        "/run/accelerator-simulator/placed.json"
    }


@pytest.mark.parametrize("name", NAMES)
def test_device_node_majors_equal_proc_devices(name: str) -> None:
    tree = tree_of(load_machine(FILES, name, CATALOGUE))
    nodes = {path: entry for path, entry in tree.items() if isinstance(entry, Node)}
    listed = {
        line.split()[1]: int(line.split()[0])
        for line in tree["/proc/devices"].content.decode().split("\n\n")[0].splitlines()[1:]
    }  # type: ignore[union-attr]
    assert nodes["/dev/nvidiactl"] == Node(195, 255)
    assert nodes["/dev/nvidia-modeset"] == Node(195, 254)
    assert not {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} & set(tree), "a boot does not create them"
    assert tree[f"/dev/char/{listed['nvidia-uvm']}:1"] == Link("../nvidia-uvm-tools")
    assert nodes["/dev/nvidia-caps/nvidia-cap1"] == Node(listed["nvidia-caps"], 1, 0o400)
    assert nodes["/dev/nvidia-caps/nvidia-cap2"] == Node(listed["nvidia-caps"], 2, 0o444)
    # Numbers of nodes are unique, and each node has its link
    assert len({(node.major, node.minor) for node in nodes.values()}) == len(nodes)
    for path, node in nodes.items():
        assert tree[f"/dev/char/{node.major}:{node.minor}"] == Link("../" + path[len("/dev/") :])


@pytest.mark.parametrize(
    "name", ["2xH100-2x310P", *sorted(path.stem for path in (FILES / "ascend/machines").glob("*"))]
)
def test_device_nodes_of_npus_have_the_names_and_numbers_of_the_driver(name: str) -> None:
    machine = load_machine(FILES, name, CATALOGUE)
    tree = tree_of(machine)
    nodes = {path[5:]: entry for path, entry in tree.items() if isinstance(entry, Node)}
    devices = tree["/proc/devices"].content.decode()  # type: ignore[union-attr]
    listed = {line.split()[1]: int(line.split()[0]) for line in devices.split("\n\n")[0].splitlines()[1:]}
    assert {path for path in nodes if path.startswith("davinci") and path[7:].isdigit()} == {
        f"davinci{npu.physical}" for _device, npu in machine.chips
    }
    for _device, npu in machine.chips:
        assert nodes[f"davinci{npu.physical}"] == Node(listed["devdrv-cdev"], npu.physical, 0o660, "HwHiAiUser")
    assert nodes["davinci_manager"] == Node(listed["davinci_manager"], 0, 0o660, "HwHiAiUser")
    assert len({(node.major, node.minor) for node in nodes.values()}) == len(nodes)
    assert ("drv_pcie_host" in tree["/proc/modules"].content.decode()) == bool(machine.npus)  # type: ignore[union-attr]
    assert any(path.startswith("/proc/driver/nvidia") for path in tree) == bool(machine.gpus)
    assert any("nvidia" in path for path in tree) == bool(machine.gpus)


def test_majors_avoid_the_hosts_and_stay_over_reboots() -> None:
    first = choose_majors(HOST_DEVICES)
    assert first.by_name["nvidia-caps"] == 235
    assert len({*first.by_name.values(), 1, 236, 254, 195}) == 10
    later = choose_majors("Character devices:\n  1 mem\n", first.by_name)
    assert later.by_name == first.by_name
    taken = choose_majors("Character devices:\n235 other\n", first.by_name)
    assert taken.by_name["nvidia-caps"] == 236


def test_proc_devices_stays_sorted_and_keeps_the_hosts_lines() -> None:
    machine = load_machine(FILES, "8xH100", CATALOGUE)
    text = merge_proc_devices(HOST_DEVICES, nvidia_files.characters(machine, choose_majors(HOST_DEVICES)))
    characters, blocks = text.split("\n\n")
    numbers = [int(line.split()[0]) for line in characters.splitlines()[1:]]
    assert numbers == sorted(numbers)
    assert {"  1 mem", "236 ttyHOST", "254 ndctl", "195 nvidiactl"} <= set(characters.splitlines())
    assert blocks == "Block devices:\n  7 loop\n"


def test_the_minor_map_is_the_one_of_nvidia_modprobe() -> None:
    lines = nvidia_files.mig_minors().splitlines()
    pairs = dict(line.rsplit(" ", 1) for line in lines)
    assert (pairs["config"], pairs["monitor"]) == ("1", "2")
    assert pairs["gpu0/gi0/access"] == "3"
    assert pairs["gpu0/gi0/ci0/access"] == "4"
    assert pairs["gpu1/gi2/ci3/access"] == str(3 + 135 + 18 + 1 + 3)
    assert lines[-1] == "gpu31/gi14/ci7/access 4322"


def test_cpu_lists() -> None:
    assert cpu_numbers("0-2,8") == [0, 1, 2, 8]
    assert cpu_mask("0-2,8") == "00000107"
    assert cpu_mask("32-63") == "ffffffff,00000000"


def host(root: Path) -> Original:
    """Create a small system: one device, a link, and modules."""
    for path in (
        "sys/devices/pci0000:00/0000:00:01.0",
        "sys/devices/virtual",
        "sys/bus/pci/drivers/virtio-pci",
        "sys/module/loop",
        "proc/driver",
        "dev",
    ):
        (root / path).mkdir(parents=True)
    (root / "sys/devices/uevent").write_text("")
    (root / "sys/bus/pci/devices").mkdir()
    (root / "sys/bus/pci/devices/0000:00:01.0").symlink_to("../../../devices/pci0000:00/0000:00:01.0")
    (root / "sys/kernel").mkdir()
    (root / "sys/bus/pci/drivers_probe").write_text("")
    (root / "proc/devices").write_text(HOST_DEVICES)
    (root / "proc/modules").write_text("")
    return Original(str(root))


def test_layers_keep_all_entries_of_the_system(tmp_path: Path) -> None:
    layers = plan_layers(tree_of(load_machine(FILES, "1xL4", CATALOGUE)), host(tmp_path))
    by_path = {layer.path: layer for layer in layers}
    assert set(by_path) == {
        "/proc/driver",
        "/proc/devices",
        "/proc/modules",
        "/sys/bus/pci/devices",
        "/sys/bus/pci/drivers",
        "/sys/bus/pci/drivers_probe",
        "/sys/devices",
        "/sys/kernel",
        "/sys/module",
    }
    assert by_path["/sys/devices"].kept == (("pci0000:00", "directory"), ("uevent", "file"), ("virtual", "directory"))
    assert by_path["/sys/bus/pci/devices"].kept == (("0000:00:01.0", "link:../../../devices/pci0000:00/0000:00:01.0"),)
    assert by_path["/sys/module"].kept == (("loop", "link:/run/accelerator-simulator/original/sys/module/loop"),)
    assert by_path["/proc/devices"] == Layer("/proc/devices", (), ("/proc/devices",), single_file=True)
    entries = [path for layer in layers for path in layer.entries]
    tree = tree_of(load_machine(FILES, "1xL4", CATALOGUE))
    assert sorted(entries) == sorted(path for path in tree if not path.startswith("/dev/"))


def test_address_of_the_host_is_rejected(tmp_path: Path) -> None:
    original = host(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:3b:00.0").symlink_to("../../../devices/pci0000:00/0000:3b:00.0")
    with pytest.raises(SimulatorError, match=r"/sys/bus/pci/devices/0000:3b:00\.0 exists .*\(pci_domain_offset\)"):
        plan_layers(tree_of(load_machine(FILES, "1xL4", CATALOGUE)), original)


def test_system_without_sysfs_is_rejected(tmp_path: Path) -> None:
    original = host(tmp_path)
    (tmp_path / "sys/module").rename(tmp_path / "elsewhere")
    with pytest.raises(SimulatorError, match="/sys has no parent directory of /sys/module"):
        plan_layers(tree_of(load_machine(FILES, "1xL4", CATALOGUE)), original)
