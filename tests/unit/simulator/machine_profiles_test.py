# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Each machine profile: its PCI topology is possible, invalid profiles are refused, and its text has the documented format."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerator_simulator.description import Settings, gpu_uuid, parse, render, serial_number
from accelerator_simulator.errors import DescriptionError
from accelerator_simulator.hardware import Machine, address_key, load_catalogue, load_machine, parse_machine
from accelerator_simulator.power import shift_domain
from accelerator_simulator.trees import cpu_numbers

FILES = Path(__file__).resolve().parents[3] / "roles" / "simulator" / "files"
CATALOGUE = load_catalogue(FILES)
NAMES = sorted(path.stem for path in (FILES / "machines").glob("*.json"))
MACHINES = {name: load_machine(FILES, name, CATALOGUE) for name in NAMES}
SETTINGS = Settings(identity="node1", driver_version="580.95.05", cuda_version="13.0")
EXPECTED = {
    "8xH100": {"h100-80": 8}, "16xH100": {"h100-80": 16}, "8xH200": {"h200-141": 8}, "8xB200": {"b200-180": 8}, "8xA100-40": {"a100-40": 8},
    "4xGB200": {"gb200-186": 4},
    "4xA30": {"a30": 4}, "2xRTX-PRO-6000": {"rtx-pro-6000": 2}, "1xL4": {"l4": 1}, "1xT4": {"t4": 1}, "mixed": {"h100-80": 2, "a30": 2, "l4": 1},
}  # fmt: skip


def boards(machine: Machine) -> dict[str, int]:
    found: dict[str, int] = {}
    for gpu in machine.gpus:
        assert gpu.board is not None
        found[gpu.board] = found.get(gpu.board, 0) + 1
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_profile_contains_the_devices_in_its_name(name: str) -> None:
    assert boards(MACHINES[name]) == EXPECTED[name]


@pytest.mark.parametrize("name", NAMES)
def test_bridges_own_the_buses_of_devices_behind_them(name: str) -> None:
    machine = MACHINES[name]
    by_address = {device.address: device for device in machine.devices}
    behind: dict[str, set[int]] = {}
    for device in machine.devices:
        bus = address_key(device.address)[1]
        parent = device.path[-2]
        if parent in by_address:
            assert by_address[parent].kind in ("root-port", "switch-upstream", "switch-downstream"), device
            assert bus > address_key(parent)[1], f"{device.address} is on no bus above its bridge's"
            behind.setdefault(parent, set()).add(bus)
        else:
            assert parent == f"pci{device.address[:7]}", f"{device.address} is not on the bus of {parent}"
    # A bridge has one secondary bus, and no two bridges share one
    assert all(len(buses) == 1 for buses in behind.values())
    secondary = [(address_key(bridge)[0], *buses) for bridge, buses in behind.items()]
    assert len(set(secondary)) == len(secondary)


@pytest.mark.parametrize("name", NAMES)
def test_numa_nodes_share_no_cpu_and_distances_are_symmetric(name: str) -> None:
    machine = MACHINES[name]
    cpus = [number for node in machine.numa for number in cpu_numbers(node.cpus)]
    assert len(set(cpus)) == len(cpus)
    table = [node.distances for node in machine.numa]
    assert table == [tuple(column) for column in zip(*table)]
    assert {node for _bus, node in machine.roots} == {node.node for node in machine.numa}


@pytest.mark.parametrize("name", ["8xH100", "8xA100-40", "8xH200", "8xB200", "2xRTX-PRO-6000"])
def test_each_gpu_shares_a_switch_with_a_nic(name: str) -> None:
    machine = MACHINES[name]
    nics = [device.path[:3] for device in machine.devices if device.kind == "nic"]
    assert all(gpu.path[:3] in nics for gpu in machine.gpus)


def test_minors_of_the_mixed_machine_are_not_its_indices() -> None:
    minors = [gpu.minor for gpu in MACHINES["mixed"].gpus]
    assert sorted(minor for minor in minors if minor is not None) == list(range(len(minors)))
    assert all(minor != index for index, minor in enumerate(minors[:4]) if index != 1)


def test_another_domain_moves_only_addresses() -> None:
    machine = MACHINES["4xA30"]
    moved = shift_domain(machine, 0x10)
    assert [gpu.address for gpu in moved.gpus] == ["0010" + gpu.address[4:] for gpu in machine.gpus]
    assert moved.gpus[0].path == ("pci0010:30", "0010:30:01.1", "0010:31:00.0")
    assert moved.roots == (("pci0010:30", 0), ("pci0010:b0", 1))
    assert moved.nvlink_pairs[0] == ("0010:31:00.0", "0010:32:00.0")


def _root(data: dict[str, Any]) -> dict[str, Any]:
    return data["roots"][0]


MUTATIONS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown board": (lambda data: _root(data)["devices"][0]["children"][0].update(board="h300"), "is a 'h300'"),
    "a minor twice": (
        lambda data: _root(data)["devices"][0]["children"][0].update(minor=1),
        "device minor occurs twice",
    ),
    "a minor out of range": (
        lambda data: _root(data)["devices"][0]["children"][0].update(minor=32),
        "minors below 32",
    ),
    "an address twice": (
        lambda data: _root(data)["devices"][1].update(address="0000:30:01.1"),
        "PCI address occurs twice",
    ),
    "a malformed address": (
        lambda data: _root(data)["devices"][1].update(address="30:01.1"),
        "'30:01.1': expected dddd:bb:dd.f",
    ),
    "a root on no NUMA node": (lambda data: _root(data).update(numa=7), "on NUMA node 7"),
    "another domain below a root": (
        lambda data: _root(data)["devices"][1].update(address="0001:30:01.2"),
        "another domain",
    ),
    "a distance missing": (lambda data: data["numa"][0].update(distances=[10]), "expected one for each node"),
    "a link to no GPU": (
        lambda data: data.update(nvlink_pairs=[["0000:31:00.0", "0000:ff:00.0"]]),
        "0000:ff:00.0, which is no GPU",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_invalid_machine_is_rejected_with_its_reason(name: str) -> None:
    change, message = MUTATIONS[name]
    data = copy.deepcopy(json.loads((FILES / "machines" / "4xA30.json").read_text(encoding="utf-8")))
    change(data)
    with pytest.raises(DescriptionError, match=re.escape(message)):
        parse_machine(data, CATALOGUE, "4xA30.json")


def test_unknown_machine_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(DescriptionError, match=r"'9xH100' is unknown, expected one of .*8xH100.*mixed"):
        load_machine(FILES, "9xH100", CATALOGUE)


def documented() -> tuple[set[str], set[str]]:
    """Return the statements of the machine and of a GPU, from the tables of the format's documentation."""
    text = (FILES / "nvml" / "MACHINE_FORMAT.md").read_text(encoding="utf-8")
    head, tail = text.split("## `gpu`")
    body = tail.split("## Example")[0]
    return tuple(set(re.findall(r"^\| `([a-z0-9-]+)", part, re.MULTILINE)) for part in (head, body))  # type: ignore[return-value]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_holds_only_documented_statements(name: str) -> None:
    text = render(MACHINES[name], CATALOGUE, SETTINGS)
    machine, gpus = parse(text)
    of_machine, of_gpu = documented()
    assert set(machine) <= of_machine
    assert all(set(gpu) <= of_gpu for gpu in gpus)
    assert all(len(line.encode()) < 1024 for line in text.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_rendered_machine_parses_to_the_same_data(name: str) -> None:
    machine = MACHINES[name]
    _machine, gpus = parse(render(machine, CATALOGUE, SETTINGS))
    assert [gpu["pci-address"] for gpu in gpus] == [device.address for device in machine.gpus]
    for device, gpu in zip(machine.gpus, gpus):
        board = CATALOGUE.boards[device.board or ""]
        assert gpu["name"] == board.name
        assert int(gpu["minor"]) == device.minor
        assert gpu["pci-path"].split("/") == list(device.path)
        assert gpu["pci-device-id"] == f"0x{board.pci['device'][2:]}{board.pci['vendor'][2:]}"
        assert len(gpu.get("nvlink", [])) == board.nvlink["links"]
        if board.mig is None:
            assert gpu["mig"] == "none"
            assert "gpu-instance-profile" not in gpu
            continue
        rows = {int(row["enum"]): row for row in gpu["gpu-instance-profile"]}
        assert len(rows) == len(board.mig.profiles)
        for profile in board.mig.profiles:
            row = rows[profile.enum]
            starts, _colon, size = row["placements"].partition(":")
            assert (row["name"], int(row["id"]), int(row["memory"]), int(row["maximum"])) == (
                profile.name, profile.id, profile.memory_mib, profile.instances)  # fmt: skip
            assert (tuple(map(int, starts.split(","))), int(size)) == (profile.starts, profile.size)
        assert {int(row["gi"]) for row in gpu["compute-instance-profile"]} == set(rows)


def test_nvlink_of_bridged_boards_names_the_neighbour() -> None:
    _machine, gpus = parse(render(MACHINES["4xA30"], CATALOGUE, SETTINGS))
    assert [{link["address"] for link in gpu["nvlink"]} for gpu in gpus] == [
        {"0000:32:00.0"}, {"0000:31:00.0"}, {"0000:b2:00.0"}, {"0000:b1:00.0"}]  # fmt: skip


def test_the_fabric_of_a_rack_can_be_set_and_is_the_same_on_all_its_gpus() -> None:
    settings = Settings("a", "580.95.05", "13.0", cluster_uuid="11111111-2222-3333-4444-555555555555", clique=7)
    _machine, gpus = parse(render(MACHINES["4xGB200"], CATALOGUE, settings))
    assert {gpu["fabric"] for gpu in gpus} == {
        "state=3 status=0 cluster=11111111-2222-3333-4444-555555555555 clique=7 health-mask=0xaa health-summary=1"
    }
    assert len({gpu["platform"] for gpu in gpus}) == 4


def test_identities_are_stable_and_differ_between_machines_and_slots() -> None:
    addresses = [gpu.address for gpu in MACHINES["8xH100"].gpus]
    every = [gpu_uuid(identity, address) for identity in ("node1", "node2") for address in addresses]
    assert len(set(every)) == 16
    assert every[:8] == [gpu_uuid("node1", address) for address in addresses]
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid) for uuid in every)
    assert all(re.fullmatch(r"165\d{10}", serial_number("node1", address)) for address in addresses)


def test_settings_for_the_library_are_written_as_statements() -> None:
    settings = Settings("a", "580.95.05", "13.0", library={"operation-delay": 1000, "profile-info-versions": False})
    machine, _gpus = parse(render(MACHINES["1xL4"], CATALOGUE, settings))
    assert machine["operation-delay"] == "1000"
    assert machine["profile-info-versions"] == "no"
