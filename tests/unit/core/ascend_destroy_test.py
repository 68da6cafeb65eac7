# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A vNPU counts as destroyed when the chip no longer lists it, not because a call reports it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import chip_model
import pytest
from dra_driver.core.errors import AcceleratorError, DeviceFaulty, NotFound
from dra_driver.core.model import Placement
from dra_driver.core.vendors.ascend import slices
from dra_driver.core.vendors.ascend.health.faults import error_of

MADE = chip_model.partition("310P", "vir02", Placement(2, 2))


class Denying:
    """A library that reports for each vNPU that it does not exist."""

    def destroy(self, spot: object, slice_id: int) -> None:
        raise NotFound(f"{spot} has no slice {slice_id}")


def destroy(still_there: bool) -> None:
    before = chip_model.device("310P", [MADE])
    after = before if still_there else chip_model.device("310P")
    source: Any = Denying()
    chip: Any = SimpleNamespace(spot="chip 0 of card 0")
    slices.destroy(source, chip, before, MADE.instance_id, lambda: after)


def test_destroy_slice_still_listed_fails() -> None:
    with pytest.raises(AcceleratorError, match="reports that it does not exist, but the chip still lists it") as caught:
        destroy(still_there=True)
    assert not isinstance(caught.value, NotFound)


def test_destroy_slice_deleted_by_another_program_succeeds() -> None:
    with pytest.raises(NotFound):
        destroy(still_there=False)


@pytest.mark.parametrize("code", [-8006, -8010, -8011, -8012, -8017])
def test_destroy_times_out_and_slice_is_deleted_succeeds(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "CHANGE_PAUSES", (0.0, 0.0))
    calls: list[int] = []

    class Slow:
        def destroy(self, spot: object, slice_id: int) -> None:
            calls.append(slice_id)
            raise error_of(code, f"Destroying slice {slice_id} of {spot}")

    source: Any = Slow()
    chip: Any = SimpleNamespace(spot="chip 0 of card 0")
    listed = [chip_model.device("310P", [MADE]), chip_model.device("310P")]
    slices.destroy(source, chip, listed[0], MADE.instance_id, lambda: listed[len(calls) - 1])
    assert calls == [MADE.instance_id] * 2, "a change without effect is repeated, one with an effect is not"
    calls.clear()
    with pytest.raises(DeviceFaulty):
        slices.destroy(source, chip, listed[0], MADE.instance_id, lambda: listed[0])
    assert len(calls) == 3
