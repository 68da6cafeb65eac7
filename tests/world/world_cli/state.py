# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stored state of a world: its name, networks, and nodes. All other state is read from Docker."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import cache
from .errors import WorldError
from .pins import PINNED

NAME_PATTERN = re.compile(r"[a-z]([a-z0-9-]{0,29}[a-z0-9])?")
LARGEST_WORLD = 100
#: Second bytes of the 10.x.0.0/16 networks for worlds.
BLOCKS = range(211, 251)


@dataclass(frozen=True)
class Node:
    """One worker node. ``index`` counts from 1 and determines its name and addresses."""

    name: str
    index: int
    silicon: str | None = None


@dataclass(frozen=True)
class World:
    """One world. ``block`` is the second byte of its networks. ``release`` names its components' release.

    ``own_gates`` means that every component has its default feature gates, not those of gates.json.
    """

    name: str
    block: int
    nodes: tuple[Node, ...] = field(default_factory=tuple)
    release: str = PINNED
    own_gates: bool = False

    @property
    def control(self) -> str:
        """Return the name of the control plane's container and host."""
        return f"{self.name}-control"

    @property
    def network(self) -> str:
        """Return the name of the Docker network."""
        return f"{self.name}-network"

    @property
    def node_subnet(self) -> str:
        """Return the addresses of the containers."""
        return f"10.{self.block}.0.0/24"

    @property
    def cluster_subnet(self) -> str:
        """Return all addresses of the world: nodes, pods, and services."""
        return f"10.{self.block}.0.0/16"

    @property
    def service_subnet(self) -> str:
        """Return the addresses of Kubernetes services."""
        return f"10.{self.block}.240.0/20"

    @property
    def service_address(self) -> str:
        """Return the address of the ``kubernetes`` service."""
        return f"10.{self.block}.240.1"

    @property
    def control_address(self) -> str:
        """Return the address of the API server."""
        return f"10.{self.block}.0.2"

    @property
    def server(self) -> str:
        """Return the URL of the API server, the same from nodes and from the host."""
        return f"https://{self.control_address}:6443"

    def node_address(self, node: Node) -> str:
        """Return the address of a worker."""
        return f"10.{self.block}.0.{10 + node.index}"

    def pod_subnet(self, node: Node) -> str:
        """Return the addresses of a worker's pods."""
        return f"10.{self.block}.{node.index}.0/24"

    def node(self, name: str) -> Node:
        """Return the worker with this name; ``node1`` and ``1`` mean ``<world>-node1``.

        Raises WorldError for an unknown name.
        """
        for node in self.nodes:
            if name in (node.name, f"node{node.index}", str(node.index)):
                return node
        raise WorldError(
            f"world {self.name} has no node {name!r}; it has {', '.join(node.name for node in self.nodes) or 'none'}."
        )

    def container(self, name: str) -> str:
        """Return the container of a worker or, for ``control``, of the control plane."""
        return self.control if name in ("control", self.control) else self.node(name).name


def check_name(name: str) -> str:
    """Return the name if it is valid for a world; raise WorldError otherwise."""
    if not NAME_PATTERN.fullmatch(name):
        raise WorldError(
            f"{name!r} cannot name a world: use 1 to 31 lowercase letters, digits, and dashes, beginning with a letter and not ending with a dash."
        )
    return name


def plan_nodes(name: str, count: int, profiles: Iterable[str]) -> tuple[Node, ...]:
    """Return the workers of a world. One silicon profile applies to all nodes; several apply in the order of the
    nodes.
    """
    if not 1 <= count <= LARGEST_WORLD:
        raise WorldError(f"a world has 1 to {LARGEST_WORLD} nodes, not {count}.")
    given = list(profiles)
    if len(given) not in (0, 1, count):
        raise WorldError(
            f"{len(given)} silicon profiles for {count} nodes: name one for all nodes, or one for each node."
        )
    chosen: list[str | None] = [*(given * count if len(given) == 1 else given)] or [None] * count
    return tuple(Node(f"{name}-node{index}", index, chosen[index - 1]) for index in range(1, count + 1))


def free_block(used_subnets: Iterable[str], taken: Iterable[int]) -> int:
    """Return a second byte whose whole 10.x.0.0/16 overlaps no network in use.

    Raises WorldError if there is no free one.
    """
    networks = [ipaddress.ip_network(subnet, strict=False) for subnet in used_subnets]
    occupied = set(taken)
    for block in BLOCKS:
        candidate = ipaddress.ip_network(f"10.{block}.0.0/16")
        if block not in occupied and not any(
            network.version == 4 and network.overlaps(candidate) for network in networks
        ):
            return block
    raise WorldError(
        f"no network of 10.{BLOCKS[0]}.0.0/16 to 10.{BLOCKS[-1]}.0.0/16 is free on this machine: remove a world, or another user of one of these networks."
    )


def folder(name: str) -> Path:
    """Return the directory of one world's state."""
    return cache.worlds_folder() / name


def load(name: str) -> World | None:
    """Return a world by its name; None without readable state."""
    try:
        values = json.loads((folder(name) / "world.json").read_text())
        nodes = tuple(Node(**node) for node in values["nodes"])
        release, own_gates = values.get("release", PINNED), bool(values.get("own_gates", False))
        return World(values["name"], int(values["block"]), nodes, release, own_gates)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require(name: str) -> World:
    """Return a running world, or raise a WorldError that lists the running ones."""
    world = load(name)
    if world is None:
        others = ", ".join(sorted(names())) or "none"
        raise WorldError(
            f"world {name!r} does not exist (existing worlds: {others}): create it with `world up --name {name}`."
        )
    return world


def names() -> list[str]:
    """Return the names of all worlds with a stored state."""
    return sorted(path.parent.name for path in cache.worlds_folder().glob("*/world.json"))


def save(world: World) -> None:
    """Store a world atomically."""
    cache.write_atomically(folder(world.name) / "world.json", json.dumps(asdict(world), indent=2) + "\n")
