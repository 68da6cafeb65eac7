# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the node driver has prepared for claims: the one definition of its store's tables, and a reader for others.

The driver writes the store; modules and the command line read it, without changing a byte, to know which partitions
claims hold.

Two numbers say what a store is. The *schema version*, a row of the meta table, is what a program has to know to read and
write it; it rises only with what an older program would do harm to. The *form*, SQLite's user_version, counts every change
of the tables. What a form has in addition is made so that programs that do not know it pass over it, and so that rows
which they write show that they lack it: a node goes back by one release and forth again with its claims.

Form 2 came with a checksum in each row of the tables meta and claims. A program of form 1 writes whole rows and names
their columns, so that the checksum of what it writes is the column's default, NO_CHECKSUM, and such a row is taken as that
program would take it. The column is a row's first one: a row that a turned bit cuts short lacks its last ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import signal
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from .errors import AcceleratorError
from .facts import device_of
from .model import Device, Placement
from .settings import noted_before

T = TypeVar("T")

SCHEMA_VERSION = 1
# The form that SCHEMA describes.
FORM = 2
# In place of a row's checksum: it was written by a program that knows of none. No part of a checksum can read like it.
NO_CHECKSUM = "none"
META_TABLE = "meta"
CLAIMS_TABLE = "claims"
DEVICES_TABLE = "devices"
PREPARING = "preparing"
PREPARED = "prepared"
#: The annotation of a claim's CDI file that contains the claim's record, so that a lost store can be rebuilt.
CLAIM_ANNOTATION = "dra.accelerators/prepared-claim"

META_COLUMNS = ("checksum", "key", "value")
CLAIM_COLUMNS = ("checksum", "uid", "namespace", "name", "state", "boot_id", "created_at", "document")
DEVICE_COLUMNS = (
    "claim_uid",
    "request",
    "pool",
    "name",
    "device_uuid",
    "kind",
    "profile",
    "profile_id",
    "placement_start",
    "placement_size",
    "partition_uuid",
    "instance_id",
    "created",
    "share_id",
    "admin",
    "cdi_id",
)

SCHEMA = (
    f"CREATE TABLE meta (checksum TEXT NOT NULL DEFAULT '{NO_CHECKSUM}', key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    f"""CREATE TABLE claims (
        checksum TEXT NOT NULL DEFAULT '{NO_CHECKSUM}',
        uid TEXT PRIMARY KEY,
        namespace TEXT NOT NULL,
        name TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('preparing', 'prepared')),
        boot_id TEXT NOT NULL,
        created_at REAL NOT NULL,
        document TEXT NOT NULL
    )""",
    """CREATE TABLE devices (
        claim_uid TEXT NOT NULL REFERENCES claims (uid) ON DELETE CASCADE,
        request TEXT NOT NULL,
        pool TEXT NOT NULL,
        name TEXT NOT NULL,
        device_uuid TEXT NOT NULL,
        kind TEXT NOT NULL,
        profile TEXT,
        profile_id INTEGER,
        placement_start INTEGER,
        placement_size INTEGER,
        partition_uuid TEXT,
        instance_id INTEGER,
        created INTEGER NOT NULL DEFAULT 0,
        share_id TEXT NOT NULL DEFAULT '',
        admin INTEGER NOT NULL DEFAULT 0,
        cdi_id TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (claim_uid, request, name, share_id)
    )""",
    "CREATE INDEX devices_by_device ON devices (device_uuid)",
)


def checksum(*texts: str) -> str:
    """Return the checksum of a row: of a key and its value, or of a claim's UID and its document.

    CRC-32, because it misses no single bit, no two or three of a row's and no run of up to 32, which is how memories and
    disks fail; of anything else it misses one in four thousand millions. It costs a microsecond a kilobyte, and no
    policy on cryptography switches it off. Each text counts with its length: what moves from one to the next is seen.
    """
    found = 0
    for text in texts:
        data = text.encode()
        found = zlib.crc32(b"%d:" % len(data) + data, found)
    return f"{found:08x}"


def fits(found: Any, *texts: Any) -> bool:
    """Whether a row's checksum is its own, or the row was written by a program that knows of none."""
    # A turned bit makes bytes of a text, or nothing.
    return all(isinstance(text, str) for text in texts) and found in (NO_CHECKSUM, checksum(*texts))


def contradiction(claim: Mapping[str, Any], devices: Iterable[Mapping[str, Any]]) -> str:
    """Return what does not fit together in a claim's row and the rows of its devices, in words; "" where all does.

    The document is the claim, and the checksum is the document's. All other columns are there to be looked for, and say
    what it says. Raises ValueError for a document that is none.
    """
    if not fits(claim["checksum"], claim["uid"], claim["document"]):
        return "its checksum does not fit"
    try:
        document = json.loads(claim["document"])
        told = [[each[column] for column in DEVICE_COLUMNS[1:]] for each in document["devices"]]
        wrong = [column for column in CLAIM_COLUMNS[1:-1] if claim[column] != document[column]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a claim's document lacks {error}") from error
    if wrong:
        return f"its columns {', '.join(wrong)} are not its document's"
    found = [[each[column] for column in DEVICE_COLUMNS[1:]] for each in devices]
    if sorted(map(repr, map(_plain, found))) != sorted(map(repr, map(_plain, told))):
        return "the rows of its devices are not its document's"
    return ""


def _plain(values: Iterable[Any]) -> list[Any]:
    # SQLite has no truth values: it gives back the numbers 0 and 1.
    return [int(value) if isinstance(value, bool) else value for value in values]


@dataclass(frozen=True)
class PreparedDevice:
    """One device of a claim.

    ``created`` says that the driver made the partition and will destroy it, ``settings`` are the knobs that the claim turns.
    """

    name: str
    device_uuid: str
    partition_uuid: str | None
    profile: str | None
    placement: Placement | None
    created: bool
    profile_id: int | None = None
    request: str = ""
    admin: bool = False
    kind: str = ""
    instance_id: int | None = None
    settings: tuple[str, ...] = ()

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """The UUID of the one physical device, as the driver's own records tell theirs."""
        return (self.device_uuid,)


@dataclass(frozen=True)
class PreparedClaim:
    """A claim that is prepared, or whose preparation has begun.

    ``away`` are the facts of devices that it has, or is about to have, given to virtual machines.
    """

    uid: str
    namespace: str
    name: str
    state: str
    devices: tuple[PreparedDevice, ...]
    boot_id: str = ""
    away: tuple[Device, ...] = ()

    def describe(self) -> str:
        """Name the claim for a person."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class PreparedPartition:
    """What the layout planner has to know of a claim: the device, and the part of it that the claim holds.

    Without a placement the claim holds the whole device. ``created`` says that the partition came with the claim and goes
    with it.
    """

    claim: str
    device_uuid: str
    partition_uuid: str | None = None
    profile_id: int | None = None
    placement: Placement | None = None
    created: bool = False


@dataclass(frozen=True)
class ClaimFiles:
    """The directory and the CDI kind of the CDI files of a driver's claims. The kind is "" for that of the store's driver."""

    directory: str = "/var/run/cdi"
    kind: str = ""


def prepared_claims(path: str, files: ClaimFiles | None = None) -> tuple[PreparedClaim, ...]:
    """Return the claims in the driver's store, without a change to the store. Return none if the driver has never had claims here.

    Raises AcceleratorError with code store-unreadable if the file is not a store, has a newer schema, or contains a damaged row. Raises it
    also if the store does not exist although ``store_leftovers`` or CDI files show that it has existed.
    """
    return _of_store(path, _claims, (), files or ClaimFiles())


def knobs_before_claims(path: str, boot_id: str, files: ClaimFiles | None = None) -> Mapping[tuple[str, str], Any]:
    """Read what knobs of devices were before claims of this boot turned them, by the device's UUID and the knob's name.

    Like prepared_claims otherwise.
    """

    def read(connection: sqlite3.Connection) -> Mapping[tuple[str, str], Any]:
        rows = [dict(row) for row in connection.execute("SELECT * FROM meta")]
        for row in rows:
            if not fits(row.get("checksum", NO_CHECKSUM), row["key"], row["value"]):
                raise ValueError(f"the row {row['key']} is not as it was written: its checksum does not fit")
        return noted_before({row["key"]: row["value"] for row in rows}, boot_id)

    return _of_store(path, read, {}, files or ClaimFiles())


def store_leftovers(path: str) -> tuple[str, ...]:
    """Return files that exist only after a store at this path existed: its log, its replacement, damaged stores, and backups."""
    return tuple(sorted(map(str, Path(path).parent.glob(f"{Path(path).name}[.-]*"))))


def _claim_files(path: str, files: ClaimFiles) -> tuple[str, ...]:
    """Return the CDI files that this collection's driver has written for claims. Other drivers use the same names."""
    kind = files.kind or f"k8s.{Path(path).parent.name}/claim"
    found = []
    for file in sorted(Path(files.directory).glob(f"{glob.escape(kind.replace('/', '-', 1))}_*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(file.read_text(encoding="utf-8"))["annotations"][CLAIM_ANNOTATION]:
                found.append(str(file))
    return tuple(found)


def _of_store(path: str, read: Callable[[sqlite3.Connection], T], nothing: T, files: ClaimFiles) -> T:
    """Return the result of ``read``, or ``nothing`` if a store has never existed. Raises AcceleratorError."""
    if not Path(path).exists():
        if remains := (*store_leftovers(path), *_claim_files(path, files)):
            raise AcceleratorError(
                f"The driver's store {path} does not exist, although the driver has had claims: found {', '.join(remains[:3])}"
                + (f" and {len(remains) - 3} more files" if len(remains) > 3 else ""),
                hint="Start the node driver: it rebuilds the store. If the driver was removed from this node and no pod uses its devices, "
                "delete these files.",
                code="store-unreadable",
            )
        return nothing
    try:
        try:
            return _read(path, path, read)
        except sqlite3.OperationalError:
            # SQLite wants to make files beside a store that no driver has open, and may not where the folder is
            # read-only: early at boot, or in a confined service. A copy has the same content.
            with tempfile.TemporaryDirectory() as folder:
                copy = str(Path(folder) / "state.db")
                for suffix in ("", "-wal"):
                    if Path(path + suffix).exists():
                        shutil.copyfile(path + suffix, copy + suffix)
                return _read(copy, path, read)
    except (sqlite3.Error, OSError, ValueError, KeyError, IndexError) as error:
        raise AcceleratorError(
            f"The driver's store {path} cannot be read: {error}",
            hint="Start the node driver again and look at its log: it sets a damaged store aside and rebuilds it.",
            code="store-unreadable",
        ) from error


def observe(path: str, look: Callable[[], T], files: ClaimFiles | None = None) -> tuple[T, tuple[PreparedClaim, ...]]:
    """Look at the hardware with the driver running: what ``look`` returns, and the claims that may hold any of it.

    The driver records a claim before it makes a partition for it, and forgets it after it has destroyed that. So whoever
    reads the store before the look and after it knows the claim of every partition that the look can have met.
    """
    before = prepared_claims(path, files)
    seen = look()
    claims = {claim.uid: claim for claim in (*before, *prepared_claims(path, files))}
    return seen, tuple(claims.values())


def _read(file: str, path: str, read: Callable[[sqlite3.Connection], T]) -> T:
    with contextlib.closing(sqlite3.connect(f"file:{quote(file)}?mode=ro", uri=True, timeout=5)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")
        version = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        found = int(version["value"]) if version is not None else SCHEMA_VERSION
        if found > SCHEMA_VERSION:
            raise AcceleratorError(
                f"The driver's store {path} has schema version {found}, this program knows {SCHEMA_VERSION}",
                hint="Use the release of dra.accelerators that the node's driver has.",
                code="store-unreadable",
            )
        return read(connection)


def _claims(connection: sqlite3.Connection) -> tuple[PreparedClaim, ...]:
    devices: dict[str, list[dict[str, Any]]] = {}
    for row in connection.execute("SELECT * FROM devices ORDER BY claim_uid, request, name"):
        devices.setdefault(row["claim_uid"], []).append(dict(row))
    claims = [dict(row) for row in connection.execute("SELECT * FROM claims ORDER BY created_at, uid")]
    for claim in claims:
        # Others destroy what no claim holds: a place that a turned bit has moved must not be believed.
        if claim.get("checksum", NO_CHECKSUM) != NO_CHECKSUM:
            wrong = contradiction(claim, devices.get(claim["uid"], ()))
            if wrong:
                raise ValueError(f"claim {claim['uid']} is not as it was written: {wrong}")
    return tuple(
        PreparedClaim(
            uid=claim["uid"],
            namespace=claim["namespace"],
            name=claim["name"],
            state=claim["state"],
            devices=_devices(devices.get(claim["uid"], ()), claim["document"]),
            boot_id=claim["boot_id"],
            away=_away(claim["document"]),
        )
        for claim in claims
    )


def _devices(rows: Iterable[Mapping[str, Any]], document: str) -> tuple[PreparedDevice, ...]:
    """Return what a claim holds, physical device by physical device: what stands for several has one row, and its members in the document."""
    told = {
        (each["request"], each["name"], each["share_id"]): each
        for each in json.loads(document or "{}").get("devices", ())
        if each.get("members") or each.get("settings")
    }
    found: list[PreparedDevice] = []
    for row in rows:
        more = told.get((row["request"], row["name"], row["share_id"]), {})
        device = replace(device_of_row(row), settings=tuple(more.get("settings") or ()))
        found += [replace(device, device_uuid=uuid) for uuid in more.get("members") or (row["device_uuid"],)]
    return tuple(found)


def _away(document: str) -> tuple[Device, ...]:
    devices = json.loads(document or "{}").get("devices", ())
    return tuple(device_of(each["passthrough"]["facts"]) for each in devices if each.get("passthrough"))


def wake_driver(directory: str) -> bool:
    """Make the driver that holds the lock in its state folder look at the hardware; False when none does.

    For whoever has changed the hardware, so that the driver publishes the change at once and not at its next look.
    """
    try:
        with (Path(directory) / "driver.lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # somebody holds it: the number in it is a living driver's
                os.kill(int(file.read().split()[1]), signal.SIGHUP)
                return True
    except (OSError, ValueError, IndexError):
        return False
    return False


def device_of_row(row: Mapping[str, Any]) -> PreparedDevice:
    """Make a device out of a row of the devices table."""
    placement = (
        Placement(row["placement_start"], row["placement_size"])
        if row["placement_start"] is not None and row["placement_size"] is not None
        else None
    )
    return PreparedDevice(
        name=row["name"],
        device_uuid=row["device_uuid"],
        partition_uuid=row["partition_uuid"] or None,
        profile=row["profile"] or None,
        placement=placement,
        created=bool(row["created"]),
        profile_id=row["profile_id"],
        request=row["request"],
        admin=bool(row["admin"]),
        kind=row["kind"],
        instance_id=row["instance_id"],
    )


class HeldDevice(Protocol):
    """What a claim has of one device, or of several that it has as one."""

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """The physical devices."""

    @property
    def partition_uuid(self) -> str | None:
        """The partition; None for a whole device."""

    @property
    def profile_id(self) -> int | None:
        """The vendor's number of its profile."""

    @property
    def placement(self) -> Placement | None:
        """Where it lies."""

    @property
    def created(self) -> bool:
        """Whether it came with the claim, and goes with it."""


class Holder(Protocol):
    """A claim, as it was read from the store or as the driver has it."""

    @property
    def devices(self) -> Sequence[HeldDevice]:
        """What it holds."""

    def describe(self) -> str:
        """Name it for a person."""


def prepared_partitions(claims: Iterable[Holder]) -> tuple[PreparedPartition, ...]:
    """Return what claims hold, for the planner. Devices held for administrators' access count as well."""
    return tuple(
        PreparedPartition(
            claim=claim.describe(),
            device_uuid=uuid,
            partition_uuid=device.partition_uuid,
            profile_id=device.profile_id,
            placement=device.placement,
            created=device.created,
        )
        for claim in claims
        for device in claim.devices
        for uuid in device.device_uuids
    )
