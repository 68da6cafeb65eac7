# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test the controller on the cluster: clean up after a deleted node, run as replicas, and remove it."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import DRIVER, DRIVER_UNIT, Cluster, Recap
from tests.cluster.ghosts import Ghost
from tests.cluster.manifests import MIXED_LAYOUT
from tests.cluster.test_29_shares import wait_for_conditions, waiting_claim
from tests.cluster.token_requests import check_limits, identity

UNIT = "dra-accelerators-controller.service"
NAMESPACE = "dra-accelerators-controller"
ADDRESS = "127.0.0.1:9779"
ASK = f"import urllib.request; print(urllib.request.urlopen('http://{ADDRESS}/metrics').read().decode())"
TOKEN_TIMER = "dra-accelerators-controller-token.timer"
PASSES = re.compile(r"^dra_accelerators_controller_pass_duration_seconds_count (\S+)$", re.MULTILINE)


def passes(text: str) -> int:
    """Return how many reconciliation passes a controller has completed, from its metrics."""
    found = PASSES.search(text)
    return int(float(found.group(1))) if found else 0


@pytest.fixture()
def ghost(cluster: Cluster) -> Iterator[Ghost]:
    """Create a node that is only an API object, with its dependent objects."""
    ghost = Ghost(cluster, "ghost")
    ghost.appear()
    yield ghost
    ghost.exorcise()


def test_devices_of_a_deleted_node_are_released(ghost: Ghost, tmp_path: Path) -> None:
    """Kubernetes keeps these objects. The controller runs here with the administrator's identity. The tests below use
    the installed one.
    """
    cluster = ghost.cluster
    settings = {
        "name": "here",
        "kubeconfig": cluster.world("kubeconfig").strip(),
        "namespace": "default",
        "grace": 1,
        "interval": 1,
        "lease_seconds": 3,
        "address": "127.0.0.1:9780",
    }
    (tmp_path / "controller.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "dra_driver.controller"]
    options = ["--config", str(tmp_path / "controller.yaml")]

    def looked() -> int:
        try:
            with urllib.request.urlopen(f"http://{settings['address']}/metrics", timeout=5) as answer:
                return passes(answer.read().decode())
        except OSError:
            return 0

    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen([*command, "run", *options], stderr=log)
        try:
            cluster.wait("three passes while the node exists", lambda: looked() >= 3, timeout=60)
            assert ghost.left() == ghost.everything, "a node that may come back keeps everything"
            ghost.vanish()
            cluster.wait("the objects of the node are deleted", lambda: ghost.left() == ghost.what_stays, timeout=60)
            before = looked()
            cluster.wait("three more passes", lambda: looked() >= before + 3, timeout=60)
        finally:
            running.terminate()
            assert running.wait(timeout=30) == 0, (tmp_path / "log").read_text()
    assert ghost.left() == ghost.what_stays, "objects of running pods and foreign objects are kept"
    reasons = {event["reason"] for event in cluster.get("events", "-n", "default")["items"]}
    assert {"DevicesGivenBack", "NodeCleanedUp"} <= reasons
    lease = cluster.get("lease", "dra-accelerators-controller", "-n", "default")
    assert lease["spec"]["holderIdentity"] == "", "the lease is released"
    cluster.kubectl("delete", "lease", "dra-accelerators-controller", "-n", "default")


#: Variables of all playbook runs for the controller.
CHOSEN = {"dra_controller_grace": 1, "dra_controller_interval": 1, "dra_controller_drift_after": 2}


@dataclass(frozen=True)
class Installed:
    """The controller on both nodes, installed by the playbook. ``before`` is the footprint without it."""

    cluster: Cluster
    inventory: Path
    before: dict[str, str]

    def change(self, *words: str, **variables: Any) -> Recap:
        """Run the playbook with other variables."""
        chosen = {**CHOSEN, **{f"dra_controller_{name}": value for name, value in variables.items()}}
        recap = self.cluster.playbook("controller.yml", "-e", json.dumps(chosen), *words, inventory=self.inventory)
        assert not recap.failed, recap.output
        return recap


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Installed]:
    """Install the controller on both nodes; remove it afterwards unless the last test has done so."""
    before = cluster.footprint()
    inventory = cluster.inventory(controllers=True)
    settings = ("-e", json.dumps(CHOSEN))
    recap = cluster.playbook("controller.yml", *settings, inventory=inventory)
    assert not recap.failed, recap.output
    again = cluster.playbook("controller.yml", *settings, inventory=inventory)
    assert not again.failed and not again.changed, again.output
    yield Installed(cluster, inventory, before)
    recap = cluster.playbook("controller.yml", "-e", "dra_controller_state=absent", inventory=inventory)
    assert not recap.failed, recap.output


def holder(cluster: Cluster) -> str:
    """Return the node whose controller holds the Lease."""
    lease = cluster.get("lease", "dra-accelerators-controller", "-n", NAMESPACE)
    return str(lease["spec"].get("holderIdentity", "")).partition("_")[0]


@pytest.mark.prove
def test_another_controller_takes_over_from_a_killed_one(installed: Installed) -> None:
    cluster = installed.cluster
    first = cluster.wait("one of them acts", lambda: holder(cluster), timeout=60)
    other = next(node for node in cluster.nodes() if node != first)
    ghost = Ghost(cluster, "ghost")
    try:
        ghost.appear()
        # systemd does not restart a masked unit.
        cluster.run(first, "systemctl", "mask", "--runtime", UNIT)
        cluster.run(first, "systemctl", "kill", "--signal=KILL", UNIT)
        ghost.vanish()
        cluster.wait("the other one acts", lambda: holder(cluster) == other, timeout=60)
        cluster.wait("the objects of the node are deleted", lambda: ghost.left() == ghost.what_stays, timeout=60)
    finally:
        cluster.run(first, "systemctl", "unmask", "--runtime", UNIT)
        cluster.run(first, "systemctl", "start", UNIT)
        ghost.exorcise()
    exposure = cluster.run(first, "systemd-analyze", "security", "--no-pager", UNIT).splitlines()[-1]
    assert float(re.findall(r"[0-9]+\.[0-9]+", exposure)[0]) <= 2.0, exposure


def event_reasons(cluster: Cluster, node: str) -> set[str]:
    """Return the reasons of the controller's Events about a node."""
    mine = f"involvedObject.name={node},reportingComponent=dra-accelerators-controller"
    return {event["reason"] for event in cluster.get("events", "-n", "default", "--field-selector", mine)["items"]}


@pytest.mark.prove
def test_drift_and_progress_are_reported_as_events_of_the_node(installed: Installed) -> None:
    cluster, node = installed.cluster, installed.cluster.nodes()[1]
    cluster.wait("one of them acts", lambda: holder(cluster), timeout=60)

    def counted(line: str) -> bool:
        return f"dra_accelerators_controller_{line}\n" in cluster.run(holder(cluster), "python3", "-c", ASK)

    release = cluster.get("node", node)["metadata"]["labels"]["dra.accelerators/release"]
    cluster.wait("both are counted", lambda: counted(f'nodes{{release="{release}",state="ready"}} 2.0'))
    before = event_reasons(cluster, node)
    cluster.run(node, "systemctl", "stop", DRIVER_UNIT)
    try:
        # The kubelet deletes the slices of a driver 30 s after it disappeared.
        cluster.wait(
            "the Event of the drift", lambda: "DevicesNotPublished" in event_reasons(cluster, node), timeout=120
        )
        cluster.wait("the metric of the drift", lambda: counted('drift{kind="no-slices"} 1.0'))
    finally:
        cluster.run(node, "systemctl", "start", DRIVER_UNIT)
    cluster.wait("the Event of the end of the drift", lambda: "DriftEnded" in event_reasons(cluster, node), timeout=120)
    cluster.wait("the metric of the ended drift", lambda: counted('drift{kind="no-slices"} 0.0'))
    assert not {"DevicesNotPublished", "ReleaseChanged"} & before
    try:
        cluster.kubectl("label", "node", node, "dra.accelerators/release=another", "--overwrite")
        cluster.wait("the Event of the change", lambda: "ReleaseChanged" in event_reasons(cluster, node))
        cluster.wait(
            "the Event of the node with the older release",
            lambda: "ReleaseBehind" in {*event_reasons(cluster, node), *event_reasons(cluster, cluster.nodes()[0])},
        )
    finally:
        cluster.kubectl("label", "node", node, f"dra.accelerators/release={release}", "--overwrite")


def may(cluster: Cluster, account: str, *words: str) -> bool:
    """Return whether a service account has a permission."""
    answer = cluster.kubectl("auth", "can-i", *words, f"--as=system:serviceaccount:{account}", check=False)
    return answer.strip() == "yes"


@pytest.mark.prove
def test_installed_controller_lists_waiting_claims(installed: Installed, tmp_path: Path) -> None:
    """With the permissions of the controller and of the node's driver: a pod is bound when its partition exists."""
    cluster, lists = installed.cluster, "dra-accelerators"
    first, second = cluster.nodes()
    cluster.wait(
        "the sign of the controller",
        lambda: cluster.kubectl("get", "configmap", "waiting-claims", "-n", lists, "--ignore-not-found"),
    )
    layout = json.dumps({"accelerator_layouts": [{"hosts": second, "layout": MIXED_LAYOUT}]})
    limited = ("site.yml", "--limit", second, "--tags", "layout")
    recap = cluster.playbook(*limited, "-e", layout)
    assert not recap.failed, recap.output
    try:
        again = cluster.playbook(*limited, "-e", layout)
        assert not again.failed and not again.changed, again.output
        wait_for_conditions(cluster, second)
        documents = waiting_claim(cluster, second)
        name = documents[0]["metadata"]["name"]
        cluster.apply(*documents)
        cluster.wait_running(name)
        (result,) = cluster.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"]
        assert result["bindingConditions"]
        listed = cluster.get("configmap", f"waiting-claims-{second}", "-n", lists)
        (owner,) = listed["metadata"]["ownerReferences"]
        assert owner["uid"] == cluster.get("node", second)["metadata"]["uid"]
        driver = f"{lists}:driver-{second}"
        assert may(cluster, driver, "watch", f"configmaps/waiting-claims-{second}", "-n", lists)
        assert may(cluster, driver, "get", "configmaps/waiting-claims", "-n", lists)
        for verb in ("get", "list", "watch"):
            for forbidden in (f"waiting-claims-{first}", f"driver-{second}"):
                assert not may(cluster, driver, verb, f"configmaps/{forbidden}", "-n", lists)
        for verb in ("list", "watch"):
            assert not may(cluster, driver, verb, "resourceclaims.resource.k8s.io", "--all-namespaces")
            assert not may(cluster, driver, verb, "configmaps", "-n", lists)
        stolen = identity(cluster, first, "/etc/dra-accelerators/controller/kubeconfig", tmp_path)
        document = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"driver-{first}", "namespace": lists},
        }
        answer = stolen("apply", "--server-side", "--dry-run=server", "-f", "-", document=document)
        assert "waiting-claims" in answer and "forbidden" in answer, answer
        cluster.delete(*reversed(documents))
        cluster.wait(
            "no list is left",
            lambda: (
                not cluster.kubectl("get", "configmap", f"waiting-claims-{second}", "-n", lists, "--ignore-not-found")
            ),
        )
    finally:
        recap = cluster.playbook(*limited)
        assert not recap.failed, recap.output
    assert not may(cluster, f"{lists}:driver-{second}", "get", "configmaps/waiting-claims", "-n", lists)


@pytest.mark.prove
def test_controller_token_requests_and_secrets_are_limited(installed: Installed, tmp_path: Path) -> None:
    """A stolen token of the controller cannot be exchanged for other identities."""
    cluster = installed.cluster
    first, second = cluster.nodes()
    stolen = identity(cluster, first, "/etc/dra-accelerators/controller/kubeconfig", tmp_path)
    check_limits(stolen, NAMESPACE, "controller", first, second)
    for kind in ("kubernetes.io/service-account-token", "bootstrap.kubernetes.io/token"):
        metadata = {
            "name": "dra-accelerators-controller-stolen",
            "namespace": NAMESPACE,
            "annotations": {"kubernetes.io/service-account.name": "controller"},
        }
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": kind}
        answer = stolen("create", "--dry-run=server", "-f", "-", document=secret)
        assert "forbidden" in answer, answer


@pytest.mark.prove
def test_token_is_renewed_also_while_the_controller_is_stopped(installed: Installed) -> None:
    """The timer's service renews the token with the controller's own user."""
    cluster, node = installed.cluster, installed.cluster.nodes()[0]
    assert cluster.run(node, "systemctl", "is-enabled", TOKEN_TIMER).strip() == "enabled"
    assert cluster.run(node, "systemctl", "is-active", TOKEN_TIMER).strip() == "active"
    file = "/etc/dra-accelerators/controller/kubeconfig"
    former = json.loads(cluster.run(node, "cat", file))["users"][0]["user"]["token"]
    service = TOKEN_TIMER.replace(".timer", ".service")
    folder = f"/run/systemd/system/{service}.d"
    due = "/opt/dra-accelerators/venv/bin/python -IBu /opt/dra-accelerators/current/dra_driver/run.py dra_driver.renew_token --renew-below 1 --kubeconfig"
    cluster.run(node, "systemctl", "stop", UNIT)
    try:
        cluster.run(node, "systemctl", "start", service)
        assert json.loads(cluster.run(node, "cat", file))["users"][0]["user"]["token"] == former, (
            "a new token was renewed"
        )
        drop_in = f"[Service]\nExecStart=\nExecStart={due} {file}\n"
        cluster.shell(node, f"mkdir -p {folder} && printf '{drop_in}' >{folder}/due.conf && systemctl daemon-reload")
        cluster.run(node, "systemctl", "start", service)
        assert json.loads(cluster.run(node, "cat", file))["users"][0]["user"]["token"] != former
        assert cluster.run(node, "stat", "--format=%U %a", file).split() == ["dra-controller", "600"]
    finally:
        cluster.shell(node, f"rm -rf {folder} && systemctl daemon-reload && systemctl start {UNIT}")


def settings_of(kind: str, version: str, driver: str, percentage: int) -> dict[str, Any]:
    """Return a claim, a template, or a class with an MPS thread percentage, in one API version."""
    mps = {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": percentage}}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": mps}
    config = [{"opaque": {"driver": driver, "parameters": parameters}}]
    asked: dict[str, Any] = {"deviceClassName": DRIVER}
    request = {"name": "one", **(asked if version == "v1beta1" else {"exactly": asked})}
    claim = {"devices": {"requests": [request], "config": config}}
    spec = {"ResourceClaim": claim, "ResourceClaimTemplate": {"spec": claim}, "DeviceClass": {"config": config}}[kind]
    metadata = {"name": "asked", **({} if kind == "DeviceClass" else {"namespace": "default"})}
    return {"apiVersion": f"resource.k8s.io/{version}", "kind": kind, "metadata": metadata, "spec": spec}


def answer_to(cluster: Cluster, document: dict[str, Any]) -> str:
    """Return the API server's response to a dry-run create of an object."""
    text = json.dumps(document)
    return cluster.kubectl("create", "--dry-run=server", "-f", "-", text=text, check=False, merge=True)


@pytest.mark.prove
def test_webhook_rejects_the_same_as_the_driver_in_all_kinds_and_versions(installed: Installed) -> None:
    cluster = installed.cluster
    wrong = settings_of("ResourceClaim", "v1", DRIVER, 150)
    cluster.wait("the webhook rejects the object", lambda: "it is 150" in answer_to(cluster, wrong), timeout=60)
    for kind, field in (
        ("ResourceClaim", "spec.devices.config[0]"),
        ("ResourceClaimTemplate", "spec.spec.devices.config[0]"),
        ("DeviceClass", "spec.config[0]"),
    ):
        for version in ("v1", "v1beta2", "v1beta1"):
            path = f"{field}.opaque.parameters.sharing.mpsConfig.defaultActiveThreadPercentage"
            reported = f"{path}: it is 150; expected a whole number from 1 to 100 percent"
            assert reported in answer_to(cluster, settings_of(kind, version, DRIVER, 150))
            assert "created (server dry run)" in answer_to(cluster, settings_of(kind, version, DRIVER, 50))
            theirs = settings_of(kind, version, "another.example.com", 150)
            assert "created (server dry run)" in answer_to(cluster, theirs), (
                "the webhook is not called for other drivers"
            )


@pytest.mark.prove
def test_one_running_webhook_is_enough_and_without_one_everything_is_accepted(installed: Installed) -> None:
    cluster, wrong = installed.cluster, settings_of("ResourceClaim", "v1", DRIVER, 150)
    first, second = cluster.nodes()
    cluster.run(first, "systemctl", "stop", UNIT)
    try:
        assert "it is 150" in answer_to(cluster, wrong)
        cluster.run(second, "systemctl", "stop", UNIT)
        assert "created (server dry run)" in answer_to(cluster, wrong), "it fails open, and the driver refuses"
    finally:
        for node in (first, second):
            cluster.run(node, "systemctl", "start", UNIT)
    cluster.wait("the webhooks answer again", lambda: "it is 150" in answer_to(cluster, wrong), timeout=60)


KEPT = "created (server dry run)"


@pytest.mark.prove
def test_failure_policy_fail_rejects_objects_without_a_webhook(installed: Installed) -> None:
    """With failure policy Fail and no controller, only objects with a configuration for our drivers are rejected,
    valid or not.
    """
    cluster = installed.cluster
    right = [settings_of(kind, "v1", DRIVER, 50) for kind in ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass")]
    plain = settings_of("ResourceClaim", "v1", DRIVER, 50)
    del plain["spec"]["devices"]["config"]
    theirs = settings_of("ResourceClaim", "v1", "another.example.com", 150)
    own = {**right[0], "metadata": {"name": "asked", "namespace": NAMESPACE}}
    held = settings_of("ResourceClaim", "v1", DRIVER, 50)
    held["metadata"] |= {"name": "held", "finalizers": ["tests.example.com/held"]}
    let_go = ("patch", "resourceclaim", "held", "--type=merge", "-p", '{"metadata":{"finalizers":[]}}')
    installed.change(webhook_failure_policy="Fail")
    try:
        for document in right:
            cluster.wait("both answer", lambda document=document: KEPT in answer_to(cluster, document), timeout=60)
        cluster.apply(held)
        for node in cluster.nodes():
            cluster.run(node, "systemctl", "stop", UNIT)
        for document in right:
            assert "failed calling webhook" in answer_to(cluster, document), document["kind"]
        for document in (plain, theirs, own):
            assert KEPT in answer_to(cluster, document), document
        cluster.kubectl("delete", "resourceclaim", "held", "--wait=false")
        cluster.kubectl(*let_go)
        cluster.wait(
            "the claim is deleted", lambda: "held" not in cluster.kubectl("get", "resourceclaims", "-o", "name")
        )
        installed.change(webhook_failure_policy="Ignore", ready_timeout=60)
        for node in cluster.nodes():
            cluster.run(node, "systemctl", "stop", UNIT)
        for document in right:
            assert KEPT in answer_to(cluster, document), document["kind"]
    finally:
        for node in cluster.nodes():
            cluster.run(node, "systemctl", "start", UNIT)
        installed.change()


def served(cluster: Cluster, node: str) -> str:
    """Return the certificate that a node's webhook serves, or "" if it does not answer."""
    ask = "import ssl; print(ssl.get_server_certificate(('127.0.0.1', 9443)))"
    return cluster.run(node, "python3", "-c", ask, check=False).strip()


def trusted(cluster: Cluster) -> str:
    """Return the current signing CA certificate."""
    secret = ("secret", "dra-accelerators-controller-authority", "-n", NAMESPACE)
    return cluster.kubectl("get", *secret, "-o", r"jsonpath={.data.active\.crt}", check=False)


def trusted_by_server(cluster: Cluster) -> set[str]:
    """Return the CA bundles of all webhooks that the API server trusts."""
    found = json.loads(
        cluster.kubectl("get", "validatingwebhookconfiguration", "dra-accelerators-controller", "-o", "json")
    )
    return {each["clientConfig"].get("caBundle", "") for each in found["webhooks"]}


@pytest.mark.prove
@pytest.mark.parametrize("verb", ["get", "create", "update", "patch", "delete"])
def test_controller_identity_has_no_right_on_webhook_configurations(installed: Installed, verb: str) -> None:
    """With this permission, a stolen token could redirect all writes of the cluster, Secrets included, to another
    server.
    """
    cluster, identity = installed.cluster, f"--as=system:serviceaccount:{NAMESPACE}:controller"
    for resource in ("validatingwebhookconfigurations", "mutatingwebhookconfigurations"):
        asked = (
            "auth",
            "can-i",
            verb,
            f"{resource}.admissionregistration.k8s.io/dra-accelerators-controller",
            identity,
        )
        assert cluster.kubectl(*asked, check=False).strip() == "no"
    allowed = cluster.kubectl(
        "auth", "can-i", verb, "secret/dra-accelerators-controller-authority", "-n", NAMESPACE, identity, check=False
    )
    assert allowed.strip() == ("yes" if verb == "get" else "no")
    assert cluster.kubectl("auth", "can-i", verb, "secrets", "-n", NAMESPACE, identity, check=False).strip() == "no"


@pytest.mark.prove
def test_patch_of_the_webhook_configuration_as_the_controller_is_forbidden(installed: Installed) -> None:
    patch = json.dumps([{"op": "replace", "path": "/webhooks/0/rules/0/apiGroups", "value": ["*"]}])
    answer = installed.cluster.kubectl(
        *("patch", "validatingwebhookconfiguration", "dra-accelerators-controller", "--type=json", "-p", patch),
        *("--dry-run=server", f"--as=system:serviceaccount:{NAMESPACE}:controller"),
        check=False,
        merge=True,
    )
    assert "Forbidden" in answer or "forbidden" in answer, answer


@pytest.mark.prove
def test_certificates_and_their_ca_are_replaced_without_a_rejected_request(installed: Installed) -> None:
    """A playbook run rotates the CA under load. With failure policy Fail, both webhooks are called for each request."""
    cluster, right = installed.cluster, settings_of("ResourceClaim", "v1", DRIVER, 50)
    first, second = cluster.nodes()
    before = trusted(cluster)
    installed.change(webhook_failure_policy="Fail", certificate_lifetime=30)
    done = threading.Event()
    failures: list[BaseException] = []

    def rotate() -> None:
        try:
            installed.change(webhook_failure_policy="Fail", certificate_lifetime=30, authority_rotate=True)
        except BaseException as error:  # noqa: BLE001  reported by the test
            failures.append(error)
        finally:
            done.set()

    try:
        cluster.wait("both answer", lambda: KEPT in answer_to(cluster, right), timeout=90)
        thread = threading.Thread(target=rotate)
        thread.start()
        seen: dict[str, set[str]] = {first: set(), second: set()}
        refused: list[str] = []
        deadline = time.monotonic() + 600
        while not done.is_set() or len(seen[first]) < 3 or len(seen[second]) < 3:
            assert time.monotonic() < deadline, {name: len(found) for name, found in seen.items()}
            answer = answer_to(cluster, right)
            refused += [] if KEPT in answer else [answer]
            for node in (first, second):
                seen[node].add(served(cluster, node))
        thread.join()
        assert not failures, failures
        assert not refused, refused
        assert "" not in seen[first] | seen[second]
        assert trusted(cluster) not in ("", before)
        (bundle,) = trusted_by_server(cluster)
        assert base64.b64decode(bundle).count(b"BEGIN CERTIFICATE") == 2, "the previous CA is still trusted"
    finally:
        installed.change()


@pytest.mark.prove
def test_removed_controller_leaves_nothing(installed: Installed) -> None:
    cluster = installed.cluster
    assert cluster.footprint() != installed.before
    absent = ("controller.yml", "-e", "dra_controller_state=absent")
    recap = cluster.playbook(*absent, inventory=installed.inventory)
    assert not recap.failed, recap.output
    after = cluster.footprint()
    changed = {key: (installed.before.get(key), after.get(key)) for key in installed.before.keys() | after.keys()}
    # The node driver keeps the virtual environment. After a stop it publishes new slices, and systemd creates its
    # directories again. The distribution's own programs keep a backup of the user list.
    kept = (
        "ResourceSlice /",
        "/opt/dra-accelerators/",
        f"-{DRIVER_UNIT}-",
        *("/etc/" + name for name in ("passwd-", "shadow-", "group-", "gshadow-")),
    )
    assert {
        key: both for key, both in changed.items() if both[0] != both[1] and not any(part in key for part in kept)
    } == {}
    again = cluster.playbook(*absent, inventory=installed.inventory)
    assert not again.failed and not again.changed, again.output
