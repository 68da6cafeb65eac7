# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Install another release and return to the present one while pods run, start, and end: claims of every kind stay
prepared, no pod is interrupted, and each release unprepares the other's claims.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import EXAMPLES, Cluster, copy_of_the_collection
from tests.cluster.machines import drivers
from tests.cluster.manifests import claim, dynamic, pod, static
from tests.cluster.streams import failures, streaming

NEXT = "99.0.0"
# One claim of each kind, in addition to the test's own claims.
KINDS = ("device-settings", "mps", "mps-on-mig", "shares", "time-slicing", "vfio", "prepared-before-binding")
VERSION = re.compile(r'(?m)^(__version__ = "|version: )[0-9][^"\n]*')


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a collections tree with this collection as a later version."""
    tree = tmp_path_factory.mktemp("next")
    copy = copy_of_the_collection(tree)
    for name in ("galaxy.yml", "roles/dra_driver/files/dra_driver/__init__.py"):
        text, count = VERSION.subn(rf"\g<1>{NEXT}", (copy / name).read_text(encoding="utf-8"))
        assert count == 1, name
        (copy / name).write_text(text, encoding="utf-8")
    return tree


def versions(cluster: Cluster) -> set[str]:
    """Return the versions of the running drivers."""
    return {str(cluster.status(node)["version"]) for node in cluster.nodes()}


def layout(node: str) -> list[str]:
    """Return the arguments for a layout of the second node with devices for every kind of claim."""
    rules = [
        {"match": {"index": 7}, "mode": "whole", "shares": 4},
        {"match": {"index": [5, 6]}, "mode": "dynamic", "passthrough": True},
        {"match": {"index": 4}, "mode": "dynamic", "prepared_before_binding": True},
        {"match": {}, "mode": "dynamic"},
    ]
    fleet = yaml.safe_load((EXAMPLES / "fleet.yml").read_text("utf-8"))["accelerator_layouts"]
    return ["-e", json.dumps({"accelerator_layouts": [{"hosts": node, "layout": rules}, *fleet]})]


def state(cluster: Cluster) -> dict[str, Any]:
    """Return the state that an update must not change: partitions, files, records, programs, settings, slices, and
    containers.
    """
    pods, nodes = cluster.get("pods", "-n", "default")["items"], cluster.nodes()
    shown = ("nvidia-smi", "--query-gpu=uuid,power.limit,compute_mode,clocks.gr", "--format=csv,noheader")
    return {
        "instances": {node: cluster.instances(node) for node in nodes},
        "files": {node: cluster.cdi_files(node) for node in nodes},
        "records": {node: cluster.recorded(node) for node in nodes},
        "programs": {node: cluster.companions(node) for node in nodes},
        "settings": {node: cluster.run(node, *shown) for node in nodes},
        "machines": {node: drivers(cluster, node) for node in nodes},
        "slices": [(item["metadata"]["uid"], item["metadata"]["resourceVersion"]) for item in cluster.slices()],
        "containers": sorted(each["containerID"] for item in pods for each in item["status"]["containerStatuses"]),
    }


def change(cluster: Cluster, version: str, tree: Path | None = None) -> None:
    """Install a release under running pods; assert that it runs, has not disturbed them, and that a second run changes
    nothing.
    """
    first, second = cluster.nodes()
    before, pids = state(cluster), [cluster.driver_pid(node) for node in (first, second)]
    with streaming(cluster, first, "one") as one, streaming(cluster, second, "other") as other:
        recap = cluster.playbook("site.yml", *layout(second), tree=tree)
    assert not recap.failed and recap.changed, recap.output
    assert versions(cluster) == {version}
    assert not set(pids) & {cluster.driver_pid(node) for node in (first, second)}
    assert one.rounds and other.rounds and failures(cluster) == [], "a claim failed during the change of the release"
    for node in (first, second):
        active = cluster.run(node, "systemctl", "is-active", "dra-accelerators-relief.service", check=False)
        assert active.strip() == "inactive", f"on {node}"
    cluster.wait("only the previous state", lambda: state(cluster) == before or None)
    again = cluster.playbook("site.yml", *layout(second), tree=tree)
    assert (again.failed, again.changed) == (0, 0), again.output


@pytest.fixture()
def every_kind(clean: Cluster, controller: None) -> Iterator[list[str]]:
    """Create the claim and pod of each kind from the examples; yield the pods' names."""
    second = clean.nodes()[1]
    done = clean.playbook("site.yml", *layout(second), "--limit", second, "--tags", "layout")
    assert not done.failed, done.output
    # Events of earlier tests exist for an hour.
    clean.kubectl("delete", "events", "--all", "-n", "default")
    clean.wait("GPUs are offered to virtual machines", lambda: "gpu-vfio-5" in clean.devices(second))
    for name in KINDS:
        clean.apply(EXAMPLES / f"{name}.yaml")
    pods = [item["metadata"]["name"] for item in clean.get("pods", "-n", "default")["items"]]
    assert len(pods) >= len(KINDS)
    clean.wait_running(*pods)
    yield pods
    for name in KINDS:
        clean.delete(EXAMPLES / f"{name}.yaml")
    back = clean.playbook("site.yml", "--limit", second, "--tags", "layout")
    assert not back.failed, back.output


def test_an_upgrade_and_a_downgrade_with_prepared_claims(
    clean: Cluster, every_kind: list[str], following: Path
) -> None:
    first, second = clean.nodes()
    (present,) = versions(clean)
    assert present != NEXT
    clean.apply(
        claim("static", device_class="mig.nvidia.com", expression=static("3g.40gb")),
        pod("static", "static", node=first),
        claim("dynamic", device_class="mig.nvidia.com", expression=dynamic("2g.20gb")),
        pod("dynamic", "dynamic", node=second),
        claim("whole", device_class="gpu.nvidia.com"),
        pod("whole", "whole", node=second),
    )
    clean.wait_running("static", "dynamic", "whole")

    change(clean, NEXT, following)
    clean.apply(
        claim("newer", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("newer", "newer", node=second)
    )
    clean.wait_running("newer")
    ended = clean.uid("dynamic")
    clean.kubectl("delete", "pod,resourceclaim", "dynamic", "--timeout=240s", timeout=300)
    clean.wait("the newer release removes the claim of the older one", lambda: ended not in clean.recorded(second))
    assert "1g.10gb" in [line.split()[1] for line in clean.instances(second)]

    change(clean, present)
    clean.wait_running("static", "whole", "newer", *every_kind)
    clean.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    for node in (first, second):
        clean.wait("the older release removes the claims of the newer one", lambda node=node: not clean.recorded(node))
        assert clean.cdi_files(node) == []
    assert clean.instances(second) == []
