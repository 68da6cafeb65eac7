# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of tests of GPU nodes without a driver: the world, the vendor's packages in signed repositories, and
checks of a node.

The packages are simulated (tests/packages). Their driver libraries and programs are the simulator's, built for each
version. The Container Toolkit's programs are NVIDIA's own, so that containers get the edits of the real nvidia-ctk.
"""

from __future__ import annotations

import base64
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.cluster import ROOT, Cluster, execute
from tests.cluster.manifests import claim, dynamic, pod
from tests.simulator.nvml_builds import build

KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
OLDER, NEWER, NOT_LOADED = "580.95.05", "580.105.08", "595.45.99"
#: The kernel is that of the test host.
MODULE = f"/lib/modules/{os.uname().release}/updates/dkms/nvidia.ko"
SERVER = "http://127.0.0.1:8099"
#: Paths like the vendor's, with the toolkit's key at the root of its repositories.
DRIVERS, TOOLKIT = "debian12", "stable/deb/amd64"
TOOLKIT_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
#: The kernel headers that dkms needs. They are not part of the collection.
HEADERS = "mkdir -p /lib/modules/$(uname -r)/build"
#: The same, and a package server.
FURNISH = f"""set -eu
{HEADERS}
mkdir -p /srv/packages
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


@dataclass(frozen=True)
class Sources:
    """A directory with the vendor's repositories, the fingerprint of their signing key, and the version of the
    toolkit.
    """

    folder: Path
    fingerprint: str
    toolkit: str = ""


def real_toolkit() -> tuple[str, Path]:
    """Return the version of the real nvidia-ctk and the directory with it and its hook."""
    execute([ROOT / "tests/world/world", "build", "--only", "oracles"], timeout=1800)
    cache = execute([ROOT / "tests/tools/cache"]).stdout.strip()
    found = sorted(
        Path(cache).glob("world/binaries/nvidia-ctk-*/nvidia-cdi-hook"), key=lambda path: path.stat().st_mtime
    )
    said = execute([found[-1].with_name("nvidia-ctk"), "--version"]).stdout.split()
    return next(word for word in said if word[0].isdigit()), found[-1].parent


def make_sources(folder: Path, versions: Sequence[str], *, parts: bool = False) -> Sources:
    """Build the repositories with drivers of these versions; with ``parts`` also the fabric manager and the Container
    Toolkit.
    """
    for version in versions:
        shutil.copytree(build("", f"DRIVER_VERSION={version}").folder, folder / "files" / version, symlinks=True)
    makers = {name: [sys.executable, "-B", ROOT / f"tests/packages/{name}.py"] for name in ("nvidia", "nvidia_parts")}
    served = folder / "served"
    served.mkdir()
    # The key is stored next to the directories, because all use the same one.
    packages, source = folder / DRIVERS, folder / "toolkit"
    execute([*makers["nvidia"], "--files", folder / "files", packages, *versions])
    toolkit = ""
    if parts:
        execute([*makers["nvidia_parts"], "fabric", packages, *versions])
        toolkit, programs = real_toolkit()
        (folder / "programs").mkdir()
        (folder / "programs" / toolkit).symlink_to(programs)
        execute([*makers["nvidia_parts"], "--files", folder / "programs", "toolkit", source, toolkit])
        shutil.copy(source / "gpgkey", served)
        (served / TOOLKIT).parent.mkdir(parents=True)
        source.rename(served / TOOLKIT)
    packages.rename(served / DRIVERS)
    return Sources(served, (served / DRIVERS / "FINGERPRINT").read_text().strip(), toolkit)


def serve_on(gpus: Cluster, node: str, sources: Sources) -> None:
    """Serve the repositories on a node to itself, and install the kernel headers for dkms."""
    archive = sources.folder.with_suffix(".tar")
    with tarfile.open(archive, "w") as made:
        made.add(sources.folder, ".")
    gpus.run(node, "sh", "-c", FURNISH, text=base64.b64encode(archive.read_bytes()).decode(), timeout=600)


def doors(sources: Sources, server: str = SERVER) -> dict[str, object]:
    """Return the fleet's variables with all optional parts enabled and packages from a server with these repositories."""
    return {
        "accelerator_nvidia_driver_enabled": True,
        "nvidia_driver_version": OLDER,
        "nvidia_driver_repository": f"{server}/{DRIVERS}",
        "nvidia_driver_repository_fingerprints": [sources.fingerprint],
        "accelerator_nvidia_fabric_manager_enabled": True,
        "accelerator_nvidia_container_toolkit_enabled": True,
        "nvidia_container_toolkit_version": sources.toolkit,
        "nvidia_container_toolkit_repository": f"{server}/{TOOLKIT}",
        "nvidia_container_toolkit_repository_fingerprints": [sources.fingerprint],
        "nvidia_container_toolkit_cdi_refresh": "enabled",
        "accelerator_nvidia_settings_enabled": True,
        "nvidia_settings_rules": [{"match": {"index": 0}, "power_limit": 450}, {"match": {}, "persistence": True}],
    }


@contextmanager
def world_without_drivers(name: str, nodes: int = 1) -> Iterator[Cluster]:
    """Yield a world whose nodes have eight GPUs each and no driver."""
    made = Cluster(name)
    if not KEPT:
        made.world("down")
    os.environ["DRA_ACCELERATORS_NVIDIA_MODULE"] = MODULE
    try:
        made.world("up", "--nodes", str(nodes), "--silicon", ",".join(["8xH100"] * nodes), timeout=3000)
    finally:
        del os.environ["DRA_ACCELERATORS_NVIDIA_MODULE"]
    for node in made.nodes():
        for program in ("modprobe", "rmmod", "modinfo"):
            path = f"/usr/local/sbin/{program}"
            made.run(node, "tee", path, text=(ROOT / "tests/packages/kmod").read_text(encoding="utf-8"))
            made.run(node, "chmod", "755", path)
    yield made
    if not KEPT:
        made.world("down")


def everything(gpus: Cluster, node: str) -> dict[str, str]:
    """Return every file, every API object, and every package with its version and state, without compiled Python
    files.
    """
    packages = gpus.run(
        node,
        "dpkg-query",
        "--show",
        "--showformat",
        "package ${Package}:${Architecture}\t${Version} ${db:Status-Abbrev}\n",
    )
    programs = gpus.shell(node, "find /usr -xdev -name __pycache__ -prune -o -printf '%p\t%y %m %u %g %l\n'")
    answer = (line.partition("\t") for line in f"{packages}{programs}".splitlines())
    return {**gpus.footprint(), **{name: facts for name, _tab, facts in answer}}


def differences(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Return the changed entries with their values before and after."""
    both = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
    return {key: found for key, found in both.items() if found[0] != found[1]}


def loaded(gpus: Cluster, node: str) -> str:
    """Return the version of the node's loaded driver; empty if none is loaded."""
    return gpus.shell(node, "cat /sys/module/nvidia/version 2>/dev/null || true").strip()


def published_version(gpus: Cluster, node: str) -> set[str]:
    """Return the driver versions in the node's published devices, as semantic versions without leading zeros."""
    found = (device["attributes"].get("driverVersion", {}) for device in gpus.devices(node).values())
    return {str(each.get("version", "")) for each in found}


def semantic(version: str) -> str:
    return ".".join(str(int(part)) for part in version.split("."))


def power_limit(gpus: Cluster, node: str) -> float:
    said = gpus.run(node, "nvidia-smi", "-i", "0", "--query-gpu=power.limit", "--format=csv,noheader,nounits")
    return float(said.strip())


def boot_id(gpus: Cluster, node: str) -> str:
    return gpus.run(node, "cat", "/proc/sys/kernel/random/boot_id").strip()


def versions(gpus: Cluster, node: str, *names: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    said = gpus.run(node, "dpkg-query", "--show", "--showformat", "${Package} ${Version}\n", *names)
    return dict(line.split(" ") for line in said.splitlines())


def sees_all_doors_open(gpus: Cluster, node: str, sources: Sources) -> None:
    """Assert that the variables of ``doors`` installed the driver, the fabric manager, the toolkit, and the settings."""
    assert loaded(gpus, node) == OLDER and published_version(gpus, node) == {semantic(OLDER)}
    assert power_limit(gpus, node) == 450
    assert versions(gpus, node, "nvidia-fabricmanager", "nvidia-container-toolkit") == {
        "nvidia-fabricmanager": f"{OLDER}-1",
        "nvidia-container-toolkit": f"{sources.toolkit}-1",
    }
    assert gpus.run(node, "systemctl", "is-active", "nvidia-fabricmanager.service").strip() == "active"
    assert gpus.run(node, "systemctl", "is-enabled", *TOOLKIT_UNITS).split() == ["enabled", "enabled"]
    described = gpus.run(node, "cat", "/var/run/cdi/nvidia.yaml")
    assert "nvidia.com/gpu" in described and f"libcuda.so.{OLDER}" in described


def runs(gpus: Cluster, name: str) -> None:
    """Assert that a pod with a claim on a partition sees only that partition; delete both."""
    wanted = claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
    user = pod(name, wanted["metadata"]["name"])
    gpus.apply(wanted, user)
    gpus.wait_running(name)
    seen = gpus.wait(f"{name} printing its devices", lambda: gpus.log(name), timeout=60)
    assert seen.count("MIG-") == 1, seen
    gpus.delete(user, wanted)
