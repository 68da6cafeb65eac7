# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cached facts of a GPU between two scans: its fixed facts and its last reported values.

In this directory, a board is a physical GPU, as opposed to a MIG device. ``gpu_reader.py`` and ``mig_reader.py`` read
the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...model import AttributeValue, Clique, Partitioning, Passthrough, Profile


@dataclass(frozen=True)
class DriverFacts:
    """The facts that all GPUs of the host share. ``attributes`` are the published ones."""

    driver_version: str
    cuda_version: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True)
class ComputeProfile:
    """One compute instance profile of a GPU instance profile."""

    profile_id: int
    multiprocessors: int
    slices: int
    maximum: int


@dataclass(frozen=True)
class ModeFacts:
    """The facts of a GPU in one of its two MIG modes.

    ``compute_profiles`` is filled per profile ID when GPU instances are seen, because NVML returns them for existing
    instances only.
    """

    profiles: tuple[Profile, ...] = ()
    memory_slices: int = 0
    compute_profiles: dict[int, tuple[ComputeProfile, ...]] = field(default_factory=dict)


@dataclass
class BoardFacts:
    """The facts of a GPU that stay the same until it is reset or replaced, with its NVML handle.

    Used on the GPU's lane only.

    ``mode`` is the MIG mode at the last read. ``facts_by_mode`` has the facts of each mode, because some drivers report
    profiles only in one of the two. ``minor`` was read in the mode ``minor_mode``, if that is known, because a mode
    change can change it. ``unsupported_queries`` names the health queries that the GPU does not support. ``clique`` and
    ``switched`` are the last reported fabric state. ``last_mode`` is the last reported MIG mode with its time
    (``time.monotonic``). ``slowed_since`` is the time of the first of the last consecutive scans that found a hardware
    slowdown.
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
    resets_alone: bool = False
    passthrough: Passthrough | None = None
    mode: bool | None = None
    facts_by_mode: dict[bool, ModeFacts] = field(default_factory=dict)
    unsupported_queries: set[str] = field(default_factory=set)
    driver_version: str = ""
    clique: Clique | None = None
    switched: bool = False
    last_mode: tuple[float, Partitioning] | None = None
    minor_mode: bool | None = None
    module: int | None = None
    name_number: int | None = None
    slowed_since: float | None = None

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles of the current mode."""
        return self._mode_facts.profiles

    @property
    def memory_slices(self) -> int:
        """The number of memory slices in the current mode."""
        return self._mode_facts.memory_slices

    @property
    def compute_profiles(self) -> dict[int, tuple[ComputeProfile, ...]]:
        """The known compute instance profiles in the current mode, by profile ID."""
        return self._mode_facts.compute_profiles

    @property
    def _mode_facts(self) -> ModeFacts:
        # A GPU without MIG, or whose mode was not read yet, has no such facts.
        return self.facts_by_mode[self.mode] if self.mode is not None else ModeFacts()
