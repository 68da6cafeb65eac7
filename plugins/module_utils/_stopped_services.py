# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Stops services while a driver is replaced, and starts them again, also those that an interrupted run has stopped."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from . import _record
from ._driver_install import is_running, property_of, systemctl, text_or_none
from .core.errors import AcceleratorError
from .core.system import System

RECORD = "/var/lib/dra-accelerators/stopped-services.json"


def interrupted_services(system: System) -> tuple[str, ...]:
    """Return the services that an interrupted run stopped in this boot and that do not run. Raises AcceleratorError for an unreadable record."""
    names = _recorded(system)
    return tuple(name for name in names if not is_running(system, name) and _exists(system, name))


def describe_start(service: str) -> str:
    """Return the step of a module's result that starts a service which an interrupted run stopped."""
    return f"start {service}, which an interrupted run stopped"


@contextlib.contextmanager
def stopped_services(system: System, services: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Stop the running ones of these services in this order, and start them in reverse order at the end. Yields their names.

    Their names are on the disk before the first is stopped, so that the next run starts them if this one is killed. Services that an
    interrupted run stopped are started too.
    """
    left = interrupted_services(system)
    running = [name for name in services if name in left or is_running(system, name)]
    running += [name for name in left if name not in running]
    try:
        _keep(system, running)
        for name in running:
            if name not in left:
                systemctl(system, "stop", name)
        yield tuple(running)
    finally:
        _start(system, running)


@contextlib.contextmanager
def resumed_services(system: System) -> Iterator[tuple[str, ...]]:
    """At the end, start the services that an interrupted run stopped and that nobody has started. Yields their names.

    After a failure they are started as well. Raises AcceleratorError for a service that does not start, if nothing else failed.
    """
    left = interrupted_services(system)
    try:
        yield left
    except BaseException:
        with contextlib.suppress(AcceleratorError):
            _start(system, _recorded(system))
        raise
    _start(system, _recorded(system))


def _start(system: System, names: Sequence[str]) -> None:
    """Start services in reverse order, and delete the record. One that does not start does not keep the others from it."""
    problems: list[AcceleratorError] = []
    for name in reversed(names):
        # A service can have been removed with the packages.
        if not is_running(system, name) and _exists(system, name):
            try:
                systemctl(system, "start", name)
            except AcceleratorError as error:
                problems.append(error)
    _keep(system, ())
    if problems:
        raise problems[0]


def _exists(system: System, name: str) -> bool:
    return property_of(system, name, "LoadState") != "not-found"


def _recorded(system: System) -> tuple[str, ...]:
    """Return the recorded services; none after a reboot, which starts the enabled ones."""
    text = text_or_none(system, RECORD)
    if text is None:
        return ()
    boot, names = _record.read(text, RECORD, _record_of, of="stopped", hint="Start the services, and remove the file.")
    return names if boot == system.boot_id() else ()


def _record_of(content: Any) -> tuple[str, tuple[str, ...]]:
    return str(content["boot"]), tuple(str(name) for name in content["services"])


def _keep(system: System, names: Sequence[str]) -> None:
    left = system.remove_temporaries(RECORD)
    if names:
        text = _record.to_text({"boot": system.boot_id(), "services": list(names)})
        system.write_atomic(RECORD, text.encode(), mode=0o600)
    elif system.remove(RECORD) or left:
        with contextlib.suppress(OSError):
            system.path(posixpath.dirname(RECORD)).rmdir()
