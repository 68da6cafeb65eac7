# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Tells whoever asks how the driver is: over a socket, so that the answer is always a living process's.

One connection, one JSON object, then the end. Nothing is read from who asks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Callable

from .. import __version__
from ..config import DRA
from ..core.health import to_data
from ..core.plugin_devices import ResourceStatus
from ..kubelet.sockets import check_length, remove
from ..logs import StateLog
from .health import Picture

LOG = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class Role(str, Enum):
    """What an instance does beside others: it comes up, waits for its turn, serves, or stands by since it has handed over."""

    STARTING = "starting"
    WAITING = "waiting"
    SERVING = "serving"
    STANDBY = "standby"


@dataclass(frozen=True)
class DeviceStatus:
    """One physical device: its UUID ("" if it never told it), its name, its fault or "", and all that is wrong with it."""

    uuid: str
    name: str
    fault: str
    ailments: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Status:
    """How one driver is.

    ``ready`` says that claims are served; ``problems`` says, part by part, why not. The fault of a device is none of
    the driver's. ``looked_at`` is when the hardware was last seen (seconds since the epoch, 0 for never), ``published``
    whether the API server holds what was seen then. ``instance`` is which one it is, "" for the one that is no pod;
    ``configuration`` the digest of the file that it works by. ``refused`` is what keeps it from working by a later one: the ``digest``
    of that, and the ``problem``. ``kubelet_interface`` is how devices are given to pods; ``resources`` what pods can ask for where that is
    the device-plugin API: ``published`` and ``registered`` are then about these.
    ``not_offered`` are the physical devices of which that API offers nothing, each with the reason. ``pending_cleanup`` is what is left to
    undo of claims that have ended.
    """

    driver: str
    ready: bool
    problems: tuple[str, ...]
    pid: int
    version: str
    boot_id: str
    looked_at: float
    published: bool
    registered: bool
    devices: tuple[DeviceStatus, ...]
    instance: str = ""
    role: Role = Role.STARTING
    configuration: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    kubelet_interface: str = DRA
    resources: tuple[ResourceStatus, ...] = ()
    not_offered: Mapping[str, str] = field(default_factory=dict)
    pending_cleanup: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the status as data."""
        return asdict(self)


def status_of(
    driver: str,
    picture: Picture,
    problems: Sequence[str],
    *,
    boot_id: str,
    published: bool,
    registered: bool,
    instance: str = "",
    role: Role = Role.SERVING,
    configuration: str = "",
    refused: Mapping[str, str] | None = None,
    kubelet_interface: str = DRA,
    resources: Sequence[ResourceStatus] = (),
    not_offered: Mapping[str, str] | None = None,
    pending_cleanup: Sequence[str] = (),
) -> Status:
    """Put a status together."""
    found = list(problems)
    snapshot = picture.snapshot
    if not registered:
        found.append("kubelet: it has not registered the driver")
    return Status(
        driver=driver,
        ready=not found,
        problems=tuple(found),
        pid=os.getpid(),
        version=__version__,
        boot_id=boot_id,
        looked_at=snapshot.looked_at,
        published=published and snapshot.looked_at > 0,
        registered=registered,
        devices=devices_of(picture),
        instance=instance,
        role=role,
        configuration=configuration,
        refused=refused or {},
        kubelet_interface=kubelet_interface,
        resources=tuple(resources),
        not_offered=not_offered or {},
        pending_cleanup=tuple(pending_cleanup),
    )


def devices_of(picture: Picture) -> tuple[DeviceStatus, ...]:
    """Return the devices of the last scan, each with its fault and its ailments, and the missing ones of prepared claims."""
    snapshot, told = picture.snapshot, to_data(picture.ailments)
    if snapshot.survey is None:
        return ()
    missing = {
        each.held.name: DeviceStatus(
            each.held.partition_uuid or each.held.device_uuid,
            each.held.name,
            f"{each.sign.cause}: {each.sign.describe()}",
        )
        for each in picture.missing
    }
    found = tuple(
        DeviceStatus(
            finding.uuid,
            finding.name,
            f"{finding.fault.cause}: {finding.fault}" if finding.fault is not None else "",
            tuple(told.get(finding.uuid, ())),
        )
        for finding in snapshot.survey.findings
    )
    return (*found, *missing.values())


class StatusServer:
    """Answers at ``path``. ``look`` returns the status of that moment."""

    def __init__(self, path: str, look: Callable[[], Status]) -> None:
        check_length(path, "kubelet_root or state_directory")
        self._path = path
        self._look = look

    async def run(self) -> None:
        """Answer until cancelled; serve again when the socket is lost."""
        state = StateLog(LOG)
        while True:
            try:
                server = await asyncio.start_unix_server(self._answer, self._path)
            except OSError as error:
                state.report(f"the socket {self._path} cannot be served: {error}", level=logging.WARNING)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                Path(self._path).chmod(0o600)
                while Path(self._path).exists():
                    await asyncio.sleep(RETRY_SECONDS)
            finally:
                server.close()
                remove(self._path)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        try:
            writer.write(json.dumps(self._look().to_dict()).encode())
            await writer.drain()
        except ConnectionError:
            pass  # whoever asked has gone
        finally:
            writer.close()
