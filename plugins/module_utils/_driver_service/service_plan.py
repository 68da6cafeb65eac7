# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the systemd steps that start or stop the node driver's service, and determine when it has started."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._host.node_facts import DRIVER_UNIT, RELIEF_UNIT
from ..core.host.companions import UNIT_PREFIX, parse_unit_list
from ..core.store.state_files import LOCK, OWN_NAMES, STORE
from ..core.texts import join_problems

#: The reason of a restart if the fingerprints differ.
OUTDATED_PROCESS = "it was started from another release, environment, or configuration"


@dataclass(frozen=True)
class Step:
    """One systemctl call and its reason."""

    action: str
    unit: str
    reason: str

    def argv(self) -> list[str]:
        """Return the systemctl command."""
        # The caller waits for the relief itself, because it checks more than systemd.
        words = ["--no-block"] if (self.action, self.unit) == ("start", RELIEF_UNIT) else []
        return ["systemctl", self.action, *words, *([self.unit] if self.unit else [])]

    def to_dict(self) -> dict[str, str]:
        """Return the step as module data."""
        return {"action": self.action, "unit": self.unit, "reason": self.reason}


def plan_start(
    units: Mapping[str, Mapping[str, Any]],
    *,
    helpers: Sequence[str],
    running: str,
    wanted: str,
    changed: bool,
    outdated: bool = False,
    relieved: bool = False,
) -> tuple[Step, ...]:
    """Return the systemctl steps after which the driver runs with the desired files, now and after each boot.

    ``units`` are the states of the driver, the relief, and the ``helpers``. ``running`` and ``wanted`` are fingerprints
    of the files with which the process was started and should be started. ``changed``: this run has written unit files, or
    would in check mode. ``outdated``: the process uses an older configuration file than the installed one. ``relieved``: the
    process would hand over to the relief.
    """
    driver, relief = units[DRIVER_UNIT], units[RELIEF_UNIT]
    steps = []
    if changed or any(unit["need_reload"] for unit in units.values()):
        steps.append(Step("daemon-reload", "", "the unit files have changed"))
    steps += [
        Step("enable", name, f"it is {units[name]['enabled'] or 'not installed'}")
        for name in (DRIVER_UNIT, *helpers)
        if units[name]["enabled"] not in ("enabled", "static", "indirect")
    ]
    relief_runs = relief["active"] not in ("inactive", "failed")
    if driver["active"] not in ("active", "reloading"):
        # A starting process can use other files, and a start action would only wait for it.
        action = "restart" if driver["main_pid"] else "start"
        steps.append(Step(action, DRIVER_UNIT, f"it is {driver['active']}"))
    elif running != wanted:
        if relieved and relief["exists"]:
            # A relief that an interrupted run left can be of another release.
            action = "restart" if relief_runs else "start"
            steps.append(Step(action, RELIEF_UNIT, "it serves while the driver restarts"))
            relief_runs = True
        steps.append(Step("restart", DRIVER_UNIT, OUTDATED_PROCESS))
    elif outdated:
        steps.append(Step("reload", DRIVER_UNIT, "it uses another configuration than its configuration file"))
    steps += [
        Step("start", name, f"it is {units[name]['active']}") for name in helpers if units[name]["active"] != "active"
    ]
    if relief_runs:
        steps.append(Step("stop", RELIEF_UNIT, "the driver serves again"))
    return tuple(steps)


def plan_again(units: Mapping[str, Mapping[str, Any]], *, running: str, wanted: str) -> tuple[Step, ...]:
    """Return the remaining steps of ``plan_start`` after a timeout."""
    driver, relief = units[DRIVER_UNIT], units[RELIEF_UNIT]
    if relief["active"] in ("inactive", "failed"):
        return ()
    steps = []
    if driver["active"] in ("active", "reloading") and running != wanted:
        steps.append(Step("restart", DRIVER_UNIT, OUTDATED_PROCESS))
    return (*steps, Step("stop", RELIEF_UNIT, "the driver serves again"))


@dataclass(frozen=True)
class ServiceState:
    """One check of the driver: its process according to systemd, its age in seconds, and the answer of ``status``.

    ``age`` has the value None without a process, and ``drivers`` if ``status`` did not answer.
    """

    pid: int
    age: float | None
    restarts: int
    active: str
    drivers: Sequence[Mapping[str, Any]] | None
    problem: str = ""


def works_by_another(drivers: Iterable[Mapping[str, Any]], digest: str) -> tuple[str, ...]:
    """Return the drivers that use another configuration file than the one with this digest.

    Older releases report none.
    """
    return tuple(
        str(one.get("driver", "the driver"))
        for one in drivers
        if digest and one.get("configuration") not in (None, "", digest)
    )


def missing(state: ServiceState, *, fingerprint: str, running: str, steady: float, digest: str = "") -> tuple[str, ...]:
    """Return the unmet conditions for a started driver; empty if it has started.

    The driver has started if systemd reports it as active, the same process has run for ``steady`` seconds, the process
    was started with the desired files, and each of its drivers reports that it is ready and has published its latest
    scan. ``digest`` is that of the configuration file.
    """
    if state.active != "active" or not state.pid or state.age is None:
        restarts = f", and was restarted {state.restarts} times" if state.restarts else ""
        return (f"its unit is {state.active}{restarts}",)
    found = []
    if fingerprint and running != fingerprint:
        found.append("its process was not started from the desired release, environment, and configuration")
    if state.age < steady:
        found.append(f"its process {state.pid} has run for {state.age:.0f} of {steady:.0f} seconds")
    if state.drivers is None:
        found.append(state.problem or "its status does not respond")
        return tuple(found)
    if not state.drivers:
        found.append("its status contains no driver")
    found += [f"{name} uses another configuration file" for name in works_by_another(state.drivers, digest)]
    for one in state.drivers:
        name = one.get("driver", "the driver")
        if one.get("pid") not in (None, state.pid):
            found.append(f"{name} responds from the process {one['pid']}, and the unit's process is {state.pid}")
        problems = join_problems(one.get("problems") or [])
        if not one.get("ready"):
            found.append(f"{name} is not ready" + (f": {problems}" if problems else ""))
        elif not one.get("published"):
            found.append(f"{name} has not published its devices" + (f": {problems}" if problems else ""))
    return tuple(found)


def can_be_relieved(drivers: Sequence[Mapping[str, Any]], pid: int) -> bool:
    """Return whether the driver's process serves and would hand over to another instance.

    Releases that do not report their configuration do not support other instances.
    """
    return bool(drivers) and all(
        one.get("role") == "serving" and one.get("pid") == pid and one.get("ready") and one.get("configuration")
        for one in drivers
    )


def not_relieved(state: ServiceState, *, fingerprint: str, running: str, steady: float, digest: str) -> tuple[str, ...]:
    """Return the unmet conditions for a relief that serves instead of the driver, for ``steady`` seconds; empty if it does."""
    conditions = missing(state, fingerprint=fingerprint, running=running, steady=steady, digest=digest)
    waiting = [str(one.get("driver", "the driver")) for one in state.drivers or () if one.get("role") != "serving"]
    not_serving = (f"{name} does not serve from it yet" for name in waiting)
    return tuple(f"the relief: {each}" for each in (*conditions, *not_serving))


def age_of(stat: str, uptime: str, ticks: int) -> float:
    """Return the age of a process in seconds, from /proc/PID/stat, /proc/uptime, and the clock ticks.

    Raises ValueError.
    """
    # The program's name is in parentheses and can contain any character.
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError(f"/proc/PID/stat has {len(fields)} fields after the name, expected 20 or more")
    return max(0.0, float(uptime.split()[0]) - int(fields[19]) / ticks)


# The directory in which systemd stores, in one file per persistent timer, when the timer last elapsed.
STAMPS = "/var/lib/systemd/timers"


@dataclass(frozen=True)
class State:
    """The files under one driver's name in the kubelet's directories. ``alive`` are the sockets with a listener.

    In ``names``, a directory has a slash at the end. ``locks/`` comes after its files, ``locks/NAME``.
    """

    folder: str
    exists: bool
    names: tuple[str, ...]
    ours: bool
    registrations: tuple[str, ...]
    sockets: tuple[str, ...]
    alive: tuple[str, ...]


def registrations(registry: str, driver: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the sockets in the kubelet's registration directory that belong to a driver's instances.

    An instance is a pod. Its socket has the pod's UID, or a digest of it, in its name.
    """
    pattern = re.compile(rf"{re.escape(driver)}(-[0-9a-f]{{8}}(-[0-9a-f-]{{27}})?)?-reg\.sock")
    return tuple(f"{registry}/{name}" for name in names if pattern.fullmatch(name))


def plan_stop(units: Mapping[str, Mapping[str, Any]]) -> tuple[Step, ...]:
    """Return the steps that disable and stop the units whose files have the collection's mark."""
    steps = []
    for name, unit in units.items():
        if not unit["managed"]:
            continue
        if unit["enabled"] in ("enabled", "enabled-runtime"):
            steps.append(Step("disable", name, "it is no longer needed"))
        if unit["active"] not in ("inactive", "failed"):
            steps.append(Step("stop", name, "it is no longer needed"))
    return tuple(steps)


def plan_stop_companions(listed: str) -> tuple[Step, ...]:
    """Return the steps that stop the services of claims, from the output of ``systemctl list-units``.

    Only the driver starts these services, from templates that are removed with it. The program stops before its shared
    memory.
    """
    ours = [unit for unit in parse_unit_list(listed) if unit.startswith(UNIT_PREFIX) and "@" in unit]
    return tuple(
        Step("stop", unit, "the driver that ran it for a claim is removed")
        for unit in sorted(ours, key=lambda unit: (unit.startswith(f"{UNIT_PREFIX}memory@"), unit))
    )


def stamps(units: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the timestamp files of this collection's timers; systemd does not remove them."""
    return [f"{STAMPS}/stamp-{name}" for name, unit in units.items() if unit["managed"] and name.endswith(".timer")]


def leftovers(state: State, *, stopping: bool) -> tuple[list[str], list[str]]:
    """Return the files of a driver's state to remove, in order, and those to keep with the reason.

    ``stopping`` is true if the driver belongs to this collection and is stopped next. Its sockets can then still be in use.
    """
    if not state.exists and not state.registrations:
        return [], []
    alive = () if stopping else state.alive
    if alive:
        return [], [f"{path}: another program listens there" for path in alive]
    if not state.ours:
        return [], ([f"{state.folder}: it is not the state of this driver"] if state.exists else [])
    others = [name for name in state.names if not OWN_NAMES.fullmatch(name)]
    not_empty = {f"{name.partition('/')[0]}/" for name in others if "/" in name}
    own = [name.rstrip("/") for name in state.names if name not in others and name not in not_empty]
    # The files that identify the directory are removed last, so that the next run can resume a killed run.
    own.sort(key=lambda name: name in (STORE, LOCK))
    removed = [*(f"{state.folder}/{name}" for name in own), *state.registrations]
    if not others:
        removed.append(state.folder)
    return removed, [f"{state.folder}/{name}: not a file of this driver" for name in others]
