# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Notifications from a service to systemd (sd_notify)."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(message: str) -> None:
    """Send a notification to systemd if NOTIFY_SOCKET is set (Type=notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(message.encode(), address)
