# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The check ``playbook_rules`` finds values that extra variables replace, tasks that become root on the controller, and plays without a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playbook_rules import become_problems, extra_variable_problems, no_log_problems, set_by_roles, strategy_problems

BOOK = Path("playbooks/site.yml")
ROLE = Path("roles/nvidia_driver/tasks/main.yml")
INCLUDE = {"name": "Run a role", "ansible.builtin.include_role": {"name": "r"}, "vars": {"r_state": "absent"}}
LOCAL: dict[str, Any] = {"name": "Ask", "delegate_to": "localhost"}
NO_ROOT: dict[str, Any] = {"become": False, "vars": {"ansible_become": False}}


def book(*tasks: Any, reserved: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [{"hosts": "all", "vars": {"accelerator_reserved": dict.fromkeys(reserved, "")}, "tasks": list(tasks)}]


@pytest.mark.parametrize(
    ("documents", "found"),
    [
        ({BOOK: book(INCLUDE)}, "passes r_state"),
        ({BOOK: book({"block": [INCLUDE]})}, "passes r_state"),
        ({BOOK: book({"block": [], "always": [INCLUDE]})}, "passes r_state"),
        ({BOOK: [{"ansible.builtin.import_playbook": "x.yml", "vars": {"r_serial": 1}}]}, "passes r_serial"),
        ({BOOK: book(INCLUDE, reserved=("r_state",))}, ""),
        ({BOOK: book(reserved=("r_state",))}, "which the playbook does not pass"),
        ({BOOK: book({**INCLUDE, "vars": {"__r_state": 1}})}, ""),
        (
            {
                BOOK: book({"ansible.builtin.include_tasks": "tasks/one.yml"}),
                Path("playbooks/tasks/one.yml"): [INCLUDE],
            },
            "passes r_state",
        ),
        ({ROLE: [INCLUDE]}, "SET_BY_ROLES"),
    ],
)
def test_passed_values_need_a_reserved_name(documents: dict[Path, Any], found: str) -> None:
    problems = extra_variable_problems(documents, set())
    assert bool(problems) == bool(found) and all(found in each for each in problems)


def test_names_set_by_roles_are_read_and_unused_ones_are_found() -> None:
    assert "machine_restart_consent" in set_by_roles()
    assert not extra_variable_problems({ROLE: [INCLUDE]}, {"r_state"})
    assert "no role passes r_old" in extra_variable_problems({ROLE: [INCLUDE]}, {"r_state", "r_old"})[0]


@pytest.mark.parametrize(
    ("item", "is_found"),
    [
        (LOCAL, True),
        ({**LOCAL, "become": False}, True),
        ({**LOCAL, "vars": {"ansible_become": False}}, True),
        ({**LOCAL, **NO_ROOT}, False),
        ({**NO_ROOT, "block": [LOCAL]}, False),
        ({"block": [], "rescue": [LOCAL]}, True),
        ({"hosts": "localhost", "tasks": []}, True),
        ({"hosts": "localhost", **NO_ROOT, "tasks": [LOCAL]}, False),
        ({"name": "On the node", "become": True}, False),
    ],
)
def test_tasks_on_the_controller_need_keyword_and_variable(item: dict[str, Any], is_found: bool) -> None:
    assert bool(become_problems(ROLE, [item])) is is_found


def test_plays_need_a_strategy() -> None:
    plays = [{"hosts": "all", "strategy": "linear"}, {"ansible.builtin.import_playbook": "site.yml"}]
    assert not strategy_problems(BOOK, plays)
    assert strategy_problems(
        BOOK, [{"name": "Run", "hosts": "all"}, {"name": "Free", "hosts": "all", "strategy": "free"}]
    ) == [f"{BOOK}: the play '{name}' has no `strategy: linear`. Add it." for name in ("Run", "Free")]


@pytest.mark.parametrize(
    ("rescue", "is_found"),
    [
        ([], True),
        ([{"ansible.builtin.fail": {"msg": "It failed."}}], True),
        ([{"ansible.builtin.fail": {"msg": "It failed: {{ ansible_failed_result.msg }}"}}], False),
    ],
)
def test_hidden_tasks_need_a_rescue_that_reports_the_message(rescue: list[dict[str, Any]], is_found: bool) -> None:
    task = {"name": "Write the key", "no_log": True}
    assert no_log_problems(ROLE, [task])
    assert bool(no_log_problems(ROLE, [{"block": [task], "rescue": rescue}])) is is_found
