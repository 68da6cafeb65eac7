# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of nodes with GPUs and no driver share: such a world, the vendor's packages in signed sources, and what is seen of a node.

The packages are stand-ins (tests/packages); the driver's libraries and programs in them are the simulator's, built for each version, and the toolkit's
are NVIDIA's own, so that what containers get is what nvidia-ctk says.
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
#: The kernel is the one of whoever runs the test.
MODULE = f"/lib/modules/{os.uname().release}/updates/dkms/nvidia.ko"
SERVER = "http://127.0.0.1:8099"
#: As the vendor has them, with the toolkit's key above all of its sources.
DRIVERS, TOOLKIT = "debian12", "stable/deb/amd64"
TOOLKIT_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
#: What a machine has on which dkms builds modules; none of it is the collection's.
HEADERS = "mkdir -p /lib/modules/$(uname -r)/build"
#: The same, and a server of packages.
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
    """A folder with the vendor's sources as a server has them, the fingerprint of the key that has signed them, and the version of the toolkit there."""

    folder: Path
    fingerprint: str
    toolkit: str = ""


def real_toolkit() -> tuple[str, Path]:
    """The version of the real nvidia-ctk, and the folder in which it and its hook lie."""
    execute([ROOT / "tests/world/world", "build", "--only", "oracles"], timeout=1800)
    cache = execute([ROOT / "tests/tools/cache"]).stdout.strip()
    found = sorted(
        Path(cache).glob("world/binaries/nvidia-ctk-*/nvidia-cdi-hook"), key=lambda path: path.stat().st_mtime
    )
    said = execute([found[-1].with_name("nvidia-ctk"), "--version"]).stdout.split()
    return next(word for word in said if word[0].isdigit()), found[-1].parent


def make_sources(folder: Path, versions: Sequence[str], *, parts: bool = False) -> Sources:
    """Make the sources: drivers of these versions, with ``parts`` the fabric manager for each and the Container Toolkit as well."""
    for version in versions:
        shutil.copytree(build("", f"DRIVER_VERSION={version}").folder, folder / "files" / version, symlinks=True)
    makers = {name: [sys.executable, "-B", ROOT / f"tests/packages/{name}.py"] for name in ("nvidia", "nvidia_parts")}
    served = folder / "served"
    served.mkdir()
    # The key lies beside the folders: it is the same one.
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
    """Have a node serve the sources to itself, and have what dkms needs."""
    archive = sources.folder.with_suffix(".tar")
    with tarfile.open(archive, "w") as made:
        made.add(sources.folder, ".")
    gpus.run(node, "sh", "-c", FURNISH, text=base64.b64encode(archive.read_bytes()).decode(), timeout=600)


def doors(sources: Sources, server: str = SERVER) -> dict[str, object]:
    """The variables of a fleet with every door open, whose packages come from a server with these sources."""
    return {
        "accelerator_nvidia_driver": True,
        "nvidia_driver_version": OLDER,
        "nvidia_driver_repository": f"{server}/{DRIVERS}",
        "nvidia_driver_repository_fingerprints": [sources.fingerprint],
        "accelerator_nvidia_fabric_manager": True,
        "accelerator_nvidia_container_toolkit": True,
        "nvidia_container_toolkit_version": sources.toolkit,
        "nvidia_container_toolkit_repository": f"{server}/{TOOLKIT}",
        "nvidia_container_toolkit_repository_fingerprints": [sources.fingerprint],
        "nvidia_container_toolkit_cdi_refresh": "enabled",
        "accelerator_nvidia_settings": True,
        "nvidia_settings_rules": [{"match": {"index": 0}, "power_limit": 450}, {"match": {}, "persistence": True}],
    }


@contextmanager
def world_without_drivers(name: str, nodes: int = 1) -> Iterator[Cluster]:
    """A world whose nodes have eight GPUs each on their buses, for which nobody has installed anything."""
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


def differences(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """What is not as it was, with what it was and what it is."""
    both = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
    return {key: found for key, found in both.items() if found[0] != found[1]}


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


def versions(gpus: Cluster, node: str, *names: str) -> dict[str, str]:
    """The versions of packages that are installed."""
    said = gpus.run(node, "dpkg-query", "--show", "--showformat", "${Package} ${Version}\n", *names)
    return dict(line.split(" ") for line in said.splitlines())


def sees_all_doors_open(gpus: Cluster, node: str, sources: Sources) -> None:
    """See on a node that ``doors`` has brought the driver, the fabric manager, the toolkit and the settings."""
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
    """A pod claims a partition, sees it and nothing else, and goes."""
    wanted = claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
    user = pod(name, wanted["metadata"]["name"])
    gpus.apply(wanted, user)
    gpus.wait_running(name)
    seen = gpus.wait(f"{name} printing its devices", lambda: gpus.log(name), timeout=60)
    assert seen.count("MIG-") == 1, seen
    gpus.delete(user, wanted)
