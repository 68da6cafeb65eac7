# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Callers that prepare a claim: the kubelet alone, or first the scheduler, which waits for the claim before it binds the pod."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import grpc
from dra_driver.core.dra.device_json import PREPARED_CONDITION

from tests.chaos.claim_kinds import Kind
from tests.chaos.node import CALL_SECONDS, Node
from tests.chaos.snapshot import read_store

#: The time limit (s) for a restarted driver to notice an abandoned claim: two runs of its timer.
GIVE_UP_SECONDS = 40.0


class Kubelet:
    """A caller for one claim of a kind, allocated on the node."""

    #: Options of the driver for this caller; see Node.launch.
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, node: Node, kind: Kind, name: str = "") -> None:
        self.node = node
        self.name, self.uid = node.claim_of(kind, name)

    @property
    def claim(self) -> tuple[str, str]:
        return self.name, self.uid

    def prepare(self) -> None:
        """Prepare the claim."""
        self.node.prepare(*self.claim)

    def bind(self) -> None:
        """Start a pod with the prepared claim: repeated calls of the kubelet change nothing."""
        self.node.prepare(*self.claim)

    def await_status(self) -> None:
        """Wait until the claim's status reports that it is prepared, and save the status."""
        wanted = len(self._status["allocation"]["devices"]["results"])
        self.node.wait_until(
            f"the status of {self.name} reports the prepared devices",
            lambda: len(self._status.get("devices", ())) == wanted,
        )
        self._saved_status = copy.deepcopy(self._status["devices"])

    @property
    def _status(self) -> dict[str, Any]:
        return self.node.api.model.claims[self.name]["status"]  # type: ignore[no-any-return]

    def set_previous_status(self, was_prepared: bool) -> None:
        """Set the claim's status: with the saved devices if the claim was prepared and unprepared before, without devices for a new claim."""
        self._status["devices"] = copy.deepcopy(self._saved_status) if was_prepared else []

    def end_pod(self) -> None:
        """End the pod: unprepare the claim."""
        self.node.unprepare(*self.claim)

    def abandon(self) -> None:
        """Undo ``prepare`` without a pod."""
        self.end_pod()

    def start_call(self, verb: str) -> Callable[[], bool]:
        """Begin ``verb`` and return at once. The returned function returns whether the call has succeeded."""
        method = "NodePrepareResources" if verb == "prepare" else "NodeUnprepareResources"
        answer = self.node.start_call(method, *self.claim)

        def answered() -> bool:
            try:
                return not answer.result(timeout=10).claims[self.uid].error
            except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                return False

        return answered


class Scheduler(Kubelet):
    """Reserve the claim and wait for its devices' condition. Then bind the pod, or give the claim up."""

    # Only the timer detects claims that an ended process had prepared. Its usual interval is 10 min.
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
        """Remove the allocation, and with it the driver's status."""
        self.node.api.put({"metadata": dict(self._allocated["metadata"]), "status": {}})

    def await_status(self) -> None:
        """Do nothing: the scheduler has already waited for the status."""

    def set_previous_status(self, was_prepared: bool) -> None:
        """Do nothing: an abandoned claim has no allocation and no status."""

    def _is_reserved(self) -> bool:
        return bool(self.node.api.model.claims[self.name]["status"].get("allocation"))

    def _is_reported(self) -> bool:
        entries = self.node.api.model.claims[self.name]["status"].get("devices", ())
        found = {each["type"]: each["status"] for entry in entries for each in entry["conditions"]}
        return found.get(PREPARED_CONDITION) == "True"

    def _is_gone(self) -> bool:
        return self.uid not in read_store(self.node.store)["claims"]

    def prepare(self) -> None:
        if not self._is_reserved():
            self._reserve()
        self.node.wait_until(f"{self.name} is prepared before its pod is bound", self._is_reported, CALL_SECONDS)

    def end_pod(self) -> None:
        self.node.unprepare(*self.claim)
        self._release()

    def abandon(self) -> None:
        # A restarted driver that reads the claim would prepare it only after this call, so its removal could be missed.
        # Prepare it first.
        if self._is_reserved():
            self.prepare()
        self._release()
        self.node.wait_until(f"the abandoned claim {self.name} is unprepared", self._is_gone, GIVE_UP_SECONDS)

    def start_call(self, verb: str) -> Callable[[], bool]:
        if verb == "prepare":
            self._reserve()
            return self._is_reported
        self._release()
        return self._is_gone


def caller_of(node: Node, kind: Kind, name: str = "") -> Kubelet:
    """Return the caller for claims of this kind."""
    return (Scheduler if kind.before_binding else Kubelet)(node, kind, name)
