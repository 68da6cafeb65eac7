# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the explanation of claims with the real scheduler: random claims and inventories, the examples of the page,
and the module on that cluster.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from tests.oracles.allocation_cases import READY, Case, make_case
from tests.oracles.scheduler import Cluster, condition
from tests.unit.modules.why_examples import cluster as cluster_of_the_page
from tests.unit.modules.why_examples import examples

Json = dict[str, Any]
UTILS = "ansible_collections.dra.accelerators.plugins.module_utils"
FITS, NO, ERROR = "fits", "no", "error"
SHORT, LONG = 60, 1000
#: Cases per cluster. The scheduler's work per pod grows with the number of nodes.
AT_ONCE = 100
#: Another number tests other cases: DRA_ACCELERATORS_CASES=5000 make prove.
FIRST = int(os.environ.get("DRA_ACCELERATORS_CASES", "0"))


@dataclass(frozen=True)
class Verdict:
    """The result for a pod: fits, no, or error, the devices of its claims by request, and the message."""

    word: str
    devices: tuple[tuple[str, ...], ...] = ()
    message: str = ""


def said(case: Case, judge: Any) -> tuple[str, list[tuple[tuple[str, ...], ...]], Json]:
    """Return the explanation of a case: the verdict, the devices that each node would provide, and the whole data."""
    explanation = importlib.import_module(f"{UTILS}.core.allocation.explanation")
    cluster = explanation.Cluster(
        slices=case.slices,
        claims=[*case.held, *case.wanted],
        classes=case.classes,
        rules=case.rules,
        nodes=case.nodes,
        pods=[case.pod],
    )
    (found,) = explanation.explain(cluster, judge, pods=[case.pod])
    data: Json = found.to_dict()
    devices = [
        tuple((one["claim"].partition("/")[2], one["request"], one["pool"], one["device"]) for one in node["devices"])
        for node in data["nodes"]
        if node["verdict"] == FITS
    ]
    return data["verdict"], devices, data


def became(pod: Json, claims: dict[str, Json]) -> Verdict:
    """Return the scheduler's result for a pod."""
    names = [one["resourceClaimName"] for one in pod["spec"]["resourceClaims"]]
    allocations = {name: (claims[name].get("status") or {}).get("allocation") for name in names}
    if all(allocations.values()):
        devices = tuple(
            (name, one["request"], one["pool"], one["device"])
            for name, allocation in allocations.items()
            for one in (allocation or {})["devices"]["results"]
        )
        return Verdict(FITS, devices)
    last = condition(pod)
    return Verdict(ERROR if last.get("reason") == "SchedulerError" else NO, message=str(last.get("message")))


def disagreements(cases: Iterable[Case], cluster: Cluster, judge: Any) -> tuple[Counter[str], list[str]]:
    """Return how often each verdict was the same, and descriptions of the differences."""
    pods, claims = cluster.pods(), cluster.claims()
    agreed: Counter[str] = Counter()
    found = []
    for case in cases:
        word, devices, _data = said(case, judge)
        real = became(pods[case.name], claims)
        if word == real.word and (word != FITS or real.devices in devices):
            agreed[word] += 1
        else:
            found.append(f"{case.name}: said {word} {devices}, the scheduler {real}")
    return agreed, found


@pytest.fixture(scope="module")
def judge() -> Any:
    return importlib.import_module(f"{UTILS}._scheduling.cel").CelJudge()


@pytest.mark.parametrize("number", [SHORT, pytest.param(LONG, marks=pytest.mark.prove)])
def test_random_claims_over_random_inventories(tmp_path: Path, judge: Any, number: int) -> None:
    agreed: Counter[str] = Counter()
    wrong = []
    for first in range(FIRST, FIRST + number, AT_ONCE):
        cases = [make_case(seed) for seed in range(first, min(first + AT_ONCE, FIRST + number))]
        folder = tmp_path / str(first)
        folder.mkdir()
        cluster = Cluster(folder)
        with cluster.running():
            cluster.create(each for case in cases for each in case.objects())
            cluster.start_scheduler()
            more, found = disagreements(cases, cluster, judge)
        agreed += more
        wrong += found
        print(
            f"from {first} on: agreed on {sum(more.values())} of {len(cases)}: {dict(more)}",
            *found,
            sep="\n",
            flush=True,
        )
    print(
        f"explained and scheduled: agreed on {sum(agreed.values())} of {number} (seeds {FIRST} to {FIRST + number - 1}): "
        f"{agreed[FITS]} fit, {agreed[NO]} do not, {agreed[ERROR]} have an error; {len(wrong)} disagree",
        flush=True,
    )
    assert not wrong, "\n".join(wrong)
    # All three verdicts must occur, so that a constant answer is detected.
    assert all(agreed[word] > number / 20 for word in (FITS, NO, ERROR)), agreed


def test_the_examples_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The scheduler agrees with each example, and the module returns the same for the live cluster as for the
    manifests.
    """
    module = importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.claim_explanation_info")

    def run(options: Json) -> Json:
        with patch_module_args(options), pytest.raises(SystemExit):
            module.main()
        answer: Json = json.loads(capsys.readouterr().out)
        return answer

    base = cluster_of_the_page()
    kept = [each for each in base if each["kind"] != "ResourceClaim"]
    held = [each for each in base if each["kind"] == "ResourceClaim"]
    files = tmp_path / "cluster.json"
    files.write_text(json.dumps({"items": base}))
    # A kubelet reports a node's capacity for pods. The page omits it.
    kept = [{**each, "status": READY} if each["kind"] == "Node" else each for each in kept]
    cluster = Cluster(tmp_path)
    with cluster.running():
        cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": "others"}})
        cluster.create([*kept, *held])
        cluster.start_scheduler()
        for example in examples():
            made = [each for each in example.documents if each["kind"] != "ResourceClaimTemplate"]
            claims = [each for each in made if each["kind"] == "ResourceClaim"]
            if any(each["kind"] == "Pod" for each in made):
                # No controller creates claims from templates here.
                made, claims = [], []
            with cluster.with_objects([*made, *map(pod_of, claims)]):
                for claim in claims:
                    name = claim["metadata"]["name"]
                    pod = cluster.pods()[f"waits-for-{name}"]
                    found = run({"kubeconfig": str(cluster.kubeconfig), "claims": [name]})["explanations"][0]
                    real = became(pod, cluster.claims())
                    alone = run({"cluster_src": [str(files)], "definition": example.documents})["explanations"][0]
                    verdicts = {"blocked": NO, "allocated": FITS}
                    word = verdicts.get(found["verdict"], found["verdict"])
                    assert word == real.word, f"{example.title}: {found} {real}"
                    if word != FITS:
                        assert (found["nodes"], found["changes"]) == (alone["nodes"], alone["changes"]), example.title


def pod_of(claim: Json) -> Json:
    """Return a pod that uses one claim."""
    name = claim["metadata"]["name"]
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "it"}]}}
    spec = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "resourceClaims": [{"name": "it", "resourceClaimName": name}],
    }
    metadata = {"name": f"waits-for-{name}", "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
