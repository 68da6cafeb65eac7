# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that the API server accepts the slices of every board in a dry run without dropping a field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER, Cluster
from tests.unit.core import board_model

BOARDS = sorted(path.stem for path in board_model.BOARDS.glob("*.json"))
GPUS = 8


def slices_of(board: str) -> list[dict[str, Any]]:
    """Return the slices of a node with eight boards of one kind."""
    return board_model.slices_of([board_model.device(board, index) for index in range(GPUS)], DRIVER, "dry-run")


@pytest.mark.parametrize("board", BOARDS)
def test_api_server_accepts_the_slices_of_every_board(cluster: Cluster, board: str) -> None:
    bodies = slices_of(board)
    assert sum(len(body["spec"].get("devices", ())) for body in bodies) >= GPUS
    for body in bodies:
        answer = cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", text=json.dumps(body))
        assert json.loads(answer)["spec"] == body["spec"]
