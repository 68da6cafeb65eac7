# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The node driver as a service: which steps lead to it, and when it counts as started."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._node import DRIVER_UNIT, RELIEF_UNIT
from .core.companions import UNIT_PREFIX, units_listed
from .core.device_locks import FOLDER as LOCKS
from .core.texts import join_problems


@dataclass(frozen=True)
class Step:
    """One call of systemctl, and why."""

    action: str
    unit: str
    reason: str

    def argv(self) -> list[str]:
        """The command that takes the step."""
        # Whoever waits for the relief sees more than systemd does.
        words = ["--no-block"] if (self.action, self.unit) == ("start", RELIEF_UNIT) else []
        return ["systemctl", self.action, *words, *([self.unit] if self.unit else [])]

    def to_dict(self) -> dict[str, str]:
        """The step as a module returns it."""
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
    """Decide what systemd has to be told so that the driver runs from what is wanted, now and at every boot.

    ``units`` are the driver's own, the relief's, and ``helpers``. ``running`` and ``wanted`` are fingerprints of what the process
    was and is to be started from; ``changed`` says that files of the units have just been written, or would have been, ``outdated``
    that the process works by another configuration file than the one that is there, and ``relieved`` that it would hand over.
    """
    driver, relief = units[DRIVER_UNIT], units[RELIEF_UNIT]
    steps = []
    if changed or any(unit["need_reload"] for unit in units.values()):
        steps.append(Step("daemon-reload", "", "the units' files have changed"))
    steps += [
        Step("enable", name, f"it is {units[name]['enabled'] or 'not installed'}")
        for name in (DRIVER_UNIT, *helpers)
        if units[name]["enabled"] not in ("enabled", "static", "indirect")
    ]
    is_left = relief["active"] not in ("inactive", "failed")
    if driver["active"] not in ("active", "reloading"):
        # A process that is starting may have been started from something else: start alone would wait for it.
        action = "restart" if driver["main_pid"] else "start"
        steps.append(Step(action, DRIVER_UNIT, f"it is {driver['active']}"))
    elif running != wanted:
        if relieved and relief["exists"]:
            # One that a run which was cut short has left may be of another release.
            action = "restart" if is_left else "start"
            steps.append(Step(action, RELIEF_UNIT, "it serves while the driver is started again"))
            is_left = True
        steps.append(Step("restart", DRIVER_UNIT, "it was started from another release, environment or configuration"))
    elif outdated:
        steps.append(Step("reload", DRIVER_UNIT, "its configuration file is another one than it works by"))
    steps += [
        Step("start", name, f"it is {units[name]['active']}") for name in helpers if units[name]["active"] != "active"
    ]
    if is_left:
        steps.append(Step("stop", RELIEF_UNIT, "the driver serves again"))
    return tuple(steps)


def plan_again(units: Mapping[str, Mapping[str, Any]], *, running: str, wanted: str) -> tuple[Step, ...]:
    """Decide what is still to be done of ``plan_start`` where patience ended while something was waited for."""
    driver, relief = units[DRIVER_UNIT], units[RELIEF_UNIT]
    if relief["active"] in ("inactive", "failed"):
        return ()
    steps = []
    if driver["active"] in ("active", "reloading") and running != wanted:
        steps.append(Step("restart", DRIVER_UNIT, "it was started from another release, environment or configuration"))
    return (*steps, Step("stop", RELIEF_UNIT, "the driver serves again"))


@dataclass(frozen=True)
class Look:
    """One look at the driver: its process as systemd knows it, how long that has run, and what ``status`` answers.

    ``age`` is None where no process runs; ``drivers`` is None where ``status`` did not answer.
    """

    pid: int
    age: float | None
    restarts: int
    active: str
    drivers: Sequence[Mapping[str, Any]] | None
    problem: str = ""


def works_by_another(drivers: Iterable[Mapping[str, Any]], digest: str) -> tuple[str, ...]:
    """Return the drivers that work by another configuration file than the one with this digest. Older releases tell none."""
    return tuple(
        str(one.get("driver", "the driver"))
        for one in drivers
        if digest and one.get("configuration") not in (None, "", digest)
    )


def missing(look: Look, *, fingerprint: str, running: str, steady: float, digest: str = "") -> tuple[str, ...]:
    """Return what is still missing until the driver counts as started; nothing when it is.

    Started means: systemd has it as active, one and the same process has run for ``steady`` seconds, it was started from
    what is wanted, and each of its drivers says that it is ready and has published what it has last seen. ``digest`` is that of
    the configuration file.
    """
    if look.active != "active" or not look.pid or look.age is None:
        again = f", and was started again {look.restarts} times" if look.restarts else ""
        return (f"its unit is {look.active}{again}",)
    found = []
    if fingerprint and running != fingerprint:
        found.append("its process was not started from the wanted release, environment and configuration")
    if look.age < steady:
        found.append(f"its process {look.pid} has run for {look.age:.0f} of {steady:.0f} seconds")
    if look.drivers is None:
        found.append(look.problem or "its status does not answer")
        return tuple(found)
    if not look.drivers:
        found.append("its status names no driver")
    found += [f"{name} works by another configuration file" for name in works_by_another(look.drivers, digest)]
    for one in look.drivers:
        name = one.get("driver", "the driver")
        if one.get("pid") not in (None, look.pid):
            found.append(f"{name} answers from the process {one['pid']}, and the unit's process is {look.pid}")
        words = join_problems(one.get("problems") or [])
        if not one.get("ready"):
            found.append(f"{name} is not ready" + (f": {words}" if words else ""))
        elif not one.get("published"):
            found.append(f"{name} has not published its devices" + (f": {words}" if words else ""))
    return tuple(found)


def can_be_relieved(drivers: Sequence[Mapping[str, Any]], pid: int) -> bool:
    """Whether the driver's process serves, and would hand over to another instance.

    Releases that do not say by which configuration they work know nothing of other instances.
    """
    return bool(drivers) and all(
        one.get("role") == "serving" and one.get("pid") == pid and one.get("ready") and one.get("configuration")
        for one in drivers
    )


def not_relieved(look: Look, *, fingerprint: str, running: str, steady: float, digest: str) -> tuple[str, ...]:
    """Return what is still missing until the relief serves in the driver's place; nothing when it does, and has for ``steady`` seconds."""
    lacks = missing(look, fingerprint=fingerprint, running=running, steady=steady, digest=digest)
    waiting = [str(one.get("driver", "the driver")) for one in look.drivers or () if one.get("role") != "serving"]
    return tuple(f"the relief: {each}" for each in (*lacks, *(f"{name} has not been handed over" for name in waiting)))


def age_of(stat: str, uptime: str, ticks: int) -> float:
    """How long a process has run, in seconds, from /proc/PID/stat, /proc/uptime and the clock's ticks. Raises ValueError."""
    # The program's name stands in parentheses and may hold anything.
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError(f"/proc/PID/stat has {len(fields)} fields after the name, expected 20 or more")
    return max(0.0, float(uptime.split()[0]) - int(fields[19]) / ticks)


STORE, LOCK = "state.db", "driver.lock"
# Where systemd notes, in a file for each timer, when a persistent one last elapsed.
STAMPS = "/var/lib/systemd/timers"
# Where files for containers lie, a folder for each claim that is prepared; it stays when the last one goes.
METADATA = "metadata"
# What the driver makes in its folder below the kubelet's.
OWN_NAMES = re.compile(
    r"driver\.lock|handed-over|(health|device-plugin|numbers|machine|repartition(-steps)?)\.json(\.damaged)?|"
    r"\.(health|device-plugin|numbers|machine|repartition(-steps)?)\.json\.[^/]*\.tmp|"
    r"state\.db(-wal|-shm|-journal)?|state\.db\.(damaged|form|new|rebuilt)[^/]*"
    r"|[a-z]+(-[A-Za-z0-9-]+)?\.sock"
    rf"|{LOCKS}/([^/]+\.lock)?|{METADATA}/"
)


@dataclass(frozen=True)
class State:
    """What is in the kubelet's folders under one driver's name. ``alive`` are the sockets on which somebody listens.

    Of ``names`` the folder of locks is called ``locks/`` and comes after the files in it, ``locks/NAME``.
    """

    folder: str
    exists: bool
    names: tuple[str, ...]
    ours: bool
    registrations: tuple[str, ...]
    sockets: tuple[str, ...]
    alive: tuple[str, ...]


def registrations(registry: str, driver: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return those sockets of the folder that the kubelet watches which a driver's instances are registered through.

    An instance is a pod, and named by its UID, or by a digest of that.
    """
    pattern = re.compile(rf"{re.escape(driver)}(-[0-9a-f]{{8}}(-[0-9a-f-]{{27}})?)?-reg\.sock")
    return tuple(f"{registry}/{name}" for name in names if pattern.fullmatch(name))


def plan_stop(units: Mapping[str, Mapping[str, Any]]) -> tuple[Step, ...]:
    """Decide which units are disabled and stopped: those whose files bear the collection's mark."""
    steps = []
    for name, unit in units.items():
        if not unit["ours"]:
            continue
        if unit["enabled"] in ("enabled", "enabled-runtime"):
            steps.append(Step("disable", name, "it is no longer wanted"))
        if unit["active"] not in ("inactive", "failed"):
            steps.append(Step("stop", name, "it is no longer wanted"))
    return tuple(steps)


def plan_stop_companions(listed: str) -> tuple[Step, ...]:
    """Decide which services of claims are stopped, by what ``systemctl list-units`` tells of them, one a line.

    Only the driver starts them, from templates that go with it. The program goes before the memory that it shares.
    """
    ours = [unit for unit in units_listed(listed) if unit.startswith(UNIT_PREFIX) and "@" in unit]
    return tuple(
        Step("stop", unit, "the driver that ran it for a claim goes")
        for unit in sorted(ours, key=lambda unit: (unit.startswith(f"{UNIT_PREFIX}memory@"), unit))
    )


def stamps(units: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the files in which systemd keeps when this collection's timers last elapsed; it does not remove them itself."""
    return [f"{STAMPS}/stamp-{name}" for name, unit in units.items() if unit["ours"] and name.endswith(".timer")]


def leftovers(state: State, *, stopping: bool) -> tuple[list[str], list[str]]:
    """Decide what of a driver's state is removed, in that order, and what stays and why.

    ``stopping`` says that the driver is this one's, and only about to be stopped: then its sockets are still alive.
    """
    if not state.exists and not state.registrations:
        return [], []
    alive = () if stopping else state.alive
    if alive:
        return [], [f"{path}: another program listens there" for path in alive]
    if not state.ours:
        return [], ([f"{state.folder}: it is not the state of this driver"] if state.exists else [])
    others = [name for name in state.names if not OWN_NAMES.fullmatch(name)]
    full = {f"{name.partition('/')[0]}/" for name in others if "/" in name}
    mine = [name.rstrip("/") for name in state.names if name not in others and name not in full]
    # Files that identify the directory are removed last, so that the next run resumes a killed run. Other files without a store block programs.
    mine.sort(key=lambda name: name in (STORE, LOCK))
    removed = [*(f"{state.folder}/{name}" for name in mine), *state.registrations]
    if not others:
        removed.append(state.folder)
    return removed, [f"{state.folder}/{name}: not a file of this driver" for name in others]
