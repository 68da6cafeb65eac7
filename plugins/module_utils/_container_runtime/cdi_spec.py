# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Build the CDI file for all devices of a vendor on a node, compare it with the current file, and find conflicting files.

The container edits are the same as those of the node driver for claims. Facts: Container Device Interface
specification 1.1.0. Device names follow NVIDIA/nvidia-container-toolkit (pkg/nvcdi).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import AcceleratorError
from ..core.host.cdi import ContainerEdits, build_spec
from ..core.host.system import System
from ..core.model import DEVICE, PARTITION, Device
from ..core.vendors.protocol import Backend

INDEX, UUID = "index", "uuid"
ALL = "all"
#: Runtimes read these directories. For a device in both, the last directory has precedence.
DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
_SUFFIXES = (".json", ".yaml")
_KIND = re.compile(r'^\s*"?kind"?\s*:\s*["\']?([^"\'\s,]+)', re.MULTILINE)
_NAME = re.compile(r'^\s*(?:-\s*)?"?name"?\s*:\s*["\']?([^"\'\s,]+)', re.MULTILINE)
SAME, ADDED, CHANGED, REMOVED = "same", "added", "changed", "removed"
#: The name that ``differences`` returns for the edits that all devices share.
COMMON = ""


def kind_of(driver_name: str) -> str:
    """Return the CDI kind for a driver name: nvidia.com/gpu for gpu.nvidia.com."""
    name, _dot, domain = driver_name.partition(".")
    return f"{domain}/{name}"


def file_of(directory: str, kind: str) -> str:
    """Return the path of this collection's CDI file for a kind."""
    return f"{directory.rstrip('/')}/dra-accelerators-{kind.replace('/', '-', 1)}.json"


def entries(
    backend: Backend, devices: Iterable[Device], namings: Collection[str], everything: bool
) -> dict[str, ContainerEdits]:
    """Return the container edits of the currently usable devices, by device name.

    A partitioned device is not usable as a whole. Raises AcceleratorError if a device cannot be described.
    """
    found: dict[str, ContainerEdits] = {}
    every: list[ContainerEdits] = []
    for device in devices:
        # Sort by instance IDs: the order of existing partitions does not change if another one is created or deleted.
        parts = sorted(device.partitions, key=lambda each: (each.instance_id, each.compute_instance_id or 0))
        with_handle = {each.uuid: each for each in parts if each.uuid}
        offers = backend.offers(device, dynamic=False)
        if any(offer.kind == DEVICE for offer in offers):
            edits = backend.device_edits(device, None)
            found.update(_named(edits, str(device.index), device.uuid, namings))
            every.append(edits)
        usable = {offer.partition_uuid for offer in offers if offer.kind == PARTITION}
        for number, partition in enumerate(each for uuid, each in with_handle.items() if uuid in usable):
            edits = backend.device_edits(device, partition)
            found.update(_named(edits, f"{device.index}:{number}", partition.uuid, namings))
            every.append(edits)
    if everything and every:
        found[ALL] = ContainerEdits.merge(*every)
    return found


def _named(edits: ContainerEdits, index: str, uuid: str, namings: Collection[str]) -> dict[str, ContainerEdits]:
    return {name: edits for naming, name in ((INDEX, index), (UUID, uuid)) if naming in namings}


def specification(kind: str, devices: Mapping[str, ContainerEdits], common: ContainerEdits) -> dict[str, Any] | None:
    """Return the content of the CDI file, or None without devices. Raises AcceleratorError with code invalid-kind."""
    if not devices:
        return None
    try:
        return build_spec(kind, devices, common)
    except ValueError as error:
        raise AcceleratorError(str(error), hint="Set another kind.", code="invalid-kind") from error


def parse_file(text: str | None) -> dict[str, Any] | None:
    """Return the content of a JSON file. Return None if the file does not exist, and {} if it is not valid."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def differences(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """Return the change of each device, by name. The empty name means the edits that all devices share."""
    old, new = _by_name(before), _by_name(after)
    return [
        {
            "name": name,
            "change": ADDED
            if name not in old
            else REMOVED
            if name not in new
            else SAME
            if old[name] == new[name]
            else CHANGED,
        }
        for name in [*new, *(name for name in old if name not in new)]
    ]


def _by_name(specification: Mapping[str, Any] | None) -> dict[str, Any]:
    found = {}
    for each in (specification or {}).get("devices") or ():
        if isinstance(each, Mapping):
            found[str(each.get("name"))] = each.get("containerEdits")
    if (specification or {}).get("containerEdits"):
        found[COMMON] = (specification or {})["containerEdits"]
    return found


def file_text(specification: Mapping[str, Any] | None) -> str:
    """Return the indented text of the file, or an empty string if no file is needed."""
    return "" if specification is None else json.dumps(specification, indent=2) + "\n"


@dataclass(frozen=True)
class Other:
    """Another CDI file that defines devices of the same names."""

    path: str
    names: tuple[str, ...]


def other_files(system: System, directories: Sequence[str], own: str, kind: str, names: Collection[str]) -> list[Other]:
    """Return the other files in these directories that define devices of the same kind and names."""
    found = []
    own_path = _resolved_path(system, own)
    for directory in dict.fromkeys(system.real_path(each) for each in directories if system.exists(each)):
        for name in sorted(system.list_directory(directory)):
            path = f"{directory.rstrip('/')}/{name}"
            if not name.endswith(_SUFFIXES) or name.startswith(".") or path == own_path:
                continue
            try:
                text = system.read_text(path)
            except OSError:
                continue  # not readable, or deleted in the meantime
            file_kind, file_names = names_in(text)
            common = sorted(file_names & set(names))
            if file_kind == kind and common:
                found.append(Other(path, tuple(common)))
    return found


def names_in(text: str) -> tuple[str, set[str]]:
    """Return the kind and the device names in a CDI file, JSON or YAML.

    YAML is searched line by line, because a node does not need a YAML library. The result can have names of other objects.
    """
    data = parse_file(text)
    if data:
        devices = data.get("devices")
        named = (each.get("name") for each in devices if isinstance(each, Mapping)) if isinstance(devices, list) else ()
        return str(data.get("kind", "")), {str(name) for name in named}
    kind = _KIND.search(text)
    return (kind.group(1) if kind else ""), set(_NAME.findall(text))


def refuse_conflicts(found: Sequence[Other], own: str, system: System) -> list[str]:
    """Raise AcceleratorError with code cdi-conflict for a conflicting file in the same directory.

    Returns a warning for each conflicting file in another directory.
    """
    folder = _folder(_resolved_path(system, own))
    conflicts = [each for each in found if _folder(each.path) == folder]
    if conflicts:
        raise AcceleratorError(
            f"{_describe(conflicts)}, in the same directory as {own}. No runtime would find these devices",
            hint="Remove that file or the program that writes it, or set another kind or directory.",
            code="cdi-conflict",
        )
    order = [system.real_path(each) for each in DIRECTORIES]

    def rank(path: str) -> int:
        return order.index(_folder(path)) if _folder(path) in order else -1

    own_rank = rank(_resolved_path(system, own))
    return [
        f"{_describe([each])}. Runtimes use the devices of {each.path if rank(each.path) > own_rank else own}"
        for each in found
    ]


def _describe(found: Sequence[Other]) -> str:
    return "; ".join(f"{each.path} also defines the devices {', '.join(each.names)}" for each in found)


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _resolved_path(system: System, path: str) -> str:
    """Return a path with the links of its directory resolved."""
    folder, _slash, name = path.rpartition("/")
    return f"{system.real_path(folder)}/{name}"
