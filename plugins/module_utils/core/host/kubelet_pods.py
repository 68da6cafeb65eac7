# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the pods of processes and claims on a node from kernel and kubelet data, without the API server.

Source: the kubelet's cgroups contain a pod's UID in their names, with underscores if systemd creates them
(pkg/kubelet/cm/cgroup_manager_linux.go). Log directories are named NAMESPACE_NAME_UID
(pkg/kubelet/kuberuntime/helpers.go). The checkpoint dra_manager_state contains claims with the UIDs of their pods
(pkg/kubelet/cm/dra/state).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace

from ..model import Process
from .system import System

LOGS = "/var/log/pods"
CHECKPOINT = "dra_manager_state"
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
_CONTAINER = re.compile(r"(?:-|/docker/|/libpod/)([0-9a-f]{12})[0-9a-f]{52}(?:\.scope)?(?:/|$)")


def pod_of_process(system: System, pid: int) -> str:
    """Return the UID of a process's pod; empty without a pod."""
    try:
        found = _POD.search(system.read_text(f"/proc/{pid}/cgroup"))
    except OSError:
        return ""
    return found.group(1).replace("_", "-") if found else ""


def unit_of_process(system: System, pid: int) -> str:
    """Return the container or systemd unit of a process as text; empty without one.

    Source: cgroups(7), and the cgroup names of container runtimes (docker-ID.scope, libpod-ID.scope, /docker/ID).
    """
    try:
        lines = system.read_text(f"/proc/{pid}/cgroup").splitlines()
    except OSError:
        return ""
    for line in lines:
        _number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "name=systemd"):
            continue
        container = _CONTAINER.search(path)
        if container:
            return f"container {container.group(1)}"
        units = [part for part in path.split("/") if part.endswith(".service")]
        if units:
            return f"unit {units[-1]}"
    return ""


def add_pods(system: System, processes: Iterable[Process]) -> tuple[Process, ...]:
    """Return processes with their pods. Processes outside pods get their unit or container instead."""
    pod_uids = [(each, pod_of_process(system, each.pid)) for each in processes]
    names = pod_names(system) if any(uid for _process, uid in pod_uids) else {}
    return tuple(
        replace(each, pod=names.get(uid, uid)) if uid else replace(each, unit=unit_of_process(system, each.pid))
        for each, uid in pod_uids
    )


def running_pods(system: System) -> tuple[str, ...]:
    """Return the pods with processes on the node: namespace and name, or the UID if the node does not know the name."""
    numbers = (int(name) for name in system.list_directory("/proc") if name.isdigit())
    found = {uid for number in numbers if (uid := pod_of_process(system, number))}
    names = pod_names(system) if found else {}
    return tuple(sorted(names.get(uid, uid) for uid in found))


def pod_names(system: System) -> dict[str, str]:
    """Return the namespaces and names of the node's pods, by UID."""
    found = {}
    for folder in system.list_directory(LOGS):
        namespace, _first, rest = folder.partition("_")
        name, _last, uid = rest.rpartition("_")
        if namespace and name and uid:
            found[uid] = f"{namespace}/{name}"
    return found


def pods_of_claims(system: System, kubelet_root: str) -> dict[str, tuple[str, ...]]:
    """Return the UIDs of the pods for which the kubelet has prepared claims, by claim UID; empty if unknown."""
    try:
        # A JSON string within JSON, next to a checksum.
        checkpoint = json.loads(json.loads(system.read_text(f"{kubelet_root}/{CHECKPOINT}"))["Data"])
        return {
            str(each["ClaimUID"]): tuple(sorted(each["PodUIDs"] or ()))
            for each in checkpoint["ClaimInfoStateList"] or ()
        }
    except (OSError, ValueError, KeyError, TypeError):
        # The format is internal to the kubelet, so this information is optional.
        return {}
