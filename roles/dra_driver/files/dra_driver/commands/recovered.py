# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``dra-driver recovered``: report to the driver that an administrator has reset or repaired devices."""

from __future__ import annotations

from collections.abc import Sequence

from .. import config
from ..core.errors import AcceleratorError, NotFound
from ..core.health import repair_marks
from ..core.host.system import System
from ..core.store.prepared_claims import wake_driver
from ..core.vendors.registry import create
from ..supervisors.health import known_faults

ALL = "all"


def report_repairs(config_path: str, devices: Sequence[str]) -> tuple[str, ...]:
    """Mark these devices as repaired, wake the driver, and return a line for each of them.

    The driver clears the faults that the devices have reported. Faults found by a scan stay until a scan no longer
    finds them. Raises NotFound for a device without a reported fault; then no device is marked.
    """
    configuration = config.load(config_path)
    chosen: dict[str, list[str]] = {}
    for backend in configuration.backends:
        name = configuration.driver_name or create(backend, System()).driver_name
        directory = configuration.state_directory_of(name)
        chosen[directory] = [uuid for uuid in _known(directory) if uuid in devices or ALL in devices]
    found = [uuid for uuids in chosen.values() for uuid in uuids]
    unknown = [uuid for uuid in devices if uuid not in (ALL, *found)]
    if unknown:
        raise NotFound(
            f"The driver knows no fault of {', '.join(unknown)}",
            hint="`dra-driver devices` shows the UUIDs and the faults.",
        )
    lines = []
    for directory, uuids in chosen.items():
        try:
            repair_marks.mark(directory, uuids, repair_marks.REPAIRED)
        except OSError as error:
            raise AcceleratorError(
                f"The repair cannot be reported in {directory}: {error.strerror}", hint="Run this command as root."
            ) from error
        when = "" if wake_driver(directory) else ", for the next start of the driver"
        lines += [f"{uuid}: reported{when}" for uuid in uuids]
    return tuple(lines) or ("no device has a fault",)


def _known(directory: str) -> tuple[str, ...]:
    """Return the UUIDs of the devices with recorded faults."""
    try:
        return tuple(known_faults(System(), directory))
    except (OSError, ValueError) as error:
        raise AcceleratorError(
            f"The faults in {directory} cannot be read: {error}", hint="Run this command as root."
        ) from error
