# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""A CDI file for all devices of a vendor on a node: what is to be in it, what others have in theirs, and what differs.

The edits are those that the node driver gives to claims. Facts: Container Device Interface specification 1.1.0; the names of devices are
those of NVIDIA/nvidia-container-toolkit (pkg/nvcdi).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .core.backend_protocol import Backend
from .core.cdi import ContainerEdits, build_spec
from .core.errors import AcceleratorError
from .core.model import DEVICE, PARTITION, Device
from .core.system import System

INDEX, UUID = "index", "uuid"
ALL = "all"
#: Runtimes look into these, and of one device in both the last one counts.
DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
_SUFFIXES = (".json", ".yaml")
_KIND = re.compile(r'^\s*"?kind"?\s*:\s*["\']?([^"\'\s,]+)', re.MULTILINE)
_NAME = re.compile(r'^\s*(?:-\s*)?"?name"?\s*:\s*["\']?([^"\'\s,]+)', re.MULTILINE)
SAME, ADDED, CHANGED, REMOVED = "same", "added", "changed", "removed"
#: The entry for what all devices share, which has no name in the file.
COMMON = ""


def kind_of(driver_name: str) -> str:
    """Return the kind by which people name a vendor's devices: nvidia.com/gpu of gpu.nvidia.com."""
    name, _dot, domain = driver_name.partition(".")
    return f"{domain}/{name}"


def file_of(directory: str, kind: str) -> str:
    """Return the path of this collection's file with devices of a kind."""
    return f"{directory.rstrip('/')}/dra-accelerators-{kind.replace('/', '-', 1)}.json"


def entries(
    backend: Backend, devices: Iterable[Device], namings: Collection[str], everything: bool
) -> dict[str, ContainerEdits]:
    """Return the container edits by the name of a device, of what is there to be used now.

    A device that is cut into partitions is not there as a whole. Raises AcceleratorError of what cannot be described.
    """
    found: dict[str, ContainerEdits] = {}
    every: list[ContainerEdits] = []
    for device in devices:
        # In the order of their numbers, which stays as it is when another one comes or goes at their side.
        parts = sorted(device.partitions, key=lambda each: (each.instance_id, each.compute_instance_id or 0))
        made = {each.uuid: each for each in parts if each.uuid}
        offers = backend.offers(device, dynamic=False)
        if any(offer.kind == DEVICE for offer in offers):
            edits = backend.device_edits(device, None)
            found.update(_named(edits, str(device.index), device.uuid, namings))
            every.append(edits)
        there = {offer.partition_uuid for offer in offers if offer.kind == PARTITION}
        for number, partition in enumerate(each for uuid, each in made.items() if uuid in there):
            edits = backend.device_edits(device, partition)
            found.update(_named(edits, f"{device.index}:{number}", partition.uuid, namings))
            every.append(edits)
    if everything and every:
        found[ALL] = ContainerEdits.merge(*every)
    return found


def _named(edits: ContainerEdits, index: str, uuid: str, namings: Collection[str]) -> dict[str, ContainerEdits]:
    return {name: edits for naming, name in ((INDEX, index), (UUID, uuid)) if naming in namings}


def specification(kind: str, devices: Mapping[str, ContainerEdits], common: ContainerEdits) -> dict[str, Any] | None:
    """Return the file as data, or None where there is no device. Raises AcceleratorError with code invalid-kind."""
    if not devices:
        return None
    try:
        return build_spec(kind, devices, common)
    except ValueError as error:
        raise AcceleratorError(str(error), hint="Give another kind.", code="invalid-kind") from error


def parsed(text: str | None) -> dict[str, Any] | None:
    """Return a file's content as data; None for one that is not there, and nothing in it for one that is not understood."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def differences(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """Return what becomes of each device, by name; the empty name stands for what all of them share."""
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


def written(specification: Mapping[str, Any] | None) -> str:
    """Return the text of the file, for people to read as well; empty where there is to be none."""
    return "" if specification is None else json.dumps(specification, indent=2) + "\n"


@dataclass(frozen=True)
class Other:
    """Another file with devices of the same names."""

    path: str
    names: tuple[str, ...]


def others(system: System, directories: Sequence[str], own: str, kind: str, names: Collection[str]) -> list[Other]:
    """Return the files of these folders, other than our own, that have devices of the same kind and names."""
    found = []
    ours = _place(system, own)
    for directory in dict.fromkeys(system.real_path(each) for each in directories if system.exists(each)):
        for name in sorted(system.list_directory(directory)):
            path = f"{directory.rstrip('/')}/{name}"
            if not name.endswith(_SUFFIXES) or name.startswith(".") or path == ours:
                continue
            try:
                text = system.read_text(path)
            except OSError:
                continue  # nobody can read it, or it has just gone
            there, theirs = names_in(text)
            same = sorted(theirs & set(names))
            if there == kind and same:
                found.append(Other(path, tuple(same)))
    return found


def names_in(text: str) -> tuple[str, set[str]]:
    """Return the kind and the names of devices in a CDI file, JSON or YAML.

    Of YAML, for which a node need have no reader, lines are looked at. They may name more than the devices.
    """
    data = parsed(text)
    if data:
        devices = data.get("devices")
        named = (each.get("name") for each in devices if isinstance(each, Mapping)) if isinstance(devices, list) else ()
        return str(data.get("kind", "")), {str(name) for name in named}
    kind = _KIND.search(text)
    return (kind.group(1) if kind else ""), set(_NAME.findall(text))


def refuse_conflicts(found: Sequence[Other], own: str, system: System) -> list[str]:
    """Raise AcceleratorError with code cdi-conflict for a file beside our own; return what is to be said of files elsewhere."""
    folder = _folder(_place(system, own))
    beside = [each for each in found if _folder(each.path) == folder]
    if beside:
        raise AcceleratorError(
            f"{_said(beside)} in the same folder as {own}; no runtime would find these devices",
            hint="Remove that file, or whatever writes it, or give another kind or directory.",
            code="cdi-conflict",
        )
    order = [system.real_path(each) for each in DIRECTORIES]

    def rank(path: str) -> int:
        return order.index(_folder(path)) if _folder(path) in order else -1

    mine = rank(_place(system, own))
    return [
        f"{_said([each])}, and {'these count' if rank(each.path) > mine else 'those of ' + own + ' count'}"
        for each in found
    ]


def _said(found: Sequence[Other]) -> str:
    return "; ".join(f"{each.path} has the devices {', '.join(each.names)} as well" for each in found)


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _place(system: System, path: str) -> str:
    """A path in a folder as the folder is called without links."""
    folder, _slash, name = path.rpartition("/")
    return f"{system.real_path(folder)}/{name}"
