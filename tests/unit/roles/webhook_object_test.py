# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Whom the API server asks about configurations, about what, and what becomes of an object when nobody answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_controller"
NAMESPACE = "dra-accelerators-controller"
#: Where the role has the object: among the others, or by itself.
EXPRESSION = (
    "{{ ((__dra_controller_objects | default([]))"
    " + ([__dra_controller_webhook_object] if __dra_controller_webhook_object is defined else []))"
    " | selectattr('kind', 'equalto', 'ValidatingWebhookConfiguration') | list | to_json | b64encode }}"
)
OPTIONS = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]["main"][
    "options"
]
POLICIES = OPTIONS["dra_controller_webhook_failure_policy"]["choices"]


def webhooks(folder: Path, **variables: Any) -> list[dict[str, Any]]:
    """What the role writes for a site whose two hosts have controllers, by Ansible itself."""
    (folder / "templates").symlink_to(ROLE / "templates")
    nodes = [
        {"__dra_controller_peer": name, "resources": [{"metadata": {"name": name}, "status": {"addresses": addresses}}]}
        for name, addresses in (
            ("a", [{"type": "InternalIP", "address": "10.0.0.1"}]),
            ("b", [{"type": "InternalIP", "address": "fd00::2"}]),
        )
    ]
    given = {
        "__dra_controller_nodes": {"results": nodes},
        "__dra_controller_configured": {"resources": []},
        "dra_controller_node_name": "a",
        **variables,
    }
    (folder / "given.yml").write_text(yaml.safe_dump(given), encoding="utf-8")
    files = (ROLE / "defaults/main.yml", ROLE / "vars/main.yml", folder / "given.yml")
    tasks: list[dict[str, Any]] = [{"ansible.builtin.include_vars": {"file": str(path)}} for path in files]
    tasks.append({"ansible.builtin.debug": {"msg": EXPRESSION}})
    played = play(folder, tasks, {"a": {}, "b": {}}, "--limit", "a", group="accelerator_controllers")
    assert played.status == 0, played.output
    (written,) = played.told["a"]
    return list(written["webhooks"])


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_what_becomes_of_an_object_when_nobody_answers_is_the_sites_choice(tmp_path: Path, policy: str | None) -> None:
    chosen = {"dra_controller_webhook_failure_policy": policy} if policy else {}
    found = webhooks(tmp_path, **chosen)
    urls = ["https://10.0.0.1:9443/validate", "https://[fd00::2]:9443/validate"]
    assert [each["clientConfig"]["url"] for each in found] == urls
    for each in found:
        assert each["failurePolicy"] == (policy or "Ignore")
        assert (each["sideEffects"], each["matchPolicy"], each["admissionReviewVersions"]) == (
            "None",
            "Equivalent",
            ["v1"],
        )
        assert 1 <= each["timeoutSeconds"] <= 5, "so long an object waits for each that does not answer"
        # Its own namespace has to start without it.
        assert each["namespaceSelector"]["matchExpressions"] == [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", NAMESPACE]}
        ]


def test_it_is_asked_about_three_kinds_and_never_about_a_status(tmp_path: Path) -> None:
    (first, _second) = webhooks(tmp_path, dra_controller_drivers=["gpu.nvidia.com", "mine.example.com"])
    asked = {resource: rule["scope"] for rule in first["rules"] for resource in rule["resources"]}
    assert asked == {"resourceclaims": "Namespaced", "resourceclaimtemplates": "Namespaced", "deviceclasses": "Cluster"}
    for rule in first["rules"]:
        assert (rule["apiGroups"], rule["operations"]) == (["resource.k8s.io"], ["CREATE", "UPDATE"])
        assert rule["apiVersions"] == ["v1", "v1beta2", "v1beta1"]
    new, condition = first["matchConditions"]
    assert new["expression"] == "request.operation != 'UPDATE' || object.spec != oldObject.spec"
    assert condition["expression"].endswith("config.opaque.driver in ['gpu.nvidia.com', 'mine.example.com'])")
