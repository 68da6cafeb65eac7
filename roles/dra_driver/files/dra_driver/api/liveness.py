# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Detect half-open connections to the API server.

The kernel closes a connection if the peer's kernel acknowledges nothing. If the peer's kernel acknowledges but its
program sends nothing, the watch detects it by the silence: the API server sends a bookmark to each watch about every 60
s. A silent watch is opened again over another connection, from its last resource version. A request on another
connection proves nothing, because a load balancer can forward it to a different API server.

There is no cost while bookmarks arrive. The API server sends no bookmark while the resource version of its watch cache
is the one at which the watch began. With kubeadm, etcd notifies the API server of its progress every 5 s. The default
of etcd is ten minutes. Without bookmarks each watch is opened again every 75 to 95 s including the pause, which is 0.7
requests a minute. 5,000 nodes with one watch each send 60 requests a second.

Facts: tcp(7), TCP_USER_TIMEOUT; k8s.io/apiserver/pkg/storage/cacher/cacher.go (defaultBookmarkFrequency),
cache_watcher.go (nextBookmarkTime); etcd's option --watch-progress-notify-interval. tests/oracles/bookmarks_test.py
measures the bookmarks of a real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

#: Seconds until the first keepalive probe, between the probes, and without an acknowledgement until a connection is
#: closed.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, UNACKNOWLEDGED = 15, 5, 30
#: A watch that has received nothing for a random time in this range, in seconds, is opened again. With a fixed time,
#: all nodes that got the same event would open their watches at the same time.
SILENCE_SECONDS = (75.0, 90.0)


def end_when_unacknowledged(transport: asyncio.BaseTransport | None) -> None:
    """Configure the kernel to close a TCP connection whose peer acknowledges nothing."""
    found = transport.get_extra_info("socket") if transport is not None else None
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # the connection is closed already
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
        found.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (UNACKNOWLEDGED - KEEPALIVE_IDLE) // KEEPALIVE_INTERVAL
        )
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED * 1000)
