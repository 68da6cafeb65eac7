# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Stop services while a driver is replaced, and start them again, including services that an interrupted run stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _record
from ._driver_install import is_running, property_of, systemctl, text_or_none
from .core.errors import AcceleratorError
from .core.system import System
from .core.texts import LONGEST_MESSAGE, shorten

FOLDER = "/var/lib/dra-accelerators"


def record_of(vendor: str) -> str:
    """Return the path of the record of stopped services. Each vendor's module has its own, and starts only what it stopped."""
    return f"{FOLDER}/stopped-services-{vendor}.json"


def interrupted_services(system: System, vendor: str) -> tuple[str, ...]:
    """Return the services that an interrupted run stopped in this boot and that do not run. Raises AcceleratorError for an unreadable record."""
    names = _recorded(system, record_of(vendor))
    return tuple(name for name in names if not is_running(system, name) and _exists(system, name))


def describe_start(service: str) -> str:
    """Return the text of the step in a module's result that starts a service of an interrupted run."""
    return f"start {service}, which an interrupted run stopped"


@contextlib.contextmanager
def stopped_services(system: System, services: Sequence[str], vendor: str) -> Iterator[tuple[str, ...]]:
    """Stop the running ones of these services in this order, and start them in reverse order at the end. Yields their names.

    Their names are on the disk before the first is stopped, so that the next run starts them if this one is killed. Services that an
    interrupted run stopped are started too. Raises AcceleratorError for a service that does not start, if nothing else failed.
    """
    record = record_of(vendor)
    left = interrupted_services(system, vendor)
    running = [name for name in services if name in left or is_running(system, name)]
    running += [name for name in left if name not in running]
    with _started_at_end(system, record, lambda: running):
        _keep(system, record, running)
        for name in running:
            if name not in left:
                systemctl(system, "stop", name)
        yield tuple(running)


@contextlib.contextmanager
def resumed_services(system: System, vendor: str) -> Iterator[tuple[str, ...]]:
    """At the end, start the services that an interrupted run stopped and that nobody has started. Yields their names.

    The services are also started after a failure. Raises AcceleratorError for a service that does not start, if nothing else failed.
    """
    record = record_of(vendor)
    left = interrupted_services(system, vendor)
    with _started_at_end(system, record, lambda: _recorded(system, record)):
        yield left


@contextlib.contextmanager
def _started_at_end(system: System, record: str, names: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Start services at the end. After a failure, the problems of the start are added to its error."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AcceleratorError, OSError):
            _add(error, _start(system, record, names()))
        raise
    problems = _start(system, record, names())
    if problems:
        _add(problems[0], problems[1:])
        raise problems[0]


def _add(error: BaseException, problems: Sequence[AcceleratorError]) -> None:
    """Add problems to the message of an error that does not contain them yet."""
    if not isinstance(error, AcceleratorError):
        return  # The record has the services, and the next run starts them.
    for problem in problems:
        if problem.message not in error.message:
            error.message = shorten(f"{error.message.rstrip('.')}. {problem.message}", LONGEST_MESSAGE)
            error.args = (error.message,)


def _start(system: System, record: str, names: Sequence[str]) -> list[AcceleratorError]:
    """Start services in reverse order; return the problems. Those that do not start stay in the record, for the next run."""
    problems: list[AcceleratorError] = []
    left: list[str] = []
    for name in reversed(names):
        # A service can have been removed with the packages.
        if not is_running(system, name) and _exists(system, name):
            try:
                systemctl(system, "start", name)
            except AcceleratorError as error:
                problems.append(error)
                left.insert(0, name)
    _keep(system, record, left)
    return problems


def _exists(system: System, name: str) -> bool:
    return property_of(system, name, "LoadState") != "not-found"


def _recorded(system: System, record: str) -> tuple[str, ...]:
    """Return the recorded services; none after a reboot, which starts the enabled ones."""
    text = text_or_none(system, record)
    if text is None:
        return ()
    boot, names = _record.read(text, record, _content_of, of="stopped", hint="Start the services, and remove the file.")
    return names if boot == system.boot_id() else ()


def _content_of(content: Any) -> tuple[str, tuple[str, ...]]:
    return str(content["boot"]), tuple(str(name) for name in content["services"])


def _keep(system: System, record: str, names: Sequence[str]) -> None:
    left = system.remove_temporaries(record)
    if names:
        text = _record.to_text({"boot": system.boot_id(), "services": list(names)})
        system.write_atomic(record, text.encode(), mode=0o600)
    elif system.remove(record) or left:
        with contextlib.suppress(OSError):
            system.path(FOLDER).rmdir()
