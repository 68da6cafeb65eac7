# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Programs that nobody here wrote, at the versions that the test world pins and builds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.api_server import ApiServer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/oracles"), str(ROOT / "tests/world")]
CACHE = Path(
    os.environ.get("DRA_ACCELERATORS_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dra-accelerators"
)


@pytest.fixture(scope="session")
def built() -> Path:
    """The folder of the programs that the test world builds, for its nodes and as oracles; what is missing is built now."""
    subprocess.run([ROOT / "tests/world/world", "build"], check=True)
    return CACHE / "world/binaries"


def newest(programs: Path, name: str, package: str = "") -> Path:
    """The program of that name, of the package of that name or another one; of several builds the one made last."""
    found = sorted(programs.glob(f"{package or name}-*/{name}"), key=lambda path: path.stat().st_mtime)
    assert found, f"{programs} has no {name}; `tests/world/world build` makes it"
    return found[-1]


@pytest.fixture(scope="session")
def administrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An administrator's kubeconfig of a Kubernetes API server without a node, which all tests share."""
    made = ApiServer(tmp_path_factory.mktemp("api"))
    with made.running():
        yield made.kubeconfig


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVIDIA's simulated library as a node has it."""
    folder = tmp_path_factory.mktemp("library")
    subprocess.run(["make", "-s", "-C", ROOT / "roles/simulator/files/nvml", f"OUT={folder}"], check=True)
    return folder


@pytest.fixture(scope="session")
def mig_parted(built: Path) -> Path:
    """The folder that holds nvidia-mig-parted."""
    return newest(built, "nvidia-mig-parted").parent


@pytest.fixture(scope="session")
def nvidia_ctk(built: Path) -> Path:
    """The program nvidia-ctk."""
    return newest(built, "nvidia-ctk")


@pytest.fixture(scope="session")
def kubectl(built: Path) -> Path:
    """Kubernetes' own client."""
    return newest(built, "kubectl", "kubernetes")


@pytest.fixture(scope="session")
def containerd(built: Path) -> Path:
    """The containerd of the world's nodes."""
    return newest(built, "containerd")


@pytest.fixture(scope="session")
def old_containerd(built: Path) -> Path:
    """containerd 1.7."""
    return newest(built, "containerd-1.7")


@pytest.fixture(scope="session")
def crio() -> Path:
    """CRI-O, which is built for tests marked ``prove`` alone."""
    subprocess.run([ROOT / "tests/world/world", "build", "--only", "long-oracles"], check=True)
    return newest(CACHE / "world/binaries", "crio")


@pytest.fixture(scope="session")
def docker() -> Path:
    """The command of a Docker Engine with CDI, beside its daemon; they are built for tests marked ``prove`` alone."""
    subprocess.run([ROOT / "tests/world/world", "build", "--only", "long-oracles"], check=True)
    return newest(CACHE / "world/binaries", "docker")


@pytest.fixture(scope="session")
def crictl(built: Path) -> Path:
    """The program that asks a container runtime."""
    return newest(built, "crictl")
