# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the tables of the node driver's store of prepared claims, and read the store for other programs.

The driver writes the store. Modules and the command line read it, without any change to it, to find the partitions that
claims use.

A store has two version numbers. The *schema version*, a row of the meta table, is required to read and write the store.
It increases only if an older program would do harm. The *form*, SQLite's user_version, increases with every change of
the tables. Additions of a form are made so that programs without support for it ignore them, and so that rows written
by such programs show that they lack them. So a node can be downgraded by one release and upgraded again with its
claims.

Form 2 added a checksum to each row of the tables meta and claims. A program of form 1 writes complete rows and names
their columns, so its rows get the column's default, NO_CHECKSUM, and are accepted without a check. The checksum is the
first column, because a row that is truncated by a flipped bit loses its last columns.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
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

from ..errors import AcceleratorError
from ..model import Device, Placement
from ..settings.knobs import values_before_claims
from .device_facts import device_of
from .state_files import LOCK

T = TypeVar("T")

SCHEMA_VERSION = 1
# The form that SCHEMA describes.
FORM = 2
# The checksum column of rows from programs without checksums. No checksum can have this value.
NO_CHECKSUM = "none"
META_TABLE = "meta"
CLAIMS_TABLE = "claims"
DEVICES_TABLE = "devices"
PREPARING = "preparing"
PREPARED = "prepared"
#: The annotation of a claim's CDI file that contains the claim's record, so that a lost store can be rebuilt.
CLAIM_ANNOTATION = "dra.accelerators/prepared-claim"
#: The default directory of CDI files, and the file of systemd-tmpfiles in which the role dra_driver lists the driver's directories.
CDI_DIRECTORY = "/var/run/cdi"
DIRECTORIES_FILE = "/etc/tmpfiles.d/dra-accelerators.conf"

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

    CRC-32 detects every error of one, two, or three bits of a table row and every burst of up to 32 bits, which are the
    typical errors of memory and disks. It misses other errors with a probability of one in four billion. It takes a
    microsecond per kilobyte, and cryptography policies do not disable it. The length of each text is included, so that
    data that moves from one text to the next is detected.
    """
    found = 0
    for text in texts:
        data = text.encode()
        found = zlib.crc32(b"%d:" % len(data) + data, found)
    return f"{found:08x}"


def has_valid_checksum(found: Any, *texts: Any) -> bool:
    """Return whether a row's checksum is correct, or the row was written by a program without checksums."""
    # A flipped bit can turn a text into bytes or NULL.
    return all(isinstance(text, str) for text in texts) and found in (NO_CHECKSUM, checksum(*texts))


def find_inconsistency(claim: Mapping[str, Any], devices: Iterable[Mapping[str, Any]]) -> str:
    """Return the difference between a claim's row and the rows of its devices as text; "" if they are consistent.

    The document is authoritative, and the checksum covers it. All other columns exist for queries and repeat it. Raises
    ValueError for an invalid document.
    """
    if not has_valid_checksum(claim["checksum"], claim["uid"], claim["document"]):
        return "its checksum does not fit"
    try:
        document = json.loads(claim["document"])
        listed = [[each[column] for column in DEVICE_COLUMNS[1:]] for each in document["devices"]]
        different = [column for column in CLAIM_COLUMNS[1:-1] if claim[column] != document[column]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a claim's document lacks {error}") from error
    if different:
        return f"its columns {', '.join(different)} are not its document's"
    found = [[each[column] for column in DEVICE_COLUMNS[1:]] for each in devices]
    if sorted(map(repr, map(_sqlite_values, found))) != sorted(map(repr, map(_sqlite_values, listed))):
        return "the rows of its devices are not its document's"
    return ""


def _sqlite_values(values: Iterable[Any]) -> list[Any]:
    # SQLite has no booleans: it returns the numbers 0 and 1.
    return [int(value) if isinstance(value, bool) else value for value in values]


@dataclass(frozen=True)
class PreparedDevice:
    """One device of a claim.

    ``created`` says that the driver created the partition and will delete it. ``settings`` are the knobs that the claim
    changes.
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
        """Return the UUID of the physical device, in the same form as the driver's own records."""
        return (self.device_uuid,)


@dataclass(frozen=True)
class PreparedClaim:
    """A claim that is prepared, or whose preparation has started.

    ``away`` are the facts of its devices that are, or are about to be, assigned to virtual machines.
    """

    uid: str
    namespace: str
    name: str
    state: str
    devices: tuple[PreparedDevice, ...]
    boot_id: str = ""
    away: tuple[Device, ...] = ()

    def describe(self) -> str:
        """Return the claim's name for messages."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class PreparedPartition:
    """The device, or the part of it, that a claim uses, for the layout planner.

    Without a placement the claim uses the whole device. ``created`` says that the partition was created for the claim
    and is deleted with it.
    """

    claim: str
    device_uuid: str
    partition_uuid: str | None = None
    profile_id: int | None = None
    placement: Placement | None = None
    created: bool = False


@dataclass(frozen=True)
class ClaimFiles:
    """The directory and the CDI kind of the CDI files of a driver's claims.

    The directory is "" for the default directory and those in DIRECTORIES_FILE, the kind is "" for that of the store's driver.
    """

    directory: str = ""
    kind: str = ""

    def directories(self) -> tuple[str, ...]:
        """Return the directories in which CDI files of claims can be."""
        if self.directory:
            return (self.directory,)
        text = ""
        with contextlib.suppress(OSError, ValueError):
            text = Path(DIRECTORIES_FILE).read_text(encoding="utf-8")
        words = [line.split() for line in text.splitlines()]
        return (CDI_DIRECTORY, *(each[1] for each in words if len(each) > 1 and each[0] == "d"))


def prepared_claims(path: str, files: ClaimFiles | None = None) -> tuple[PreparedClaim, ...]:
    """Return the claims in the driver's store, without a change to the store.

    Return none if the driver has never had claims here. Raises AcceleratorError with code store-unreadable if the file
    is not a store, has a newer schema, or contains a damaged row. Raises it also if the store does not exist although
    ``store_leftovers`` or CDI files show that it has existed.
    """
    return _read_store(path, _all_claims, (), files or ClaimFiles())


def knobs_before_claims(path: str, boot_id: str, files: ClaimFiles | None = None) -> Mapping[tuple[str, str], Any]:
    """Return the knobs' values before claims of this boot changed them, by device UUID and knob name.

    Raises the same errors as ``prepared_claims``.
    """

    def read(connection: sqlite3.Connection) -> Mapping[tuple[str, str], Any]:
        rows = [dict(row) for row in connection.execute("SELECT * FROM meta")]
        for row in rows:
            if not has_valid_checksum(row.get("checksum", NO_CHECKSUM), row["key"], row["value"]):
                raise ValueError(f"the row {row['key']} was changed: its checksum does not match")
        return values_before_claims({row["key"]: row["value"] for row in rows}, boot_id)

    return _read_store(path, read, {}, files or ClaimFiles())


def store_leftovers(path: str) -> tuple[str, ...]:
    """Return files that show that a store has existed at this path: its log, its replacement, damaged stores, and backups."""
    return tuple(sorted(_matching(str(Path(path).parent), f"{glob.escape(Path(path).name)}[.-]*")))


def _matching(directory: str, pattern: str) -> list[str]:
    """Return the paths in a directory whose names match; none if there is no directory.

    Raises OSError if the directory cannot be read now: ``Path.glob`` of Python 3.13 would return nothing.
    """
    try:
        names = [file.name for file in Path(directory).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [str(Path(directory) / name) for name in fnmatch.filter(names, pattern)]


def _claim_files(path: str, files: ClaimFiles) -> tuple[str, ...]:
    """Return the CDI files that this collection's driver has written for claims. Other drivers use the same names."""
    kind = files.kind or f"k8s.{Path(path).parent.name}/claim"
    found = []
    pattern = f"{glob.escape(kind.replace('/', '-', 1))}_*.json"
    # Several paths can lead to one directory, such as /var/run/cdi and /run/cdi.
    for file in sorted({os.path.realpath(each) for place in files.directories() for each in _matching(place, pattern)}):
        try:
            if json.loads(Path(file).read_text(encoding="utf-8"))["annotations"][CLAIM_ANNOTATION]:
                found.append(file)
        except FileNotFoundError:
            pass
        except OSError:
            found.append(file)  # a file that cannot be read now can be one of the driver's
        except (ValueError, TypeError, KeyError):
            pass
    return tuple(found)


def _exists(path: str) -> bool:
    """Return whether there is a store.

    Raises AcceleratorError after a read error, with which its claims' devices would count as free.
    """
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def _unreadable(path: str, error: BaseException) -> AcceleratorError:
    return AcceleratorError(
        f"The driver's store {path} cannot be read: {error}",
        hint="Start the node driver again and look at its log: it sets a damaged store aside and rebuilds it.",
        code="store-unreadable",
    )


def _read_store(path: str, read: Callable[[sqlite3.Connection], T], default: T, files: ClaimFiles) -> T:
    """Return the result of ``read``, or ``default`` if a store has never existed. Raises AcceleratorError."""
    if not _exists(path):
        try:
            remains = (*store_leftovers(path), *_claim_files(path, files))
        except OSError as error:
            raise _unreadable(path, error) from error
        if remains:
            raise AcceleratorError(
                f"The driver's store {path} does not exist, although the driver has had claims: found {', '.join(remains[:3])}"
                + (f" and {len(remains) - 3} more files" if len(remains) > 3 else ""),
                hint="Start the node driver: it rebuilds the store. If the driver was removed from this node and no pod uses its devices, "
                "delete these files.",
                code="store-unreadable",
            )
        return default
    try:
        try:
            return _read(path, path, read)
        except sqlite3.OperationalError:
            # SQLite must create files next to a store that no driver has open, and cannot if the directory is
            # read-only: early at boot, or in a confined service. A copy has the same content.
            with tempfile.TemporaryDirectory() as folder:
                copy = str(Path(folder) / "state.db")
                for suffix in ("", "-wal"):
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copyfile(path + suffix, copy + suffix)
                return _read(copy, path, read)
    except (sqlite3.Error, OSError, ValueError, KeyError, IndexError) as error:
        raise _unreadable(path, error) from error


def observe(path: str, scan: Callable[[], T], files: ClaimFiles | None = None) -> tuple[T, tuple[PreparedClaim, ...]]:
    """Run ``scan``, which scans the hardware, while the driver runs.

    Return its result and the claims that may use its devices. The driver records a claim before it creates a partition
    for it, and deletes the record after it has deleted the partition. So a read of the store before and after the scan
    finds the claim of every scanned partition.
    """
    before = prepared_claims(path, files)
    result = scan()
    claims = {claim.uid: claim for claim in (*before, *prepared_claims(path, files))}
    return result, tuple(claims.values())


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


def _all_claims(connection: sqlite3.Connection) -> tuple[PreparedClaim, ...]:
    devices: dict[str, list[dict[str, Any]]] = {}
    for row in connection.execute("SELECT * FROM devices ORDER BY claim_uid, request, name"):
        devices.setdefault(row["claim_uid"], []).append(dict(row))
    claims = [dict(row) for row in connection.execute("SELECT * FROM claims ORDER BY created_at, uid")]
    for claim in claims:
        # Other programs delete partitions without a claim, so a placement that a flipped bit changed must not be
        # trusted.
        if claim.get("checksum", NO_CHECKSUM) != NO_CHECKSUM:
            wrong = find_inconsistency(claim, devices.get(claim["uid"], ()))
            if wrong:
                raise ValueError(f"claim {claim['uid']} was changed: {wrong}")
    return tuple(
        PreparedClaim(
            uid=claim["uid"],
            namespace=claim["namespace"],
            name=claim["name"],
            state=claim["state"],
            devices=_claim_devices(devices.get(claim["uid"], ()), claim["document"]),
            boot_id=claim["boot_id"],
            away=_passed_through(claim["document"]),
        )
        for claim in claims
    )


def _claim_devices(rows: Iterable[Mapping[str, Any]], document: str) -> tuple[PreparedDevice, ...]:
    """Return a claim's devices, one entry per physical device.

    A group has one row, and its members are in the document.
    """
    grouped = {
        (each["request"], each["name"], each["share_id"]): each
        for each in json.loads(document or "{}").get("devices", ())
        if each.get("members") or each.get("settings")
    }
    found: list[PreparedDevice] = []
    for row in rows:
        details = grouped.get((row["request"], row["name"], row["share_id"]), {})
        device = replace(device_of_row(row), settings=tuple(details.get("settings") or ()))
        found += [replace(device, device_uuid=uuid) for uuid in details.get("members") or (row["device_uuid"],)]
    return tuple(found)


def _passed_through(document: str) -> tuple[Device, ...]:
    devices = json.loads(document or "{}").get("devices", ())
    return tuple(device_of(each["passthrough"]["facts"]) for each in devices if each.get("passthrough"))


def wake_driver(directory: str) -> bool:
    """Request a hardware scan from the driver that holds the lock in its state directory.

    Return False if no such process is found. For programs that have changed the hardware. A driver without a signal
    finds the change at its next scan.
    """
    try:
        with (Path(directory) / LOCK).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                process = _lock_holder(int(file.read().split()[1]), os.fstat(file.fileno()).st_ino)
                if process is not None:
                    os.kill(process, signal.SIGHUP)
                return process is not None
    except (OSError, ValueError, IndexError):
        return False
    return False


def _lock_holder(recorded: int, inode: int) -> int | None:
    """Return the process that holds the lock on a file, by its PID here. Raises OSError.

    ``recorded`` is the PID in the driver's own PID namespace: in a pod without ``hostPID`` this is the PID of another process here, such as
    1. The kernel shows the lock's holder by its PID in the namespace of /proc, and does not show a holder outside of it.
    """
    for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
        words = (
            line.split()
        )  # NUMBER: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END; a process that waits has "->" before FLOCK
        if words[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and words[5].endswith(f":{inode}"):
            status = Path(f"/proc/{words[4]}/status").read_text(encoding="utf-8", errors="replace")
            # Inode numbers are unique only in one file system.
            if any(each.split()[-1] == str(recorded) for each in status.splitlines() if each.startswith("NSpid:")):
                return int(words[4])
    return None


def device_of_row(row: Mapping[str, Any]) -> PreparedDevice:
    """Return the device from a row of the devices table."""
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
    """The part of one device, or of a group of devices, that a claim uses."""

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the physical devices."""

    @property
    def partition_uuid(self) -> str | None:
        """Return the partition's UUID; None for a whole device."""

    @property
    def profile_id(self) -> int | None:
        """Return the vendor's id of its profile."""

    @property
    def placement(self) -> Placement | None:
        """Return its placement."""

    @property
    def created(self) -> bool:
        """Return whether it was created for the claim and is deleted with it."""


class Holder(Protocol):
    """A claim, from the store or from the driver."""

    @property
    def devices(self) -> Sequence[HeldDevice]:
        """Return its devices."""

    def describe(self) -> str:
        """Return its name for messages."""


def prepared_partitions(claims: Iterable[Holder]) -> tuple[PreparedPartition, ...]:
    """Return the devices and partitions that claims use, for the planner. Devices with admin access are included."""
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
