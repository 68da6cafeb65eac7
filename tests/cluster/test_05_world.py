# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that commands for another world do not change this one."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.cluster import ROOT, Cluster, execute

sys.path.append(str(ROOT / "tests/world"))
from world_cli import image
from world_cli.pins import BUILD_LABEL


@pytest.mark.prove
def test_containers_of_a_world_are_not_removed_as_remains_of_a_build(world: Cluster) -> None:
    """The build of another release's node image removes remains of interrupted builds while this world exists."""
    (node, *_rest) = world.nodes()
    made_of = execute(["docker", "inspect", "--format", "{{.Config.Image}}", node]).stdout.strip()
    left = f"{world.name}-left-by-a-build"
    execute(["docker", "create", "--name", left, "--label", f"{BUILD_LABEL}=node", made_of, "/bin/true"])
    try:
        found = image.leftover_containers()
        marked = execute(["docker", "ps", "--all", "--filter", f"label={BUILD_LABEL}=node", "--format", "{{.Names}}"])
    finally:
        execute(["docker", "rm", left])
    assert left in found
    ours = {f"{world.name}-control", *world.nodes()}
    assert not ours.intersection(found) and not ours.intersection(marked.stdout.split())
