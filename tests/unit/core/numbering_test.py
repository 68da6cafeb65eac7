# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The numbers of GPUs: what claims' records tell, and what a file of another time holds."""

from __future__ import annotations

from pathlib import Path

from dra_driver.core import pci
from dra_driver.core.nvidia.numbering import Numbering
from dra_driver.core.system import System

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"


def test_number_in_record_of_claim_is_taken_from_another_gpu(tmp_path: Path) -> None:
    """A restored backup of the file can give the number of a GPU that a virtual machine has to another one."""
    system = System(str(tmp_path))
    for address in (FIRST, SECOND):
        (tmp_path / pci.DEVICES.lstrip("/") / address).mkdir(parents=True)
    numbering = Numbering(system)
    numbering.use("/state", writes=True)
    assert (numbering.index(SECOND, 0), numbering.machine(SECOND, 1)) == (0, 1)
    numbering.write()

    again = Numbering(system)
    again.use("/state", writes=True)
    assert again.learn(FIRST, 1, 1) == 1
    number = again.machine(SECOND, 1)
    assert number != 1, "two GPUs would be published under one name"
    again.write()

    later = Numbering(system)
    later.use("/state", writes=True)
    assert (later.machine(FIRST, 0), later.machine(SECOND, 0)) == (1, number), "the file can be read"
