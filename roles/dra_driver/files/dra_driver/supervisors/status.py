# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Serve the driver's status on a Unix socket, so that each answer comes from a running process.

A connection gets one JSON object and is closed. Nothing is read from the client.
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
from ..core.dra.device_plugin_model import ResourceStatus
from ..core.health.tracker import to_data
from ..kubelet.sockets import check_length, remove
from ..logs import StateLog
from .health import HardwareState

LOG = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class Role(str, Enum):
    """The role of an instance: starting, waiting to become active, active, or standby after a handover."""

    STARTING = "starting"
    WAITING = "waiting"
    SERVING = "serving"
    STANDBY = "standby"


@dataclass(frozen=True)
class DeviceStatus:
    """One physical device: its UUID ("" if never read), its name, its fault or "", and all its health problems."""

    uuid: str
    name: str
    fault: str
    ailments: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Status:
    """The status of one driver.

    ``ready``: claims are served. Otherwise ``problems`` has the reasons, by part. A fault of a device is not a problem
    of the driver. ``looked_at`` is the time of the last scan (seconds since the epoch, 0 for never). ``published``: the
    API server has the result of that scan. ``instance`` is the instance's name, "" if it is not a pod.
    ``configuration`` is the digest of the applied configuration file. ``refused`` has the ``digest`` of a later file
    that was not applied, and the ``problem``. ``kubelet_interface`` is how pods get devices. ``resources`` are the
    resources of the device-plugin API, if that is used; then ``published`` and ``registered`` refer to them.
    ``not_offered`` are the physical devices without any offered device in that API, each with the reason.
    ``pending_cleanup`` describes the pending cleanup of ended claims.
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
    hardware_state: HardwareState,
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
    """Return a status with this data."""
    found = list(problems)
    snapshot = hardware_state.snapshot
    if not registered:
        found.append("kubelet: it has not registered the driver")
    return Status(
        driver=driver,
        ready=not found,
        problems=tuple(found),
        pid=os.getpid(),
        version=__version__,
        boot_id=boot_id,
        looked_at=snapshot.scanned_at,
        published=published and snapshot.scanned_at > 0,
        registered=registered,
        devices=devices_of(hardware_state),
        instance=instance,
        role=role,
        configuration=configuration,
        refused=refused or {},
        kubelet_interface=kubelet_interface,
        resources=tuple(resources),
        not_offered=not_offered or {},
        pending_cleanup=tuple(pending_cleanup),
    )


def devices_of(hardware_state: HardwareState) -> tuple[DeviceStatus, ...]:
    """Return the devices of the last scan, each with its fault and health problems, and the missing devices of prepared claims."""
    snapshot, faults = hardware_state.snapshot, to_data(hardware_state.faults)
    if snapshot.survey is None:
        return ()
    missing = {
        each.device_record.name: DeviceStatus(
            each.device_record.partition_uuid or each.device_record.device_uuid,
            each.device_record.name,
            f"{each.sign.cause}: {each.sign.describe()}",
        )
        for each in hardware_state.missing
    }
    found = tuple(
        DeviceStatus(
            finding.uuid,
            finding.name,
            f"{finding.fault.cause}: {finding.fault}" if finding.fault is not None else "",
            tuple(faults.get(finding.uuid, ())),
        )
        for finding in snapshot.survey.findings
    )
    return (*found, *missing.values())


class StatusServer:
    """Serve the status at ``path``. ``read_status`` returns the current status."""

    def __init__(self, path: str, read_status: Callable[[], Status]) -> None:
        check_length(path, "kubelet_root or state_directory")
        self._path = path
        self._read_status = read_status

    async def run(self) -> None:
        """Serve until canceled. Serve again if the socket is lost."""
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
            writer.write(json.dumps(self._read_status().to_dict()).encode())
            await writer.drain()
        except ConnectionError:
            pass  # the client has disconnected
        finally:
            writer.close()
