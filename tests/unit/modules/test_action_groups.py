# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action group k8s has the modules with the options for access to the Kubernetes API."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import API_OPTIONS

from tests.unit.roles.playing import play

ROOT = Path(__file__).resolve().parents[3]
MODULES = {
    path.stem: importlib.import_module(f"ansible_collections.dra.accelerators.plugins.modules.{path.stem}")
    for path in sorted((ROOT / "plugins/modules").glob("*.py"))
}


def groups() -> dict[str, list[str]]:
    """Return the modules of each action group."""
    found: dict[str, list[str]] = yaml.safe_load((ROOT / "meta/runtime.yml").read_text("utf-8"))["action_groups"]
    return found


def extends(module: Any, fragment: str) -> bool:
    """Return whether a module's documentation includes a fragment of this collection."""
    return f"dra.accelerators.{fragment}" in yaml.safe_load(module.DOCUMENTATION)["extends_documentation_fragment"]


def test_group_has_the_modules_with_a_kubeconfig() -> None:
    specs = {name: module.argument_spec() for name, module in MODULES.items()}
    members = [name for name, spec in specs.items() if "kubeconfig" in spec]
    assert groups() == {"k8s": members}
    # A default of the group must be an option of each member, with the same meaning.
    assert all({name: specs[each].get(name) for name in API_OPTIONS} == API_OPTIONS for each in members)


def test_documentation_states_the_group_of_its_members() -> None:
    members = groups()["k8s"]
    assert [name for name, module in MODULES.items() if extends(module, "_attributes.actiongroup_k8s")] == members
    assert [name for name, module in MODULES.items() if extends(module, "_kubernetes")] == members


def test_defaults_of_the_group_are_passed(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig-of-the-group"
    defaults = {"group/dra.accelerators.k8s": {"kubeconfig": str(file)}}
    played = play(tmp_path, [{"module_defaults": defaults, "block": [{"dra.accelerators.claim_info": {}}]}], {"a": {}})
    assert str(file) in played.failed["a"]["msg"], played.output
