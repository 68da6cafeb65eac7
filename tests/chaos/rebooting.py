# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The machine starts again: what ends with a boot has ended, what devices keep is there, and the layout is applied before the driver."""

from __future__ import annotations

import random

from tests.chaos.node import Node
from tests.chaos.snapshot import check_files
from tests.chaos.tenants import Tenants


def reboot(node: Node, number: int, chance: random.Random) -> None:
    """The machine starts again, in order or after a power cut: claims whose pods come back are prepared, the others leave nothing.

    In every second pair of cases partitions that a vendor makes again by itself are not there again.
    """
    tenants = Tenants(node)
    node.kill() if number % 2 else node.stop()
    if number % 4 > 1:
        node.vendor.forget(
            node
        )  # as where its library was killed before it could note them, or somebody has taken the file away
    node.boot()
    node.start()
    node.wait_ready()
    for caller in tenants.callers:
        if chance.random() < 0.5:
            caller.prepare()
            check_files(node)
    tenants.give_back(besides=("meta",))
