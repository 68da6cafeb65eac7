# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define each vendor's names and constants, which roles use. They require no access to a device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Exporter:
    """The vendor's metrics exporter: its job, its port, its path, and the prefixes of its metrics."""

    job: str
    port: int
    prefixes: tuple[str, ...]
    path: str = "/metrics"


@dataclass(frozen=True)
class Fabric:
    """The names of the attributes and Node labels that describe which nodes a fabric connects.

    ``device_type`` is the attribute ``type`` of the relevant devices. ``label`` is the Node label with the domain.
    """

    device_type: str
    domain: str
    server: str
    rack: str
    label: str


@dataclass(frozen=True)
class VendorFacts:
    """The names and constants of one vendor.

    ``word`` is the vendor's name in this collection, ``title`` the name for people, ``devices`` the plural term for its
    devices. ``driver_name`` is the name of the DRA driver, ``cdi_kind`` the CDI kind of its devices.

    ``domain`` is the domain of the vendor's extended resources and Node labels. ``labels`` are the names of the labels
    that this collection may write on a Node, and ``label_patterns`` are regular expressions for names that contain a
    partition profile. No other label is written for the vendor, whatever a node reports. ``extended_resources`` maps
    DeviceClasses to the resources that they serve for pods without a claim.

    ``device_plugins`` are prefixes of the sockets of the vendor's device plugins in the kubelet's directory.
    ``manager_units`` are systemd units, and ``manager_labels`` Node labels, of programs that allocate or partition
    devices independently of claims. ``plugin_switches`` are Node labels by which the vendor's operator removes its
    device plugin from the node if their value is false. ``replica_labels`` contain the number of times that the plugin
    offers each device.

    ``character_drivers`` are shell patterns of the kernel driver's names in /proc/devices. ``kernel_module`` is the
    module that shows that the driver is loaded. ``control_nodes`` are the device nodes that containers need in addition
    to those of their devices, ``device_nodes`` shell patterns of the devices' nodes. ``library_device_nodes`` are shell
    patterns of the device nodes that the vendor library opens in the driver's process. ``layout_unit`` is this
    collection's systemd unit that applies a layout at boot.

    ``fabric`` is None if nodes are connected only by the network, or if their devices do not report a fabric.
    ``link_groups`` maps attributes, which are equal for devices of a node with direct links or on one card, to the term
    for such a group. ``links`` is the term for links between devices that no attribute describes, empty without such
    links. ``persistence_daemon`` is the name of the program that keeps a device open while its persistence mode is on,
    and closes it when the mode is switched off. The kernel truncates it to 15 bytes.
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
    library_device_nodes: tuple[str, ...]
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
    persistence_daemon: str = ""

    def allows_label(self, name: str) -> bool:
        """Return whether this collection may write a label of this name for the vendor's devices."""
        return name in self.labels or any(re.fullmatch(each, name) for each in self.label_patterns)

    def groups_of(self, attributes: Mapping[str, Any]) -> dict[str, str]:
        """Return the groups of a device with these attributes, by the term for the group."""
        return {title: str(attributes[name]) for name, title in self.link_groups.items() if name in attributes}

    def document(self) -> dict[str, Any]:
        """Return the facts as JSON data."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (Exporter, Fabric)):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
