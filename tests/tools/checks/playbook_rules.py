# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Rules for plays and tasks of playbooks and roles that ansible-lint does not have.

A value that a playbook passes to a role or to another playbook has a name that begins with two underscores, or the playbook refuses an extra
variable of that name: extra variables have precedence over passed values. Values that roles pass to each other are in ``SET_BY_ROLES``.

A task or a play on the Ansible controller has ``become: false`` and the variable ``ansible_become: false``. An inventory with ``ansible_become: true``
for all hosts has precedence over the keyword.

A task with ``no_log`` is in a block with a rescue, which reports the message of the failed module and nothing else of its result.

A task that sends requests to a cluster has no ``run_once``, which uses the cluster of the first host. One host of each cluster runs it instead (filter
``cluster_leaders``).

A task of kubernetes.core is repeated until its result is final (test plugin ``final_result``): one HTTP status 429 or 503 must not end a run.

A condition is a boolean (``condition_types.py``).

A play has ``strategy: linear``. With the strategy ``free`` of ansible.cfg, ``run_once`` is ignored and hosts of a batch do not wait for each other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from condition_types import condition_problems
from files import ROOT, close

PLUGIN = ROOT / "plugins/lookup/reserved_variables.py"
INCLUDES = ("ansible.builtin.include_role", "ansible.builtin.import_role", "ansible.builtin.import_playbook")
BLOCKS = ("tasks", "pre_tasks", "post_tasks", "handlers", "block", "rescue", "always")

#: Modules that send requests to the cluster of their options ``kubeconfig`` and ``context``.
TO_CLUSTER = ("kubernetes.core.", "dra.accelerators.")
#: The retries of a task of kubernetes.core that does not wait for a state: for 60 s, as modules of the collection retry
#: requests.
RETRIES, DELAY = 12, 5
#: Playbooks that refuse hosts of several clusters.
ONE_CLUSTER = ("report.yml", "plan.yml")

Json = dict[str, Any]


def tasks_of(items: Any) -> Iterator[Json]:
    """Yield plays, blocks, and tasks of a document, outer ones first."""
    for item in items or ():
        yield item
        for key in BLOCKS:
            yield from tasks_of(item.get(key))


def included_file(task: Json) -> str:
    """Return the file of tasks that a task includes or imports, or an empty string."""
    return str(task.get("ansible.builtin.include_tasks") or task.get("ansible.builtin.import_tasks") or "")


def set_by_roles(plugin: Path = PLUGIN) -> set[str]:
    """Return the names in ``SET_BY_ROLES`` of the lookup plugin."""
    for node in ast.parse(plugin.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SET_BY_ROLES":
            return {str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return set()


def passed_variables(document: Any) -> dict[str, str]:
    """Return the variables that a document passes to roles and playbooks, each with the name of its task."""
    return {
        name: str(task.get("name"))
        for task in tasks_of(document)
        if any(key in task for key in INCLUDES)
        for name in task.get("vars") or ()
        if not name.startswith(("__", "ansible_"))
    }


def reserved_variables(document: Any) -> set[str]:
    """Return the names that the plays of a playbook refuse as extra variables."""
    return {name for play in document for name in (play.get("vars") or {}).get("accelerator_reserved", ())}


def extra_variable_problems(documents: Mapping[Path, Any], by_roles: set[str]) -> list[str]:
    """Return the passed values that an extra variable could replace, and the refused names that nothing passes."""
    problems: list[str] = []
    roles_pass: dict[str, str] = {}
    for path, document in documents.items():
        if path.parts[0] == "roles":
            roles_pass |= {name: f"{path}: {task!r}" for name, task in passed_variables(document).items()}
        if path.parent.name != "playbooks":
            continue
        passed = passed_variables(document)
        for task in tasks_of(document):
            passed |= passed_variables(documents.get(path.parent / included_file(task), ()))
        reserved = reserved_variables(document)
        problems += [
            f"{path}: {passed[name]!r} passes {name}. Begin the name with two underscores, or add it to accelerator_reserved."
            for name in sorted(passed.keys() - reserved)
        ]
        problems += [
            f"{path}: accelerator_reserved has {name}, which the playbook does not pass. Remove it."
            for name in sorted(reserved - passed.keys())
        ]
    problems += [
        f"{roles_pass[name]} passes {name}. Begin the name with two underscores, or add it to SET_BY_ROLES of {PLUGIN.name}."
        for name in sorted(roles_pass.keys() - by_roles)
    ]
    return problems + [
        f"{PLUGIN.name}: no role passes {name}. Remove it." for name in sorted(by_roles - roles_pass.keys())
    ]


def become_problems(path: Path, items: Any, is_unprivileged: bool = False) -> list[str]:
    """Return the plays and tasks on the Ansible controller that an inventory can make run as root."""
    problems = []
    for item in items or ():
        variables = item.get("vars") or {}
        unprivileged = item.get("become", True) is False and variables.get("ansible_become", True) is False
        is_local = item.get("delegate_to") == "localhost" or item.get("hosts") == "localhost"
        if is_local and not (unprivileged or is_unprivileged):
            problems.append(
                f"{path}: {str(item.get('name'))!r} runs on localhost. Add `become: false` and, in its vars, `ansible_become: false`."
            )
        for key in BLOCKS:
            problems += become_problems(path, item.get(key), unprivileged or is_unprivileged)
    return problems


def gets_kubeconfig(module: str, defaults: frozenset[str]) -> bool:
    """Return whether the defaults of modules and groups with a kubeconfig are for a module."""
    collection = module.rpartition(".")[0]
    return module in defaults or any(each.startswith(f"group/{collection}.") for each in defaults)


def run_once_problems(
    path: Path, items: Any, runs_once: bool = False, defaults: frozenset[str] = frozenset()
) -> list[str]:
    """Return the tasks that send the requests of all hosts to the cluster of the first host.

    ``defaults`` are the modules and groups to which an outer play or block gives a kubeconfig.
    """
    problems = []
    for item in items or ():
        once = runs_once or item.get("run_once") is True
        given = defaults | {
            name for name, options in (item.get("module_defaults") or {}).items() if "kubeconfig" in (options or {})
        }
        requests = [
            key
            for key, options in item.items()
            if key.startswith(TO_CLUSTER) and ("kubeconfig" in (options or {}) or gets_kubeconfig(key, given))
        ]
        if path.name not in ONE_CLUSTER and once and requests:
            problems.append(
                f"{path}: {item.get('name')!r} has run_once and sends requests to a cluster. Run it on one host of each cluster instead."
            )
        for key in BLOCKS:
            problems += run_once_problems(path, item.get(key), once, given)
    return problems


def retry_problems(path: Path, document: Any) -> list[str]:
    """Return the tasks of kubernetes.core that one HTTP status 429 or 503 ends, and those with different numbers of retries."""
    problems = []
    for task in tasks_of(document):
        if not any(key.startswith("kubernetes.core.") for key in task):
            continue
        final = f"{task.get('register')} is dra.accelerators.final_result"
        until = str(task.get("until", "")).strip()
        if not until.startswith(final) and (not until or task.get("failed_when") != f"not {until}"):
            problems.append(f"{path}: {task.get('name')!r} is not repeated. Add `until: {final}` and a register.")
        elif until == final and (task.get("retries"), task.get("delay")) != (RETRIES, DELAY):
            problems.append(f"{path}: {task.get('name')!r} needs `retries: {RETRIES}` and `delay: {DELAY}`.")
        elif not {"retries", "delay"} <= task.keys():
            problems.append(f"{path}: {task.get('name')!r} has no retries or no delay.")
    return problems


def strategy_problems(path: Path, document: Any) -> list[str]:
    """Return the plays of a playbook that run with the strategy of ansible.cfg."""
    return [
        f"{path}: the play {play.get('name')!r} has no `strategy: linear`. Add it."
        for play in document
        if "hosts" in play and play.get("strategy") != "linear"
    ]


def no_log_problems(path: Path, items: Any, is_rescued: bool = False) -> list[str]:
    """Return the tasks whose failure shows no reason."""
    problems = []
    for item in items or ():
        if item.get("no_log") and not is_rescued:
            problems.append(
                f"{path}: {item.get('name')!r} has no_log, which hides why it failed. Put it into a block whose rescue fails with ansible_failed_result.msg."
            )
        for key in BLOCKS:
            rescues = key == "block" and "ansible_failed_result.msg" in str(item.get("rescue"))
            problems += no_log_problems(path, item.get(key), rescues)
    return problems


def main() -> int:
    """Check each playbook and each file of tasks, and return the exit status."""
    paths = sorted(
        [*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/tasks/**/*.yml"), *ROOT.glob("roles/*/handlers/*.yml")]
    )
    documents = {path.relative_to(ROOT): yaml.safe_load(path.read_text(encoding="utf-8")) or [] for path in paths}
    problems = extra_variable_problems(documents, set_by_roles())
    for path, document in documents.items():
        problems += (
            become_problems(path, document)
            + strategy_problems(path, document)
            + no_log_problems(path, document)
            + run_once_problems(path, document)
            + retry_problems(path, document)
            + condition_problems(path, list(tasks_of(document)))
        )
    return close(problems, len(documents), "files")


if __name__ == "__main__":
    sys.exit(main())
