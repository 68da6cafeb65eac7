# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Group hosts of an inventory by their cluster. No function reads files or queries a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_KUBECONFIG = "~/.kube/config"


class Cluster(NamedTuple):
    """The access to a cluster: the real path of the kubeconfig, and the context, which is empty for the current context of the file."""

    kubeconfig: str
    context: str

    def __str__(self) -> str:
        return self.kubeconfig + (f", context {self.context}" if self.context else "")


class Member(NamedTuple):
    """A host, its Node, and the cluster of this Node."""

    host: str
    node: str
    cluster: Cluster


def cluster_of(kubeconfig: Any, context: Any) -> Cluster:
    """Return the cluster of a kubeconfig and a context. Empty values mean the defaults of kubectl."""
    return Cluster(str(Path(str(kubeconfig or DEFAULT_KUBECONFIG)).expanduser().resolve()), str(context or ""))


def name_conflicts(members: Iterable[Member]) -> list[str]:
    """Return a sentence for each Node that is assigned to several hosts of one cluster."""
    found: dict[tuple[Cluster, str], list[str]] = {}
    for member in members:
        found.setdefault((member.cluster, member.node), []).append(member.host)
    return [
        f"Hosts {', '.join(sorted(hosts))} have the same Node {node} of the cluster {cluster}."
        for (cluster, node), hosts in sorted(found.items())
        if len(hosts) > 1
    ]
