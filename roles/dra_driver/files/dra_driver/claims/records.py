# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the driver remembers of a claim: enough to answer the kubelet, to undo everything, and to do it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..core.model import Placement
from ..core.prepared import PREPARED, PREPARING

# The key under which a claim's CDI file carries the claim's record, so that a lost store can be rebuilt.
ANNOTATION = "dra.accelerators/prepared-claim"
DOCUMENT_VERSION = 1

DEVICE = "device"
PARTITION = "partition"


@dataclass(frozen=True)
class ClaimReference:
    """Which claim is meant: all that the kubelet sends."""

    namespace: str
    name: str
    uid: str

    def describe(self) -> str:
        """Name the claim for a person."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class DeviceRecord:
    """One device of a claim.

    ``request`` is the full request name (``request`` or ``request/subrequest``). ``kind`` is "device" or "partition".
    ``created`` says that the driver makes the partition and destroys it again. ``partition_uuid`` and ``instance_id``
    are None until the partition exists. ``cdi_id`` is the qualified CDI name.
    """

    request: str
    pool: str
    name: str
    device_uuid: str
    kind: str
    profile: str | None = None
    profile_id: int | None = None
    placement_start: int | None = None
    placement_size: int | None = None
    partition_uuid: str | None = None
    instance_id: int | None = None
    created: bool = False
    share_id: str = ""
    admin: bool = False
    cdi_id: str = ""

    @property
    def placement(self) -> Placement | None:
        """Where the partition lies; None for a whole device."""
        if self.placement_start is None or self.placement_size is None:
            return None
        return Placement(self.placement_start, self.placement_size)

    @property
    def key(self) -> tuple[int, int, int] | None:
        """Profile id, start and size: what identifies the partition on its device; None for a whole device."""
        if self.profile_id is None or self.placement_start is None or self.placement_size is None:
            return None
        return (self.profile_id, self.placement_start, self.placement_size)

    @property
    def base_request(self) -> str:
        """The request's name without the subrequest, as the kubelet compares it."""
        return self.request.partition("/")[0]

    @property
    def cdi_name(self) -> str:
        """The device's name inside the claim's CDI file."""
        return self.cdi_id.partition("=")[2]


@dataclass(frozen=True)
class ClaimRecord:
    """A claim in the store. ``state`` is "preparing" or "prepared", ``created_at`` seconds since the epoch."""

    uid: str
    namespace: str
    name: str
    state: str
    boot_id: str
    created_at: float
    devices: tuple[DeviceRecord, ...]

    @property
    def reference(self) -> ClaimReference:
        """Which claim this is."""
        return ClaimReference(namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def prepared(self) -> bool:
        """Whether preparation was completed."""
        return self.state == PREPARED

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """The physical devices that the claim touches, sorted, each once."""
        return tuple(sorted({device.device_uuid for device in self.devices}))

    def describe(self) -> str:
        """Name the claim for a person."""
        return self.reference.describe()

    def as_prepared(self, devices: Sequence[DeviceRecord], boot_id: str) -> ClaimRecord:
        """Return the record of the completed preparation."""
        return replace(self, state=PREPARED, devices=tuple(devices), boot_id=boot_id)

    def as_preparing(self) -> ClaimRecord:
        """Return the record of a preparation that has to be undone or done again."""
        return replace(self, state=PREPARING)

    def to_document(self) -> str:
        """Return the record as JSON text with a version, for the store and the CDI file."""
        return json.dumps(
            {"version": DOCUMENT_VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"), allow_nan=False
        )


_TEXT, _TRUTH = (str,), (bool,)
_DEVICE_TYPES: Mapping[str, tuple[type, ...]] = {
    "request": _TEXT,
    "pool": _TEXT,
    "name": _TEXT,
    "device_uuid": _TEXT,
    "kind": _TEXT,
    "profile": (str, type(None)),
    "profile_id": (int, type(None)),
    "placement_start": (int, type(None)),
    "placement_size": (int, type(None)),
    "partition_uuid": (str, type(None)),
    "instance_id": (int, type(None)),
    "created": _TRUTH,
    "share_id": _TEXT,
    "admin": _TRUTH,
    "cdi_id": _TEXT,
}


def record_of_document(text: str) -> ClaimRecord:
    """Read a record out of JSON text. Raises ValueError for anything that to_document would not have written."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or value.pop("version", None) != DOCUMENT_VERSION:
            raise ValueError("a prepared claim's document of version 1 was expected")
        devices = tuple(_device(entry) for entry in value.pop("devices"))
        record = ClaimRecord(devices=devices, **value)
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"a prepared claim's document cannot be read: {error}") from error
    texts = (record.uid, record.namespace, record.name, record.boot_id)
    if not all(isinstance(entry, str) for entry in texts) or record.state not in (PREPARING, PREPARED):
        raise ValueError("a prepared claim's document has values of the wrong type")
    return record


def _device(entry: Mapping[str, Any]) -> DeviceRecord:
    device = DeviceRecord(**entry)
    for name, kinds in _DEVICE_TYPES.items():
        value = getattr(device, name)
        if not isinstance(value, kinds):
            raise TypeError(f"{name} is {value!r}")
    return device
