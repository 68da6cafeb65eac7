# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the driver remembers of a claim: enough to answer the kubelet, to undo everything, and to do it again."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.companions import SharedDevice
from ..core.errors import AcceleratorError
from ..core.facts import device_of
from ..core.model import PARTITION, Device, Partition, Placement
from ..core.passthrough import Handover, handover_of
from ..core.prepared import PREPARED, PREPARING

# The newest version of that record that can be read here. Each is written in the oldest version that can hold it: 2 came with
# settings, 3 with sharing and shares, 4 with passthrough, 5 with groups of devices, 6 with partitions of the fabric.
DOCUMENT_VERSION = 6


class OtherRelease(AcceleratorError):
    """What is stored was written by a release from which none leads to this one; it is neither damaged nor to be touched."""


class NewerRelease(OtherRelease):
    """What is stored was written by a newer release."""

    default_code = "store-newer"

    def __init__(self, what: str, found: int, known: int) -> None:
        super().__init__(
            f"{what} was written by a newer release of this driver (version {found}; this release knows {known})",
            hint="Install the newer release again. To go back, end all pods with claims of this driver on the node first.",
        )


class OlderRelease(OtherRelease):
    """What is stored was written by a release so old that this one cannot read it any more."""

    default_code = "store-older"

    def __init__(self, what: str, found: int, known: str) -> None:
        super().__init__(
            f"{what} was written by an older release of this driver (version {found}; this release reads {known})",
            hint="Install a release between the two first, or end all pods with claims of this driver with the older one.",
        )


@dataclass(frozen=True)
class ClaimReference:
    """Which claim is meant: all that the kubelet sends."""

    namespace: str
    name: str
    uid: str

    def describe(self) -> str:
        """Name the claim for a person."""
        return f"{self.namespace}/{self.name}"

    @property
    def problem(self) -> str:
        """What keeps this from being a claim, in words; "" where nothing does.

        Files are named by the UID, and requests to the API server by the names, so that neither may be a path.
        """
        for what, value, expected, form in (
            ("UID", self.uid, "letters, digits and . _ - between them, 128 at most", _UID),
            ("namespace", self.namespace, _SUBDOMAIN_WORDS, _SUBDOMAIN),
            ("name", self.name, _SUBDOMAIN_WORDS, _SUBDOMAIN),
        ):
            if not form.fullmatch(value):
                shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
                return f"A claim's {what} {shown!r} is none; expected {expected}"
        return ""


# Facts: k8s.io/apimachinery, names of objects are DNS subdomains. A UID is opaque there; API servers give UUIDs.
_SUBDOMAIN_WORDS = "a DNS subdomain of lower-case letters, digits, . and -, 253 at most"
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_SHOWN = 64


@dataclass(frozen=True)
class DeviceRecord:
    """One device of a claim.

    ``request`` is the full request name (``request`` or ``request/subrequest``). ``kind`` is "device", "partition", "passthrough" or "group".
    ``created`` says that the driver makes the partition and destroys it again. ``partition_uuid`` and ``instance_id``
    are None until the partition exists; but an id that the driver chooses is here before, so that the partition can be told from
    one that somebody else makes in its place. Releases before wrote None. ``cdi_id`` is the qualified CDI name. ``settings`` is what the claim sets on a whole
    device, by knob; ``sharing`` is what it asks of a companion that lets its containers share the device, and
    ``consumed`` what it has of a device that it shares with other claims. ``passthrough`` is of a device for a virtual machine:
    its handover (see core/passthrough.py), and the device's facts, which nobody can ask for while it is away. ``members`` are the
    UUIDs of the physical devices of a group, whose first one is ``device_uuid``. ``fabric`` is the partition of the machine's fabric that the
    claim's whole devices are (see fabric.py).
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
        """The physical devices that it is, or is a part of."""
        return self.members or (self.device_uuid,)

    @property
    def handover(self) -> Handover | None:
        """How the device goes to a virtual machine and comes back; None for what containers share with the node."""
        return handover_of(self.passthrough["handover"]) if self.passthrough else None

    @property
    def facts(self) -> Device | None:
        """The facts of a device that may be away."""
        return device_of(self.passthrough["facts"]) if self.passthrough else None

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

    def but(self, **changes: Any) -> DeviceRecord:
        """Return the record with other values of some fields, as ``dataclasses.replace`` does in many more steps. Raises TypeError."""
        values = vars(self)
        if not changes.keys() <= values.keys():
            raise TypeError(f"a device's record has no {', '.join(sorted(changes.keys() - values.keys()))}")
        made = object.__new__(DeviceRecord)
        vars(made).update(values, **changes)
        return made

    def has(self, partition: Partition) -> bool:
        """Whether a partition of the device is the one that is meant: of those that the driver makes, the very one that it made."""
        return partition.is_the_one(self.key, self.instance_id if self.created else None)

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
        return tuple(sorted({uuid for device in self.devices for uuid in device.device_uuids}))

    @property
    def kind(self) -> str:
        """What the claim has, in one word: what all its devices are, "dynamic-partition" among it, else "mixed"; or "none"."""
        kinds = {f"dynamic-{device.kind}" if device.created else device.kind for device in self.devices}
        return (kinds.pop() if len(kinds) == 1 else "mixed") if kinds else "none"

    @property
    def away(self) -> tuple[Device, ...]:
        """The facts of the devices that are, or are about to be, given to virtual machines."""
        return tuple(facts for device in self.devices if (facts := device.facts) is not None)

    @property
    def shared(self) -> tuple[SharedDevice, ...]:
        """The devices that the claim's containers share through companions, in the order of the allocation."""
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
        return self._document

    @functools.cached_property
    def _document(self) -> str:
        """The same; it is asked for twice by each claim that is prepared."""
        document = {**vars(self), "version": 1, "devices": [dict(vars(each)) for each in self.devices]}
        for version, name in _LATER:
            if any(device[name] for device in document["devices"]):
                document["version"] = version
            else:
                for device in document["devices"]:
                    del device[name]
        return _ENCODER.encode(document)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
# What came after version 1, and is left out where no device has it: the version, and the field.
_LATER = ((2, "settings"), (3, "sharing"), (3, "consumed"), (4, "passthrough"), (5, "members"), (6, "fabric"))
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
    "settings": (dict,),
    "sharing": (dict,),
    "consumed": (dict,),
    "passthrough": (dict,),
    "fabric": (dict,),
}


def record_of_document(text: str) -> ClaimRecord:
    """Read a record out of JSON text.

    Raises ValueError for anything that to_document would not have written, NewerRelease for what a newer one would.
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
    if device.passthrough and None in (device.handover, device.facts):  # reading them raises what is wrong
        raise ValueError("a handover without facts")
    return device
