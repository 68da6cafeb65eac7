# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The numbers of GPUs: numbers in the records of claims, and files from another time."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from dra_driver.core.host import pci
from dra_driver.core.host.system import System
from dra_driver.core.vendors.nvidia.numbering import FILE, Numbering
from hypothesis import given
from hypothesis import strategies as st

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"


def test_number_in_record_of_claim_is_taken_from_another_gpu(tmp_path: Path) -> None:
    """A restored backup of the file can assign the number of a GPU in a virtual machine to another one: the claim's record wins."""
    system = System(str(tmp_path))
    for address in (FIRST, SECOND):
        (tmp_path / pci.DEVICES.lstrip("/") / address).mkdir(parents=True)
    numbering = Numbering(system)
    numbering.use("/state", writes=True)
    assert (numbering.index(SECOND, 0), numbering.passthrough_number(SECOND, 1)) == (0, 1)
    numbering.write()

    again = Numbering(system)
    again.use("/state", writes=True)
    assert again.adopt(FIRST, 1, 1) == 1
    number = again.passthrough_number(SECOND, 1)
    assert number != 1, "two GPUs would be published under one name"
    again.write()

    later = Numbering(system)
    later.use("/state", writes=True)
    assert (later.passthrough_number(FIRST, 0), later.passthrough_number(SECOND, 0)) == (1, number), (
        "the file can be read"
    )


def test_numbers_are_not_replaced_after_a_read_error(tmp_path: Path) -> None:
    """After a read error the numbers are kept. Otherwise GPUs would get other names, also at the next start."""
    system = System(str(tmp_path))
    for address in (FIRST, SECOND):
        (tmp_path / pci.DEVICES.lstrip("/") / address).mkdir(parents=True)
    numbering = Numbering(system)
    numbering.use("/state", writes=True)
    assert (numbering.index(SECOND, 0), numbering.index(FIRST, 1)) == (0, 1)
    numbering.write()
    file = tmp_path / "state" / FILE
    file.rename(file.with_name("moved"))
    file.symlink_to(file.name)

    unread = Numbering(system)
    unread.use("/state", writes=True)
    assert unread.index(FIRST, 0) == 0
    unread.write()
    assert file.is_symlink()
    file.unlink()
    file.with_name("moved").rename(file)
    unread.write()

    later = Numbering(system)
    later.use("/state", writes=True)
    assert (later.index(SECOND, 1), later.index(FIRST, 0)) == (0, 1)


class Kernel:
    """A node with GPUs, some of them bound to NVIDIA's driver. Each has the lowest minor that was free at its binding."""

    def __init__(self, root: Path, count: int) -> None:
        self.system = System(str(root))
        self.addresses = [f"0000:{16 + number:02x}:00.0" for number in range(count)]
        for address in self.addresses:
            device = root / pci.DEVICES.lstrip("/") / address
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")
        self.minors: dict[str, int] = {}
        self.numbering = Numbering(self.system)

    def bind(self, address: str) -> None:
        self.minors.setdefault(address, next(free for free in range(32) if free not in self.minors.values()))

    def unbind(self, address: str) -> None:
        self.minors.pop(address, None)

    def start(self, is_referred: bool = True) -> None:
        """Start the driver."""
        self.numbering = Numbering(self.system)
        self.numbering.use("/state", writes=True)
        if not is_referred:
            self.numbering.forget_indices()

    def names(self, numbering: Numbering | None = None) -> dict[str, int]:
        """Return the numbers in the names of the GPUs that NVML lists."""
        program = numbering or self.numbering
        for index, address in enumerate(sorted(self.minors)):
            program.index(address, index)
        found = {address: program.name(address, minor) for address, minor in sorted(self.minors.items())}
        program.write()
        return found


@given(
    count=st.integers(1, 4),
    first=st.permutations(range(4)),
    steps=st.lists(
        st.tuples(st.sampled_from(["bind", "unbind", "look", "start", "renumber", "module"]), st.integers(0, 3)),
        max_size=30,
    ),
)
def test_any_order_of_binds_keeps_the_names_of_gpus(count: int, first: list[int], steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        kernel = Kernel(Path(directory), count)
        for number in first:
            if number < count:
                kernel.bind(kernel.addresses[number])
        kernel.start()
        names = kernel.names()
        assert names == kernel.minors, "the first start changes no name"
        for action, number in steps:
            if action == "bind":
                kernel.bind(kernel.addresses[number % count])
            elif action == "unbind":
                kernel.unbind(kernel.addresses[number % count])
            elif action in ("start", "renumber"):
                kernel.start(is_referred=action == "start")
            elif action == "module":
                module = Numbering(kernel.system)
                module.use("/state", writes=False)
                assert kernel.names(module).items() <= names.items()
            else:
                assert kernel.names().items() <= names.items()


def test_upgrade_takes_names_from_minors(tmp_path: Path) -> None:
    """The file of the previous release has no names, and its driver used the minors: the upgrade keeps these names."""
    kernel = Kernel(tmp_path, 2)
    first, second = kernel.addresses
    kernel.bind(second)
    kernel.bind(first)
    (tmp_path / "state").mkdir()
    old = {"version": 1, "indices": {first: 0, second: 1}, "virtual_machines": {first: 0, second: 1}}
    (tmp_path / "state" / FILE).write_text(json.dumps(old))
    kernel.start(is_referred=False)
    assert kernel.names() == {first: 1, second: 0}
    kernel.start()
    kernel.minors = {first: 0, second: 1}
    assert kernel.names() == {first: 1, second: 0}


def test_new_gpu_with_the_minor_of_an_absent_gpu_gets_a_new_name(tmp_path: Path) -> None:
    """The first GPU is in a virtual machine when the third one is added: the third one gets a new name."""
    kernel = Kernel(tmp_path, 3)
    first, second, third = kernel.addresses
    kernel.bind(first)
    kernel.bind(second)
    kernel.start()
    assert kernel.names() == {first: 0, second: 1}
    kernel.unbind(first)
    kernel.bind(third)
    assert kernel.minors[third] == 0 and kernel.names()[third] == 3, "a number that no minor of the three can be"
    kernel.bind(first)
    assert kernel.names() == {first: 0, second: 1, third: 3}


def test_two_gpus_with_one_number_in_the_file_do_not_rename_the_others(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 3)
    first, second, third = kernel.addresses
    for address in kernel.addresses:
        kernel.bind(address)
    (tmp_path / "state").mkdir()
    content = {"version": 1, "indices": {}, "virtual_machines": {}, "names": {first: 2, second: 2, third: 1}}
    (tmp_path / "state" / FILE).write_text(json.dumps(content))
    kernel.start()
    assert kernel.names() == {first: 2, second: 3, third: 1}


@pytest.mark.parametrize("is_referred", [True, False])
def test_driver_killed_before_it_writes_the_numbers_keeps_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_referred: bool
) -> None:
    """The driver is killed without a file, or when the start deletes the other numbers from it: the names stay."""
    kernel = Kernel(tmp_path, 2)
    first, second = kernel.addresses
    kernel.bind(first)
    kernel.bind(second)

    class Killed(BaseException):
        pass

    def kill(*_arguments: object, **_options: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(kernel.system, "write_atomic", kill)
        kernel.start()
        with pytest.raises(Killed):
            kernel.names()
    kernel.start()
    assert kernel.names() == {first: 0, second: 1}
    kernel.minors = {first: 1, second: 0}
    with monkeypatch.context() as patched:
        patched.setattr(kernel.system, "write_atomic", kill)
        if is_referred:
            kernel.start()
        else:
            with pytest.raises(Killed):
                kernel.start(is_referred=False)
    kernel.start(is_referred)
    assert kernel.names() == {first: 0, second: 1}


def test_names_are_kept_if_the_file_cannot_be_read_at_a_start(tmp_path: Path) -> None:
    """A start that deletes the other numbers does not replace names that it could not read."""
    kernel = Kernel(tmp_path, 2)
    for address in kernel.addresses:
        kernel.bind(address)
    kernel.start()
    names = kernel.names()
    file = tmp_path / "state" / FILE
    file.rename(file.with_name("moved"))
    file.symlink_to(file.name)
    kernel.minors = dict(zip(kernel.addresses, (1, 0)))
    kernel.start(is_referred=False)
    kernel.names()
    assert file.is_symlink()
    file.unlink()
    file.with_name("moved").rename(file)
    kernel.start()
    assert kernel.names() == names
