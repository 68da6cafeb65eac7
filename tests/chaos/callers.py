# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Whoever has a driver prepare a claim: the kubelet alone, or the scheduler first, which waits for it before it binds the pod."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import grpc
from dra_driver.core.published_form import PREPARED_CONDITION

from tests.chaos.kinds import Kind
from tests.chaos.node import CALL_SECONDS, Node
from tests.chaos.snapshot import stored

#: As long as a driver that came back may take to see that a claim which it had prepared ahead was given up: two visits of its timer.
GIVE_UP_SECONDS = 40.0


class Kubelet:
    """Asks about one claim of a kind, allocated on the node."""

    #: What a driver is started with where this is to be seen; see Node.launch.
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, node: Node, kind: Kind, name: str = "") -> None:
        self.node = node
        self.name, self.uid = node.claim_of(kind, name)

    @property
    def claim(self) -> tuple[str, str]:
        return self.name, self.uid

    def prepare(self) -> None:
        """Have the claim prepared."""
        self.node.prepare(*self.claim)

    def bind(self) -> None:
        """Have a pod start with the claim that is prepared: the kubelet asks again and again, and nothing changes."""
        self.node.prepare(*self.claim)

    def await_told(self) -> None:
        """Wait until the claim's status says that it is prepared, and remember what it says."""
        wanted = len(self._status["allocation"]["devices"]["results"])
        self.node.until(
            f"the status of {self.name} tells that it is prepared",
            lambda: len(self._status.get("devices", ())) == wanted,
        )
        self._told = copy.deepcopy(self._status["devices"])

    @property
    def _status(self) -> dict[str, Any]:
        return self.node.api.model.claims[self.name]["status"]  # type: ignore[no-any-return]

    def had_before(self, was_prepared: bool) -> None:
        """The claim keeps its allocation since it was prepared and given back, and its status says so; or it is a new one."""
        self._status["devices"] = copy.deepcopy(self._told) if was_prepared else []

    def leave(self) -> None:
        """The pod has ended: the claim is given back."""
        self.node.unprepare(*self.claim)

    def give_up(self) -> None:
        """Undo what ``prepare`` does, where no pod came."""
        self.leave()

    def begin(self, verb: str) -> Callable[[], bool]:
        """Begin to prepare, or to undo it, and return at once: what tells whether it was answered as done."""
        method = "NodePrepareResources" if verb == "prepare" else "NodeUnprepareResources"
        answer = self.node.begin(method, *self.claim)

        def answered() -> bool:
            try:
                return not answer.result(timeout=10).claims[self.uid].error
            except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                return False

        return answered


class Scheduler(Kubelet):
    """Reserves the claim and waits for its devices' condition; then binds the pod, or gives the claim up."""

    # What was prepared by a process that has ended is missed by the timer alone, which is every ten minutes otherwise.
    options = MappingProxyType({"timer": 1.0})

    def __init__(self, node: Node, kind: Kind, name: str = "") -> None:
        self.node = node
        self._allocated = node.document_of(kind, name)
        metadata = self._allocated["metadata"]
        self.name, self.uid = str(metadata["name"]), str(metadata["uid"])
        self._release()

    def _reserve(self) -> None:
        claim = copy.deepcopy(self._allocated)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat()
        claim["status"]["allocation"]["allocationTimestamp"] = now
        self.node.api.put(claim)

    def _release(self) -> None:
        """Take the allocation back; what the driver has said of it goes with it."""
        self.node.api.put({"metadata": dict(self._allocated["metadata"]), "status": {}})

    def await_told(self) -> None:
        """It is told already: that is what the scheduler waits for."""

    def had_before(self, was_prepared: bool) -> None:
        """What was given up has no allocation, and no status."""

    def _is_reserved(self) -> bool:
        return bool(self.node.api.model.claims[self.name]["status"].get("allocation"))

    def _is_told(self) -> bool:
        entries = self.node.api.model.claims[self.name]["status"].get("devices", ())
        found = {each["type"]: each["status"] for entry in entries for each in entry["conditions"]}
        return found.get(PREPARED_CONDITION) == "True"

    def _is_gone(self) -> bool:
        return self.uid not in stored(self.node.store)["claims"]

    def prepare(self) -> None:
        if not self._is_reserved():
            self._reserve()
        self.node.until(f"{self.name} is prepared before its pod is bound", self._is_told, CALL_SECONDS)

    def leave(self) -> None:
        self.node.unprepare(*self.claim)
        self._release()

    def give_up(self) -> None:
        # A driver that has come back and reads the claim has nothing yet that could be seen to go, and prepares it for a moment.
        if self._is_reserved():
            self.prepare()
        self._release()
        self.node.until(f"{self.name}, which was given up, is undone", self._is_gone, GIVE_UP_SECONDS)

    def begin(self, verb: str) -> Callable[[], bool]:
        if verb == "prepare":
            self._reserve()
            return self._is_told
        self._release()
        return self._is_gone


def caller_of(node: Node, kind: Kind, name: str = "") -> Kubelet:
    """Whoever asks for claims of this kind."""
    return (Scheduler if kind.ahead else Kubelet)(node, kind, name)
