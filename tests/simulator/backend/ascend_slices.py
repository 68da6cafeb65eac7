# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the vNPUs that the Ascend backend creates: every place, the counters, vNPUs of others, and a reboot."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from dra_driver.core.errors import AcceleratorError, DoesNotFit, InUse, InvalidLayout, NotFound, NotPermitted
from dra_driver.core.model import Device, Partition, Placement, devices_of
from dra_driver.core.partitioning.layout_execute import execute, wait_for_restored
from dra_driver.core.partitioning.layout_plan import LayoutPlan, plan_layouts
from dra_driver.core.partitioning.rules import parse_rules, wanted_for

from tests.simulator.backend.ascend_facts import by_program
from tests.simulator.backend.ascend_stage import SCENARIOS, Stage, on
from tests.simulator.backend.stage import assert_refused


@on("8x310P-Pro")
def every_placement_of_a_310p_can_be_created(stage: Stage) -> None:
    npu = stage.first_npu()
    for profile in npu.profiles:
        for placement in profile.placements:
            made = stage.backend.create_partition(npu.uuid, profile.profile_id, placement)
            now = stage.backend.device(npu.uuid)
            assert now.partitions == (made,) and now.partitioning.enabled
            assert made.key == (profile.profile_id, placement.start, placement.size)
            assert (made.instance_id, made.uuid) == (100 + placement.start, f"{npu.uuid}-{100 + placement.start}")
            assert dict(made.capacities) == dict(profile.capacities) and made.processes == ()
            (offer,) = stage.backend.offers(now, dynamic=False)
            assert offer.partition_uuid == made.uuid
            assert offer.name in {each.name for each in stage.backend.offers(npu, dynamic=True)}
            stage.backend.destroy_partition(npu.uuid, made.instance_id)
    assert stage.backend.device(npu.uuid).partitions == ()


def counters_and_simulator_agree(stage: Stage) -> None:
    """The chip accepts a vNPU that the counters allow and rejects one that they forbid."""
    npu = stage.first_npu()
    possible = [offer for offer in stage.backend.offers(npu, dynamic=True) if offer.kind == "partition"]
    rng = random.Random(11)
    for _round in range(6):
        left = dict(stage.backend.counter_set(npu).counters)
        made: list[Partition] = []
        rng.shuffle(possible)
        for offer in possible:
            assert offer.profile_id is not None and offer.placement is not None
            placement = offer.placement
            if placement.is_number:  # one of several equal numbers, chosen at creation
                taken = {each.placement.start for each in made}
                placement = Placement(min(number for number in range(16) if number not in taken), 0)
            if all(amount <= left[counter] for counter, amount in offer.consumes.items()):
                made.append(stage.backend.create_partition(npu.uuid, offer.profile_id, placement))
                for counter, amount in offer.consumes.items():
                    left[counter] -= amount
            else:
                assert_refused(DoesNotFit, stage.backend.create_partition, npu.uuid, offer.profile_id, placement)
        assert made
        for each in made:
            stage.backend.destroy_partition(npu.uuid, each.instance_id)


for _machine in ("8x310P-Pro", "8x910A", "8x910B3", "8x910B4", "8x910B4-1"):
    SCENARIOS[f"counters_and_silicon_agree_on_{_machine}"] = (_machine, {}, counters_and_simulator_agree)


@on("4x300I-Duo")
def chips_of_a_pair_have_one_use_and_no_dynamic_vnpus(stage: Stage) -> None:
    """A chip partitioned by a layout is published with its vNPUs. The other chip of its card is not allocatable until
    it is partitioned too.
    """
    npus = stage.npus()
    for npu in npus:
        (whole,) = stage.backend.offers(npu, dynamic=True)
        assert whole.kind == "device" and whole.counter_set
    made = stage.make(npus[2], "vir02", 4)
    now = stage.npus()
    assert [[sign.cause for sign in npu.health.signs] for npu in now] == [[], [], [], ["card-mixed"], [], [], [], []]
    assert now[3].health.signs[0].severity.word == "degraded" and "Remove those slices" in now[3].health.signs[0].remedy
    (offer,) = stage.backend.offers(now[2], dynamic=True)
    assert offer.partition_uuid == made.uuid
    stage.make(npus[3], "vir01", 0)
    assert not any(npu.health.signs for npu in stage.npus())


@on("8x310P-Pro")
def impossible_vnpus_are_rejected_with_a_reason(stage: Stage) -> None:
    npu = stage.first_npu()
    vir02, vir01 = npu.find_profile("vir02"), npu.find_profile("vir01")
    assert vir02 is not None and vir01 is not None
    assert_refused(NotFound, stage.backend.create_partition, npu.uuid, 1, Placement(0, 2))
    assert_refused(InvalidLayout, stage.backend.create_partition, npu.uuid, vir02.profile_id, Placement(1, 2))
    made = stage.make(npu, "vir02", 6)
    error = assert_refused(DoesNotFit, stage.make, npu, "vir01", 7)
    assert made.describe() in str(error)
    assert_refused(NotFound, stage.backend.destroy_partition, npu.uuid, 101)
    # The chip rejects it although all counters allow it.
    stage.control("fault", "0", "call", "dcmi_create_vdevice", "fail", "-8001", "nth", "1")
    error = assert_refused(DoesNotFit, stage.make, npu, "vir01", 0)
    assert "rejects the vNPU" in str(error) and "free resources suffice" in str(error) and made.describe() in str(error)
    stage.control("clear", "0")
    assert stage.by_slices(npu) == [("vir02", 6)]
    # A process on the whole chip prevents a vNPU, and a vNPU in use is kept: the vendor's driver itself does not
    # check.
    stage.control("fault", "1", "process", str(os.getpid()))
    other = stage.npus()[1]
    assert [each.pid for each in other.processes] == [os.getpid()]
    error = assert_refused(InUse, stage.make, other, "vir01", 0)
    assert isinstance(error, InUse) and error.pids == (os.getpid(),)
    stage.control("fault", "0", "process", str(os.getpid()), str(made.instance_id))
    error = assert_refused(InUse, stage.backend.destroy_partition, npu.uuid, made.instance_id)
    assert isinstance(error, InUse) and error.pids == (os.getpid(),)
    stage.control("clear")
    stage.backend.destroy_partition(npu.uuid, made.instance_id)


@on("8x310P-Pro")
def rejected_vnpu_error_has_the_reason_of_the_chip(stage: Stage) -> None:
    """The library and npu-smi report different codes and sentences."""
    program = by_program(stage)
    backends = (stage.backend, program)
    for backend in backends:
        (npu, other, *_others) = devices_of(backend.discover())
        large, small = npu.find_profile("vir04_4c_dvpp"), npu.find_profile("vir01")
        assert large is not None and small is not None
        made = backend.create_partition(npu.uuid, large.profile_id, large.placements[0])
        place = next(each for each in small.placements if not each.conflicts_with(made.placement))
        error = assert_refused(DoesNotFit, backend.create_partition, npu.uuid, small.profile_id, place)
        assert "1 vpc needed, 0 free" in str(error) and made.describe() in str(error)
        backend.destroy_partition(npu.uuid, made.instance_id)
        stage.control("fault", "1", "process", str(os.getpid()))
        busy = assert_refused(InUse, backend.create_partition, other.uuid, small.profile_id, small.placements[0])
        assert isinstance(busy, InUse) and busy.pids == (os.getpid(),)
        stage.control("clear", "1")
    # Busy without a process that can be named.
    stage.control("fault", "1", "call", "dcmi_create_vdevice", "fail", "-8013", "nth", "1")
    assert "busy" in str(assert_refused(InUse, stage.make, stage.npus()[1], "vir01", 0))


@on("8x310P-Pro")
def backend_waits_for_vnpus_of_the_driver_script_after_a_boot(stage: Stage) -> None:
    npu = stage.npus()[3]
    made = stage.make(npu, "vir02", 2)
    uptime = stage.root / "proc/uptime"
    uptime.parent.mkdir(exist_ok=True)
    uptime.write_text("12.5 30.0\n")
    backend = stage.backend
    assert backend.describe_unrestored() == ""
    stage.control("power-cycle", "late")
    backend.reopen()
    missing = backend.describe_unrestored()
    assert f"{made.instance_id} of NPU 3" in missing and "ascend_vnpu_recover: false" in missing, missing
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        stage.control("recover")

    reports: list[str] = []
    assert wait_for_restored(backend, 60, reports.append, sleep=sleep) == ""
    assert reports == [missing] and len(waits) == 1 and stage.by_slices(npu) == [("vir02", 2)]
    stage.control("power-cycle", "late")
    backend.reopen()
    uptime.write_text("601.0 30.0\n")
    assert backend.describe_unrestored() == "", "the script has ended long ago"
    uptime.write_text("12.5 30.0\n")
    stage.by_hand("vnpu-cfg-recover", "-d", "0")
    assert backend.describe_unrestored() == ""


@on("8x310P-Pro")
def acceptance_program_passes_on_simulated_npus(stage: Stage) -> None:
    from tests.silicon import acceptance

    stage.control("fault", "1", "process", str(os.getpid()))
    answers = {question.name: (question.expected, said) for question, said in acceptance.answers(stage.backend, True)}
    del answers["ascend: owner and mode of a device node"]  # files of this test
    assert answers.pop("ascend: chips away during a reset")[1].startswith(acceptance.NOT_ASKED), "a chip is busy"
    for name in ("owner and mode of the nodes of slices", "ids of NPUs on the unified bus"):
        assert answers.pop(f"ascend: {name}")[1].startswith(acceptance.NOT_ASKED), "the machine has no such functions"
    stage.control("clear", "1")
    assert acceptance.count_reset(stage.backend) == "only those of the unit"
    stage.make(stage.npus()[2], "vir01", 0)
    assert acceptance.read_slice_owner(stage.backend) == "as the chip's"
    assert all(expected == said for expected, said in answers.values()), answers


@on("8x910A")
def modes_that_block_vnpus_are_named(stage: Stage) -> None:
    npu = stage.first_npu()
    stage.by_hand("vnpu-mode", "-d", "1")
    assert "vnpu-mode -d 0" in str(assert_refused(NotPermitted, stage.make, npu, "vir02", 0))
    stage.by_hand("vnpu-mode", "-d", "0")
    stage.control("work-mode", "smp")
    assert "SMP" in str(assert_refused(NotPermitted, stage.make, npu, "vir02", 0))
    stage.control("work-mode", "amp")
    stage.make(npu, "vir02", 0)


@on("8xA3", multi_die_policy="union")
def joined_dies_are_not_partitioned(stage: Stage) -> None:
    npu = stage.first_npu()
    assert "multi-die-policy -d 1" in str(assert_refused(NotPermitted, stage.make, npu, "vir06_1c_16g", 0))
    # npu-smi alone gives the same reason.
    program, profile = by_program(stage), npu.find_profile("vir06_1c_16g")
    (npu, *_others) = devices_of(program.discover())
    assert profile is not None
    error = assert_refused(NotPermitted, program.create_partition, npu.uuid, profile.profile_id, Placement(0, 0))
    assert "multi-die-policy -d 1" in str(error)


@on("8x310P-Pro")
def foreign_vnpus_have_their_placements(stage: Stage) -> None:
    """The IDs of other vNPUs do not show their vGroups. Our vNPUs are created next to them and recognized again."""
    npu = stage.first_npu()
    stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir01", "-g", "3")
    stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir02", "-v", "107", "-g", "0")
    assert stage.by_slices(npu) == [("vir02", 0), ("vir01", 6)]
    made = stage.make(npu, "vir01", 7)
    assert (made.instance_id, made.placement) == (105, Placement(7, 1))
    assert stage.make(npu, "vir02_1c", 2).instance_id == 102
    assert stage.by_slices(npu) == [("vir02", 0), ("vir02_1c", 2), ("vir01", 6), ("vir01", 7)]
    # Only places with a free number are published for claims, so that their names stay stable when other vNPUs are
    # deleted.
    owned = [each.key for each in stage.backend.device(npu.uuid).partitions if each.instance_id in (102, 105)]
    names = {offer.name for offer in stage.backend.offers(stage.first_npu(), dynamic=True, owned=owned)}
    assert "npu-0-vir01-4" in names and "npu-0-vir01-7" not in names


@on("8x310P-Pro")
def vnpus_survive_a_boot(stage: Stage) -> None:
    npu = stage.first_npu()
    made = (stage.make(npu, "vir01", 0), stage.make(npu, "vir02", 4))
    stage.control("power-cycle")
    again = stage.fresh()
    again.discover()
    assert again.device(npu.uuid).partitions == made
    stage.backend.reopen()  # its state is from the previous boot
    stage.npus()
    assert stage.backend.device(npu.uuid).partitions == made


@on("8x310P-Pro")
def eight_chips_are_partitioned_in_parallel(stage: Stage) -> None:
    npus = stage.npus()
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(npus))

    def work(npu: Device) -> None:
        try:
            barrier.wait()
            for _round in range(3):
                made = [stage.make(npu, "vir01", start) for start in range(7)]
                assert len(stage.backend.device(npu.uuid).partitions) == 7
                for each in made:
                    stage.backend.destroy_partition(npu.uuid, each.instance_id)
        except (AcceleratorError, AssertionError) as error:
            errors.append(error)

    with ThreadPoolExecutor(len(npus)) as pool:
        list(pool.map(work, npus))
    assert errors == []
    assert stage.npus() == npus


@on("8x310P-Pro")
def layout_rules_are_applied(stage: Stage) -> None:
    rules = parse_rules(
        [
            {"match": {"index": 0}, "mode": "static", "partitions": {"vir04": 1, "vir02-1c": 1, "vir01": 2}},
            {"match": {"index": 1}, "mode": "dynamic"},
            {"match": {}, "mode": "whole"},
        ]
    )
    for expected in ([4] + [0] * 7, [0] * 8):
        npus = stage.npus()
        for outcome in plan_layouts([(npu, wanted_for(npu, rules)) for npu in npus]):
            assert isinstance(outcome, LayoutPlan), outcome
            execute(stage.backend, outcome)
        assert [len(npu.partitions) for npu in stage.npus()] == expected
        rules = parse_rules([{"match": {}, "mode": "whole"}])


@on("8x910B3")
def idle_chip_is_reset(stage: Stage) -> None:
    from dra_driver.core.vendors.ascend import backend

    backend.RESET_SECONDS = 0.0
    npu, *others = stage.npus()
    everyone = [npu.uuid, *(each.uuid for each in others)]
    assert npu.linked == tuple(sorted(each.pci_address for each in others))
    stage.control("fault", "0", "error", "0x80E01801", "critical")
    assert stage.backend.discover()[0].device.health.signs  # type: ignore[union-attr]
    made = stage.make(others[3], "vir05_1c_16g", 0)
    assert others[0].uuid in str(assert_refused(InUse, stage.backend.reset, [npu.uuid])), "one of all"
    assert_refused(InUse, stage.backend.reset, everyone)
    stage.backend.destroy_partition(others[3].uuid, made.instance_id)
    calls = stage.call_counts()
    stage.backend.reset(everyone)
    assert calls["dcmi_set_device_reset"] == 1
    rings = {each.attributes["hccsRing"] for each in stage.npus()}
    assert not stage.first_npu().health.signs and len(rings) == 1


def chips_that_are_reset_together(stage: Stage, unit: tuple[int, ...]) -> None:
    from dra_driver.core.vendors.ascend import backend

    backend.RESET_SECONDS = 0.0
    npus = stage.npus()
    chosen = [npus[number] for number in unit]
    assert [npu.linked for npu in chosen] == [
        tuple(sorted(each.pci_address for each in chosen if each is not npu)) for npu in chosen
    ]
    last = chosen[-1]
    stage.control("fault", str(last.index), "error", "0x80E01801", "critical")
    stage.control("fault", str(last.index), "process", str(os.getpid()))
    assert_refused(InUse, stage.backend.reset, [each.uuid for each in chosen])
    stage.control("clear", str(last.index))
    stage.control("fault", str(last.index), "error", "0x80E01801", "critical")
    calls = stage.call_counts()
    stage.backend.reset([each.uuid for each in reversed(chosen)])
    assert calls["dcmi_set_device_reset" if len(npus) > 1 else "dcmiv2_reset_device"] == 1
    assert not any(npu.health.signs for npu in stage.npus())


for _machine, _unit in (
    ("8x910A", (4, 5, 6, 7)),
    ("8xA3", (4, 5, 6, 7)),
    ("4x300I-Duo", (2, 3)),
    ("8x310P-Pro", (3,)),
    ("8x910B4", (3,)),
    ("1x950", (0,)),
):
    SCENARIOS[f"chips_that_are_reset_together_on_{_machine}"] = (
        _machine,
        {},
        partial(chips_that_are_reset_together, unit=_unit),
    )


@on("8xA3", multi_die_policy="union")
def chips_whose_mode_forbids_vnpus_are_offered_whole(stage: Stage) -> None:
    npu = stage.first_npu()
    assert "multi-die-policy -d 1" in npu.partitioning.blocked
    assert [offer.kind for offer in stage.backend.offers(npu, True)] == ["device"]


@on("8x910B3")
def vnpus_are_offered_when_the_mode_allows_them(stage: Stage) -> None:
    from dra_driver.core.vendors.ascend import chips

    chips.MODE_SECONDS = 0.0
    assert len(stage.backend.offers(stage.first_npu(), True)) > 1
    stage.by_hand("vnpu-mode", "-d", "1")
    npu = stage.first_npu()
    assert "vnpu-mode -d 0" in npu.partitioning.blocked and len(stage.backend.offers(npu, True)) == 1
    stage.by_hand("vnpu-mode", "-d", "0")
    npu = stage.first_npu()
    assert npu.partitioning.blocked == "" and len(stage.backend.offers(npu, True)) > 1
