# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Change the controller from systemd services to a Deployment and back without an unanswered webhook request."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER, Cluster, Recap
from tests.cluster.ghosts import Ghost
from tests.cluster.test_45_controller import NAMESPACE, UNIT, answer_to, settings_of
from tests.prove.pods import make_base_image

NAME = "dra-accelerators-controller"
PROCESS = "dra_driver.controller run"
KINDS = "deployments,services,configmaps,poddisruptionbudgets"
# Run by the pod's Python: prints its identity, its capabilities, and whether it can write anywhere.
LOOK = """
import os
def writes(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
held = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Seccomp:"))]
print(os.getuid(), *held, any(writes(f"/{path}/x") for path in ("", "tmp", "etc/dra-accelerators", "opt/dra-accelerators", "var", "root")))
"""


@dataclass(frozen=True)
class Site:
    """A cluster, and an inventory in which both nodes are controller hosts."""

    cluster: Cluster
    inventory: Path
    base: str

    def run(self, form: str, *words: str, **more: Any) -> Recap:
        """Run the playbook for this form."""
        variables = {
            "dra_controller_deploy_as": form,
            "dra_controller_grace": 1,
            "dra_controller_interval": 1,
            # An unanswered request is rejected, so that a gap is visible.
            "dra_controller_webhook_failure_policy": "Fail",
            "dra_controller_image_pull_policy": "Never",
            "driver_image_delivery": "import",
            "driver_image_base": self.base,
            "driver_image_require_digest": False,
            "driver_image_python": "3.11",
            **more,
        }
        recap = self.cluster.playbook("controller.yml", "-e", json.dumps(variables), *words, inventory=self.inventory)
        assert not recap.failed, recap.output
        return recap

    def holder(self) -> str:
        """Return the node or pod that holds the Lease; "" without a holder."""
        lease = self.cluster.get("lease", NAME, "-n", NAMESPACE)
        return str(lease["spec"].get("holderIdentity") or "").partition("_")[0]

    def pods(self) -> dict[str, str]:
        """Return the pods that are not terminating, with their nodes."""
        items = self.cluster.get("pods", "-n", NAMESPACE)["items"]
        return {
            each["metadata"]["name"]: each["spec"].get("nodeName", "")
            for each in items
            if not each["metadata"].get("deletionTimestamp")
        }

    def objects(self) -> list[str]:
        """Return the objects in the namespace of the kinds that the pods need, except those that Kubernetes creates."""
        found = self.cluster.kubectl("get", KINDS, "-n", NAMESPACE, "-o", "name").split()
        return [each for each in found if each != "configmap/kube-root-ca.crt"]


@pytest.fixture()
def site(cluster: Cluster) -> Iterator[Site]:
    """Prepare both nodes to run the controller; remove it afterwards in case the test failed early."""
    site = Site(cluster, cluster.inventory(controllers=True), make_base_image(cluster))
    yield site
    site.run("service", dra_controller_state="absent")


@contextlib.contextmanager
def asking(cluster: Cluster) -> Iterator[list[str]]:
    """Repeatedly dry-run create an invalid and a valid claim; yield the list of unexpected answers."""
    wrong, right = (settings_of("ResourceClaim", "v1", DRIVER, percentage) for percentage in (150, 50))
    end, other, asked = threading.Event(), [], [0]

    def ask() -> None:
        while not end.is_set():
            for document, expected in ((wrong, "it is 150"), (right, "created (server dry run)")):
                said = answer_to(cluster, document)
                other.extend([said] if expected not in said else [])
                asked[0] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield other
    finally:
        end.set()
        thread.join(timeout=60)
    assert asked[0] > 20


def difference(cluster: Cluster, before: dict[str, str]) -> set[str]:
    """Return the changes of the footprint, without containerd's images and the distribution's backups of the user
    list.
    """
    after = cluster.footprint()
    kept = ("/etc/passwd-", "/etc/shadow-", "/etc/group-", "/etc/gshadow-")
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    return {key for key in changed if not key.endswith(kept) and "/var/lib/containerd/" not in key}


def test_controller_is_migrated_to_pods_and_back_without_an_outage(site: Site) -> None:
    cluster = site.cluster
    before = cluster.footprint()
    site.run("service")
    cluster.wait("a service acts", lambda: site.holder() in cluster.nodes(), timeout=60)
    wrong = settings_of("ResourceClaim", "v1", DRIVER, 150)
    cluster.wait("the webhook is trusted", lambda: "it is 150" in answer_to(cluster, wrong), timeout=60)
    with asking(cluster) as problems:
        assert site.run("deployment", "--check", "--diff").changed and site.objects() == []
        site.run("deployment")
        verify_pods(site)
        again = site.run("deployment")
        assert not again.changed, again.output
        former = site.pods()
        site.run("deployment", dra_controller_grace=2)
        assert not former.keys() & site.pods().keys(), "pods with the previous configuration remain"
        cluster.wait("a new pod is the leader", lambda: site.holder() in site.pods())
    assert problems == []
    verify_other_pod_takes_over(site)
    with asking(cluster) as problems:
        site.run("service")
        cluster.wait("a service is the leader again", lambda: site.holder() in cluster.nodes(), timeout=60)
        assert site.objects() == [] and site.pods() == {}
        again = site.run("service")
        assert not again.changed, again.output
    assert problems == []
    site.run("deployment")
    site.run("deployment", dra_controller_state="absent")
    # The kubelet removes the logs of deleted pods within a minute or two.
    cluster.wait("nothing is left", lambda: not difference(cluster, before), timeout=240, interval=10)


def verify_pods(site: Site) -> None:
    """Assert that two pods run on different nodes with the expected permissions, and that one of them leads and no
    service runs.
    """
    cluster = site.cluster
    pods = site.pods()
    assert len(pods) == 2 and sorted(pods.values()) == cluster.nodes()
    assert site.holder() in pods
    for node in cluster.nodes():
        assert "not-found" in cluster.run(node, "systemctl", "show", "--property=LoadState", UNIT)
        assert "dra-controller" not in cluster.run(node, "cat", "/etc/passwd")
    for pod in pods:
        inside = ("exec", "-n", NAMESPACE, pod, "--", "python3")
        none = "0" * 16
        assert cluster.kubectl(*inside, "-c", LOOK).split() == ["65532", none, none, "1", "2", "False"]
        assert cluster.kubectl(*inside, "-m", "dra_driver.controller", "plan") == "Nothing to clean up.\n"
        metrics = cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:9779/proxy/metrics")
        assert f"dra_accelerators_controller_leading {float(pod == site.holder())}" in metrics
    slices = cluster.get("endpointslices", "-n", NAMESPACE)["items"]
    assert {port["name"]: port["port"] for each in slices for port in each["ports"]} == {
        "webhook": 9443,
        "metrics": 9779,
    }


def verify_other_pod_takes_over(site: Site) -> None:
    """Kill the leading process; assert that the other pod takes the Lease and cleans up after a deleted node."""
    cluster, first = site.cluster, site.holder()
    ghost = Ghost(cluster, "ghost")
    try:
        ghost.appear()
        cluster.run(site.pods()[first], "pkill", "-KILL", "-f", PROCESS)
        ghost.vanish()
        cluster.wait("the other pod acts", lambda: site.holder() in site.pods().keys() - {first}, timeout=60)
        cluster.wait("the objects of the node are deleted", lambda: ghost.left() == ghost.what_stays, timeout=60)
    finally:
        ghost.exorcise()
    cluster.wait("both pods are ready again", lambda: ready(cluster) == 2, timeout=60)


def ready(cluster: Cluster) -> int:
    """Return the number of ready pods."""
    return int(cluster.get("deployment", NAME, "-n", NAMESPACE)["status"].get("readyReplicas", 0))
