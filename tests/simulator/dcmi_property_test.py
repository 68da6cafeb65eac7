# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare random vNPU operations with the brute-force model, with concurrent and killed processes."""

from __future__ import annotations

import mmap
import random
import struct
from typing import Any

import pytest
from accelerator_simulator.hardware import load_machine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulator.dcmi_model import COMPLETE_310P, TEMPLATES, Model, complete_sets, fits, maximal_sets, named
from tests.simulator.dcmi_support import ANY, CATALOGUE, DATA, STATE, SUCCESS, NpuClient, NpuMachine
from tests.simulator.nvml_property_test import sleeps_in_a_futex

MACHINES = {"310P": "8x310P-Pro", "910A": "8x910A", "910B4": "8x910B4"}
#: Boards that are similar to one of those: they get fewer examples.
NEAR = {
    "910B2C": "16x910B",
    **{name: f"8x{name}" for name in ("910A-30", "910A-16", "910B1", "910B2", "910B3", "910B4-1", "A3", "A3-infer")},
}
REFUSALS = {-8001, -8020}
OPERATION = st.tuples(
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 10**6),
    st.none() | st.integers(-1, 16),
    st.none() | st.integers(0, 4),
)


def fill(client: NpuClient, bag: tuple[str, ...]) -> None:
    """Create a set of vNPUs on a whole chip: large ones first, and the smallest in pairs."""
    for name in sorted(bag, key=lambda each: (-TEMPLATES["310P"][each][0], each)):
        client.make(0, 0, name)


def test_counters_allow_exactly_the_published_combinations() -> None:
    assert complete_sets("310P") == named(COMPLETE_310P)
    assert len(maximal_sets("310P")) == 15 + 22


def test_310p_every_maximal_set_is_created_and_nothing_more_fits(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    client = npus.client()
    bag: tuple[str, ...]
    for bag in sorted(maximal_sets("310P")):
        fill(client, bag)
        left = client.resources(0, 0, free=True)["computing"]
        assert ((left["aic"], left["device_aicpu"]) == (0.0, 0)) == (bag in named(COMPLETE_310P))
        for name in TEMPLATES["310P"]:
            assert client.create(0, 0, name)[0] == -8001, (bag, name)
        assert client.destroy(0, 0, 65535) == SUCCESS
    # One vNPU more than the counters allow never succeeds, in any order.
    choose = random.Random(9)
    for _round in range(40):
        bag = ()
        for name in choose.choices(sorted(TEMPLATES["310P"]), k=10):
            code = client.create(0, 0, name)[0]
            assert code != SUCCESS or fits("310P", (*bag, name))
            bag = (*bag, name) if code == SUCCESS else bag
        assert bag
        assert client.destroy(0, 0, 65535) == SUCCESS


def place(model: Model) -> tuple[int, int]:
    """Return card and chip. Modules have two dies."""
    return divmod(model.physical, 2) if model.chip.startswith("A3") else (model.physical, 0)


def apply(client: NpuClient, model: Model, what: int, choice: int, offset: int | None, group: int | None) -> None:
    """Perform one operation on the library and on the model, and assert equal results."""
    card, die = place(model)
    if what == 0 and model.slices:
        vid = sorted(model.slices)[choice % len(model.slices)]
        assert client.destroy(card, die, vid) == SUCCESS
        del model.slices[vid]
        return
    names = sorted(TEMPLATES[model.chip])
    name, wanted = names[choice % len(names)], None if offset is None else model.vids[0] + offset
    code, made = client.create(card, die, name, ANY if wanted is None else wanted, ANY if group is None else group)
    expected = model.create(name, wanted, group)
    if expected is None:
        assert code in REFUSALS, (name, wanted, group, model.slices)
        return
    vid, where = expected
    assert (code, made["vdev_id"], made["vfg_id"]) == (SUCCESS, vid, ANY if where is None else where)


def test_every_board_with_templates_is_compared() -> None:
    cut = {name for name, board in CATALOGUE.npu_boards.items() if "slicing" in board}
    loaded = {
        device.board for name in (MACHINES | NEAR).values() for device in load_machine(DATA, name, CATALOGUE).npus
    }
    # The Duo board is the 310P with twice the memory. The test of its templates covers that.
    assert cut - loaded == {"310p-duo-48"}
    sizes = {name: len(maximal_sets(name)) for name in MACHINES | NEAR}
    assert sizes["910A-30"] != sizes["910A"] != 0


@pytest.mark.parametrize("chip", [*sorted(MACHINES), *sorted(NEAR)])
def test_random_sequences_agree_with_the_model(npus: NpuMachine, chip: str) -> None:
    npus.load((MACHINES | NEAR)[chip])
    clients = [npus.client(), npus.client()]

    @settings(max_examples=30 if chip in MACHINES else 6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 7), st.lists(OPERATION, min_size=5, max_size=30))
    def run(physical: int, operations: list[tuple[int, int, int, int | None, int | None]]) -> None:
        model = Model(chip, physical)
        card, die = place(model)
        clients[0].destroy(card, die, 65535)
        for who, what, choice, offset, group in operations:
            apply(clients[who], model, what, choice, offset, group)
        assert clients[0].vids(card, die) == sorted(model.slices)
        if model.slices:
            left = clients[1].resources(card, die, free=True)
            shown = {**left["media"], **left["computing"]}
            assert {name: shown[name] for name in model.left()} == dict(model.left())
            saved = [
                line.split()[9]
                for line in npus.configuration.read_text().splitlines()
                if line.startswith(f"{physical}:")
            ]
            assert saved == [model.slices[vid][0] for vid in sorted(model.slices)]

    run()


def check(npus: NpuMachine) -> dict[int, Any]:
    """Return the vNPUs of the first chip after asserting that the model allows them."""
    slices = npus.show()["npus"][0]["slices"]
    model = Model("310P", 0)
    for each in sorted(slices, key=lambda entry: -TEMPLATES["310P"][entry["template"]][0]):
        assert model.create(each["template"], each["vid"], each["group"]) is not None
    return {each["vid"]: each for each in slices}


def test_two_concurrent_processes_leave_a_consistent_state(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    clients = [npus.client(), npus.client()]
    before = npus.show()["generation"]
    for client in clients:
        client.send("churn", 0, 0, "vir04_3c", 100)
    codes = [client.receive() for client in clients]
    assert {code for each in codes for code in each} == {SUCCESS}
    assert check(npus) == {}
    assert npus.show()["generation"] == before + 4 * 100
    # Two clients request the last place: one gets it.
    clients[0].make(0, 0, "vir04_4c_dvpp")
    for client in clients:
        client.send("churn", 0, 0, "vir04_3c_ndvpp", 50)
    codes = [client.receive() for client in clients]
    assert {code for each in codes for code in each} <= {SUCCESS, -8001}
    assert list(check(npus)) == [100]


def test_writer_killed_at_any_time_leaves_a_consistent_state(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    choose = random.Random(1)
    survivor = npus.client()
    for _round in range(6):
        victim = npus.client()
        names = choose.choices(sorted(TEMPLATES["310P"]), k=3)
        for _again in range(20):
            for name in names:
                victim.send("churn", 0, 0, name, 3)
        for _answer in range(choose.randrange(1, 20)):
            assert victim.process.stdout
            victim.process.stdout.readline()
        victim.process.kill()
        victim.process.wait()
        for vid in check(npus):
            assert survivor.destroy(0, 0, vid) == SUCCESS
        assert survivor.destroy(0, 0, survivor.make(0, 0, "vir04")) == SUCCESS


def test_writer_killed_after_its_last_store_blocks_no_process(npus: NpuMachine) -> None:
    """The generation is a single store: a process that sees the new value waits on it, whether or not the writer wakes
    it.
    """
    npus.load("8x310P-Pro")
    client = npus.client()
    after_header_magic_and_layout = 64 + 8 + 8
    with (npus.folder / "lib" / STATE).open("r+b") as file, mmap.mmap(file.fileno(), 0) as state:
        (generation,) = struct.unpack_from("<Q", state, after_header_magic_and_layout)
        assert generation == npus.show()["generation"]
        struct.pack_into("<Q", state, after_header_magic_and_layout, generation + 2)
    npus.control("fault 0 call dcmi_get_device_health hang")
    client.send("dcmi", "dcmi_get_device_health", 0, 0, ["u32", 7])
    assert sleeps_in_a_futex(client.process.pid)
    npus.control("clear")
    assert client.receive() == {"code": SUCCESS, "out": [0]}
