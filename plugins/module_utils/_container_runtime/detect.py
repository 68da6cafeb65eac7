# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Determine a node's container runtime from its active units and the kubelet's endpoint. This module has no side effects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import AcceleratorError

AUTO, CONTAINERD, CRIO, DOCKER, K3S, RKE2 = "auto", "containerd", "cri-o", "docker", "k3s", "rke2"
MICROK8S = "microk8s"
RUNTIMES = (CONTAINERD, CRIO, DOCKER, K3S, MICROK8S, RKE2)
#: Units of distributions with a bundled containerd.
DISTRIBUTIONS = {
    "k3s.service": K3S,
    "k3s-agent.service": K3S,
    "rke2-server.service": RKE2,
    "rke2-agent.service": RKE2,
    "snap.microk8s.daemon-containerd.service": MICROK8S,
}
#: The CRI adapter between the kubelet and Docker Engine.
CRI_DOCKERD = "cri-docker.service"
#: Units that identify a runtime, in the order of the search.
UNITS = {"crio.service": CRIO, CRI_DOCKERD: DOCKER, **DISTRIBUTIONS, "containerd.service": CONTAINERD}
#: States of a unit after a failed restart. Its runtime is still that of the node and needs a restart.
_FALLEN = ("failed", "activating")


class RuntimeChoiceError(AcceleratorError):
    """The runtime of a node is unknown or unsupported."""

    default_code = "no-runtime"


@dataclass(frozen=True)
class Choice:
    """The runtime, and the unit that identifies it. The unit is empty if the runtime was set by name."""

    runtime: str
    unit: str = ""


def choose_runtime(asked: str, states: Mapping[str, str], endpoint: str = "") -> Choice:
    """Return the runtime to configure.

    ``states`` are the states of units from ``systemctl is-active``. ``endpoint`` is the kubelet's endpoint, which
    selects one of several active runtimes. Raises RuntimeChoiceError.
    """
    if asked in DISTRIBUTIONS.values():
        return _distribution(asked, states)
    if asked != AUTO:
        return Choice(asked)
    running = running_units(states)
    if not running:
        # containerd comes first: if it has failed, it was the runtime in use, even if others are installed.
        fallen = [unit for unit in ("containerd.service", *UNITS) if states.get(unit) in _FALLEN]
        if not fallen:
            raise RuntimeChoiceError(
                f"None of {', '.join(UNITS)} is running on this node",
                hint="If containerd runs under another name, set container_runtime_name to containerd, and set "
                "container_runtime_containerd_service, container_runtime_containerd_config, and "
                "container_runtime_containerd_command. For CRI-O, set the corresponding variables.",
            )
        running = fallen[:1]
    named = [unit for unit in running if _serves(unit, endpoint)] if len(running) > 1 else []
    unit = (named or running)[0]
    return Choice(UNITS[unit], unit)


def running_units(states: Mapping[str, str]) -> list[str]:
    """Return the active units, in order of priority."""
    return [unit for unit in UNITS if states.get(unit) == "active"]


def _distribution(asked: str, states: Mapping[str, str]) -> Choice:
    units = [unit for unit, name in DISTRIBUTIONS.items() if name == asked]
    for wanted in (("active",), _FALLEN):
        for unit in units:
            if states.get(unit) in wanted:
                return Choice(asked, unit)
    raise RuntimeChoiceError(
        f"{'Neither ' if len(units) > 1 else ''}{' nor '.join(units)} is {'' if len(units) > 1 else 'not '}running on this node, and "
        f"container_runtime_name is {asked}",
        hint="Start it, or set container_runtime_name to auto.",
    )


def _serves(unit: str, endpoint: str) -> bool:
    """Return whether the endpoint's socket name is that of a unit's runtime."""
    path = endpoint.rpartition("//")[2]
    if not path:
        return False
    if UNITS[unit] in (K3S, RKE2):
        return "/k3s/containerd/" in path  # RKE2 has the same socket
    if UNITS[unit] == MICROK8S:
        return "/microk8s/" in path
    names = {"crio.service": "crio.sock", CRI_DOCKERD: "cri-dockerd.sock", "containerd.service": "containerd.sock"}
    return path.endswith("/" + names[unit]) and "/k3s/containerd/" not in path and "/microk8s/" not in path


def kubelet_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the endpoint and the configuration files from a kubelet's command line. Empty for another program."""
    if not arguments or "kubelet" not in (word.rpartition("/")[2] for word in arguments[:2]):
        return {}
    found: dict[str, str] = {}
    words = iter(arguments[1:])
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in ("container-runtime-endpoint", "config", "config-dir"):
            found[name] = value if equals else next(words, "")
    return found


def endpoint_in(text: str) -> str:
    """Return the endpoint in a kubelet's configuration file (YAML or JSON), or an empty string."""
    found = re.search(r"""(?m)^[\s{,]*["']?containerRuntimeEndpoint["']?\s*:\s*["']?([^"'\s,}#]+)""", text)
    return found[1] if found else ""
