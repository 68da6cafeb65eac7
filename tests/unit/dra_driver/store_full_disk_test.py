# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The driver's store on full disks of ext4, XFS, and btrfs: new claims are rejected, and all claims can be released."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.prove.power_cuts import FILE_SYSTEMS, Disk

#: Prepares claims, fills the disk, prepares and releases claims until one is rejected. The next process releases the others.
FIRST = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from store_model import record
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.files import StoreError
from dra_driver.claims.store.tables import Change
store = Store.open(sys.argv[1])
def prepare(uid):
    store.write(Change(put=record(uid), durable=False))
    store.begin(Change(put=record(uid, state="prepared"))).wait()
for number in range(120):
    prepare(f"u{number}")
with open(os.path.dirname(sys.argv[1]) + "-filler", "wb", buffering=0) as file:
    for size in (1 << 20, 4096, 1):
        try:
            while True:
                file.write(bytes(size) if size > 4096 else b"x" * size)
        except OSError:
            pass
    os.fsync(file.fileno())
for number in range(3000):
    try:
        prepare(f"new{number}")
    except StoreError as error:
        assert "cannot record a new claim" in str(error), error
        break
    store.write(Change(delete=f"new{number}"))
else:
    sys.exit("no claim was rejected")
for number in range(int(sys.argv[3])):
    store.write(Change(delete=f"u{number}", meta={f"owed:{number}": "boot"}))
os.kill(os.getpid(), signal.SIGKILL)
"""
NEXT = """
import sys
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
store = Store.open(sys.argv[1])
assert set(store.claims) == {f"u{number}" for number in range(60, 120)}, sorted(store.claims)
for uid in list(store.claims):
    store.write(Change(delete=uid, meta={f"owed:{uid}": "boot"}))
store.close()
store = Store.open(sys.argv[1])
assert not store.claims
store.close()
"""


@pytest.mark.prove
@pytest.mark.parametrize("kind", sorted(FILE_SYSTEMS))
def test_full_disk_rejects_new_claims_and_releases_all_others(tmp_path: Path, kind: str) -> None:
    """On ext4 and XFS, the driver is killed after half of the releases and restarted. On btrfs a start needs free space."""
    steps = [(FIRST, "120", -9)] if kind == "btrfs" else [(FIRST, "60", -9), (NEXT, "60", 0)]
    with Disk(tmp_path, kind).mounted() as node:
        for program, releases, status in steps:
            words = [sys.executable, "-c", program, node / "state/state.db", str(Path(__file__).parent), releases]
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=500)
            assert done.returncode == status, (done.stdout, done.stderr)


@pytest.mark.prove
def test_store_on_btrfs_that_has_copy_on_write_is_reported(tmp_path: Path) -> None:
    program = "import sys; from dra_driver.claims.store.store import Store; Store.open(sys.argv[1]).close()"
    with Disk(tmp_path, "btrfs").mounted() as node:
        path = node / "state/state.db"
        words = [sys.executable, "-c", program, path]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stderr == ""
        attributes = subprocess.run(["lsattr", path], capture_output=True, text=True, check=True).stdout
        assert "C" in attributes.split()[0]
        subprocess.run(["chattr", "-C", path.parent], check=True)
        path.rename(path.parent / "former")
        (path.parent / "state.db").write_bytes((path.parent / "former").read_bytes())
        (path.parent / "former").unlink()
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert f"{path} is written with copy-on-write" in done.stderr and f"{path.parent} is" not in done.stderr
