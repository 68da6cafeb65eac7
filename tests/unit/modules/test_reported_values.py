# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values that a node reports are checked before they are written with the operator's permissions or on the controller.

See test_node_labels.py for labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.inventory_hosts import is_address
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.resource_slice_spec import device
from ansible_collections.dra.accelerators.plugins.module_utils._layout.repartition_fleet import check_plans
from ansible_collections.dra.accelerators.plugins.module_utils._planner.render import variables_text
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError

from tests import planned

Json = dict[str, Any]
TEMPLATE = "{{ lookup('pipe', 'id') }}"


@pytest.mark.parametrize(
    ("kind", "text", "usable"),
    [
        ("InternalIP", "192.0.2.7", True),
        ("ExternalIP", "2001:db8::7", True),
        ("Hostname", "node-1.example.com", True),
        ("InternalIP", "-oProxyCommand=touch /tmp/x", False),
        ("InternalIP", "node-1", False),
        ("InternalIP", "fe80::1%-oProxyCommand=x", False),
        ("Hostname", "-oProxyCommand=x", False),
        ("Hostname", "a b", False),
        ("Hostname", TEMPLATE, False),
        ("Hostname", "", False),
    ],
)
def test_address_of_node_is_validated(kind: str, text: str, usable: bool) -> None:
    assert is_address(kind, text) is usable


@pytest.mark.parametrize("place", ["uuid", "profile", "key", "rule"])
def test_layout_file_with_template_is_rejected(place: str) -> None:
    """Ansible evaluates templates in a file of variables, whatever their origin: a layout file with a template is refused."""
    rule: Json = {"match": {"uuid": ["GPU-1"]}, "partitions": ["1g.10gb"]}
    if place == "uuid":
        rule["match"]["uuid"] = [TEMPLATE]
    elif place == "profile":
        rule["partitions"] = [{"profile": "{% raw %}", "count": 1}]
    elif place == "key":
        rule[TEMPLATE] = 1
    else:
        rule["note"] = {"deep": [["{# x #}"]]}
    good = {"hosts": "gpu-1", "layout": [{"match": {"uuid": ["GPU-1"]}, "partitions": ["1g.10gb"]}]}
    assert json.loads(variables_text([good], None))["accelerator_layouts"] == [good]
    with pytest.raises(AcceleratorError, match="The layout of gpu-2 contains"):
        variables_text([good, {"hosts": "gpu-2", "layout": [rule]}], None)


def test_plan_with_template_in_uuid_writes_no_file(run_here: Callable[..., Json], tmp_path: Path) -> None:
    answers = planned.answers(planned.fleet())
    answers["gpu-1"]["devices"][0]["uuid"] = TEMPLATE
    wanted = [{"name": "notebooks", "profile": "1g.10gb", "count": 9}]
    options = {"nodes": answers, "cluster": False, "wanted": wanted, "dest": str(tmp_path / "layouts.yml")}
    result = run_here("fleet_plan", options)
    assert result["failed"] and result["error_code"] == "template-in-layout" and "gpu-1" in result["msg"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["nodeName", "nodeSelector", "allNodes", "node_name", "all_nodes"])
def test_device_for_other_nodes_is_rejected(key: str) -> None:
    with pytest.raises(AcceleratorError, match=f"found {key}"):
        device({"name": "gpu-0", key: "other"}, 0)


EMPTY_PLAN: Json = {
    **{key: [] for key in ("operations", "before", "untouched", "unfinished", "unread")},
    "rules_differ": False,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"driver": "dra.cpu"}, "driver 'dra.cpu'"),
        ({"driver": ["gpu.nvidia.com"]}, "driver"),
        ({"driver": None}, "driver None"),
        ({"operation": "x" * 64}, "operation"),
        ({"operation": "a\nb"}, "operation"),
        ({"operation": TEMPLATE}, "operation"),
        ({"operation": None}, "operation"),
    ],
)
def test_plan_of_node_with_foreign_names_is_rejected(change: Json, says: str) -> None:
    operation = {"driver": "gpu.nvidia.com", "operation": "repartition-0123456789ab"}
    check_plans({"a": {**EMPTY_PLAN, "operations": [operation]}})
    with pytest.raises(AcceleratorError, match="node b reports") as refused:
        check_plans(
            {
                "a": {**EMPTY_PLAN, "operations": [operation]},
                "b": {**EMPTY_PLAN, "operations": [{**operation, **change}]},
            }
        )
    assert says in str(refused.value)


@pytest.mark.parametrize("key", EMPTY_PLAN)
def test_plan_of_node_without_value_is_rejected(key: str) -> None:
    without = {name: found for name, found in EMPTY_PLAN.items() if name != key}
    for plan in (without, {**EMPTY_PLAN, key: None}):
        with pytest.raises(AcceleratorError, match=f"node a has no valid {key}"):
            check_plans({"a": plan})
