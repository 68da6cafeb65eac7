# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Upgrade the driver of two GPU nodes with running pods with the upgrade playbook, one node after the other, and roll
back a driver that does not load.

The packages are simulated by gpu_host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, Recap
from tests.prove.gpu_host import (
    DRIVERS,
    NEWER,
    NOT_LOADED,
    OLDER,
    SERVER,
    loaded,
    make_sources,
    published_version,
    semantic,
    serve_on,
    world_without_drivers,
)
from tests.prove.test_gpu_host import pods_of, rules, see, workload

WORLD = os.environ.get("DRA_ACCELERATORS_UPGRADE_WORLD", "upgrade")


@pytest.fixture(scope="module")
def gpus() -> Iterator[Cluster]:
    """Yield two nodes with eight GPUs each and no driver."""
    with world_without_drivers(WORLD, nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def first(gpus: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Recap:
    """Run the site playbook for the first time with the driver enabled, and start a pod with a GPU on each node."""
    sources = make_sources(tmp_path_factory.mktemp("packages"), (OLDER, NEWER, NOT_LOADED))
    for name in gpus.nodes():
        serve_on(gpus, name, sources)
    gpus.variables = {
        "accelerator_nvidia_driver_enabled": True,
        "nvidia_driver_version": OLDER,
        "nvidia_driver_repository": f"{SERVER}/{DRIVERS}",
        "nvidia_driver_repository_fingerprints": [sources.fingerprint],
    }
    done = gpus.playbook("site.yml", check=False)
    assert not done.failed, done.output
    for name in gpus.nodes():
        template, deployment = workload(name, 1)
        deployment["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": name}
        gpus.apply(template, deployment)
    return done


def upgrade(gpus: Cluster, version: str, *words: str, **variables: Any) -> Recap:
    said = json.dumps({"nvidia_driver_version": version, "accelerator_upgrade_timeout": 300, **variables})
    return gpus.playbook("upgrade.yml", "-e", said, *words, check=False)


def test_upgrade_without_consent_names_the_pods_before_any_step(gpus: Cluster, first: Recap) -> None:
    assert not first.failed
    before = {name: see(gpus, name, 1, OLDER) for name in gpus.nodes()}
    pods = [pod for name in gpus.nodes() for pod in pods_of(gpus, name).values()]
    answer = upgrade(gpus, NEWER, "--check")
    assert not answer.failed and NEWER in answer.output, answer.output
    assert all(f"pod default/{pod} is evicted" in answer.output for pod in pods), answer.output
    silent = upgrade(gpus, NEWER)
    assert silent.failed and "Nothing was changed" in silent.output, silent.output
    assert {name: set(pods_of(gpus, name)) for name in gpus.nodes()} == before
    assert [loaded(gpus, name) for name in gpus.nodes()] == [OLDER] * 2 and rules(gpus) == []


def test_nodes_are_upgraded_in_sequence_and_their_pods_run_again(gpus: Cluster, first: Recap) -> None:
    assert not first.failed
    before = {name: see(gpus, name, 1, OLDER) for name in gpus.nodes()}
    done = upgrade(gpus, NEWER, accelerator_upgrade_evict=True)
    assert not done.failed, done.output
    one, other = gpus.nodes()
    assert f"Starting: {one}. Not started yet: {other}" in done.output
    for name in gpus.nodes():
        assert loaded(gpus, name) == NEWER and published_version(gpus, name) == {semantic(NEWER)}
        see(gpus, name, 1, NEWER, other_than=before[name])
    assert rules(gpus) == []
    again = upgrade(gpus, NEWER, accelerator_upgrade_evict=True)
    assert (again.failed, again.changed) == (0, 0), again.output


def test_driver_that_does_not_load_is_rolled_back_and_the_next_node_is_not_started(gpus: Cluster, first: Recap) -> None:
    assert not first.failed
    one, other = gpus.nodes()
    before = {name: see(gpus, name, 1, NEWER) for name in gpus.nodes()}
    failed = upgrade(gpus, NOT_LOADED, accelerator_upgrade_evict=True)
    assert failed.failed and f"Not started: {other}" in failed.output, failed.output
    assert [loaded(gpus, name) for name in gpus.nodes()] == [NEWER] * 2 and rules(gpus) == []
    assert set(pods_of(gpus, other)) == before[other], "a pod was evicted from a node that was not started"
    see(gpus, one, 1, NEWER, other_than=before[one])
