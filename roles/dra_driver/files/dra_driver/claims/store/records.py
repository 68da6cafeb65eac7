# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the record of a claim: the data to answer the kubelet, to undo the claim, and to restore it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.errors import AcceleratorError
from ...core.host.companions import SharedDevice
from ...core.host.passthrough import Handover, parse_handover
from ...core.model import PARTITION, Device, Partition, Placement
from ...core.store.device_facts import device_of
from ...core.store.prepared_claims import PREPARED, PREPARING

# The newest version that this release can read. A record is written in the oldest version that can hold it: 2 added
# settings, 3 sharing and shares, 4 passthrough, 5 groups of devices, 6 partitions of the fabric.
DOCUMENT_VERSION = 6


class OtherRelease(AcceleratorError):
    """An incompatible release wrote the data. The data is not damaged, and must not be changed."""


class NewerRelease(OtherRelease):
    """A newer release wrote the data."""

    default_code = "store-newer"

    def __init__(self, what: str, found: int, known: int) -> None:
        super().__init__(
            f"{what} was written by a newer release of this driver (version {found}; this release knows {known})",
            hint="Install the newer release again. To go back, end all pods with claims of this driver on the node first.",
        )


class OlderRelease(OtherRelease):
    """A release that is too old for this one to read wrote the data."""

    default_code = "store-older"

    def __init__(self, what: str, found: int, known: str) -> None:
        super().__init__(
            f"{what} was written by an older release of this driver (version {found}; this release reads {known})",
            hint="Install a release between the two first, or end all pods with claims of this driver with the older one.",
        )


@dataclass(frozen=True)
class ClaimReference:
    """The identification of a claim that the kubelet sends."""

    namespace: str
    name: str
    uid: str

    def describe(self) -> str:
        """Return the claim's namespace and name for messages."""
        return f"{self.namespace}/{self.name}"

    @property
    def problem(self) -> str:
        """Return the reason why this cannot be a claim; "" if it is valid.

        The UID is part of file names, and the names are part of API requests, so neither may be a path.
        """
        for what, value, expected, form in (
            ("UID", self.uid, "letters, digits and . _ - between them, 128 at most", _UID),
            ("namespace", self.namespace, _SUBDOMAIN_RULE, _SUBDOMAIN),
            ("name", self.name, _SUBDOMAIN_RULE, _SUBDOMAIN),
        ):
            if not form.fullmatch(value):
                shown = value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}…"
                return f"A claim's {what} {shown!r} is invalid; expected {expected}"
        return ""


# Facts: k8s.io/apimachinery. Names of objects are DNS subdomains. A UID is opaque; API servers use UUIDs.
_SUBDOMAIN_RULE = "a DNS subdomain of lower-case letters, digits, . and -, 253 at most"
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_SHOWN_CHARACTERS = 64


@dataclass(frozen=True)
class DeviceRecord:
    """One device of a claim.

    ``request`` is the full request name (``request`` or ``request/subrequest``). ``kind`` is "device", "partition",
    "passthrough" or "group". With ``created`` the driver creates and destroys the partition. ``partition_uuid`` and
    ``instance_id`` stay None until the partition exists. An ID that the driver chooses is set earlier, so that a
    partition of another program at the same placement can be recognized; earlier releases wrote None. ``cdi_id`` is the
    qualified CDI name. ``settings`` are the changed settings of a whole device, by name. ``sharing`` is the
    configuration of a companion that lets the claim's containers share the device. ``consumed`` is the claim's part of
    each capacity of a device that claims share. ``passthrough`` is set for a device of a virtual machine: its handover
    (see core/host/passthrough.py), and the device's facts, which cannot be read during that time. ``members`` are the UUIDs
    of the physical devices of a group; the first one is ``device_uuid``. ``fabric`` is the partition of the fabric that
    consists of the claim's whole devices (see claim_fabric.py).
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
    settings: Mapping[str, Any] = field(default_factory=dict)
    sharing: Mapping[str, Any] = field(default_factory=dict)
    consumed: Mapping[str, int] = field(default_factory=dict)
    passthrough: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    fabric: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the physical devices that it consists of or is a part of."""
        return self.members or (self.device_uuid,)

    @property
    def handover(self) -> Handover | None:
        """Return the handover of the device to a virtual machine; None for a device of containers."""
        return parse_handover(self.passthrough["handover"]) if self.passthrough else None

    @property
    def facts(self) -> Device | None:
        """Return the facts of a device that may be passed through."""
        return device_of(self.passthrough["facts"]) if self.passthrough else None

    @property
    def placement(self) -> Placement | None:
        """Return the placement of the partition; None for a whole device."""
        if self.placement_start is None or self.placement_size is None:
            return None
        return Placement(self.placement_start, self.placement_size)

    @property
    def key(self) -> tuple[int, int, int] | None:
        """Return profile ID, start, and size, which identify the partition on its device; None for a whole device."""
        if self.profile_id is None or self.placement_start is None or self.placement_size is None:
            return None
        return (self.profile_id, self.placement_start, self.placement_size)

    def with_changes(self, **changes: Any) -> DeviceRecord:
        """Return a copy with changed fields. Faster than ``dataclasses.replace``. Raises TypeError."""
        values = vars(self)
        if not changes.keys() <= values.keys():
            raise TypeError(f"a device's record has no {', '.join(sorted(changes.keys() - values.keys()))}")
        made = object.__new__(DeviceRecord)
        vars(made).update(values, **changes)
        return made

    def describes(self, partition: Partition) -> bool:
        """Return whether this record describes a partition.

        A partition that the driver created must also have its ID.
        """
        return partition.matches_record(self.key, self.instance_id if self.created else None)

    @property
    def base_request(self) -> str:
        """Return the request's name without the subrequest, as the kubelet compares it."""
        return self.request.partition("/")[0]

    @property
    def cdi_name(self) -> str:
        """Return the device's name inside the claim's CDI file."""
        return self.cdi_id.partition("=")[2]


@dataclass(frozen=True)
class ClaimRecord:
    """A claim in the store. ``state`` is "preparing" or "prepared". ``created_at`` is in seconds since the epoch."""

    uid: str
    namespace: str
    name: str
    state: str
    boot_id: str
    created_at: float
    devices: tuple[DeviceRecord, ...]

    @property
    def reference(self) -> ClaimReference:
        """Return the identification of the claim."""
        return ClaimReference(namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def prepared(self) -> bool:
        """Return whether the preparation was completed."""
        return self.state == PREPARED

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the claim's physical devices, sorted and unique."""
        return tuple(sorted({uuid for device in self.devices for uuid in device.device_uuids}))

    @property
    def kind(self) -> str:
        """Return the kind of the claim's devices, such as "dynamic-partition"; "mixed" for several kinds, "none" without devices."""
        kinds = {f"dynamic-{device.kind}" if device.created else device.kind for device in self.devices}
        return (kinds.pop() if len(kinds) == 1 else "mixed") if kinds else "none"

    @property
    def passthrough_devices(self) -> tuple[Device, ...]:
        """Return the facts of the devices that are, or will be, passed through to virtual machines."""
        return tuple(facts for device in self.devices if (facts := device.facts) is not None)

    @property
    def shared(self) -> tuple[SharedDevice, ...]:
        """Return the devices that the claim's containers share through companions, in the order of the allocation."""
        return tuple(
            SharedDevice(
                cdi_name=device.cdi_name,
                name=device.name,
                request=device.request,
                uuid=(device.partition_uuid or "") if device.kind == PARTITION else device.device_uuid,
                is_partition=device.kind == PARTITION,
                sharing=device.sharing,
            )
            for device in self.devices
            if device.sharing
        )

    def describe(self) -> str:
        """Return the claim's namespace and name for messages."""
        return self.reference.describe()

    def as_prepared(self, devices: Sequence[DeviceRecord], boot_id: str) -> ClaimRecord:
        """Return the record of the completed preparation."""
        return replace(self, state=PREPARED, devices=tuple(devices), boot_id=boot_id)

    def as_preparing(self) -> ClaimRecord:
        """Return the record of a preparation that must be undone or repeated."""
        return replace(self, state=PREPARING)

    @functools.cached_property
    def document(self) -> str:
        """Return the record as JSON text with a version, for the store and the CDI file. Each prepared claim needs it twice."""
        document = {**vars(self), "version": 1, "devices": [dict(vars(each)) for each in self.devices]}
        for version, name in _OPTIONAL_FIELDS:
            if any(device[name] for device in document["devices"]):
                document["version"] = version
            else:
                for device in document["devices"]:
                    del device[name]
        return _ENCODER.encode(document)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
# The fields that later versions added, with the version. A field that no device uses is left out.
_OPTIONAL_FIELDS = ((2, "settings"), (3, "sharing"), (3, "consumed"), (4, "passthrough"), (5, "members"), (6, "fabric"))
_STRING, _BOOLEAN = (str,), (bool,)
_DEVICE_TYPES: Mapping[str, tuple[type, ...]] = {
    "request": _STRING,
    "pool": _STRING,
    "name": _STRING,
    "device_uuid": _STRING,
    "kind": _STRING,
    "profile": (str, type(None)),
    "profile_id": (int, type(None)),
    "placement_start": (int, type(None)),
    "placement_size": (int, type(None)),
    "partition_uuid": (str, type(None)),
    "instance_id": (int, type(None)),
    "created": _BOOLEAN,
    "share_id": _STRING,
    "admin": _BOOLEAN,
    "cdi_id": _STRING,
    "settings": (dict,),
    "sharing": (dict,),
    "consumed": (dict,),
    "passthrough": (dict,),
    "fabric": (dict,),
}


def record_of_document(text: str) -> ClaimRecord:
    """Parse a record from JSON text.

    Raises ValueError for text that ``document`` cannot have written, and NewerRelease for a newer version.
    """
    try:
        value = json.loads(text)
        version = value.pop("version", None) if isinstance(value, dict) else None
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError("a prepared claim's document with a version was expected")
        if version > DOCUMENT_VERSION:
            raise NewerRelease("The record of a prepared claim", version, DOCUMENT_VERSION)
        devices = tuple(_device(entry) for entry in value.pop("devices"))
        record = ClaimRecord(devices=devices, **value)
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"a prepared claim's document cannot be read: {error}") from error
    texts = (record.uid, record.namespace, record.name, record.boot_id)
    if not all(isinstance(entry, str) for entry in texts) or record.state not in (PREPARING, PREPARED):
        raise ValueError("a prepared claim's document has values of the wrong type")
    return record


def _device(entry: Mapping[str, Any]) -> DeviceRecord:
    members = entry.get("members", [])
    if not isinstance(members, list) or not all(isinstance(each, str) for each in members):
        raise TypeError(f"members is {members!r}")
    device = DeviceRecord(**{**entry, "members": tuple(members)})
    for name, kinds in _DEVICE_TYPES.items():
        value = getattr(device, name)
        if not isinstance(value, kinds):
            raise TypeError(f"{name} is {value!r}")
    if device.passthrough and None in (device.handover, device.facts):  # reading them raises the error
        raise ValueError("a handover without facts")
    return device
