# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Fill a 310P with claims in random order: claims that fit by brute force are served, the others wait, and nothing
remains at the end.

The brute-force model has its own tables and vGroup numbers and shares no code with the product.
``DRA_ACCELERATORS_SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.manifests import claim, pod
from tests.cluster.npus import NpuCluster
from tests.simulator.dcmi_model import TEMPLATES as TABLE
from tests.simulator.dcmi_model import Model, complete_sets, fits

FAMILY = "310P"
TEMPLATES = sorted(TABLE[FAMILY])
SETS = sorted(complete_sets(FAMILY))
CHIPS = tuple(range(8))
#: Number of steps in which a claim is added to or deleted from each chip.
STEPS = 12
DYNAMIC = {"accelerator_layouts": [{"hosts": "all", "layout": [{"match": {}, "mode": "dynamic"}]}]}
WORLD = os.environ.get("DRA_ACCELERATORS_SETS_WORLD", "sets")


class Claims:
    """Claims for vNPUs of specific chips of the one node, each with its pod."""

    def __init__(self, npus: NpuCluster) -> None:
        self.npus = npus
        (self.node,) = npus.nodes()
        self.held: dict[str, tuple[int, str]] = {}
        self._number = 0

    def ask(self, *wanted: tuple[int, str]) -> list[str]:
        """Create a claim with a pod for each physical chip ID and template; return their names in that order."""
        names, documents = [], []
        for chip, template in wanted:
            self._number += 1
            name = f"set-{self._number:04}"
            own = "device.attributes['npu.huawei.com']"
            which = f"{own}.physicId == {chip} && {own}.template == '{template}'"
            documents += [
                claim(name, device_class="vnpu.huawei.com", expression=which),
                pod(name, name, node=self.node),
            ]
            names.append(name)
            self.held[name] = chip, template
        self.npus.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(documents), timeout=300)
        return names

    def drop(self, *names: str) -> None:
        """Delete claims with their pods, and wait until they are deleted."""
        for kind in ("pods", "resourceclaims"):
            self.npus.kubectl("delete", kind, *names, "-n", "default", "--timeout=240s", timeout=300)
        for name in names:
            del self.held[name]

    def of(self, chip: int) -> list[str]:
        """Return the names of the claims for a chip."""
        return [name for name, (mine, _template) in self.held.items() if mine == chip]

    def silicon(self) -> dict[int, list[tuple[str, int]]]:
        """Return template and vGroup of the existing vNPUs, by chip."""
        shown = self.npus.slices_of(self.node)
        return {chip: sorted((each["template"], each["group"]) for each in slices) for chip, slices in shown.items()}

    def refused(self, names: list[str]) -> None:
        """Wait until the scheduler has reported for each pod that its claims cannot be allocated."""
        waiting = set(names)

        def answer() -> bool:
            for item in self.npus.get("pods", "-n", "default")["items"]:
                assert item["metadata"]["name"] not in waiting or item["status"]["phase"] == "Pending", item["metadata"]
                for each in item["status"].get("conditions", ()):
                    if each.get("reason") == "Unschedulable" and "cannot allocate all claims" in each["message"]:
                        waiting.discard(item["metadata"]["name"])
            return not waiting

        self.npus.wait(f"{len(names)} claims that do not fit being refused", answer, timeout=180)


def would_fit(slices: list[tuple[str, int]], template: str) -> bool:
    """Return whether one more vNPU fits a chip with these: its counters suffice, and a vGroup has room."""
    model = Model(FAMILY, 0, dict(enumerate(slices)))  # type: ignore[arg-type]
    return fits(FAMILY, (*model.bag(), template)) and bool(model.groups(template))


@pytest.fixture(scope="module")
def claims() -> Iterator[Claims]:
    """Yield the claims of a node with eight dynamic 310P."""
    made = NpuCluster(WORLD, DYNAMIC)
    made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "8x310P-Pro", timeout=3000)
    recap = made.playbook("site.yml")
    assert not recap.failed, recap.output
    yield Claims(made)
    made.world("down")


@pytest.fixture(scope="module")
def chance() -> random.Random:
    """Return the source of all random order."""
    seed = int(os.environ.get("DRA_ACCELERATORS_SEED") or random.SystemRandom().randrange(10**9))
    print(f"DRA_ACCELERATORS_SEED={seed}")
    return random.Random(seed)


def nothing_is_left(claims: Claims) -> None:
    """Assert that no vNPU, CDI file, record, or vendor config line of any claim is left."""
    npus, node = claims.npus, claims.node
    npus.wait("no slice left", lambda: not npus.instances(node), timeout=180)
    assert npus.cdi_files(node) == [] and npus.recorded(node) == {} and npus.kept_slices(node) == []


def test_each_complete_set_is_allocated_and_nothing_more_fits(claims: Claims, chance: random.Random) -> None:
    assert len(SETS) == 15
    order = chance.sample(SETS, len(SETS))
    for first in range(0, len(order), len(CHIPS)):
        sets = dict(zip(chance.sample(CHIPS, len(CHIPS)), order[first : first + len(CHIPS)]))
        wanted = [(chip, template) for chip, bag in sets.items() for template in bag]
        chance.shuffle(wanted)
        names = claims.ask(*wanted)
        claims.npus.wait_running(*names, timeout=600)
        silicon = claims.silicon()
        for chip, bag in sets.items():
            assert tuple(name for name, _group in silicon[chip]) == tuple(sorted(bag)), (chip, bag)
        assert not any(would_fit(silicon[chip], template) for chip in sets for template in TEMPLATES)
        more = claims.ask(*((chip, template) for chip in sets for template in chance.sample(TEMPLATES, 2)))
        claims.refused(more)
        assert claims.silicon() == silicon
        claims.drop(*chance.sample([*names, *more], len(names) + len(more)))
        nothing_is_left(claims)


def test_claims_are_created_and_deleted_in_random_order(claims: Claims, chance: random.Random) -> None:
    """One more or one less claim per chip in each step: the brute-force model determines which of them are served."""
    served = waited = 0
    for _step in range(STEPS):
        before = claims.silicon()
        leaving = [chance.choice(held) for chip in CHIPS if (held := claims.of(chip)) and chance.random() < 0.3]
        if leaving:
            claims.drop(*leaving)
            claims.npus.wait(
                "the released vNPUs are deleted",
                lambda: sum(map(len, claims.silicon().values())) == len(claims.held),
                120,
            )
            before = claims.silicon()
        wanted = [(chip, chance.choice(TEMPLATES)) for chip in CHIPS]
        fitting = [would_fit(before[chip], template) for chip, template in wanted]
        names = claims.ask(*wanted)
        good = [name for name, fit in zip(names, fitting) if fit]
        bad = [name for name, fit in zip(names, fitting) if not fit]
        claims.npus.wait_running(*good, timeout=300)
        claims.refused(bad)
        if bad:
            claims.drop(*bad)
        after = claims.silicon()
        assert {chip: len(after[chip]) - len(before[chip]) for chip, _template in wanted} == {
            chip: int(fit) for (chip, _template), fit in zip(wanted, fitting)
        }
        served, waited = served + len(good), waited + len(bad)
    print(f"{served} claims were served and {waited} refused")
    assert served > STEPS and waited > STEPS
    claims.drop(*claims.held)
    nothing_is_left(claims)
