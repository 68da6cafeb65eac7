# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare random creations and destructions by several processes with the brute-force model, in turn and all at once."""

from __future__ import annotations

import mmap
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_model import Model, cells
from tests.simulator.nvml_support import (
    INSUFFICIENT_RESOURCES,
    INVALID_ARGUMENT,
    STATE,
    SUCCESS,
    Client,
    NvmlError,
    Silicon,
    gpu_section,
    machine_text,
)

PROCESSES = 3
ROUNDS = 200  # of creations and destructions, of a parent and its child each
# One board for each geometry and order of IDs. The others differ in names and sizes only.
GEOMETRIES = ["A30", "A100-80", "H100-80", "RTX-PRO-6000"]
OPERATION = st.tuples(
    st.integers(0, PROCESSES - 1),
    st.sampled_from(["create", "create", "place", "place", "destroy"]),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)


def outcome(client: Client, call: str, *arguments: Any) -> tuple[int, Any]:
    """Return NVML's return code and the result."""
    try:
        return SUCCESS, client(call, *arguments)
    except NvmlError as error:
        return error.code, None


def check_capacity(client: Client, gpu: Any, model: Model) -> None:
    for enum, row in model.board["profiles"].items():
        assert client("nvmlDeviceGetGpuInstanceRemainingCapacity", gpu, row["id"]) == model.remaining(enum)


def apply(client: Client, gpu: Any, model: Model, kind: str, one: int, two: int) -> None:
    """Perform one operation on the library and on the model, and assert equal results."""
    enums = list(model.board["profiles"])
    enum = enums[one % len(enums)]
    row = model.row(enum)
    if kind == "destroy":
        if model.instances:
            identifier = sorted(model.instances)[one % len(model.instances)]
            instance = client("nvmlDeviceGetGpuInstanceById", gpu, identifier)
            client("nvmlGpuInstanceDestroy", instance)
            del model.instances[identifier]
        return
    if kind == "create":
        choices = model.choices(enum)
        code, instance = outcome(client, "nvmlDeviceCreateGpuInstance", gpu, row["id"])
        expected = SUCCESS if choices else INSUFFICIENT_RESOURCES
        start = choices[0] if choices else 0
    else:
        start = two % (model.board["memory_slices"] + 1)
        code, instance = outcome(client, "create_at", gpu, row["id"], start, row["size"])
        expected = SUCCESS if model.fits(enum, start) else INSUFFICIENT_RESOURCES
        if start not in row["starts"]:
            expected = INVALID_ARGUMENT
    assert code == expected, (kind, row["name"], start, model.instances)
    if code == SUCCESS:
        info = client("nvmlGpuInstanceGetInfo", instance)
        placement = info["placement"]
        assert (placement["start"], placement["size"], info["profileId"]) == (start, row["size"], row["id"])
        assert info["id"] == model.create(enum, start)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_random_sequences_agree_with_the_model(bare_silicon: Silicon, name: str) -> None:
    board = BOARDS[name]
    section = gpu_section(board, 0, ("mig-mode yes",))
    assert bare_silicon.load(machine_text(bare_silicon.folder, [section]))["ok"]
    clients = [bare_silicon.client() for _round in range(PROCESSES)]

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(OPERATION, min_size=5, max_size=25))
    def run(operations: list[tuple[int, str, int, int]]) -> None:
        model = Model(board)
        gpu = clients[0].gpu()
        for row in board["profiles"].values():
            for instance in clients[0]("gpu_instances", gpu, row["id"]):
                clients[0]("nvmlGpuInstanceDestroy", instance)
        for who, kind, one, two in operations:
            apply(clients[who], gpu, model, kind, one, two)
        check_capacity(clients[operations[-1][0]], gpu, model)
        shown = bare_silicon.show()["gpus"][0]["gpu_instances"]
        assert {each["id"]: each["start"] for each in shown} == {
            key: start for key, (_unused, start) in model.instances.items()
        }

    run()


def check_consistency(board: dict[str, Any], shown: list[dict[str, Any]]) -> None:
    """Assert that no two instances share a slice, all placements are valid, and the engines suffice."""
    model = Model(board)
    enums = {row["id"]: enum for enum, row in board["profiles"].items()}
    for instance in shown:
        enum = enums[instance["profile_id"]]
        assert model.fits(enum, instance["start"])
        assert model.create(enum, instance["start"]) == instance["id"]
    assert len(model.occupied()) == sum(len(cells(each["start"], each["size"])) for each in shown)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_concurrent_processes_leave_a_consistent_state(bare_silicon: Silicon, name: str) -> None:
    board = BOARDS[name]
    section = gpu_section(board, 0, ("mig-mode yes",))
    assert bare_silicon.load(machine_text(bare_silicon.folder, [section]))["ok"]
    clients = [bare_silicon.client() for _round in range(PROCESSES)]
    gpus = [client.gpu() for client in clients]
    owned: list[dict[int, Any]] = [{} for _unused in clients]
    choose = random.Random(name)
    changes = {"create": 0, "destroy": 0}
    begun = bare_silicon.control("event-count")["events"]
    for _round in range(60):
        asked = []
        for number, client in enumerate(clients):
            if owned[number] and choose.random() < 0.4:
                identifier = choose.choice(sorted(owned[number]))
                client.send("nvmlGpuInstanceDestroy", owned[number].pop(identifier))
                asked.append("destroy")
            else:
                row = choose.choice(list(board["profiles"].values()))
                client.send("nvmlDeviceCreateGpuInstance", gpus[number], row["id"])
                asked.append("create")
        made = []
        for number, client in enumerate(clients):
            try:
                made.append((number, asked[number], client.receive(asked[number])["result"]))
            except NvmlError as error:
                assert asked[number] == "create"
                assert error.code == INSUFFICIENT_RESOURCES
        for number, kind, instance in made:
            changes[kind] += 1
            if kind == "create":
                owned[number][clients[number]("nvmlGpuInstanceGetInfo", instance)["id"]] = instance
    shown = bare_silicon.show()["gpus"][0]["gpu_instances"]
    check_consistency(board, shown)
    assert sorted(each["id"] for each in shown) == sorted(identifier for each in owned for identifier in each)
    # Each creation and each destruction is reported once.
    assert bare_silicon.control("event-count")["events"] == begun + sum(changes.values())
    assert changes["create"] - changes["destroy"] == len(shown)


def test_writer_killed_at_any_time_leaves_a_consistent_state(bare_silicon: Silicon, tmp_path: Path) -> None:
    """Processes that constantly create and destroy are killed. The remaining state is consistent and usable."""
    board = BOARDS["H100-80"]
    sections = [gpu_section(board, index, ("mig-mode yes",)) for index in range(2)]
    assert bare_silicon.load(machine_text(bare_silicon.folder, sections))["ok"]
    choose = random.Random(1)
    survivor = bare_silicon.client()
    for _round in range(8):
        victim = bare_silicon.client()
        gpu = victim.gpu()
        for _round in range(300):
            victim.send("nvmlDeviceCreateGpuInstance", gpu, choose.choice([19, 15, 14, 9]))
            victim.send("gpu_instances", gpu, 19)
        for _round in range(choose.randrange(5, 120)):
            assert victim.process.stdout
            victim.process.stdout.readline()
        victim.process.kill()
        victim.process.wait()
        shown = bare_silicon.show()["gpus"][0]["gpu_instances"]
        check_consistency(board, shown)
        assert all(Path(each["capability"]).exists() for each in shown)
        # The next change by any process, on any GPU, cleans up.
        survivor("nvmlGpuInstanceDestroy", survivor("nvmlDeviceCreateGpuInstance", survivor.gpu(1), 19))
        assert {path.name for path in (bare_silicon.capabilities / "gpu0/mig").iterdir()} == {
            "config",
            "monitor",
            *(f"gi{each['id']}" for each in shown),
        }
        for identifier in [each["id"] for each in shown]:
            survivor("nvmlGpuInstanceDestroy", survivor("nvmlDeviceGetGpuInstanceById", survivor.gpu(), identifier))
        survivor("nvmlGpuInstanceDestroy", survivor("create_at", survivor.gpu(), 0, 0, 8))
        assert {path.name for path in (bare_silicon.capabilities / "gpu0/mig").iterdir()} == {"config", "monitor"}


def sleeps_in_a_futex(process: int) -> bool:
    """Return whether the process is found asleep in the futex call within 20 s."""
    number = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]
    for _round in range(1000):
        if Path(f"/proc/{process}/syscall").read_text().split()[0] == number:
            return True
        time.sleep(0.02)
    return False


def test_writer_killed_after_its_last_store_blocks_no_process(bare_silicon: Silicon) -> None:
    """The generation is a single store: a process that sees the new value waits on it, whether or not the writer wakes
    it.
    """
    section = gpu_section(BOARDS["H100-80"], 0)
    bare_silicon.load(machine_text(bare_silicon.folder, [section]))
    client = bare_silicon.client()
    events = client("nvmlEventSetCreate")
    client("nvmlDeviceRegisterEvents", client.gpu(), 8, events)
    # State after two writers were killed before they woke other processes: the same slot again, two generations later.
    after_header_magic_and_layout = 64 + 8 + 8
    with (bare_silicon.folder / "lib" / STATE).open("r+b") as file, mmap.mmap(file.fileno(), 0) as state:
        (generation,) = struct.unpack_from("<Q", state, after_header_magic_and_layout)
        assert generation == bare_silicon.show()["generation"]
        struct.pack_into("<Q", state, after_header_magic_and_layout, generation + 2)
    client.send("nvmlEventSetWait_v2", events, 60000)
    assert sleeps_in_a_futex(client.process.pid)
    bare_silicon.control("fault 0 xid 94")
    assert client.receive()["result"]["eventData"] == 94


def test_forked_child_uses_the_same_lock(bare_silicon: Silicon) -> None:
    """Parent and child, forked while the library is in use, change one GPU at once: no change of either is lost."""
    section = gpu_section(BOARDS["H100-80"], 0, ("mig-mode yes",))
    bare_silicon.load(machine_text(bare_silicon.folder, [section]))
    client = bare_silicon.client()
    gpu = client.gpu()
    client("nvmlGpuInstanceDestroy", client("nvmlDeviceCreateGpuInstance", gpu, 9))
    before = bare_silicon.show()["generation"]
    assert client("fork_and_change_both", gpu, 19, ROUNDS) == [[0] * 2 * ROUNDS] * 2
    after = bare_silicon.show()
    assert after["generation"] == before + 2 * 2 * ROUNDS
    assert after["gpus"][0]["gpu_instances"] == []
