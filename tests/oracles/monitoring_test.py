# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test metrics, alerts, and the dashboard with promtool and a real Prometheus that scrapes a driver.

Grafana itself is in no package registry that this project uses, but its dashboard models are. The models read the
dashboard, and Prometheus evaluates each of its queries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard import DASHBOARD, ROOT, dashboard, expressions, panels
from grafana import UNITS, problems
from prometheus import Server, promtool

sys.path[:0] = [str(ROOT / "tests/unit/dra_driver"), str(ROOT / "tests/unit/core")]
RULES = ROOT / "roles/monitoring/files/rules.yml"
ALERTS = Path(__file__).with_name("alerts.yml")
# Metrics without values on a healthy node with no repair or change yet.
QUIET = (
    "operation_errors",
    "device_fault",
    "recovery_steps",
    "reconcile_findings",
    "container_device_info",
    "identity_token",
    "utilization",
    "temperature",
    "clock",
    "api_requests",
    "clean_up_actions",
)
METRIC = re.compile(r"\b(?:dra_accelerators|process)_\w+")


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def playbook(
    folder: Path, port: int, controller_port: int, *arguments: str, nodes: dict[str, dict[str, Any]] | None = None
) -> str:
    """Run the playbook on this host into a directory; return the recap. ``nodes`` are the accelerator nodes'
    variables.
    """
    inventory = {
        "accelerator_nodes": {"hosts": nodes or {"node-1": {"ansible_host": "127.0.0.1"}}},
        "accelerator_controllers": {"hosts": {"node-1": {}}},
        "accelerator_monitoring": {
            "hosts": {"here": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}}
        },
    }
    (folder / "inventory.yml").write_text(yaml.safe_dump(inventory))
    names = {
        "rules": "rules.yml",
        "targets": "targets.json",
        "scrape": "scrape.yml",
        "dashboard": "d.json",
        "provider": "p.yml",
    }
    variables = {f"monitoring_{key}_file": f"{folder}/{key}/{name}" for key, name in names.items()}
    variables |= {"accelerator_become": False, "monitoring_port": port, "monitoring_controller_port": controller_port}
    command = [
        *("ansible-playbook", "-i", f"{folder}/inventory.yml", f"{ROOT}/playbooks/monitoring.yml"),
        *("-e", json.dumps(variables), *arguments),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "ANSIBLE_NOCOLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_are_valid_and_each_alert_fires() -> None:
    assert (
        f"{sum(len(group['rules']) for group in yaml.safe_load(RULES.read_text())['groups'])} rules found"
        in promtool("check", "rules", RULES)
    )
    assert "SUCCESS" in promtool("test", "rules", ALERTS)
    tested = set(re.findall(r'alertname="(\w+)"', ALERTS.read_text()))
    assert tested == set(alerts())
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"].endswith(f"docs/monitoring.md#{name.lower()}")


def test_grafana_models_accept_every_field_of_the_dashboard() -> None:
    assert problems(dashboard()) == []
    units = {panel["fieldConfig"]["defaults"]["unit"] for panel in panels() if panel["type"] != "row"}
    assert units and units <= UNITS


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("refresch",), "30s", "dashboard.refresch is unknown"),
        (("editable",), "yes", "dashboard.editable is 'yes'; expected"),
        (("panels", 1, "type"), "statt", "the type statt is unknown"),
        (("panels", 1, "gridPos", "wide"), 3, "dashboard.panels[1].gridPos.wide is unknown"),
        (("panels", 1, "gridPos", "w"), "3", "dashboard.panels[1].grid_pos.w is '3'; expected <class 'int'>"),
        (("panels", 1, "targets", 0, "expression"), "up", "dashboard.panels[1].targets[0].expression is unknown"),
        (("panels", 1, "targets", 0, "instant"), 1, "dashboard.panels[1].targets[0].instant is 1; expected"),
        (("panels", 1, "datasource", "type"), "promet", "is a query of a type that is unknown"),
        (("panels", 1, "options", "graphMood"), "area", "dashboard.panels[1].options.graphMood is unknown"),
        (("panels", 1, "fieldConfig", "defaults", "units"), "short", ".fieldConfig.defaults.units is unknown"),
        (("panels", 1, "fieldConfig", "defaults", "thresholds", "mode"), "abs", "thresholds.mode is 'abs'; expected"),
        (("templating", "list", 1, "refresh"), 7, "refresh is 7; expected"),
    ],
)
def test_fields_unknown_to_grafana_are_detected(place: tuple[Any, ...], value: Any, said: str) -> None:
    document: Any = dashboard()
    inside = document
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    assert any(said in problem for problem in problems(document)), problems(document)


def test_dashboard_follows_the_grafana_rules() -> None:
    """Rules outside the models: unique IDs, a grid without overlaps, and a variable as data source."""
    document = dashboard()
    assert {each["name"] for each in document["templating"]["list"]} == {"datasource", "instance", "driver"}
    assert document["uid"] and document["title"] and document["schemaVersion"] >= 36 and "id" not in document
    numbers = [panel["id"] for panel in panels()]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters)


@contextlib.asynccontextmanager
async def controller(port: int) -> AsyncIterator[None]:
    """Serve the metrics of a leading controller with findings."""
    from dra_driver.controller.controller_metrics import ControllerMetrics
    from dra_driver.controller.health_server import keep_serving, status_application

    measurements = ControllerMetrics()
    measurements.leading(True)
    measurements.fleet({"no-slices": 1}, {("0.1.0-1", "ready"): 2, ("0.1.0-2", "drifting"): 1})
    measurements.request("GET", "/api/v1/nodes", "200", 0.1)
    assert promtool("check", "metrics", text=measurements.text().decode()) == ""
    serving = asyncio.ensure_future(
        keep_serving(lambda: status_application(measurements.text, lambda: ()), f"127.0.0.1:{port}", "the status")
    )
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


class Shown(list[str]):
    """A list of missing queries that is true if it is empty. A rate needs two samples."""

    def __bool__(self) -> bool:
        return len(self) == 0


def unshown(server: Server) -> list[str]:
    """Return the queries without a result that should have one: those without a quiet metric, or whose metric exists.

    Such a query uses a metric, label, or value that does not exist.
    """
    silent = [text for text in expressions() if not server.query(text)]
    return [
        text
        for text in silent
        if not any(word in text for word in QUIET) or any(server.query(name) for name in METRIC.findall(text))
    ]


def test_prometheus_scrapes_a_driver_without_warnings_and_alerts_on_a_failed_device(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A complete driver runs on model devices, and the role writes Prometheus' config. In the rules that it reads,
    alerts wait 1 s.
    """
    from claim_steps import SMALL
    from dra_driver.core.model import Fault
    from dra_driver.metrics import MetricsRegistry, PrometheusMetrics
    from monitoring_test import kubelet
    from vendor_scene import Scene, run

    folder, port, controller_port = tmp_path_factory.mktemp("p"), free_port(), free_port()
    assert "changed=1" in playbook(folder, port, controller_port, "--check", "--diff")
    assert not (folder / "rules").exists()
    assert "changed=1" in playbook(folder, port, controller_port)
    assert "changed=0" in playbook(folder, port, controller_port)
    written = folder / "rules/rules.yml"
    assert (
        written.read_text() == RULES.read_text() and (folder / "dashboard/d.json").read_text() == DASHBOARD.read_text()
    )
    assert json.loads((folder / "targets/targets.json").read_text()) == [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"job": "dra-accelerators"}},
        {"targets": [f"127.0.0.1:{controller_port}"], "labels": {"job": "dra-accelerators-controller"}},
    ]
    impatient = folder / "impatient.yml"
    impatient.write_text(re.sub(r"for: \d+m", "for: 1s", RULES.read_text()))

    def watch(scene: Scene, server: Server) -> None:
        server.until("the driver is scraped", lambda: server.query('up{job="dra-accelerators"} == 1'))
        server.until("a claim is attributed", lambda: server.query("dra_accelerators_claim_device_info"))
        server.until("rates", lambda: server.query("rate(dra_accelerators_operation_duration_seconds_count[1m]) >= 0"))
        (claim,) = server.query("dra_accelerators_container_device_info")
        assert claim["metric"]["pod"] == "pod-a" and claim["metric"]["uuid"].startswith("MIG-")
        server.until("the controller is scraped", lambda: server.query("dra_accelerators_controller_drift"))
        server.until("every query finds what there is", lambda: Shown(unshown(server)))
        scene.backend.faults[0] = Fault("gpu-lost", "It has fallen off the bus")
        server.until("drift fires", lambda: "DraAcceleratorsDrift" in server.firing())
        wanted = {"DraAcceleratorsDeviceFault", "DraAcceleratorsDeviceFaultInUse"}
        server.until("the fault fires", lambda: wanted <= server.firing())
        scene.backend.faults.clear()
        server.until("it is over", lambda: not wanted & server.firing())

    async def scenario(scene: Scene) -> None:
        registry = MetricsRegistry()
        scene.metrics, scene.observer = PrometheusMetrics(registry, "gpu.nvidia.com"), registry.api_request
        await scene.api.start()
        await scene.start()
        async with controller(controller_port):
            await driver(scene, registry)

    async def driver(scene: Scene, registry: MetricsRegistry) -> None:
        from dra_driver.monitoring.collector import Collector

        with kubelet(scene.folder / "kubelet") as answer:
            registry.register(
                Collector(
                    asyncio.get_running_loop(),
                    [scene.driver],
                    pod_resources=f"{scene.folder}/kubelet/pod-resources/kubelet.sock",
                    expires=lambda: 5e9,
                )
            )
            server = registry.serve(f"127.0.0.1:{port}")
            assert await Scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
            answer.pods = [("pod-a", "a", SMALL)]
            text = (await asyncio.to_thread(registry.text)).decode()
            assert promtool("check", "metrics", text=text) == ""
            assert await scene.prepare("b", "gpu-1") == ""
            prometheus = Server(folder, rules=impatient, targets=folder / "targets/targets.json")
            prometheus.start()
            try:
                await asyncio.to_thread(watch, scene, prometheus)
            finally:
                prometheus.stop()
            server.shutdown()
            server.server_close()

    run(tmp_path_factory.mktemp("s"), scenario)
    assert "changed=1" in playbook(folder, port, controller_port, "-e", "monitoring_state=absent")
    assert not written.exists() and not (folder / "targets/targets.json").exists()


def test_drivers_that_are_pods_are_scraped_under_the_names_of_their_nodes(tmp_path: Path) -> None:
    """Debian's Prometheus has no API server discovery, so a file contains the pods' labels. The role's relabeling
    creates the targets.
    """
    port = free_port()
    pod = {"dra_driver_deploy_as": "daemonset", "ansible_host": "127.0.0.2"}
    nodes = {
        "node-1": {},
        "node-2": pod,
        "node-3": {**pod, "ansible_host": "127.0.0.3", "dra_driver_pod_host_network": True},
    }
    access = ("-e", "monitoring_pods_kubeconfig=/etc/prometheus/kubeconfig")
    playbook(tmp_path, port, free_port(), *access, nodes=nodes)
    targets = json.loads((tmp_path / "targets/targets.json").read_text())[0]["targets"]
    assert targets == [f"node-1:{port}", f"127.0.0.3:{port}"], "a node whose driver is a pod is not a target"
    of_hosts, of_pods = yaml.safe_load((tmp_path / "scrape/scrape.yml").read_text())["scrape_configs"]
    assert of_hosts["job_name"] == "dra-accelerators"
    assert of_pods.pop("kubernetes_sd_configs") == [
        {
            "role": "pod",
            "namespaces": {"names": ["dra-accelerators-driver"]},
            "kubeconfig_file": "/etc/prometheus/kubeconfig",
        }
    ]

    def answer(node: str, **labels: str) -> dict[str, Any]:
        found = {
            "pod_label_app_kubernetes_io_name": "dra-accelerators-driver",
            "pod_container_port_name": "metrics",
            "pod_container_port_number": "9817",
            "pod_node_name": node,
            "pod_name": f"driver-{node}",
            "pod_phase": "Running",
            **labels,
        }
        return {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {f"__meta_kubernetes_{name}": value for name, value in found.items()},
        }

    pods = [
        answer("node-2"),
        answer("other", pod_label_app_kubernetes_io_name="other"),
        answer("probe", pod_container_port_name="health"),
        answer("ended", pod_phase="Failed"),
    ]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    server = Server(tmp_path, rules=RULES, targets=tmp_path / "none.json")
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    interval = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config["scrape_configs"] = [{**of_pods, **interval, "file_sd_configs": [{"files": [f"{tmp_path}/pods.json"]}]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    text = 'dra_accelerators_container_device_info{namespace="default",pod="user",uuid="G"} 1\n'
    # A hostile driver: labels of another target, and metrics of another program.
    text += 'dra_accelerators_part_ready{instance="node-9:9817",job="kubelet",driver_pod="other"} 1\n'
    text += (
        'kube_daemonset_status_number_ready{daemonset="dra-accelerators-driver-1"} 9\nup{instance="node-9:9817"} 1\n'
    )
    with serving(port, text):
        server.start()
        try:
            (found,) = server.until(
                "the device of a pod", lambda: server.query("dra_accelerators_container_device_info")
            )
            up = server.query("up")
            (ready,) = server.query("dra_accelerators_part_ready")
            assert server.query("kube_daemonset_status_number_ready") == []
        finally:
            server.stop()
    assert [each["metric"] | {"value": each["value"][1]} for each in up] == [
        {
            "__name__": "up",
            "job": "dra-accelerators",
            "instance": "node-2:9817",
            "driver_pod": "driver-node-2",
            "value": "1",
        }
    ]
    assert (found["metric"]["pod"], found["metric"]["namespace"]) == ("user", "default")
    own = {"instance": "node-2:9817", "job": "dra-accelerators", "driver_pod": "driver-node-2"}
    assert ready["metric"].items() >= own.items(), "a driver's metrics are stored as its own"
    assert ready["metric"]["exported_instance"] == "node-9:9817"


@contextlib.contextmanager
def serving(port: int, text: str) -> Iterator[None]:
    """Serve a page of metrics."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_arguments: object) -> None:
            """Log nothing."""

    page = ThreadingHTTPServer(("127.0.0.1", port), Page)
    thread = threading.Thread(target=page.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        page.shutdown()
        page.server_close()


def test_a_controller_that_is_a_deployment_has_a_job_that_finds_its_pods(tmp_path: Path) -> None:
    playbook(tmp_path, free_port(), free_port(), "-e", "dra_controller_deploy_as=deployment")
    (drivers,) = json.loads((tmp_path / "targets/targets.json").read_text())
    assert drivers["labels"] == {"job": "dra-accelerators"}, "no host has a controller"
    _drivers, job = yaml.safe_load((tmp_path / "scrape/scrape.yml").read_text())["scrape_configs"]
    assert job["job_name"] == "dra-accelerators-controller"
    namespace = {"names": ["dra-accelerators-controller"]}
    assert job["kubernetes_sd_configs"] == [{"role": "pod", "namespaces": namespace}]
    kept = [rule["regex"] for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    assert kept == ["dra-accelerators-controller;metrics"]
