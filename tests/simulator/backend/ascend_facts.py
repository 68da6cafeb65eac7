# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the facts that the Ascend backend reads, through the library and npu-smi, and the container edits."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

from dra_driver.core.dra.resource_slices import build_pool
from dra_driver.core.errors import BackendUnavailable, NotFound, Unsupported
from dra_driver.core.model import Device, Placement, Version, devices_of, frozen
from dra_driver.core.vendors.ascend.backend import AscendBackend
from dra_driver.core.vendors.ascend.dcmi.dcmi import Spot
from dra_driver.core.vendors.ascend.families import family_of
from dra_driver.core.vendors.ascend.npu_smi.npu_smi_source import Program
from dra_driver.core.vendors.ascend.readings import SliceReadings

from tests.simulator.backend.ascend_stage import SCENARIOS, Stage, faults, on
from tests.simulator.backend.npu_machine import NULL
from tests.simulator.backend.stage import assert_refused
from tests.unit.core import chip_model

MIB = 1024 * 1024


def assert_expected_profiles(npu: Device, kind: str) -> None:
    """Assert that the profiles equal those of the tables. A resource that the chip has none of is not reported."""
    found, expected = npu.profiles, chip_model.profiles(kind)
    for mine, theirs in zip(found, expected, strict=True):
        answer = {name: amount for name, amount in theirs.capacities.items() if name in mine.capacities}
        assert not any(amount for name, amount in theirs.capacities.items() if name not in answer)
        assert mine == replace(theirs, capacities=frozen(answer)), (mine, theirs)


@on("8x310P-Pro")
def facts_of_a_server(stage: Stage) -> None:
    npus = stage.npus()
    assert [npu.index for npu in npus] == list(range(8)) == [npu.minor for npu in npus]
    for npu in npus:
        assert_expected_profiles(npu, "310P")
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
    assert stage.backend.has_devices()
    assert_refused(NotFound, stage.backend.device, "NPU-" + "0" * 39 + "1")
    assert_refused(Unsupported, stage.backend.set_partitioning, first.uuid, True)
    stage.backend.set_partitioning(first.uuid, False)  # it already is disabled


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
    assert_expected_profiles(npus[0], "910A")
    rings = [npu.attributes["hccsRing"] for npu in npus]
    assert rings[:4] == rings[:1] * 4 and rings[4:] == rings[4:5] * 4 and rings[0] != rings[4]


@on("8xA3", multi_die_policy="independent")
def dies_of_a_super_pod(stage: Stage) -> None:
    npus = stage.npus()
    assert len(npus) == 16
    assert_expected_profiles(npus[0], "A3")
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
    # npu-smi does not report the associated die. With npu-smi alone, all chips of the node are reset together.
    program = by_program(stage)
    same_by_program(npus, program, without=("linked",))
    everything = {npu.pci_address for npu in npus}
    assert all({npu.pci_address, *npu.linked} == everything for npu in devices_of(program.discover()))


@on("1x950", super_pod={"id": 2, "scale": 64, "server": 9, "chassis": 4, "type": 1})
def a_server_in_a_rack_of_a_super_pod(stage: Stage) -> None:
    (npu,) = stage.npus()
    assert [npu.attributes[name] for name in ("superPodID", "serverID", "rackID")] == [2, 9, 4]
    assert stage.backend.labels([npu])["huawei.com/topotree.rackid"] == "4"
    # npu-smi reports fewer attributes, and no others.
    (answer,) = (npu.attributes for npu in devices_of(by_program(stage).discover()))
    assert (answer["superPodID"], answer["rackID"], "serverID" in answer, "sdid" in answer) == (2, 4, False, False)


@on("1x950")
def a_chip_of_the_second_interface_is_whole(stage: Stage) -> None:
    (npu,) = stage.npus()
    assert (npu.attributes["deviceType"], npu.attributes["model"], npu.profiles) == ("npu", "Ascend950PR", ())
    assert not npu.partitioning.supported and npu.memory_bytes
    (offer,) = stage.backend.offers(npu, dynamic=True)
    assert offer.name == "npu-0" and offer.counter_set is None
    assert stage.backend.telemetry(20)[0].memory_total == npu.memory_bytes


def vnpu_capacities_equal_the_published_ones(stage: Stage) -> None:
    """DCMI reports for each template's vNPU the resources that claims are promised."""
    (npu, *_others) = stage.npus()
    spot = stage.backend._chips.chip(npu.uuid).spot
    for profile in npu.profiles:
        made = stage.backend.create_partition(npu.uuid, profile.profile_id, profile.placements[0])
        readings = stage.backend._source.slices(spot)
        assert readings is not None
        (answer,) = readings.slices
        assert answer.memory_bytes == made.memory_bytes == made.capacities["memory"] == profile.memory_bytes, (
            answer,
            profile,
        )
        stage.backend.destroy_partition(npu.uuid, made.instance_id)


for _machine in ("8x310P-Pro", "8x910A", "8x910B3", "8x910B4", "16x910B", "8xA3"):
    SCENARIOS[f"slices_measure_what_is_published_on_{_machine}"] = (
        _machine,
        {},
        vnpu_capacities_equal_the_published_ones,
    )


@on("8x910B4")
def measured_capacity_of_a_vnpu_is_published_instead_of_its_template(stage: Stage) -> None:
    """A driver reserves more memory than usual: the measured memory of the existing vNPU is published."""
    npu = stage.first_npu()
    made = stage.make(npu, "vir10_3c_16g", 0)
    source, less = stage.backend._source, 13 * 1024 * MIB
    answer = source.slices

    def keeping_more(spot: Spot) -> SliceReadings | None:
        readings = answer(spot)
        return readings and replace(
            readings, slices=tuple(replace(each, memory_bytes=less) for each in readings.slices)
        )

    source.slices = keeping_more  # type: ignore[method-assign]
    now = stage.backend.device(npu.uuid)
    (measured,) = now.partitions
    assert measured == replace(made, memory_bytes=less, capacities=frozen({**made.capacities, "memory": less}))
    (offer,) = stage.backend.offers(now, dynamic=False)
    assert offer.capacities["memory"] == less
    # npu-smi does not report it. Then the template's value is used.
    (known,) = devices_of(by_program(stage).discover())[0].partitions
    assert known == made


def pools_are_complete(stage: Stage) -> None:
    """The published slices are valid for the API server."""
    npus = stage.npus()
    build_pool(
        driver="npu.huawei.com",
        pool="n",
        node_name="n",
        offers=[offer for npu in npus for offer in stage.backend.offers(npu, dynamic=True)],
        counter_sets=[stage.backend.counter_set(npu) for npu in npus],
    )


for _machine in ("8x310P-Pro", "8x910B3", "16x910B"):
    SCENARIOS[f"pools_are_whole_on_{_machine}"] = (_machine, {}, pools_are_complete)


@on("8x310P-Pro")
def scan_makes_few_calls(stage: Stage) -> None:
    npu = stage.first_npu()
    counted = stage.call_counts()
    stage.npus()
    assert counted["dcmi_get_card_list"] == 1 and counted["dcmi_get_device_id_in_card"] == 8
    of_each = {
        name: count for name, count in counted.now().items() if count >= 8 and name != "dcmi_get_device_id_in_card"
    }
    assert of_each.pop("dcmi_get_device_info") == 16, counted.now()  # AI Core load, and whether the chip can be shared
    assert set(of_each.values()) == {8}, counted.now()
    assert set(of_each) == {
        "dcmi_get_device_die_v2",
        "dcmi_get_device_health",
        "dcmi_get_device_errorcode_v2",
        "dcmi_get_device_resource_info",
    }
    counted.clear()
    stage.backend.device(npu.uuid)
    assert counted.now().total() == 3, counted.now()
    counted.clear()
    made = stage.make(npu, "vir01", 0)
    stage.backend.destroy_partition(npu.uuid, made.instance_id)
    assert counted["dcmi_create_vdevice"] == counted["dcmi_set_destroy_vdevice"] == 1
    assert counted.now().total() <= 14 and "dcmi_init" not in counted, counted.now()


def by_program(stage: Stage) -> AscendBackend:
    """Return a backend that uses npu-smi only."""
    program = AscendBackend(stage.system, source=Program(stage.system))
    program.open()
    return program


def same_by_program(npus: tuple[Device, ...], program: AscendBackend, without: tuple[str, ...] = ()) -> None:
    """Assert that npu-smi reports the library's facts, except for the fields ``without``."""
    for mine, theirs in zip(npus, devices_of(program.discover()), strict=True):
        for name in vars(mine).keys() - set(without):
            assert getattr(mine, name) == getattr(theirs, name), (name, mine.index)


def library_and_npu_smi_return_the_same_facts(stage: Stage) -> None:
    """npu-smi and the library report the same facts and vNPUs."""
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


for _machine in ("8x310P-Pro", "4x300I-Duo", "8x910A", "8x910B3", "8x910B4", "16x910B", "8xA3", "1x950", "8x950-UB"):
    SCENARIOS[f"both_ways_tell_the_same_on_{_machine}"] = (_machine, {}, library_and_npu_smi_return_the_same_facts)


@on("8x310P-Pro")
def npu_smi_is_used_without_the_library(stage: Stage) -> None:
    npus = stage.npus()
    made = stage.make(npus[3], "vir04", 4)
    stage.backend.close()
    # npu-smi finds the library here. Programs that load it by its path do not.
    stage.library.parent.rename(stage.library.parent.with_name("common"))
    stage.library.parent.mkdir()
    stage.backend.open()
    assert stage.backend._source.name == Program.name
    assert [npu.uuid for npu in stage.npus()] == [npu.uuid for npu in npus]
    assert stage.backend.device(npus[3].uuid).partitions == (made,)
    stage.backend.destroy_partition(npus[3].uuid, made.instance_id)
    assert stage.backend.device(npus[3].uuid).partitions == ()


@on("8x310P-Pro")
def chips_without_npu_smi_are_whole_until_it_is_installed(stage: Stage) -> None:
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
def card_without_readable_templates_affects_no_other_card(stage: Stage) -> None:
    program = stage.root / "usr/local/bin/npu-smi"
    program.rename(program.with_name("npu-smi.real"))
    program.write_text('#!/bin/sh\ncase "$*" in *"-i 0"*) exit 1;; *) exec "$0.real" "$@";; esac\n')
    program.chmod(0o755)
    assert [bool(npu.profiles) for npu in stage.npus()][1:] == [True] * 7
    # The templates of the other chips apply to it as well.
    assert all(npu.profiles for npu in stage.npus())


#: A separate container with the machine's device nodes, in which a program opens the library or the backend and prints
#: the result.
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
from dra_driver.core.vendors.ascend.backend import AscendBackend
from dra_driver.core.vendors.ascend.dcmi.dcmi_source import Library
from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.host.system import System
system = System(sys.argv[1])
source = Library(system) if sys.argv[2] == "library" else None
try:
    AscendBackend(system, source=source).open()
except BackendUnavailable as error:
    print(error, error.hint)
else:
    print("open")
"""


@on("8x310P-Pro")
def npu_used_by_another_container_is_named(stage: Stage) -> None:
    """Two generations report this case with different codes. Both messages name its meaning."""

    def opened(by: str = "library") -> str:
        words = [*_CONTAINER, sys.executable, "-c", _OPEN, str(stage.root), by]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert opened() == "open\n"
    words = [*_CONTAINER, sys.executable, "-c", _HOLD, str(stage.library)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "0\n"
        said = opened()
        code = "-8005" if stage.show()["occupied_is_internal"] else "-8020"
        assert code in said and "another container" in said, said
        # The helper is not affected: it runs on the host.
        assert opened("helper") == "open\n"
        holder.stdin.close()
    assert opened() == "open\n"


@on("8x950-UB", super_pod={"id": 5, "scale": 64, "server": 2, "chassis": 1, "type": 1})
def chips_on_the_unified_bus_are_published_without_pci(stage: Stage) -> None:
    assert stage.backend.has_devices() and not list((stage.root / "sys/bus/pci/devices").glob("*"))
    npus = stage.npus()
    assert [npu.index for npu in npus] == list(range(8)) and len({npu.uuid for npu in npus}) == 8
    for npu in npus:
        assert (npu.pci_address, npu.pcie_root, npu.linked) == ("", None, ())
        assert npu.describe() == f"Atlas 950 SuperPoD {npu.index} ({npu.uuid})"
        assert not [name for name in npu.attributes if "pci" in name.lower()]
        assert (npu.attributes["deviceType"], npu.attributes["physicId"]) == ("npu", npu.index)
        (node,) = stage.backend.device_edits(npu, None).device_nodes
        assert node.path == f"/dev/davinci{npu.index}"
        (offer,) = stage.backend.offers(npu, dynamic=True)
        assert offer.name == f"npu-{npu.index}"
    assert npus[0].attributes["superPodID"] == 5 and stage.backend.labels(npus)
    from tests.silicon import acceptance

    assert acceptance.read_unified_bus(stage.backend) == "d806 19e5 1000 19e5"
    assert "/dev/davinci7" in stage.backend.surroundings().devices
    # The driver no longer knows the chip, but its device node remains.
    stage.control("unplug", "7")
    lost = faults(stage.backend.discover())
    assert lost == {7: "npu-lost"}
    (stage.root / "dev/davinci7").unlink()
    stage.backend.reopen()
    assert len(stage.npus()) == 7 and "/dev/davinci7" not in stage.backend.surroundings().devices


def replaced_chips_leave_no_fault(stage: Stage) -> None:
    former = {npu.uuid for npu in stage.npus()}
    file = stage.root / "etc/accelerator-simulator/machine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "identity": "another"}))
    stage.command("power-on")
    for path in (stage.root / "dev").glob("davinci*"):
        path.unlink()
        os.mknod(path, stat.S_IFCHR | 0o666, NULL)
    stage.backend.reopen()
    found = [finding.index for finding in stage.backend.discover() if finding.fault is None]
    assert found == [finding.index for finding in stage.backend.discover()] == list(range(8))
    assert not former & {npu.uuid for npu in stage.npus()}


for _machine in ("8x310P-Pro", "8x950-UB"):
    SCENARIOS[f"replaced_chips_leave_no_fault_on_{_machine}"] = (_machine, {}, replaced_chips_leave_no_fault)


def unreadable_links_default_to_the_generation(stage: Stage) -> None:
    npus = stage.npus()
    size = {"310P": 2, "910A": 4, "910B": 8}[family_of(npus[0].pci_device_id).word]
    for each in (npus, devices_of(by_program(stage).discover())):
        rings = [npu.attributes["hccsRing"] for npu in each]
        assert {rings.count(ring) for ring in rings} == {size}, rings


for _machine in ("4x300I-Duo", "8x910A", "8x910B3"):
    SCENARIOS[f"links_that_cannot_be_read_are_those_of_the_generation_on_{_machine}"] = (
        _machine,
        {"topology": False},
        unreadable_links_default_to_the_generation,
    )


@on("1x950")
def edits_contain_the_nodes_of_the_unified_bus(stage: Stage) -> None:
    common = stage.backend.driver_edits()
    expected = ["davinci_manager", "hisi_hdc", "uburma/udma0", "uburma/udma1", "ummu/ummu0"]
    assert [node.path for node in common.device_nodes] == [f"/dev/{name}" for name in expected]
    (stage.root / "dev/uburma/udma1").unlink()
    (stage.root / "dev/ummu/readme").write_text("no node")
    assert [node.path for node in stage.backend.driver_edits().device_nodes] == [
        f"/dev/{name}" for name in expected if name != "uburma/udma1"
    ]


@on("8x310P-Pro")
def edits_contain_the_nodes_of_a_standalone_chip(stage: Stage) -> None:
    """A 310B: its container manager node appears as the manager node inside. Generic names are only used for such
    chips.
    """
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
def edits_contain_nodes_and_mounts_of_a_container(stage: Stage) -> None:
    npu = stage.first_npu()
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
    assert_refused(NotFound, stage.backend.device_edits, npu, made)
    (stage.root / "dev/davinci_manager").unlink()
    assert "/dev/davinci_manager" in str(assert_refused(BackendUnavailable, stage.backend.driver_edits))
