# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The command line: plan and apply layouts without disturbing claims, and show the prepared claims."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from backend_model import ModelBackend, ModelGpus
from dra_driver import cli, layout_command, settings_command
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.core.errors import BackendUnavailable, InUse
from dra_driver.core.model import Placement, healthy_devices
from dra_driver.core.partitioning.layout_execute import wait_for_restored
from dra_driver.core.partitioning.rules import parse_rules
from dra_driver.core.store.prepared_claims import PreparedClaim, PreparedDevice, wake_driver
from dra_driver.kubelet.sockets import lock_instance
from dra_driver.layout_command import open_when_available, plan_or_apply_devices, wait_for_restored_partitions
from dra_driver.supervisors.driver_state import Shared, Snapshot
from dra_driver.supervisors.health import HardwareHealth, HardwareState
from dra_driver.supervisors.status import Status, StatusServer, status_of

STATIC = [{"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 2}}]


@pytest.fixture
def backend(tmp_path: Path) -> ModelBackend:
    return ModelBackend(ModelGpus(tmp_path / "gpus.json"))


def places(backend: ModelBackend) -> list[tuple[int, int]]:
    return sorted(
        (partition.profile_id, partition.placement.start)
        for device in backend.gpus.devices()
        for partition in device.partitions
    )


def claim(backend: ModelBackend, profile_id: int, start: int, boot: str, uuid: str | None = None) -> PreparedClaim:
    gpu = backend.gpus.template(0)
    profile = gpu.profile(profile_id)
    assert profile is not None
    return PreparedClaim(
        uid="u",
        namespace="default",
        name="held",
        state="prepared",
        boot_id=boot,
        devices=(
            PreparedDevice(
                name="d",
                device_uuid=gpu.uuid,
                partition_uuid=uuid,
                profile=profile.name,
                profile_id=profile_id,
                placement=Placement(start, profile.size),
                created=False,
            ),
        ),
    )


EVERY = frozenset(ModelGpus.uuids(2))


def apply(backend: ModelBackend, rules: Sequence[Any], claims: Sequence[PreparedClaim] = ()) -> list[Any]:
    return plan_or_apply_devices(
        backend, healthy_devices(backend.discover()), parse_rules(list(rules)), claims, "boot-1", locked=EVERY
    )


def test_layout_applied_twice_is_created_once(backend: ModelBackend) -> None:
    (result,) = plan_or_apply_devices(
        backend, healthy_devices(backend.discover()), parse_rules(STATIC), (), "boot-1", locked=None
    )
    assert not result.done
    assert len(result.steps) == 4
    assert places(backend) == []
    (result,) = apply(backend, STATIC)
    assert result.done
    assert len(places(backend)) == 3
    (result,) = apply(backend, STATIC)
    assert result.steps == []


def test_layout_keeps_partitions_of_claims_of_this_boot(backend: ModelBackend) -> None:
    apply(backend, STATIC)
    before = places(backend)
    held = claim(backend, 9, next(start for profile, start in before if profile == 9), "boot-1")
    (result,) = apply(backend, [{"match": {"index": 0}, "mode": "whole"}], [held])
    assert "default/held" in str(result.error)
    assert places(backend) == before


def test_layout_claim_of_the_previous_boot_keeps_its_placement(backend: ModelBackend) -> None:
    # Without the claim the planner would place the large partition elsewhere.
    held = [claim(backend, 9, 0, "boot-0"), claim(backend, 19, 6, "boot-0")]
    (result,) = apply(backend, STATIC, held)
    assert result.error is None
    assert {(9, 0), (19, 6)} <= set(places(backend))
    assert len(places(backend)) == 3


def test_layout_previous_placement_without_room_is_dropped(backend: ModelBackend) -> None:
    held = [claim(backend, 9, 0, "boot-0")]
    rules = [
        {"match": {"index": 0}, "mode": "static", "partitions": [{"profile": "4g.40gb", "placement": 0}, "3g.40gb"]}
    ]
    rules[0]["partitions"] = [{"profile": "4g.40gb", "placement": 0}, {"profile": "3g.40gb"}]
    (result,) = apply(backend, rules, held)
    assert result.error is None
    assert places(backend) == [(5, 0), (9, 4)]


def test_layout_failing_device_does_not_stop_the_others(backend: ModelBackend) -> None:
    rules = [
        {"match": {"index": 0}, "mode": "static", "partitions": {"7g.80gb": 2}},
        {"match": {}, "mode": "static", "partitions": {"7g.80gb": 1}},
    ]
    first, second = apply(backend, rules)
    assert first.error is not None
    assert second.done
    assert places(backend) == [(0, 0)]


def test_layout_waits_for_the_gpu_driver(backend: ModelBackend, capsys: pytest.CaptureFixture[str]) -> None:
    backend.present = False
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        backend.present = now[0] >= 6

    open_when_available(backend, 60, sleep=sleep, clock=lambda: now[0])
    assert now[0] == 6
    assert capsys.readouterr().err.count("waiting") == 1
    backend.present = False
    with pytest.raises(BackendUnavailable):
        open_when_available(backend, 1, sleep=sleep, clock=lambda: now[0])


def test_wake_driver_running_driver_gets_sighup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: reported.append((pid, number)))
    assert not wake_driver(str(tmp_path))
    lock = lock_instance(str(tmp_path))
    assert wake_driver(str(tmp_path))
    assert reported == [(os.getpid(), signal.SIGHUP)]
    lock.close()
    assert not wake_driver(str(tmp_path))


def test_driver_in_another_pid_namespace_is_found_and_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod without hostPID the driver records its own PID. On the node this is another process, such as systemd: it is not woken."""
    program = (
        "import os, sys, time; from dra_driver.kubelet.sockets import lock_instance; "
        "lock = lock_instance(sys.argv[1]); print(os.getpid(), flush=True); time.sleep(600)"
    )
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] + ["--map-root-user"] * bool(os.geteuid())
    words = [*apart, sys.executable, "-c", program, str(tmp_path)]
    reported: list[tuple[int, int]] = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "1\n"
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            with monkeypatch.context() as patch:
                patch.setattr(os, "kill", lambda pid, number: reported.append((pid, number)))
                assert wake_driver(str(tmp_path))
            assert reported == [(int(child), signal.SIGHUP)]
            # A holder that this process cannot see, as from a pod.
            hidden = "import sys; from dra_driver.core.store.prepared_claims import wake_driver; sys.exit(wake_driver(sys.argv[1]))"
            subprocess.run([*apart, sys.executable, "-c", hidden, str(tmp_path)], check=True)
            # The PID of a file that a program has damaged.
            (tmp_path / "driver.lock").write_text(f"pid {os.getpid()}\n")
            assert not wake_driver(str(tmp_path))
        finally:
            process.kill()


def test_layout_command_from_file_to_status(
    tmp_path: Path, backend: ModelBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout_command, "create", lambda vendor, system: backend)
    monkeypatch.setattr(layout_command, "vendors_there", lambda: ("nvidia",))
    rules = tmp_path / "layout.json"
    rules.write_text(json.dumps(STATIC))
    options = ["--file", str(rules), "--config", str(tmp_path / "none.yaml"), "--wait", "0"]
    assert cli.main(["layout", "plan", *options]) == 0
    assert "would" in capsys.readouterr().out
    assert cli.main(["layout", "apply", *options, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["index"], result["done"], len(result["steps"])) == (0, True, 4)
    assert cli.main(["layout", "apply", *options]) == 0
    assert "as wanted" in capsys.readouterr().out
    requested: list[str] = []

    def create(vendor: str, _system: object) -> ModelBackend:
        requested.append(vendor)
        return backend

    monkeypatch.setattr(layout_command, "create", create)
    assert cli.main(["layout", "apply", *options, "--vendor", "another"]) == 0
    assert requested == ["another"] and "as wanted" in capsys.readouterr().out
    rules.write_text(json.dumps([{"match": {"index": 0}, "mode": "static", "partitions": {"7g.80gb": 2}}]))
    assert cli.main(["layout", "apply", *options]) == 1
    rules.write_text(json.dumps([{"match": {}, "mode": "sideways"}]))
    assert cli.main(["layout", "plan", *options]) == 1
    assert "sideways" in capsys.readouterr().err
    rules.write_text("{")
    assert cli.main(["layout", "plan", *options]) == 1
    backend.present = False
    rules.write_text(json.dumps([{"match": {"vendor": "other"}, "mode": "whole"}]))
    capsys.readouterr()
    assert cli.main(["layout", "plan", *options]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_layout_waits_for_partitions_that_the_driver_restores(
    backend: ModelBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["slice 100 is missing", "slice 100 is missing", ""]
    waits: list[float] = []
    reports: list[str] = []
    monkeypatch.setattr(backend, "describe_unrestored", lambda: answers.pop(0) if answers else "slice 7 is missing")
    assert wait_for_restored(backend, 60, reports.append, sleep=waits.append) == ""
    assert waits == [2.0, 2.0] and reports == ["slice 100 is missing"]
    # The layout does not wait forever.
    now = iter(range(0, 100, 5))
    missing = wait_for_restored(backend, 12, reports.append, sleep=waits.append, clock=lambda: float(next(now)))
    assert missing == "slice 7 is missing" and reports[1:] == ["slice 7 is missing"]
    wait_for_restored_partitions(backend, 0)
    assert "is applied without them: slice 7 is missing" in capsys.readouterr().err


def test_settings_command_at_boot(
    tmp_path: Path, backend: ModelBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that rejects the desired settings does not keep the others from getting theirs, and is reported."""
    record = tmp_path / "record.json"
    monkeypatch.setattr(settings_command, "create", lambda vendor, system: backend)
    monkeypatch.setattr(settings_command, "record_path", lambda vendor: str(record))
    rules = tmp_path / "settings.json"
    wanted = [
        {"match": {"index": 0}, "power_limit": 300, "compute_mode": "Prohibited"},
        {"match": {}, "power_limit": 900},
    ]
    rules.write_text(json.dumps(wanted))
    options = ["--file", str(rules), "--config", str(tmp_path / "none.yaml"), "--wait", "0", "--vendor", "one"]

    def now(index: int) -> Any:
        with backend.gpus.state() as state:
            return state[backend.gpus.template(index).uuid]["knobs"]["powerLimit"]

    assert cli.main(["settings", "plan", *options]) == 1
    assert "would" in capsys.readouterr().out and (now(0), record.exists()) == (700.0, False)
    assert cli.main(["settings", "apply", *options, "--json"]) == 1
    refused, done = json.loads(capsys.readouterr().out)
    assert "expected a whole number from 200 to 700 W" in refused["error"]
    assert done["done"] and len(done["steps"]) == 2 and (now(0), now(1)) == (300, 700.0)
    assert list(json.loads(record.read_text())["devices"]) == [backend.gpus.template(0).uuid]

    rules.write_text(json.dumps(wanted[:1]))
    assert cli.main(["settings", "apply", *options]) == 0
    assert "as wanted" in capsys.readouterr().out
    rules.write_text("[]")
    assert cli.main(["settings", "apply", *options]) == 0
    assert now(0) == 700.0 and not record.exists()
    assert cli.main(["settings", "apply", *options]) == 0
    assert "nothing to do" in capsys.readouterr().out
    rules.write_text("{")
    assert cli.main(["settings", "plan", *options]) == 1


def test_layout_store_with_a_damaged_row_is_reported_and_other_rows_are_read(
    tmp_path: Path,
) -> None:
    from dra_driver.claims.store.store import Store
    from dra_driver.claims.store.tables import Change
    from dra_driver.commands.store_reader import Stored, read_store
    from store_model import commit, record

    path = tmp_path / "state.db"
    store = Store.open(str(path))
    commit(store, Change(put=record("u1")), Change(put=record("u2"), meta={"mark": "x"}))
    store.close()
    whole = read_store(str(path))
    assert whole == Stored((record("u1"), record("u2")), {"mark": "x", "schema_version": "1"})
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE claims SET document = replace(document, 'GPU-0', 'GPU-1') WHERE uid = 'u1'")
        connection.commit()
    damaged = read_store(str(path))
    assert (damaged.records, damaged.meta) == ((record("u2"),), {"mark": "x"})
    assert "The claim 'u1' in the store" in damaged.problem


def test_status(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    from dra_driver.claims.store.store import Store
    from dra_driver.claims.store.tables import Change
    from dra_driver.kubelet.server import PluginServer
    from store_model import record

    directory = tmp_path_factory.mktemp("s")
    config = directory / "driver.yaml"
    config.write_text(f"node_name: n\nbackends: [nvidia]\nkubelet_root: {directory}\n")
    assert cli.main(["status", "--config", str(config)]) == 1
    assert "does not answer" in capsys.readouterr().out
    problems: list[str] = []
    hardware_state = HardwareState(Snapshot(scanned_at=5))

    def reported() -> Status:
        return status_of("gpu.nvidia.com", hardware_state, problems, boot_id="b", published=True, registered=True)

    async def main() -> None:
        store = Store.open(str(directory / "plugins/gpu.nvidia.com/state.db"))
        await store.commit(Change(put=record("u1", "prepared", devices=2)))
        server = PluginServer(
            None,  # type: ignore[arg-type]
            health=HardwareHealth(Shared(hardware_state), "n", lambda: 60),
            driver="gpu.nvidia.com",
            service_path=str(directory / "plugins/gpu.nvidia.com/dra.sock"),
            registration_path=str(directory / "plugins_registry/gpu.nvidia.com-reg.sock"),
        )
        await server.start()
        status = StatusServer(str(directory / "plugins/gpu.nvidia.com/status.sock"), reported)
        telling = asyncio.get_running_loop().create_task(status.run())
        await asyncio.sleep(0.1)
        problems.append("hardware: no driver")
        assert await asyncio.to_thread(cli.main, ["status", "--config", str(config)]) == 1
        assert "hardware: no driver" in capsys.readouterr().out
        problems.clear()
        assert await asyncio.to_thread(cli.main, ["status", "--config", str(config)]) == 0
        assert await asyncio.to_thread(cli.main, ["status", "--json", "--config", str(config)]) == 0
        await server.stop()
        telling.cancel()
        store.close()

    asyncio.run(main())
    text = capsys.readouterr().out
    assert "default/claim-u1  prepared  r0       gpu-0-mig-1g10gb-19-0" in text
    (entry,) = json.loads(text[text.index("[\n") :])
    assert (entry["ready"], entry["published"], entry["pid"], entry["looked_at"]) == (True, True, os.getpid(), 5)
    assert entry["claims"][0]["devices"][1]["name"] == "gpu-0-mig-1g10gb-19-1"


def changing(backend: ModelBackend, state: Path, seconds: float = 0.3) -> Any:
    return layout_command.plan_or_apply(
        backend, parse_rules(STATIC), str(state / "state.db"), "boot-1", apply=True, seconds=seconds
    )


def test_layout_waits_for_a_claim_on_the_device_and_names_the_driver(backend: ModelBackend, tmp_path: Path) -> None:
    driver = DeviceLocks(str(tmp_path), "the driver")
    assert driver.take(backend.gpus.template(0).uuid)
    with pytest.raises(InUse, match="the driver"):
        changing(backend, tmp_path)
    assert places(backend) == []
    driver.drop_all()
    assert driver.take(backend.gpus.template(1).uuid)  # another device's claims have no effect
    (result,) = changing(backend, tmp_path)
    assert result.done
    assert len(places(backend)) == 3
    driver.drop_all()
    assert driver.take(backend.gpus.template(0).uuid)  # without changes no lock is needed
    (result,) = changing(backend, tmp_path)
    assert (result.done, result.steps) == (True, [])


def test_layout_claim_prepared_before_the_lock_keeps_its_partition(
    backend: ModelBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim was prepared on an obsolete partition between the plan and the lock: the partition stays."""
    gpu = backend.gpus.template(0).uuid
    backend.set_partitioning(gpu, True)
    made = backend.create_partition(gpu, 9, Placement(0, 4))
    backend.create_partition(gpu, 9, Placement(4, 4))
    scans: list[Any] = []

    def observed(path: str, scan: Any, _files: Any) -> Any:
        scans.append(DeviceLocks(str(tmp_path), "anyone").is_taken(gpu))
        late = () if len(scans) == 1 else (claim(backend, 9, 0, "boot-1", made.uuid), claim(backend, 9, 4, "boot-1"))
        return scan(), late

    monkeypatch.setattr(layout_command, "observe", observed)
    (result,) = changing(backend, tmp_path)
    assert scans == [False, True]
    assert result.error is not None
    assert result.error.code == "in-use"
    assert len(places(backend)) == 2


def test_cli_invalid_arguments_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert cli.main(["node", "--config", str(tmp_path / "missing.yaml")]) == 2
    assert "no configuration file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([])
