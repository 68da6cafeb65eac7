# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the modules as a user runs them: with Ansible, on nodes with a running driver, and on the real API server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cluster.cluster import DRIVER_UNIT, PLUGIN_DIRECTORY, Cluster, execute
from tests.cluster.manifests import claim, pod, settings
from tests.cluster.manifests import static as selector_of_static_profile
from tests.cluster.module_calls import Module, Result

ROOT = Path(__file__).resolve().parents[2]
GPU = 7
MIXED = {"3g.40gb": 1, "1g.10gb": 4}


@pytest.fixture(scope="module")
def node(cluster: Cluster, ansible: Module) -> Iterator[str]:
    """Yield the node with dynamic GPUs. Its last GPU is whole before and after the tests."""
    name = cluster.nodes()[1]
    cluster.run(name, "accelerator-simulator", "clear")
    whole = {"layout": [{"match": {"index": GPU}, "mode": "whole"}]}
    assert not ansible(name, "nvidia_mig", whole)["failed"]
    yield name
    cluster.run(name, "accelerator-simulator", "clear")
    assert not ansible(name, "nvidia_mig", whole)["failed"]


def static_layout(partitions: Any, index: int = GPU) -> Result:
    return {"layout": [{"match": {"index": index}, "mode": "static", "partitions": partitions}]}


def instances(cluster: Cluster, node: str) -> list[str]:
    """Return the profiles of the node's partitions as nvidia-smi lists them."""
    return sorted(line.split()[1] for line in cluster.instances(node))


def published(cluster: Cluster, node: str, index: int = GPU) -> list[str]:
    """Return the profiles of the existing, published partitions of a GPU."""
    return sorted(
        device["attributes"]["profile"]["string"]
        for name, device in cluster.devices(node).items()
        if name.startswith(f"gpu-{index}-mig-") and "uuid" in device["attributes"]
    )


def test_accelerator_facts(node: str, ansible: Module) -> None:
    result = ansible(node, "accelerator_info", {"offers": True, "dynamic": True}, check=True)
    assert result["changed"] is False
    assert [device["index"] for device in result["devices"]] == list(range(8))
    assert {device["product"] for device in result["devices"]} == {"NVIDIA H100 80GB HBM3"}
    assert all(device["pcie_root"] and device["numa_node"] is not None for device in result["devices"])
    assert result["drivers"][0]["driver_name"] == "gpu.nvidia.com"


def test_offers_equal_the_published_devices(cluster: Cluster, node: str, ansible: Module) -> None:
    result = ansible(node, "accelerator_info", {"offers": True, "dynamic": True, "match": {"index": GPU}})
    offered = {offer["name"] for offer in result["devices"][0]["offers"]}
    published_names = {name for name in cluster.devices(node) if name == f"gpu-{GPU}" or name.startswith(f"gpu-{GPU}-")}
    assert offered == published_names


def test_a_static_layout(cluster: Cluster, node: str, ansible: Module) -> None:
    predicted = ansible(node, "nvidia_mig", static_layout(MIXED), check=True)
    assert predicted["changed"], predicted
    assert "+  3g.40gb at" in predicted["printed"], "the difference is printed for people"
    assert instances(cluster, node) == []
    applied = ansible(node, "nvidia_mig", static_layout(MIXED))
    assert applied["steps"] == predicted["steps"]
    assert applied["devices"][0]["changed"]
    assert instances(cluster, node) == ["1g.10gb"] * 4 + ["3g.40gb"]
    again = ansible(node, "nvidia_mig", static_layout(MIXED))
    assert again["changed"] is False
    assert again["before"] == again["after"] == applied["after"]
    cluster.wait(
        "the driver publishes the administrator's partitions",
        lambda: published(cluster, node) == ["1g.10gb"] * 4 + ["3g.40gb"],
    )


def test_mig_parted_file_is_applied(cluster: Cluster, node: str, ansible: Module) -> None:
    document = {
        "version": "v1",
        "mig-configs": {
            "halves": [{"devices": [GPU], "mig-enabled": True, "mig-devices": {"3g.40gb": 2}}],
            "wrong": [{"devices": [GPU], "mig-enabled": True, "mig-devices": {"3g.40gb": 3}}],
        },
    }
    path = "/run/mig-parted.yaml"
    cluster.shell(node, f"cat > {path} <<'END'\n{yaml.safe_dump(document)}END")
    options = {"config_file": path, "config_name": "halves"}
    assert ansible(node, "nvidia_mig", options)["changed"]
    assert instances(cluster, node) == ["3g.40gb", "3g.40gb"]
    assert ansible(node, "nvidia_mig", options)["changed"] is False
    refused = ansible(node, "nvidia_mig", {**options, "config_name": "wrong"})
    assert refused["error_code"] == "does-not-fit"
    assert instances(cluster, node) == ["3g.40gb", "3g.40gb"]


@pytest.mark.prove
def test_layout_is_compared_saved_and_restored(cluster: Cluster, node: str, ansible: Module) -> None:
    kept = {"checkpoint_file": "/run/dra-accelerators-test-checkpoint.json"}
    ansible(node, "nvidia_mig", static_layout(MIXED))
    before = instances(cluster, node)
    try:
        assert ansible(node, "nvidia_mig_info", static_layout(MIXED))["matches"]
        exported = ansible(node, "nvidia_mig_info", {})["exported"]
        assert not ansible(node, "nvidia_mig", {"layout": exported["layout"]})["changed"]
        assert ansible(node, "nvidia_mig", {"state": "checkpointed", **kept})["changed"]
        ansible(node, "nvidia_mig", {"layout": [{"match": {"index": GPU}, "mode": "whole"}]})
        differs = ansible(node, "nvidia_mig_info", static_layout(MIXED))
        assert not differs["failed"] and not differs["matches"]
        assert [each["index"] for each in differs["differences"]] == [GPU]
        assert instances(cluster, node) == []
        assert ansible(node, "nvidia_mig", {"state": "restored", **kept})["changed"]
        assert instances(cluster, node) == before
    finally:
        cluster.run(node, "rm", "-f", kept["checkpoint_file"])
        ansible(node, "nvidia_mig", {"layout": [{"match": {"index": GPU}, "mode": "whole"}]})


def test_fleet_reports_its_accelerators(clean: Cluster, inventory: Path, tmp_path: Path) -> None:
    small = "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"
    clean.apply(claim("notebook", device_class="mig.nvidia.com", expression=small), pod("writer", "notebook"))
    nowhere = "device.attributes['gpu.nvidia.com'].profile == '9g.90gb'"
    clean.apply(claim("too-large", device_class="mig.nvidia.com", expression=nowhere), pod("waiter", "too-large"))
    clean.wait_running("writer")
    clean.wait(
        "the scheduler reports that no device fits",
        lambda: any(
            each["type"] == "PodScheduled" and each["status"] == "False"
            for each in clean.pod("waiter")["status"].get("conditions", ())
        ),
    )
    variables = {
        "accelerator_report_file": str(tmp_path / "accelerators.md"),
        "accelerator_kubeconfig": clean.world("kubeconfig").strip(),
    }
    execute(
        ["ansible-playbook", "--inventory", inventory, "dra.accelerators.report", "-e", json.dumps(variables)],
        env={**os.environ, "ANSIBLE_PIPELINING": "true"},
    )
    text = (tmp_path / "accelerators.md").read_text(encoding="utf-8")
    for name in clean.nodes():
        assert f"## {name}\n" in text
    assert "| 0 | NVIDIA H100 80GB HBM3 |" in text
    for code in ("node-silent", "driver-unavailable", "not-published", "published-and-gone"):
        assert f"(`{code}`)" not in text, text

    picture = json.loads((tmp_path / "accelerators.json").read_text(encoding="utf-8"))
    jsonschema.validate(picture, json.loads((ROOT / "docs/report.schema.json").read_text(encoding="utf-8")))
    (given,) = clean.get("resourceclaim", "notebook")["status"]["allocation"]["devices"]["results"]
    (held,) = [
        (node["name"], device["index"], part["profile"])
        for node in picture["nodes"]
        for device in node["devices"]
        for part in device["partitions"]
        if "default/notebook" in part["claims"]
    ]
    assert held == (given["pool"], int(given["device"].split("-")[1]), "1g.10gb")
    (waits,) = picture["waiting"]
    assert (waits["claim"], waits["pods"]) == ("default/too-large", ["waiter"])
    # The same explanation as that of the playbook why.yml, not the scheduler's short message.
    assert waits["reason"]["source"] == "explained", waits
    assert waits["reason"]["message"].startswith("No node has devices for it"), waits
    page = (tmp_path / "accelerators.html").read_text(encoding="utf-8")
    assert "default/too-large" in page and all(name in page for name in clean.nodes())
    start = page.index(">", page.index('id="data"')) + 1
    assert json.loads(page[start : page.index("</script>", start)]) == picture


def test_a_process_is_not_disturbed(cluster: Cluster, node: str, ansible: Module) -> None:
    ansible(node, "nvidia_mig", static_layout({"3g.40gb": 2}))
    device = ansible(node, "accelerator_info", {"match": {"index": GPU}})["devices"][0]
    busy = device["partitions"][0]
    ids = (busy["instance_id"], busy["compute_instance_id"])
    cluster.run(node, "accelerator-simulator", "fault", GPU, "process", 4711, *ids)
    for check in (True, False):
        refused = ansible(node, "nvidia_mig", static_layout({"7g.80gb": 1}), check=check)
        assert refused["error_code"] == "in-use"
        assert refused["pids"] == [4711]
        assert busy["uuid"] in refused["msg"]
    assert instances(cluster, node) == ["3g.40gb", "3g.40gb"]
    cluster.run(node, "accelerator-simulator", "clear", GPU)
    assert ansible(node, "nvidia_mig", static_layout({"7g.80gb": 1}))["changed"]
    assert instances(cluster, node) == ["7g.80gb"]


def test_a_prepared_claim_is_not_disturbed(clean: Cluster, node: str, ansible: Module) -> None:
    wanted = "device.attributes['gpu.nvidia.com'].profile == '2g.20gb'"
    clean.apply(
        claim("training", device_class="mig.nvidia.com", expression=wanted), pod("trainer", "training", node=node)
    )
    clean.wait_running("trainer")
    (given,) = clean.get("resourceclaim", "training")["status"]["allocation"]["devices"]["results"]
    index = int(given["device"].split("-")[1])
    for check in (True, False):
        refused = ansible(node, "nvidia_mig", static_layout({"7g.80gb": 1}, index), check=check)
        assert refused["error_code"] == "in-use", refused
        assert refused["claims"] == ["default/training"]
    clean.delete(pod("trainer", "training", node=node))
    clean.wait("the partition is released", lambda: "2g.20gb" not in instances(clean, node))


def test_claim_starts_from_node_settings_and_restores_them(clean: Cluster, node: str, ansible: Module) -> None:
    """Includes locked clocks, which NVML cannot query."""
    locked = {"minimum": 345, "maximum": 1410}
    rule = {"match": {}, "power_limit": 600, "graphics_clocks": locked}

    def shown(uuid: str) -> tuple[int, ...]:
        gpus = json.loads(clean.run(node, "accelerator-simulator", "show", "--json"))["gpus"]
        (gpu,) = [each for each in gpus if each["uuid"] == uuid]
        return gpu["power_limit_mw"], gpu["locked_clock_minimum_mhz"], gpu["locked_clock_maximum_mhz"]

    try:
        done = ansible(node, "nvidia_gpu", {"settings": [rule]})
        assert len(done["steps"]) == 16 and "+graphics_clocks: 345 to 1410 MHz" in done["printed"], done
        wanted = claim("tuned", device_class="gpu.nvidia.com")
        wanted["spec"]["devices"]["config"] = [
            settings(powerLimit=300, graphicsClocks={"minimum": 900, "maximum": 900})
        ]
        documents = (wanted, pod("tuned", "tuned", node=node))
        clean.apply(*documents)
        clean.wait_running("tuned")
        (given,) = clean.get("resourceclaim", "tuned")["status"]["allocation"]["devices"]["results"]
        uuid = str(done["devices"][int(given["device"].split("-")[1])]["uuid"])
        assert shown(uuid) == (300_000, 900, 900)
        assert ansible(node, "nvidia_gpu", {"settings": [rule]})["changed"] is False
        refused = ansible(node, "nvidia_gpu", {"settings": [{**rule, "power_limit": 500}]})
        assert (refused["error_code"], refused["claims"]) == ("in-use", ["default/tuned"]), refused
        clean.delete(*reversed(documents))
        assert shown(uuid) == (600_000, 345, 1410)
    finally:
        back = ansible(node, "nvidia_gpu", {"state": "absent"})
    assert len(back["steps"]) == 16 and shown(uuid) == (700_000, 0, 0), back


@pytest.fixture
def one_partition(cluster: Cluster, node: str, ansible: Module) -> None:
    """Create one static partition 7g.80gb on the last GPU, and wait until the driver publishes it."""
    ansible(node, "nvidia_mig", static_layout({"7g.80gb": 1}))
    cluster.wait("the partition is published", lambda: published(cluster, node) == ["7g.80gb"])


@pytest.mark.prove
@pytest.mark.usefixtures("one_partition")
def test_locked_gpu_delays_its_claim_and_rejects_a_layout_with_the_name_of_the_holder(
    clean: Cluster, node: str, ansible: Module
) -> None:
    """A process holds the lock of the GPU during the test."""
    uuid = ansible(node, "accelerator_info", {"match": {"index": GPU}})["devices"][0]["uuid"]
    text = "maintenance by an administrator"
    hold = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_EX); "
        "file.truncate(0); file.write(sys.argv[2]); file.flush(); print('held', flush=True); time.sleep(600)"
    )
    lock = f"{PLUGIN_DIRECTORY}/locks/{uuid}.lock"
    words = ["docker", "exec", node, "python3", "-c", hold, lock, text]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            other = "device.attributes['gpu.nvidia.com'].profile == '2g.20gb'"
            clean.apply(
                claim("waits", device_class="mig.nvidia.com", expression=selector_of_static_profile("7g.80gb")),
                pod("waits", "waits", node=node),
                claim("neighbour", device_class="mig.nvidia.com", expression=other),
                pod("neighbour", "neighbour", node=node),
            )
            clean.wait_running("neighbour")
            clean.wait(
                "the rejection, with the holder of the GPU",
                lambda: [each for each in clean.get("events")["items"] if f"worked on by {text}" in json.dumps(each)],
            )
            assert clean.pod("waits")["status"]["phase"] == "Pending"
            refused = ansible(node, "nvidia_mig", static_layout(MIXED))
            assert refused["error_code"] == "device-locked" and text in refused["msg"], refused
            assert "7g.80gb" in instances(clean, node)
        finally:
            clean.run(node, "pkill", "-f", lock)
    clean.wait_running("waits")
    refused = ansible(node, "nvidia_mig", static_layout(MIXED))
    assert (refused["error_code"], refused["claims"]) == ("in-use", ["default/waits"]), refused


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (static_layout({"9g.99gb": 1}), "9g.99gb"),
        (static_layout({"1g.10gb": 8}), "7"),
        ({"layout": [{"match": {"indx": GPU}, "mode": "whole"}]}, "indx"),
        ({"layout": []} | {"config": {}}, "mutually exclusive"),
        ({"config_file": "/nowhere.yaml", "config_name": "all"}, "/nowhere.yaml"),
    ],
)
def test_bad_input(cluster: Cluster, node: str, ansible: Module, options: Result, named: str) -> None:
    before = instances(cluster, node)
    refused = ansible(node, "nvidia_mig", options)
    assert refused["failed"]
    assert named in refused["msg"]
    assert instances(cluster, node) == before


def test_driver_was_not_restarted(cluster: Cluster, node: str) -> None:
    restarts = cluster.run(node, "systemctl", "show", "--property=NRestarts", "--value", DRIVER_UNIT).strip()
    assert restarts == "0", cluster.run(node, "journalctl", "-u", DRIVER_UNIT, "-n", "60", "--no-pager")
