# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test the driver's external interfaces: metrics, the command on the node, the support bundle, alerts."""

from __future__ import annotations

import base64
import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER, DRIVER_UNIT, EXAMPLES, ROOT, Cluster
from tests.cluster.manifests import claim, dynamic, pod

PORT = 9817
SCRAPE = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{PORT}/metrics', timeout=9).read().decode())"


def scraped(cluster: Cluster, node: str) -> str:
    """Return all metrics of a node's driver."""
    return cluster.run(node, "/opt/dra-accelerators/venv/bin/python", "-c", SCRAPE)


def info(text: str, name: str) -> list[dict[str, str]]:
    """Return the labels of each series of a metric."""
    lines = re.findall(rf"^dra_accelerators_{name}\{{(.*)\}} \S+$", text, re.MULTILINE)
    return [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]


def dra_driver(cluster: Cluster, node: str, *words: str, check: bool = True) -> Any:
    """Return the JSON output of the command on the node."""
    return json.loads(cluster.run(node, "dra-driver", *words, "--output", "json", check=check))


def part(cluster: Cluster, name: str, node: str) -> list[dict[str, Any]]:
    documents = [claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod(name, name, node=node)]
    cluster.apply(*documents)
    cluster.wait_running(name)
    return documents


def test_prepared_claim_is_attributed_and_explained_until_its_end(clean: Cluster) -> None:
    node = clean.nodes()[0]
    documents = part(clean, "seen", node)
    text = scraped(clean, node)
    (of_claim,) = info(text, "claim_device_info")
    (instance,) = [line for line in clean.instances(node) if of_claim["uuid"] in line]
    assert "1g.10gb" in instance and of_claim["claim_uid"] == clean.uid("seen")
    (of_container,) = info(text, "container_device_info")
    assert {key: of_container[key] for key in ("namespace", "pod", "container", "claim", "uuid")} == {
        "namespace": "default",
        "pod": "seen",
        "container": "probe",
        "claim": "seen",
        "uuid": of_claim["uuid"],
    }
    path = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/seen/device/gpu.nvidia.com-metadata.json"
    newest, older = (json.loads(line) for line in clean.kubectl("exec", "seen", "--", "cat", path).splitlines())
    assert (newest["apiVersion"], older["apiVersion"]) == tuple(
        f"metadata.resource.k8s.io/{v}" for v in ("v1beta1", "v1alpha1")
    )
    (inside,) = newest["requests"][0]["devices"]
    assert (inside["name"], inside["attributes"]["uuid"]["string"]) == (of_claim["device"], of_claim["uuid"])
    (answer,) = dra_driver(clean, node, "explain", "default/seen")
    assert answer["verdict"] == "prepared" and answer["containers"] == ["default/seen/probe"]
    assert [each["uuid"] for each in answer["record"]["devices"]] == [of_claim["uuid"]]
    assert answer["CDI file"]["there"] and answer["allocation"][0]["what it is"]["profile"] == "1g.10gb"
    clean.delete(*reversed(documents))
    text = scraped(clean, node)
    assert info(text, "claim_device_info") == info(text, "container_device_info") == []
    (answer,) = dra_driver(clean, node, "explain", "default/seen", check=False)
    assert answer["verdict"].startswith("not prepared") and "there is no claim" in answer["verdict"]


def test_pod_reads_the_devices_of_its_template(clean: Cluster) -> None:
    """A partition and a whole GPU of one claim, by the pod's name of the claim: equal to the node's data and the
    claim's status.
    """
    example = EXAMPLES / "metadata.yaml"
    clean.apply(example)
    clean.wait_running("metadata")
    log = clean.wait("four lines", lambda: (said := clean.log("metadata")).count("\n") == 4 and said)
    read = [json.loads(line) for line in log.splitlines()]
    made = clean.get("resourceclaims")["items"][0]
    assert [(each["podClaimName"], each["metadata"]["uid"]) for each in read] == [
        ("accelerators", made["metadata"]["uid"])
    ] * 4
    newest = {each["requests"][0]["name"]: each["requests"][0]["devices"][0] for each in read[::2]}
    node = clean.pod("metadata")["spec"]["nodeName"]
    answer = {each["device"]: each["uuid"] for each in info(scraped(clean, node), "claim_device_info")}
    for request, kind in (("part", "mig"), ("gpu", "gpu")):
        found = newest[request]
        attributes = {name: next(iter(value.values())) for name, value in found["attributes"].items()}
        assert (found["pool"], attributes["type"], attributes["uuid"]) == (node, kind, answer[found["name"]])
        assert "shareID" not in attributes
    clean.delete(example)


@pytest.mark.prove
def test_command_works_with_a_stopped_driver_and_its_bundle_has_no_secret(clean: Cluster, tmp_path: Path) -> None:
    node = clean.nodes()[0]
    documents = part(clean, "kept", node)
    assert dra_driver(clean, node, "probe", "liveness") == dra_driver(clean, node, "probe", "readiness")
    assert dra_driver(clean, node, "probe", "readiness") == {"ok": True, "problems": []}
    kubeconfig = json.loads(clean.run(node, "cat", "/etc/dra-accelerators/kubeconfig"))
    token = kubeconfig["users"][0]["user"]["token"]
    # A secret was logged by mistake.
    clean.run(node, "logger", "-t", "kubelet", f"Authorization: Bearer {token}")
    try:
        clean.run(node, "systemctl", "stop", DRIVER_UNIT)
        (answer,) = dra_driver(clean, node, "explain", "kept")
        assert answer["verdict"] == "prepared" and "no process answers" in answer["driver"]
        assert not dra_driver(clean, node, "probe", "liveness", check=False)["ok"]
        assert [each["name"] for each in dra_driver(clean, node, "claims")] == ["kept"]
        clean.run(node, "dra-driver", "collect", "--file", "/tmp/bundle.tar.gz")
    finally:
        clean.run(node, "systemctl", "start", DRIVER_UNIT)
        clean.wait_registered(node)
    encoded = clean.run(node, "base64", "/tmp/bundle.tar.gz")
    clean.run(node, "rm", "/tmp/bundle.tar.gz")
    bundle = tmp_path / "bundle.tar.gz"
    bundle.write_bytes(base64.b64decode(encoded))
    with tarfile.open(bundle) as archive:
        files = {each.name.partition("/")[2]: archive.extractfile(each).read().decode() for each in archive}  # type: ignore[union-attr]
    assert not [name for name, text in files.items() if token in text or token[:60] in text]
    assert "serving the kubelet" in files["journal.txt"] and "WatchdogSec" in files["unit-files.txt"]
    assert json.loads(files[f"{DRIVER}/store.json"])["claims"][0]["name"] == "kept"
    assert json.loads(files[f"{DRIVER}/slices.json"]) and json.loads(files["config/identity.json"])["of node"] == node
    clean.delete(*reversed(documents))


@pytest.mark.prove
def test_explain_unallocated_claim_refers_selectors_to_why(clean: Cluster) -> None:
    node = clean.nodes()[0]
    clean.apply(
        claim(
            "huge", device_class="mig.nvidia.com", expression="device.attributes['gpu.nvidia.com'].profile == '9g.99gb'"
        ),
        pod("huge", "huge", node=node),
    )
    (answer,) = dra_driver(clean, node, "explain", "huge", check=False)
    assert answer["verdict"] == "not prepared: the scheduler has not allocated it"
    request = answer["why no device of this node"]["device"]
    assert "not evaluated on the node" in request["selectors of the request and its class"]
    assert "ansible-playbook dra.accelerators.why" in request["selectors of the request and its class"]
    assert not any("selector" in reason for reason in request["ruled out"])
    # The text output says the same.
    assert "not evaluated on the node; run the why playbook" in clean.run(
        node, "dra-driver", "explain", "huge", check=False
    )


@pytest.mark.prove
def test_hanging_driver_is_restarted_by_systemd(clean: Cluster) -> None:
    """The process is stopped, so that it cannot respond. systemd's watchdog waits two minutes."""
    node = clean.nodes()[0]
    pid = clean.driver_pid(node)
    clean.run(node, "kill", "-STOP", str(pid))
    clean.wait("another process", lambda: clean.driver_pid(node) not in (0, pid), timeout=300)
    clean.wait_registered(node)
    assert "watchdog" in clean.run(node, "journalctl", "-b", "-u", DRIVER_UNIT, "-o", "cat", "--no-pager").lower()


@pytest.fixture()
def prometheus(clean: Cluster, tmp_path: Path) -> Iterator[Any]:
    """Run a real Prometheus on this host that scrapes the first node's driver. In its copy of the rules, alerts wait 1
    s.
    """
    sys.path[:0] = [str(ROOT / "tests/oracles"), str(ROOT / "tests/world")]
    from prometheus import Server

    node = clean.nodes()[0]
    addresses = {each["type"]: each["address"] for each in clean.get("node", node)["status"]["addresses"]}
    targets = [{"targets": [f"{addresses['InternalIP']}:{PORT}"], "labels": {"job": "dra-accelerators"}}]
    (tmp_path / "targets.json").write_text(json.dumps(targets))
    rules = (ROOT / "roles/monitoring/files/rules.yml").read_text()
    (tmp_path / "rules.yml").write_text(re.sub(r"for: \d+m", "for: 1s", rules))
    server = Server(tmp_path, rules=tmp_path / "rules.yml", targets=tmp_path / "targets.json")
    server.start()
    yield server
    server.stop()
    clean.run(node, "accelerator-simulator", "clear")


@pytest.mark.prove
def test_prometheus_shows_a_claim_its_fault_and_its_end(clean: Cluster, prometheus: Any) -> None:
    from prometheus import promtool

    node = clean.nodes()[0]
    assert promtool("check", "metrics", text=scraped(clean, node)) == ""
    documents = part(clean, "watched", node)
    joined = (
        "dra_accelerators_container_device_info * on (uuid) group_left () dra_accelerators_device_memory_total_bytes"
    )
    (found,) = prometheus.until("the partition's memory by its pod", lambda: prometheus.query(joined), 90)
    assert found["metric"]["pod"] == "watched" and 9e9 < float(found["value"][1]) < 13e9
    prometheus.until("telemetry of all", lambda: len(prometheus.query("dra_accelerators_device_power_watts")) == 8)
    index = next(
        each["metric"]["index"]
        for each in prometheus.query("dra_accelerators_device_info")
        if each["metric"]["uuid"] == found["metric"]["device_uuid"]
    )
    clean.run(node, "accelerator-simulator", "fault", index, "call", "nvmlDeviceGetMemoryInfo", "fail", "999")
    wanted = {"DraAcceleratorsDeviceFault", "DraAcceleratorsDeviceFaultInUse"}
    prometheus.until("both alerts fire", lambda: wanted <= prometheus.firing(), 90)
    (fault,) = prometheus.query("dra_accelerators_device_fault")
    assert fault["metric"]["cause"] == "unknown-error" and fault["metric"]["uuid"] == found["metric"]["device_uuid"]
    clean.run(node, "accelerator-simulator", "clear")
    prometheus.until("they end", lambda: not wanted & prometheus.firing(), 90)
    clean.delete(*reversed(documents))
    prometheus.until("the claim has no metric", lambda: not prometheus.query("dra_accelerators_claim_device_info"), 90)
    clean.run(node, "systemctl", "stop", DRIVER_UNIT)
    prometheus.until("the alert for the stopped driver", lambda: "DraAcceleratorsDriverDown" in prometheus.firing(), 90)
    clean.run(node, "systemctl", "start", DRIVER_UNIT)
    clean.wait_registered(node)
    prometheus.until("the alert has ended", lambda: "DraAcceleratorsDriverDown" not in prometheus.firing(), 90)


#: The Prometheus operator's CRD, reduced to the parts that the API server needs.
RULE_KIND = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "prometheusrules.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "PrometheusRule", "plural": "prometheusrules", "singular": "prometheusrule"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


@pytest.fixture()
def watched(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Yield an inventory with this host as the monitoring host, and create the namespace."""
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    path = tmp_path / "inventory.yml"
    path.write_text(json.dumps({"accelerator_monitoring": {"hosts": {"here": here}}}))
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}}
    cluster.apply(space)
    yield path
    cluster.delete(RULE_KIND, space)


@pytest.mark.prove
def test_dashboard_and_rules_are_created_in_the_cluster_if_configured(cluster: Cluster, watched: Path) -> None:
    files = {f"monitoring_{name}_file": "" for name in ("rules", "targets", "dashboard", "provider")}
    options = ("-e", json.dumps({**files, "monitoring_objects": True, "accelerator_become": False}))

    def objects(kind: str) -> dict[str, dict[str, Any]]:
        found = cluster.get(kind, "-n", "monitoring", "-l", "app.kubernetes.io/managed-by=dra-accelerators")["items"]
        return {each["metadata"]["name"]: each for each in found}

    assert cluster.playbook("monitoring.yml", *options, "--check", inventory=watched).changed == 1
    assert objects("configmaps") == {}
    assert cluster.playbook("monitoring.yml", *options, inventory=watched).changed == 1
    found = objects("configmaps")
    assert set(found) == {"dra-accelerators-dashboard", "dra-accelerators-rules"}
    dashboard = found["dra-accelerators-dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["dra-accelerators.json"])["uid"] == "dra-accelerators"
    assert cluster.playbook("monitoring.yml", *options, inventory=watched).changed == 0
    assert cluster.playbook("monitoring.yml", *options, "-e", "monitoring_state=absent", inventory=watched).changed == 1
    assert objects("configmaps") == {}
    cluster.apply(RULE_KIND)
    cluster.kubectl("wait", "--for=condition=Established", "crd", RULE_KIND["metadata"]["name"])  # type: ignore[index]
    assert cluster.playbook("monitoring.yml", *options, inventory=watched).changed == 1
    assert set(objects("configmaps")) == {"dra-accelerators-dashboard"}
    assert [group["name"] for group in objects("prometheusrules")["dra-accelerators"]["spec"]["groups"]][1:]
    assert cluster.playbook("monitoring.yml", *options, "-e", "monitoring_state=absent", inventory=watched).changed == 1
    assert objects("configmaps") == objects("prometheusrules") == {}
