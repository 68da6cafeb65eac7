# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The webhook objects: called hosts, selected objects, and the failure policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_driver.controller import admission_queue
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_controller"
NAMESPACE = "dra-accelerators-controller"
#: The place of the object in the role: among the other objects, or alone.
EXPRESSION = (
    "{{ ((__dra_controller_objects | default([]))"
    " + ([__dra_controller_webhook_object] if __dra_controller_webhook_object is defined else []))"
    " | selectattr('kind', 'equalto', 'ValidatingWebhookConfiguration') | list | to_json | b64encode }}"
)
OPTIONS = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]["main"][
    "options"
]
POLICIES = OPTIONS["dra_controller_webhook_failure_policy"]["choices"]


def webhooks(
    directory: Path, *, run_on: str = "a", ready: str = "True", names: tuple[str, str] = ("a", "b"), **variables: Any
) -> list[dict[str, Any]]:
    """Return the webhooks that the role writes, evaluated by Ansible, for controllers on three hosts, one of them without a Node.

    ``run_on`` are the hosts of the run, ``ready`` is the condition Ready of the Node b, and ``names`` are the Nodes of
    the hosts a and b.
    """
    (directory / "templates").symlink_to(ROLE / "templates")
    node_names = dict(zip("ab", names))
    nodes = [
        {
            "__dra_controller_peer": name,
            "resources": [{"metadata": {"name": node_names.get(name)}, "status": status}] if status else [],
        }
        for name, status in (
            ("0-without-node", None),
            ("a", {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}),
            (
                "b",
                {
                    "addresses": [{"type": "InternalIP", "address": "fd00::2"}],
                    "conditions": [{"type": "Ready", "status": ready}],
                },
            ),
        )
    ]
    given = {
        "__dra_controller_nodes": {"results": nodes},
        "__dra_controller_configured": {"resources": []},
        "dra_controller_node_name": names[0],
        **variables,
    }
    (directory / "given.yml").write_text(yaml.safe_dump(given), encoding="utf-8")
    files = (ROLE / "defaults/main.yml", ROLE / "vars/main.yml", directory / "given.yml")
    tasks: list[dict[str, Any]] = [{"ansible.builtin.include_vars": {"file": str(path)}} for path in files]
    tasks.append({"ansible.builtin.debug": {"msg": EXPRESSION}})
    hosts: dict[str, dict[str, Any]] = {"0-without-node": {}, "a": {}, "b": {}}
    played = play(directory, tasks, hosts, "--limit", run_on, group="accelerator_controllers")
    assert played.status == 0, played.output
    (written,) = played.messages["a"]
    return list(written["webhooks"])


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_webhooks_failure_policy_is_configurable(tmp_path: Path, policy: str | None) -> None:
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
        assert each["timeoutSeconds"] == admission_queue.REQUEST_SECONDS == 1
        # Its own namespace has to start without the webhook.
        assert each["namespaceSelector"]["matchExpressions"] == [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", NAMESPACE]}
        ]


@pytest.mark.parametrize("ready", ["False", "Unknown"])
@pytest.mark.parametrize(("run_on", "called"), [("a", ["a"]), ("a,b", ["a", "b"])])
def test_webhooks_leave_out_hosts_that_are_down(tmp_path: Path, run_on: str, called: list[str], ready: str) -> None:
    """A call to a stopped host would take the whole timeout, so it is left out. A host that the run itself reaches stays."""
    found = webhooks(tmp_path, run_on=run_on, ready=ready)
    assert [each["name"] for each in found] == [f"{name}.controller.dra.accelerators" for name in called]


def test_webhooks_of_names_with_dots_and_dashes_differ(tmp_path: Path) -> None:
    """The API server rejects a configuration with the same name twice: names with dots and dashes differ."""
    found = webhooks(tmp_path, names=("gpu.1", "gpu-1"))
    assert [each["name"] for each in found] == [
        "gpu.1.controller.dra.accelerators",
        "gpu-1.controller.dra.accelerators",
    ]


def test_webhooks_host_without_a_node_does_not_shift_addresses(tmp_path: Path) -> None:
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/b.yml").write_text("dra_controller_webhook_host: balancer.example.com\n", encoding="utf-8")
    assert [each["clientConfig"]["url"] for each in webhooks(tmp_path)] == [
        "https://10.0.0.1:9443/validate",
        "https://balancer.example.com:9443/validate",
    ]


def test_webhooks_select_three_kinds_without_status(tmp_path: Path) -> None:
    (first, _second) = webhooks(tmp_path, dra_controller_drivers=["gpu.nvidia.com", "mine.example.com"])
    requested = {resource: rule["scope"] for rule in first["rules"] for resource in rule["resources"]}
    assert requested == {
        "resourceclaims": "Namespaced",
        "resourceclaimtemplates": "Namespaced",
        "deviceclasses": "Cluster",
    }
    for rule in first["rules"]:
        assert (rule["apiGroups"], rule["operations"]) == (["resource.k8s.io"], ["CREATE", "UPDATE"])
        assert rule["apiVersions"] == ["v1", "v1beta2", "v1beta1"]
    new, condition = first["matchConditions"]
    assert new["expression"] == "request.operation != 'UPDATE' || object.spec != oldObject.spec"
    assert condition["expression"].endswith("config.opaque.driver in ['gpu.nvidia.com', 'mine.example.com'])")
