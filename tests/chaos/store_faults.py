# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Damage the store in each way while the driver is stopped, and make the disk full or read-only while it runs."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from previous_store import make_previous
from store_model import write_entry

from tests import mounts
from tests.chaos.claim_kinds import PASSTHROUGH
from tests.chaos.errors import Broken, CrashLoop, Leaked, Lost
from tests.chaos.node import CDI, Node
from tests.chaos.outages import published_devices
from tests.chaos.prepared_claims import PreparedClaims
from tests.chaos.snapshot import difference, snapshot

#: Parts of a snapshot that change when a damaged store is set aside.
CHANGED_BY_SET_ASIDE = ("state directory", "meta")
MAXIMUM_BITS = 64
DISK_OPTIONS = "size=16m,mode=0750"
FILLER = "filler"
#: Messages of the kernel or SQLite in refusals because of a disk.
DISK_ERRORS = (
    "No space left on device",
    "Read-only file system",
    "disk is full",
    "disk I/O error",
    "readonly database",
)


def change(path: Path, alter: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    alter(content)
    path.write_bytes(content)


def flip_bits(path: Path, chance: random.Random) -> None:
    """Flip some bits, next to each other as in a bad sector, or anywhere."""

    def alter(content: bytearray) -> None:
        start = chance.randrange(len(content))
        for _bit in range(chance.randint(1, MAXIMUM_BITS)):
            where = (
                min(start + chance.randrange(512), len(content) - 1)
                if chance.random() < 0.5
                else chance.randrange(len(content))
            )
            content[where] ^= 1 << chance.randrange(8)

    change(path, alter)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def log_of(store: Path) -> Path:
    """Return the write-ahead log of a SQLite database."""
    return Path(f"{store}-wal")


def flip_bit_in_row(table: str, columns: str, store: Path, chance: random.Random) -> None:
    """Flip one bit in a row of the database, in each copy of the row in the file."""
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as connection:
        rows = sorted(row[0] for row in connection.execute(f"SELECT {columns} FROM {table}"))
    connection.close()
    text = chance.choice(rows).encode()[:256]
    where, bit = chance.randrange(len(text)), 1 << chance.randrange(8)

    def alter(content: bytearray) -> None:
        start = content.index(text)
        while start >= 0:
            content[start + where] ^= bit
            start = content.find(text, start + 1)

    change(store, alter)


def delete_log(store: Path, chance: random.Random) -> None:
    del chance
    log_of(store).unlink()
    Path(f"{store}-shm").unlink(missing_ok=True)


def delete_store(store: Path, chance: random.Random) -> None:
    del chance
    for path in store.parent.glob("state.db*"):
        path.unlink()


def write_random_bytes(store: Path, chance: random.Random) -> None:
    store.write_bytes(chance.randbytes(chance.randrange(1, 20000)))


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "bits of the database": flip_bits,
    "bits of its log": lambda store, chance: flip_bits(log_of(store), chance),
    "database truncated": truncate,
    "log truncated": lambda store, chance: truncate(log_of(store), chance),
    "log lost": delete_log,
    "everything lost": delete_store,
    "random bytes": write_random_bytes,
    "empty": lambda store, _chance: store.write_bytes(b""),
    "an invalid schema": lambda store, _chance: write_entry(store, "schema_version", "none"),
    "a directory instead of the store": lambda store, _chance: (store.unlink(), store.mkdir()),
    "a bit of an entry": partial(flip_bit_in_row, "meta", "checksum || key || value"),
    "a bit of a claim": partial(flip_bit_in_row, "claims", "document"),
    "a bit of a device's row": partial(flip_bit_in_row, "devices", "claim_uid || request || pool || name"),
}
#: The store, all files of the driver next to it, and the claims' CDI files.
ALL_FILES_LOST = "everything delete_store, and the claims' CDI files"
#: Damage that SQLite does not detect, but the driver has to.
ROW_DAMAGES = tuple(name for name in DAMAGES if name.startswith("a bit of"))


def damaged_store(node: Node, number: int, chance: random.Random, *, checkpointed: bool) -> None:
    """Prepare claims, kill the driver, and damage its store: all claims are still prepared after its restart."""
    name = [ALL_FILES_LOST, *DAMAGES][number % (len(DAMAGES) + 1)]
    if name == ALL_FILES_LOST:
        all_files_lost(node, number, chance)
        return
    held_claims = PreparedClaims(node)
    if name in ROW_DAMAGES or (checkpointed and "log" not in name):
        node.stop()  # a clean stop moves everything into the database, without a log
    else:
        node.kill()
    DAMAGES[name](node.store, chance)
    node.start_ready()
    if name in ROW_DAMAGES and not find_set_aside(node, "damaged"):
        raise Broken(f"a bit of {name} was changed, and the driver has not detected it")
    held_claims.verify_and_release(ignoring=CHANGED_BY_SET_ASIDE)
    remove_set_aside(node)


def all_files_lost(node: Node, number: int, chance: random.Random) -> None:
    """Lose all files about claims: the hardware does not change, a repeated prepare gets the same resources, and unprepare removes them.

    Claims with passthrough or devices that are prepared before binding are left out, because the origin of their
    devices is unknown then.
    """
    turn_of, published = node.vendor.handovers[number % len(node.vendor.handovers)][0], published_devices(node)
    kinds = [
        name
        for name in turn_of
        if not (node.kinds[name].before_binding or node.kinds[name].stages_of_kind & PASSTHROUGH)
    ]
    held_claims = PreparedClaims(node, kinds)
    for caller in held_claims.callers:
        caller.await_status()
    node.kill()
    for path in (*node.state.iterdir(), *CDI.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if chance.random() < 0.5:
        node.api.stop_serving()
    node.start()
    node.wait_until("claims are served", lambda: is_serving_claims(node))
    written = ("claims", "meta", "cdi")
    held_claims.await_hardware(ignoring=written)
    if not node.api.is_serving:
        node.api.resume_serving()
    node.wait_ready()
    for caller in held_claims.callers:
        if chance.random() < 0.5:
            caller.bind()
    held_claims.await_hardware(ignoring=written)
    held_claims.release(ignoring=CHANGED_BY_SET_ASIDE)
    node.wait_until("all devices are published as before", lambda: published_devices(node) == published, 30)


def is_serving_claims(node: Node) -> bool:
    """Return whether the driver serves claims. A missing API server for publication does not count as a problem."""
    reported = node.status()
    return bool(reported["pid"]) and all(problem.startswith("publish: ") for problem in reported["problems"])


def find_set_aside(node: Node, why: str) -> list[Path]:
    """Return the stores that were set aside next to the one in use."""
    return list(node.state.glob(f"state.db.{why}-*"))


def remove_set_aside(node: Node) -> None:
    """Remove the stores that were set aside, as an operator does after inspection."""
    for path in (*find_set_aside(node, "damaged"), *find_set_aside(node, "form")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def older_store(node: Node, number: int, chance: random.Random) -> None:
    """Use an older store: claims that came later are prepared, and its own claims are kept."""
    (store_from_backup, store_of_previous_release)[number % 2](node, chance)


def store_of_previous_release(node: Node, chance: random.Random) -> None:
    """Use a store of the previous release, which a driver migrates. The driver may be killed during the migration."""
    held_claims = PreparedClaims(node)
    node.stop()
    make_previous(node.store)
    for _kill in range(chance.randrange(4)):
        node.start(serves=False)
        time.sleep(chance.uniform(0, 0.8))
        node.kill()
    node.start_ready()
    if not find_set_aside(node, "form-1") or find_set_aside(node, "damaged"):
        raise Broken(f"the previous store was not migrated: {sorted(os.listdir(node.state))}\n{node.log_tail()}")
    held_claims.verify_and_release(ignoring=("state directory",))
    remove_set_aside(node)


def store_from_backup(node: Node, chance: random.Random) -> None:
    """Use a copy of the store from before some of the claims, as from a disk backup."""
    kinds = list(node.vendor.parallel_kinds)
    chance.shuffle(kinds)
    known = chance.randrange(len(kinds))
    before = PreparedClaims(node, kinds[:known])
    node.stop()
    copy = node.store.read_bytes()
    node.start_ready()
    rest = PreparedClaims(node, kinds[known:])
    node.kill()
    delete_store(node.store, chance)
    node.store.write_bytes(copy)
    node.start_ready()
    rest.await_prepared(ignoring=CHANGED_BY_SET_ASIDE)
    for claim in before.claims:
        node.unprepare(*claim)
    rest.before = before.before
    rest.release(ignoring=CHANGED_BY_SET_ASIDE)
    remove_set_aside(node)


def newer_store(node: Node, number: int, chance: random.Random) -> None:
    """Use a store of a newer or a too old release: the driver serves and changes nothing until it can read the store."""
    held_claims = PreparedClaims(node)
    node.kill()
    other = "0" if number % 5 == 4 else str(chance.randint(2, 99))
    write_entry(node.store, "schema_version", other)
    content = node.store.read_bytes()
    node.start(serves=False)
    said = f"(version {other}; this release {'reads 1 to 1' if other == '0' else 'knows 1'})"
    node.wait_until("the driver names the version", lambda: any(said in text for text in node.status()["problems"]))
    if (node.state / "dra.sock").exists() and node.status()["ready"]:
        raise Broken("it serves claims although it cannot read its store")
    found = snapshot(node)
    ours = {key: value for key, value in held_claims.prepared.items() if key != "meta"}
    if text := difference(found, ours):
        raise Lost(f"it has touched the node although it cannot read its store\n{text}")
    if node.store.read_bytes()[: len(content)] != content:
        raise Lost("it has written to a store that it cannot read")
    write_entry(node.store, "schema_version", "1")
    node.wait_serving()
    node.wait_ready()
    held_claims.verify_and_release()


class Disk:
    """A small disk mounted at a directory of a stopped driver, with the directory's content."""

    #: Whether it can be repaired while the driver runs.
    is_repairable_online = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / FILLER
        content = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.mount()
        for name, data in content.items():
            with (folder / name).open("wb") as file:
                file.write(data)
                os.fsync(file.fileno())  # an error of the disk must not lose earlier content

    def mount(self) -> None:
        mounts.mount("tmpfs", self.folder, DISK_OPTIONS)

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file:
            size = 65536
            while size:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    size //= 2

    def read_only(self) -> None:
        mounts.remount(self.folder, read_only=True)

    def repair(self) -> None:
        mounts.remount(self.folder, read_only=False)
        self._filler.unlink(missing_ok=True)

    def remove(self) -> None:
        mounts.unmount(self.folder)


class FailingDisk(Disk):
    """A disk whose file system the kernel makes read-only while the driver has files on it open for writing."""

    is_repairable_online = False

    def mount(self) -> None:
        self._image = Path("/run/chaos-disk.img")
        with self._image.open("wb") as file:
            file.truncate(16 << 20)
        words = ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", self._image]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        self._mount_image()
        self.folder.chmod(0o750)

    def _mount_image(self) -> None:
        mounts.mount_image(self._image, self.folder)
        (self.folder / "lost+found").rmdir()

    def read_only(self) -> None:
        mounts.abort(self.folder)

    def repair(self) -> None:
        """Repair the file system and mount it again. No driver runs."""
        mounts.detach(self.folder)
        done = subprocess.run(["e2fsck", "-p", self._image], capture_output=True, text=True, check=False)
        if done.returncode > 1:  # 1: it was repaired
            raise OSError(f"e2fsck ended with {done.returncode}: {done.stdout}{done.stderr}")
        self._mount_image()

    def remove(self) -> None:
        mounts.detach(self.folder)
        self._image.unlink()


DISK_FAULT_TIMES = ("before prepare", "between", "at the start")
#: The directory (state or CDI), the fault of its disk, and the moment.
DISK_FAULTS = tuple(
    (which, way, moment) for which in ("state", "CDI") for way in ("full", "read-only") for moment in DISK_FAULT_TIMES
)


def failing_disk(node: Node, number: int, chance: random.Random) -> None:
    """A directory's disk is full or read-only for a while: failing claims are refused without leftovers, and succeed afterwards."""
    which, way, moment = DISK_FAULTS[number % len(DISK_FAULTS)]
    node.stop()
    # A directory with a file that is open for writing cannot be remounted read-only. The kernel does it after a disk
    # error.
    fails = which == "state" and way == "read-only" and moment != "at the start"
    mounted_disk = (FailingDisk if fails else Disk)(CDI if which == "CDI" else node.state)
    inject_fault = mounted_disk.fill if way == "full" else mounted_disk.read_only
    try:
        node.start_ready()
        before = snapshot(node)
        held_claims = PreparedClaims(node, ("static", "three")) if moment != "before prepare" else None
        if moment == "at the start":
            node.kill()
        inject_fault()
        if moment == "at the start":
            node.start(serves=False)
            assert_runs_for(node, chance.uniform(0.3, 1.5))
        elif held_claims is None:
            assert_claims_refused(node, before)
        else:
            for claim in held_claims.claims:
                if error := node.call_once("NodePrepareResources", *claim).error:
                    raise Lost(f"a claim that is prepared is refused with a disk that is {way}: {error}")
            held_claims.await_prepared(ignoring=("state directory", "cdi") if way == "full" else ())  # the filler file
            for claim in held_claims.claims:
                error = node.call_once("NodeUnprepareResources", *claim).error
                if error and way == "full":  # the store's log has reserved space
                    raise Broken(f"a claim is not released with a full disk: {error}")
        assert_runs_for(node, chance.uniform(0.1, 0.5))
        if not mounted_disk.is_repairable_online:
            node.kill()
        mounted_disk.repair()
        if not mounted_disk.is_repairable_online:
            node.start(serves=False)
        if moment == "at the start" or not mounted_disk.is_repairable_online:
            node.wait_serving()
        node.wait_ready()
        if held_claims is not None:
            if moment == "at the start":
                held_claims.await_prepared(ignoring=("meta",))
            held_claims.release()
        again = PreparedClaims(node, (node.vendor.other_kind, "three"))
        again.before = before
        again.release()
        node.stop()
    finally:
        if node.pid:
            node.kill()
        mounted_disk.remove()
        node.start_ready()


def assert_runs_for(node: Node, seconds: float) -> None:
    """Assert that the driver keeps running for a while. Raises CrashLoop."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if node.has_ended():
            raise CrashLoop(f"the driver ended with {node.wait_ended()}")
        time.sleep(0.02)


def assert_claims_refused(node: Node, before: dict[str, object]) -> None:
    """Assert that new claims are refused and leave nothing behind."""
    for kind in ("whole", "three"):
        claim = node.claim_of(node.kinds[kind])
        answer = node.call_once("NodePrepareResources", *claim)
        if not answer.error:
            # A claim that needs no write on the full disk is prepared, and unprepared.
            node.call_once("NodeUnprepareResources", *claim)
            continue
        if not any(word in answer.error for word in DISK_ERRORS):
            raise Broken(f"a claim was rejected without a reason: {answer.error}")
        found = snapshot(node)
        found["cdi"] = [name for name in found["cdi"] if name != FILLER]
        if text := difference(found, {key: before[key] for key in ("hardware", "drivers", "cdi")}):
            raise Leaked(f"a claim that was refused ({answer.error}) has left something\n{text}")
