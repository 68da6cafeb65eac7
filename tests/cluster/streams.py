# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Pods that are created and deleted during another operation, to detect an interruption."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, dynamic, pod

#: Errors of the kubelet's gRPC client if the driver dies during a call: the connection broke, or the kubelet noticed
#: the removed socket first and closed it.
DIED = ("rpc error: code = Unavailable", "rpc error: code = Canceled desc = grpc: the client connection is closing")


class Stream:
    """A sequence of pods with claims on a node. ``rounds`` counts those that ran and were deleted."""

    def __init__(self, cluster: Cluster, node: str, name: str) -> None:
        self._cluster, self._node, self._name = cluster, node, name
        self._end = threading.Event()
        self._problem: BaseException | None = None
        self.rounds = 0

    def work(self) -> None:
        """Run pods until ``end`` is called or one does not run."""
        try:
            while not self._end.is_set():
                name = f"{self._name}-{self.rounds}"
                wanted = claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
                user = pod(name, name, node=self._node)
                self._cluster.apply(wanted, user)
                self._cluster.wait_running(name)
                self._cluster.delete(user, wanted)
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001  raised at the end of the stream
            self._problem = error

    def end(self) -> None:
        """Stop after the current pod."""
        self._end.set()

    def see(self) -> None:
        """Raise the error of the thread, if any."""
        if self._problem is not None:
            raise self._problem


@contextlib.contextmanager
def streaming(cluster: Cluster, node: str, name: str = "stream") -> Iterator[Stream]:
    """Run a stream of pods during the context. ``name`` is the prefix of the pods' names."""
    stream = Stream(cluster, node, name)
    thread = threading.Thread(target=stream.work)
    thread.start()
    try:
        yield stream
    finally:
        stream.end()
        thread.join(timeout=300)
        stream.see()


def failures(cluster: Cluster) -> list[str]:
    """Return the kubelets' Events about claims that could not be prepared or unprepared."""
    events = cluster.get("events", "-n", "default")["items"]
    return [each["message"] for each in events if "DynamicResources" in each["reason"]]


def failures_except_of_a_killed_driver(cluster: Cluster) -> list[str]:
    """Return the same without calls interrupted by the driver's death, which the kubelet retries."""
    return [each for each in failures(cluster) if not any(died in each for died in DIED)]
