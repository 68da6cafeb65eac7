# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a GPU node without a driver: one run of the site playbook installs the driver, fabric manager, toolkit, and
settings, and pods get claims.

The driver is then replaced, also while pods use GPUs, rolled back if it does not load, and removed with everything
else. The packages are simulated by gpu_host, in signed repositories on the node.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER_UNIT, Cluster, Recap
from tests.cluster.manifests import claim, deployment, pod
from tests.prove.gpu_host import (
    DRIVERS,
    NEWER,
    NOT_LOADED,
    OLDER,
    SERVER,
    Sources,
    boot_id,
    differences,
    doors,
    everything,
    loaded,
    make_sources,
    power_limit,
    published_version,
    runs,
    sees_all_doors_open,
    semantic,
    serve_on,
    versions,
    world_without_drivers,
)

WORLD = os.environ.get("DRA_ACCELERATORS_GPU_HOST_WORLD", "gpu-host")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, gpus: Cluster, node: str) -> Sources:
    """Return the packages that the node serves to itself."""
    found = make_sources(tmp_path_factory.mktemp("packages"), (OLDER, NEWER, NOT_LOADED), parts=True)
    serve_on(gpus, node, found)
    return found


@pytest.fixture(scope="module")
def gpus() -> Iterator[Cluster]:
    """Yield one node with eight GPUs and no driver."""
    with world_without_drivers(WORLD) as made:
        yield made


@pytest.fixture(scope="module")
def node(gpus: Cluster) -> str:
    """Return the node's name."""
    (found,) = gpus.nodes()
    return found


@pytest.fixture(scope="module")
def before(gpus: Cluster, node: str, sources: Sources) -> dict[str, str]:
    """Return all files, objects, and packages before the first run, without the contents of the distribution's
    packages.
    """
    return everything(gpus, node)


@pytest.fixture(scope="module")
def first(gpus: Cluster, sources: Sources, before: dict[str, str]) -> Recap:
    """Run the site playbook for the first time with all optional parts enabled."""
    gpus.variables = doors(sources)
    return gpus.playbook("site.yml", check=False)


def test_node_without_a_driver_is_rejected_by_name(gpus: Cluster, node: str) -> None:
    refused = gpus.playbook("site.yml", "--tags", "preflight", check=False)
    assert refused.failed and "NVIDIA driver" in refused.output, refused.output
    assert loaded(gpus, node) == ""


def test_check_mode_reports_the_packages_and_changes_nothing(
    gpus: Cluster, node: str, sources: Sources, before: dict[str, str]
) -> None:
    arguments = {
        "accelerator_nvidia_driver_enabled": True,
        "nvidia_driver_version": OLDER,
        "nvidia_driver_repository": f"{SERVER}/{DRIVERS}",
        "nvidia_driver_repository_fingerprints": [sources.fingerprint],
    }
    answer = gpus.playbook("site.yml", "--check", "--diff", "-e", json.dumps(arguments))
    assert not answer.failed and answer.changed and OLDER in answer.output, answer.output
    assert "Check mode can show the later steps" in answer.output, answer.output
    assert everything(gpus, node) == before


def test_site_installs_driver_fabric_manager_toolkit_and_settings_on_a_bare_node(
    gpus: Cluster, node: str, sources: Sources, first: Recap
) -> None:
    assert not first.failed, first.output
    sees_all_doors_open(gpus, node, sources)
    runs(gpus, "on-the-first-driver")
    gpus.wait(
        "the driver gets the container edits from the toolkit",
        lambda: (
            "container edits come from /usr/bin/nvidia-ctk"
            in gpus.run(node, "journalctl", "-u", DRIVER_UNIT, "--no-pager")
        ),
    )
    runs(gpus, "by-the-toolkit")


def test_second_run_changes_nothing(gpus: Cluster, node: str, first: Recap) -> None:
    assert not first.failed
    process, boot = gpus.driver_pid(node), boot_id(gpus, node)
    again = gpus.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output
    assert (gpus.driver_pid(node), boot_id(gpus, node)) == (process, boot)


def test_reboot_of_the_node_restores_everything(gpus: Cluster, node: str, first: Recap) -> None:
    assert not first.failed
    boot, instances = boot_id(gpus, node), gpus.instances(node)
    gpus.world("reboot", node)
    gpus.wait_registered(node)
    assert boot_id(gpus, node) != boot
    assert (loaded(gpus, node), power_limit(gpus, node)) == (OLDER, 450)
    assert gpus.instances(node) == instances and instances
    runs(gpus, "after-the-start")


def test_a_newer_driver_is_not_installed_under_pods_that_have_gpus(gpus: Cluster, node: str, first: Recap) -> None:
    assert not first.failed
    wanted = claim("holds-a-gpu", device_class="gpu.nvidia.com")
    user = pod("holds-a-gpu", "holds-a-gpu")
    gpus.apply(wanted, user)
    gpus.wait_running("holds-a-gpu")
    refused = gpus.playbook("site.yml", "--tags", "vendor_driver", "-e", f"nvidia_driver_version={NEWER}", check=False)
    assert refused.failed and "holds-a-gpu" in refused.output, refused.output
    assert loaded(gpus, node) == OLDER
    gpus.delete(user, wanted)
    gpus.wait("the claim is released", lambda: not gpus.cdi_files(node))


def test_newer_driver_is_installed_without_a_reboot_and_downgraded(gpus: Cluster, node: str, first: Recap) -> None:
    assert not first.failed
    process, boot = gpus.driver_pid(node), boot_id(gpus, node)
    words = ("-e", f"nvidia_driver_version={NEWER}")
    done = gpus.playbook("site.yml", *words)
    assert not done.failed and loaded(gpus, node) == NEWER, done.output
    assert versions(gpus, node, "nvidia-fabricmanager") == {"nvidia-fabricmanager": f"{NEWER}-1"}
    assert gpus.driver_pid(node) != process and boot_id(gpus, node) == boot
    gpus.wait("the newer version is published", lambda: published_version(gpus, node) == {semantic(NEWER)})
    assert power_limit(gpus, node) == 450
    runs(gpus, "on-the-newer-driver")
    again = gpus.playbook("site.yml", *words)
    assert (again.failed, again.changed) == (0, 0), again.output
    back = gpus.playbook("site.yml", "-e", f"nvidia_driver_version={OLDER}")
    assert not back.failed and loaded(gpus, node) == OLDER, back.output
    runs(gpus, "on-the-former-driver")


def test_driver_that_does_not_load_is_rolled_back_automatically(gpus: Cluster, node: str, first: Recap) -> None:
    assert not first.failed
    failed = gpus.playbook("site.yml", "-e", f"nvidia_driver_version={NOT_LOADED}", check=False)
    assert failed.failed and NOT_LOADED in failed.output, failed.output
    assert loaded(gpus, node) == OLDER
    assert versions(gpus, node, "nvidia-fabricmanager") == {"nvidia-fabricmanager": f"{OLDER}-1"}
    gpus.wait_registered(node)
    runs(gpus, "after-one-that-does-not-load")


# An upgrade with claims on the node

SHOW_DRIVER = (
    "nvidia-smi --query-gpu=driver_version --format=csv,noheader; trap 'exit 0' TERM; while :; do sleep 1; done"
)


def workload(name: str, replicas: int) -> list[dict[str, Any]]:
    """Return a Deployment whose pods each use a whole GPU with their own claim, and print the driver version that they
    see.
    """
    return deployment(name, replicas, {"deviceClassName": "gpu.nvidia.com"}, command=["sh", "-c", SHOW_DRIVER])


def pods_of(gpus: Cluster, app: str) -> dict[str, str]:
    """Return the names of a Deployment's pods that are not terminating, by UID."""
    items = gpus.get("pods", "-n", "default", "-l", f"app={app}")["items"]
    return {
        each["metadata"]["uid"]: each["metadata"]["name"]
        for each in items
        if not each["metadata"].get("deletionTimestamp")
    }


def see(
    gpus: Cluster, app: str, replicas: int, version: str, *, other_than: AbstractSet[str] = frozenset()
) -> set[str]:
    """Wait until all pods of a Deployment run, none of them in ``other_than``, and print this driver version; return
    their UIDs.
    """

    def running() -> dict[str, str]:
        found = pods_of(gpus, app)
        return found if len(found) == replicas and not other_than & set(found) else {}

    found = gpus.wait(f"{replicas} new pods of {app}", running, timeout=180)
    gpus.wait_running(*found.values())
    for name in found.values():
        assert gpus.wait(f"{name} saying its driver", lambda name=name: gpus.log(name), timeout=60).split() == [version]
    return set(found)


def quiet(gpus: Cluster, name: str) -> tuple[str, int]:
    """Return the UID of a pod and the restart count of its container."""
    found = gpus.pod(name)
    return found["metadata"]["uid"], found["status"]["containerStatuses"][0]["restartCount"]


@pytest.fixture(scope="module")
def training(gpus: Cluster, first: Recap) -> tuple[str, int]:
    """Create a Deployment with claims and a pod without one that must not be affected. The test of the removal deletes
    both.
    """
    assert not first.failed
    objects = [*workload("training", 2), pod("beside")]
    gpus.apply(*objects)
    gpus.wait_running("beside")
    return quiet(gpus, "beside")


def drains(version: str, word: str = "") -> tuple[str, ...]:
    consent = (
        ("-e", json.dumps({"nvidia_driver_drain": word == "true", "nvidia_driver_drain_timeout": 300})) if word else ()
    )
    return ("--tags", "vendor_driver", "-e", f"nvidia_driver_version={version}", *consent)


def rules(gpus: Cluster) -> list[str]:
    return [each["metadata"]["name"] for each in gpus.get("devicetaintrules")["items"]]


def test_driver_change_without_consent_names_the_pods_and_changes_nothing(
    gpus: Cluster, node: str, training: tuple[str, int]
) -> None:
    before = see(gpus, "training", 2, OLDER)
    names = sorted(pods_of(gpus, "training").values())
    process = gpus.driver_pid(node)
    refused = gpus.playbook("site.yml", *drains(NEWER), check=False)
    assert refused.failed and refused.changed == 0, refused.output
    assert all(f"default/{name}" in refused.output for name in names), refused.output
    assert "nvidia_driver_drain" in refused.output
    assert set(pods_of(gpus, "training")) == before and quiet(gpus, "beside") == training
    assert (loaded(gpus, node), gpus.driver_pid(node), rules(gpus)) == (OLDER, process, [])
    # With consent, check mode lists the pods to evict.
    answer = gpus.playbook("site.yml", "--check", "--diff", *drains(NEWER, "true"))
    assert not answer.failed and all(f"evict default/{name}" in answer.output for name in names), answer.output
    assert set(pods_of(gpus, "training")) == before and rules(gpus) == []


def test_driver_change_with_consent_evicts_pods_and_they_run_on_the_new_driver(
    gpus: Cluster, node: str, training: tuple[str, int]
) -> None:
    before = see(gpus, "training", 2, OLDER)
    boot = boot_id(gpus, node)
    done = gpus.playbook("site.yml", *drains(NEWER, "true"))
    assert not done.failed and loaded(gpus, node) == NEWER, done.output
    assert published_version(gpus, node) == {semantic(NEWER)}, (
        "the taint is removed only after the new version is published"
    )
    after = see(gpus, "training", 2, NEWER, other_than=before)
    assert quiet(gpus, "beside") == training, "a pod without a GPU was affected"
    assert rules(gpus) == [] and boot_id(gpus, node) == boot
    process = gpus.driver_pid(node)
    again = gpus.playbook("site.yml", *drains(NEWER, "true"))
    assert (again.failed, again.changed) == (0, 0), again.output
    assert set(pods_of(gpus, "training")) == after and gpus.driver_pid(node) == process


def test_driver_change_that_does_not_load_is_rolled_back_and_the_pods_run_again(
    gpus: Cluster, node: str, training: tuple[str, int]
) -> None:
    before = see(gpus, "training", 2, NEWER)
    failed = gpus.playbook("site.yml", *drains(NOT_LOADED, "true"), check=False)
    assert failed.failed and f"has the driver {NEWER} again" in failed.output, failed.output
    assert loaded(gpus, node) == NEWER and rules(gpus) == []
    gpus.wait_registered(node)
    see(gpus, "training", 2, NEWER, other_than=before)
    assert quiet(gpus, "beside") == training


def test_disruption_budget_that_blocks_eviction_is_named_and_the_drain_is_removed(
    gpus: Cluster, node: str, training: tuple[str, int]
) -> None:
    before = see(gpus, "training", 2, NEWER)
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "training", "namespace": "default"},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "training"}}},
    }
    gpus.apply(budget)
    try:
        words = ("-e", json.dumps({"nvidia_driver_drain": True, "nvidia_driver_drain_timeout": 10}))
        blocked = gpus.playbook("site.yml", *drains(OLDER), *words, check=False)
        assert blocked.failed and "disruption budget" in blocked.output, blocked.output
        assert set(pods_of(gpus, "training")) == before and (loaded(gpus, node), rules(gpus)) == (NEWER, [])
    finally:
        gpus.delete(budget)
    back = gpus.playbook("site.yml", *drains(OLDER, "true"))
    assert not back.failed and loaded(gpus, node) == OLDER, back.output
    see(gpus, "training", 2, OLDER, other_than=before)
    assert quiet(gpus, "beside") == training


def test_removal_restores_the_previous_state(gpus: Cluster, node: str, first: Recap, before: dict[str, str]) -> None:
    """The same files, API objects, and packages as before exist, and no others."""
    assert not first.failed
    arguments = ("-e", "accelerator_remove_reset_layout=true", "-e", "accelerator_remove_drivers=true")
    names = sorted(pods_of(gpus, "training").values())
    if names:
        refused = gpus.playbook("remove.yml", *arguments, check=False)
        assert refused.failed and all(f"default/{name}" in refused.output for name in names), refused.output
        gpus.delete(*workload("training", 2), pod("beside"))
        gpus.wait("no pod is left", lambda: not pods_of(gpus, "training") and not gpus.cdi_files(node))
    done = gpus.playbook("remove.yml", *arguments)
    assert not done.failed, done.output
    assert loaded(gpus, node) == ""
    assert differences(before, everything(gpus, node)) == {}
    again = gpus.playbook("remove.yml", *arguments)
    assert (again.failed, again.changed) == (0, 0), again.output
