# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The defaults of the node driver are the same in the role, in the driver, and in the documentation."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import yaml
from dra_driver.config import RELOADABLE, Configuration, parse

ROOT = Path(__file__).resolve().parents[3]
# Values of the node, and values without a default. Of the backends, those with devices on the node are enabled.
OF_THE_NODE = {"node_name", "kubeconfig", "backends"}
# Values that are written only if they are set.
ON_DEMAND = {
    "device_rules",
    "kubelet_interface",
    "metrics_authorization",
    "network_tools",
    "read_pods",
    "vendor_runtimes",
}


def by_the_role() -> dict[str, Any]:
    """Return the driver.yaml of a node without any set option."""
    environment = jinja2.Environment(autoescape=False)
    environment.globals["lookup"] = lambda *_: ""
    environment.filters["bool"] = bool  # Ansible's
    defaults = yaml.safe_load((ROOT / "roles/dra_driver/defaults/main.yml").read_text("utf-8"))
    variables = yaml.safe_load((ROOT / "roles/dra_driver/vars/main.yml").read_text("utf-8"))

    def value(template: Any) -> Any:
        if isinstance(template, dict):
            return {key: value(each) for key, each in template.items()}
        if not isinstance(template, str) or "{{" not in template:
            return template
        (expression,) = re.findall(r"^\s*\{\{(.*)\}\}\s*$", template, re.DOTALL)
        known = {name: value(defaults[name]) for name in re.findall(r"dra_driver_\w+", expression) if name in defaults}
        return environment.compile_expression(expression)(**known)

    settings = {key: each for key, each in variables["__dra_driver_settings_of_text"].items() if key not in OF_THE_NODE}
    return value(settings) | value(variables["__dra_driver_settings_of_numbers"])


def by_the_documents() -> dict[str, str]:
    """Return the column of defaults in the table of keys."""
    page = (ROOT / "docs/node-driver.md").read_text("utf-8").split("\n## Configuration\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \| ", page, re.MULTILINE))


def test_defaults_of_role_and_driver_are_equal() -> None:
    written = by_the_role()
    assert {"inventory_interval", "full_inventory_interval", "token_lifetime", "cdi_directory", "log"} <= set(written)
    with_all = parse({"node_name": "node", **written})
    assert dataclasses.asdict(with_all) == dataclasses.asdict(Configuration(node_name="node"))


def test_role_restarts_the_driver_for_settings_that_need_it() -> None:
    variables = yaml.safe_load((ROOT / "roles/dra_driver/vars/main.yml").read_text("utf-8"))
    assert set(variables["__dra_driver_reloadable"]) == set(RELOADABLE) & set(by_the_role())


def test_docs_name_every_key_that_the_role_writes_and_its_default() -> None:
    table = by_the_documents()
    written = by_the_role()
    assert set(table) == set(written) | OF_THE_NODE | ON_DEMAND
    for key, default in written.items():
        output = re.match(r"`(.*)`", table[key])
        if output is None:
            assert table[key].startswith("empty") and not default, key
        else:
            assert yaml.safe_load(output[1]) == default, f"{key}: {output[1]} and {json.dumps(default)}"
