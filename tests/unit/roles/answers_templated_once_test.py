# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""No answer of a host is templated a second time, with the installed ansible-core and with the lowest supported version.

ansible-core before 2.19 forgets that a value is not a template when it comes from ``hostvars``. ``set_fact`` and
``loop`` keep such a value as a template, and Ansible evaluates it on the controller when the value is used. The same
happens to a variable whose value has tuples in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
#: Variables of other hosts that come from the inventory, or from set_fact of such a variable.
OF_THE_OPERATOR = {
    "__device_classes_host_record",
    "__driver_image_host_record",
    "__driver_image_missing",
    "__driver_image_unbuilt",
    "__dra_driver_cluster_last",
    "__dra_driver_host_record",
    "__offline_host_record",
    "accelerator_api",
    "accelerator_name",
    "accelerator_node_name",
    "accelerator_serial",
    "accelerator_upgrade_serial",
    "ansible_host",
    "dra_controller_deploy_as",
    "dra_controller_webhook_host",
    "dra_driver_namespace",
    "dra_driver_deploy_as",
    "dra_driver_pod_host_network",
    "inventory_hostname",
}
#: An access to a variable of another host, with its name: hostvars[x].NAME, or extract, also with selectattr and map behind it.
ACCESSES = re.compile(
    r"hostvars\b(?:\s*\|\s*default\(\{\}\)\))?"
    r"(?:\[(?:[^\[\]]|\[[^\]]*\])*\]\.(?P<item>\w+)|,\s*'(?P<extract>\w+)'"
    r"|\)(?:\s*\|\s*selectattr\('\w+'(?:, 'defined')?\))*\s*\|\s*map\(attribute='(?P<map>\w+))?"
)
#: Keywords that keep a value which Ansible templates again.
KEEPS = (
    "loop",
    "ansible.builtin.set_fact",
    "ansible.builtin.add_host",
    "ansible.builtin.group_by",
    "ansible.builtin.include_vars",
)


def nodes_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield each mapping of a document."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes_of(each)


def definitions(documents: dict[Path, Any]) -> dict[str, list[str]]:
    """Return the expressions of each variable, in vars and defaults of roles and in vars of plays, blocks, and tasks."""
    found: dict[str, list[str]] = {}
    for path, document in documents.items():
        maps = [document] if path.parent.name in ("vars", "defaults") and isinstance(document, dict) else []
        maps += [each["vars"] for each in nodes_of(document) if isinstance(each.get("vars"), dict)]
        for each in maps:
            for name, value in each.items():
                found.setdefault(str(name), []).append(str(value))
    return found


def has_tuples(expression: str) -> bool:
    """Return whether the value of an expression has tuples in it."""
    return bool(
        re.search(
            r"subelements\(|(?:zip\([^|]*\)|product\([^|]*\)|\.items\(\)|dictsort)\s*(?:\|\s*list\s*)?\}\}", expression
        )
    )


#: A filter that reads accelerator_layouts of each host, and returns names of the inventory and numbers.
ENTRIES = re.compile(r"dra\.accelerators\.layout_entries\(hostvars, groups\b")
#: Filters that return names of the inventory, or read variables of the operator and leave out hosts with foreign facts.
LEADERS = re.compile(r"dra\.accelerators\.(?:cluster_(?:hosts|leaders|union)|distinct_clusters)\(hostvars\b")


def takes_answers(expression: str, known: dict[str, list[str]], seen: frozenset[str] = frozenset()) -> bool:
    """Return whether an expression reads another host's variable that can be an answer, directly or through its variables."""
    for access in ACCESSES.finditer(ENTRIES.sub("", LEADERS.sub("", expression))):
        if (access["item"] or access["extract"] or access["map"]) not in OF_THE_OPERATOR:
            return True
    names = set(re.findall(r"\w+", expression)) & known.keys() - seen
    expressions = [each for name in names for each in known[name]]
    return any(has_tuples(each) or takes_answers(each, known, seen | names) for each in expressions)


def kept_answers(documents: dict[Path, Any]) -> list[str]:
    known = definitions(documents)
    return [
        f"{path}: {task.get('name')}"
        for path, document in documents.items()
        for task in nodes_of(document)
        for key in KEEPS
        if key in task and takes_answers(str(task[key]), known)
    ]


def test_no_answer_of_another_host_is_kept() -> None:
    paths = [*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/*/*.yml")]
    assert not kept_answers(
        {path: yaml.safe_load(path.read_text("utf-8")) for path in paths if path.parent.name != "meta"}
    )


@pytest.mark.parametrize(
    "task",
    [
        {"ansible.builtin.set_fact": {"kept": "{{ hostvars[inventory_hostname].asked.stdout }}"}},
        {"ansible.builtin.set_fact": {"kept": "{{ ansible_play_hosts | map('extract', hostvars, 'asked') | list }}"}},
        {"loop": "{{ users }}", "vars": {"users": "{{ asked.claims | subelements('pods') }}"}},
        {"loop": "{{ pairs }}", "vars": {"pairs": "{{ asked.names | zip(asked.words) | list }}"}},
        {"loop": "{{ ansible_play_hosts | map('extract', hostvars) | map(attribute='asked.stdout') | list }}"},
        {
            "ansible.builtin.set_fact": {"kept": "{{ first }}"},
            "vars": {
                "first": "{{ second }}",
                "second": "{% for host in ansible_play_hosts %}{{ hostvars[host].asked.stdout }}{% endfor %}",
            },
        },
    ],
)
def test_kept_answers_are_found(task: dict[str, Any]) -> None:
    assert kept_answers({Path("playbooks/x.yml"): [{"hosts": "all", "tasks": [task]}]})


# ---- with both versions of Ansible

MODULE = """
import json
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"file": {"type": "path"}}, supports_check_mode=True)
answer = json.load(open(module.params["file"]))
(module.fail_json if answer.get("failed") else module.exit_json)(**answer)
"""


@pytest.fixture(params=["installed", pytest.param("lowest", marks=pytest.mark.prove)])
def programs(request: pytest.FixtureRequest) -> Path:
    """Return the directory of Ansible's programs, of the installed or of the lowest version."""
    if request.param == "installed":
        return Path(sys.executable).parent
    done = subprocess.run([ROOT / "tests/tools/venv", "lowest"], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "bin"


class Machine:
    """Two hosts whose modules answer with a template that creates a file on the controller when Ansible evaluates it."""

    def __init__(self, directory: Path, programs: Path) -> None:
        self.folder, self.programs, self.made = directory, programs, directory / "made"
        self.template = f"{{{{ lookup('ansible.builtin.pipe', 'touch {self.made}') }}}}"
        (directory / "library").mkdir()
        (directory / "library/answer.py").write_text(MODULE, encoding="utf-8")

    def asks(self, register: str, **answer: Any) -> dict[str, Any]:
        """Return a task that registers an answer."""
        path = self.folder / f"{register}.json"
        path.write_text(json.dumps(answer), encoding="utf-8")
        return {"name": register, "answer": {"file": str(path)}, "register": register}

    def play(self, *plays: dict[str, Any], **variables: Any) -> str:
        """Run plays on both hosts. Return the output."""
        common = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        hosts = {"all": {"children": {"accelerator_nodes": {"hosts": dict.fromkeys(("n1", "n2"), common)}}}}
        (self.folder / "hosts.json").write_text(json.dumps(hosts), encoding="utf-8")
        document = [{"hosts": "accelerator_nodes", "gather_facts": False, **each} for each in plays]
        (self.folder / "play.yml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(self.folder / "local")}
        words = ["-i", "hosts.json", "--module-path", "library", "--extra-vars", json.dumps(variables), "play.yml"]
        done = subprocess.run(
            [self.programs / "ansible-playbook", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path: Path, programs: Path) -> Machine:
    return Machine(tmp_path, programs)


def task_of(playbook: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a task of a playbook by its name, and the variables of its play."""
    for document in yaml.safe_load((ROOT / "playbooks" / playbook).read_text("utf-8")):
        for task in nodes_of(document):
            if task.get("name") == name:
                return {key: value for key, value in task.items() if key not in ("when", "tags")}, document.get(
                    "vars", {}
                )
    raise AssertionError(f"{playbook} has no task {name}")


def test_answer_that_is_kept_is_evaluated_by_versions_before_2_19(machine: Machine) -> None:
    """Show that the other tests would detect an evaluated answer: versions before 2.19 evaluate a kept one."""
    kept = {"ansible.builtin.set_fact": {"kept": "{{ 'x' ~ hostvars[inventory_hostname].asked.text }}"}}
    printed = machine.play(
        {
            "tasks": [
                machine.asks("asked", text=machine.template),
                kept,
                {"ansible.builtin.debug": {"msg": "{{ kept }}"}},
            ]
        }
    )
    version = subprocess.run([machine.programs / "ansible", "--version"], capture_output=True, text=True, check=True)
    is_old = "[core 2.18" in version.stdout
    assert machine.made.exists() is is_old, printed


def test_site_evaluates_no_answer(machine: Machine) -> None:
    evil = machine.template
    node = {"slices": [{"name": evil}], "published": {"devices": 1, "products": [evil], "partitions": {evil: 1}}}
    requested = [
        machine.asks("accelerator_cluster", nodes=dict.fromkeys(("n1", "n2"), node)),
        machine.asks("__nvidia_mig_applied", steps=[{"description": evil}], devices=[{"mode": evil}], changed=True),
        machine.asks("__dra_driver_started", device_count=2, changed=True),
    ]
    line, _variables = task_of("tasks/site_summary.yml", "Format the summary line of the node")
    shown, _variables = task_of("tasks/site_summary.yml", "Show the summary")
    _task, variables = task_of("site.yml", "Fail if the cluster did not answer")
    so_far, more = task_of("site.yml", "Report the progress")
    printed = machine.play(
        {"vars": variables, "tasks": [*requested, line, shown]},
        {"vars": more, "tasks": [so_far]},
        accelerator_name="{{ inventory_hostname }}",
    )
    assert printed.count("failed=0") == 2 and "lookup('ansible.builtin.pipe'" in printed, printed
    assert not machine.made.exists(), printed


def test_upgrade_evaluates_no_answer(machine: Machine) -> None:
    evil = machine.template
    holder = {"namespace": evil, "name": evil, "claims": [evil], "owner": evil}
    requested = [
        machine.asks("__nvidia_driver_plan", steps=[evil]),
        machine.asks("accelerator_eviction_plan", results=[{"pods": [holder], "accelerator_role": "nvidia_driver"}]),
    ]
    kept, variables = task_of("upgrade.yml", "Record the planned driver change")
    shown, _variables = task_of("upgrade.yml", "Show the plan")
    printed = machine.play(
        {"vars": variables, "tasks": [*requested, kept, shown]}, {"tasks": [{**shown, "run_once": False}]}
    )
    assert printed.count("failed=0") == 2 and "lookup('ansible.builtin.pipe'" in printed, printed
    assert not machine.made.exists(), printed


def test_report_evaluates_no_answer(machine: Machine, tmp_path: Path) -> None:
    evil = machine.template
    requested = machine.asks(
        "accelerator_node_answer", ansible_facts={"accelerator_report": {"devices": [evil], "words": {evil: evil}}}
    )
    _task, variables = task_of("report.yml", "Read cluster objects and merge them with the answers of the nodes")
    written = {
        "ansible.builtin.copy": {"content": "{{ accelerator_answers | to_json }}", "dest": str(tmp_path / "out")}
    }
    shown = {"ansible.builtin.debug": {"msg": "{{ accelerator_answers }}"}}
    name = {"ansible.builtin.set_fact": {"accelerator_name": "{{ inventory_hostname }}"}}
    printed = machine.play({"tasks": [name, requested]}, {"hosts": "n1", "vars": variables, "tasks": [written, shown]})
    assert "failed=0" in printed and "ansible.builtin.pipe" in (tmp_path / "out").read_text("utf-8"), printed
    assert not machine.made.exists(), printed


def test_remove_evaluates_no_answer(machine: Machine) -> None:
    evil = machine.template
    node = {
        "driver": {"configuration": []},
        "units": {"dra-accelerators-driver.service": {"managed": True}},
        "devices": {evil: {}},
    }
    pod = {"namespace": evil, "name": evil, "uid": evil}
    claim = {"namespace": evil, "name": evil, "nodes": ["n1", "n2"], "pods": [evil], "consumers": [pod]}
    requested = [
        machine.asks("accelerator_node", **node),
        machine.asks("accelerator_cluster", nodes={name: {"labels": {}, "annotations": {}} for name in ("n1", "n2")}),
        machine.asks("accelerator_claims", claims=[claim]),
    ]
    refused, variables = task_of("remove.yml", "Reject a node whose devices are in use by pods")
    deleted, _variables = task_of("remove.yml", "Delete the pods")
    # The action for each pod is shown instead.
    looped = {
        "ansible.builtin.debug": {"msg": deleted["kubernetes.core.k8s"]},
        **{key: deleted[key] for key in ("loop", "loop_control")},
    }
    printed = machine.play(
        {"vars": variables, "tasks": [*requested, looped, refused]}, accelerator_name="{{ inventory_hostname }}"
    )
    assert (
        printed.count("failed=1") == 2 and "nothing was removed there" in printed and "ansible.builtin.pipe" in printed
    )
    assert not machine.made.exists(), printed


def test_preflight_evaluates_no_part_of_an_answer(machine: Machine) -> None:
    """Neither keys nor values of answers are evaluated, for the node and for the cluster."""
    role, text = ROOT / "roles/preflight", machine.template
    variables = yaml.safe_load((role / "vars/main.yml").read_text("utf-8"))
    node = {"labels": {text: text, "dra": "label"}, "slices": [{"driver": "gpu.nvidia.com", "name": text}]}
    requested = [
        machine.asks("__preflight_node_query", devices={text: 1, "ascend": 1}),
        machine.asks("__preflight_cluster_query", problem=text, nodes={"n": node}, own=[{text: text}]),
    ]
    names = (
        "__preflight_host_answer",
        "__preflight_cluster_answer",
        "__preflight_cluster_other",
        "__preflight_ignored_vendors",
    )
    given = {**{name: variables[name] for name in names}, "__preflight_before_binding": False}
    facts = [
        task
        for task in yaml.safe_load((role / "tasks/main.yml").read_text("utf-8"))
        if task["name"].startswith("Record the")
    ]
    words = [
        "Vendors: {{ __preflight_ignored_vendors | join(', ') }}",
        "{{ __preflight_node.labels.dra }} of {{ __preflight_slices | length }}",
    ]
    kept = {"ansible.builtin.set_fact": {"kept": words, "problem": "{{ __preflight_cluster.problem }}"}}
    shown = {"ansible.builtin.debug": {"msg": "{{ [kept, problem, __preflight_node, __preflight_cluster] }}"}}
    given |= {"preflight_node_info": {}, "preflight_cluster_info": {}, "preflight_vendors": ["nvidia"]}
    given |= {"preflight_node_name": "n", "__preflight_drivers": ["gpu.nvidia.com"], "__preflight_cluster_id": "c"}
    printed = machine.play({"vars": given, "tasks": [*requested, *facts, kept, shown]})
    assert printed.count("failed=0") == 2 and "Vendors: ascend" in printed and "label of 1" in printed, printed
    assert len(facts) == 2 and not machine.made.exists(), printed


@pytest.mark.parametrize("playbook", ["tasks/repartition_operation.yml", "drained"])
def test_rescue_evaluates_no_message_of_a_failure(machine: Machine, playbook: str) -> None:
    """The message of a failed module is kept by set_fact and printed, but not evaluated."""
    path = ROOT / ("roles/ascend_driver/tasks/drained.yml" if playbook == "drained" else f"playbooks/{playbook}")
    tasks = list(nodes_of(yaml.safe_load(path.read_text("utf-8"))))
    names_of_rescue = ("Record the failed step and its error", "Record the failure")
    kept = next(task for task in tasks if task.get("name") in names_of_rescue)
    names = list(kept["ansible.builtin.set_fact"])
    shown = {"ansible.builtin.debug": {"msg": [f"{{{{ {name} }}}}" for name in names]}}
    failing = machine.asks(
        "asked", failed=True, msg=f"bad {machine.template}", hint=machine.template, error_code="time-is-up"
    )
    printed = machine.play({"tasks": [{"block": [failing], "rescue": [kept, shown]}]})
    assert printed.count("rescued=1") == 2 and printed.count("failed=0") == 2, printed
    assert not machine.made.exists(), printed
