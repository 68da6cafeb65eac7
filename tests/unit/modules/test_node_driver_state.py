# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that a removal of the node driver deletes, and files that it keeps."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._driver_service.service_plan import (
    leftovers,
    registrations,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.discovery.device_locks import LIBRARY, REQUEST
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.modules.node_driver import read_leftovers
from dra_driver.core.health import repair_marks
from dra_driver.core.repartition.progress import FILE as STEPS
from dra_driver.core.vendors.nvidia.numbering import FILE as NUMBERS
from dra_driver.supervisors.health import FILE as HEALTH
from dra_driver.supervisors.interface_change import NOTE
from driver_state import FOLDER, REGISTRY, make_locks, make_state


def sort_out(root: Path, *, stopping: bool = False) -> tuple[list[str], list[str]]:
    registry = root / REGISTRY.lstrip("/")
    known = registrations(REGISTRY, "gpu.nvidia.com", os.listdir(registry) if registry.is_dir() else ())
    return leftovers(read_leftovers(System(str(root)), FOLDER, known), stopping=stopping)


def test_removal_deletes_own_state(tmp_path: Path) -> None:
    make_state(tmp_path, store=True)
    removed, kept = sort_out(tmp_path)
    assert kept == []
    assert removed[-1] == FOLDER
    beside = {"state.db.damaged-20260101T000000", "state.db.form-1-20260101T000000"}
    assert {Path(path).name for path in removed[:-1]} == {"state.db", "driver.lock", *beside}
    # A killed run leaves a directory that the next run still recognizes.
    assert [Path(path).name for path in removed[-3:-1]] == ["driver.lock", "state.db"]


def test_removal_deletes_health_and_handover_files(tmp_path: Path) -> None:
    """Health and handover files are removed too, including temporary files of a killed driver."""
    directory = make_state(tmp_path, store=True)
    for name in (HEALTH, f".{HEALTH}.k3jx_81q.tmp", NOTE, f".{NOTE}.k3jx_81q.tmp", NUMBERS):
        (directory / name).touch()
    removed, kept = sort_out(tmp_path)
    assert (removed[-1], kept) == (FOLDER, [])


def test_removal_deletes_repartition_steps_and_damaged_files(tmp_path: Path) -> None:
    directory = make_state(tmp_path, store=True)
    for name in (STEPS, f".{STEPS}.k3jx_81q.tmp", f"{HEALTH}.damaged"):
        (directory / name).touch()
    removed, kept = sort_out(tmp_path)
    assert (removed[-1], kept) == (FOLDER, [])


def test_removal_keeps_foreign_file_and_directory(tmp_path: Path) -> None:
    (make_state(tmp_path, store=True) / "checkpoint.json").touch()
    removed, kept = sort_out(tmp_path)
    assert FOLDER not in removed and f"{FOLDER}/state.db" in removed
    assert kept == [f"{FOLDER}/checkpoint.json: not a file of this driver"]


def test_removal_deletes_locks_directory(tmp_path: Path) -> None:
    make_locks(make_state(tmp_path, store=True))
    removed, kept = sort_out(tmp_path)
    assert kept == []
    assert removed[-1] == FOLDER
    assert f"{FOLDER}/locks/GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071.lock" in removed
    inside = [removed.index(f"{FOLDER}/locks/{name}.lock") for name in (LIBRARY, REQUEST)]
    assert max(inside) < removed.index(f"{FOLDER}/locks")


def test_removal_deletes_reset_and_repair_marks_directory(tmp_path: Path) -> None:
    """The driver removes the applied marks, but not their directory: the removal deletes it."""
    directory = make_state(tmp_path, store=True)
    for what in (repair_marks.RESET, repair_marks.REPAIRED):
        repair_marks.mark(str(directory), ["GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071"], what)
    (directory / repair_marks.FOLDER / "GPU-1.reset").touch()  # by an earlier release
    removed, kept = sort_out(tmp_path)
    assert (removed[-1], kept) == (FOLDER, [])
    for mark in repair_marks.read(str(directory)):
        repair_marks.remove(str(directory), mark.name)
    removed, kept = sort_out(tmp_path)
    assert (removed[-1], kept) == (FOLDER, []) and f"{FOLDER}/{repair_marks.FOLDER}" in removed


def test_removal_deletes_empty_container_files_directory(tmp_path: Path) -> None:
    files = make_state(tmp_path, store=True) / "metadata"
    files.mkdir()
    removed, kept = sort_out(tmp_path)
    assert (removed[-1], kept) == (FOLDER, []) and f"{FOLDER}/metadata" in removed
    (files / "0uid-a").mkdir()
    removed, kept = sort_out(tmp_path)
    assert FOLDER not in removed and kept == [f"{FOLDER}/metadata: not a file of this driver"]


def test_removal_keeps_foreign_file_in_locks_directory(tmp_path: Path) -> None:
    make_locks(make_state(tmp_path, store=True), "notes")
    removed, kept = sort_out(tmp_path)
    assert not {FOLDER, f"{FOLDER}/locks"} & set(removed) and f"{FOLDER}/locks/library.lock" in removed
    assert kept == [f"{FOLDER}/locks/notes: not a file of this driver"]


def test_removal_keeps_link_named_locks(tmp_path: Path) -> None:
    (tmp_path / "library.lock").touch()
    (make_state(tmp_path, store=True) / "locks").symlink_to(tmp_path)
    removed, kept = sort_out(tmp_path)
    assert FOLDER not in removed
    assert kept == [f"{FOLDER}/locks: not a file of this driver"]


def test_removal_reading_closed_store_creates_no_files(tmp_path: Path) -> None:
    directory = make_state(tmp_path, store=True)
    (directory / "driver.lock").unlink()
    before = sorted(path.name for path in directory.iterdir())
    removed, _kept = sort_out(tmp_path)
    assert f"{FOLDER}/state.db" in removed, "the store alone shows whose state it is"
    assert sorted(path.name for path in directory.iterdir()) == before


def test_removal_keeps_state_of_other_drivers(tmp_path: Path) -> None:
    directory = make_state(tmp_path, store=False)
    for name in ("checkpoint.json", "dra.sock"):
        (directory / name).touch()
    assert sort_out(tmp_path) == ([], [f"{FOLDER}: it is not the state of this driver"])
    (directory / "state.db").write_bytes(b"something else")
    assert sort_out(tmp_path)[0] == []


@pytest.fixture()
def short_path() -> Iterator[Path]:
    """Yield a directory with a path short enough for a socket: the kernel limit is 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_removal_keeps_served_socket_and_deletes_others(short_path: Path) -> None:
    directory = make_state(short_path, store=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as alive:
        alive.bind(str(directory / "dra.sock"))
        alive.listen()
        removed, kept = sort_out(short_path)
        assert removed == [] and kept == [f"{FOLDER}/dra.sock: another program listens there"]
        assert f"{FOLDER}/dra.sock" in sort_out(short_path, stopping=True)[0]
    assert f"{FOLDER}/dra.sock" in sort_out(short_path)[0]


def test_removal_deletes_sockets_of_killed_pods_only(short_path: Path) -> None:
    uid = "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"
    directory = make_state(short_path, store=True)
    (directory / "handed-over").touch()
    registry = short_path / REGISTRY.lstrip("/")
    for path in (directory / f"dra-{uid}.sock", registry / f"gpu.nvidia.com-{uid}-reg.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(path))
    (registry / "gpu.nvidia.com-other.example-reg.sock").touch()
    removed, kept = sort_out(short_path)
    assert kept == [] and removed[-1] == FOLDER
    assert {f"{FOLDER}/dra-{uid}.sock", f"{FOLDER}/handed-over"} < set(removed)
    assert [path for path in removed if path.startswith(REGISTRY)] == [f"{REGISTRY}/gpu.nvidia.com-{uid}-reg.sock"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as standing_by:
        standing_by.bind(str(directory / f"status-{uid}.sock"))
        standing_by.listen()
        assert sort_out(short_path) == ([], [f"{FOLDER}/status-{uid}.sock: another program listens there"])


def test_removal_without_files_does_nothing(tmp_path: Path) -> None:
    assert sort_out(tmp_path) == ([], [])
