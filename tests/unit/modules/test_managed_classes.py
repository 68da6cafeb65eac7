# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Several DeviceClasses for one extended resource are reported: Kubernetes uses the newest without a warning."""

from __future__ import annotations

from typing import Any

from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.managed_classes import (
    document,
    duplicates_after,
    plan,
)


def present(name: str, resource: str, created: str, *, ours: bool = True) -> dict[str, Any]:
    made = document({"name": name, "extended_resource": resource}, "v1")
    made["metadata"]["creationTimestamp"] = created
    if not ours:
        made["metadata"]["labels"] = {}
    return made


def duplicates_of(there: list[dict[str, Any]], *classes: dict[str, Any], absent: bool = False) -> dict[str, list[str]]:
    wanted = [document(each, "v1") for each in classes]
    known = {each["metadata"]["name"]: each for each in there}
    decided = plan(wanted, known, absent=absent, unmanaged="leave")
    ordered = [] if absent else [each["metadata"]["name"] for each in wanted]
    return duplicates_after(known, wanted, ordered, decided)


GPU = {"name": "gpu", "extended_resource": "example.com/gpu"}


def test_duplicates_one_class_for_a_resource_has_none() -> None:
    assert duplicates_of([], GPU) == {}
    assert duplicates_of([present("other", "example.com/other", "2026-01-01T00:00:00Z")], GPU) == {}


def test_duplicates_foreign_class_with_same_resource_is_named() -> None:
    other = present("other", "example.com/gpu", "2026-01-02T00:00:00Z", ours=False)
    assert duplicates_of([other], GPU) == {"example.com/gpu": ["gpu", "other"]}, "the new class is the newest"
    older = present("gpu", "example.com/gpu", "2026-01-01T00:00:00Z")
    assert duplicates_of([older, other], GPU) == {"example.com/gpu": ["other", "gpu"]}


def test_duplicates_of_other_resources_are_not_reported() -> None:
    two = [present(name, "example.com/x", "2026-01-01T00:00:00Z", ours=False) for name in ("a", "b")]
    assert duplicates_of(two, GPU) == {}
    assert duplicates_of([*two, present("gpu", "example.com/gpu", "2026-01-01T00:00:00Z")], GPU, absent=True) == {}
