# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A reset is refused while any process has the GPU open, so whoever resets one lets go of it first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from dra_driver.core.errors import InUse
from dra_driver.core.nvidia import discover, partition
from dra_driver.core.nvidia.backend import NvidiaBackend
from dra_driver.core.nvidia.board_facts import DriverFacts
from dra_driver.core.nvidia.nvml import Nvml
from dra_driver.core.system import System


@pytest.mark.parametrize("refused", [False, True])
def test_no_handle_of_ours_is_open_during_a_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(Nvml, "open", lambda nvml: opened.append(True))
    monkeypatch.setattr(Nvml, "close", lambda nvml: opened.append(False))
    monkeypatch.setattr(discover, "read_driver", lambda nvml: DriverFacts("580.95.05", "13.0"))
    backend = NvidiaBackend(System(str(tmp_path)))
    during: list[bool] = []

    def reset(system: System, uuids: Sequence[str]) -> None:
        during.append(opened[-1])
        if refused:
            raise InUse("somebody else has it open")

    monkeypatch.setattr(partition, "reset", reset)
    backend.open()
    if refused:
        with pytest.raises(InUse):
            backend.reset(["GPU-1"])
    else:
        backend.reset(["GPU-1"])
    assert (during, opened[-1]) == ([False], True)
    backend.close()
