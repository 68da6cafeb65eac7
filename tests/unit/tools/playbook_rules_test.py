# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The check ``playbook_rules`` finds values that extra variables replace, tasks that become root on the controller, and plays without a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from condition_types import condition_problems
from playbook_rules import (
    become_problems,
    extra_variable_problems,
    no_log_problems,
    retry_problems,
    run_once_problems,
    set_by_roles,
    strategy_problems,
)

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


PATCH: dict[str, Any] = {"name": "Patch", "kubernetes.core.k8s": {"state": "patched"}}
DEFAULTS = {"module_defaults": {"kubernetes.core.k8s": {"kubeconfig": "k"}}}
QUERY: dict[str, Any] = {"name": "Ask", "dra.accelerators.cluster_info": {"kubeconfig": "k"}}


@pytest.mark.parametrize(
    ("item", "is_found"),
    [
        ({**QUERY, "run_once": True}, True),
        ({"run_once": True, "block": [QUERY]}, True),
        ({"run_once": True, **DEFAULTS, "block": [PATCH]}, True),
        ({**DEFAULTS, "block": [{"block": [{**PATCH, "run_once": True}]}]}, True),
        ({**DEFAULTS, "tasks": [PATCH, {"name": "Choose", "run_once": True}]}, False),
        ({**DEFAULTS, "block": [{"name": "List", "run_once": True, "kubernetes.core.k8s_info": {}}]}, False),
        (
            {
                "module_defaults": {"group/kubernetes.core.k8s": {"kubeconfig": "k"}},
                "tasks": [{**PATCH, "run_once": True}],
            },
            True,
        ),
        (QUERY, False),
        ({"name": "Unpack", "run_once": True, "dra.accelerators.bundle": {"archive": "a"}}, False),
    ],
)
def test_requests_to_a_cluster_do_not_run_once(item: dict[str, Any], is_found: bool) -> None:
    assert bool(run_once_problems(ROLE, [item])) is is_found
    assert not run_once_problems(Path("playbooks/report.yml"), [item])


FINAL = {"register": "a", "until": "a is dra.accelerators.final_result"}


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({}, "is not repeated"),
        ({"register": "a", "until": "a is not failed", "retries": 12, "delay": 5}, "is not repeated"),
        ({**FINAL, "register": "b", "retries": 12, "delay": 5}, "is not repeated"),
        (FINAL, "needs `retries: 12`"),
        ({**FINAL, "retries": 3, "delay": 5}, "needs `retries: 12`"),
        ({**FINAL, "retries": 12, "delay": 5}, ""),
        ({**FINAL, "until": f"{FINAL['until']} and is_gone", "retries": 60, "delay": 2}, ""),
        ({**FINAL, "until": f"{FINAL['until']} and is_gone", "retries": 60}, "no delay"),
        ({"register": "a", "until": "is_denied", "failed_when": "not is_denied", "retries": 9, "delay": 2}, ""),
    ],
)
def test_kubernetes_core_tasks_are_repeated(keywords: dict[str, Any], problem: str) -> None:
    problems = retry_problems(BOOK, book({"block": [], "always": [{**PATCH, **keywords}]}))
    assert len(problems) == bool(problem) and all(problem in each for each in problems)


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


@pytest.mark.parametrize(
    ("condition", "accepted"),
    [
        ("dra_driver_release", False),
        ("__dra_driver_release and __dra_driver_environment", False),
        ("dra_driver_release | length", False),
        ("dra_driver_release | length > 0 and not dra_driver_release", True),
        ("'a' in dra_driver_release or dra_driver_prune | bool", True),
        ("registered is changed and unknown", True),
        ("__here", False),
        (["true", "dra_driver_layout"], False),
    ],
)
def test_condition_with_a_string_or_list_is_a_problem(condition: Any, accepted: bool) -> None:
    task = {"name": "Do it", "when": condition, "vars": {"__here": "{{ dra_driver_release ~ 'x' }}"}}
    assert bool(condition_problems(Path("roles/dra_driver/tasks/pod.yml"), [task])) is not accepted
