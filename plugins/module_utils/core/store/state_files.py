# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The names of the files in the driver's state directory, for the programs that delete these files.

A test compares them with the source of all programs that write there.
"""

from __future__ import annotations

import re

STORE, LOCK = "state.db", "driver.lock"
#: A directory for each prepared claim is in METADATA, a file for each device in LOCKS, and a file for each reset or repair in MARKS.
METADATA, LOCKS, MARKS = "metadata", "locks", "repairs"

_DOCUMENT = r"(health|device-plugin|numbers|machine|repartition(-steps)?)\.json"
_STATE = (
    rf"{re.escape(STORE)}(-wal|-shm|-journal|\.(damaged|form|new|rebuilt)[^/]*)?"
    rf"|{_DOCUMENT}(\.damaged)?|\.{_DOCUMENT}\.([^/]*\.)?tmp|handed-over"
)
#: The state of one machine. A copy of it must not be used on another machine. METADATA and MARKS are directories.
STATE = re.compile(rf"{_STATE}|{METADATA}|{MARKS}")
#: Everything that the driver, its commands, and the modules write, also sockets and locks. Directories have a slash at the end. A socket
#: has a name without suffix until it is complete (kubelet/sockets.py).
OWN_NAMES = re.compile(
    rf"{_STATE}|{re.escape(LOCK)}|[a-z]+(-[A-Za-z0-9-]+)?\.sock|\.[0-9a-f]{{6}}"
    rf"|{LOCKS}/([^/]+\.lock)?|{METADATA}/|{MARKS}/([^/]+\.(reset|repaired)(\.[0-9a-f]+)?)?"
)
