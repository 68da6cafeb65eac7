# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define companions: programs on the node that let the containers of a prepared claim share a device, for any vendor.

A companion belongs to one claim. It continues when the node driver's process ends, and ends with the claim. Its
environment and its commands are in two files next to its directory. The directory is in memory and shared with the
claim's containers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dra.opaque_config import ConfigRefused, Configuration
from .cdi import DeviceNode

#: The directory of all companions. It is in memory, because no companion survives a reboot.
DIRECTORY = "/run/dra-accelerators/companions"
#: The prefix of service names. The kind, "@", and the companion's name follow.
UNIT_PREFIX = "dra-accelerators-"
#: The command that lists all companion units, one per line, with the unit's name first.
LIST_UNITS = ("systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", f"{UNIT_PREFIX}*@*.service")
#: The environment variable with the companion's claim.
CLAIM = "DRA_ACCELERATORS_CLAIM"
#: The sharing key for a companion that serves all claims on the device instead of one claim.
OF_DEVICE = "servesDevice"
#: The beginning of the owner of a companion that serves all claims on a device. The device's UUID follows.
_DEVICE_OWNER_PREFIX = "device-"
SHARED_MEMORY = "shm"  # in a companion's directory; mounted as /dev/shm in the companion and the containers


@dataclass(frozen=True)
class SharedDevice:
    """One device of a claim that its containers share through a companion.

    ``name`` is the published name. ``uuid`` identifies the device or the partition, and is empty before the partition
    exists. ``sharing`` are the settings from the configuration, decoded by the vendor.
    """

    cdi_name: str
    name: str
    request: str
    uuid: str
    is_partition: bool
    sharing: Mapping[str, Any]


@dataclass(frozen=True)
class Companion:
    """One program to run for a claim: its kind, its devices (CDI names), and its input.

    ``environment`` is its environment. ``commands`` are lines for the vendor's control program after the start.
    ``nodes`` are the device nodes that it needs on the host. ``claim`` is the claim's namespace and name, separated by a
    slash. The environment contains it, so that a driver that lost its records can find the claim. ``client`` are
    environment variables for the claim's containers, in addition to the variables for all claims.
    """

    kind: str
    name: str
    devices: tuple[str, ...]
    environment: Mapping[str, str]
    commands: tuple[str, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    claim: str = ""
    client: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """Return the UID of its claim, or the owner of a companion that serves all claims on a device."""
        return claim_of(self.name)

    @property
    def folder(self) -> str:
        """Return the path of its directory."""
        return f"{DIRECTORY}/{self.name}"

    @property
    def environment_text(self) -> str:
        """Return the content of its environment file, in systemd's format."""
        claim_environment = {CLAIM: self.claim} if self.claim else {}
        return "".join(
            f'{name}="{value}"\n' for name, value in sorted({**self.environment, **claim_environment}.items())
        )

    @property
    def commands_text(self) -> str:
        """Return the content of its command file."""
        return "".join(f"{command}\n" for command in self.commands)


def companion_name(claim_uid: str, number: int) -> str:
    """Return the name of a claim's companion.

    It contains the claim's UID, so that companions without a claim can be found.
    """
    return f"{claim_uid}.{number}"


def claim_of(name: str) -> str:
    """Return the UID of the claim that a companion was created for."""
    return name.rpartition(".")[0]


def device_owner(uuid: str) -> str:
    """Return the owner of the companions that serve all claims on a device."""
    return f"{_DEVICE_OWNER_PREFIX}{uuid}"


def device_of(owner: str) -> str:
    """Return the UUID of the device whose claims an owner's companions serve; "" if the owner is a claim."""
    return owner[len(_DEVICE_OWNER_PREFIX) :] if owner.startswith(_DEVICE_OWNER_PREFIX) else ""


def device_owners(devices: Iterable[SharedDevice]) -> frozenset[str]:
    """Return the owners of the companions that these devices of a claim share with other claims."""
    return frozenset(device_owner(device.uuid) for device in devices if device.sharing.get(OF_DEVICE))


def claim_in_environment(environment_text: str) -> str:
    """Return the claim's namespace and name from a companion's environment; "" if it has no claim."""
    for line in environment_text.splitlines():
        name, _equals, value = line.partition("=")
        if name == CLAIM:
            return value.strip('"')
    return ""


def parse_unit_list(text: str) -> tuple[str, ...]:
    """Return the unit names in the output of LIST_UNITS."""
    return tuple(line.split()[0] for line in text.splitlines() if line.strip())


def sharing_of(
    configurations: Iterable[Configuration],
    *,
    admin: bool = False,
    consumed: Mapping[str, int] | None = None,
    totals: Mapping[str, int] | None = None,
    alongside: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Return the sharing settings of one device from its configurations; empty if no companion shares the device.

    ``alongside`` are the UUIDs of all devices that the same configuration applies to, if known. If several claims share
    the device, the settings are limited to the amounts that the claim has ``consumed`` of the ``totals``. Raises
    ConfigRefused if the request has admin access.
    """
    found: Mapping[str, Any] = {}
    for configuration in configurations:
        kind = configuration.kind
        wanted = kind.named(kind.sharing(configuration.values), alongside)
        if wanted:
            found = kind.within(wanted, consumed, totals or {}) if consumed else wanted
    if found and admin:
        raise ConfigRefused(
            "it has a program run for the device, and a claim with administrator's access changes nothing on a device",
            hint="Leave the configuration out, or adminAccess.",
        )
    return found
