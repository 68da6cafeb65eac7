# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Run a module for a package group: read the state, plan, reject or apply the changes, and return the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .._host.driver_installation import DeviceUsers
from ..core.host.system import System
from .argspec import read_source, verified_files
from .group_installer import GroupInstaller
from .group_planner import Decision, Options, Planner, unit_states
from .interface import PackageProblem, PackageTool, Places
from .package_group import Group, Record


def options_of(params: Mapping[str, Any], places: Places, *, version: str, latest: bool = False) -> Options:
    """Read the module's options. Raises KeyProblem for a key with a different fingerprint."""
    source, key = read_source(params["source"], places)
    return Options(
        version=version,
        latest=latest,
        source=source,
        key=key,
        files=params["files"],
        hold=params["hold"],
        remove_unmanaged=params["remove_unmanaged"],
    )


def apply_group(
    params: Mapping[str, Any],
    *,
    check: bool,
    system: System,
    apt: PackageTool,
    group: Group,
    options: Options,
    users: Callable[[], DeviceUsers] = DeviceUsers,
    proof: Callable[[], None] = lambda: None,
    devices: str = "devices",
) -> dict[str, Any]:
    """Install or remove a package group and return the module's result. Raises AcceleratorError."""
    installer = GroupInstaller(system, apt, group, keep=params["keep"], proof=proof)
    given = params if params["state"] == "present" else {**params, "files": []}
    with verified_files(system, given, is_check=check) as verified:
        own = replace(options, files=verified["files"])
        return _apply_group(params, installer, own, users, check=check, devices=devices)


def _apply_group(
    params: Mapping[str, Any],
    installer: GroupInstaller,
    options: Options,
    users: Callable[[], DeviceUsers],
    *,
    check: bool,
    devices: str,
) -> dict[str, Any]:
    system, apt, group = installer.system, installer.apt, installer.group
    if not check:
        installer.mend()
    planner = Planner(system, apt, group, options, users)
    decision = {"present": planner.present, "previous": planner.previous, "absent": planner.absent}[params["state"]]()
    before, record = group_state(planner), planner.record
    if not check and decision.steps:
        check_decision(decision, devices)
        record = installer.carry_out(decision.work)
    after = predicted_state(before, planner, decision) if check else group_state(Planner(system, apt, group, options))
    return {
        "changed": bool(decision.steps),
        "steps": list(decision.steps),
        "changes": [change.describe() for change in decision.work.changes],
        "missing_requirements": dict(decision.lacking),
        "blocked_by": {
            "claims": list(decision.blocked_by.claims),
            "processes": [str(process) for process in decision.blocked_by.processes],
            "pods": list(decision.blocked_by.pod_names()),
        },
        # An interrupted run must be repaired, which check mode does not do.
        "up_to_date": not decision.steps and not record.doing,
        "unmanaged": list(decision.left),
        "before": before,
        "after": after,
        "previous_available": is_previous_available(record),
        "diff": differences(before, after, decision),
    }


def check_decision(decision: Decision, devices: str) -> None:
    """Reject changes with missing prerequisites or devices in use, before anything is changed. Raises AcceleratorError."""
    if decision.lacking:
        raise PackageProblem(
            " ".join(decision.lacking.values()), hint="Nothing was changed.", code=min(decision.lacking)
        )
    decision.blocked_by.refuse_claims(devices)
    decision.blocked_by.refuse_processes(devices)


def is_previous_available(record: Record) -> bool:
    """Return whether the previous version can be restored."""
    return record.former is not None and record.former.complete


def group_state(planner: Planner) -> dict[str, Any]:
    """Return the current state: version, packages, and enabled units."""
    states = unit_states(planner.system, planner.group)
    return {
        "version": planner.version,
        "packages": planner.group.installed_members(planner.packages.installed),
        "units": sorted(name for name, state in states.items() if state.exists and state.is_on),
    }


def predicted_state(before: dict[str, Any], planner: Planner, decision: Decision) -> dict[str, Any]:
    """Return the state after the changes. Package effects on units without a desired state are unknown."""
    if not decision.steps:
        return before
    packages = dict(before["packages"])
    for change in decision.work.changes:
        if change.after:
            packages[change.name] = change.after
        else:
            packages.pop(change.name, None)
    for name in decision.work.purge:
        packages.pop(name, None)
    packages = planner.group.installed_members(packages)
    target = decision.work.target
    units = set(before["units"]) if packages else set()
    for unit in planner.group.units if target is not None and not decision.work.to_origin else ():
        if unit.on is not None:
            units = units | {unit.name} if unit.on else units - {unit.name}
    return {"version": target.version if target else "", "packages": packages, "units": sorted(units)}


def differences(before: dict[str, Any], after: dict[str, Any], decision: Decision) -> list[dict[str, str]]:
    """Return the diff of the changes in Ansible's form."""

    def lines(facts: dict[str, Any]) -> str:
        packages = "".join(f"{name} {version}\n" for name, version in facts["packages"].items())
        return packages + "".join(f"{name} on\n" for name in facts["units"])

    shown = [lines(facts) for facts in (before, after)]
    whole = {"before_header": "packages and units", "after_header": "packages and units"}
    return [
        *([{**whole, "before": shown[0], "after": shown[1]}] if shown[0] != shown[1] else []),
        *(change.to_diff() for change in decision.work.files),
    ]
