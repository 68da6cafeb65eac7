# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The node as a command finds it: its configuration, and of each driver what it says, what is stored, and where things lie."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .. import config
from ..claims.records import ClaimRecord
from ..config import Configuration
from ..core.backend import create
from ..core.backend_protocol import Backend
from ..core.errors import AcceleratorError
from ..core.system import System
from ..deadlines import within
from ..kubelet.sockets import paths_of
from ..status_command import instance_of
from .store_reader import Stored, read_store

if TYPE_CHECKING:
    from ..api.resources import ResourceApi

T = TypeVar("T")
# Together, for all that a command asks of the API server.
API_SECONDS = 20.0


@dataclass(frozen=True)
class DriverOnNode:
    """One driver of the node. ``status`` is what it tells itself; its ``pid`` is 0 where none runs. ``socket`` is where it serves."""

    name: str
    pool: str
    directory: str
    backend: Backend
    status: dict[str, Any]
    stored: Stored
    socket: str = ""

    @property
    def runs(self) -> bool:
        """Whether a process answers."""
        return bool(self.status["pid"])


@dataclass(frozen=True)
class Node:
    """The node that a command runs on."""

    configuration: Configuration
    drivers: tuple[DriverOnNode, ...]
    system: System

    def find(self, claim: str) -> list[tuple[DriverOnNode, ClaimRecord]]:
        """Return the records of a claim: by UID, by namespace/name, or by name in whatever namespace."""
        return [
            (driver, record)
            for driver in self.drivers
            for record in driver.stored.records
            if claim in (record.uid, record.describe(), record.name)
        ]


def look(config_path: str, system: System | None = None) -> Node:
    """Look at the node. Raises InvalidConfiguration."""
    system = system or System()
    configuration = config.load(config_path)
    found = []
    for vendor in configuration.backends:
        backend = create(vendor, system)
        name = configuration.driver_name or backend.driver_name
        directory = configuration.state_directory_of(name)
        status = instance_of(configuration, name)
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


def ask_api(kubeconfig: str, ask: Callable[[ResourceApi], Awaitable[T]]) -> tuple[T | None, str]:
    """Ask the API server something, with a deadline; returns the answer, or None and why there is none."""

    # What asks nobody starts in a third of the time without it, and a probe is waited for.
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
