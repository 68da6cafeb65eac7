# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Pods that come and go while something else is done to the cluster: whether one of them met a gap."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, dynamic, pod

#: How the kubelet's gRPC client ends a call whose driver died: the connection broke, or the kubelet, which saw the socket
#: go first, closed it.
DIED = ("rpc error: code = Unavailable", "rpc error: code = Canceled desc = grpc: the client connection is closing")


class Stream:
    """Pods with claims that come and go on a node, one after the other; ``rounds`` counts those that ran and have gone."""

    def __init__(self, cluster: Cluster, node: str, name: str) -> None:
        self._cluster, self._node, self._name = cluster, node, name
        self._end = threading.Event()
        self._problem: BaseException | None = None
        self.rounds = 0

    def work(self) -> None:
        """Start pods until it is told to end, or one does not run."""
        try:
            while not self._end.is_set():
                name = f"{self._name}-{self.rounds}"
                wanted = claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
                user = pod(name, name, node=self._node)
                self._cluster.apply(wanted, user)
                self._cluster.wait_running(name)
                self._cluster.delete(user, wanted)
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001  it is raised where the stream ends
            self._problem = error

    def end(self) -> None:
        """End with the pod that is under way."""
        self._end.set()

    def see(self) -> None:
        """Raise what went wrong."""
        if self._problem is not None:
            raise self._problem


@contextlib.contextmanager
def streaming(cluster: Cluster, node: str, name: str = "stream") -> Iterator[Stream]:
    """A stream of pods beside what is done meanwhile; ``name`` is what theirs begin with."""
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
    """What the kubelets say of claims that could not be prepared or unprepared."""
    events = cluster.get("events", "-n", "default")["items"]
    return [each["message"] for each in events if "DynamicResources" in each["reason"]]


def failures_but_of_a_death(cluster: Cluster) -> list[str]:
    """The same without the calls that a driver which ended without a word has taken with it; the kubelet makes those again."""
    return [each for each in failures(cluster) if not any(died in each for died in DIED)]
