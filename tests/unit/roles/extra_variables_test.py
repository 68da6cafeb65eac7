# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Extra variables (-e) do not replace values that the playbooks pass to roles and to imported playbooks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.lookup import reserved_variables

from tests.unit.ansible_process import PYTHON, run_ansible

ROOT = Path(__file__).resolve().parents[3]
HOSTS = {
    "accelerator_nodes": {"hosts": {"a": {}, "b": {}, "c": {}}},
    "accelerator_controllers": {"hosts": {"control": {}}},
}
#: Tasks of check_inventory.yml, which precedes each other play.
CHECKS = {
    "TASK [Reject extra variables that only the playbooks set]",
    "TASK [Reject an inventory or a limit without hosts for the playbook]",
    "TASK [Reject facts with names of variables]",
    "TASK [Reject hosts with the same node name]",
    "TASK [Reject strings where a list or a mapping is expected]",
    "TASK [Reject variables with unknown names]",
}
LAYOUT = [{"match": {}, "mode": "whole"}]
OTHER = [{"match": {}, "mode": "dynamic"}]


def run(directory: Path, playbook: Path, extra: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook on local hosts with extra variables from a file."""
    hosts = {
        group: {"hosts": {name: {"ansible_connection": "local"} for name in each["hosts"]}}
        for group, each in HOSTS.items()
    }
    (directory / "hosts.yml").write_text(yaml.safe_dump(hosts), encoding="utf-8")
    (directory / "fleet.yml").write_text(yaml.safe_dump(extra), encoding="utf-8")
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(directory / "local")}
    environment |= {"ANSIBLE_REMOTE_TEMP": str(directory / "remote"), "ANSIBLE_PYTHON_INTERPRETER": str(PYTHON)}
    program = Path(sys.executable).with_name("ansible-playbook")
    return run_ansible(
        [program, "-i", directory / "hosts.yml", playbook, "-e", f"@{directory / 'fleet.yml'}", *words],
        env=environment,
    )


def passed_variables(value: Any) -> dict[str, Any]:
    """Return the variables that tasks of a playbook pass to roles and to other playbooks."""
    found: dict[str, Any] = {}
    if isinstance(value, list):
        for each in value:
            found |= passed_variables(each)
    elif isinstance(value, dict):
        if {"ansible.builtin.include_role", "ansible.builtin.import_playbook"} & value.keys():
            found |= value.get("vars", {})
        for each in value.values():
            found |= passed_variables(each)
    return found


def passed(*, internal: bool) -> dict[str, list[str]]:
    """Return by playbook the internal variables that it passes, or the others."""
    found = {}
    for path in sorted((ROOT / "playbooks").glob("*.yml")):
        names = sorted(passed_variables(yaml.safe_load(path.read_text("utf-8"))))
        found[path.name] = [name for name in names if reserved_variables.is_internal(name) is internal]
    return {playbook: names for playbook, names in found.items() if names}


def test_internal_variables_as_extra_variables_fail_first(tmp_path: Path) -> None:
    """The first task of each playbook refuses internal variables as extra variables."""
    for playbook, names in passed(internal=True).items():
        done = run(tmp_path, ROOT / "playbooks" / playbook, {name: ["other"] for name in names})
        assert done.returncode != 0 and done.stdout.count("TASK [") == 1, done.stdout + done.stderr
        for name in names:
            assert f"{name} is an extra variable (-e), but this playbook sets it." in done.stdout, done.stdout


@pytest.mark.parametrize(("playbook", "names"), list(passed(internal=False).items()))
def test_playbook_with_extra_variables_that_it_passes_fails_first(
    playbook: str, names: list[str], tmp_path: Path
) -> None:
    done = run(tmp_path, ROOT / "playbooks" / playbook, {name: ["other"] for name in names})
    assert done.returncode != 0, done.stdout + done.stderr
    for name in names:
        assert f"{name} is an extra variable (-e), but this playbook sets it." in done.stdout, done.stdout
    ran = [line for line in done.stdout.splitlines() if line.startswith("TASK ")]
    assert {line.split(" *")[0] for line in ran} - CHECKS == {"TASK [Reject extra variables that this playbook sets]"}


def set_variables(value: Any) -> set[str]:
    """Return the variables that plays, blocks, and tasks set: with ``vars``, ``set_fact``, ``register``, and as loop variables."""
    if isinstance(value, list):
        return set().union(*map(set_variables, value))
    if not isinstance(value, dict):
        return set()
    found = set(value.get("ansible.builtin.set_fact", ()))
    found |= set(value["vars"]) if isinstance(value.get("vars"), dict) else set()
    found |= {value["register"]} if isinstance(value.get("register"), str) else set()
    found |= {value["loop_var"]} if isinstance(value.get("loop_var"), str) else set()
    return found.union(*map(set_variables, value.values()))


def set_by(pattern: str) -> set[str]:
    """Return the variables that files set, without internal ones."""
    found = (set_variables(yaml.safe_load(path.read_text("utf-8"))) for path in ROOT.glob(pattern))
    return {name for names in found for name in names if not name.startswith("__")}


def test_variables_that_the_playbooks_set_are_reserved() -> None:
    """Variables that the playbooks set are reserved, except for options of roles, which each playbook reserves itself."""
    found = set_by("playbooks/**/*.yml")
    assert {name for name in found if name.startswith("accelerator_")} == reserved_variables.SET_BY_PLAYBOOKS
    assert reserved_variables.INSTEAD.keys() <= reserved_variables.SET_BY_PLAYBOOKS | {"ansible_become"}
    reserved: set[str] = set()
    for path in (ROOT / "playbooks").glob("*.yml"):
        for play in yaml.safe_load(path.read_text("utf-8")):
            reserved |= set((play.get("vars") or {}).get("accelerator_reserved", {}))
    others = {name for name in found if not name.startswith("accelerator_")} - {"ansible_become"}
    assert others == reserved - reserved_variables.SET_BY_PLAYBOOKS, "options of roles that the playbooks pass"


def test_become_as_an_extra_variable_is_refused() -> None:
    """ansible_become as an extra variable is refused, because it would also apply to tasks on the Ansible controller."""
    (refused,) = reserved_variables.refusals({"ansible_become": True}, {})
    assert refused.endswith("Remove it and set it in the inventory, or accelerator_become.")


def test_variables_that_the_roles_set_are_reserved() -> None:
    """Variables that the roles set are reserved, except for options: a role pins its own, and offline sets those with the host's platform."""
    pinned = {
        *("dra_driver_context", "dra_driver_kubeconfig", "dra_driver_node_name"),
        *("dra_controller_drivers", "dra_controller_driver_namespace"),
    }
    options = {"offline_has", "offline_platform"}
    found = set_by("roles/*/tasks/**/*.yml") | set_by("roles/*/handlers/*.yml")
    assert found - {"ansible_become"} - pinned - options == (
        reserved_variables.SET_BY_ROLES | reserved_variables.FACTS_OF_ROLES
    )


def test_check_for_extra_variables_reads_no_variable_that_they_could_replace() -> None:
    """The condition itself contains the query, and its variables are those of the play, which are reserved."""
    checked = 0
    for path in (ROOT / "playbooks").rglob("*.yml"):
        for line in path.read_text("utf-8").splitlines():
            if "dra.accelerators.reserved_variables" in line and "that:" in line:
                assert re.fullmatch(
                    r" +that: query\('dra.accelerators.reserved_variables', (?:\{\}|accelerator_reserved)\) \| length == 0",
                    line,
                ), path
                checked += 1
    assert checked >= 8


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("accelerator_name", "Remove it and set accelerator_node_name."),
        ("accelerator_node", "Remove it."),
        ("accelerator_reserved", "Remove it."),
        ("accelerator_migration", "Remove it and set device_plugin_migration_direction."),
        ("accelerator_timeout", "Remove it."),
        ("offline_content", "Remove it."),
        ("dra_driver_layout", "Remove it and set accelerator_layouts."),
        ("machine_restart_consent", "Remove it."),
        ("__dra_driver_node", "Remove it."),
        ("__of_others", ""),
        ("accelerator_continue_on_failure", ""),
    ],
)
def test_reserved_variables_name_the_variable_to_set(name: str, refused: str, tmp_path: Path) -> None:
    plays = yaml.safe_load((ROOT / "playbooks/site.yml").read_text("utf-8"))
    play = next(each for each in plays if "accelerator_reserved" in each.get("vars", {}))
    play = {**play, "tasks": play["tasks"][:1]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = run(tmp_path, tmp_path / "play.yml", {name: {}})
    assert (done.returncode != 0) == bool(refused), done.stdout + done.stderr
    assert refused in done.stdout and (name in done.stdout) == bool(refused)


def test_fleet_file_of_the_examples_is_not_refused(tmp_path: Path) -> None:
    keys = [
        line.lstrip("# ").partition(":")[0]
        for line in (ROOT / "examples/fleet.yml").read_text("utf-8").splitlines()
        if line.lstrip("# ").partition(":")[0].isidentifier() and ":" in line
    ]
    names = {key for key in keys if "_" in key}
    reserved = set(reserved_variables.SET_BY_PLAYBOOKS)
    for path in (ROOT / "playbooks").glob("*.yml"):
        for play in yaml.safe_load(path.read_text("utf-8")):
            reserved |= set((play.get("vars") or {}).get("accelerator_reserved", {}))
    assert len(names) > 30 and not names & reserved


@pytest.mark.parametrize("playbook", ["driver_form.yml", "device_plugin_migration.yml"])
def test_serial_of_an_importing_playbook_wins_over_that_of_the_fleet_file(playbook: str, tmp_path: Path) -> None:
    """The default is one node at a time, whatever the fleet file has for the site playbook."""
    plays = yaml.safe_load((ROOT / "playbooks" / playbook).read_text("utf-8"))
    (imported,) = (play for play in plays if play.get("ansible.builtin.import_playbook") == "site.yml")
    imported.pop("when", None)
    site = yaml.safe_load((ROOT / "playbooks/site.yml").read_text("utf-8"))
    (prepare,) = (play for play in site if "serial" in play)
    show = {"ansible.builtin.debug": {"msg": "batch={{ ansible_play_batch | join(',') }}"}, "run_once": True}
    keywords = {key: prepare[key] for key in ("hosts", "serial", "gather_facts")}
    (tmp_path / "site.yml").write_text(yaml.safe_dump([{**keywords, "tasks": [show]}]), encoding="utf-8")
    (tmp_path / "play.yml").write_text(yaml.safe_dump([imported]), encoding="utf-8")
    done = run(tmp_path, tmp_path / "play.yml", {"accelerator_serial": "100%"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.partition("batch=")[2].strip('" ') for line in done.stdout.splitlines() if '"msg": "batch=' in line]
    assert found == ["a", "b", "c"]


@pytest.mark.parametrize(("role", "modules"), [("nvidia_mig", "nvidia_mig"), ("ascend_vnpu", "ascend_vnpu")])
def test_layout_that_a_playbook_passes_wins_over_that_of_the_fleet_file(
    role: str, modules: str, tmp_path: Path
) -> None:
    """The role writes the playbook's layout of the node for the next boot, not the extra variable."""
    site = yaml.safe_load((ROOT / "playbooks/site.yml").read_text("utf-8"))
    (include,) = (
        task
        for play in site
        for task in play.get("tasks", ())
        if task.get("ansible.builtin.include_role", {}).get("name") == f"dra.accelerators.{role}"
    )
    given = {name: value for name, value in include["vars"].items() if name.endswith("_layout")}
    files = yaml.safe_load((ROOT / "roles" / role / "vars/main.yml").read_text("utf-8"))
    (layout,) = (
        each["content"]
        for each in files.get(f"__{role}_all_files", files[f"__{role}_files"])
        if "layout" in each["path"] or "_file" in each["path"]
    )
    tasks_from = tmp_path / "show.yml"
    tasks_from.write_text(yaml.safe_dump([{"ansible.builtin.debug": {"msg": layout}}]), encoding="utf-8")
    play = {
        "hosts": "a",
        "gather_facts": False,
        "vars": {"accelerator_node_layout": LAYOUT},
        "tasks": [
            {
                "ansible.builtin.include_tasks": str(tasks_from),
                "vars": {**{name: value for name, value in files.items() if name != f"__{role}_files"}, **given},
            }
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = run(tmp_path, tmp_path / "play.yml", {f"{role}_layout": OTHER})
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if '"msg": ' in line)
    assert json.loads(json.loads("{" + line.strip().rstrip(",") + "}")["msg"]) == LAYOUT, modules


def test_other_values_of_playbooks_win_over_those_of_the_fleet_file(tmp_path: Path) -> None:
    """Values for the drain and for other managers that the roles get, with opposite extra variables."""
    drain = {"consent": False, "unmanaged": False, "grace_period": "", "timeout": 77}
    used = {
        "nvidia_driver": ("__nvidia_driver_drain_used", {"__nvidia_driver_drain": drain}, drain),
        "ascend_driver": ("__ascend_driver_drain_used", {"__ascend_driver_drain": {"consent": False}}, None),
        "preflight": ("__preflight_managers_allowed", {"__preflight_allow_other_managers": False}, False),
    }
    extra: dict[str, Any] = {"preflight_allow_other_managers": True}
    for role in ("nvidia_driver", "ascend_driver"):
        extra |= {f"{role}_drain": True, f"{role}_drain_unmanaged": True, f"{role}_drain_grace_period": 1}
        extra |= {f"{role}_drain_timeout": 1}
    (tmp_path / "show.yml").write_text(
        yaml.safe_dump([{"ansible.builtin.debug": {"msg": "shown={{ shown | to_json }}"}}]), encoding="utf-8"
    )
    tasks = []
    for role, (name, given, _expected) in used.items():
        value = yaml.safe_load((ROOT / "roles" / role / "vars/main.yml").read_text("utf-8"))[name]
        tasks.append({"ansible.builtin.include_tasks": str(tmp_path / "show.yml"), "vars": {**given, "shown": value}})
    play = {"hosts": "a", "gather_facts": False, "tasks": tasks}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = run(tmp_path, tmp_path / "play.yml", extra)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [
        json.loads(json.loads("{" + line.strip() + "}")["msg"].partition("=")[2])
        for line in done.stdout.splitlines()
        if '"msg": "shown=' in line
    ]
    assert shown == [drain, {"consent": False, "unmanaged": True, "grace_period": 1, "timeout": 1}, False]
