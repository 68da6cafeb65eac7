# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Reboots of the node: state of the boot is lost, persistent device state stays, and the layout is applied before the driver starts."""

from __future__ import annotations

import random

from tests.chaos.node import Node
from tests.chaos.prepared_claims import PreparedClaims
from tests.chaos.snapshot import check_files


def reboot(node: Node, number: int, chance: random.Random) -> None:
    """Reboot the node cleanly or after a power cut: claims whose pods return are prepared, and the others leave nothing behind.

    In every second pair of cases, the partitions that a vendor creates again after a reboot are missing.
    """
    held_claims = PreparedClaims(node)
    node.kill() if number % 2 else node.stop()
    if number % 4 > 1:
        node.vendor.forget_partitions(
            node
        )  # as after a kill of the library before its record, or a deletion of the file
    node.boot()
    node.start_ready()
    for caller in held_claims.callers:
        if chance.random() < 0.5:
            caller.prepare()
            check_files(node)
    held_claims.release(ignoring=("meta",))
