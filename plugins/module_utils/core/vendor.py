# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a vendor and its things are called, without any device being asked: what roles would otherwise say for each vendor again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Exporter:
    """The vendor's own exporter of metrics: its job, its port, what it serves, and how the names of its metrics begin."""

    job: str
    port: int
    prefixes: tuple[str, ...]
    path: str = "/metrics"


@dataclass(frozen=True)
class Fabric:
    """How devices say which nodes are joined by more than the network: the names of the attributes, and of the Node's labels.

    ``device_type`` is the attribute ``type`` of the devices that count, ``label`` the one on the Node that names its domain.
    """

    device_type: str
    domain: str
    server: str
    rack: str
    label: str


@dataclass(frozen=True)
class VendorFacts:
    """What one vendor's things are called.

    ``word`` is how this collection names the vendor, ``title`` how people do, ``devices`` what they call several of its
    devices. ``driver_name`` is that of the DRA driver, ``cdi_kind`` the kind of what it gives to containers.

    ``domain`` is the domain of the vendor's extended resources and of its labels on a Node. ``labels`` are the names of the labels
    that this collection may write on a Node, and ``label_patterns`` are regular expressions for names that contain a partition
    profile. No other label is written for the vendor, whatever a node reports. ``extended_resources`` are the resources of pods
    without a claim, by the DeviceClass that serves them.

    ``device_plugins`` is how the sockets of the vendor's device plugins begin in the kubelet's folder, ``manager_units`` are
    units and ``manager_labels`` labels of a Node whose programs give devices out, or cut them up, without knowing of claims.
    ``plugin_switches`` are labels of a Node by which the vendor's operator keeps its device plugin off when they say false;
    ``replica_labels`` say how many times the plugin offers each device.

    ``character_drivers`` are shell patterns of the names that the vendor's kernel driver has in /proc/devices.
    ``kernel_module`` is the one by which the driver is known to be loaded, ``control_nodes`` are the device nodes that containers
    need besides those of their devices, ``device_nodes`` shell patterns of these.
    ``opened_nodes`` are shell patterns of the device nodes that the vendor's library opens in the driver's process.
    ``layout_unit`` is this collection's unit that applies a layout at boot. ``fabric`` is None where nodes are joined by the network
    alone, or their devices do not tell. ``link_groups`` are attributes that are the same for devices of a node with direct links between
    them, or on one card, by what people call such a group; ``links`` is what people call the links between devices that no attribute
    tells of, empty where there are none.
    """

    word: str
    title: str
    devices: str
    driver_name: str
    cdi_kind: str
    domain: str
    labels: tuple[str, ...]
    extended_resources: Mapping[str, str]
    device_plugins: tuple[str, ...]
    kernel_module: str
    control_nodes: tuple[str, ...]
    device_nodes: tuple[str, ...]
    opened_nodes: tuple[str, ...]
    character_drivers: tuple[str, ...]
    layout_unit: str
    exporter: Exporter
    label_patterns: tuple[str, ...] = ()
    manager_units: tuple[str, ...] = ()
    manager_labels: tuple[str, ...] = ()
    plugin_switches: tuple[str, ...] = ()
    replica_labels: tuple[str, ...] = ()
    fabric: Fabric | None = None
    link_groups: Mapping[str, str] = field(default_factory=dict)
    links: str = ""

    def allows_label(self, name: str) -> bool:
        """Return whether this collection may write a label of this name for the vendor's devices."""
        return name in self.labels or any(re.fullmatch(each, name) for each in self.label_patterns)

    def groups_of(self, attributes: Mapping[str, Any]) -> dict[str, str]:
        """Return which groups a device with these attributes belongs to, by what people call such a group."""
        return {title: str(attributes[name]) for name, title in self.link_groups.items() if name in attributes}

    def document(self) -> dict[str, Any]:
        """Return the facts as JSON has values."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (Exporter, Fabric)):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
