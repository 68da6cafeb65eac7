# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The removal of the last driver also removes the objects that all drivers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager

VARIABLES = Path(__file__).resolve().parents[3] / "roles/dra_driver/vars/main.yml"


def value_of(directory: Path, name: str, **given: Any) -> Any:
    """Return a variable of the role, evaluated by Ansible."""
    variables = {**yaml.safe_load(VARIABLES.read_text("utf-8")), **given}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"a": None}, "vars": variables}}), "utf-8")
    loader = DataLoader()
    inventory = InventoryManager(loader, sources=[str(directory / "hosts.yml")])
    manager = VariableManager(loader=loader, inventory=inventory)
    return HostVars(inventory=inventory, variable_manager=manager, loader=loader)["a"][name]


@pytest.mark.parametrize(
    ("accounts", "orphans", "pods", "bindings", "last"),
    [
        (["driver-a"], [], [], ["a"], True),
        (["driver-a", "driver-gone"], ["gone"], [], ["a", "gone"], True),
        (["driver-a", "driver-b"], [], [], [], False),
        (["driver-a", "driver-b", "driver-gone"], ["gone"], [], [], False),
        (["driver-a"], [], ["a"], [], True),
        (["driver-a"], [], ["b"], [], False),
        # The service account of b is in another namespace. Its ClusterRoleBinding is in none.
        (["driver-a"], [], [], ["a", "b"], False),
        ([], ["gone"], [], ["gone"], True),
    ],
)
def test_last_driver_ignores_accounts_of_deleted_nodes(
    tmp_path: Path, accounts: list[str], orphans: list[str], pods: list[str], bindings: list[str], last: bool
) -> None:
    names = ["dra-accelerators-driver", *(f"dra-accelerators-driver-{node}:node" for node in bindings)]
    own = [{"kind": "ClusterRoleBinding", "metadata": {"name": name}} for name in names]
    left = {"accounts": accounts, "orphans": orphans, "driver_pods": {name: [] for name in pods}, "own": own}
    given = {"__dra_driver_left": left, "__dra_driver_batch": ["a"]}
    assert value_of(tmp_path, "__dra_driver_last", **given) is last
