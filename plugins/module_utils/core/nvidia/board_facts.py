# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What is kept of a GPU between two looks: what does not change, and what it told last. Read by ``discover.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..model import AttributeValue, Clique, Partitioning, Passthrough, Profile


@dataclass(frozen=True)
class DriverFacts:
    """The facts that all GPUs of the machine have in common; ``attributes`` are the published ones."""

    driver_version: str
    cuda_version: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True)
class ComputeProfile:
    """One kind of compute instance that a kind of GPU instance can hold."""

    profile_id: int
    multiprocessors: int
    slices: int
    maximum: int


@dataclass(frozen=True)
class ModeFacts:
    """What a GPU has in one of the two MIG modes.

    ``compute_profiles`` is filled per profile id as GPU instances are seen, because NVML tells it of instances only.
    """

    profiles: tuple[Profile, ...] = ()
    memory_slices: int = 0
    compute_profiles: dict[int, tuple[ComputeProfile, ...]] = field(default_factory=dict)


@dataclass
class BoardFacts:
    """What does not change about a GPU until it is reset or replaced, with its NVML handle. Used on the GPU's lane alone.

    ``mode`` is the MIG mode that it was found in last, and ``of_mode`` has what was read in each, because some drivers tell of profiles
    only in one of the two. ``minor`` was read in the mode ``minor_mode``, if that is known: a change of the mode can move it.
    ``unanswered`` names what the GPU has no answer to about its condition, and ``clique`` and ``switched`` are what it said last of its
    fabric, and ``mode_told`` of its MIG mode, with the time of ``time.monotonic``.
    """

    handle: Any
    index: int
    minor: int
    uuid: str
    product: str
    pci_address: str
    pci_device_id: int
    pci_subsystem_id: int
    pcie_root: str | None
    numa_node: int | None
    memory_bytes: int
    needs_reset: bool
    attributes: Mapping[str, AttributeValue]
    linked: tuple[str, ...] = ()
    passthrough: Passthrough | None = None
    mode: bool | None = None
    of_mode: dict[bool, ModeFacts] = field(default_factory=dict)
    unanswered: set[str] = field(default_factory=set)
    driver_version: str = ""
    clique: Clique | None = None
    switched: bool = False
    mode_told: tuple[float, Partitioning] | None = None
    minor_mode: bool | None = None
    module: int | None = None

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles that it has in its present mode."""
        return self._now.profiles

    @property
    def memory_slices(self) -> int:
        """Into how many slices its memory is cut in that mode."""
        return self._now.memory_slices

    @property
    def compute_profiles(self) -> dict[int, tuple[ComputeProfile, ...]]:
        """The kinds of compute instances of those profiles that were seen."""
        return self._now.compute_profiles

    @property
    def _now(self) -> ModeFacts:
        # A GPU that has no modes, or was not asked for its mode yet, has nothing of it.
        return self.of_mode[self.mode] if self.mode is not None else ModeFacts()
