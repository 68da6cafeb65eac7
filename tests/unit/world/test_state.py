# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The record of a world, and the plan from the current to the desired world."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world_cli import cluster, state
from world_cli.errors import WorldError
from world_cli.pins import OLDEST, PINNED
from world_cli.state import Node, World


def world(nodes: int = 2, name: str = "w") -> World:
    return World(name, 215, state.plan_nodes(name, nodes, []))


@pytest.mark.parametrize("name", ["a", "dev", "my-world-2", "a" * 31])
def test_valid_names_are_accepted(name: str) -> None:
    assert state.check_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "2a", "a" * 32, "a/b", "a b", "a\n"])
def test_invalid_names_are_rejected(name: str) -> None:
    with pytest.raises(WorldError, match="cannot name a world"):
        state.check_name(name)


def test_profiles_one_for_all_or_one_for_each() -> None:
    assert [node.silicon for node in state.plan_nodes("w", 2, [])] == [None, None]
    assert [node.silicon for node in state.plan_nodes("w", 3, ["8xH100"])] == ["8xH100"] * 3
    assert [node.silicon for node in state.plan_nodes("w", 2, ["8xH100", "mixed"])] == ["8xH100", "mixed"]
    with pytest.raises(WorldError, match="2 silicon profiles for 3 nodes"):
        state.plan_nodes("w", 3, ["8xH100", "mixed"])


@pytest.mark.parametrize("count", [0, -1, state.LARGEST_WORLD + 1])
def test_a_world_has_a_sensible_number_of_nodes(count: int) -> None:
    with pytest.raises(WorldError, match="1 to 100 nodes"):
        state.plan_nodes("w", count, [])


def test_no_two_addresses_or_networks_of_a_world_meet() -> None:
    large = world(state.LARGEST_WORLD)
    pods = [ipaddress.ip_network(large.pod_subnet(node)) for node in large.nodes]
    networks = [ipaddress.ip_network(large.node_subnet), ipaddress.ip_network(large.service_subnet), *pods]
    for index, network in enumerate(networks):
        assert network.subnet_of(ipaddress.ip_network(large.cluster_subnet))
        assert not any(network.overlaps(other) for other in networks[index + 1 :])
    addresses = {large.control_address, *(large.node_address(node) for node in large.nodes)}
    assert len(addresses) == state.LARGEST_WORLD + 1
    assert all(ipaddress.ip_address(address) in networks[0] for address in addresses)


@pytest.mark.parametrize("name", ["w-node2", "node2", "2"])
def test_a_node_has_three_names(name: str) -> None:
    assert world().node(name).name == "w-node2"
    assert world().container(name) == "w-node2"


def test_the_control_plane_is_a_container_too_and_others_are_not() -> None:
    assert world().container("control") == "w-control"
    with pytest.raises(WorldError, match="no node 'node3'; it has w-node1, w-node2"):
        world().container("node3")


@given(
    used=st.lists(
        st.builds(lambda b, c, p: f"10.{b}.{c}.0/{p}", st.integers(205, 255), st.integers(0, 255), st.integers(8, 28))
    ),
    taken=st.sets(st.sampled_from(state.BLOCKS)),
)
def test_a_free_block_overlaps_nothing(used: list[str], taken: set[int]) -> None:
    try:
        block = state.free_block(used, taken)
    except WorldError:
        candidates = [each for each in state.BLOCKS if each not in taken]
        networks = [ipaddress.ip_network(each, strict=False) for each in used]
        assert all(
            any(network.overlaps(ipaddress.ip_network(f"10.{each}.0.0/16")) for network in networks)
            for each in candidates
        )
        return
    assert block not in taken
    mine = ipaddress.ip_network(f"10.{block}.0.0/16")
    assert not any(ipaddress.ip_network(each, strict=False).overlaps(mine) for each in used)


def test_networks_of_other_kinds_do_not_disturb() -> None:
    assert state.free_block(["172.17.0.0/16", "fd00::/64"], []) == state.BLOCKS[0]


def test_saved_state_is_loaded() -> None:
    saved = World("w", 220, (Node("w-node1", 1, "mixed"), Node("w-node2", 2)))
    state.save(saved)
    assert state.load("w") == saved
    assert state.names() == ["w"]
    assert state.require("w") == saved


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"name": "w"}', '{"name": "w", "block": "x", "nodes": []}'])
def test_load_unreadable_state_returns_none(text: str, own_cache: Path) -> None:
    directory = own_cache / "worlds/w"
    directory.mkdir(parents=True)
    (directory / "world.json").write_text(text)
    assert state.load("w") is None


def test_unknown_world_is_rejected_with_the_known_ones() -> None:
    state.save(world(name="one"))
    with pytest.raises(WorldError, match=r"world 'two' does not exist \(existing worlds: one\)"):
        state.require("two")


def block() -> int:
    return 230


def test_a_new_world() -> None:
    assert cluster.plan("w", None, [], None, block) == World("w", 230, state.plan_nodes("w", cluster.DEFAULT_NODES, []))


def test_plan_existing_world_keeps_its_network_nodes_and_profiles() -> None:
    present = World("w", 215, (Node("w-node1", 1, "mixed"), Node("w-node2", 2, "8xH100")))
    assert cluster.plan("w", None, [], present, block) == present
    larger = cluster.plan("w", 3, [], present, block)
    assert larger.block == 215
    assert [node.silicon for node in larger.nodes] == ["mixed", "8xH100", None]
    assert [node.name for node in cluster.plan("w", 1, [], present, block).nodes] == ["w-node1"]
    assert [node.silicon for node in cluster.plan("w", None, ["1xT4"], present, block).nodes] == ["1xT4", "1xT4"]


def test_plan_keeps_the_release_and_gates_of_the_world() -> None:
    nodes = state.plan_nodes("w", cluster.DEFAULT_NODES, [])
    assert cluster.plan("w", None, [], None, block, PINNED, own_gates=True) == World("w", 230, nodes, PINNED, True)
    # The file of gates is for the pinned release.
    oldest = cluster.plan("w", None, [], None, block, OLDEST)
    assert oldest == World("w", 230, nodes, OLDEST, True)
    state.save(oldest)
    assert state.load("w") == oldest
    assert cluster.plan("w", None, [], oldest, block) == oldest
    assert cluster.plan("w", None, [], oldest, block, OLDEST, own_gates=True) == oldest


@pytest.mark.parametrize(("release", "own_gates"), [(OLDEST, False), (None, True)])
def test_plan_running_world_keeps_its_components(release: str | None, own_gates: bool) -> None:
    with pytest.raises(WorldError, match="runs the pinned Kubernetes with the gates of"):
        cluster.plan("w", None, [], world(), block, release, own_gates)
