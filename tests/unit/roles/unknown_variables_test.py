# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Variables with misspelled names are rejected, and the table of variables is complete."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.filter.unknown_variables import role_options, unknown_variables
from ansible_collections.dra.accelerators.plugins.lookup.reserved_variables import FACTS_OF_ROLES
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.inventory_hosts import ALL, _variables
from ansible_collections.dra.accelerators.plugins.module_utils._playbooks.variables import (
    NAMES,
    SET_BY_INVENTORY,
    SET_BY_PLAYBOOKS,
    VARIABLES,
    nearest,
    unknown,
)
from text_variables_test import play

ROOT = Path(__file__).resolve().parents[3]
NAME = re.compile(r"(?<![\w.])accelerator_[a-z0-9_]*[a-z0-9](?![\w(])")
#: Groups and other names that are no variables.
OTHER_NAMES = {"accelerator_nodes", "accelerator_controllers", "accelerator_monitoring"}


def task_files() -> Iterator[tuple[Path, Any]]:
    """Yield the YAML files of playbooks and roles with their content."""
    listing = subprocess.run(
        ["git", "ls-files", "playbooks/*.yml", "roles/*/tasks/*.yml", "roles/*/handlers/*.yml"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listing.stdout.split():
        yield ROOT / name, yaml.safe_load((ROOT / name).read_text("utf-8"))


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings of a YAML document."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(each)


def test_variables_that_the_playbooks_read_are_in_the_table() -> None:
    passed: set[str] = set()
    read: set[str] = set()
    for path, document in task_files():
        for mapping in mappings(document):
            passed |= {str(key) for key in (mapping.get("vars") or {})}
            passed |= {str((mapping.get("loop_control") or {}).get("loop_var", ""))}
        read |= set(re.findall(r"(?<![\w.'])(accelerator_[a-z0-9_]+) \| default\(", path.read_text("utf-8")))
    assert read - passed - SET_BY_PLAYBOOKS - OTHER_NAMES <= NAMES
    defaults = "".join(path.read_text("utf-8") for path in ROOT.glob("roles/*/defaults/main.yml"))
    assert set(NAME.findall(defaults)) - OTHER_NAMES - SET_BY_PLAYBOOKS <= NAMES


def test_defaults_of_the_table_are_those_of_the_playbooks() -> None:
    texts = "".join(path.read_text("utf-8") for path, _document in task_files())
    differing = []
    for name, variable in (each for variables in VARIABLES.values() for each in variables.items()):
        literals = set(re.findall(rf"(?<!\w){name} \| default\((true|false|\d+|'[^']+'|\[\]|{{}})[,)]", texts))
        if variable.default != "unset" and literals and {each.strip("'") for each in literals} != {variable.default}:
            differing.append((name, variable.default, literals))
    assert not differing


@pytest.mark.parametrize("path", ["examples/fleet.yml", "examples/ascend/mixed-fleet.yml"])
def test_example_variables_are_known(path: str) -> None:
    text = (ROOT / path).read_text("utf-8")
    assert unknown(re.findall(r"^(?:# )?(accelerator_\w+):", text, re.MULTILINE)) == []


def test_variables_of_the_inventory_plugin_are_known() -> None:
    found = _variables([], None, "node", ALL)
    assert {name for name in found if name.startswith("accelerator_")} == SET_BY_INVENTORY
    assert unknown(found) == []


def test_similar_name_is_suggested() -> None:
    hostvars = {"a": {"accelerator_vendor": ["nvidia"], "accelerator_vendors": ["nvidia"], "accelerator_color": "red"}}
    assert unknown_variables(["a"], hostvars) == [
        "The variable accelerator_color (of a) is unknown. docs/variables.md lists all variables.",
        "The variable accelerator_vendor (of a) is unknown. Did you mean accelerator_vendors?",
    ]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("accelerator_nvidia_driver", "accelerator_nvidia_driver_enabled"),
        ("accelerator_offline_folder", "accelerator_offline_directory"),
        ("accelerator_bundle_folder", "accelerator_bundle_dest"),
        ("accelerator_go_on", "accelerator_continue_on_failure"),
        ("accelerator_plan_most_moves", "accelerator_plan_max_moves"),
        ("accelerator_timeout_repartition", "accelerator_repartition_timeout"),
        ("accelerator_vendor", "accelerator_vendors"),
        ("accelerator_sreial", "accelerator_serial"),
        ("dra_driver_cdi_folder", "dra_driver_cdi_directory"),
        ("dra_driver_api_authority", "dra_driver_api_ca_file"),
        ("accelerator_folder", ""),
        ("accelerator_color", ""),
        ("accelerator_", ""),
        ("dra_driver_command", ""),
    ],
)
def test_name_with_similar_words_or_letters_is_suggested(name: str, known: str) -> None:
    assert nearest(name, role_options()) == known


def test_each_name_without_one_letter_is_found() -> None:
    for name in sorted(NAMES):
        middle = (len("accelerator_") + len(name)) // 2
        assert nearest(name[:middle] + name[middle + 1 :]) == name


def test_unknown_role_option_is_rejected_and_the_name_of_another_collection_is_not() -> None:
    hostvars = {"a": {"dra_driver_deploy": "daemonset", "dra_driver_command": "", "nvidia_driver_branch": "580"}}
    assert unknown_variables(["a"], hostvars) == [
        "The variable dra_driver_command (of a) is unknown. The README of the role dra_driver lists its options.",
        "The variable dra_driver_deploy (of a) is unknown. Did you mean dra_driver_deploy_as?",
    ]


def test_options_and_facts_of_the_roles_are_known() -> None:
    defaults = "".join(
        (ROOT / f"roles/{role}/defaults/main.yml").read_text("utf-8") for role in ("dra_driver", "dra_controller")
    )
    options = re.findall(r"^(dra_\w+):", defaults, re.MULTILINE)
    assert len(options) > 80 and unknown([*options, *FACTS_OF_ROLES], role_options()) == []


def test_sentence_names_three_hosts() -> None:
    hostvars: dict[str, dict[str, str]] = {name: {"accelerator_vendor": ""} for name in "abcde"}
    (found,) = unknown_variables(list("edcba"), hostvars)
    assert "(of a, b, c, and 2 more)" in found


@pytest.mark.parametrize(
    ("group", "words", "status"),
    [
        ("accelerator_vendor=nvidia", (), 2),
        ("", ("-e", "accelerator_vendor=nvidia"), 2),
        ("", ("-e", "dra_driver_deploy=daemonset"), 2),
        ("accelerator_serial=5", ("-e", "accelerator_continue_on_failure=true"), 0),
    ],
)
def test_playbook_rejects_a_misspelled_variable(
    tmp_path: Path, group: str, words: tuple[str, ...], status: int
) -> None:
    found, output = play(tmp_path, group, *words)
    assert found == status, output
    assert ("is unknown. Did you mean " in output) == (status == 2), output
