# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A node with GPUs and no driver: one run of the site playbook brings driver, fabric manager, toolkit and settings, pods claim; the driver is
exchanged, also under pods that have GPUs, taken back where it does not load, and goes with everything else.

The packages are stand-ins (tests/packages) from signed sources on the node; the driver's libraries and programs are the simulator's, built for each
version, and the toolkit's are NVIDIA's own, so that what containers get is what nvidia-ctk says.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER_UNIT, ROOT, Cluster, Recap, execute
from tests.cluster.manifests import claim, deployment, dynamic, pod
from tests.simulator.nvml_builds import build

WORLD = os.environ.get("DRA_ACCELERATORS_GPU_HOST_WORLD", "gpu-host")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
OLDER, NEWER, NOT_LOADED = "580.95.05", "580.105.08", "595.45.99"
#: The kernel is the one of whoever runs the test.
MODULE = f"/lib/modules/{os.uname().release}/updates/dkms/nvidia.ko"
SERVER = "http://127.0.0.1:8099"
#: As the vendor has them, with the toolkit's key above all of its sources.
TOOLKIT = "stable/deb/amd64"
TOOLKIT_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
#: What a machine has on which dkms builds modules, and a server of packages; none of it is the collection's.
FURNISH = """set -eu
mkdir -p /srv/packages /lib/modules/$(uname -r)/build
base64 -d | tar -C /srv/packages -x
cat >/etc/systemd/system/packages.service <<'END'
[Service]
ExecStart=/usr/bin/python3 -m http.server 8099 --bind 127.0.0.1 --directory /srv/packages
[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
systemctl enable --now --quiet packages.service
apt-get -q update
"""
SETTINGS = [{"match": {"index": 0}, "power_limit": 450}, {"match": {}, "persistence": True}]


@pytest.fixture(scope="module")
def toolkit() -> tuple[str, Path]:
    """The version of the real nvidia-ctk, and the folder in which it and its hook lie."""
    execute([ROOT / "tests/world/world", "build", "--only", "oracles"], timeout=1800)
    cache = execute([ROOT / "tests/tools/cache"]).stdout.strip()
    found = sorted(
        Path(cache).glob("world/binaries/nvidia-ctk-*/nvidia-cdi-hook"), key=lambda path: path.stat().st_mtime
    )
    said = execute([found[-1].with_name("nvidia-ctk"), "--version"]).stdout.split()
    return next(word for word in said if word[0].isdigit()), found[-1].parent


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory: pytest.TempPathFactory, gpus: Cluster, node: str, toolkit: tuple[str, Path]) -> str:
    """The key that has signed the packages which the node serves to itself."""
    folder = tmp_path_factory.mktemp("packages")
    for version in (OLDER, NEWER, NOT_LOADED):
        shutil.copytree(build("", f"DRIVER_VERSION={version}").folder, folder / "files" / version, symlinks=True)
    packages = folder / "debian12"
    drivers, parts = (ROOT / f"tests/packages/{name}.py" for name in ("nvidia", "nvidia_parts"))
    execute([sys.executable, "-B", drivers, "--files", folder / "files", packages, OLDER, NEWER, NOT_LOADED])
    execute([sys.executable, "-B", parts, "fabric", packages, OLDER, NEWER, NOT_LOADED])
    version, programs = toolkit
    (folder / "programs").mkdir()
    (folder / "programs" / version).symlink_to(programs)
    # The key lies beside the folder: it is the same one.
    source = folder / "toolkit"
    execute([sys.executable, "-B", parts, "--files", folder / "programs", "toolkit", source, version])
    archive = folder / "packages.tar"
    with tarfile.open(archive, "w") as made:
        made.add(packages, packages.name)
        made.add(source, TOOLKIT)
        made.add(source / "gpgkey", "gpgkey")
    gpus.run(node, "sh", "-c", FURNISH, text=base64.b64encode(archive.read_bytes()).decode(), timeout=600)
    return (packages / "FINGERPRINT").read_text().strip()


@pytest.fixture(scope="module")
def gpus() -> Iterator[Cluster]:
    """One node with eight GPUs on its bus, for which nobody has installed anything."""
    made = Cluster(WORLD)
    if not KEPT:
        made.world("down")
    os.environ["DRA_ACCELERATORS_NVIDIA_MODULE"] = MODULE
    try:
        made.world("up", "--nodes", "1", "--silicon", "8xH100", timeout=3000)
    finally:
        del os.environ["DRA_ACCELERATORS_NVIDIA_MODULE"]
    (name,) = made.nodes()
    for program in ("modprobe", "rmmod", "modinfo"):
        path = f"/usr/local/sbin/{program}"
        made.run(name, "tee", path, text=(ROOT / "tests/packages/kmod").read_text(encoding="utf-8"))
        made.run(name, "chmod", "755", path)
    yield made
    if not KEPT:
        made.world("down")


@pytest.fixture(scope="module")
def node(gpus: Cluster) -> str:
    """The node's name."""
    (found,) = gpus.nodes()
    return found


@pytest.fixture(scope="module")
def before(gpus: Cluster, node: str, fingerprint: str) -> dict[str, str]:
    """Everything that is there before the first run, but for what the distribution's own packages are: files, objects, packages."""
    return everything(gpus, node)


@pytest.fixture(scope="module")
def first(gpus: Cluster, fingerprint: str, toolkit: tuple[str, Path], before: dict[str, str]) -> Recap:
    """The site playbook's first run with every door open."""
    gpus.variables = {
        "accelerator_nvidia_driver": True,
        "nvidia_driver_version": OLDER,
        "nvidia_driver_repository": f"{SERVER}/debian12",
        "nvidia_driver_repository_fingerprints": [fingerprint],
        "accelerator_nvidia_fabric_manager": True,
        "accelerator_nvidia_container_toolkit": True,
        "nvidia_container_toolkit_version": toolkit[0],
        "nvidia_container_toolkit_repository": f"{SERVER}/{TOOLKIT}",
        "nvidia_container_toolkit_repository_fingerprints": [fingerprint],
        "nvidia_container_toolkit_cdi_refresh": "enabled",
        "accelerator_nvidia_settings": True,
        "nvidia_settings_rules": SETTINGS,
    }
    return gpus.playbook("site.yml", check=False)


def everything(gpus: Cluster, node: str) -> dict[str, str]:
    """Every file, every object of the API, and every package with its version and state: what programs compile for themselves is left out."""
    packages = gpus.run(
        node,
        "dpkg-query",
        "--show",
        "--showformat",
        "package ${Package}:${Architecture}\t${Version} ${db:Status-Abbrev}\n",
    )
    programs = gpus.shell(node, "find /usr -xdev -name __pycache__ -prune -o -printf '%p\t%y %m %u %g %l\n'")
    told = (line.partition("\t") for line in f"{packages}{programs}".splitlines())
    return {**gpus.footprint(), **{name: facts for name, _tab, facts in told}}


def loaded(gpus: Cluster, node: str) -> str:
    """The version of the driver that the node's kernel has; empty for none."""
    return gpus.shell(node, "cat /sys/module/nvidia/version 2>/dev/null || true").strip()


def published_version(gpus: Cluster, node: str) -> set[str]:
    """The versions of the driver that the node's devices are published with: semantic ones, without zeros in front of a number."""
    found = (device["attributes"].get("driverVersion", {}) for device in gpus.devices(node).values())
    return {str(each.get("version", "")) for each in found}


def semantic(version: str) -> str:
    return ".".join(str(int(part)) for part in version.split("."))


def power_limit(gpus: Cluster, node: str) -> float:
    said = gpus.run(node, "nvidia-smi", "-i", "0", "--query-gpu=power.limit", "--format=csv,noheader,nounits")
    return float(said.strip())


def boot_id(gpus: Cluster, node: str) -> str:
    return gpus.run(node, "cat", "/proc/sys/kernel/random/boot_id").strip()


def runs(gpus: Cluster, name: str) -> None:
    """A pod claims a partition, sees it and nothing else, and goes."""
    wanted = claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
    user = pod(name, wanted["metadata"]["name"])
    gpus.apply(wanted, user)
    gpus.wait_running(name)
    seen = gpus.wait(f"{name} printing its devices", lambda: gpus.log(name), timeout=60)
    assert seen.count("MIG-") == 1, seen
    gpus.delete(user, wanted)


def test_a_node_without_a_driver_is_refused_by_name(gpus: Cluster, node: str) -> None:
    refused = gpus.playbook("site.yml", "--tags", "preflight", check=False)
    assert refused.failed and "NVIDIA driver" in refused.output, refused.output
    assert loaded(gpus, node) == ""


def test_check_mode_says_what_would_be_installed_and_touches_nothing(
    gpus: Cluster, node: str, fingerprint: str, before: dict[str, str]
) -> None:
    arguments = {
        "accelerator_nvidia_driver": True,
        "nvidia_driver_version": OLDER,
        "nvidia_driver_repository": f"{SERVER}/debian12",
        "nvidia_driver_repository_fingerprints": [fingerprint],
    }
    told = gpus.playbook("site.yml", "--check", "--diff", "-e", json.dumps(arguments))
    assert not told.failed and told.changed and OLDER in told.output, told.output
    assert "What would come after the driver" in told.output, "a run that cannot foresee the rest says so"
    assert everything(gpus, node) == before


def versions(gpus: Cluster, node: str, *names: str) -> dict[str, str]:
    """The versions of packages that are installed."""
    said = gpus.run(node, "dpkg-query", "--show", "--showformat", "${Package} ${Version}\n", *names)
    return dict(line.split(" ") for line in said.splitlines())


def test_the_site_brings_driver_fabric_manager_toolkit_and_settings_to_a_bare_node(
    gpus: Cluster, node: str, toolkit: tuple[str, Path], first: Recap
) -> None:
    assert not first.failed, first.output
    assert loaded(gpus, node) == OLDER and published_version(gpus, node) == {semantic(OLDER)}
    assert power_limit(gpus, node) == 450
    assert versions(gpus, node, "nvidia-fabricmanager", "nvidia-container-toolkit") == {
        "nvidia-fabricmanager": f"{OLDER}-1",
        "nvidia-container-toolkit": f"{toolkit[0]}-1",
    }
    assert gpus.run(node, "systemctl", "is-active", "nvidia-fabricmanager.service").strip() == "active"
    assert gpus.run(node, "systemctl", "is-enabled", *TOOLKIT_UNITS).split() == ["enabled", "enabled"]
    described = gpus.run(node, "cat", "/var/run/cdi/nvidia.yaml")
    assert "nvidia.com/gpu" in described and f"libcuda.so.{OLDER}" in described
    runs(gpus, "on-the-first-driver")
    gpus.wait(
        "the driver takes what containers get from the toolkit",
        lambda: (
            "container edits come from /usr/bin/nvidia-ctk"
            in gpus.run(node, "journalctl", "-u", DRIVER_UNIT, "--no-pager")
        ),
    )
    runs(gpus, "by-the-toolkit")


def test_a_second_run_changes_nothing(gpus: Cluster, node: str, first: Recap) -> None:
    assert not first.failed
    process, boot = gpus.driver_pid(node), boot_id(gpus, node)
    again = gpus.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output
    assert (gpus.driver_pid(node), boot_id(gpus, node)) == (process, boot)


def test_a_start_of_the_node_brings_all_of_it_back(gpus: Cluster, node: str, first: Recap) -> None:
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
    gpus.wait("the claim is given back", lambda: not gpus.cdi_files(node))


def test_a_newer_driver_takes_its_place_without_a_restart_and_goes_back(gpus: Cluster, node: str, first: Recap) -> None:
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


def test_a_driver_that_does_not_load_is_taken_back_without_a_hand(gpus: Cluster, node: str, first: Recap) -> None:
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
    """A Deployment whose pods have a whole GPU each, by a claim of their own, and print the driver's version as they see it."""
    return deployment(name, replicas, {"deviceClassName": "gpu.nvidia.com"}, command=["sh", "-c", SHOW_DRIVER])


def pods_of(gpus: Cluster, app: str) -> dict[str, str]:
    """The pods of a Deployment that are not ending, by UID with their names."""
    items = gpus.get("pods", "-n", "default", "-l", f"app={app}")["items"]
    return {
        each["metadata"]["uid"]: each["metadata"]["name"]
        for each in items
        if not each["metadata"].get("deletionTimestamp")
    }


def see(
    gpus: Cluster, app: str, replicas: int, version: str, *, other_than: AbstractSet[str] = frozenset()
) -> set[str]:
    """Wait until all pods of a Deployment run, none of them one of those, and have them say which driver they see; returns their UIDs."""

    def running() -> dict[str, str]:
        found = pods_of(gpus, app)
        return found if len(found) == replicas and not other_than & set(found) else {}

    found = gpus.wait(f"{replicas} new pods of {app}", running, timeout=180)
    gpus.wait_running(*found.values())
    for name in found.values():
        assert gpus.wait(f"{name} saying its driver", lambda name=name: gpus.log(name), timeout=60).split() == [version]
    return set(found)


def quiet(gpus: Cluster, name: str) -> tuple[str, int]:
    """The UID of a pod, and how often its container was started again."""
    found = gpus.pod(name)
    return found["metadata"]["uid"], found["status"]["containerStatuses"][0]["restartCount"]


@pytest.fixture(scope="module")
def training(gpus: Cluster, first: Recap) -> tuple[str, int]:
    """A Deployment with claims, and a pod that has none: what it is to stay. The test of the removal takes both away."""
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


def test_without_consent_an_exchange_names_the_pods_and_touches_nothing(
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
    # With consent, check mode says who would go.
    told = gpus.playbook("site.yml", "--check", "--diff", *drains(NEWER, "true"))
    assert not told.failed and all(f"evict default/{name}" in told.output for name in names), told.output
    assert set(pods_of(gpus, "training")) == before and rules(gpus) == []


def test_with_consent_the_pods_with_claims_go_and_come_back_on_the_new_driver(
    gpus: Cluster, node: str, training: tuple[str, int]
) -> None:
    before = see(gpus, "training", 2, OLDER)
    boot = boot_id(gpus, node)
    done = gpus.playbook("site.yml", *drains(NEWER, "true"))
    assert not done.failed and loaded(gpus, node) == NEWER, done.output
    assert published_version(gpus, node) == {semantic(NEWER)}, "the taint goes when that is so"
    after = see(gpus, "training", 2, NEWER, other_than=before)
    assert quiet(gpus, "beside") == training, "who has no GPU stays"
    assert rules(gpus) == [] and boot_id(gpus, node) == boot
    process = gpus.driver_pid(node)
    again = gpus.playbook("site.yml", *drains(NEWER, "true"))
    assert (again.failed, again.changed) == (0, 0), again.output
    assert set(pods_of(gpus, "training")) == after and gpus.driver_pid(node) == process


def test_an_exchange_under_claims_that_does_not_load_is_taken_back_and_the_pods_come_back(
    gpus: Cluster, node: str, training: tuple[str, int]
) -> None:
    before = see(gpus, "training", 2, NEWER)
    failed = gpus.playbook("site.yml", *drains(NOT_LOADED, "true"), check=False)
    assert failed.failed and f"has the driver {NEWER} again" in failed.output, failed.output
    assert loaded(gpus, node) == NEWER and rules(gpus) == []
    gpus.wait_registered(node)
    see(gpus, "training", 2, NEWER, other_than=before)
    assert quiet(gpus, "beside") == training


def test_a_budget_that_allows_nobody_to_go_is_named_and_the_gpus_are_opened_again(
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


def test_removal_brings_back_what_was(gpus: Cluster, node: str, first: Recap, before: dict[str, str]) -> None:
    """Files, objects of the API, and packages: all that was there before, and nothing more."""
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
    after = everything(gpus, node)
    differs = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
    assert {key: both for key, both in differs.items() if both[0] != both[1]} == {}
    again = gpus.playbook("remove.yml", *arguments)
    assert (again.failed, again.changed) == (0, 0), again.output
