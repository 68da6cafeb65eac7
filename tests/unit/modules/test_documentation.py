# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The documentation of each module: valid examples, and return values with samples of their type."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ModuleArgumentSpecValidator

MODULES = "ansible_collections.dra.accelerators.plugins.modules"
NAMES = sorted(path.stem for path in (Path(__file__).resolve().parents[3] / "plugins" / "modules").glob("*.py"))
TYPES: dict[str, Any] = {
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "raw": object,
    "str": str,
}
KEYWORDS = {
    "name",
    "register",
    "when",
    "failed_when",
    "loop",
    "vars",
    "delegate_to",
    "become",
    "no_log",
    "check_mode",
    "environment",
}


def load(name: str) -> Any:
    return importlib.import_module(f"{MODULES}.{name}")


def examples(name: str) -> list[tuple[str, dict[str, Any]]]:
    tasks = yaml.safe_load(load(name).EXAMPLES)
    key = f"dra.accelerators.{name}"
    return [(task["name"], task[key] or {}) for task in tasks if key in task]


def test_module_list_is_complete() -> None:
    assert {"accelerator_info", "nvidia_mig", "resource_slices"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_examples_use_modules_only(name: str) -> None:
    tasks = yaml.safe_load(load(name).EXAMPLES)
    assert tasks
    for task in tasks:
        assert sum("." in key for key in task) == 1, task
        assert all("." in key or key in KEYWORDS for key in task), task


@pytest.mark.parametrize(("name", "title", "options"), [(name, *each) for name in NAMES for each in examples(name)])
def test_examples_match_the_argument_spec(name: str, title: str, options: dict[str, Any]) -> None:
    module = load(name)
    constraints = getattr(module, "CONSTRAINTS", {})
    validated = ModuleArgumentSpecValidator(module.argument_spec(), **constraints).validate(options)
    assert not validated.error_messages, title


@pytest.mark.parametrize(
    "title_and_options",
    [each for name in ("ascend_vnpu", "ascend_vnpu_info", "nvidia_mig", "nvidia_mig_info") for each in examples(name)],
    ids=lambda each: each[0],
)
def test_layouts_in_examples_are_rules(title_and_options: tuple[str, dict[str, Any]]) -> None:
    core = importlib.import_module("ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules")
    _title, options = title_and_options
    if "layout" in options:
        assert len(core.parse_rules(options["layout"])) == len(options["layout"])
    elif {"config", "config_file"} & options.keys():
        assert options["config_name"]


@pytest.mark.parametrize("title_and_options", examples("resource_slices"), ids=lambda each: each[0])
def test_pools_in_examples_are_valid(title_and_options: tuple[str, dict[str, Any]]) -> None:
    module = load("resource_slices")
    _title, options = title_and_options
    params = ModuleArgumentSpecValidator(module.argument_spec()).validate(options).validated_parameters
    if params["state"] == "present":
        spec = module.pool_spec(params, params["pool"], "separate")
        assert sum(len(each.devices) for each in spec.slices) == len(options["devices"])


def walk(values: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for key, value in values.items():
        found.append((f"{path}{key}", value))
        found += walk(value.get("contains", {}), f"{path}{key}.")
    return found


@pytest.mark.parametrize(
    ("path", "value"), [each for name in NAMES for each in walk(yaml.safe_load(load(name).RETURN), f"{name}: ")]
)
def test_return_values_have_samples_of_their_type(path: str, value: dict[str, Any]) -> None:
    assert value["description"], path
    assert value["returned"], path
    if "contains" in value:
        return
    assert isinstance(value["sample"], TYPES[value["type"]]), path
    if value["type"] == "list":
        assert all(isinstance(each, TYPES[value["elements"]]) for each in value["sample"]), path
