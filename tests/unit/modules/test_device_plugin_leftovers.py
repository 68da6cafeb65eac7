# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sockets of a killed device plugin are removed. Served ones, and those of other plugins, stay."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]


@pytest.fixture
def root() -> Iterator[Path]:
    """Return a kubelet's root with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="k") as directory:
        (Path(directory) / "device-plugins").mkdir()
        yield Path(directory)


def bound(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(str(path))
    return found


def test_leftovers_only_unserved_sockets_are_removed(root: Path, run_here: Callable[..., Json]) -> None:
    directory = root / "device-plugins"
    for name in ("nvidia-gpu.sock", "Ascend910.sock", "kubelet.sock", "dra-nvidia.com_gpu.sock", "rdma.sock"):
        bound(directory / name).close()
    (directory / "nvidia-notes").write_text("no socket")
    with bound(directory / "nvidia-mig.sock") as alive:
        alive.listen()
        options = {"kubelet_root": str(root)}
        dead = [str(directory / "Ascend910.sock"), str(directory / "nvidia-gpu.sock")]
        dry_run = run_here("device_plugin_leftovers", options, check=True)
        assert (
            dry_run["changed"]
            and dry_run["removed"] == dead
            and dry_run["served"] == [str(directory / "nvidia-mig.sock")]
        )
        assert all(Path(each).exists() for each in dead)
        assert run_here("device_plugin_leftovers", options)["removed"] == dead
        left = sorted(each.name for each in directory.iterdir())
        assert left == ["dra-nvidia.com_gpu.sock", "kubelet.sock", "nvidia-mig.sock", "nvidia-notes", "rdma.sock"]
        assert not run_here("device_plugin_leftovers", options)["changed"]
    assert not run_here("device_plugin_leftovers", {"kubelet_root": str(root / "none")})["changed"]
