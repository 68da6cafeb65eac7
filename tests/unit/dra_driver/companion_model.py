# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A manager of companions for tests, with its state in a file next to that of the GPUs. The state survives a killed process."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dra_driver.claims.store.records import ClaimReference
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host.companions import Companion, claim_of

if TYPE_CHECKING:
    from backend_model import ModelGpus


class ModelCompanionServices:
    """Companions in a file next to that of the GPUs. Each is a process that uses the GPUs that it serves."""

    def __init__(self, gpus: ModelGpus) -> None:
        self.gpus = gpus
        self.path = gpus.path.with_name("companions.json")
        self.failures: list[AcceleratorError] = []
        self.check_failures: list[AcceleratorError] = []

    def running(self) -> dict[str, dict[str, Any]]:
        """Return the arguments of each companion, by its name."""
        found: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found

    def start(self, companion: Companion) -> None:
        if self.failures:
            raise self.failures.pop(0)
        running = self.running()
        if companion.name in running:
            return
        pid = 900_001 + len(running)
        served = companion.environment["CUDA_VISIBLE_DEVICES"].split(",")
        with self.gpus.state() as state:
            for users in self._users(state, served):
                users.append(pid)
        reported = {"pid": pid, "devices": served, "commands": list(companion.commands), "claim": companion.claim}
        self.path.write_text(json.dumps({**running, companion.name: reported}))

    def check(self, companion: Companion) -> None:
        if self.check_failures:
            raise self.check_failures.pop(0)

    def stop(self, claim_uid: str) -> None:
        running = self.running()
        ended = {name: reported for name, reported in running.items() if claim_of(name) == claim_uid}
        with self.gpus.state() as state:
            for reported in ended.values():
                for users in self._users(state, reported["devices"]):
                    if reported["pid"] in users:
                        users.remove(reported["pid"])
        self.path.write_text(json.dumps({name: reported for name, reported in running.items() if name not in ended}))

    def claims(self) -> frozenset[str]:
        return frozenset(map(claim_of, self.running()))

    def claim_named(self, claim_uid: str) -> ClaimReference | None:
        for name, reported in self.running().items():
            if claim_of(name) == claim_uid and reported["claim"]:
                namespace, _slash, claim = reported["claim"].partition("/")
                return ClaimReference(namespace, claim, claim_uid)
        return None

    def pids(self, claim_uid: str) -> frozenset[int]:
        return frozenset(reported["pid"] for name, reported in self.running().items() if claim_of(name) == claim_uid)

    def _users(self, state: Mapping[str, Any], served: Collection[str]) -> Iterator[list[int]]:
        for device in self.gpus.devices_in(state):
            if device.uuid in served:
                yield state[device.uuid]["pids"]
            for partition, entry in zip(device.partitions, state[device.uuid]["partitions"]):
                if partition.uuid in served:
                    yield entry["pids"]
