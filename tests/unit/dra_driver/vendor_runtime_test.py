# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""With a vendor's own container runtime, variables name all devices of a container."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from dra_driver.claims.container_files import with_lists_joined
from dra_driver.config import InvalidConfiguration, parse
from dra_driver.core.host.cdi import ContainerEdits
from dra_driver.core.model import Device, Partition
from dra_driver.core.vendors.registry import BACKENDS, BY_RUNTIME, WITH_NETWORK_TOOLS, create
from hypothesis import given
from hypothesis import strategies as st
from machine_model import Claims, Node

SLICE = "gpu-1-mig-1g10gb-19-0"
VARIABLE = "VISIBLE"


def named(device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
    number = device.index if partition is None else 100 + partition.instance_id
    return ContainerEdits(env=("KIND=x",), lists=((VARIABLE, (str(number),)),))


def run_scene(directory: Path, scene: Callable[[Node, Claims], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        claims = Claims()
        node = Node(directory, claims, count=4)
        node.backend.driver_edits = lambda: ContainerEdits(lists=((VARIABLE, ()),))
        node.backend.device_edits = named
        await node.start()
        try:
            return await scene(node, claims)
        finally:
            node.close()

    return asyncio.run(main())


def test_device_lists_of_a_request_name_all_devices(tmp_path: Path) -> None:
    async def scene(node: Node, claims: Claims) -> Any:
        given_devices = [{"device": f"gpu-{number}", "request": "all"} for number in (3, 0, 2)]
        claim = claims.allocate("a", *given_devices)
        assert (await node.service.prepare([claim]))[claim.uid].error == ""
        return node.cdi(claim.uid)

    document = run_scene(tmp_path, scene)
    assert "containerEdits" not in document
    assert [sorted(each["containerEdits"]["env"]) for each in document["devices"]] == [
        ["KIND=x", f"{VARIABLE}=3,0,2"]
    ] * 3


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["gpu-0", SLICE], "2 requests (r0, r1)"),
        ([{"device": "gpu-0", "request": "r"}, {"device": SLICE, "request": "r"}], "whole devices and partitions"),
    ],
)
def test_contradictory_variables_are_rejected_before_hardware_changes(
    tmp_path: Path, devices: list[Any], words: str
) -> None:
    async def scene(node: Node, claims: Claims) -> Any:
        claim = claims.allocate("a", *devices)
        node.backend.calls.clear()
        error = (await node.service.prepare([claim]))[claim.uid].error
        assert not node.store.claims and not node.partitions() and not node.cdi_files()
        assert "create_partition" not in {name for name, _arguments in node.backend.calls}
        # A claim that names its devices is served nevertheless.
        other = claims.allocate("b", SLICE)
        assert (await node.service.prepare([other]))[other.uid].error == ""
        return error

    error = run_scene(tmp_path, scene)
    assert words in error and "vendor_runtimes" in error


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2), st.lists(st.integers(0, 9).map(str), max_size=3), max_size=4
    )
)
def test_device_lists_have_each_name_once(devices: dict[str, list[str]]) -> None:
    edits = {name: ContainerEdits(lists=((VARIABLE, tuple(values)),)) for name, values in devices.items()}
    everything = {value for values in devices.values() for value in values}
    for each in with_lists_joined(edits).values():
        variables = dict(entry.split("=", 1) for entry in each.to_dict().get("env", []))
        output = variables[VARIABLE].split(",") if VARIABLE in variables else []
        assert set(output) == everything and len(output) == len(everything)


def test_edits_without_device_names_are_unchanged() -> None:
    edits = {"a": ContainerEdits(env=("A=1",)), "b": ContainerEdits(env=("A=2",))}
    assert with_lists_joined(edits) is edits


def test_network_tools_name_vendors_with_ports_and_exclude_the_runtime() -> None:
    for vendor in WITH_NETWORK_TOOLS:
        configuration = parse({"node_name": "n", "backends": [vendor], "network_tools": [vendor]})
        assert configuration.network_tools == (vendor,)
        assert "network_tools" in configuration.needing_restart(parse({"node_name": "n", "backends": [vendor]}))
        assert create(vendor, network_tools=True).vendor == vendor
        with pytest.raises(InvalidConfiguration, match="in vendor_runtimes and in network_tools"):
            parse({"node_name": "n", "vendor_runtimes": [vendor], "network_tools": [vendor]})
    for wrong in ([*(set(BACKENDS) - set(WITH_NETWORK_TOOLS))], "all", [3]):
        with pytest.raises(InvalidConfiguration, match="network_tools"):
            parse({"node_name": "n", "network_tools": wrong})


def test_only_vendors_that_have_a_runtime_can_be_named() -> None:
    assert set(BY_RUNTIME) <= set(BACKENDS)
    for vendor in BY_RUNTIME:
        configuration = parse({"node_name": "n", "backends": [vendor], "vendor_runtimes": [vendor]})
        assert configuration.vendor_runtimes == (vendor,)
        assert "vendor_runtimes" in configuration.needing_restart(parse({"node_name": "n", "backends": [vendor]}))
        assert create(vendor, by_runtime=True).vendor == vendor
    for wrong in ([*(set(BACKENDS) - set(BY_RUNTIME))], "all", [3]):
        with pytest.raises(InvalidConfiguration, match="vendor_runtimes"):
            parse({"node_name": "n", "vendor_runtimes": wrong})
