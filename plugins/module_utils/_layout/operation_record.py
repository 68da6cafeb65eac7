# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Write and delete the record of a repartition operation on the node, which the node driver reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from .._module import end
from ..core.discovery.device_locks import DeviceLocks
from ..core.errors import AcceleratorError, InUse
from ..core.host.system import System
from ..core.partitioning.rules import parse_rules
from ..core.repartition import progress, record
from ..core.repartition.operations import remaining_claims
from ..core.repartition.record import Moment, Record
from ..core.store.prepared_claims import prepared_claims, prepared_partitions, wake_driver

#: Seconds that claims on the devices have to finish their preparation, before the devices count as in use.
LOCK_SECONDS = 60.0


def wanted_record(params: dict[str, Any], existing: Record | None, now: Moment) -> Record:
    """Return the desired record. Raises InUse with code other-operation."""
    if existing is not None and existing.operation != params["operation"] and existing.holds(now):
        raise InUse(
            f"The operation {existing.operation} is in progress (step {existing.step}) on {', '.join(existing.devices)}",
            hint="Wait until it ends. If its run no longer exists, remove its record with state absent.",
            code="other-operation",
        )
    previous = existing if existing is not None and existing.operation == params["operation"] else None
    settings, boot_settings = params["former_settings"], params["former_boot_settings"]
    if previous is not None:
        settings = previous.former_settings if settings is None else settings
        boot_settings = previous.former_boot_settings if boot_settings is None else boot_settings
    return Record(
        operation=params["operation"],
        devices=tuple(params["devices"]),
        step=params["step"],
        until=0.0,
        wanted=tuple(params["wanted"]),
        former=previous.former if previous is not None and previous.former else tuple(params["former"]),
        names=tuple(params["names"]),
        former_settings=tuple(settings or ()),
        former_boot_settings=None if boot_settings is None else tuple(boot_settings),
    ).held_for(params["seconds"], now)


def is_current(wanted: Record, existing: Record | None, now: Moment) -> bool:
    """Return whether the existing record equals the desired record and has more than nine tenths of its time left."""
    return (
        existing is not None
        and replace(existing, until=wanted.until, boottime=wanted.boottime) == wanted
        and existing.remaining(now) > 0.9 * wanted.seconds
    )


def await_unprepared(
    read_claims: Callable[[], Sequence[str]],
    driver: str,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the driver has unprepared all claims on the devices to change. Raises InUse with code still-prepared and the claims."""
    deadline = clock() + seconds
    while claims := read_claims():
        if clock() >= deadline:
            raise InUse(
                f"After {seconds:g} s the node driver {driver} still has these claims prepared on the partitions to delete: {', '.join(claims)}",
                claims=claims,
                hint="The kubelet makes the driver unprepare a claim when the pod's containers have ended. Check that the kubelet and the driver "
                "run, and read their logs about the claims. Then run this again, which resumes the operation.",
                code="still-prepared",
            )
        sleep(1.0)


def _claims_on_changed_devices(params: dict[str, Any], directory: str) -> tuple[str, ...]:
    """Return the prepared claims on the devices or partitions to change, by the driver's store. Raises AcceleratorError."""
    return remaining_claims(
        prepared_partitions(prepared_claims(f"{directory}/state.db")),
        parse_rules(params["wanted"]),
        [(str(each["device_uuid"]), int(each["start"]), int(each["size"])) for each in params["going"]],
        params["restarts"],
        params["devices"],
    )


def write_record(module: AnsibleModule, system: System, directory: str) -> dict[str, Any]:
    """Record that an operation has begun or continues. When this returns, no claim is being prepared on the devices."""
    params = module.params
    if not 0 < params["seconds"] <= record.LONGEST_SECONDS:
        end(module, msg=f"seconds is {params['seconds']}, expected 1 to {record.LONGEST_SECONDS:g}")
    for rules in (params["wanted"], params["former"]):
        parse_rules(rules)
    if params["step"] == record.APPLYING and not module.check_mode:
        await_unprepared(
            lambda: _claims_on_changed_devices(params, directory),
            str(params["driver"]),
            float(params["unprepare_timeout"]),
        )
    existing, now = record.read(system, directory), record.moment(system)
    wanted = wanted_record(params, existing, now)
    changed = not is_current(wanted, existing, now)
    if changed and not module.check_mode:
        if not system.exists(directory):
            raise AcceleratorError(
                f"The directory {directory} does not exist, so the node driver {params['driver']} has never run on this node",
                hint="Run the playbook dra.accelerators.site first.",
                code="no-driver",
            )
        # While the driver holds the lock of a device, it prepares a claim on it, and has not read the record yet.
        with DeviceLocks(directory, "the module device_repartition").hold(params["devices"], LOCK_SECONDS):
            record.write(system, directory, wanted)
            report_step(module, system, directory, progress.begun(existing, wanted, params["reason"], now.wall))
    before = existing.to_dict() if existing is not None else {}
    return {"changed": changed, "record": wanted.to_dict(), "diff": {"before": before, "after": wanted.to_dict()}}


def report_step(module: AnsibleModule, system: System, directory: str, taken: progress.StartedStep | None) -> None:
    """Record a step, from which the node driver creates an Event. A failure is only a warning, because no other code needs it."""
    if taken is None:
        return
    try:
        progress.add(system, directory, taken)
    except OSError as error:
        module.warn(
            f"The node driver creates no Event for the step {taken.step} of the operation {taken.operation}: {error}"
        )


def delete_record(module: AnsibleModule, system: System, directory: str) -> dict[str, Any]:
    """Delete the record of the operation, and make the driver scan the devices."""
    existing = record.read(system, directory)
    operation = module.params["operation"]
    changed = existing is not None and operation in (None, existing.operation)
    if changed and not module.check_mode:
        record.remove(system, directory)
        if existing is not None:
            report_step(module, system, directory, progress.over(existing, module.params["reason"], time.time()))
        wake_driver(directory)
    before = existing.to_dict() if existing is not None else {}
    return {"changed": changed, "record": before, "diff": {"before": before, "after": {} if changed else before}}
