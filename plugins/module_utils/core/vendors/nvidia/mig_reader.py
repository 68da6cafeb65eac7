# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the MIG mode, the profiles, and the existing partitions of a GPU from NVML.

NVML calls a partition a GPU instance. One or several compute instances divide it. This collection creates one compute
instance, which fills the GPU instance.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...errors import AcceleratorError, InvalidLayout, NotFound, Unsupported
from ...model import Partition, Partitioning, Placement, Process, Profile, frozen
from . import profiles as profile_names
from .board_facts import BoardFacts, ComputeProfile, ModeFacts
from .nvml import COMPUTE_INSTANCE_PROFILES, ENGINE_PROFILE_SHARED, GPU_INSTANCE_PROFILES, Nvml, text

MEBIBYTE = 1024 * 1024


def read_profiles(nvml: Nvml, handle: Any, memory_bytes: int, pci_device_id: int) -> tuple[Profile, ...]:
    """Return the MIG profiles that NVML reports for a GPU. Empty if the board, its mode, or the driver reports none."""
    found: list[Profile] = []
    for number in range(GPU_INSTANCE_PROFILES):
        info = _read_profile(nvml, "nvmlDeviceGetGpuInstanceProfileInfo", handle, number)
        if info is None or any(profile.profile_id == info.id for profile in found):
            continue  # not supported, or a second number of a profile that was found already
        placements = _placements(nvml, handle, info.id)
        if not placements:
            continue
        megabytes = int(info.memorySizeMB)
        name = text(getattr(info, "name", b"")) or profile_names.computed_name(
            number, info.sliceCount, megabytes, memory_bytes
        )
        name = name.removeprefix("MIG ")
        capacities = {
            "multiprocessors": info.multiprocessorCount,
            "copyEngines": info.copyEngineCount,
            "decoders": info.decoderCount,
            "encoders": info.encoderCount,
            "jpegEngines": info.jpegCount,
            "ofaEngines": info.ofaCount,
            "memory": megabytes * MEBIBYTE,
        }
        found.append(
            Profile(
                name=name,
                profile_id=int(info.id),
                memory_bytes=megabytes * MEBIBYTE,
                capacities=frozen(capacities),
                attributes=MappingProxyType({}),
                placements=placements,
                maximum=profile_names.maximum_of(info.id, info.instanceCount, placements, pci_device_id),
                compute_slices=int(info.sliceCount),
                number=number,
                aliases=_aliases(name),
            )
        )
    return tuple(found)


def read_mig_mode(nvml: Nvml, board: BoardFacts) -> Partitioning:
    """Return the MIG mode of a GPU, now and after the next reset."""
    try:
        current, pending = nvml.call(
            "nvmlDeviceGetMigMode", board.handle, doing=f"Reading the MIG mode of {board.uuid}"
        )
    except Unsupported:
        return Partitioning(supported=False)
    partitioning = Partitioning(True, bool(current), bool(pending), board.needs_reset)
    board.last_mode = (time.monotonic(), partitioning)
    return partitioning


def update_mig_mode(nvml: Nvml, board: BoardFacts, *, max_age: float = 0.0) -> Partitioning:
    """Return the MIG mode of a GPU, and store it and its profiles in the GPU's facts.

    A mode that was read at most ``max_age`` seconds ago is not read again.
    """
    if board.last_mode is not None and time.monotonic() - board.last_mode[0] < max_age:
        partitioning = board.last_mode[1]
    else:
        partitioning = read_mig_mode(nvml, board)
    if partitioning.supported:
        _update_profiles(nvml, board, partitioning.enabled)
    return partitioning


def read_partitions(
    nvml: Nvml, board: BoardFacts, holders: Mapping[int | None, tuple[Process, ...]]
) -> tuple[Partition, ...]:
    """Return the existing GPU instances, ordered by start."""
    found: list[Partition] = []
    doing = f"Listing the GPU instances of {board.uuid}"
    for profile in board.profiles:
        for instance in nvml.listed(
            "nvmlDeviceGetGpuInstances",
            "c_nvmlGpuInstance_t",
            len(profile.placements),
            board.handle,
            profile.profile_id,
            doing=doing,
        ):
            try:
                found.append(read_partition(nvml, board, profile, instance, holders))
            except NotFound:
                continue  # another program has destroyed it since the list was read
    return tuple(sorted(found, key=lambda partition: (partition.placement, partition.profile_id)))


def read_partition(
    nvml: Nvml,
    board: BoardFacts,
    profile: Profile,
    instance: Any,
    holders: Mapping[int | None, tuple[Process, ...]],
    compute: Sequence[tuple[ComputeProfile, Any]] | None = None,
) -> Partition:
    """Return one GPU instance with the compute instance that fills it.

    An instance without a compute instance, or with several, has no UUID here. ``compute`` are its compute instances
    with their profiles, if the caller has created them; otherwise they are listed.
    """
    doing = f"Reading a GPU instance of {board.uuid}"
    info = nvml.call("nvmlGpuInstanceGetInfo", instance, doing=doing)
    if compute is None:
        compute = compute_instances(nvml, board, profile, instance)
    uuid, compute_id = "", None
    if len(compute) == 1:
        kind, handle = compute[0]
        if kind.multiprocessors >= full_profile(board.compute_profiles[profile.profile_id], profile).multiprocessors:
            details = nvml.call("nvmlComputeInstanceGetInfo_v2", handle, doing=doing)
            uuid, compute_id = str(nvml.call("nvmlDeviceGetUUID", details.device, doing=doing)), int(details.id)
    return Partition(
        uuid=uuid,
        profile=profile.name,
        profile_id=profile.profile_id,
        placement=Placement(int(info.placement.start), int(info.placement.size)),
        instance_id=int(info.id),
        compute_instance_id=compute_id,
        memory_bytes=profile.memory_bytes,
        processes=holders.get(int(info.id), ()),
        compute_instances=len(compute),
        capacities=profile.capacities,
    )


def compute_profiles(nvml: Nvml, board: BoardFacts, profile_id: int, instance: Any) -> tuple[ComputeProfile, ...]:
    """Return the compute instance profiles of a GPU instance profile. They are read once per profile."""
    known = board.compute_profiles.get(profile_id)
    if known is not None:
        return known
    found: list[ComputeProfile] = []
    for number in range(COMPUTE_INSTANCE_PROFILES):
        info = _read_profile(
            nvml, "nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, number, ENGINE_PROFILE_SHARED
        )
        if info is not None:
            found.append(ComputeProfile(info.id, info.multiprocessorCount, info.sliceCount, info.instanceCount))
    board.compute_profiles[profile_id] = tuple(found)
    return board.compute_profiles[profile_id]


def compute_instances(
    nvml: Nvml, board: BoardFacts, profile: Profile, instance: Any
) -> tuple[tuple[ComputeProfile, Any], ...]:
    """Return the compute instances of a GPU instance with their profiles.

    The profile that fills the instance is queried first. If one such compute instance exists, no space is left for
    others.
    """
    kinds = compute_profiles(nvml, board, profile.profile_id, instance)
    if not kinds:
        return ()
    full = full_profile(kinds, profile)
    found: list[tuple[ComputeProfile, Any]] = []
    for kind in (full, *(each for each in kinds if each != full)):
        handles = nvml.listed(
            "nvmlGpuInstanceGetComputeInstances",
            "c_nvmlComputeInstance_t",
            max(kind.maximum, 1),
            instance,
            kind.profile_id,
            doing=f"Listing the compute instances of a GPU instance of {board.uuid}",
        )
        found.extend((kind, handle) for handle in handles)
        if kind == full and handles:
            break
    return tuple(found)


def full_profile(kinds: tuple[ComputeProfile, ...], profile: Profile) -> ComputeProfile:
    """Return the compute instance profile that fills a GPU instance, by its multiprocessors.

    The number of slices is ambiguous: on an H100, a 1g.20gb is filled by the revision with 26 multiprocessors, not by
    the profile with one slice. Raises Unsupported without profiles.
    """
    if not kinds:
        raise Unsupported(f"The driver offers no compute instance for the profile {profile.name}")
    wanted = profile.capacities["multiprocessors"]
    exact = [kind for kind in kinds if kind.multiprocessors == wanted]
    return exact[0] if exact else max(kinds, key=lambda kind: (kind.multiprocessors, kind.slices))


def _update_profiles(nvml: Nvml, board: BoardFacts, mode: bool) -> None:
    """Store the profiles of a MIG mode in the board's facts. They are read once for each mode."""
    if mode not in board.facts_by_mode:
        profiles = read_profiles(nvml, board.handle, board.memory_bytes, board.pci_device_id)
        slices = max((each.end for profile in profiles for each in profile.placements), default=0)
        board.facts_by_mode[mode] = ModeFacts(profiles, slices, {})
    board.mode = mode


def _read_profile(nvml: Nvml, function: str, *arguments: Any) -> Any:
    """Query a profile in the newest structure version that the driver supports; None for an unsupported profile."""
    try:
        try:
            return nvml.call(function, *arguments, 2)
        except Unsupported as error:
            return nvml.call(function, *arguments, 1) if error.code == "function-not-found" else None
    except Unsupported:
        return None
    except AcceleratorError as error:
        if error.code == "invalid-argument":
            return None  # a profile that this driver does not support
        raise


def _placements(nvml: Nvml, handle: Any, profile_id: int) -> tuple[Placement, ...]:
    try:
        found = nvml.counted(
            "nvmlDeviceGetGpuInstancePossiblePlacements", "c_nvmlGpuInstancePlacement_t", handle, profile_id
        )
    except Unsupported:
        return ()
    return tuple(sorted(Placement(int(each.start), int(each.size)) for each in found))


def _aliases(name: str) -> tuple[str, ...]:
    try:
        return profile_names.aliases(name)
    except InvalidLayout:
        return ()  # a name in a newer form, used in its exact spelling
