# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""One run of a module that brings a group of packages to a version: looks, decides, refuses or does it, and says what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ._driver_install import InTheWay
from ._package_group import Group, Record
from ._package_group_plan import Decision, Options, Planner, unit_states
from ._package_group_tool import GroupInstaller
from ._package_options import read_source, verified_files
from ._package_port import PackageProblem, PackageTool, Places
from .core.system import System


def options_of(params: Mapping[str, Any], places: Places, *, version: str, latest: bool = False) -> Options:
    """Read what is asked for. Raises KeyProblem for a key with another fingerprint."""
    source, key = read_source(params["source"], places)
    return Options(
        version=version,
        latest=latest,
        source=source,
        key=key,
        files=params["files"],
        hold=params["hold"],
        foreign=params["foreign"],
    )


def bring(
    params: Mapping[str, Any],
    *,
    check: bool,
    system: System,
    apt: PackageTool,
    group: Group,
    options: Options,
    users: Callable[[], InTheWay] = InTheWay,
    proof: Callable[[], None] = lambda: None,
    devices: str = "devices",
) -> dict[str, Any]:
    """Install or remove a group of packages; return the module's result. Raises AcceleratorError."""
    installer = GroupInstaller(system, apt, group, keep=params["keep"], proof=proof)
    given = params if params["state"] == "present" else {**params, "files": []}
    with verified_files(system, given, is_check=check) as verified:
        own = replace(options, files=verified["files"])
        return _bring(params, installer, own, users, check=check, devices=devices)


def _bring(
    params: Mapping[str, Any],
    installer: GroupInstaller,
    options: Options,
    users: Callable[[], InTheWay],
    *,
    check: bool,
    devices: str,
) -> dict[str, Any]:
    system, apt, group = installer.system, installer.apt, installer.group
    if not check:
        installer.mend()
    planner = Planner(system, apt, group, options, users)
    decision = {"present": planner.present, "previous": planner.previous, "absent": planner.absent}[params["state"]]()
    before, record = seen(planner), planner.record
    if not check and decision.steps:
        refuse(decision, devices)
        record = installer.carry_out(decision.work)
    after = foretold(before, planner, decision) if check else seen(Planner(system, apt, group, options))
    return {
        "changed": bool(decision.steps),
        "steps": list(decision.steps),
        "changes": [change.describe() for change in decision.work.changes],
        "lacking": dict(decision.lacking),
        "in_the_way": {
            "claims": list(decision.in_the_way.claims),
            "processes": [str(process) for process in decision.in_the_way.processes],
            "pods": list(decision.in_the_way.pod_names()),
        },
        # A run that was cut short has to be mended, which a look does not do.
        "settled": not decision.steps and not record.doing,
        "left": list(decision.left),
        "before": before,
        "after": after,
        "way_back": way_back(record),
        "diff": differences(before, after, decision),
    }


def refuse(decision: Decision, devices: str) -> None:
    """Refuse what cannot go well, before anything is done. Raises AcceleratorError."""
    if decision.lacking:
        raise PackageProblem(
            " ".join(decision.lacking.values()), hint="Nothing was changed.", code=min(decision.lacking)
        )
    decision.in_the_way.refuse_claims(devices)
    decision.in_the_way.refuse_processes(devices)


def way_back(record: Record) -> bool:
    """Whether the version of before can be gone back to."""
    return record.former is not None and record.former.complete


def seen(planner: Planner) -> dict[str, Any]:
    """Return what is there: the version, the packages, and the units that are on."""
    states = unit_states(planner.system, planner.group)
    return {
        "version": planner.version,
        "packages": planner.group.of_it(planner.packages.installed),
        "units": sorted(name for name, state in states.items() if state.exists and state.is_on),
    }


def foretold(before: dict[str, Any], planner: Planner, decision: Decision) -> dict[str, Any]:
    """Return what would be there afterwards. What packages do with units that nobody has asked for is not known before."""
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
    packages = planner.group.of_it(packages)
    target = decision.work.target
    units = set(before["units"]) if packages else set()
    for unit in planner.group.units if target is not None and not decision.work.to_origin else ():
        if unit.on is not None:
            units = units | {unit.name} if unit.on else units - {unit.name}
    return {"version": target.version if target else "", "packages": packages, "units": sorted(units)}


def differences(before: dict[str, Any], after: dict[str, Any], decision: Decision) -> list[dict[str, str]]:
    """Return what Ansible shows of a change."""

    def lines(facts: dict[str, Any]) -> str:
        packages = "".join(f"{name} {version}\n" for name, version in facts["packages"].items())
        return packages + "".join(f"{name} on\n" for name in facts["units"])

    shown = [lines(facts) for facts in (before, after)]
    whole = {"before_header": "packages and units", "after_header": "packages and units"}
    return [
        *([{**whole, "before": shown[0], "after": shown[1]}] if shown[0] != shown[1] else []),
        *(change.to_diff() for change in decision.work.files),
    ]
