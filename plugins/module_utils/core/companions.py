# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Companions: programs that run on the node beside a prepared claim, whichever vendor's they are, so that containers share.

A companion belongs to one claim, outlives the node driver's process and ends with the claim. What a companion is told lies in
two files beside its folder; the folder is memory that its containers share with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cdi import DeviceNode
from .configuration import ConfigRefused, Configuration

#: Where companions have their folders. In memory: nothing of them outlives a boot.
DIRECTORY = "/run/dra-accelerators/companions"
#: How the names of their services begin; the kind, "@" and the companion's name follow.
UNIT_PREFIX = "dra-accelerators-"
#: What has systemd list them all, one a line, with the unit's name first.
LIST_UNITS = ("systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", f"{UNIT_PREFIX}*@*.service")
#: The variable of its environment that tells its claim.
CLAIM = "DRA_ACCELERATORS_CLAIM"
SHARED_MEMORY = "shm"  # in a companion's folder; what /dev/shm is for it and for the containers


@dataclass(frozen=True)
class SharedDevice:
    """One device of a claim that its containers share through a companion.

    ``name`` is the published one, ``uuid`` the device's or the partition's, empty before the partition exists. ``sharing``
    is what the configuration asks for, decoded by the vendor.
    """

    cdi_name: str
    name: str
    request: str
    uuid: str
    is_partition: bool
    sharing: Mapping[str, Any]


@dataclass(frozen=True)
class Companion:
    """One program to run: of which kind, for which devices (CDI names) of a claim, and what it is told.

    ``environment`` is its environment, ``commands`` are lines for the vendor's control program once it runs. ``nodes`` are
    device nodes that have to be on the machine for it: containers get nodes of their own, and the machine may have none.
    ``claim`` is the claim's namespace and name, with a slash between them: it stands in the environment, so that a driver that has
    lost everything else can ask for it.
    """

    kind: str
    name: str
    devices: tuple[str, ...]
    environment: Mapping[str, str]
    commands: tuple[str, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    claim: str = ""

    @property
    def folder(self) -> str:
        """Its folder."""
        return f"{DIRECTORY}/{self.name}"

    @property
    def environment_text(self) -> str:
        """The content of its environment file, as systemd reads it."""
        told = {CLAIM: self.claim} if self.claim else {}
        return "".join(f'{name}="{value}"\n' for name, value in sorted({**self.environment, **told}.items()))

    @property
    def commands_text(self) -> str:
        """The content of the file with its commands."""
        return "".join(f"{command}\n" for command in self.commands)


def companion_name(claim_uid: str, number: int) -> str:
    """Name a claim's companion. The name tells the claim, so that one of no claim is found."""
    return f"{claim_uid}.{number}"


def claim_of(name: str) -> str:
    """Return the UID of the claim that a companion was made for."""
    return name.rpartition(".")[0]


def claim_told(environment_text: str) -> str:
    """Return the namespace and name of the claim that a companion's environment tells; "" where it tells none."""
    for line in environment_text.splitlines():
        name, _equals, value = line.partition("=")
        if name == CLAIM:
            return value.strip('"')
    return ""


def units_listed(text: str) -> tuple[str, ...]:
    """Return the names of the units in the answer to LIST_UNITS."""
    return tuple(line.split()[0] for line in text.splitlines() if line.strip())


def sharing_of(
    configurations: Iterable[Configuration],
    *,
    admin: bool = False,
    consumed: Mapping[str, int] | None = None,
    totals: Mapping[str, int] | None = None,
    alongside: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Return how the configurations of one device want it shared by a companion; empty where they do not.

    ``alongside`` are the UUIDs of the devices that the same configuration is for, where they are known.
    Of a device that several claims share it stays within what the claim has ``consumed`` of the ``totals``.
    Raises ConfigRefused where the device is asked for with administrator's access.
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
