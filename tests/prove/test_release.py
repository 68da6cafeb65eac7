# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Another release comes and goes while pods run: their claims stay prepared, and either release ends what the other made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, copy_of_the_collection
from tests.cluster.manifests import claim, dynamic, pod, static

NEXT = "99.0.0"
VERSION = re.compile(r'(?m)^(__version__ = "|version: )[0-9][^"\n]*')


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of collections that holds this one as a later version."""
    tree = tmp_path_factory.mktemp("next")
    copy = copy_of_the_collection(tree)
    for name in ("galaxy.yml", "roles/dra_driver/files/dra_driver/__init__.py"):
        text, count = VERSION.subn(rf"\g<1>{NEXT}", (copy / name).read_text(encoding="utf-8"))
        assert count == 1, name
        (copy / name).write_text(text, encoding="utf-8")
    return tree


def versions(cluster: Cluster) -> set[str]:
    """The versions of the drivers that run now."""
    return {str(cluster.status(node)["version"]) for node in cluster.nodes()}


def state(cluster: Cluster) -> dict[str, Any]:
    """What a change of release leaves alone: partitions, files, records, slices and the pods' containers."""
    pods = cluster.get("pods", "-n", "default")["items"]
    return {
        "instances": {node: cluster.instances(node) for node in cluster.nodes()},
        "files": {node: cluster.cdi_files(node) for node in cluster.nodes()},
        "records": {node: cluster.recorded(node) for node in cluster.nodes()},
        "slices": [(item["metadata"]["uid"], item["spec"]) for item in cluster.slices()],
        "containers": sorted(each["containerID"] for item in pods for each in item["status"]["containerStatuses"]),
    }


def change(cluster: Cluster, version: str, tree: Path | None = None) -> None:
    """Install a release under running pods, see that it runs and has left them alone, and that its second run changes nothing."""
    before, pids = state(cluster), [cluster.driver_pid(node) for node in cluster.nodes()]
    recap = cluster.playbook("site.yml", tree=tree)
    assert not recap.failed and recap.changed, recap.output
    assert versions(cluster) == {version}
    assert not set(pids) & {cluster.driver_pid(node) for node in cluster.nodes()}
    assert state(cluster) == before
    again = cluster.playbook("site.yml", tree=tree)
    assert (again.failed, again.changed) == (0, 0), again.output


def test_an_upgrade_and_a_downgrade_with_prepared_claims(clean: Cluster, following: Path) -> None:
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
    clean.wait("the newer release ends what the older one made", lambda: ended not in clean.recorded(second))
    assert [line.split()[1] for line in clean.instances(second)] == ["1g.10gb"]

    change(clean, present)
    clean.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    for node in (first, second):
        clean.wait("the older release ends what the newer one made", lambda node=node: not clean.recorded(node))
        assert clean.cdi_files(node) == []
    assert clean.instances(second) == []
