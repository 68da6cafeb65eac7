# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A claim's companions start with the claim, serve its containers, and end with it, also after failures."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER, ModelGpus
from claim_steps import prepare, run, unprepare
from dra_driver.claims.claim_statuses import prepared_entries
from dra_driver.claims.companion_services import ServiceManager
from dra_driver.claims.store.records import DOCUMENT_VERSION, ClaimReference, NewerRelease, record_of_document
from dra_driver.commands.claims import companions_for
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host.cdi import DeviceNode
from dra_driver.core.host.companions import Companion, companion_name, device_owner
from dra_driver.core.host.system import Completed, System
from dra_driver.monitoring.families import FAMILIES, Samples, add_holding
from dra_driver.monitoring.view import holdings
from machine_model import Claims, Node

PARTITION = "gpu-0-mig-1g10gb-19-0"
API = "resource.nvidia.com/v1beta1"


def mps(kind: str = "GpuConfig", **settings: Any) -> dict[str, Any]:
    sharing = {"strategy": "MPS", "mpsConfig": settings}
    return {"opaque": {"driver": DRIVER, "parameters": {"apiVersion": API, "kind": kind, "sharing": sharing}}}


def modes(node: Node) -> list[str]:
    with node.gpus.state() as state:
        return [entry["knobs"]["computeMode"] for entry in state.values()]


def of(node: Node, uid: str) -> list[dict[str, Any]]:
    return [edits["containerEdits"] for edits in node.cdi(uid)["devices"]]


def test_mps_daemon_has_its_gpu_exclusively_and_serves_containers(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0", config=[mps(defaultActiveThreadPercentage=50)])
        assert await prepare(node, claim) == ""
        (daemon,) = node.companion_services.running().values()
        assert daemon["devices"] == [node.gpus.template(0).uuid]
        assert "set_default_active_thread_percentage 50" in daemon["commands"]
        assert modes(node) == ["ExclusiveProcess", "Default"]
        (edits,) = of(node, claim.uid)
        assert "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps" in edits["env"]
        paths = {mount["containerPath"] for mount in edits["mounts"]}
        assert {path for path in paths if "-metadata" not in path} == {"/tmp/nvidia-mps", "/dev/shm"}
        assert await unprepare(node, claim) == ""
        assert (node.companion_services.running(), modes(node)) == ({}, ["Default", "Default"])

    run(tmp_path, scenario)


def test_unprepare_deletes_a_partition_that_its_daemon_used(tmp_path: Path) -> None:
    """The MPS daemon is a process on the partition: unprepare stops the daemon and then deletes the partition."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", PARTITION, config=[mps("MigDeviceConfig")])
        assert await prepare(node, claim) == ""
        ((_gpu, uuid),) = node.partitions()
        (daemon,) = node.companion_services.running().values()
        assert daemon["devices"] == [uuid]
        assert await unprepare(node, claim) == ""
        assert (node.partitions(), node.companion_services.running()) == ([], {})

    run(tmp_path, scenario)


def test_prepare_daemon_fails_to_start_rolls_back(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.companion_services.failures.append(AcceleratorError("it does not want to"))
        partition = claims.allocate("a", PARTITION, config=[mps("MigDeviceConfig")])
        assert "it does not want to" in await prepare(node, partition)
        assert (node.partitions(), node.companion_services.running(), node.store.claims, node.cdi_files()) == (
            [],
            {},
            {},
            (),
        )
        assert await prepare(node, partition) == ""

    run(tmp_path, scenario)


def test_prepare_impossible_sharing_is_rejected_before_any_write(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        other = mps(defaultPerDevicePinnedMemoryLimit={"1": "1Gi"})
        admin = {"device": "gpu-1", "adminAccess": True}
        for name, config, device, message in (
            ("a", other, "gpu-0", "defaultPerDevicePinnedMemoryLimit names 1; expected 0 or GPU-"),
            ("b", mps(), admin, "changes nothing on a device"),
        ):
            assert message in await prepare(node, claims.allocate(name, device, config=[config]))
        node.backend.failures["refuse_without_companions"] = [AcceleratorError("MPS is not on this node")]
        assert "not on this node" in await prepare(node, claims.allocate("c", "gpu-0", config=[mps()]))
        assert (node.companion_services.running(), node.store.claims, modes(node)) == ({}, {}, ["Default", "Default"])

    run(tmp_path, scenario)


def test_older_release_rejects_a_record_with_sharing_and_reads_all_others(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("a", "gpu-0", config=[mps()])) == ""
        assert await prepare(node, claims.allocate("b", "gpu-1")) == ""
        shared, plain = (record.document for record in node.store.claims.values())
        assert '"version":3' in shared and '"version":1' in plain
        assert '"sharing"' not in plain and '"settings"' not in plain
        assert record_of_document(shared).shared == next(iter(node.store.claims.values())).shared
        with pytest.raises(NewerRelease):
            record_of_document(shared.replace('"version":3', f'"version":{DOCUMENT_VERSION + 1}'))

    run(tmp_path, scenario)


def test_restart_keeps_running_daemons_and_starts_missing_ones(tmp_path: Path) -> None:
    claims = Claims()

    async def life(first: bool) -> None:
        node = Node(tmp_path, claims)
        stays = claims.allocate("stays", "gpu-0", config=[mps()])
        lost = claims.allocate("lost", "gpu-1", config=[mps()])
        if not first:
            before = node.companion_services.running()[f"{stays.uid}.0"]
            node.companion_services.stop(lost.uid)
        await node.start()
        if first:
            assert [await prepare(node, each) for each in (stays, lost)] == ["", ""]
        else:
            running = node.companion_services.running()
            assert running[f"{stays.uid}.0"] == before and set(running) == {f"{stays.uid}.0", f"{lost.uid}.0"}
            assert [await unprepare(node, each) for each in (stays, lost)] == ["", ""]
            assert (node.companion_services.running(), modes(node)) == ({}, ["Default", "Default"])
        node.close()

    asyncio.run(life(first=True))
    asyncio.run(life(first=False))


def test_housekeeping_stops_daemons_without_a_claim(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0", config=[mps()])
        assert await prepare(node, claim) == ""
        environment = {"CUDA_VISIBLE_DEVICES": node.gpus.template(1).uuid}
        node.companion_services.start(Companion("mps", "0uid-nobody.0", (), environment))
        assert await node.service.housekeeping.orphaned_companions() == ("0uid-nobody",)
        node.backend.has_companions = False  # then another vendor's claim
        assert await node.service.housekeeping.orphaned_companions() == ()
        node.backend.has_companions = True
        await node.service.housekeeping.stop_orphaned_companions(
            claim.uid
        )  # it has a claim: its companions keep running
        await node.service.housekeeping.stop_orphaned_companions("0uid-nobody")
        assert set(node.companion_services.running()) == {f"{claim.uid}.0"}

    run(tmp_path, scenario)


def test_housekeeping_restarts_a_stopped_daemon(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0", config=[mps()])
        assert await prepare(node, claim) == ""
        before = node.companion_services.running()
        node.companion_services.stop(claim.uid)
        await node.service.housekeeping.ensure_companions(claim.uid)
        assert node.companion_services.running() == before
        await node.service.housekeeping.ensure_companions("0uid-nobody")
        assert node.companion_services.running() == before
        # A container has changed the daemon's settings.
        node.companion_services.check_failures.append(AcceleratorError("it gives 100 percent"))
        with pytest.raises(AcceleratorError, match="it gives 100 percent"):
            await node.service.housekeeping.ensure_companions(claim.uid)

    run(tmp_path, scenario)


def test_daemon_does_not_count_as_a_user_of_its_device(tmp_path: Path) -> None:
    """A changed allocation is undone although the daemon uses the GPU. Processes of containers block it."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0", config=[mps()])
        assert await prepare(node, claim) == ""
        moved = claims.allocate("a", "gpu-1", config=[mps()], uid=claim.uid)
        assert await prepare(node, moved) == ""
        (daemon,) = node.companion_services.running().values()
        assert daemon["devices"] == [node.gpus.template(1).uuid]
        with node.gpus.state() as state:
            state[node.gpus.template(1).uuid]["pids"].append(4711)
        back = claims.allocate("a", "gpu-0", config=[mps()], uid=claim.uid)
        assert "processes 4711 use it" in await prepare(node, back)

    run(tmp_path, scenario)


def metadata_shares(root: Path, uid: str) -> list[dict[str, Any]]:
    """Return each device's share according to the metadata files of a claim's containers."""
    found = []
    for path in sorted(root.rglob(f"*-metadata/{uid}/*.json")):
        for request in json.loads(path.read_text().splitlines()[0])["requests"]:
            found += [each["attributes"] for each in request["devices"]]
    names = ("shareID", "consumedMemory", "consumedMultiprocessors", "consumedShares")
    return [{name: each[name] for name in names if name in each} for each in found]


def share(number: int, memory: str, multiprocessors: int = 33) -> dict[str, Any]:
    consumed = {"memory": memory, "multiprocessors": str(multiprocessors), "shares": "1"}
    return {"device": "gpu-0", "shareID": f"{number}1111111-1111-1111-1111-111111111111", "consumedCapacity": consumed}


def test_shared_daemon_serves_claims_with_separate_limits(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        config = [mps(sharedDaemon=True)]
        one = claims.allocate("one", share(1, "10Gi"), config=config)
        two = claims.allocate(
            "two", share(2, "20Gi", 66), config=[mps(sharedDaemon=True, defaultActiveThreadPercentage=10)]
        )
        apart = claims.allocate("apart", share(3, "5Gi"), config=[mps()])
        assert [await prepare(node, each) for each in (one, two, apart)] == [""] * 3
        uuid = node.gpus.template(0).uuid
        name = f"device-{uuid}.0"
        assert set(node.companion_services.running()) == {name, f"{apart.uid}.0"}
        assert node.companion_services.running()[name]["commands"] == [
            "set_default_active_thread_percentage 100",
            "get_default_active_thread_percentage",
        ]
        assert node.companion_services.running()[name]["claim"] == ""
        variables = []
        for claim in (one, two):
            (edits,) = of(node, claim.uid)
            variables.append([each for each in edits["env"] if "LIMIT" in each or "PERCENTAGE" in each])
            assert any(mount["hostPath"].endswith(f"/{name}/pipe") for mount in edits["mounts"])
        assert variables == [
            ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"],
            ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10"],
        ]
        record = node.store.claims[one.uid]
        assert record_of_document(record.document) == record
        assert await node.service.housekeeping.orphaned_companions() == ()
        units = {owner: [{"unit": owner, "state": "active"}] for owner in (f"device-{uuid}", apart.uid)}
        assert [
            [each["unit"] for each in companions_for(units, node.store.claims[claim.uid])] for claim in (two, apart)
        ] == [[f"device-{uuid}"], [apart.uid]]
        assert await unprepare(node, one) == ""
        assert name in node.companion_services.running()
        await node.service.housekeeping.stop_orphaned_companions(f"device-{uuid}")
        assert name in node.companion_services.running(), "a claim uses it"
        assert await unprepare(node, two) == ""
        assert set(node.companion_services.running()) == {f"{apart.uid}.0"}

    run(tmp_path, scenario, rules=[{"match": {}, "mode": "whole", "shares": 4}])


@pytest.mark.parametrize("second", ["gpu-0", "gpu-1"])
def test_request_with_two_devices_and_a_shared_daemon_is_refused(tmp_path: Path, second: str) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        devices = [{**share(1, "10Gi"), "request": "both"}, {**share(2, "20Gi"), "device": second, "request": "both"}]
        both = claims.allocate("both", *devices, config=[mps(sharedDaemon=True)])
        assert f"request both has gpu-0 and {second}, and a container has the shared" in await prepare(node, both)
        assert (node.companion_services.running(), node.store.claims) == ({}, {})
        apart = [{**device, "request": name} for device, name in zip(devices, "ab")]
        claim = claims.allocate("apart", *apart, config=[mps(sharedDaemon=True)])
        assert [await prepare(node, claim), await unprepare(node, claim)] == ["", ""]
        alone = claims.allocate("alone", *devices, config=[mps()])
        assert await prepare(node, alone) == ""

    run(tmp_path, scenario, rules=[{"match": {}, "mode": "whole", "shares": 4}])


@pytest.mark.parametrize(
    "owner", [f"{'0' * 8}-0000-0000-0000-{'0' * 12}", device_owner(f"GPU-{'0' * 8}-0000-0000-0000-{'0' * 12}")]
)
def test_sockets_of_daemons_fit_into_the_address_of_a_socket(owner: str) -> None:
    """The longest known MPS socket path is below the kernel limit of 108 bytes, which includes the final zero."""
    assert len(f"{Companion('mps', companion_name(owner, 0), (), {}).folder}/pipe/control_privileged") < 108


def test_shared_daemon_without_claims_is_ended(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("one", share(1, "10Gi"), config=[mps(sharedDaemon=True)])
        assert await prepare(node, claim) == ""
        uuid, other = (node.gpus.template(number).uuid for number in (0, 1))
        environment = {"CUDA_VISIBLE_DEVICES": other}
        node.companion_services.start(Companion("mps", f"device-{other}.0", (), environment))
        assert await node.service.housekeeping.orphaned_companions() == (f"device-{other}",)
        await node.service.housekeeping.stop_orphaned_companions(f"device-{other}")
        assert set(node.companion_services.running()) == {f"device-{uuid}.0"}

    run(tmp_path, scenario, rules=[{"match": {}, "mode": "whole", "shares": 4}])


def test_claims_that_share_a_gpu_have_one_daemon_each_with_their_consumed_capacity(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        one = claims.allocate("one", share(1, "10Gi"), config=[mps()])
        two = claims.allocate("two", share(2, "20Gi"), share(3, "5Gi"), config=[mps(defaultActiveThreadPercentage=10)])
        assert [await prepare(node, each) for each in (one, two)] == ["", ""]
        reported = {name: daemon["commands"][:2] for name, daemon in node.companion_services.running().items()}
        assert reported == {
            f"{one.uid}.0": ["set_default_device_pinned_mem_limit 0 10240M", "get_default_active_thread_percentage"],
            f"{two.uid}.0": ["set_default_device_pinned_mem_limit 0 20480M", "set_default_active_thread_percentage 10"],
            f"{two.uid}.1": ["set_default_device_pinned_mem_limit 0 5120M", "set_default_active_thread_percentage 10"],
        }
        assert modes(node) == ["Default", "Default"]  # shared GPUs
        assert len({edits["name"] for edits in node.cdi(two.uid)["devices"]}) == 2
        record = node.store.claims[two.uid]
        assert record_of_document(record.document) == record
        # Container metadata, the claim's status, and metrics use these values to distinguish shares.
        consumed = [{"memory": size << 30, "multiprocessors": 33, "shares": 1} for size in (20, 5)]
        ids = [f"{number}1111111-1111-1111-1111-111111111111" for number in (2, 3)]
        entries = prepared_entries(DRIVER, record, {}, "store-1")
        assert [(each["shareID"], each["data"]["consumed"]) for each in entries] == list(zip(ids, consumed))
        assert metadata_shares(tmp_path, two.uid) == [
            {
                "shareID": {"string": share},
                "consumedMemory": {"int": each["memory"]},
                "consumedMultiprocessors": {"int": 33},
                "consumedShares": {"int": 1},
            }
            for share, each in zip(ids, consumed)
        ]
        samples = Samples()
        for each in holdings([record]):
            add_holding(samples, DRIVER, each)
        label = FAMILIES["claim_consumed_capacity"].labels.index
        scraped = {
            (labels[label("share_id")], labels[label("capacity")]): value
            for name in ("claim_consumed_capacity", "claim_consumed_capacity_bytes")
            for labels, value in samples.values[name].items()
        }
        assert scraped == {(share, name): each[name] for share, each in zip(ids, consumed) for name in each}
        assert await unprepare(node, one) == ""
        assert set(node.companion_services.running()) == {f"{two.uid}.0", f"{two.uid}.1"}
        assert await unprepare(node, two) == ""
        assert node.companion_services.running() == {}

    run(tmp_path, scenario, rules=[{"match": {}, "mode": "whole", "shares": 4}])


class Systemd(System):
    """A system whose systemctl returns the configured answers, and which records the commands."""

    def __init__(self, root: Path, **answers: Completed) -> None:
        super().__init__(str(root))
        self.answers = answers
        self.commands: list[list[str]] = []

    def run(
        self,
        argv: Any,
        timeout: float,
        input: Any = None,  # noqa: A002
        environment: Any = None,
    ) -> Completed:
        words = [word for word in argv if not word.startswith("--no-")]
        self.commands.append(words)
        return self.answers.get(words[1].replace("-", "_"), Completed(0, "", ""))


COMPANION = Companion("mps", "0uid-a.0", (), {"B": "2", "A": "1"}, ("one", "two"))
FOLDER = "run/dra-accelerators/companions"
DEAD = Completed(3, "", "")


def test_service_files_are_written_before_the_service_starts(tmp_path: Path) -> None:
    system = Systemd(tmp_path, is_active=DEAD)
    ServiceManager(system).start(COMPANION)
    assert [words[1:] for words in system.commands] == [
        ["is-active", "--quiet", "dra-accelerators-mps@0uid-a.0.service"],
        ["start", "dra-accelerators-mps@0uid-a.0.service"],
    ]
    assert (tmp_path / FOLDER / "0uid-a.0.environment").read_text() == 'A="1"\nB="2"\n'
    assert (tmp_path / FOLDER / "0uid-a.0.commands").read_text() == "one\ntwo\n"


def test_start_creates_the_directory_of_companions_for_root_alone(tmp_path: Path) -> None:
    ServiceManager(Systemd(tmp_path, is_active=DEAD)).start(COMPANION)
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


def test_check_reloads_the_unit_and_runs_no_tool_of_the_vendor(tmp_path: Path) -> None:
    """Check reloads the unit, whose sandbox alone may open the pipe directory that containers can write to."""
    system = Systemd(tmp_path)
    ServiceManager(system).check(COMPANION)
    assert system.commands == [["systemctl", "reload", "dra-accelerators-mps@0uid-a.0.service"]]
    system.answers["reload"] = Completed(1, "", "Job failed")
    system.answers["__output=cat"] = Completed(0, "the active thread percentage is '100.0', expected 50\n", "")
    with pytest.raises(
        AcceleratorError, match=r"mps@0uid-a\.0\.service failed: the active thread .*'100\.0', expected 50"
    ):
        ServiceManager(system).check(COMPANION)
    assert {words[0] for words in system.commands} == {"systemctl", "journalctl"}


def test_service_missing_device_nodes_are_created_and_removed_with_it(tmp_path: Path) -> None:
    made: list[tuple[Any, ...]] = []

    class Nodes(Systemd):
        """A system that records device nodes, because the tests' user may lack the right to create them."""

        def make_character_device(self, path: str, major: int, minor: int, mode: int) -> bool:
            made.append((path, major, minor, oct(mode)))
            self.path(path).touch()
            return True

    (tmp_path / "dev/nvidia-caps").mkdir(parents=True)
    (tmp_path / "dev/nvidia0").touch()
    new, old = "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia0"
    nodes = (
        DeviceNode(new, type="c", major=236, minor=12, permissions="r"),
        DeviceNode(old, type="c", major=195, minor=0, permissions="rw"),
    )
    services = ServiceManager(Nodes(tmp_path, is_active=DEAD))
    services.start(replace(COMPANION, nodes=nodes))
    assert made == [(new, 236, 12, "0o444")]
    assert services.claims() == {"0uid-a"}
    services.stop("0uid-a")
    assert not (tmp_path / new.lstrip("/")).exists() and (tmp_path / old.lstrip("/")).exists()
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_service_already_running_gets_no_new_files(tmp_path: Path) -> None:
    system = Systemd(tmp_path)
    ServiceManager(system).start(COMPANION)
    assert (len(system.commands), (tmp_path / FOLDER).exists()) == (1, False)


def test_service_of_a_device_with_other_settings_is_refused(tmp_path: Path) -> None:
    shared = replace(COMPANION, name="device-GPU-1.0")
    ServiceManager(Systemd(tmp_path, is_active=DEAD)).start(shared)
    ServiceManager(Systemd(tmp_path)).start(shared)
    other = replace(shared, environment={"A": "2"})
    message = r"device-GPU-1\.0\.service runs for other claims of the device, with other"
    for system in (Systemd(tmp_path), Systemd(tmp_path, is_active=DEAD)):  # DEAD: systemd restarts it
        with pytest.raises(AcceleratorError, match=message):
            ServiceManager(system).start(other)
    ServiceManager(Systemd(tmp_path)).stop("device-GPU-1")
    ServiceManager(Systemd(tmp_path, is_active=DEAD)).start(other)


def test_service_fails_to_start_reports_its_last_log_lines(tmp_path: Path) -> None:
    system = Systemd(tmp_path, is_active=DEAD, start=Completed(1, "", "Job failed."))
    system.answers["__output=cat"] = Completed(0, "no GPU\nto be seen\n", "")
    with pytest.raises(
        AcceleratorError, match=r"0uid-a.0.service does not start: Job failed.*words: no GPU to be seen"
    ):
        ServiceManager(system).start(COMPANION)


class ReadOnly(Systemd):
    """A system with a read-only disk. A directory's mode would not stop root."""

    def write_atomic(self, path: str, *_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def remove(self, path: str) -> bool:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


@pytest.mark.parametrize("nodes", [(), (DeviceNode("/dev/nvidia-caps/nvidia-cap12", type="c", major=236, minor=12),)])
def test_service_files_unwritable_raises_error(tmp_path: Path, nodes: tuple[DeviceNode, ...]) -> None:
    system = ReadOnly(tmp_path, is_active=DEAD)
    reported = r"/run/dra-accelerators/companions/0uid-a\.0\.\w+, which mps needs for 0uid-a.0, cannot be written: Read-only file system"
    with pytest.raises(AcceleratorError, match=reported) as refused:
        ServiceManager(system).start(replace(COMPANION, nodes=nodes))
    assert refused.value.code == "files-unwritable" and "read-only" in refused.value.hint
    assert [words[1] for words in system.commands] == ["is-active"]


def test_service_files_undeletable_raises_error(tmp_path: Path) -> None:
    directory = tmp_path / FOLDER
    directory.mkdir(parents=True)
    (directory / "0uid-a.0.commands").touch()
    reported = r"/run/dra-accelerators/companions/0uid-a\.0\.commands cannot be removed: Read-only file system"
    with pytest.raises(AcceleratorError, match=reported) as refused:
        ServiceManager(ReadOnly(tmp_path)).stop("0uid-a")
    assert refused.value.code == "files-unwritable"


def test_service_stop_removes_all_files_of_the_claim(tmp_path: Path) -> None:
    directory = tmp_path / FOLDER
    directory.mkdir(parents=True)
    for name in ("0uid-a.0.environment", "0uid-a.1.commands", "0uid-ab.0.environment", "other"):
        (directory / name).touch()
    system = Systemd(tmp_path)
    ServiceManager(system).stop("0uid-a")
    assert system.commands[0][1:] == ["stop", "dra-accelerators-*@0uid-a.*.service"]
    assert sorted(path.name for path in directory.iterdir()) == ["0uid-ab.0.environment", "other"]
    system.answers["stop"] = Completed(1, "", "timed out")
    with pytest.raises(AcceleratorError, match="does not end: timed out"):
        ServiceManager(system).stop("0uid-ab")
    assert (directory / "0uid-ab.0.environment").exists()


def test_claims_with_companions_are_found_in_files_and_services(tmp_path: Path) -> None:
    directory = tmp_path / FOLDER
    directory.mkdir(parents=True)
    (directory / "0uid-a.0.environment").touch()
    units = (
        "dra-accelerators-memory@0uid-b.0.service loaded active exited Memory\n"
        "dra-accelerators-mps@0uid-b.0.service loaded failed failed MPS\n"
    )
    system = Systemd(tmp_path, list_units=Completed(0, units, ""))
    assert ServiceManager(system).claims() == {"0uid-a", "0uid-b"}
    system.answers["list_units"] = Completed(1, "", "no bus")
    with pytest.raises(AcceleratorError, match="cannot be listed: no bus"):
        ServiceManager(system).claims()


def test_service_in_a_pod_without_host_pid_reports_the_requirement(tmp_path: Path) -> None:
    """Systemd answers only callers whose process it sees: the claim is refused with this reason, and no companion counts as stopped."""
    system = Systemd(tmp_path, is_active=DEAD)
    status = tmp_path / "proc/self/status"
    status.parent.mkdir(parents=True)
    status.write_text("Name:\tpython3\nNSpid:\t4711\t1\n")
    services = ServiceManager(system)
    services.stop("0uid-a")  # a service that never started does not block its claim
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "0uid-a.0.environment").touch()
    for refused in (lambda: services.start(COMPANION), lambda: services.stop("0uid-a")):
        with pytest.raises(AcceleratorError, match="a pod that does not see the node's processes") as found:
            refused()
        assert "dra_driver_pod_host_pid" in str(found.value) and "dra_driver_deploy_as: service" in str(found.value)
    assert services.claims() == {"0uid-a"} and system.commands == []
    status.write_text("Name:\tpython3\nNSpid:\t4711\n")
    services.start(COMPANION)
    assert [words[1] for words in system.commands] == ["is-active", "start"]


@pytest.mark.parametrize("root", ["sys/fs/cgroup", "sys/fs/cgroup/systemd"])
def test_service_processes_are_those_of_its_cgroup(tmp_path: Path, root: str) -> None:
    group = tmp_path / root / "system.slice/mps"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("12\n34\n")
    system = Systemd(tmp_path, show=Completed(0, "/system.slice/mps\n\n/system.slice/gone\n", ""))
    assert ServiceManager(system).pids("0uid-a") == {12, 34}


def test_service_names_the_claim_that_it_was_started_for(tmp_path: Path) -> None:
    """The running service names its claim, even when all other records of the claim are lost."""
    services = ServiceManager(Systemd(tmp_path, is_active=DEAD))
    assert services.claim_named("0uid-a") is None
    for reported, found in (
        ("default/a", ClaimReference("default", "a", "0uid-a")),
        ("", None),
        ("../../nodes", None),
    ):
        services.start(replace(COMPANION, claim=reported))
        assert services.claim_named("0uid-a") == found
        assert services.claim_named("0uid") is None


def test_mps_index_counts_the_gpus_as_nvidias_driver_does(tmp_path: Path) -> None:
    """Indexes follow the order of the GPU UUIDs, independent of daemons. Consumed capacity distinguishes two shares."""
    one, other = ("11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222")
    limits = mps(defaultPerDevicePinnedMemoryLimit={"0": "1Gi", "1": "2Gi"})
    for_the_rest = mps(defaultPerDevicePinnedMemoryLimit={"0": "1Gi"})
    own = {**mps(defaultPerDevicePinnedMemoryLimit={"0": "3Gi"}), "requests": ["r0"], "source": "FromClaim"}

    def share(name: str, share_id: str, memory: str) -> dict[str, Any]:
        return {"device": name, "shareID": share_id, "consumedCapacity": {"memory": memory, "shares": "1"}}

    async def scenario(node: Node, claims: Claims) -> None:
        first, second = ModelGpus.uuids(2)
        wanted = dict(zip(sorted((first, second)), ("1024M", "2048M")))
        for devices, config, expected in (
            ((share("gpu-1", one, "20Gi"), share("gpu-0", other, "10Gi")), [limits], wanted),
            (("gpu-1", "gpu-0"), [limits], wanted),
            (("gpu-1", "gpu-0"), [for_the_rest, own], {second: "3072M", first: "1024M"}),
        ):
            claim = claims.allocate("a", *devices, config=config)
            assert await prepare(node, claim) == ""
            reported = {}
            for daemon in node.companion_services.running().values():
                for command in daemon["commands"]:
                    what, *words = command.split()
                    if what == "set_default_device_pinned_mem_limit":
                        reported[daemon["devices"][int(words[0])]] = words[1]
            assert reported == expected
            assert await unprepare(node, claim) == ""

    run(tmp_path, scenario, rules=({"match": {}, "mode": "whole", "shares": 4},))
