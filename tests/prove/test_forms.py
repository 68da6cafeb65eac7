# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test two instances of the driver on one node: a second process next to the service, and pods of a DaemonSet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import DRIVER_UNIT, PLUGIN_DIRECTORY, Cluster, Recap, copy_of_the_collection
from tests.cluster.manifests import claim, dynamic, pod
from tests.cluster.streams import failures, streaming
from tests.prove.pods import NAMESPACE, make_base_image, the_pod, variables

SECOND, UNIT = "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f", "second-driver"


def versions(cluster: Cluster, node: str) -> dict[str, str]:
    """Return the resource versions of a node's slices."""
    return {each["metadata"]["name"]: each["metadata"]["resourceVersion"] for each in cluster.slices(node)}


def until_serves(cluster: Cluster, node: str, instance: str) -> None:
    """Wait until an instance serves and is ready. "" is the service."""

    def serves() -> bool:
        reported = cluster.status(node)
        return (reported["instance"], reported["role"], reported["ready"]) == (instance, "serving", True)

    cluster.wait(f"instance {instance or 'of the service'} serving on {node}", serves)


@pytest.fixture()
def beside(clean: Cluster) -> Iterator[tuple[Cluster, str]]:
    """Run a second instance of the driver next to the service of the second node, as a separate process."""
    node = clean.nodes()[1]
    environment = ("PYTHONPATH=/opt/dra-accelerators/current", f"DRA_DRIVER_INSTANCE={SECOND}")
    clean.run(
        node,
        *("systemd-run", "--collect", f"--unit={UNIT}", "--property=KillMode=mixed"),
        *(f"--setenv={each}" for each in environment),
        *(
            "/opt/dra-accelerators/venv/bin/python",
            "-IB",
            "/opt/dra-accelerators/current/dra_driver/run.py",
            "dra_driver.cli",
            "node",
        ),
        *("--config", "/etc/dra-accelerators/driver.yaml"),
    )
    yield clean, node
    clean.run(node, "systemctl", "stop", UNIT, check=False)
    until_serves(clean, node, "")


def test_second_driver_takes_over_and_first_resumes_after_its_kill(beside: tuple[Cluster, str]) -> None:
    cluster, node = beside
    before = versions(cluster, node)
    pid = cluster.driver_pid(node)
    until_serves(cluster, node, SECOND)
    cluster.apply(
        claim("kept", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("kept", "kept", node=node)
    )
    cluster.wait_running("kept")
    assert cluster.shell(node, f"ls {PLUGIN_DIRECTORY}").split().count(f"dra-{SECOND}.sock") == 1
    cluster.run(node, "systemctl", "kill", "--signal=KILL", UNIT)
    until_serves(cluster, node, "")
    assert cluster.driver_pid(node) == pid, "the one that stood by serves, and no new process"
    assert not cluster.shell(node, f"ls {PLUGIN_DIRECTORY} /var/lib/kubelet/plugins_registry | grep {SECOND} || true")
    cluster.delete(pod("kept", "kept"), claim("kept", device_class="mig.nvidia.com"))
    cluster.wait("nothing is left of the claim", lambda: not cluster.recorded(node))
    assert cluster.cdi_files(node) == [] and failures(cluster) == []
    assert versions(cluster, node) == before


# ---------------------------------------------------------------------------------------------------- pods


@pytest.fixture(scope="module")
def base_image(cluster: Cluster) -> str:
    """Return the base image of the driver's image."""
    return make_base_image(cluster)


def form(cluster: Cluster, base: str, name: str, tree: Path | None = None) -> None:
    """Change the second node to this form with the collection of ``tree`` or with this one."""
    fleet = {**variables(base), "dra_driver_deploy_as": name}
    cluster.playbook("driver_form.yml", "--limit", cluster.nodes()[1], "-e", json.dumps(fleet), tree=tree)


def verify_pod_serves(cluster: Cluster, node: str, version: str) -> None:
    """Assert that the single pod serves with the release of this version."""
    until_serves(cluster, node, the_pod(cluster)["metadata"]["uid"])
    assert cluster.status(node)["version"] == version


@pytest.fixture()
def next_release(tmp_path: Path) -> Path:
    """Return a tree with the collection as a next release."""
    copy = copy_of_the_collection(tmp_path)
    for path in (copy / "galaxy.yml", copy / "roles/dra_driver/files/dra_driver/__init__.py"):
        path.write_text(path.read_text().replace("0.1.0", "0.1.1"))
    return tmp_path


def test_nodes_are_migrated_to_pods_updated_and_downgraded_without_a_failed_claim(
    clean: Cluster, base_image: str, next_release: Path, tmp_path: Path
) -> None:
    node = clean.nodes()[1]
    before, held = versions(clean, node), []
    for name in ("service", "pod"):
        held.append(
            (claim(name, device_class="mig.nvidia.com", expression=dynamic("2g.20gb")), pod(name, name, node=node))
        )
    clean.apply(*held[0])
    clean.wait_running("service")
    with streaming(clean, node) as stream:
        form(clean, base_image, "daemonset")
        verify_pod_serves(clean, node, "0.1.0")
        context = the_pod(clean)["spec"]["containers"][0]["securityContext"]
        assert not context["privileged"] and context["readOnlyRootFilesystem"]
        assert sorted(context["capabilities"]["add"]) == ["MKNOD", "SYS_ADMIN", "SYS_CHROOT"]
        assert "not-found" in clean.run(node, "systemctl", "show", "--property=LoadState", DRIVER_UNIT)
        verify_rights_of_a_pod(clean, tmp_path / "kubeconfig")
        clean.apply(*held[1])
        clean.wait_running("pod")
        form(clean, base_image, "daemonset", next_release)
        verify_pod_serves(clean, node, "0.1.1")
        form(clean, base_image, "daemonset")
        verify_pod_serves(clean, node, "0.1.0")
        # A pod unprepares the service's claims, and the service a pod's.
        clean.delete(*reversed(held[0]))
        form(clean, base_image, "service")
        until_serves(clean, node, "")
        clean.delete(*reversed(held[1]))
        during = stream.rounds
        clean.wait("claims are prepared by the service", lambda: stream.rounds > during + 1)
    assert stream.rounds > 8 and failures(clean) == []
    assert versions(clean, node) == before
    clean.wait("nothing is left of claims", lambda: not clean.recorded(node) and not clean.cdi_files(node))
    assert NAMESPACE not in clean.kubectl("get", "namespaces", "-o", "name")
    assert "dra-accelerators-driver" not in clean.shell(node, "cat /etc/containerd/config.toml; ls /etc/containerd")


@pytest.fixture()
def ends(tmp_path: Path) -> Path:
    """Return a tree with a release whose driver reports that it is ready and exits."""
    tree = tmp_path / "ends"
    tree.mkdir()
    copy = copy_of_the_collection(tree)
    node = copy / "roles/dra_driver/files/dra_driver/node.py"
    ends = '    notify("READY=1")\n    await asyncio.sleep(1)\n    __import__("os")._exit(3)\n'
    node.write_text(node.read_text("utf-8").replace('    notify("READY=1")\n', ends), encoding="utf-8")
    return tree


def test_pods_are_updated_node_by_node_and_a_failing_release_stops_at_the_first(
    clean: Cluster, base_image: str, next_release: Path, ends: Path
) -> None:
    """Update two nodes with pods one at a time, like a fleet."""
    first, second = clean.nodes()
    one_by_one = {**variables(base_image), "accelerator_serial": 1, "dra_driver_publish_timeout": 60}

    def site(tree: Path | None = None, **more: Any) -> Recap:
        return clean.playbook("site.yml", "-e", json.dumps({**one_by_one, **more}), check=False, tree=tree)

    try:
        assert not site().failed
        before = pods_by_node(clean)
        assert set(before) == {first, second}
        with streaming(clean, second) as stream:
            failed = site(ends)
            assert failed.failed == 1 and failed.hosts[first]["failed"] == 1, failed.output
            assert "was not ready with its configuration within 60 s" in failed.output, failed.output
            assert "The previous driver is restored and ready." in failed.output
            assert not failed.hosts[second]["changed"], "the second node was not begun"
            assert pods_by_node(clean) == before, "each node has the pod that it had"
            again = site()
            assert (again.failed, again.changed) == (0, 1), again.output  # the DaemonSet of the broken release
            updated = site(next_release)
            assert not updated.failed, updated.output
            assert updated.output.index(f"{first}: the driver was started") < updated.output.index(
                f"{second}: the driver was"
            )
            after = pods_by_node(clean)
            assert set(after) == {first, second} and not set(after.values()) & set(before.values())
            assert {clean.status(node)["version"] for node in after} == {"0.1.1"}
        assert stream.rounds and failures(clean) == []
        (remaining,) = clean.get("daemonsets", "-n", NAMESPACE)["items"]
        assert remaining["status"]["desiredNumberScheduled"] == 2
    finally:
        back = site(dra_driver_deploy_as="service")
    assert not back.failed, back.output
    for node in (first, second):
        until_serves(clean, node, "")
        labels = clean.get("node", node)["metadata"]["labels"]
        assert not [each for each in labels if each.startswith("dra-accelerators/driver")]
    assert NAMESPACE not in clean.kubectl("get", "namespaces", "-o", "name")


def pods_by_node(cluster: Cluster) -> dict[str, str]:
    """Return the UID of each node's pod."""
    items = cluster.get("pods", "-n", NAMESPACE)["items"]
    found = [each for each in items if not each["metadata"].get("deletionTimestamp")]
    assert len({each["spec"]["nodeName"] for each in found}) == len(found)
    return {each["spec"]["nodeName"]: each["metadata"]["uid"] for each in found}


def verify_rights_of_a_pod(cluster: Cluster, path: Path) -> None:
    """Assert that a pod can write its own node's slices only, because its token is bound to its node."""
    first, second = cluster.nodes()
    token = cluster.kubectl(
        *("exec", "-n", NAMESPACE, the_pod(cluster)["metadata"]["name"], "--"),
        *("cat", "/var/run/secrets/kubernetes.io/serviceaccount/token"),
    )
    document = yaml.safe_load(Path(cluster.world("kubeconfig").strip()).read_text())
    document["users"] = [{"name": each["name"], "user": {"token": token.strip()}} for each in document["users"]]
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    for node, verdict in ((second, "replaced"), (first, "denied")):
        text = json.dumps(cluster.slices(node)[0])
        words = ("--kubeconfig", path, "replace", "--dry-run=server", "-f", "-")
        answer = cluster.kubectl(*words, text=text, check=False, merge=True)
        assert verdict in answer, answer
