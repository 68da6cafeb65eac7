# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The node as commands see it: its configuration and, for each driver, the reported status, the store, and the paths."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .. import config
from ..claims.store.records import ClaimRecord
from ..config import Configuration
from ..core.errors import AcceleratorError
from ..core.host.system import System
from ..core.vendors.protocol import Backend
from ..core.vendors.registry import create
from ..deadlines import within
from ..kubelet.sockets import paths_of
from ..status_command import instance_status
from .store_reader import Stored, read_store

if TYPE_CHECKING:
    from ..api.resources import ResourceApi

T = TypeVar("T")
# The timeout for all API server requests of a command, in seconds.
API_SECONDS = 20.0


@dataclass(frozen=True)
class DriverOnNode:
    """One driver of the node.

    ``status`` is the status that the driver reports; its ``pid`` is 0 if no process answers. ``socket`` is the path of
    the DRA socket.
    """

    name: str
    pool: str
    directory: str
    backend: Backend
    status: dict[str, Any]
    stored: Stored
    socket: str = ""

    @property
    def runs(self) -> bool:
        """Return whether a process answers."""
        return bool(self.status["pid"])


@dataclass(frozen=True)
class Node:
    """The node that a command runs on."""

    configuration: Configuration
    drivers: tuple[DriverOnNode, ...]
    system: System

    def find(self, claim: str) -> list[tuple[DriverOnNode, ClaimRecord]]:
        """Return the records of a claim, selected by UID, by namespace/name, or by name in any namespace."""
        return [
            (driver, record)
            for driver in self.drivers
            for record in driver.stored.records
            if claim in (record.uid, record.describe(), record.name)
        ]


def read_node(config_path: str, system: System | None = None) -> Node:
    """Read the state of the node's drivers. Raises InvalidConfiguration."""
    system = system or System()
    configuration = config.load(config_path)
    found = []
    for vendor in configuration.backends:
        backend = create(vendor, system)
        name = configuration.driver_name or backend.driver_name
        directory = configuration.state_directory_of(name)
        status = instance_status(configuration, name)
        found.append(
            DriverOnNode(
                name=name,
                pool=configuration.pool_name or configuration.node_name,
                directory=directory,
                backend=backend,
                status=status,
                socket=paths_of(directory, configuration.registry_directory, name, status["instance"]).service,
                stored=read_store(f"{directory}/state.db"),
            )
        )
    return Node(configuration, tuple(found), system)


def query_api(kubeconfig: str, ask: Callable[[ResourceApi], Awaitable[T]]) -> tuple[T | None, str]:
    """Query the API server with a timeout, and return the result and "", or None and the problem."""

    # Commands without API requests, such as a probe, start three times as fast without this import.
    from ..api.client import ApiClient
    from ..api.resources import ResourceApi

    async def asking() -> T:
        client = ApiClient(kubeconfig, user_agent="dra-accelerators-command")
        try:
            return await ask(ResourceApi(client))
        finally:
            await client.close()

    async def limited() -> T:
        return await within(asking(), API_SECONDS)

    try:
        return asyncio.run(limited()), ""
    except AcceleratorError as error:
        return None, str(error)
    except asyncio.TimeoutError:
        return None, f"the API server did not answer within {API_SECONDS:g} s"
