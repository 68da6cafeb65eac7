# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which pods of a node processes and claims belong to, by what kernel and kubelet keep on the node: no API server is asked.

Facts: the kubelet's cgroups have a pod's UID in their names, with underscores where systemd makes them (pkg/kubelet/cm/cgroup_manager_linux.go);
the folders of logs are called NAMESPACE_NAME_UID (pkg/kubelet/kuberuntime/helpers.go); claims with the UIDs of their pods are in the
checkpoint dra_manager_state (pkg/kubelet/cm/dra/state).
"""

from __future__ import annotations

import json
import re

from .system import System

LOGS = "/var/log/pods"
CHECKPOINT = "dra_manager_state"
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")


def pod_of_process(system: System, pid: int) -> str:
    """Return the UID of the pod that a process runs in; empty for none."""
    try:
        found = _POD.search(system.read_text(f"/proc/{pid}/cgroup"))
    except OSError:
        return ""
    return found.group(1).replace("_", "-") if found else ""


def running_pods(system: System) -> tuple[str, ...]:
    """Return the pods that have processes on the node, by namespace and name, and by their UIDs where the node has no name for them."""
    numbers = (int(name) for name in system.list_directory("/proc") if name.isdigit())
    found = {uid for number in numbers if (uid := pod_of_process(system, number))}
    names = pod_names(system) if found else {}
    return tuple(sorted(names.get(uid, uid) for uid in found))


def pod_names(system: System) -> dict[str, str]:
    """Return by the UIDs of the node's pods their namespaces and names."""
    found = {}
    for folder in system.list_directory(LOGS):
        namespace, _first, rest = folder.partition("_")
        name, _last, uid = rest.rpartition("_")
        if namespace and name and uid:
            found[uid] = f"{namespace}/{name}"
    return found


def pods_of_claims(system: System, kubelet_root: str) -> dict[str, tuple[str, ...]]:
    """Return by the UIDs of claims the UIDs of the pods that the kubelet has prepared them for; nothing where it does not say."""
    try:
        # A text in a text, with a checksum beside it.
        told = json.loads(json.loads(system.read_text(f"{kubelet_root}/{CHECKPOINT}"))["Data"])
        return {
            str(each["ClaimUID"]): tuple(sorted(each["PodUIDs"] or ())) for each in told["ClaimInfoStateList"] or ()
        }
    except (OSError, ValueError, KeyError, TypeError):
        # Its form is the kubelet's own: what is told by it is told in addition.
        return {}
