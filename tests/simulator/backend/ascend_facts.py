# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the Ascend backend reads of chips, by the library and by npu-smi, and what containers get."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace

from dra_driver.core.ascend.backend import AscendBackend
from dra_driver.core.ascend.dcmi import Spot
from dra_driver.core.ascend.program import Program
from dra_driver.core.ascend.readings import SliceReadings
from dra_driver.core.errors import BackendUnavailable, NotFound, Unsupported
from dra_driver.core.model import Device, Placement, Version, devices_of, frozen
from dra_driver.core.slices import build_pool

from tests.simulator.backend.ascend_stage import SCENARIOS, Stage, on
from tests.simulator.backend.npu_machine import NULL
from tests.simulator.backend.stage import refused
from tests.unit.core import chip_model

MIB = 1024 * 1024


def same_profiles(npu: Device, kind: str) -> None:
    """Those of the tables. What a chip has none of it does not tell of, so it is not counted."""
    found, expected = npu.profiles, chip_model.profiles(kind)
    for mine, theirs in zip(found, expected, strict=True):
        told = {name: amount for name, amount in theirs.capacities.items() if name in mine.capacities}
        assert not any(amount for name, amount in theirs.capacities.items() if name not in told)
        assert mine == replace(theirs, capacities=frozen(told)), (mine, theirs)


@on("8x310P-Pro")
def facts_of_a_server(stage: Stage) -> None:
    npus = stage.npus()
    assert [npu.index for npu in npus] == list(range(8)) == [npu.minor for npu in npus]
    for npu in npus:
        same_profiles(npu, "310P")
        assert (npu.vendor, npu.product, npu.memory_bytes, npu.memory_slices) == (
            "ascend",
            "Atlas 300I Pro",
            21527 * MIB,
            8,
        )
        assert (npu.pci_device_id, npu.pci_subsystem_id) == (0xD50019E5, 0x010019E5)
        assert npu.partitioning.supported and not npu.partitioning.has_mode and not npu.partitioning.enabled
        assert not npu.processes and not npu.health.signs and npu.health.healthy
        assert npu == stage.backend.device(npu.uuid)
        assert npu.attributes["resource.kubernetes.io/pciBusID"] == npu.pci_address
    first = npus[0]
    assert first.uuid == f"NPU-{first.attributes['vdie']}" and len({npu.uuid for npu in npus}) == 8
    assert (first.attributes["deviceType"], first.attributes["physicId"], first.attributes["model"]) == (
        "Ascend310P",
        0,
        "310P3",
    )
    assert first.attributes["driverVersion"] == Version(stage.backend.driver_version) == Version("25.2.0")
    assert len({npu.attributes["cardID"] for npu in npus}) == 8 and "hccsRing" not in first.attributes
    assert [npu.numa_node for npu in npus] == [0] * 4 + [1] * 4
    assert [npu.pcie_root for npu in npus[:2]] == ["pci0000:10", "pci0000:2c"]
    assert stage.backend.is_there()
    refused(NotFound, stage.backend.device, "NPU-" + "0" * 39 + "1")
    refused(Unsupported, stage.backend.set_partitioning, first.uuid, True)
    stage.backend.set_partitioning(first.uuid, False)  # it is so


@on("4x300I-Duo")
def two_chips_of_a_card_lie_near(stage: Stage) -> None:
    npus = stage.npus()
    for name in ("cardID", "hccsRing"):
        groups = [npu.attributes[name] for npu in npus]
        assert groups[0::2] == groups[1::2] and len(set(groups)) == 4, (name, groups)
    assert [npu.attributes["chipID"] for npu in npus] == [0, 1] * 4
    assert stage.fresh().discover() == stage.backend.discover()


@on("8x910A")
def rings_of_four(stage: Stage) -> None:
    npus = stage.npus()
    same_profiles(npus[0], "910A")
    rings = [npu.attributes["hccsRing"] for npu in npus]
    assert rings[:4] == rings[:1] * 4 and rings[4:] == rings[4:5] * 4 and rings[0] != rings[4]


@on("8xA3", multi_die_policy="independent")
def dies_of_a_super_pod(stage: Stage) -> None:
    npus = stage.npus()
    assert len(npus) == 16
    same_profiles(npus[0], "A3")
    assert [npus[15].attributes[name] for name in ("superPodID", "serverID", "sdid")] == [1, 0, 7 << 18 | 1 << 16 | 15]
    assert len({npu.attributes["hccsRing"] for npu in npus}) == 1
    assert npus[0].memory_slices == 0 and npus[0].profiles[0].is_numbered
    made = stage.make(npus[1], "vir06_1c_16g", 3)
    assert (made.instance_id, made.placement) == (119, Placement(3, 0))


@on("8xA3", super_pod={"id": 7, "server": 3})
def another_server_of_a_super_pod(stage: Stage) -> None:
    npus = stage.npus()
    assert {(npu.attributes["superPodID"], npu.attributes["serverID"]) for npu in npus} == {(7, 3)}
    assert [npu.attributes["sdid"] for npu in npus] == [3 << 22 | n // 2 << 18 | n % 2 << 16 | n for n in range(16)]
    labels = stage.backend.labels(npus)
    assert labels["huawei.com/topotree.superpodid"] == "7" and labels["huawei.com/topotree.serverid"] == "3"
    assert "huawei.com/topotree.rackid" not in labels and labels["huawei.com/npu.chip.memory"] == "64G"
    same_by_program(npus, by_program(stage))


@on("1x950", super_pod={"id": 2, "scale": 64, "server": 9, "chassis": 4, "type": 1})
def a_server_in_a_rack_of_a_super_pod(stage: Stage) -> None:
    (npu,) = stage.npus()
    assert [npu.attributes[name] for name in ("superPodID", "serverID", "rackID")] == [2, 9, 4]
    assert stage.backend.labels([npu])["huawei.com/topotree.rackid"] == "4"
    # Its program tells less, and nothing else.
    (told,) = (npu.attributes for npu in devices_of(by_program(stage).discover()))
    assert (told["superPodID"], told["rackID"], "serverID" in told, "sdid" in told) == (2, 4, False, False)


@on("1x950")
def a_chip_of_the_second_interface_is_whole(stage: Stage) -> None:
    (npu,) = stage.npus()
    assert (npu.attributes["deviceType"], npu.attributes["model"], npu.profiles) == ("npu", "Ascend950PR", ())
    assert not npu.partitioning.supported and npu.memory_bytes
    (offer,) = stage.backend.offers(npu, dynamic=True)
    assert offer.name == "npu-0" and offer.counter_set is None
    assert stage.backend.telemetry(20)[0].memory_total == npu.memory_bytes


def slices_measure_what_is_published(stage: Stage) -> None:
    """What DCMI measures of a slice is what claims are promised, for every template."""
    (npu, *_others) = stage.npus()
    spot = stage.backend._chips.chip(npu.uuid).spot
    for profile in npu.profiles:
        made = stage.backend.create_partition(npu.uuid, profile.profile_id, profile.placements[0])
        readings = stage.backend._source.slices(spot)
        assert readings is not None
        (told,) = readings.slices
        assert told.memory_bytes == made.memory_bytes == made.capacities["memory"] == profile.memory_bytes, (
            told,
            profile,
        )
        stage.backend.destroy_partition(npu.uuid, made.instance_id)


for _machine in ("8x310P-Pro", "8x910A", "8x910B3", "8x910B4", "16x910B", "8xA3"):
    SCENARIOS[f"slices_measure_what_is_published_on_{_machine}"] = (_machine, {}, slices_measure_what_is_published)


@on("8x910B4")
def what_a_slice_measures_counts_and_not_what_it_was_to_have(stage: Stage) -> None:
    """A driver that keeps more for itself than others: the slice that is there says so itself."""
    npu = stage.first()
    made = stage.make(npu, "vir10_3c_16g", 0)
    source, less = stage.backend._source, 13 * 1024 * MIB
    told = source.slices

    def keeping_more(spot: Spot) -> SliceReadings | None:
        readings = told(spot)
        return readings and replace(
            readings, slices=tuple(replace(each, memory_bytes=less) for each in readings.slices)
        )

    source.slices = keeping_more  # type: ignore[method-assign]
    now = stage.backend.device(npu.uuid)
    (measured,) = now.partitions
    assert measured == replace(made, memory_bytes=less, capacities=frozen({**made.capacities, "memory": less}))
    (offer,) = stage.backend.offers(now, dynamic=False)
    assert offer.capacities["memory"] == less
    # npu-smi does not tell: then it is what such a slice is to have.
    (known,) = devices_of(by_program(stage).discover())[0].partitions
    assert known == made


def pools_are_whole(stage: Stage) -> None:
    """What is published is what the API server takes."""
    npus = stage.npus()
    build_pool(
        driver="npu.huawei.com",
        pool="n",
        node_name="n",
        offers=[offer for npu in npus for offer in stage.backend.offers(npu, dynamic=True)],
        counter_sets=[stage.backend.counter_set(npu) for npu in npus],
    )


for _machine in ("8x310P-Pro", "8x910B3", "16x910B"):
    SCENARIOS[f"pools_are_whole_on_{_machine}"] = (_machine, {}, pools_are_whole)


@on("8x310P-Pro")
def looking_is_cheap(stage: Stage) -> None:
    npu = stage.first()
    counted = stage.recorded()
    stage.npus()
    assert counted["dcmi_get_card_list"] == 1 and counted["dcmi_get_device_id_in_card"] == 8
    of_each = {name: count for name, count in counted.items() if count >= 8 and name != "dcmi_get_device_id_in_card"}
    assert of_each.pop("dcmi_get_device_info") == 16, counted  # the cores' load, and whether the chip may be shared
    assert set(of_each.values()) == {8}, counted
    assert set(of_each) == {
        "dcmi_get_device_die_v2",
        "dcmi_get_device_health",
        "dcmi_get_device_errorcode_v2",
        "dcmi_get_device_resource_info",
    }
    counted.clear()
    stage.backend.device(npu.uuid)
    assert counted.total() == 3, counted
    counted.clear()
    made = stage.make(npu, "vir01", 0)
    stage.backend.destroy_partition(npu.uuid, made.instance_id)
    assert counted["dcmi_create_vdevice"] == counted["dcmi_set_destroy_vdevice"] == 1
    assert counted.total() <= 14 and "npu-smi" not in counted, counted


def by_program(stage: Stage) -> AscendBackend:
    """A backend that asks npu-smi alone."""
    program = AscendBackend(stage.system, source=Program(stage.system))
    program.open()
    return program


def same_by_program(npus: tuple[Device, ...], program: AscendBackend) -> None:
    """What npu-smi tells is what the library tells."""
    for mine, theirs in zip(npus, devices_of(program.discover()), strict=True):
        for name in vars(mine):
            assert getattr(mine, name) == getattr(theirs, name), (name, mine.index)


def both_ways_tell_the_same(stage: Stage) -> None:
    """What npu-smi tells is what the library tells, facts and slices alike."""
    stage.control("fault", "0", "error", "0x80E01801", "critical")
    npus = stage.npus()
    if npus[0].profiles:
        smallest = npus[0].profiles[0]
        stage.backend.create_partition(npus[0].uuid, smallest.profile_id, smallest.placements[-1])
    program = by_program(stage)
    same_by_program(devices_of(stage.backend.discover()), program)
    if npus[0].profiles:
        largest = npus[2].profiles[-1]
        made = program.create_partition(npus[2].uuid, largest.profile_id, largest.placements[0])
        assert stage.backend.device(npus[2].uuid).partitions == (made,)
        program.destroy_partition(npus[2].uuid, made.instance_id)
        assert stage.backend.device(npus[2].uuid).partitions == ()


for _machine in ("8x310P-Pro", "4x300I-Duo", "8x910A", "8x910B3", "8x910B4", "16x910B", "8xA3", "1x950"):
    SCENARIOS[f"both_ways_tell_the_same_on_{_machine}"] = (_machine, {}, both_ways_tell_the_same)


@on("8x310P-Pro")
def without_the_library_npu_smi_is_asked(stage: Stage) -> None:
    npus = stage.npus()
    made = stage.make(npus[3], "vir04", 4)
    stage.backend.close()
    # Where npu-smi finds it, and whoever loads the library by its path does not.
    stage.library.parent.rename(stage.library.parent.with_name("common"))
    stage.library.parent.mkdir()
    stage.backend.open()
    assert isinstance(stage.backend._source, Program)
    assert [npu.uuid for npu in stage.npus()] == [npu.uuid for npu in npus]
    assert stage.backend.device(npus[3].uuid).partitions == (made,)
    stage.backend.destroy_partition(npus[3].uuid, made.instance_id)
    assert stage.backend.device(npus[3].uuid).partitions == ()


@on("8x310P-Pro")
def without_npu_smi_chips_are_whole_until_it_comes(stage: Stage) -> None:
    program = stage.root / "usr/local/bin/npu-smi"
    stage.by_hand("create-vnpu", "-i", "1", "-c", "0", "-f", "vir02", "-g", "1")
    program.rename(stage.root / "npu-smi")
    npus = stage.npus()
    assert all(not npu.profiles and npu.partitioning.supported for npu in npus)
    (whole,) = stage.backend.offers(npus[0], dynamic=True)
    assert (whole.name, whole.counter_set) == ("npu-0", None)
    (slice_offer,) = stage.backend.offers(npus[1], dynamic=True)
    assert (slice_offer.profile, slice_offer.capacities["aiCores"]) == ("vir02", 2)
    (stage.root / "npu-smi").rename(program)
    assert all(npu.profiles for npu in stage.npus())
    assert stage.npus()[1].partitions[0].placement == Placement(2, 2)


@on("8x310P-Pro")
def a_card_that_does_not_tell_its_templates_costs_no_other(stage: Stage) -> None:
    program = stage.root / "usr/local/bin/npu-smi"
    program.rename(program.with_name("npu-smi.real"))
    program.write_text('#!/bin/sh\ncase "$*" in *"-i 0"*) exit 1;; *) exec "$0.real" "$@";; esac\n')
    program.chmod(0o755)
    assert [bool(npu.profiles) for npu in stage.npus()][1:] == [True] * 7
    # What its neighbours tell is true of it as well.
    assert all(npu.profiles for npu in stage.npus())


#: A container of its own with the nodes of the machine, where a program opens the library or the backend and says what became of it.
_CONTAINER = (
    "unshare",
    "--pid",
    "--fork",
    "--mount-proc",
    "setpriv",
    "--bounding-set=-sys_admin",
    "--inh-caps=-sys_admin",
)
_HOLD = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).dcmi_init(), flush=True); sys.stdin.read()"
_OPEN = """
import sys
from dra_driver.core.ascend.backend import AscendBackend
from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.system import System
try:
    AscendBackend(System(sys.argv[1])).open()
except BackendUnavailable as error:
    print(error, error.hint)
else:
    print("open")
"""


@on("8x310P-Pro")
def what_another_container_has_is_named(stage: Stage) -> None:
    """Two generations say it by two codes; who reads either is told what it means."""

    def opened() -> str:
        words = [*_CONTAINER, sys.executable, "-c", _OPEN, str(stage.root)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert opened() == "open\n"
    words = [*_CONTAINER, sys.executable, "-c", _HOLD, str(stage.library)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "0\n"
        said = opened()
        code = "-8005" if stage.show()["occupied_is_internal"] else "-8020"
        assert code in said and "another container" in said, said
        holder.stdin.close()
    assert opened() == "open\n"


@on("1x950")
def edits_carry_the_nodes_of_the_unified_bus(stage: Stage) -> None:
    common = stage.backend.driver_edits()
    expected = ["davinci_manager", "hisi_hdc", "uburma/udma0", "uburma/udma1", "ummu/ummu0"]
    assert [node.path for node in common.device_nodes] == [f"/dev/{name}" for name in expected]
    (stage.root / "dev/uburma/udma1").unlink()
    (stage.root / "dev/ummu/readme").write_text("no node")
    assert [node.path for node in stage.backend.driver_edits().device_nodes] == [
        f"/dev/{name}" for name in expected if name != "uburma/udma1"
    ]


@on("8x310P-Pro")
def edits_carry_the_nodes_of_a_chip_that_is_a_computer(stage: Stage) -> None:
    """A 310B's: the manager that it has for containers is the manager inside. Nodes with names so plain are nobody else's."""
    dev = stage.root / "dev"
    for name in ("ai", "sys", "svm0"):
        os.mknod(dev / name, stat.S_IFCHR | 0o666, NULL)
    assert not any(
        node.path in ("/dev/ai", "/dev/sys", "/dev/svm0") for node in stage.backend.driver_edits().device_nodes
    )
    os.mknod(dev / "davinci_manager_docker", stat.S_IFCHR | 0o666, NULL)
    found = [(node.path, node.host_path) for node in stage.backend.driver_edits().device_nodes]
    assert found == [
        ("/dev/davinci_manager", "/dev/davinci_manager_docker"),
        ("/dev/svm0", ""),
        ("/dev/sys", ""),
        ("/dev/dvpp_cmdlist", ""),
        ("/dev/ai", ""),
    ]
    (dev / "davinci_manager").unlink()
    assert len(stage.backend.driver_edits().device_nodes) == 5


@on("8x310P-Pro")
def edits_carry_what_a_container_needs(stage: Stage) -> None:
    npu = stage.first()
    made = stage.make(npu, "vir01", 5)
    common = stage.backend.driver_edits()
    assert [node.path for node in common.device_nodes] == [
        "/dev/davinci_manager",
        "/dev/devmm_svm",
        "/dev/hisi_hdc",
        "/dev/dvpp_cmdlist",
    ]
    inside = {mount.container_path: mount.host_path for mount in common.mounts}
    for path in ("/usr/local/Ascend/driver/lib64", "/usr/local/Ascend/driver/version.info", "/etc/ascend_install.info"):
        assert inside[path] == path
    assert inside["/usr/local/bin/npu-smi"] == "/usr/local/bin/npu-smi"
    assert "ASCEND_VISIBLE_DEVICES=void" in common.env and common is stage.backend.driver_edits()
    (node,) = stage.backend.device_edits(npu, None).device_nodes
    assert (node.path, node.host_path, node.type, node.major, node.minor) == ("/dev/davinci0", "", "c", 1, 3)
    (node,) = stage.backend.device_edits(npu, made).device_nodes
    assert (node.path, node.host_path, node.type) == ("/dev/davinci105", "/dev/vdavinci105", "c")
    (stage.root / "dev/dvpp_cmdlist").unlink()  # some products have none
    assert len(stage.backend.driver_edits().device_nodes) == 3
    stage.backend.destroy_partition(npu.uuid, made.instance_id)
    refused(NotFound, stage.backend.device_edits, npu, made)
    (stage.root / "dev/davinci_manager").unlink()
    assert "/dev/davinci_manager" in str(refused(BackendUnavailable, stage.backend.driver_edits))
