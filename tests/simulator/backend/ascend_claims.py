# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the driver's claims on DCMI: prepare, unprepare, a faulty chip, a crash, and a reboot."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dra_driver.core.health.tracker import TrackedFault
from dra_driver.core.model import Offer
from dra_driver.core.store.prepared_claims import prepared_claims
from dra_driver.supervisors.driver_state import Conditions, Shared, Snapshot
from dra_driver.supervisors.reporting.missing_device_events import MissingDevices

from tests.simulator import dcmi_model
from tests.simulator.backend.ascend_stage import Stage, on

UNIT = Path(__file__).resolve().parents[2] / "unit"
sys.path[:0] = [str(UNIT / "dra_driver"), str(UNIT / "core")]

from backend_model import ALL_DYNAMIC  # noqa: E402  it is in the directories above
from machine_model import Claims, Node  # noqa: E402  it is in the directories above

SICK = 3
Scene = Callable[["Driver"], Awaitable[None]]


class Driver:
    """A node's driver without its sockets, on the stage's backend."""

    def __init__(
        self,
        stage: Stage,
        folder: Path,
        claims: Claims,
        boot_id: str = "boot-1",
        reached: Callable[[str], None] = lambda _stage: None,
        rules: Sequence[Mapping[str, Any]] = ALL_DYNAMIC,
    ) -> None:
        self.stage, self.folder, self.claims = stage, folder, claims
        self.node = Node(folder, claims, hardware=stage.backend, boot_id=boot_id, reached=reached, rules=rules)

    async def prepare(self, name: str, device: str | Mapping[str, Any], **options: Any) -> str:
        claim = self.claims.allocate(name, device, **options)
        return str((await self.node.service.prepare([claim]))[claim.uid].error)

    async def unprepare(self, name: str) -> str:
        claim = self.claims.allocate(name, "npu-0")
        return str((await self.node.service.unprepare([claim]))[claim.uid].error)

    async def again(self, boot_id: str = "boot-1") -> Driver:
        """Return the same driver in a new process."""
        self.node.close()
        self.stage.backend = self.stage.fresh()
        fresh = Driver(self.stage, self.folder, self.claims, boot_id)
        await fresh.node.start()
        return fresh

    def slices(self, physical: int) -> list[tuple[str, int]]:
        return self.stage.by_slices(self.stage.npus()[physical])


def acted(stage: Stage, scene: Scene, rules: Sequence[Mapping[str, Any]] = ALL_DYNAMIC) -> None:
    async def main(folder: Path) -> None:
        driver = Driver(stage, folder, Claims(), rules=rules)
        await driver.node.start()
        await scene(driver)
        driver.node.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))


@on("8x310P-Pro")
def claims_get_their_vnpus(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        names = set(driver.node.inventory.offers)
        assert {"npu-0", "npu-0-vir01-0", "npu-7-vir04-3c-ndvpp-6"} <= names
        assert await driver.prepare("one", "npu-0-vir02-6") == ""
        assert await driver.prepare("two", "npu-1") == ""
        assert await driver.prepare("three", "npu-0-vir01-0") == ""
        assert driver.slices(0) == [("vir01", 0), ("vir02", 6)]
        assert "npu-0" in await driver.prepare("four", "npu-0")
        assert len(driver.node.cdi_files()) == 3
        for name in ("one", "two", "three"):
            assert await driver.unprepare(name) == ""
        assert driver.slices(0) == [] and not driver.node.cdi_files()

    acted(stage, scene)


async def devices_for_runtime(driver: Driver, name: str, *devices: str) -> list[str]:
    """Prepare a claim and return the variables of its CDI file for the vendor's runtime. Assert that it has no other
    edits.
    """
    claim = driver.claims.allocate(name, *({"device": each, "request": "npus"} for each in devices))
    assert (await driver.node.service.prepare([claim]))[claim.uid].error == ""
    document = driver.node.cdi(claim.uid)
    assert "containerEdits" not in document
    (edits, *others) = [each["containerEdits"] for each in document["devices"]]
    assert not {"deviceNodes", "hooks"} & set(edits)
    assert all(each["env"] == edits["env"] for each in others)
    return sorted(edits["env"])


NETWORK_FILES = ("/etc/hccn.conf", "/usr/local/Ascend/driver/tools/hccn_tool")


def mounts_of(driver: Driver, name: str) -> set[str]:
    """Return the paths in containers that the CDI file of a claim mounts."""
    document = driver.node.cdi(driver.claims.claims["default", name]["metadata"]["uid"])
    edits = [document.get("containerEdits", {}), *(each["containerEdits"] for each in document["devices"])]
    return {mount["containerPath"] for each in edits for mount in each.get("mounts", [])}


@on("8x910B3")
def containers_get_the_network_port_tool_on_request(stage: Stage) -> None:
    async def without(driver: Driver) -> None:
        for path in NETWORK_FILES:
            (stage.root / path.lstrip("/")).rename(stage.root / path.lstrip("/").replace("hccn", "away"))
        assert await driver.prepare("plain", "npu-0") == ""
        assert not mounts_of(driver, "plain") & {*NETWORK_FILES}
        assert await driver.unprepare("plain") == ""

    async def missing(driver: Driver) -> None:
        refused = await driver.prepare("early", "npu-0")
        assert all(path in refused for path in NETWORK_FILES) and "network_tools" in refused, refused
        for path in NETWORK_FILES:
            (stage.root / path.lstrip("/").replace("hccn", "away")).rename(stage.root / path.lstrip("/"))
        assert await driver.prepare("late", "npu-0") == ""
        assert mounts_of(driver, "late") >= {*NETWORK_FILES}

    acted(stage, without)
    stage.backend = stage.fresh(network_tools=True)
    acted(stage, missing)


def with_runtime(stage: Stage) -> Stage:
    """Install the vendor's runtime on the node and let the driver use it."""
    (stage.root / "etc/ascend-docker-runtime.d").mkdir()
    stage.backend = stage.fresh(by_runtime=True)
    return stage


@on("4x300I-Duo")
def claims_with_the_vendor_runtime_name_their_devices(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        whole = await devices_for_runtime(driver, "whole", "npu-4", "npu-3")
        assert whole == ["ASCEND_RUNTIME_OPTIONS=", "ASCEND_VISIBLE_DEVICES=4,3"]
        card = await devices_for_runtime(driver, "card", "npu-card-6")
        assert card == ["ASCEND_RUNTIME_OPTIONS=", "ASCEND_VISIBLE_DEVICES=6,7"]

    acted(with_runtime(stage), scene)


@on("8x310P-Pro")
def claims_with_the_vendor_runtime_name_their_vnpus(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        slices = await devices_for_runtime(driver, "slices", "npu-0-vir02-6", "npu-0-vir01-0")
        assert slices == ["ASCEND_RUNTIME_OPTIONS=VIRTUAL", "ASCEND_VISIBLE_DEVICES=106,100"]

    acted(with_runtime(stage), scene)


class Scheduler:
    """Allocates to claims the first device that fits by the counters, from the published slices only."""

    def __init__(self, driver: Driver) -> None:
        survey = driver.node.survey
        assert survey is not None
        self.offers = survey.offers
        self.left = {counted.name: dict(counted.counters) for counted in survey.counter_sets}
        self.held: dict[str, Offer] = {}

    def is_free(self, offer: Offer) -> bool:
        return offer not in self.held.values() and all(
            amount <= self.left[each][name]
            for each, taken in offer.all_counters.items()
            for name, amount in taken.items()
        )

    def fitting(self, template: str, chip: str) -> Offer | None:
        mine = (each for each in self.offers if each.name.startswith(f"{chip}-") and each.profile == template)
        return next((offer for offer in mine if self.is_free(offer)), None)

    def take(self, claim: str, offer: Offer, times: int = 1) -> None:
        self.held[claim] = offer
        for each, taken in offer.all_counters.items():
            for name, amount in taken.items():
                self.left[each][name] -= times * amount

    def give_back(self, claim: str) -> None:
        self.take(claim, self.held[claim], -1)
        del self.held[claim]


@on("8x310P-Pro")
def every_complete_set_can_be_claimed_in_any_order(stage: Stage) -> None:
    """Allocate the fifteen sets that fill a chip, in sequence and two at a time: what fits is created, the rest is
    rejected.
    """

    async def scene(driver: Driver) -> None:
        rng = random.Random(3)
        sets = sorted(dcmi_model.complete_sets("310P"))
        assert len(sets) == 15
        for number, templates in enumerate(sets):
            scheduler = Scheduler(driver)
            chips = [f"npu-{number % 8}", f"npu-{(number + 3) % 8}"]
            wanted = [(chip, template) for chip in chips for template in templates]
            rng.shuffle(wanted)
            for chip, template in wanted:
                offer = scheduler.fitting(template, chip)
                assert offer is not None, (templates, chip, template, scheduler.held)
                name = f"c{number}-{len(scheduler.held)}"
                assert await driver.prepare(name, offer.name) == ""
                scheduler.take(name, offer)
            for chip in chips:
                assert tuple(sorted(name for name, _start in driver.slices(int(chip[4:])))) == tuple(sorted(templates))
                for template in dcmi_model.TEMPLATES["310P"]:
                    fits = dcmi_model.fits("310P", (*templates, template))
                    assert bool(scheduler.fitting(template, chip)) == fits
            ends = sorted(scheduler.held, key=lambda _name: rng.random())
            for name in ends:
                assert await driver.unprepare(name) == ""
            assert all(driver.slices(int(chip[4:])) == [] for chip in chips)
        assert not driver.node.cdi_files() and driver.node.store.claims == {}

    acted(stage, scene)


_DIES = """
import asyncio, os, sys
from pathlib import Path
from tests.simulator.backend.ascend_claims import Claims, Driver
from tests.simulator.backend.ascend_stage import Stage
root, directory, stop, name = sys.argv[1:]
def reached(stage):
    if stage == stop:
        os._exit(9)
async def main():
    driver = Driver(Stage(Path(root)), Path(directory), Claims(), reached=reached)
    await driver.node.start()
    print(await driver.prepare(name, "npu-0-vir02-2"))
asyncio.run(main())
"""


@on("8x310P-Pro")
def killed_driver_leaves_only_foreign_vnpus(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir01", "-g", "3")
        for number, stop in enumerate(("recorded-preparing", "partition-created", "cdi-written", "recorded-prepared")):
            driver.node.close()
            words = [sys.executable, "-c", _DIES, str(stage.root), str(driver.folder), stop, f"c{number}"]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert done.returncode == 9, done.stdout + done.stderr
            stage.backend = stage.fresh()
            made = stage.by_slices(stage.first_npu())
            assert made == [*([("vir02", 2)] if stop != "recorded-preparing" else []), ("vir01", 6)], (stop, made)
            driver = await driver.again()
            prepared = [record.prepared for record in driver.node.store.claims.values()]
            # The record is stored while the CDI file is written. If the file exists, both states are correct.
            assert prepared in {"recorded-prepared": ([True],), "cdi-written": ([True], [])}.get(stop, ([],)), (
                stop,
                prepared,
            )
            if prepared:
                assert await driver.prepare(f"c{number}", "npu-0-vir02-2") == ""
                assert driver.slices(0) == [("vir02", 2), ("vir01", 6)]
                assert await driver.unprepare(f"c{number}") == ""
            assert driver.slices(0) == [("vir01", 6)] and not driver.node.cdi_files(), stop
        driver.node.close()

    acted(stage, scene)


@on("8x310P-Pro")
def foreign_vnpu_at_the_place_of_a_claim_is_kept(stage: Stage) -> None:
    """A vNPU created by hand has the claim's template and vGroup but another ID. The driver stores its chosen ID
    before it creates a vNPU.
    """

    async def scene(driver: Driver) -> None:
        driver.node.close()
        words = [sys.executable, "-c", _DIES, str(stage.root), str(driver.folder), "recorded-preparing", "one"]
        assert subprocess.run(words, capture_output=True, check=False).returncode == 9
        (written,) = (held for claim in prepared_claims(driver.node.store.path) for held in claim.devices)
        assert (written.instance_id, written.partition_uuid) == (102, None)
        stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir02", "-g", "1")
        driver = await driver.again()
        (foreign,) = stage.first_npu().partitions
        assert foreign.instance_id == 100 and driver.node.store.claims == {}
        assert not driver.node.inventory.offers["npu-0-vir02-2"].dynamic
        # The vNPU of a prepared claim is replaced by hand.
        assert await driver.prepare("two", "npu-0-vir02-4") == ""
        stage.by_hand("destroy-vnpu", "-i", "0", "-c", "0", "-v", "104")
        stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir02", "-v", "107", "-g", "2")
        assert await driver.unprepare("two") == ""
        assert driver.slices(0) == [("vir02", 2), ("vir02", 4)] and driver.node.store.claims == {}
        driver.node.close()

    acted(stage, scene)


@on("8x310P-Pro")
def restored_vnpu_has_its_id_stored_first(stage: Stage) -> None:
    """The previous ID belongs to a vNPU in another vGroup. A crash during the restore leaves no unknown vNPU."""

    async def scene(driver: Driver) -> None:
        assert await driver.prepare("one", "npu-0-vir02-2") == ""
        stage.by_hand("destroy-vnpu", "-i", "0", "-c", "0", "-v", "102")
        stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir01", "-v", "102", "-g", "3")
        driver.node.close()
        words = [sys.executable, "-c", _DIES, str(stage.root), str(driver.folder), "partition-created", "one"]
        assert subprocess.run(words, capture_output=True, check=False).returncode == 9
        stage.backend = stage.fresh()
        assert sorted(each.instance_id for each in stage.first_npu().partitions) == [102, 107]
        driver = await driver.again()
        assert await driver.prepare("one", "npu-0-vir02-2") == ""
        assert await driver.unprepare("one") == ""
        assert driver.slices(0) == [("vir01", 6)]
        driver.node.close()

    acted(stage, scene)


@on("8x910B4")
def vnpus_without_placements_get_numbers(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir05_1c_8g")
        await driver.node.scan()
        assert await driver.prepare("one", "npu-0-vir05-1c-8g-new-0") == ""
        assert await driver.prepare("two", "npu-0-vir05-1c-8g-new-1") == ""
        assert driver.slices(0) == [("vir05_1c_8g", number) for number in range(3)]
        await driver.node.scan()
        assert await driver.unprepare("one") == ""
        assert driver.slices(0) == [("vir05_1c_8g", 0), ("vir05_1c_8g", 2)]

    acted(stage, scene)


@on("8x310P-Pro")
def rejected_vnpu_is_an_error_and_leaves_no_claim(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        stage.control("fault", "0", "call", "dcmi_create_vdevice", "fail", "-8001")
        error = await driver.prepare("one", "npu-0-vir02-6")
        assert "rejects the vNPU" in error and driver.node.store.claims == {}
        stage.control("clear", "0")
        assert await driver.prepare("one", "npu-0-vir02-6") == ""

    acted(stage, scene)


@on("8x310P-Pro")
def boot_restores_vnpus_of_claims(stage: Stage) -> None:
    """After a reboot, claims have their vNPUs again, unfinished or deleted claims are cleaned up, and an
    administrator's vNPUs stay.
    """

    async def scene(driver: Driver) -> None:
        stage.by_hand("create-vnpu", "-i", "2", "-c", "0", "-f", "vir01")
        await driver.node.scan()
        assert await driver.prepare("kept", "npu-0-vir02-6") == ""
        assert await driver.prepare("ended", "npu-1-vir04-4") == ""
        stage.control("power-cycle")
        again = await driver.again("boot-2")
        assert again.slices(0) == [("vir02", 6)] and again.slices(2) == [("vir01", 0)]
        # The reboot ended the pod but not its vNPU.
        assert await again.unprepare("ended") == ""
        assert again.slices(1) == []
        assert await again.prepare("kept", "npu-0-vir02-6") == ""
        assert await again.unprepare("kept") == ""
        assert again.slices(0) == [] and again.slices(2) == [("vir01", 0)]
        again.node.close()

    acted(stage, scene)


def exchange(stage: Stage, one: int, other: int) -> None:
    """Swap two cards between their slots while the machine is off: the slots keep their numbers, the cards keep their
    IDs.
    """
    path = stage.root / "var/lib/accelerator-simulator/ascend.txt"
    lines = path.read_text().splitlines()
    own = {
        key: [at for at, line in enumerate(lines) if line.split()[:1] == [key]] for key in ("serial", "vdie", "ndie")
    }
    physical = [int(line.split()[1]) for line in lines if line.split()[:1] == ["physical"]]
    for places in own.values():
        first, second = (places[physical.index(number)] for number in (one, other))
        lines[first], lines[second] = lines[second], lines[first]
    path.write_text("\n".join(lines) + "\n")
    stage.control("load", str(path))


@on("8x310P-Pro")
def moved_card_keeps_its_name(stage: Stage) -> None:
    """The UUID, the card name, the claims, and the stored records follow the card, not the index."""

    async def scene(driver: Driver) -> None:
        before = stage.npus()
        assert await driver.prepare("whole", "npu-0") == "" and await driver.prepare("slice", "npu-1-vir02-2") == ""
        exchange(stage, 0, 3)
        exchange(stage, 1, 4)
        stage.backend.close()
        driver = await driver.again("boot-2")
        now = stage.npus()
        for number, former in {0: 3, 1: 4, 3: 0, 4: 1, 2: 2}.items():
            assert (now[number].uuid, now[number].index) == (before[former].uuid, number)
            for name in ("cardID", "vdie"):
                assert now[number].attributes[name] == before[former].attributes[name], name
        held = {record.name: record.devices[0] for record in driver.node.store.claims.values()}
        assert (held["whole"].device_uuid, held["slice"].device_uuid) == (before[0].uuid, before[1].uuid)
        # New containers get the device nodes that the card has now. Its vNPU was created again on it.
        assert driver.slices(4) == [("vir02", 2)] and driver.slices(1) == []
        assert held["slice"].instance_id == 166
        nodes = [
            node.get("hostPath", node["path"])
            for name in ("whole", "slice")
            for device in driver.node.cdi(f"0uid-{name}")["devices"]
            for node in device["containerEdits"]["deviceNodes"]
        ]
        assert nodes == ["/dev/davinci3", "/dev/vdavinci166"]
        # A claim on the card's new number fails with the claim that uses the card.
        assert "is still prepared for claim default/whole" in await driver.prepare("other", "npu-3")
        assert await driver.prepare("other", "npu-0") == ""
        for name in ("whole", "slice", "other"):
            assert await driver.unprepare(name) == ""
        assert driver.slices(4) == [] and not driver.node.cdi_files()
        driver.node.close()

    acted(stage, scene)


@on("8x310P-Pro")
def pending_cleanup_survives_a_boot(stage: Stage) -> None:
    """A vNPU that a faulty chip did not destroy is restored at boot, without a claim. Its cleanup stays pending."""

    async def scene(driver: Driver) -> None:
        assert await driver.prepare("one", f"npu-{SICK}-vir02-6") == ""
        stage.control("fault", str(SICK), "call", "dcmi_get_device_info", "fail", "-8005")
        await driver.node.scan()
        assert await driver.unprepare("one") == ""
        assert len(driver.node.service.unprepare_runner.ownership.cleanups) == 1
        stage.control("clear", str(SICK))
        stage.control("power-cycle")
        again = await driver.again("boot-2")
        (uuid,) = again.node.service.unprepare_runner.pending_uuids
        assert again.slices(SICK) == [("vir02", 6)]
        await again.node.service.housekeeping.settle(uuid)
        assert again.slices(SICK) == [] and again.node.service.unprepare_runner.ownership.cleanups == ()
        again.node.close()

    acted(stage, scene)


@on("8x310P-Pro")
def claims_on_other_chips_work_with_a_faulty_chip(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        offers = set(driver.node.inventory.offers)
        assert await driver.prepare("held", f"npu-{SICK}-vir02-6") == ""
        stage.control("fault", str(SICK), "call", "dcmi_get_device_info", "fail", "-8005")
        await driver.node.scan()
        (uuid,) = driver.node.inventory.faults
        assert driver.node.inventory.faults[uuid].startswith("internal-error")
        assert set(driver.node.inventory.offers) == offers
        assert uuid in await driver.prepare("late", f"npu-{SICK}-vir01-0")
        errors = [await driver.prepare(f"well-{npu}", f"npu-{npu}-vir01-0") for npu in range(8) if npu != SICK]
        assert errors == [""] * 7, errors
        assert await driver.unprepare("held") == ""
        stage.control("clear")
        await driver.node.scan()
        await driver.node.service.housekeeping.settle(uuid)
        assert driver.node.service.unprepare_runner.ownership.cleanups == () and driver.slices(SICK) == []
        assert await driver.prepare("late", f"npu-{SICK}-vir01-0") == ""

    acted(stage, scene)


@on("8x310P-Pro")
def vnpu_destroyed_by_hand_is_reported_and_restored(stage: Stage) -> None:
    answer: list[str] = []
    clock = [0.0]

    class FaultReporter:
        def report_fault(self, device: str, fault: TrackedFault, _records: object) -> None:
            answer.append(f"{device}: {fault.sign.cause}")

        def report_recovery(self, device: str, fault: TrackedFault, _records: object) -> None:
            answer.append(f"{device}: {fault.sign.cause} is over")

    async def scene(driver: Driver) -> None:
        node, backend = driver.node, stage.backend
        await node.scan()
        name = "npu-0-vir02-6"
        assert await driver.prepare("a", name) == ""
        missing = MissingDevices(
            node.service,
            snapshots=Shared(Snapshot()),
            conditions=Conditions(),
            scan_requested=asyncio.Event(),
            reporter=FaultReporter(),
            publish=lambda _missing: None,
            note=lambda _uid: None,
            clock=lambda: clock[0],
        )
        (npu,) = [npu for npu in stage.npus() if npu.partitions]
        backend.destroy_partition(npu.uuid, npu.partitions[0].instance_id)
        for _scan in range(2):
            await node.scan()
            assert node.survey is not None
            await missing._compare(node.survey)
            clock[0] += 10.0
        assert answer == [f"{name}: partition-gone", f"{name}: partition-gone is over"]
        (again,) = [npu for npu in stage.npus() if npu.partitions]
        assert again.uuid == npu.uuid and again.partitions[0].key == npu.partitions[0].key

    acted(stage, scene)
