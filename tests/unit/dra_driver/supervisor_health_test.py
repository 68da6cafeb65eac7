# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Health in the whole driver of one vendor: device errors become taints, Events, and a file, and disappear after their end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import board_model
import grpc
import grpc.aio
import pytest
from backend_model import DRIVER, ModelGpus
from claim_steps import SMALL
from dra_driver import cli
from dra_driver.claims.plan import Inventory
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.health import repair_marks
from dra_driver.core.health import tracker as health_tracker
from dra_driver.core.health.conditions import Ends, Severity, Sign
from dra_driver.core.health.resets import blocked_reset
from dra_driver.core.health.tracker import Moment
from dra_driver.core.model import Device, Health, Notice
from dra_driver.core.vendors.nvidia import offers
from dra_driver.kubelet.health import DeviceState
from dra_driver.protocol import dra_health_v1_pb2, dra_health_v1_pb2_grpc
from dra_driver.supervisors.automatic_reset import MAX_ATTEMPTS
from dra_driver.supervisors.driver_state import Snapshot
from dra_driver.supervisors.health import FILE, HardwareState
from vendor_scene import Scene, run

TORN = Sign("error", Severity.FAILED, "It reported error 9.", "Restart the machine.", Ends.RESTART, "9")
CRASH = Sign("error", Severity.INFORMATIVE, "It reported error 5.", "Look at the program.", Ends.PROCESSES, "5")


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.core.health.tracker.VERIFY_SECONDS", 0.2)
    return tmp_path_factory.mktemp("h")


def kept_in(directory: Path) -> Path:
    """Return the driver's health file below the model's root."""
    return Path(f"{directory}/root{directory}/kubelet/plugins/{DRIVER}/{FILE}")


def taints(scene: Scene) -> dict[str, list[dict[str, str]]]:
    """Return the taints of the published devices, by name. Devices without taints are left out."""
    published = [device for item in scene.api.slices.values() for device in item["spec"].get("devices", ())]
    return {device["name"]: device["taints"] for device in published if device.get("taints")}


def reasons(scene: Scene, kind: str) -> set[tuple[str, str]]:
    """Return reason and type of the Events on objects of a kind."""
    return {(each["reason"], each["type"]) for each in scene.api.events if each["involvedObject"]["kind"] == kind}


def test_reported_fault_survives_a_driver_restart_and_ends_at_reboot(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        assert await scene.prepare("a", SMALL) == ""
        scene.api.claims["a"]["status"]["reservedFor"] = [{"resource": "pods", "name": "pod-a", "uid": "0uid-pod-a"}]
        faulty = scene.backend.gpus.template(0).uuid
        scene.backend.notices.put(Notice(faulty, "GPU 0 reports error 9", TORN))
        of_gpu_0 = {name for name in scene.devices() if name.startswith("gpu-0")}
        await scene.until(lambda: set(taints(scene)) == of_gpu_0)
        (taint,) = taints(scene)[SMALL]
        assert (taint["key"], taint["value"], taint["effect"]) == (f"{DRIVER}/error", "9", "NoExecute")
        await scene.until(lambda: all(reasons(scene, kind) for kind in ("Node", "ResourceClaim", "Pod")))
        for kind in ("Node", "ResourceClaim", "Pod"):
            assert ("DeviceUnhealthy", "Warning") in reasons(scene, kind)
        assert all("Restart the machine." in e["message"] for e in scene.api.events if e["reason"] == "DeviceUnhealthy")
        reported = [device["ailments"] for device in (await scene.status())["devices"]]
        assert [len(each) for each in reported] == [1, 0] and reported[0][0]["severity"] == "failed"

        await scene.stop()
        await scene.start()
        await asyncio.sleep(1)
        await scene.until(lambda: scene.driver.status().published)
        assert set(taints(scene)) == of_gpu_0, "the driver lost the reported fault"
        assert await scene.unprepare("a") == ""

        await scene.stop()
        scene.boot = "boot-2"
        await scene.start()
        await scene.until(lambda: not taints(scene))
        await scene.until(lambda: ("DeviceRecovered", "Normal") in reasons(scene, "Node"))
        await scene.until(lambda: json.loads(kept_in(short).read_text())["devices"] == {})

    run(short, scenario)


def test_application_error_is_reported_on_its_claim_without_a_taint(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        assert await scene.prepare("a", SMALL) == ""
        assert await scene.prepare("b", "gpu-0-mig-3g40gb-9-4") == ""
        gpu = scene.backend.gpus.devices()[0]
        (of_a,) = [each.instance_id for each in gpu.partitions if each.placement.start == 0]
        crash = Sign(**{**CRASH.__dict__, "instance": of_a})
        scene.backend.notices.put(Notice(gpu.uuid, "GPU 0 reports error 5", crash))
        await scene.until(lambda: ("DeviceUnhealthy", "Warning") in reasons(scene, "ResourceClaim"))
        reported = [each["involvedObject"]["name"] for each in scene.api.events if each["reason"] == "DeviceUnhealthy"]
        assert reported == ["a"]
        await scene.until(lambda: ("DeviceRecovered", "Normal") in reasons(scene, "ResourceClaim"))
        assert taints(scene) == {}

    run(short, scenario)


def test_kubelet_gets_unhealthy_and_unknown_devices(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.settings["inventory_interval"] = 30  # so that a late scan on a busy machine causes no unknown state
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        async with grpc.aio.insecure_channel(f"unix:{short}/kubelet/plugins/{DRIVER}/dra.sock") as channel:
            stub: Any = dra_health_v1_pb2_grpc.DRAResourceHealthStub(channel)  # type: ignore[no-untyped-call]
            stream = stub.NodeWatchResources(dra_health_v1_pb2.NodeWatchResourcesRequest())

            async def states() -> dict[str, tuple[int, str]]:
                answer = await asyncio.wait_for(stream.read(), 30)
                return {each.device.device_name: (each.health, each.message) for each in answer.devices}

            first = await states()
            assert set(first) == set(scene.devices()) and set(first.values()) == {(1, "")}
            scene.backend.notices.put(Notice(scene.backend.gpus.template(1).uuid, "GPU 1 reports error 9", TORN))
            faulty = await states()
            assert faulty["gpu-1"] == (2, "It reported error 9. Restart the machine.") and faulty["gpu-0"] == (1, "")
            scene.backend.present = False
            removed = await states()
            while {state for state, _message in removed.values()} != {0}:
                removed = await states()
            assert "not loaded" in removed["gpu-0"][1]

    run(short, scenario)


@pytest.mark.parametrize("step", [-7200.0, 120.0, 7200.0])
def test_reports_after_a_clock_step_state_the_health_and_the_time_on_the_new_clock(step: float) -> None:
    """The kubelet compares the time in a report with the system clock, so a report after a clock step uses the new clock."""
    offer = offers.offers(board_model.device("h100-80"), dynamic=False)[0]
    inventory = Inventory(pool="pool", offers={offer.name: offer}, dynamic=frozenset())
    scanned = Snapshot(inventory=inventory, scanned_at=1e9, scanned_clock=50.0)
    (report,) = HardwareState(scanned).reports("pool", now=1e9 + 4 + step, clock=54.0, expiry=30.0)
    assert (report.state, report.seen_at) == (DeviceState.HEALTHY, 1e9 + step)
    (report,) = HardwareState(scanned).reports("pool", now=1e9 + 40 + step, clock=90.0, expiry=30.0)
    assert (report.state, report.message) == (DeviceState.UNKNOWN, "The hardware was last scanned 40 s ago.")


def resets(scene: Scene) -> list[Any]:
    """Return the arguments of the resets, in order."""
    return [arguments for call, arguments in scene.backend.calls if call == "reset"]


@pytest.mark.parametrize("wanted", [True, False])
def test_requested_reset_runs_on_an_idle_gpu_if_enabled(
    short: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.automatic_reset.RETRY_SECONDS", 0.0)

    async def scenario(scene: Scene) -> None:
        scene.settings["health_reset"] = wanted
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        assert await scene.prepare("a", SMALL) == ""
        asks = Sign(
            "recovery-action", Severity.DEGRADED, "It asks for a reset.", value="reset", is_mended_by_reset=True
        )
        used, idle = scene.backend.gpus.devices()
        scene.backend.conditions = {each.index: Health((asks,), needs_recovery=True) for each in (used, idle)}
        scene.driver.request_scan()
        if not wanted:
            await scene.until(lambda: len(taints(scene)) == 2 * 26)
            await asyncio.sleep(1.5)
            assert resets(scene) == []
            return
        await scene.until(lambda: resets(scene))
        await scene.until(lambda: set(taints(scene)) == {name for name in scene.devices() if name.startswith("gpu-0")})
        assert resets(scene) == [((idle.uuid,),)], "the one that a claim uses was reset, or nothing was"
        await scene.until(lambda: ("DeviceReset", "Normal") in reasons(scene, "Node"))
        assert await scene.unprepare("a") == ""
        await scene.until(lambda: not taints(scene))
        assert resets(scene) == [((idle.uuid,),), ((used.uuid,),)]

    run(short, scenario)


@pytest.mark.parametrize("automatic", [True, False])
def test_fault_that_needs_a_reset_stays_until_one_is_made_or_reported(short: Path, automatic: bool) -> None:
    """For example Xid 119, for which the GPU itself requests no reset: the fault stays until a reset is made or reported."""
    hang = Sign("error", Severity.FAILED, "It hangs.", "Reset it.", Ends.RESET, "119", is_mended_by_reset=True)

    async def scenario(scene: Scene) -> None:
        scene.settings["health_reset"] = automatic
        scene.backend.conditions = {each: Health((), needs_recovery=False, needs_reset=False) for each in (0, 1)}
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        faulty = scene.backend.gpus.template(1).uuid
        scene.backend.notices.put(Notice(faulty, "GPU 1 reports error 119", hang))
        if automatic:
            await scene.until(lambda: resets(scene) == [((faulty,),)])
            await scene.until(lambda: ("DeviceReset", "Normal") in reasons(scene, "Node"))
            await scene.until(lambda: not taints(scene))
            return
        await scene.until(lambda: len(taints(scene)) == 26)
        await asyncio.sleep(2.5)
        assert len(taints(scene)) == 26 and resets(scene) == [], "it has ended without a reset"
        await scene.stop()
        await scene.start()
        await scene.until(lambda: scene.driver.status().published)
        assert len(taints(scene)) == 26
        repair_marks.mark(str(short / "kubelet/plugins" / DRIVER), [faulty], repair_marks.RESET)
        scene.driver.request_scan()
        await scene.until(lambda: not taints(scene))

    run(short, scenario)


def marks_in(state: Path) -> list[tuple[str, str]]:
    return [(each.uuid, each.what) for each in repair_marks.read(str(state))]


@pytest.mark.parametrize(
    ("ends", "what", "removed"),
    [
        (Ends.RESTART, repair_marks.RESET, False),
        (Ends.REPLACEMENT, repair_marks.RESET, False),
        (Ends.REPLACEMENT, repair_marks.REPAIRED, True),
    ],
)
def test_mark_before_start_ends_the_faults_that_it_covers(short: Path, ends: Ends, what: str, removed: bool) -> None:
    fault = Sign("error", Severity.FAILED, "It is broken.", "Repair it.", ends, "9")

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        faulty = scene.backend.gpus.template(1).uuid
        scene.backend.notices.put(Notice(faulty, "GPU 1 reports error 9", fault))
        await scene.until(lambda: len(taints(scene)) == 26)
        await scene.stop()
        repair_marks.mark(str(short / "kubelet/plugins" / DRIVER), [faulty, "GPU-unknown"], what)
        await scene.start()
        await scene.until(lambda: scene.driver.status().published)
        await scene.until(lambda: (not taints(scene)) == removed)
        await asyncio.sleep(1.2)
        assert (not taints(scene)) == removed
        await scene.until(lambda: not marks_in(short / "kubelet/plugins" / DRIVER))

    run(short, scenario)


def test_error_that_counts_only_in_use_is_a_fault_of_a_device_with_a_claim(short: Path) -> None:
    used = Sign("error", Severity.DEGRADED, "It broke.", "Reset it.", Ends.RESET, "159", only_in_use=True)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        assert await scene.prepare("a", SMALL) == ""
        for index in (0, 1):
            scene.backend.notices.put(Notice(scene.backend.gpus.template(index).uuid, "error 159", used))
        of_gpu_0 = {name for name in scene.devices() if name.startswith("gpu-0")}
        await scene.until(lambda: set(taints(scene)) == of_gpu_0)
        await asyncio.sleep(1.2)
        assert set(taints(scene)) == of_gpu_0

    run(short, scenario)


def test_recovered_command_marks_only_devices_with_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "plugins" / DRIVER
    state.mkdir(parents=True)
    config = tmp_path / "driver.yaml"
    config.write_text(f"node_name: n\nbackends: [nvidia]\nkubelet_root: {tmp_path}\n")
    reported = health_tracker.apply_report((), TORN, (), Moment(1.0, "b", 1.0))
    assert cli.main(["recovered", "all", "--config", str(config)]) == 0
    assert capsys.readouterr().out == "no device has a fault\n"
    content = {"form": 1, "devices": health_tracker.to_data({"GPU-1": reported, "GPU-2": reported, "GPU-3": reported})}
    (state / FILE).write_text(json.dumps(content))
    assert cli.main(["recovered", "GPU-1", "GPU-9", "--config", str(config)]) == 1
    assert "no fault of GPU-9" in capsys.readouterr().err
    assert marks_in(state) == [], "nothing is marked where one device is unknown"
    assert cli.main(["recovered", "GPU-1", "GPU-3", "--config", str(config)]) == 0
    assert "GPU-1: reported, for the next start of the driver" in capsys.readouterr().out
    assert marks_in(state) == [(uuid, repair_marks.REPAIRED) for uuid in ("GPU-1", "GPU-3")]
    assert cli.main(["recovered", "all", "--config", str(config)]) == 0
    assert [uuid for uuid, _what in marks_in(state)] == ["GPU-1", "GPU-1", "GPU-2", "GPU-3", "GPU-3"]
    (state / FILE).write_text("{")
    assert cli.main(["recovered", "all", "--config", str(config)]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_failed_reset_is_reported_and_retried_a_limited_number_of_times(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.automatic_reset.RETRY_SECONDS", 0.0)

    async def scenario(scene: Scene) -> None:
        scene.settings["health_reset"] = True
        scene.backend.failures["reset"] = [AcceleratorError("nvidia-smi ended with 1")] * 9
        asks = Sign(
            "recovery-action", Severity.DEGRADED, "It asks for a reset.", value="reset", is_mended_by_reset=True
        )
        scene.backend.conditions = {1: Health((asks,), needs_recovery=True)}
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(resets(scene)) == MAX_ATTEMPTS)
        await scene.until(lambda: ("ResetFailed", "Warning") in reasons(scene, "Node"))
        await asyncio.sleep(2.5)
        assert len(resets(scene)) == MAX_ATTEMPTS
        assert len(taints(scene)) == 26, "it is still held back"

    run(short, scenario)


@pytest.mark.parametrize("known", [True, False])
def test_blocked_reset_is_no_attempt_and_runs_after_the_obstacle_ends(
    short: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The scan reports the obstacle (``known``), or it is newer than the last scan and the reset itself is refused."""
    reason = "the fabric manager does not run. Start it"
    faulty = ModelGpus.uuids(2)[1]

    async def scenario(scene: Scene) -> None:
        scene.settings["health_reset"] = True
        blocked = {faulty} if known else set()
        template = scene.backend.gpus.template

        def obstructed(index: int) -> Device:
            found = template(index)
            return replace(found, reset_blocked=reason if found.uuid in blocked else "")

        monkeypatch.setattr(scene.backend.gpus, "template", obstructed)
        refusal = blocked_reset([replace(template(1), reset_blocked=reason)])
        assert refusal is not None
        scene.backend.failures["reset"] = [] if known else [refusal] * (MAX_ATTEMPTS + 1)
        asks = Sign(
            "recovery-action", Severity.DEGRADED, "It asks for a reset.", value="reset", is_mended_by_reset=True
        )
        scene.backend.conditions = {1: Health((asks,), needs_recovery=True)}
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: ("ResetBlocked", "Warning") in reasons(scene, "Node"))
        if known:
            await asyncio.sleep(2.5)
            assert resets(scene) == [] and len(taints(scene)) == 26, "it is not held back"
            reported = [each for each in scene.api.events if each["reason"] == "ResetBlocked"]
            assert len(reported) == 1 and reason in reported[0]["message"] and faulty in reported[0]["message"], (
                reported
            )
            blocked.clear()
        await scene.until(lambda: ("DeviceReset", "Normal") in reasons(scene, "Node"))
        assert len(resets(scene)) == (1 if known else MAX_ATTEMPTS + 2)
        assert ("ResetFailed", "Warning") not in reasons(scene, "Node")
        await scene.until(lambda: not taints(scene))

    run(short, scenario)


@pytest.mark.parametrize(
    "content", ["", "{", '{"form": 99, "devices": {}}', '{"form": 1}', '{"form": 1, "devices": {"u": 3}}']
)
def test_unreadable_health_file_does_not_block_the_start(
    short: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        kept_in(short).parent.mkdir(parents=True)
        kept_in(short).write_text(content)
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        assert taints(scene) == {}
        assert "starting without it" in caplog.text

    run(short, scenario)
