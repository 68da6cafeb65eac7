# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a driver that is killed, starts slowly, resets a GPU, or cannot read a claim, while other claims are created
and deleted.

Every claim ends in the state of its kubelet's last call, and no claim waits for another one. The property tests of the
same are in tests/unit/dra_driver. These tests run the installed driver with a real kubelet.
"""

from __future__ import annotations

import base64
import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER_UNIT, PLUGIN_DIRECTORY, Cluster
from tests.cluster.killer import CONFIGURATION, PYTHON, RELEASE, Killer
from tests.cluster.manifests import claim, dynamic, pod
from tests.cluster.test_55_faults import on, taints
from tests.cluster.test_56_health import tolerant
from tests.cluster.test_59_manual_changes import boards, reported_resets, resetting

__all__ = ["resetting"]
SMALL = dynamic("1g.10gb")
LAUNCHER, DROP_IN = "/run/dra-accelerators-changed.py", f"/run/systemd/system/{DRIVER_UNIT}.d/changed.conf"
#: Starts the driver after the lines of a test.
START = "\nimport sys\nfrom dra_driver import cli\nsys.exit(cli.main(sys.argv[1:]))\n"
GO = "/run/dra-accelerators-go"
SLOW_START = f"""
import asyncio, pathlib
from dra_driver.supervisors import recovery

clean_up = recovery.Recovery._clean_up

async def slow(self, current):
    while not pathlib.Path("{GO}").exists():
        await asyncio.sleep(0.1)
    return await clean_up(self, current)

recovery.Recovery._clean_up = slow
"""
SHORT_INTERVAL = """
from dra_driver.supervisors import reconciler

reconciler.RECONCILE_SECONDS = 5.0
"""


@pytest.fixture()
def node(clean: Cluster) -> Iterator[str]:
    """Yield the second node, all of whose GPUs are dynamic; clear all faults afterwards."""
    name = clean.nodes()[1]
    clean.wait("all devices are published", lambda: len(clean.devices(name)) == 8 * 26)
    yield name
    clean.heal(name)
    clean.wait("no device is tainted", lambda: not taints(clean, name))


@pytest.fixture()
def changed_driver(clean: Cluster, node: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that restarts the node's driver after some lines of Python; restore the installed driver
    afterwards.
    """

    def start(lines: str) -> None:
        launcher = base64.b64encode((lines + START).encode()).decode()
        command = f"{PYTHON} {LAUNCHER} node --config {CONFIGURATION}"
        unit = f"[Service]\\nExecStart=\\nExecStart={command}\\nEnvironment=PYTHONPATH={RELEASE}\\nType=exec\\nWatchdogSec=0\\n"
        clean.shell(
            node,
            f"echo {launcher} | base64 -d > {LAUNCHER} && mkdir -p $(dirname {DROP_IN}) && printf '{unit}' > {DROP_IN} && "
            f"systemctl daemon-reload && systemctl restart {DRIVER_UNIT}",
        )

    yield start
    clean.shell(node, f"rm -f {DROP_IN} {LAUNCHER} {GO} && systemctl daemon-reload")
    clean.restart_driver(node)


def users(cluster: Cluster, node: str, names: list[str]) -> list[dict[str, Any]]:
    """Return a claim for a partition and its pod, for each name."""
    return [
        each
        for name in names
        for each in (claim(name, device_class="mig.nvidia.com", expression=SMALL), pod(name, name, node=node))
    ]


def delete(cluster: Cluster, *names: str, force: bool = False) -> None:
    """Delete pods and their claims without waiting."""
    options = ("--force", "--grace-period=0") if force else ("--wait=false",)
    cluster.kubectl("delete", "pods", *names, *options)
    cluster.kubectl("delete", "resourceclaims", *names, "--wait=false")


@pytest.mark.parametrize("stage", ["partition-created:2", "cdi-written:2", "recorded-preparing:3"])
def test_driver_killed_among_claims_every_claim_ends_as_wanted(clean: Cluster, node: str, stage: str) -> None:
    """Six claims at once: half of the pods are deleted while the driver is down, and three more are created while it
    starts.
    """
    killer = Killer(clean, node)
    stay, leave, late = ([f"{word}-{number}" for number in range(3)] for word in ("stays", "leaves", "late"))
    killer.arm(stage)
    clean.kubectl("apply", "-f", "-", text=manifest(users(clean, node, [*stay, *leave])))
    killer.wait_killed()
    delete(clean, *leave)
    clean.kubectl("apply", "-f", "-", text=manifest(users(clean, node, late)))
    killer.disarm()
    clean.wait_running(*stay, *late, timeout=300)
    clean.wait("the other pods are deleted", lambda: len(clean.get("pods", "-n", "default")["items"]) == 6, timeout=180)
    expected = {clean.uid(name): "prepared" for name in (*stay, *late)}
    clean.wait("each claim is as wanted", lambda: clean.recorded(node) == expected)
    # Each pod has one partition, and nothing else is left.
    logs = {clean.wait("its list", lambda name=name: clean.log(name)).splitlines()[1] for name in (*stay, *late)}
    assert len(logs) == 6 and killer.made() == 6 and len(clean.cdi_files(node)) == 6
    delete(clean, *stay, *late)
    clean.wait("nothing is left", lambda: killer.made() == 0 and not clean.cdi_files(node) and not clean.recorded(node))


def manifest(documents: list[dict[str, Any]]) -> str:
    """Return the documents as one List, so that all are created at once."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})


def test_prepare_that_waits_for_a_slow_start_does_not_outlive_its_pod(
    clean: Cluster, node: str, changed_driver: Callable[[str], None]
) -> None:
    changed_driver(SLOW_START)
    clean.wait_registered(node)
    wanted = claim("stale", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-3", "7g.80gb"))
    clean.apply(wanted, pod("stale", "stale", node=node))
    clean.wait(
        "a call of the kubelet has ended without an answer",
        lambda: "FailedPrepareDynamicResources" in clean.kubectl("get", "events", "-o", "yaml"),
        timeout=180,
    )
    uid = clean.uid("stale")
    delete(clean, "stale", force=True)
    clean.wait("the claim is deleted", lambda: not clean.get("resourceclaims")["items"], timeout=60)
    clean.run(node, "touch", GO)
    clean.wait("the driver is ready", lambda: clean.status(node)["ready"])
    # The whole GPU can be claimed at once.
    clean.apply(
        claim("next", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-3", "7g.80gb")),
        pod("next", "next", node=node),
    )
    clean.wait_running("next", timeout=60)
    assert clean.recorded(node) == {clean.uid("next"): "prepared"} and uid not in clean.recorded(node)


@pytest.fixture()
def unreadable(clean: Cluster, node: str) -> Iterator[Callable[[], None]]:
    """Create a namespace; yield a function that limits the driver's permission to read claims to the default
    namespace.
    """
    name = f"dra-accelerators-driver-{node}"
    binding = clean.get("clusterrolebinding", name)
    role = clean.get("clusterrole", binding["roleRef"]["name"])
    rest = copy.deepcopy(role)
    rest["metadata"] = {"name": "without-claims"}
    rest["rules"] = [each for each in role["rules"] if each["resources"] != ["resourceclaims"]]
    assert len(rest["rules"]) == len(role["rules"]) - 1

    def bind(kind: str, bound: str, **metadata: str) -> dict[str, Any]:
        return {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": bound, **metadata},
            "roleRef": {
                **binding["roleRef"],
                "name": bound if kind == "ClusterRoleBinding" else role["metadata"]["name"],
            },
            "subjects": binding["subjects"],
        }

    def forbid() -> None:
        clean.apply(
            rest, bind("ClusterRoleBinding", "without-claims"), bind("RoleBinding", "claims", namespace="default")
        )
        clean.kubectl("delete", "clusterrolebinding", name)

    clean.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "unreadable"}})
    yield forbid
    for field in ("resourceVersion", "uid", "creationTimestamp", "managedFields"):
        binding["metadata"].pop(field, None)
    clean.kubectl("apply", "-f", "-", text=json.dumps(binding))
    clean.kubectl("delete", "clusterrolebinding,clusterrole", "without-claims", "--ignore-not-found")
    clean.kubectl("delete", "rolebinding", "claims", "-n", "default", "--ignore-not-found")
    clean.run(node, "systemctl", "start", "kubelet")
    clean.kubectl("delete", "namespace", "unreadable", "--timeout=180s", timeout=200)


def test_claim_that_cannot_be_read_keeps_no_other_from_being_undone(
    clean: Cluster, node: str, changed_driver: Callable[[str], None], unreadable: Callable[[], None]
) -> None:
    """The API server always denies the first claim in the driver's store. The kubelet is stopped, so that no call
    unprepares a claim.
    """
    documents = users(clean, node, ["denied"])
    for each in documents:
        each["metadata"]["namespace"] = "unreadable"
    clean.apply(*documents)
    clean.wait_running("denied", namespace="unreadable")
    clean.apply(*users(clean, node, ["gone", "stays"]))
    clean.wait_running("gone", "stays")
    denied = str(clean.get("resourceclaim", "denied", "-n", "unreadable")["metadata"]["uid"])
    gone, stays = clean.uid("gone"), clean.uid("stays")
    unreadable()
    changed_driver(SHORT_INTERVAL)
    clean.wait("the driver reports the claim", lambda: clean.said(node, "unreadable/denied", "could not be compared"))
    clean.run(node, "systemctl", "stop", "kubelet")
    delete(clean, "gone", force=True)
    clean.wait("the deleted claim is released", lambda: gone not in clean.recorded(node), timeout=60)
    assert clean.recorded(node) == {denied: "prepared", stays: "prepared"} and len(clean.cdi_files(node)) == 2
    clean.wait("its partition is destroyed", lambda: len(clean.instances(node)) == 2)


def test_claim_half_prepared_at_a_start_during_a_layout_run_is_undone(
    clean: Cluster, node: str, changed_driver: Callable[[str], None]
) -> None:
    """The locks of all devices are held for longer than the driver waits for them. The pod and its claim are already
    deleted.
    """
    killer = Killer(clean, node)
    killer.arm("partition-created")
    documents = users(clean, node, ["half"])
    clean.apply(*documents)
    killer.wait_killed()
    assert killer.made() == 1
    clean.run(node, "systemctl", "stop", "kubelet")
    hold = (
        "import fcntl, glob, time; "
        f"files = [open(each, 'r+') for each in glob.glob('{PLUGIN_DIRECTORY}/locks/GPU-*')]; "
        "[fcntl.flock(each, fcntl.LOCK_EX) for each in files]; print(len(files), flush=True); time.sleep(600)"
    )
    clean.run(node, "systemd-run", "--unit=layout-run", PYTHON, "-c", hold)
    try:
        delete(clean, "half", force=True)
        killer.disarm()
        clean.wait("the undo has failed", lambda: clean.said(node, "recovery: undo failed"), timeout=120)
        changed_driver(SHORT_INTERVAL)
        clean.wait("the cleanup has failed again", lambda: clean.said(node, "recovery: undo failed") == 2, timeout=120)
        assert killer.made() == 1
    finally:
        clean.shell(node, "systemctl stop layout-run")
    try:
        # The kubelet does not call: the driver unprepares the claim without a call.
        clean.wait(
            "the claim is released", lambda: not clean.recorded(node) and killer.made() == 0, timeout=700, interval=5
        )
    finally:
        clean.run(node, "systemctl", "start", "kubelet")


@pytest.mark.parametrize("pause", [0.0, 1.0, 2.5, 4.0])
def test_claim_prepared_around_a_reset_keeps_its_partition(clean: Cluster, resetting: str, pause: float) -> None:
    """The GPU requests a reset while a tolerant claim is prepared: the reset takes place before it, or after its end."""
    node = resetting
    uuid = boards(clean, node)[4]["uuid"]
    earlier = reported_resets(clean, node)
    documents = [tolerant("tolerant", on(clean, node, "gpu-4")), pod("tolerant", "tolerant", node=node)]
    clean.run(node, "accelerator-simulator", "fault", "4", "recovery-action", "4")
    time.sleep(pause)
    clean.apply(*documents)
    clean.wait_running("tolerant")
    (before,) = clean.instances(node)
    # Either the reset is complete, or it is due and waits for the claim.
    time.sleep(25)
    (after,) = clean.instances(node)
    assert before == after, "the GPU was reset under the claim"
    listed = clean.kubectl("exec", "tolerant", "--", "nvidia-smi", "-L")
    assert "MIG 1g.10gb" in listed, listed
    clean.delete(*reversed(documents))
    clean.wait("the GPU was reset", lambda: boards(clean, node)[4]["recovery_action"] == 0, timeout=90)
    clean.wait("an Event reports the reset", lambda: uuid in reported_resets(clean, node) | earlier)
