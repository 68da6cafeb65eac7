# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims that are prepared in parallel on one node, and the state of the node before, during, and after them."""

from __future__ import annotations

import time
from collections.abc import Collection

from tests.chaos.callers import caller_of
from tests.chaos.errors import Leaked, Lost
from tests.chaos.node import Node
from tests.chaos.snapshot import Snapshot, check_files, difference, snapshot

SETTLE_SECONDS = 30.0


class PreparedClaims:
    """Claims of several kinds, by default of those that fit together. ``before`` is the node without them, ``prepared`` with all of them."""

    def __init__(self, node: Node, kinds: Collection[str] = ()) -> None:
        self.node = node
        self.before = snapshot(node)
        self.callers = [caller_of(node, node.kinds[kind]) for kind in kinds or node.vendor.parallel_kinds]
        self.claims = [caller.claim for caller in self.callers]
        for caller in self.callers:
            caller.prepare()
            caller.bind()
        self.prepared = snapshot(node)
        check_files(node)

    def await_prepared(self, ignoring: Collection[str] = ()) -> None:
        """Wait for the state with all claims prepared. ``ignoring`` are parts that can differ. Raises Lost."""
        self._await(self.prepared, ignoring, Lost)
        check_files(self.node)

    def await_hardware(self, ignoring: Collection[str]) -> None:
        """Wait for the hardware state with all claims prepared. ``ignoring`` are the files about claims. Raises Lost."""
        self._await(self.prepared, ignoring, Lost)

    def release(self, ignoring: Collection[str] = ()) -> None:
        """Unprepare all claims, and wait until nothing is left. Raises Leaked."""
        for caller in self.callers:
            caller.end_pod()
        self._await(self.before, ignoring, Leaked)

    def verify_and_release(self, ignoring: Collection[str] = ()) -> None:
        """Wait for the state with all claims prepared, then unprepare them. Raises Lost or Leaked."""
        self.await_prepared(ignoring)
        self.release(ignoring)

    def _await(self, expected: Snapshot, ignoring: Collection[str], error: type[Leaked | Lost]) -> None:
        wanted = {key: value for key, value in expected.items() if key not in ignoring}
        deadline = time.monotonic() + SETTLE_SECONDS
        while text := difference(snapshot(self.node), wanted):
            if time.monotonic() > deadline:
                raise error(text)
            time.sleep(0.02)
