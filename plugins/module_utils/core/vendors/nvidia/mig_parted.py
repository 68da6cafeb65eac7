# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read configuration files of nvidia-mig-parted as layout rules, and write the state of GPUs in their format.

Facts: NVIDIA/mig-parted (api/spec/v1, internal, pkg/mig/builder). For each GPU, every matching entry is applied in
order, so that a later one overrides earlier ones. ``devices: all`` skips GPUs without MIG silently, and so does
``mig-enabled: false``. ``assert`` requires that an entry matches every GPU of the node; GPUs without MIG need an entry
that disables it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import InvalidLayout, Unsupported
from ...model import Device, Partition, Profile
from ...partitioning.rules import STATIC, WHOLE, Match, Rule, WantedPartition
from .profiles import parse_name

_DOCUMENT_KEYS = ("version", "mig-configs")
#: The key of the file in the ConfigMaps of NVIDIA's GPU operator.
_CONFIG_MAP_KEY = "config.yaml"
_ENTRY_KEYS = ("device-filter", "devices", "mig-enabled", "mig-devices")
# The balanced layout by the slices of a board: the number of partitions by their slices.
_BALANCED: Mapping[int, Mapping[int, int]] = {7: {1: 2, 2: 1, 3: 1}, 4: {1: 2, 2: 1}}
_FILTER = re.compile(r"0x([0-9a-fA-F]{8})(?::0x([0-9a-fA-F]{8}))?")


def rules_from_mig_parted(
    document: Any, config_name: str, devices: Sequence[Device], unread: Collection[int] = ()
) -> tuple[Rule, ...]:
    """Return the layout of a configuration in a parsed mig-parted file, as one rule for each matching GPU.

    GPUs that no entry matches have no rule and are not changed. ``unread`` are the indices of GPUs that could not be
    read. They count, because the file selects GPUs by index.

    Raises InvalidLayout with the configuration, the entry (counted from 1), and the key. Raises Unsupported for an
    entry that enables MIG by index on a GPU without it, and for compute instances that do not fill their GPU instance.
    """
    entries = _entries(document, config_name)
    ordered = sorted(devices, key=lambda device: device.pci_address)
    chosen: dict[str, Rule] = {}
    numbers = (number for number in range(len(ordered) + len(unread)) if number not in unread)
    for index, device in zip(numbers, ordered):
        for number, entry in enumerate(entries, start=1):
            where = f"mig-parted configuration {config_name!r}, entry {number}"
            if not _matches(entry, index, device):
                continue
            if not device.partitioning.supported:
                if entry["devices"] == "all" or not entry["mig-enabled"]:
                    continue
                raise Unsupported(f"{where} names device {index}, but {device.describe()} does not support MIG")
            chosen[device.uuid] = _rule(where, entry, device)
    return tuple(chosen[device.uuid] for device in ordered if device.uuid in chosen)


def configuration_of(
    devices: Sequence[Device], config_name: str, unread: Collection[int] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the current layout of GPUs as a mig-parted document with one configuration, and the parts that it cannot express.

    GPUs with the same layout share an entry, which selects them by index, so no filter is needed. The format has no
    placements, and no partitions without a compute instance. Partitions whose compute instances do not fill them are
    left out, because ``rules_from_mig_parted`` rejects them. ``unread`` is as there.
    """
    ordered = sorted(devices, key=lambda device: device.pci_address)
    numbers = [number for number in range(len(ordered) + len(unread)) if number not in unread]
    groups: list[tuple[bool, dict[str, int], list[int]]] = []
    left_out: list[str] = []
    for number, device in zip(numbers, ordered):
        enabled = device.partitioning.enabled
        counts: dict[str, int] = {}
        for partition in device.partitions:
            if partition.uuid:
                counts[partition.profile] = counts.get(partition.profile, 0) + 1
            else:
                left_out.append(
                    f"{partition.profile} at {partition.placement} on {device.describe()}: {_why_left_out(partition)}"
                )
        same = next((group for group in groups if group[:2] == (enabled, counts)), None)
        if same is None:
            groups.append((enabled, counts, [number]))
        else:
            same[2].append(number)
    alone = len(groups) <= 1 and not unread
    entries: list[dict[str, Any]] = [
        {
            "devices": "all" if alone else members,
            "mig-enabled": enabled,
            **({"mig-devices": dict(sorted(counts.items()))} if enabled else {}),
        }
        for enabled, counts, members in groups or [(False, {}, [])]  # a configuration needs at least one entry
    ]
    return {"version": "v1", "mig-configs": {config_name: entries}}, tuple(left_out)


def _why_left_out(partition: Partition) -> str:
    if not partition.compute_instances:
        return "it has no compute instance, and nvidia-mig-parted counts nothing else"
    count = partition.compute_instances
    kind = "one compute instance that does not fill it" if count == 1 else f"{count} compute instances that share it"
    return f"it has {kind}; nvidia-mig-parted writes such ones, and this collection makes none"


def possible_configurations(devices: Sequence[Device]) -> dict[str, Any]:
    """Return a mig-parted document with the possible layouts of these GPU models, as its ``generate-config`` does.

    The configurations are ``all-disabled``, ``all-enabled``, one for each profile with the maximum number per GPU
    (``all-1g.10gb``, with a dot for the plus of a suffix), and ``all-balanced`` on boards with four or seven slices.
    Filters select the boards if there are several models.
    """
    kinds = {device.pci_device_id << 32 | device.pci_subsystem_id: device for device in devices if device.profiles}
    boards = [kinds[key] for key in sorted(kinds)]
    found: dict[str, list[dict[str, Any]]] = {
        "all-disabled": [{"devices": "all", "mig-enabled": False}],
        "all-enabled": [{"devices": "all", "mig-enabled": True, "mig-devices": {}}],
    }
    for name in sorted({profile.name for board in boards for profile in board.profiles}):
        by_count: dict[int, list[Device]] = {}
        for board in boards:
            profile = next((each for each in board.profiles if each.name == name), None)
            if profile is not None:
                by_count.setdefault(profile.maximum, []).append(board)
        found[f"all-{name.replace('+', '.')}"] = [
            _for_boards(members, boards, {name: count}) for count, members in sorted(by_count.items())
        ]
    balanced = [(board, _balanced(board)) for board in boards]
    if any(counts for _board, counts in balanced):
        found["all-balanced"] = [_for_boards([board], boards, counts) for board, counts in balanced if counts]
    return {"version": "v1", "mig-configs": found}


def _for_boards(members: Sequence[Device], boards: Sequence[Device], counts: Mapping[str, int]) -> dict[str, Any]:
    filters = {"device-filter": [_filter_of(board) for board in members]} if len(boards) > 1 else {}
    return {**filters, "devices": "all", "mig-enabled": True, "mig-devices": dict(counts)}


def _filter_of(device: Device) -> str:
    subsystem = f":0x{device.pci_subsystem_id:08X}" if device.pci_subsystem_id else ""
    return f"0x{device.pci_device_id:08X}{subsystem}"


def _balanced(device: Device) -> dict[str, int]:
    """Return the number of partitions by profile in a balanced layout; empty for a board without one."""
    plain: dict[int, Profile] = {}
    for profile in device.profiles:
        name = parse_name(profile.name)
        known = plain.get(name.slices)
        if not name.suffixes and (known is None or profile.maximum > known.maximum):
            plain[name.slices] = profile
    counts = _BALANCED.get(max(plain, default=0), {})
    return {plain[slices].name: count for slices, count in counts.items()} if counts.keys() <= plain.keys() else {}


def file_in_config_map(document: Any) -> str | None:
    """Return the text of the mig-parted file in a ConfigMap of the GPU operator; None for another document.

    Raises InvalidLayout for a ConfigMap without such a file, or with several.
    """
    if not isinstance(document, Mapping) or document.get("kind") != "ConfigMap":
        return None
    data = document.get("data")
    files = {str(key): text for key, text in data.items() if isinstance(text, str)} if isinstance(data, Mapping) else {}
    key = _CONFIG_MAP_KEY if _CONFIG_MAP_KEY in files else next(iter(files), "") if len(files) == 1 else ""
    if not key:
        raise InvalidLayout(
            f"The ConfigMap holds {', '.join(sorted(files)) or 'no file'} in its data, expected {_CONFIG_MAP_KEY} or one file",
            hint="Write the mig-parted file to a separate file: `kubectl get configmap NAME -o go-template='{{index .data \"KEY\"}}'`.",
        )
    return files[key]


def _entries(document: Any, config_name: str) -> list[Mapping[str, Any]]:
    if not document:
        raise InvalidLayout("mig-parted file: it is empty, expected version and mig-configs")
    if file_in_config_map(document) is not None:
        raise InvalidLayout(
            "mig-parted file: it is wrapped in a ConfigMap",
            hint="Take the file out of its data: `kubectl get configmap NAME -o go-template='{{index .data \"config.yaml\"}}'`.",
        )
    _check_keys("mig-parted file", document, _DOCUMENT_KEYS)
    if document.get("version") != "v1":
        raise InvalidLayout(f"mig-parted file: version {document.get('version')!r} is not known, expected 'v1'")
    configurations = document.get("mig-configs")
    if not isinstance(configurations, Mapping) or not configurations:
        raise InvalidLayout("mig-parted file: mig-configs must be a mapping of names to lists")
    # YAML reads some names as numbers, such as 2026.
    named = {str(name): each for name, each in configurations.items()}
    if config_name not in named:
        raise InvalidLayout(
            f"mig-parted file: there is no configuration {config_name!r}", hint=f"It has {', '.join(named)}."
        )
    entries = named[config_name]
    if not isinstance(entries, list) or not entries:
        raise InvalidLayout(f"mig-parted configuration {config_name!r} must be a list with at least one entry")
    return [
        _checked(f"mig-parted configuration {config_name!r}, entry {i}", entry) for i, entry in enumerate(entries, 1)
    ]


def _checked(where: str, entry: Any) -> Mapping[str, Any]:
    _check_keys(where, entry, _ENTRY_KEYS)
    devices = entry.get("devices")
    if devices != "all" and not (
        isinstance(devices, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in devices)
    ):
        raise InvalidLayout(f"{where}, key devices: expected 'all' or a list of numbers, not {devices!r}")
    enabled = entry.get("mig-enabled")
    if not isinstance(enabled, bool):
        raise InvalidLayout(f"{where}, key mig-enabled: expected true or false, not {enabled!r}")
    wanted = entry.get("mig-devices")
    if enabled:
        if not isinstance(wanted, Mapping):
            raise InvalidLayout(
                f"{where}, key mig-devices: a mapping of profile to count is needed when MIG is enabled"
            )
        for name, count in wanted.items():
            try:
                parse_name(name)
            except InvalidLayout as error:
                raise InvalidLayout(f"{where}, key mig-devices: {error.message}", hint=error.hint) from error
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise InvalidLayout(f"{where}, key mig-devices: the count of {name} must be a number, not {count!r}")
        if wanted and not any(wanted.values()):
            raise InvalidLayout(f"{where}, key mig-devices: all counts are 0; write {{}} for no MIG devices")
    elif wanted:
        raise InvalidLayout(f"{where}, key mig-devices: not possible when MIG is disabled")
    for text in _filters(entry):
        if not isinstance(text, str) or not _FILTER.fullmatch(text):
            raise InvalidLayout(f"{where}, key device-filter: {text!r} is not of the form 0xDDDDVVVV[:0xSSSSVVVV]")
    return dict(entry)


def _matches(entry: Mapping[str, Any], index: int, device: Device) -> bool:
    filters = _filters(entry)
    if filters and not any(_filter_matches(text, device) for text in filters):
        return False
    return bool(entry["devices"] == "all" or index in entry["devices"])


def _filters(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    value = entry.get("device-filter")
    if value is None or value in ("", []):
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _filter_matches(text: str, device: Device) -> bool:
    found = _FILTER.fullmatch(text)
    if found is None:
        return False
    wanted, subsystem = (int(part, 16) if part else None for part in found.groups())
    return device.pci_device_id == wanted and (subsystem is None or device.pci_subsystem_id == subsystem)


def _rule(where: str, entry: Mapping[str, Any], device: Device) -> Rule:
    match = Match(uuid=(device.uuid,))
    if not entry["mig-enabled"]:
        return Rule(match, WHOLE)
    counts: dict[str, int] = {}
    for text, count in entry["mig-devices"].items():
        if not count:
            continue
        name = parse_name(text)
        if not name.fills:
            whole = replace(name, compute=name.slices)
            raise Unsupported(
                f"{where}, key mig-devices: {text} asks for a compute instance that does not fill its GPU instance, and may share it with others",
                hint=f"A partition here is one device with one compute instance. Write {whole} for the whole GPU instance, which containers can share "
                "by MPS, or a profile with fewer slices for partitions with separate memory.",
            )
        counts[str(name)] = counts.get(str(name), 0) + count
    return Rule(match, STATIC, tuple(WantedPartition(profile, count) for profile, count in counts.items()))


def _check_keys(where: str, value: Any | None, known: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise InvalidLayout(f"{where}: expected a mapping, not {type(value).__name__}")
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise InvalidLayout(f"{where}: unknown key {', '.join(unknown)}", hint=f"Known are {', '.join(known)}.")
