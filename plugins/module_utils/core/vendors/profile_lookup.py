# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the profile of a partition to create, with errors that list the possible profiles and placements."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidLayout, NotFound
from ..model import Placement, Profile


def find_profile(
    profiles: Sequence[Profile], profile_id: int, placement: Placement, *, device: str, term: str
) -> Profile:
    """Return the profile with this ID. ``device`` and ``term`` name the device and the vendor's kind of profile in errors.

    Raises NotFound for an unknown profile, and InvalidLayout for a placement that the profile does not have.
    """
    profile = next((each for each in profiles if each.profile_id == profile_id), None)
    if profile is None:
        known = ", ".join(f"{each.name} ({each.profile_id})" for each in profiles) or "none"
        raise NotFound(f"{device} has no {term} with the ID {profile_id}; it has {known}")
    if placement not in profile.placements:
        possible = ", ".join(map(str, profile.placements))
        raise InvalidLayout(f"{profile.name} cannot be at {placement} on {device}; its placements are {possible}")
    return profile
