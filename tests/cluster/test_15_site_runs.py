# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test rejections before any change, a release that does not start, and other ways to reach a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import DRIVER_UNIT, Cluster, Recap, copy_of_the_collection, execute
from tests.cluster.streams import failures_except_of_a_killed_driver, streaming

USER = "fleet-operator"
#: By tag of the site playbook, a task that runs with this tag only, as Ansible prints it.
CHOSEN_BY = {
    "environment": "python_environment : Determine the release of the node programs",
    "runtime": "container_runtime : Determine the changes",
    "layout": "nvidia_mig : Apply the layout",
    "driver": "dra_driver : Start the driver and wait until it is ready",
    "classes": "device_classes : Create or remove the classes",
}


def release(cluster: Cluster, node: str) -> str:
    return cluster.run(node, "readlink", "/opt/dra-accelerators/current").strip()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the collection whose driver reports that it is ready and exits a second later, repeatedly."""
    tree = tmp_path_factory.mktemp("broken")
    copy = copy_of_the_collection(tree)
    node = copy / "roles/dra_driver/files/dra_driver/node.py"
    text = node.read_text(encoding="utf-8")
    assert text.count('    notify("READY=1")\n') == 1
    ends = '    notify("READY=1")\n    await asyncio.sleep(1)\n    __import__("os")._exit(3)\n'
    node.write_text(text.replace('    notify("READY=1")\n', ends), encoding="utf-8")
    return tree


def test_invalid_layout_rule_is_rejected_before_any_change(cluster: Cluster) -> None:
    wrong = {"accelerator_layouts": [{"hosts": "all", "layout": [{"match": {"indx": 0}, "mode": "whole"}]}]}
    refused = cluster.playbook("site.yml", "-e", json.dumps(wrong), check=False)
    assert refused.failed == len(cluster.nodes()) and refused.changed == 0, refused.output
    assert "unknown key indx" in refused.output


def test_full_run_contains_the_tasks_of_all_tags(first_run: Recap) -> None:
    """Verify the task names that the next test expects."""
    assert [task for task in CHOSEN_BY.values() if f"[dra.accelerators.{task}]" not in first_run.output] == []


@pytest.mark.prove
@pytest.mark.parametrize("chosen", [["driver", "classes"], ["environment", "runtime"], ["preflight"]], ids=",".join)
def test_tags_select_a_part_of_the_run(cluster: Cluster, chosen: list[str]) -> None:
    recap = cluster.playbook("site.yml", "--limit", cluster.nodes()[0], "--tags", ",".join(chosen))
    assert recap.failed == 0 and recap.changed == 0, recap.output
    done = [tag for tag, task in CHOSEN_BY.items() if f"[dra.accelerators.{task}]" in recap.output]
    assert done == [tag for tag in CHOSEN_BY if tag in chosen], recap.output
    assert "dra.accelerators.preflight : " in recap.output


def test_another_manager_of_the_gpus_is_rejected_unless_allowed(cluster: Cluster) -> None:
    """If it is permitted, check mode reports no change on an installed node."""
    node = cluster.nodes()[0]
    limit = ["--check", "--limit", node]
    cluster.kubectl("label", "node", node, "nvidia.com/mig.config=all-balanced")
    capacity = {"status": {"capacity": {"nvidia.com/mig-1g.10gb": "3"}, "allocatable": {"nvidia.com/mig-1g.10gb": "3"}}}
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(capacity))
    try:
        refused = cluster.playbook("site.yml", *limit, check=False)
        assert refused.failed == 1 and refused.changed == 0, refused.output
        assert "3 nvidia.com/mig-1g.10gb" in refused.output and "nvidia.com/mig.config=all-balanced" in refused.output
        allowed = cluster.playbook("site.yml", *limit, "-e", "preflight_allow_other_managers=true")
        assert allowed.failed == 0 and allowed.changed == 0, allowed.output
    finally:
        cluster.kubectl("label", "node", node, "nvidia.com/mig.config-")
        gone = {"status": {key: {"nvidia.com/mig-1g.10gb": None} for key in ("capacity", "allocatable")}}
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(gone))


@pytest.mark.prove
def test_check_mode_reports_the_restart_of_an_upgrade(cluster: Cluster, broken: Path) -> None:
    pids = [cluster.driver_pid(node) for node in cluster.nodes()]
    answer = cluster.playbook("site.yml", "--check", "--diff", tree=broken)
    assert answer.failed == 0 and answer.changed > 0, answer.output
    assert f"restart {DRIVER_UNIT}" in answer.output
    assert [cluster.driver_pid(node) for node in cluster.nodes()] == pids


@pytest.mark.prove
def test_release_that_does_not_start_stops_at_the_first_node_and_is_rolled_back(cluster: Cluster, broken: Path) -> None:
    """The second driver instance detects it: the first node keeps its driver, and pods run all the time.

    An instance that is killed can interrupt a call, which the kubelet repeats.
    """
    first, second = cluster.nodes()
    before = release(cluster, first)
    pids = [cluster.driver_pid(node) for node in (first, second)]
    with streaming(cluster, first) as stream:
        failed = cluster.playbook(
            *("site.yml", "-e", "accelerator_serial=1", "-e", "dra_driver_publish_timeout=30"), check=False, tree=broken
        )
    assert failed.failed == 1 and failed.hosts[first]["failed"] == 1, failed.output
    assert "has not started: the relief: its unit is" in failed.output
    assert release(cluster, first) == release(cluster, second) == before
    assert [cluster.driver_pid(node) for node in (first, second)] == pids
    assert cluster.status(first)["ready"] and stream.rounds
    assert failures_except_of_a_killed_driver(cluster) == []


@pytest.mark.prove
def test_running_driver_loads_a_changed_layout(cluster: Cluster) -> None:
    """A change that needs no new process causes no restart. Check mode reports this in advance."""
    node = cluster.nodes()[1]
    pid, devices = cluster.driver_pid(node), len(cluster.devices(node))
    present = yaml.safe_load(cluster.run(node, "cat", "/etc/dra-accelerators/driver.yaml"))["layout"]
    layout = [{"match": {"index": 7}, "mode": "whole"}, *present]
    chosen = ("--limit", node, "-e", json.dumps({"dra_driver_layout": layout, "dra_driver_log_level": "debug"}))
    try:
        answer = cluster.playbook("site.yml", "--check", "--diff", *chosen)
        assert f"reload {DRIVER_UNIT}" in answer.output and f"restart {DRIVER_UNIT}" not in answer.output, answer.output
        assert len(cluster.devices(node)) == devices
        done = cluster.playbook("site.yml", *chosen)
        assert done.failed == 0 and done.changed > 0, done.output
        assert len(cluster.devices(node)) == devices - 25, "GPU 7 is offered whole alone"
    finally:
        back = cluster.playbook("site.yml", "--limit", node)
    assert back.failed == 0 and back.changed > 0, back.output
    assert len(cluster.devices(node)) == devices
    assert cluster.driver_pid(node) == pid and cluster.status(node)["ready"]


@pytest.mark.prove
def test_configuration_that_does_not_work_is_rolled_back(cluster: Cluster) -> None:
    """With another kubelet directory the kubelet does not find the driver: it starts but does not become ready."""
    first, second = cluster.nodes()
    elsewhere = "/var/lib/another-kubelet"
    configuration = cluster.run(first, "cat", "/etc/dra-accelerators/driver.yaml")
    pid = cluster.driver_pid(second)
    chosen = {"accelerator_serial": 1, "dra_driver_publish_timeout": 30, "dra_driver_kubelet_root": elsewhere}
    try:
        failed = cluster.playbook("site.yml", "-e", json.dumps(chosen), check=False)
        assert failed.failed == 1 and failed.hosts[first]["failed"] == 1, failed.output
        assert f"[{first}] waits for its driver (" in failed.output and "has not started within" in failed.output
        assert cluster.run(first, "cat", "/etc/dra-accelerators/driver.yaml") == configuration
        assert cluster.driver_pid(second) == pid, "the second node was not touched"
        assert cluster.status(first)["ready"]
    finally:
        cluster.run(first, "rm", "-rf", elsewhere)


@pytest.mark.prove
def test_batch_with_an_unreachable_node_is_the_last_one(cluster: Cluster, tmp_path: Path) -> None:
    """Ansible itself continues as long as one node of a batch succeeds."""
    first, second = cluster.nodes()
    document = yaml.safe_load(cluster.inventory().read_text("utf-8"))
    hosts = document["all"]["children"]["accelerator_nodes"]["hosts"]
    away = {**hosts[first], "ansible_host": "world-without-such-a-node", "accelerator_node_name": first}
    document["all"]["children"]["accelerator_nodes"]["hosts"] = {
        first: hosts[first],
        "away": away,
        second: hosts[second],
    }
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    stopped = cluster.playbook("site.yml", "-e", "accelerator_serial=2", inventory=inventory, check=False)
    assert f"away did not become healthy, so {second} and later batches were not changed" in stopped.output
    assert (
        f"{first}: the driver is unchanged and ready" in stopped.output and "1 of 3 nodes are healthy" in stopped.output
    )
    assert stopped.hosts[second]["failed"] == 1 and stopped.hosts[first]["failed"] == 0, stopped.output
    on = cluster.playbook(
        *("site.yml", "-e", "accelerator_serial=2", "-e", "accelerator_continue_on_failure=true"),
        inventory=inventory,
        check=False,
    )
    assert on.hosts[second]["failed"] == 0 and "2 of 3 nodes are healthy; not healthy: away" in on.output, on.output


@pytest.mark.prove
def test_next_run_undoes_the_cordon_of_a_killed_removal_and_keeps_other_cordons(
    cluster: Cluster,
) -> None:
    ours, theirs = cluster.nodes()
    cluster.kubectl("annotate", "node", ours, "dra-accelerators/cordoned=for the removal of dra.accelerators")
    cluster.kubectl("cordon", ours)
    cluster.kubectl("cordon", theirs)
    try:
        again = cluster.playbook("site.yml")
        assert (again.hosts[ours]["changed"], again.hosts[theirs]["changed"]) == (1, 0), again.output
        node = cluster.get("node", ours)
        assert not node["spec"].get("unschedulable")
        assert "dra-accelerators/cordoned" not in node["metadata"].get("annotations", {})
        assert cluster.get("node", theirs)["spec"]["unschedulable"] is True
    finally:
        cluster.kubectl("uncordon", theirs)


@pytest.fixture
def by_ssh(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Return an inventory that reaches the first node by SSH under another name, as a user with sudo."""
    node = cluster.nodes()[0]
    key = tmp_path / "key"
    execute(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    cluster.shell(
        node,
        "export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && apt-get -qq install -y openssh-server sudo >/dev/null"
        f" && useradd --create-home --shell /bin/bash {USER} && install -d -o {USER} -m 700 /home/{USER}/.ssh"
        f" && echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{USER}"
        f" && echo '{key.with_suffix('.pub').read_text('utf-8').strip()}' > /home/{USER}/.ssh/authorized_keys"
        f" && chown {USER} /home/{USER}/.ssh/authorized_keys && systemctl start ssh",
        timeout=600,
    )
    addresses = cluster.get("node", node)["status"]["addresses"]
    host = {
        "ansible_host": {one["type"]: one["address"] for one in addresses}["InternalIP"],
        "ansible_user": USER,
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
        "ansible_python_interpreter": "/usr/bin/python3",
        "accelerator_node_name": node,
    }
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"accelerator_nodes": {"hosts": {"rack-7-left": host}}}), encoding="utf-8")
    yield inventory
    cluster.shell(
        node,
        "export DEBIAN_FRONTEND=noninteractive SUDO_FORCE_REMOVE=yes; systemctl stop ssh"
        f"; userdel --remove {USER}; rm -f /etc/sudoers.d/{USER}"
        "; apt-get -qq purge -y openssh-server openssh-sftp-server openssh-client sudo >/dev/null"
        "; apt-get -qq autoremove --purge -y >/dev/null; rm -rf /etc/ssh",
        timeout=600,
    )


@pytest.mark.prove
def test_a_node_by_ssh_and_sudo_under_another_name(cluster: Cluster, by_ssh: Path) -> None:
    again = cluster.playbook("site.yml", "-e", "accelerator_become=true", inventory=by_ssh)
    assert again.failed == 0 and again.changed == 0, again.output
    assert again.hosts["rack-7-left"]["ok"] > 0
