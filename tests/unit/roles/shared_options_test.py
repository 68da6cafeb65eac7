# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Objects that all hosts of a cluster share: each of their options is merged over the hosts, equal on all hosts, or listed with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment, nodes
from playing import Played, play

ROLES = Path(__file__).resolve().parents[3] / "roles"
#: By role, its templates with objects that all hosts of a cluster share.
TEMPLATES = {
    "dra_driver": ("cluster_objects.yaml.j2", "flow_control.yaml.j2", "pod_objects.yaml.j2"),
    "dra_controller": ("cluster_objects.yaml.j2", "flow_control.yaml.j2", "webhook.yaml.j2", "wrong_class.yaml.j2"),
    "device_classes": ("ascend_classes.yaml.j2", "device_classes.yaml.j2"),
}
#: Templates with objects that one host writes for itself, or that no other host needs.
OTHERS = {
    "dra_driver": {
        "node_objects.yaml.j2": "has the objects of each node",
        "records.yaml.j2": "has the record of each node",
        "pod_set.yaml.j2": "has the pods of the nodes with the same settings",
        "pod_spec.yaml.j2": "is part of pod_set.yaml.j2",
    },
    "dra_controller": {
        "deployment_objects.yaml.j2": "has the pods, which have all settings of the host that writes them",
    },
    "device_classes": {},
}
#: The variable of a role with the options that it compares between all hosts of the cluster.
COMPARED = {"dra_driver": "__dra_driver_namespaces", "dra_controller": "__dra_controller_shared"}
#: Options that are neither merged nor compared.
REASONS = {
    "dra_driver_cluster_info": "answer of the cluster to the leader",
    "dra_driver_cluster_objects": "whether this run writes the objects",
    "dra_driver_deploy_as": "whether this run writes the objects of pods",
    "dra_controller_kubeconfig": "defines the cluster",
    "dra_controller_context": "defines the cluster",
    "dra_controller_token_lifetime": "the longest lifetime of the hosts counts",
    **dict.fromkeys(
        (
            "device_classes_ascend_driver_name",
            "device_classes_ascend_extended_resources",
            "device_classes_nvidia_driver_name",
            "device_classes_nvidia_extended_resource",
        ),
        "a DeviceClass has one value, and it restricts no driver",
    ),
}
MERGED = ("cluster_union", "__dra_driver_peer_needs")


def load(role: str, part: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROLES / role / part / "main.yml").read_text("utf-8")))


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.items():
            yield from texts(list(each))
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)
    elif isinstance(value, str):
        yield value


def names(template: str) -> set[str]:
    return {each.name for each in Environment(extensions=["jinja2.ext.do"]).parse(template).find_all(nodes.Name)}


def options(role: str) -> dict[str, str]:
    """Return the options of a role that its shared objects depend on without a merge, each with the template."""
    variables, defaults = load(role, "vars"), load(role, "defaults")
    found: dict[str, str] = {}
    for template in TEMPLATES[role]:
        todo = list(names((ROLES / role / "templates" / template).read_text("utf-8")))
        seen = set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in variables:
                expressions = list(texts(variables[name]))
                if not any(word in each for word in MERGED for each in expressions):
                    todo += [each for text in expressions for each in names(text)]
            elif name in defaults:
                found[name] = template
    return found


@pytest.mark.parametrize("role", list(TEMPLATES))
def test_each_option_of_shared_objects_is_merged_compared_or_listed(role: str) -> None:
    """The objects have fixed names, so the last writer's value would replace the value that other hosts need."""
    compared = load(role, "vars").get(COMPARED.get(role, ""), {})
    wrong = {name: template for name, template in options(role).items() if name not in {*compared, *REASONS}}
    assert not wrong, f"Merge these options over the hosts of the cluster, or compare them in {COMPARED.get(role)}"


def test_each_reason_is_needed() -> None:
    used = {name for role in TEMPLATES for name in options(role)}
    assert REASONS.keys() <= used


@pytest.mark.parametrize("role", list(TEMPLATES))
def test_each_template_with_objects_is_checked_or_listed(role: str) -> None:
    found = {
        path.name
        for path in (ROLES / role / "templates").glob("*.yaml.j2")
        if "metadata:" in path.read_text("utf-8") or "apiVersion:" in path.read_text("utf-8")
    }
    assert found <= {*TEMPLATES[role], *OTHERS[role]}


def test_defaults_of_compared_options_are_those_of_the_roles() -> None:
    defaults, variables = load("dra_controller", "defaults"), load("dra_controller", "vars")
    given = variables["__dra_controller_shared_defaults"]
    fixed = {name: value for name, value in given.items() if "{{" not in str(value)}
    assert fixed == {name: defaults[name] for name in fixed}
    assert given.keys() <= variables["__dra_controller_shared"].keys()
    for name, text in variables["__dra_controller_shared"].items():
        assert text == f"{{{{ {name} }}}}"


def compared(
    directory: Path, nodes_: dict[str, Any], controllers: dict[str, Any], expression: str, *words: str
) -> Played:
    """Print an expression of the role for the first controller."""
    (directory / "group_vars").mkdir(exist_ok=True)
    inventory = {"accelerator_nodes": {"hosts": nodes_}}
    (directory / "nodes.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    role = directory / "roles/dra_controller"
    (role / "tasks").mkdir(parents=True)
    for part in ("defaults", "vars", "templates"):
        (role / part).symlink_to(ROLES / "dra_controller" / part)
    shown = {"ansible.builtin.debug": {"msg": f"{{{{ {expression} | to_json | b64encode }}}}"}}
    (role / "tasks/main.yml").write_text(yaml.safe_dump([shown]), encoding="utf-8")
    include = {"ansible.builtin.include_role": {"name": "dra_controller"}}
    more = ("-i", str(directory / "nodes.yml"), "--limit", "c1", *words)
    return play(directory, [include], controllers, *more, group="accelerator_controllers")


def test_controller_has_drivers_and_namespace_of_the_nodes_of_its_cluster(tmp_path: Path) -> None:
    nodes_ = {
        "n1": {"accelerator_vendors": ["nvidia", "ascend"], "dra_driver_namespace": "drivers"},
        "n2": {"dra_driver_names": ["gpu.example.com"], "dra_driver_namespace": "drivers"},
        "b1": {"accelerator_kubeconfig": "/b", "dra_driver_names": ["other.example.com"]},
    }
    for name in ("n1", "n2"):
        nodes_[name]["accelerator_kubeconfig"] = "/a"
    expression = "[dra_controller_drivers, dra_controller_driver_namespace, __dra_controller_differences]"
    played = compared(tmp_path, nodes_, {"c1": {"accelerator_kubeconfig": "/a"}}, expression)
    assert played.messages["c1"] == [["gpu.example.com", "gpu.nvidia.com", "npu.huawei.com"], "drivers", []], (
        played.output
    )


@pytest.mark.parametrize(
    ("first", "second", "words", "expected"),
    [
        ({}, {}, (), []),
        ({}, {}, ("-e", "dra_controller_webhook_port=9500"), []),
        ({"dra_controller_webhook_port": 9500}, {"dra_controller_webhook_port": "9500"}, (), []),
        ({"dra_controller_webhook_port": 9500}, {}, (), ["dra_controller_webhook_port is 9500 here and 9443 on c2."]),
        (
            {},
            {"dra_controller_webhook_failure_policy": "Fail"},
            (),
            ['dra_controller_webhook_failure_policy is "Ignore" here and "Fail" on c2.'],
        ),
        ({}, {"accelerator_kubeconfig": "/b", "dra_controller_webhook_port": 9500}, (), []),
    ],
)
def test_options_that_differ_between_controllers_are_found(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], words: tuple[str, ...], expected: list[str]
) -> None:
    """c2 is not in the run, but its different option is found."""
    hosts = {"c1": {"accelerator_kubeconfig": "/a", **first}, "c2": {"accelerator_kubeconfig": "/a", **second}}
    played = compared(tmp_path, {}, hosts, "__dra_controller_differences", *words)
    assert played.messages["c1"] == expected, played.output
