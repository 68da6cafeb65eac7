# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Find the files that a node driver left in the directories of the kubelet and of its companion daemons. Changes nothing."""

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

    The parent directory stays while others have files there.
    """
    parent, _slash, name = COMPANION_FOLDER.rpartition("/")
    return [
        *(f"{COMPANION_FOLDER}/{each}" for each in system.list_directory(COMPANION_FOLDER)),
        COMPANION_FOLDER,
        *([parent] if set(system.list_directory(parent)) <= {name} else []),
    ]


def read_leftovers(system: System, folder: str, registration_paths: Sequence[str]) -> State:
    """Return the files and sockets that one driver left in the kubelet's directories.

    ``registration_paths`` are the possible paths of its registration socket.
    """
    # Before the names are listed, because opening the store of a killed driver can create files next to it.
    has_driver_store = store_is_ours(system, f"{folder}/{STORE}")
    names = names_in(system, folder)
    sockets = [f"{folder}/{name}" for name in names if system.is_socket(f"{folder}/{name}")]
    registered = [path for path in registration_paths if system.is_socket(path)]
    sockets += registered
    return State(
        folder=folder,
        exists=system.exists(folder),
        names=names,
        ours=has_driver_store or LOCK in names,
        registrations=tuple(registered),
        sockets=tuple(sockets),
        alive=tuple(path for path in sockets if listens(system, path)),
    )


def names_in(system: System, folder: str) -> tuple[str, ...]:
    """Return the names in a driver's directory. Links are not followed.

    The files in its directories of locks, marks, and metadata are listed before the directory.
    """
    found: list[str] = []
    for name in system.list_directory(folder):
        path = f"{folder}/{name}"
        if name not in (LOCKS, MARKS, METADATA) or system.is_link(path) or not system.path(path).is_dir():
            found.append(name)
            continue
        inside = system.list_directory(path)
        if name == METADATA and inside:  # a claim is still prepared, so the directory stays
            found.append(name)
        else:
            found += [*(f"{name}/{each}" for each in inside), f"{name}/"]
    return tuple(found)


def store_is_ours(system: System, path: str) -> bool:
    """Return whether a file is a database with the driver's tables. For a damaged file this is false.

    A store without a write-ahead log is not open in any process. SQLite then opens it as immutable, and creates no files.
    """
    if not system.path(path).is_file():
        return False
    mode = "mode=ro" if system.exists(f"{path}-wal") else "mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(system.path(path)))}?{mode}", uri=True)) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    except sqlite3.Error:
        return False
    return {META_TABLE, CLAIMS_TABLE, DEVICES_TABLE} <= {str(row[0]) for row in rows}


def listens(system: System, path: str) -> bool:
    """Return whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(system.path(path)))
        except ConnectionRefusedError:
            return False
        except OSError as error:
            return error.errno != errno.ENOENT  # a timeout, for example, comes from a busy process
    return True
