# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Configuration, logs, stages, metrics, locks, and the decoding of claims."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from dra_driver import config, logs, stages
from dra_driver.claims.allocation import ClaimError, allocated_here, decode_allocation
from dra_driver.claims.configs import configurations_of, settings_for
from dra_driver.claims.locking import NamedLocks
from dra_driver.claims.store.records import ClaimReference, DeviceRecord
from dra_driver.config import InvalidConfiguration, load, parse
from dra_driver.core.vendors.nvidia.configs import CONFIG_KINDS
from dra_driver.core.vendors.registry import BACKENDS
from dra_driver.metrics import MetricsRegistry, PrometheusMetrics, Stopwatch

from tests.cluster import stop_at
from tests.cluster.stop_at import StopPoint

DRIVER = "gpu.nvidia.com"
REFERENCE = ClaimReference("default", "a", "u")


def claim(*results: dict[str, Any], config: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "metadata": {"uid": "u"},
        "status": {"allocation": {"devices": {"results": list(results), "config": config or []}}},
    }


def result(request: str = "r", **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": DRIVER, "pool": "p", "device": "gpu-0", **more}


def opaque(name: str, *requests: str, source: str = "FromClaim", driver: str = DRIVER) -> dict[str, Any]:
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": {"kind": name}}}


def test_configs_are_ordered_by_precedence_and_request() -> None:
    configs = [
        opaque("claim-all"),
        opaque("class-r", "r", source="FromClass"),
        opaque("claim-sub", "r/big"),
        opaque("class-other", "other", source="FromClass"),
        opaque("foreign", driver="other.com"),
        opaque("claim-r", "r"),
    ]
    allocation = decode_allocation(claim(result("r/big"), config=configs), REFERENCE, DRIVER)
    (device,) = allocation.devices
    assert [config.parameters["kind"] for config in device.configs] == ["class-r", "claim-all", "claim-sub", "claim-r"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "FromClaim", "requests": []}, "not opaque"),
        ({"source": "FromMoon", "opaque": {"driver": DRIVER, "parameters": {}}}, "FromMoon"),
        ({"opaque": {"driver": DRIVER, "parameters": "text"}}, "expected an object"),
        ({"opaque": {"parameters": {}}}, "cannot be read"),
    ],
)
def test_decode_unreadable_configs_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ClaimError, match=message):
        decode_allocation(claim(result(), config=[change]), REFERENCE, DRIVER)


def test_decode_unreadable_result_is_rejected() -> None:
    with pytest.raises(ClaimError, match="cannot be read"):
        decode_allocation(claim({"driver": DRIVER}), REFERENCE, DRIVER)


def test_allocated_here_returns_whether_the_claim_has_devices() -> None:
    assert allocated_here(claim(result()), "u", DRIVER, "p")
    assert not allocated_here(claim(result()), "other", DRIVER, "p")
    assert not allocated_here(claim(result()), "u", DRIVER, "other")
    assert not allocated_here({"metadata": {"uid": "u"}}, "u", DRIVER, "p")
    assert not allocated_here({"metadata": {"uid": "u"}, "status": None}, "u", DRIVER, "p")


def configs_of(parameters: dict[str, Any], *requests: str) -> Any:
    entry = {"requests": list(requests), "opaque": {"driver": DRIVER, "parameters": parameters}}
    return decode_allocation(claim(result(), config=[entry]), REFERENCE, DRIVER).devices[0].configs


V = "resource.nvidia.com/v1beta1"
MULTI_USER = {"strategy": "MPS", "mpsConfig": {"multiUser": True}}


@pytest.mark.parametrize(
    ("parameters", "requests", "kind", "message"),
    [
        ({"apiVersion": V, "kind": "GpuConfig"}, [], "device", None),
        ({"apiVersion": V, "kind": "GpuConfig", "sharing": None}, ["r"], "device", None),
        ({"apiVersion": V, "kind": "MigDeviceConfig"}, ["r"], "partition", None),
        ({"apiVersion": V, "kind": "MigDeviceConfig"}, [], "device", None),
        ({"apiVersion": V, "kind": "MigDeviceConfig"}, ["r"], "device", "is for a partition"),
        ({"apiVersion": V, "kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing"}}, [], "device", None),
        ({"apiVersion": V, "kind": "GpuConfig", "sharing": MULTI_USER}, [], "device", None),
        ({"apiVersion": V, "kind": "GpuConfig", "sharing": {"strategy": "MPS"}}, [], "device", None),
        ({"apiVersion": V, "kind": "MigDeviceConfig", "sharing": MULTI_USER}, [], "partition", None),
        ({"apiVersion": V, "kind": "GpuConfig", "shading": 1}, [], "device", "shading is unknown; expected sharing"),
        ({"apiVersion": V, "kind": "VfioDeviceConfig"}, [], "device", None),
        ({"apiVersion": V, "kind": "ComputeDomainChannelConfig"}, [], "device", "ComputeDomainChannelConfig"),
        ({"apiVersion": "resource.nvidia.com/v9", "kind": "GpuConfig"}, [], "device", "v9"),
        ({}, [], "device", "no apiVersion and no kind"),
        (
            {"apiVersion": V, "kind": "GpuConfig", "sharing": {"strategy": "Quick"}},
            [],
            "device",
            "sharing.strategy is 'Quick'; expected TimeSlicing or MPS",
        ),
        # A configuration for another kind of device, for all requests: it does not apply here, but it has to be valid.
        ({"apiVersion": V, "kind": "MigDeviceConfig", "sharing": {"strategy": "MPS"}}, [], "device", None),
        ({"apiVersion": V, "kind": "MigDeviceConfig", "sharing": {}}, [], "device", "sharing.strategy is missing"),
    ],
)
def test_opaque_configs(parameters: dict[str, Any], requests: list[str], kind: str, message: str | None) -> None:
    configs = configs_of(parameters, *requests)
    if message is None:
        configurations_of(CONFIG_KINDS, configs, request="r", device_kind=kind)
    else:
        with pytest.raises(ClaimError, match=message) as found:
            configurations_of(CONFIG_KINDS, configs, request="r", device_kind=kind)
        assert found.value.hint
        assert found.value.code == "config-refused"


def entry(source: str, parameters: dict[str, Any], *requests: str) -> dict[str, Any]:
    return {"source": source, "requests": list(requests), "opaque": {"driver": DRIVER, "parameters": parameters}}


PLAIN = {"apiVersion": V, "kind": "GpuConfig"}
SHARED = {**PLAIN, "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}}
MPS = {**PLAIN, "sharing": MULTI_USER}
SETTINGS = {"apiVersion": "dra.accelerators/v1alpha1", "kind": "DeviceSettings"}


def chosen(*entries: dict[str, Any]) -> Any:
    configs = decode_allocation(claim(result(), config=list(entries)), REFERENCE, DRIVER).devices[0].configs
    return configurations_of(CONFIG_KINDS, configs, request="r", device_kind="device")


def settings(*entries: dict[str, Any], admin: bool = False) -> dict[str, Any]:
    return settings_for(chosen(*entries), request="r", admin=admin)


def test_settings_claim_overrides_class_and_later_overrides_earlier() -> None:
    assert chosen() == ()
    assert chosen(entry("FromClaim", {"apiVersion": V, "kind": "MigDeviceConfig"})) == ()
    assert [each.values for each in chosen(entry("FromClaim", PLAIN), entry("FromClass", MPS))] == [{}]
    assert [each.values for each in chosen(entry("FromClaim", MPS, "r"), entry("FromClaim", PLAIN))] == [{}]
    assert [each.values for each in chosen(entry("FromClaim", PLAIN), entry("FromClaim", MPS, "r"))] == [
        {"sharing": MULTI_USER}
    ]
    with pytest.raises(ClaimError, match="sharing is 1; expected a mapping"):
        chosen(entry("FromClaim", PLAIN), entry("FromClass", {**PLAIN, "sharing": 1}))


def test_settings_kinds_are_merged_and_contradictions_rejected() -> None:
    limited = entry("FromClass", {**SETTINGS, "powerLimit": 300})
    assert settings(limited, entry("FromClaim", SHARED)) == {
        "powerLimit": 300,
        "computeMode": "Default",
        "timeSlice": "Long",
    }
    # Of one kind, the claim's configuration replaces that of the class completely.
    assert settings(limited, entry("FromClaim", SETTINGS)) == {}
    assert settings(entry("FromClaim", {**SETTINGS, "computeMode": "Default"}), entry("FromClaim", SHARED))
    with pytest.raises(ClaimError, match=r"computeMode ExclusiveProcess .*wants Default.* Leave computeMode to one"):
        settings(entry("FromClaim", SHARED), entry("FromClaim", {**SETTINGS, "computeMode": "ExclusiveProcess"}))


def test_settings_of_a_claim_with_admin_access_are_rejected() -> None:
    assert settings(entry("FromClaim", PLAIN), admin=True) == {}
    with pytest.raises(ClaimError, match="it sets computeMode, timeSlice, and a claim with administrator's access"):
        settings(entry("FromClaim", SHARED), admin=True)


def test_configuration_with_everything(tmp_path: Path) -> None:
    file = tmp_path / "driver.yaml"
    file.write_text(
        "node_name: Node-1\nkubeconfig: /etc/k\nkubelet_root: /data/kubelet/\npool_name: pool\n"
        "layout: [{match: {index: 0}, mode: whole}, {match: {}, mode: dynamic}]\n"
        "backends: [nvidia]\nmetrics_address: '[::1]:9100'\ninventory_interval: 5\nfull_inventory_interval: 60\nlog: {level: debug, format: json}\n"
    )
    found = load(str(file))
    assert (found.node_name, found.kubelet_root, found.pool_name) == ("node-1", "/data/kubelet", "pool")
    assert [rule.mode for rule in found.layout] == ["whole", "dynamic"]
    assert found.state_directory_of(DRIVER) == "/data/kubelet/plugins/gpu.nvidia.com"
    assert found.registry_directory == "/data/kubelet/plugins_registry"
    assert (found.log.level, found.log.format, found.inventory_interval) == ("debug", "json", 5.0)
    assert found.full_inventory_interval == 60.0
    assert parse(None).node_name


def test_parse_without_backends_uses_the_vendors_with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, expected in (((), tuple(BACKENDS)), (("ascend",), ("ascend",))):
        monkeypatch.setattr(config, "vendors_there", lambda there=there: there)
        assert parse({}).backends == expected
    assert parse({"backends": ["nvidia"]}).backends == ("nvidia",)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"node_nam": "x"}, "unknown keys: node_nam"),
        ([], "a list"),
        ({"kubeconfig": "relative"}, "absolute path"),
        ({"node_name": 3}, "expected a text"),
        ({"backends": ["nvidia", "moon"]}, "moon"),
        ({"backends": []}, "list of names"),
        ({"layout": {}}, None),
        ({"layout": [{"match": {}, "mode": "sideways"}]}, "sideways"),
        ({"layout": ["x"]}, "list of rules"),
        ({"inventory_interval": True}, "1 to 3600"),
        ({"inventory_interval": 0}, "1 to 3600"),
        ({"full_inventory_interval": 0}, "full_inventory_interval .*1 to 3600"),
        ({"metrics_address": "9100"}, "host:port"),
        ({"metrics_address": "h:99999"}, "host:port"),
        ({"token_lifetime": 599}, "600 at least"),
        ({"token_lifetime": "1d"}, "600 at least"),
        ({"log": {"level": "loud"}}, "loud"),
        ({"log": {"colour": "red"}}, "colour"),
    ],
)
def test_parse_invalid_configuration_is_rejected(document: Any, message: str | None) -> None:
    if message is None:
        assert parse(document).layout == ()
        return
    with pytest.raises(InvalidConfiguration, match=message):
        parse(document)


def test_load_invalid_yaml_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a: [")
    with pytest.raises(InvalidConfiguration, match="YAML"):
        load(str(tmp_path / "x"))


@pytest.mark.parametrize("style", ["json", "text"])
def test_log_lines_have_their_operation(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    try:
        logs.configure("info", style)
        with logs.operation("0123abcd"):
            logging.getLogger("x").info("did %s", "it", extra=logs.fields(claim="default/a", ms=1.5, text="two words"))
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("x").exception("failed")
        logging.getLogger("x").debug("not shown")
    finally:
        root.handlers[:], root.level = before
    first, second = capsys.readouterr().err.split("\n", 1)
    assert "ValueError: broken" in second
    assert "not shown" not in second
    if style == "json":
        line = json.loads(first)
        assert (line["message"], line["operation"], line["claim"], line["ms"]) == (
            "did it",
            "0123abcd",
            "default/a",
            1.5,
        )
        assert line["time"].endswith("Z")
    else:
        assert first == 'info: did it operation=0123abcd claim=default/a ms=1.5 text="two words"'


def test_state_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    state = logs.StateLog(logging.getLogger("state"))
    with caplog.at_level(logging.INFO):
        assert [state.report(text) for text in ("a", "a", "b", "a")] == [True, False, True, True]
    assert [entry.message for entry in caplog.records] == ["a", "b", "a"]


def test_stages_call_their_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_listeners", [])
    stages.report_stage("planned")  # without a listener
    heard: list[str] = []
    stages.listen(heard.append)
    for stage in stages.STAGES:
        stages.report_stage(stage)
    assert heard == list(stages.STAGES)


def test_stop_point_stops_at_the_nth_time() -> None:
    stopped: list[str] = []
    point = StopPoint("partition-created:2", lambda: stopped.append("now"))
    for stage in ("planned", "partition-created", "planned"):
        point.reached(stage)
    assert not stopped
    point.reached("partition-created")
    assert stopped == ["now"]
    with pytest.raises(ValueError, match="partition-created"):
        StopPoint("nonsense")
    inert = StopPoint()
    for stage in stages.STAGES:
        inert.reached(stage)


def test_metrics_count_failures_too() -> None:
    registry = MetricsRegistry()
    metrics = PrometheusMetrics(registry, DRIVER)
    watch = Stopwatch(metrics, "prepare")
    with watch.stage("fetch"):
        pass
    watch.kind = "device"
    with pytest.raises(ValueError, match="x"), watch.stage("hardware"):
        raise ValueError("x")
    timings = watch.finish("in-use")
    assert set(timings) == {"fetch_ms", "hardware_ms", "total_ms"}
    metrics.finished("prepare", "device", "two words", 1.0)
    metrics.slice_write("create", "success")
    text = registry.text().decode()
    for line in (
        'stage_duration_seconds_count{driver="gpu.nvidia.com",kind="device",operation="prepare",outcome="success",stage="fetch"} 1.0',
        'stage_duration_seconds_count{driver="gpu.nvidia.com",kind="device",operation="prepare",outcome="failure",stage="hardware"} 1.0',
        'operation_errors_total{code="in-use",driver="gpu.nvidia.com",operation="prepare"} 1.0',
        'operation_errors_total{code="other",driver="gpu.nvidia.com",operation="prepare"} 1.0',
        'resource_slice_writes_total{driver="gpu.nvidia.com",outcome="success",verb="create"} 1.0',
    ):
        assert f"dra_accelerators_{line}" in text


def test_metrics_listener() -> None:
    import socket
    import urllib.request

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    registry = MetricsRegistry()
    PrometheusMetrics(registry, DRIVER).slice_write("create", "success")
    server = registry.serve(f"127.0.0.1:{port}")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert b"resource_slice_writes_total" in answer.read()
    server.shutdown()
    server.server_close()


def test_occupied_metrics_port_is_retried_while_claims_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import socket
    import urllib.request

    monkeypatch.setattr("dra_driver.metrics.RETRY_SECONDS", 0.02)
    registry = MetricsRegistry()

    def ask(port: int) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return bytes(answer.read())

    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            serving = asyncio.ensure_future(registry.keep_serving(f"127.0.0.1:{port}"))
            await asyncio.sleep(0.3)
            assert not serving.done()
        while "metrics are served" not in caplog.text:
            assert not serving.done()
            await asyncio.sleep(0.02)
        assert b"build_info" in await asyncio.to_thread(ask, port)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    with caplog.at_level("INFO"):
        asyncio.run(main())
    assert caplog.text.count("metrics are not served") == 1


def test_device_record_but_equals_dataclasses_replace() -> None:
    held = DeviceRecord(request="r", pool="node", name="gpu-0", device_uuid="GPU-0", kind="device", members=("GPU-0",))
    changed = held.with_changes(created=True, instance_id=7)
    assert changed == replace(held, created=True, instance_id=7) and isinstance(changed, DeviceRecord)
    assert (held.created, held.instance_id) == (False, None)
    assert held.with_changes() == held and held.with_changes() is not held
    with pytest.raises(TypeError, match="instance"):
        held.with_changes(instance=7)
    with pytest.raises(FrozenInstanceError):
        changed.created = False  # type: ignore[misc]


def test_locks_cancelled_wait_releases_its_locks() -> None:
    async def main() -> None:
        locks = NamedLocks()
        entered: list[str] = []

        async def hold(*names: str) -> None:
            async with locks.hold(names):
                entered.append("+".join(names))

        async with locks.hold(["b"]):
            waiting = asyncio.ensure_future(hold("a", "b"))
            await asyncio.sleep(0)
            behind = asyncio.ensure_future(hold("a"))
            await asyncio.sleep(0)
            assert entered == [] and len(locks) == 2
            waiting.cancel()
            await asyncio.wait_for(behind, 10)
        assert entered == ["a"] and len(locks) == 0

    asyncio.run(main())


def test_locks_never_wait_for_each_other_and_leave_nothing() -> None:
    async def main() -> None:
        locks = NamedLocks()
        order: list[str] = []

        async def work(*names: str) -> None:
            async with locks.hold(names):
                order.append("+".join(names))
                await asyncio.sleep(0.001)

        await asyncio.wait_for(
            asyncio.gather(*(work(*names) for names in (("a", "b"), ("b", "a"), ("c",), ("b", "c", "a")) * 20)), 10
        )
        assert len(order) == 80
        assert len(locks) == 0
        holder = asyncio.ensure_future(work("a"))
        await asyncio.sleep(0)
        waiter = asyncio.ensure_future(work("a"))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(holder, waiter, return_exceptions=True)
        assert len(locks) == 0

    asyncio.run(main())


def test_kill_test_launcher_ends_the_process_like_a_crash(tmp_path: Path) -> None:
    """On a node it is started by its path, with the driver's command line after the stage: the process ends with SIGKILL."""
    script = (
        "import runpy, sys\n"
        "from dra_driver import cli, stages\n"
        "cli.main = lambda arguments: stages.report_stage('planned') or stages.report_stage('planned') or print(arguments)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )

    def launch(stage: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(Path(stop_at.__file__)), stage, "node", "--config", "x"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert launch("planned:2").returncode == -signal.SIGKILL
    spared = launch("planned:3")
    assert (spared.returncode, spared.stdout) == (0, "['node', '--config', 'x']\n")


def test_garbage_collector_skips_objects_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "driver.yaml").write_text("node_name: node-1\n")
    script = (
        "import gc, sys\n"
        "from dra_driver import cli, node\n"
        "async def run_node(*_arguments):\n"
        "    print(gc.get_freeze_count(), len(gc.get_objects()))\n"
        "    return 0\n"
        "node.run_node = run_node\n"
        "sys.exit(cli.main(['node', '--config', sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "driver.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    left_alone, looked_at = map(int, done.stdout.split())
    assert left_alone > 10 * looked_at
