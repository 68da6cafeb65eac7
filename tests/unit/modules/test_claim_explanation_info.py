# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module claim_explanation_info and its playbook: the examples of the page, files, a cluster, and refused inputs."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from why_examples import Example, cluster, examples, with_answers

from tests import planned
from tests.unit.ansible_process import PYTHON, run_ansible

ROOT = Path(__file__).resolve().parents[3]
UTILS = "ansible_collections.dra.accelerators.plugins.module_utils"
Run = Callable[..., dict[str, Any]]
EXAMPLES = examples()


@pytest.fixture
def there(tmp_path: Path) -> str:
    """Write the cluster of the page to a file."""
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": cluster()}))
    return str(path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.title)
def test_examples_of_the_page_match(run_here: Run, there: str, tmp_path: Path, example: Example) -> None:
    (tmp_path / "wanted.yaml").write_text(example.manifests)
    result = run_here("claim_explanation_info", {"cluster_src": [there], "src": str(tmp_path / "wanted.yaml")})
    assert result["text"] == example.text and not result["changed"]
    # The explanation is the same for objects in the cluster.
    documents = list(yaml.safe_load_all(example.manifests))
    names = [f"default/{one['metadata']['name']}" for one in documents if one["kind"] in ("Pod", "ResourceClaim")]
    (tmp_path / "more.yaml").write_text(example.manifests)
    kind = "pods" if any(one["kind"] == "Pod" for one in documents) else "claims"
    again = run_here("claim_explanation_info", {"cluster_src": [there, str(tmp_path / "more.yaml")], kind: names})
    assert again["explanations"] == result["explanations"]


def test_explanation_of_unpartitioned_gpus_matches_the_page(run_here: Run, tmp_path: Path) -> None:
    manifest, with_reports, without_reports = with_answers()
    devices, nodes = planned.fleet(), tmp_path / "nodes.json"
    objects = [{"kind": "Node", "metadata": {"name": name}} for name in devices]
    (tmp_path / "cluster.json").write_text(
        json.dumps({"items": [*objects, *planned.CLASSES, *planned.slices(devices)]})
    )
    nodes.write_text(json.dumps({"nodes": planned.answers(devices)}))
    options = {"cluster_src": [str(tmp_path / "cluster.json")], "definition": manifest}
    assert run_here("claim_explanation_info", {**options, "nodes_src": str(nodes)})["text"] == with_reports
    without = run_here("claim_explanation_info", options)
    assert without["text"].splitlines()[-1] == without_reports and not without["changed"]
    nodes.write_text("[]")
    refused = run_here("claim_explanation_info", {**options, "nodes_src": str(nodes)})
    assert refused["error_code"] == "invalid-inventory" and "contains no reports of nodes" in refused["msg"]


def test_page_has_twelve_different_reasons() -> None:
    numbered = [one for one in EXAMPLES if one.title.split(".")[0].isdigit()]
    assert [int(one.title.split(".")[0]) for one in numbered] == list(range(1, 13))
    assert len({one.text for one in EXAMPLES}) == len(EXAMPLES) == 14


def test_pending_objects_of_namespace_are_explained(run_here: Run, there: str, tmp_path: Path) -> None:
    claim = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}
    objects = [
        {"kind": "ResourceClaim", "metadata": {"name": name, "namespace": place}, "spec": {"devices": claim}}
        for name, place in (("a", "x"), ("b", "y"))
    ]
    pod = {"resourceClaims": [{"name": "it", "resourceClaimName": "a"}]}
    objects.append({"kind": "Pod", "metadata": {"name": "p", "namespace": "x"}, "spec": pod})
    objects.append(
        {"kind": "Pod", "metadata": {"name": "bound", "namespace": "x"}, "spec": {**pod, "nodeName": "gpu-1"}}
    )
    (tmp_path / "more.json").write_text(json.dumps({"items": objects}))
    files = {"cluster_src": [there, str(tmp_path / "more.json")]}
    waiting = run_here("claim_explanation_info", files)["explanations"]
    assert [(one["kind"], one["namespace"], one["name"]) for one in waiting] == [
        ("Pod", "x", "p"),
        ("ResourceClaim", "y", "b"),
    ]
    assert [one["name"] for one in run_here("claim_explanation_info", {**files, "namespace": "y"})["explanations"]] == [
        "b"
    ]
    # A claim of a pending pod is explained with the pod. Within a namespace its name alone is enough.
    (one,) = run_here("claim_explanation_info", {**files, "namespace": "x", "claims": ["a"]})["explanations"]
    assert (one["kind"], one["name"], one["verdict"]) == ("Pod", "p", "fits")


def test_cluster_query_reads_all_relevant_lists(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.claim_explanation_info")
    explanations = importlib.import_module(f"{UTILS}._scheduling.explain_sources")
    rule = {"metadata": {"name": "r"}, "spec": {"taint": {"key": "k", "effect": "NoSchedule"}}}
    plurals = {f"{kind.lower()}{'es' if kind.endswith('s') else 's'}": kind for kind in explanations.LISTS}
    by_kind: dict[str, list[Any]] = {kind: [] for kind in explanations.LISTS}
    wanted = yaml.safe_load(EXAMPLES[-1].manifests)
    for each in (*cluster(), wanted, {**rule, "kind": "DeviceTaintRule"}):
        by_kind[each["kind"]].append({key: value for key, value in each.items() if key != "kind"})

    class Api:
        def request(self, _method: str, path: str, **_more: Any) -> dict[str, Any]:
            if path == "/apis/resource.k8s.io":
                return {"versions": [{"version": "v1"}, {"version": "v1beta2"}]}
            return {"resources": [{"name": "devicetaintrules"}] if path.endswith("/v1beta2") else []}

        def list_all(self, path: str, _query: Any, _keep: Any = None) -> list[Any]:
            place, _slash, plural = path.rpartition("/")
            assert (
                place == f"/apis/resource.k8s.io/{'v1beta2' if plural == 'devicetaintrules' else 'v1'}"
                or place == "/api/v1"
            )
            return by_kind[plurals[plural]]

    monkeypatch.setattr(module, "connect", lambda _module: Api())
    result = run_here("claim_explanation_info", {"claims": ["alone"]})
    # The rule taints all devices, unlike the page's cluster.
    assert result["explanations"][0]["verdict"] == "no"
    assert result["explanations"][0]["changes"][0]["taints"] == ["k:NoSchedule"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"claims": ["nobody"]}, "ResourceClaim default/nobody does not exist; in namespace default there are none"),
        ({"pods": ["x/nobody"]}, "Pod x/nobody does not exist"),
        ({"definition": "a: [", "namespace": "x"}, "definition is not valid YAML"),
        ({"definition": "- a"}, "expected objects with kind and metadata"),
        ({"definition": {"kind": "Pod", "metadata": {}}}, "a Pod among the manifests has no name"),
        ({"src": "/nowhere.yaml"}, "/nowhere.yaml cannot be read"),
        (
            {
                "definition": {
                    "kind": "ResourceClaim",
                    "metadata": {"name": "c"},
                    "spec": {"devices": {"requests": [{}]}},
                }
            },
            "ResourceClaim c: its requests cannot be read",
        ),
    ],
)
def test_invalid_input_is_rejected(run_here: Run, there: str, options: dict[str, Any], words: str) -> None:
    result = run_here("claim_explanation_info", {"cluster_src": [there], **options})
    assert result["failed"] and words in result["msg"] and result["error_code"]


def test_missing_package_error_has_pip_command(run_here: Run, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(f"{UTILS}._scheduling.cel"), "HAS_CEL", False)
    result = run_here("claim_explanation_info", {"cluster_src": [there]})
    assert result["error_code"] == "missing-package" and "pip install cel-expr-python" in result["msg"]


def test_playbook_shows_and_writes_explanation(there: str, tmp_path: Path) -> None:
    (tmp_path / "wanted.yaml").write_text(EXAMPLES[3].manifests)
    variables = {
        "accelerator_why_cluster_src": there,
        "accelerator_why_src": str(tmp_path / "wanted.yaml"),
        "accelerator_why_file": str(tmp_path / "why.json"),
        "ansible_python_interpreter": str(PYTHON),
    }
    done = run_ansible(
        [
            *(Path(sys.executable).with_name("ansible-playbook"), "--inventory", "localhost,"),
            *(ROOT / "playbooks/why.yml", "--extra-vars", json.dumps(variables)),
        ],
        env={**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path / "l"), "ANSIBLE_REMOTE_TEMP": str(tmp_path / "r")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it fits when others/first ends" in done.stdout
    (written,) = json.loads((tmp_path / "why.json").read_text())
    assert written["changes"][0]["claims"] == ["others/first"]
