# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Stop services while a driver is replaced, and start them again, including services that an interrupted run stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..core.errors import AcceleratorError, as_failure
from ..core.host.system import System, text_or_none
from . import change_record
from .driver_installation import is_running, property_of, systemctl
from .file_restore import add_texts

RECORDS_DIRECTORY = "/var/lib/dra-accelerators"


def record_path(vendor: str) -> str:
    """Return the path of the record of stopped services. Each vendor's module has its own record, and starts only the services in it."""
    return f"{RECORDS_DIRECTORY}/stopped-services-{vendor}.json"


def interrupted_services(system: System, vendor: str) -> tuple[str, ...]:
    """Return the inactive services that an interrupted run stopped in this boot. Raises AcceleratorError for an unreadable record."""
    names = _recorded_services(system, record_path(vendor))
    return tuple(name for name in names if not is_running(system, name) and _exists(system, name))


def describe_start(service: str) -> str:
    """Return the step text for the start of a service that an interrupted run stopped."""
    return f"start {service}, which an interrupted run stopped"


@contextlib.contextmanager
def stopped_services(system: System, services: Sequence[str], vendor: str) -> Iterator[tuple[str, ...]]:
    """Stop the active ones of these services in this order, and start them in reverse order at the end. Yields their names.

    The names are written to disk before the first stop. If this run is killed, the next run starts the services.
    Services of an interrupted run are started too. Raises AcceleratorError for a service that does not start, if nothing
    else failed.
    """
    record = record_path(vendor)
    stopped_before = interrupted_services(system, vendor)
    to_start = [name for name in services if name in stopped_before or is_running(system, name)]
    to_start += [name for name in stopped_before if name not in to_start]
    with _started_at_end(system, record, lambda: to_start):
        _write_record(system, record, to_start)
        for name in to_start:
            if name not in stopped_before:
                systemctl(system, "stop", name)
        yield tuple(to_start)


@contextlib.contextmanager
def resumed_services(system: System, vendor: str) -> Iterator[tuple[str, ...]]:
    """At the end, start the services of an interrupted run that are still stopped. Yields their names.

    The services are also started after a failure. Raises AcceleratorError for a service that does not start, if nothing
    else failed.
    """
    record = record_path(vendor)
    stopped_before = interrupted_services(system, vendor)
    with _started_at_end(system, record, lambda: _recorded_services(system, record)):
        yield stopped_before


@contextlib.contextmanager
def _started_at_end(system: System, record: str, names: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Start services at the end. After a failure, the problems of the start are added to its error."""
    try:
        yield
    except BaseException as error:
        problems: list[AcceleratorError] = []
        with contextlib.suppress(AcceleratorError, OSError):
            problems = _start(system, record, names())
        if problems and isinstance(error, (AcceleratorError, OSError)):
            failed = as_failure(error)
            add_texts(failed, (each.message for each in problems))
            if failed is not error:
                raise failed from error
        raise
    problems = _start(system, record, names())
    if problems:
        add_texts(problems[0], (each.message for each in problems[1:]))
        raise problems[0]


def _start(system: System, record: str, names: Sequence[str]) -> list[AcceleratorError]:
    """Start services in reverse order, and return the problems. Services that cannot be started stay in the record for the next run."""
    problems: list[AcceleratorError] = []
    not_started: list[str] = []
    for name in reversed(names):
        try:
            # The service can have been removed with the packages.
            if not is_running(system, name) and _exists(system, name):
                systemctl(system, "start", name)
        except (AcceleratorError, OSError) as error:
            problems.append(as_failure(error))
            not_started.insert(0, name)
    try:
        _write_record(system, record, not_started)
    except OSError as error:
        problems.append(as_failure(error))
    return problems


def _exists(system: System, name: str) -> bool:
    return property_of(system, name, "LoadState") != "not-found"


def _recorded_services(system: System, record: str) -> tuple[str, ...]:
    """Return the recorded services, or none after a reboot, which starts the enabled ones."""
    text = text_or_none(system, record)
    if text is None:
        return ()
    boot, names = change_record.read(
        text, record, _content_of, of="stopped services", hint="Start the services, and remove the file."
    )
    return names if boot == system.boot_id() else ()


def _content_of(content: Any) -> tuple[str, tuple[str, ...]]:
    return str(content["boot"]), tuple(str(name) for name in content["services"])


def _write_record(system: System, record: str, names: Sequence[str]) -> None:
    """Write the record, or remove it without names. The directory is removed if it is empty then."""
    has_removed_temporaries = system.remove_temporaries(record)
    if names:
        text = change_record.to_text({"boot": system.boot_id(), "services": list(names)})
        system.write_atomic(record, text.encode(), mode=0o600)
    elif system.remove(record) or has_removed_temporaries:
        with contextlib.suppress(OSError):
            system.path(RECORDS_DIRECTORY).rmdir()
