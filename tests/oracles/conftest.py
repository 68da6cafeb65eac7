# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Programs of other projects, at the versions that the test world pins and builds."""

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests with reference programs to `make prove`, because their builds take minutes."""
    for item in items:
        if {"reference_programs", "crio", "docker"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.prove)


@pytest.fixture(scope="session")
def built() -> Path:
    """Build missing programs of the test world's nodes; return their directory."""
    subprocess.run([ROOT / "tests/world/world", "build", "--only", "worlds"], check=True)
    return CACHE / "world/binaries"


@pytest.fixture(scope="session")
def reference_programs() -> Path:
    """Build missing programs of other projects; return their directory."""
    subprocess.run([ROOT / "tests/world/world", "build", "--only", "oracles"], check=True)
    return CACHE / "world/binaries"


def newest(programs: Path, name: str, package: str = "") -> Path:
    """Return the program with this name from the package of the same or the given name; of several builds the newest."""
    found = sorted(programs.glob(f"{package or name}-*/{name}"), key=lambda path: path.stat().st_mtime)
    assert found, f"{programs} has no {name}; `tests/world/world build` makes it"
    return found[-1]


@pytest.fixture(scope="session")
def administrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start an API server without nodes, which all tests share; yield the administrator's kubeconfig."""
    made = ApiServer(tmp_path_factory.mktemp("api"))
    with made.running():
        yield made.kubeconfig


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of NVIDIA's simulated library as on a node."""
    folder = tmp_path_factory.mktemp("library")
    subprocess.run(["make", "-s", "-C", ROOT / "roles/simulator/files/nvml", f"OUT={folder}"], check=True)
    return folder


@pytest.fixture(scope="session")
def mig_parted(reference_programs: Path) -> Path:
    """Return the directory of nvidia-mig-parted."""
    return newest(reference_programs, "nvidia-mig-parted").parent


@pytest.fixture(scope="session")
def nvidia_ctk(reference_programs: Path) -> Path:
    """Return the program nvidia-ctk."""
    return newest(reference_programs, "nvidia-ctk")


@pytest.fixture(scope="session")
def kubectl(built: Path) -> Path:
    """Return Kubernetes' client."""
    return newest(built, "kubectl", "kubernetes")


@pytest.fixture(scope="session")
def containerd(built: Path) -> Path:
    """Return the containerd of the world's nodes."""
    return newest(built, "containerd")


@pytest.fixture(scope="session")
def old_containerd(reference_programs: Path) -> Path:
    """Return containerd 1.7."""
    return newest(reference_programs, "containerd-1.7")


@pytest.fixture(scope="session")
def crio() -> Path:
    """Build CRI-O, which only tests marked ``prove`` use; return the program."""
    subprocess.run([ROOT / "tests/world/world", "build", "--only", "long-oracles"], check=True)
    return newest(CACHE / "world/binaries", "crio")


@pytest.fixture(scope="session")
def docker() -> Path:
    """Build a Docker Engine with CDI, which only tests marked ``prove`` use; return its command."""
    subprocess.run([ROOT / "tests/world/world", "build", "--only", "long-oracles"], check=True)
    return newest(CACHE / "world/binaries", "docker")


@pytest.fixture(scope="session")
def crictl(built: Path) -> Path:
    """Return the client program of container runtimes."""
    return newest(built, "crictl")
