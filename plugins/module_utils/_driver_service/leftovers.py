# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Finds the files that a node driver left in the directories of the kubelet and of its companion daemons. Changes nothing."""

from __future__ import annotations

import contextlib
import errno
import socket
import sqlite3
from collections.abc import Sequence
from urllib.parse import quote

from ..core.host.companions import DIRECTORY as COMPANION_FOLDER
from ..core.host.system import System
from ..core.store.prepared_claims import CLAIMS_TABLE, DEVICES_TABLE, META_TABLE
from ..core.store.state_files import LOCK, LOCKS, MARKS, METADATA, STORE
from .service_plan import State

PROBE_SECONDS = 2.0


def companions_left(system: System) -> list[str]:
    """Return the files of companion daemons and their directories, in the order in which they can be removed.

    The parent directory stays while other modules have files there.
    """
    above, _slash, own = COMPANION_FOLDER.rpartition("/")
    return [
        *(f"{COMPANION_FOLDER}/{name}" for name in system.list_directory(COMPANION_FOLDER)),
        COMPANION_FOLDER,
        *([above] if set(system.list_directory(above)) <= {own} else []),
    ]


def read_leftovers(system: System, folder: str, known: Sequence[str]) -> State:
    """Return the state that a driver with one name left in the kubelet's directories."""
    # Before the names: opening the store of a killed driver can create files next to it.
    store = store_is_ours(system, f"{folder}/{STORE}")
    names = names_in(system, folder)
    sockets = [f"{folder}/{name}" for name in names if system.is_socket(f"{folder}/{name}")]
    registered = [path for path in known if system.is_socket(path)]
    sockets += registered
    return State(
        folder=folder,
        exists=system.exists(folder),
        names=names,
        ours=store or LOCK in names,
        registrations=tuple(registered),
        sockets=tuple(sockets),
        alive=tuple(path for path in sockets if listens(system, path)),
    )


def names_in(system: System, folder: str) -> tuple[str, ...]:
    """Return the names in a driver's directory: of directories with locks or marks also the files in them, first. Links are not followed."""
    found: list[str] = []
    for name in system.list_directory(folder):
        path = f"{folder}/{name}"
        if name not in (LOCKS, MARKS, METADATA) or system.is_link(path) or not system.path(path).is_dir():
            found.append(name)
            continue
        inside = system.list_directory(path)
        if name == METADATA and inside:  # a claim is still prepared: the directory stays
            found.append(name)
        else:
            found += [*(f"{name}/{each}" for each in inside), f"{name}/"]
    return tuple(found)


def store_is_ours(system: System, path: str) -> bool:
    """Return whether a file is a database with the driver's table of claims. For a damaged file this is false.

    A store without a write-ahead log is not open in any process. SQLite then opens it as immutable, and creates no files.
    """
    if not system.path(path).is_file():
        return False
    how = "mode=ro" if system.exists(f"{path}-wal") else "mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(system.path(path)))}?{how}", uri=True)) as store:
            rows = store.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    except sqlite3.Error:
        return False
    return {META_TABLE, CLAIMS_TABLE, DEVICES_TABLE} <= {str(row[0]) for row in rows}


def listens(system: System, path: str) -> bool:
    """Whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(system.path(path)))
        except ConnectionRefusedError:
            return False
        except OSError as error:
            return error.errno != errno.ENOENT
    return True
