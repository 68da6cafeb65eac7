# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Settings of a node: a run that is killed before any of its steps, and the next run. The table in docs/crash-points.md names these tests."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from dra_driver.core.errors import AcceleratorError, SettingsFailed
from node_settings_test import FIRST, RECORD, Scene, Silicon

from tests.unit.crash_steps import kill_before, step

SECOND: dict[str, Any] = {"match": {}, "power_limit": 500, "ecc": False}


class Board(Silicon):
    """Silicon whose changes are steps, and whose state is written to a file when a process is killed."""

    def _called(self, *what: str) -> None:
        step(" ".join(what))
        try:
            super()._called(*what)
        except AcceleratorError:
            self.left = None  # The calls that restore the previous values succeed.
            raise


def crashes(directory: Path, *, fails: bool) -> Iterator[tuple[str, Scene]]:
    """Yield each step of a change from FIRST to SECOND with a node on which the run was killed directly before it.

    With ``fails``, the last call of the change fails, so that the run restores the previous values.
    """
    saved = directory / "saved"
    for number in itertools.count():
        scene = Scene(directory / str(number))
        board = Board(scene.system, list(scene.silicon.devices.values()))
        scene.silicon = board
        scene.backend = board  # type: ignore[assignment]
        scene.run(FIRST)

        def change(scene: Scene = scene, board: Board = board) -> None:
            board.left, board.error = (3 if fails else None), AcceleratorError("the board said no", code="no")
            board.calls.clear()
            if fails:
                with pytest.raises(SettingsFailed):
                    scene.run(SECOND, reset="when_needed")
            else:
                scene.run(SECOND, reset="when_needed")

        def save(board: Board = board) -> None:
            saved.write_bytes(pickle.dumps((board.knobs_now, board.pending)))

        killed = kill_before(number, change, Path(scene.system.root), save)
        board.knobs_now, board.pending = pickle.loads(saved.read_bytes())
        board.left = None
        if not killed:
            assert number > 8
            return
        yield killed, scene


def values(scene: Scene) -> Sequence[Mapping[str, Any]]:
    return [scene.now(index) for index in range(2)]


@pytest.mark.parametrize("fails", [False, True])
def test_change_killed_before_any_step_next_run_completes_it(tmp_path: Path, fails: bool) -> None:
    """A later run without rules restores the values from before the first run."""
    wanted = Scene(tmp_path / "wanted")
    wanted.run(FIRST)
    wanted.run(SECOND, reset="when_needed")
    for killed, scene in crashes(tmp_path, fails=fails):
        scene.run(SECOND, reset="when_needed")
        assert values(scene) == values(wanted), killed
        assert not scene.decide(SECOND, reset="when_needed").plan.concerned, killed
        scene.run(reset="when_needed")
        assert (values(scene), scene.noted()) == ([{}, {}], False), killed


@pytest.mark.parametrize("fails", [False, True])
def test_change_killed_before_any_step_next_run_without_rules_restores_all(tmp_path: Path, fails: bool) -> None:
    for killed, scene in crashes(tmp_path, fails=fails):
        scene.run(reset="when_needed")
        assert (values(scene), scene.noted()) == ([{}, {}], False), killed
        assert not scene.system.exists(RECORD), killed
