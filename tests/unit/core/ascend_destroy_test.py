# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A slice is gone when the chip no longer lists it, and not because a call says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import chip_model
import pytest
from dra_driver.core.ascend import slices
from dra_driver.core.errors import AcceleratorError, NotFound
from dra_driver.core.model import Placement

MADE = chip_model.partition("310P", "vir02", Placement(2, 2))


class Denying:
    """A library that says of each slice that it is not there."""

    def destroy(self, spot: object, slice_id: int) -> None:
        raise NotFound(f"{spot} has no slice {slice_id}")


def destroy(still_there: bool) -> None:
    before = chip_model.device("310P", [MADE])
    after = before if still_there else chip_model.device("310P")
    source: Any = Denying()
    chip: Any = SimpleNamespace(spot="chip 0 of card 0")
    slices.destroy(source, chip, before, MADE.instance_id, lambda: after)


def test_a_slice_that_is_listed_still_is_not_taken_for_gone() -> None:
    with pytest.raises(AcceleratorError, match="says that it is not there, and the chip lists it still") as caught:
        destroy(still_there=True)
    assert not isinstance(caught.value, NotFound)


def test_one_that_somebody_else_has_destroyed_meanwhile_is_gone() -> None:
    with pytest.raises(NotFound):
        destroy(still_there=False)
