# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""No answer of a host is templated a second time, with the ansible-core that is installed and with the lowest that the collection promises.

ansible-core before 2.19 forgets that a value is not a template when it comes from ``hostvars``. ``set_fact`` and ``loop`` keep such a value as
a template, and Ansible evaluates it on the controller when the value is used. The same happens to a variable whose value has tuples in it.
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
    "__device_classes_entered",
    "__dra_driver_cluster_last",
    "__dra_driver_entered",
    "__preflight_ahead_node",
    "accelerator_api",
    "accelerator_name",
    "accelerator_node_name",
    "accelerator_serial",
    "accelerator_upgrade_serial",
    "ansible_host",
    "dra_controller_form",
    "dra_controller_webhook_host",
    "dra_driver_form",
    "dra_driver_pod_host_network",
}
#: An access to a variable of another host, with its name: hostvars[x].NAME, or extract, also with selectattr and map behind it.
ACCESSES = re.compile(
    r"hostvars\b(?:\s*\|\s*default\(\{\}\)\))?"
    r"(?:\[(?:[^\[\]]|\[[^\]]*\])*\]\.(?P<item>\w+)|,\s*'(?P<extract>\w+)'"
    r"|\)(?:\s*\|\s*selectattr\('\w+'(?:, 'defined')?\))*\s*\|\s*map\(attribute='(?P<map>\w+))?"
)
#: What keeps a value that Ansible templates again.
KEEPS = (
    "loop",
    "ansible.builtin.set_fact",
    "ansible.builtin.add_host",
    "ansible.builtin.group_by",
    "ansible.builtin.include_vars",
)


def nodes_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping of a document."""
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
#: Filters that read variables of the operator, and leave out hosts with foreign facts; one returns names of the inventory.
LEADERS = re.compile(r"dra\.accelerators\.cluster_(?:leaders|union)\(hostvars\b")


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
    """The directory of Ansible's programs, of the installed or of the lowest version."""
    if request.param == "installed":
        return Path(sys.executable).parent
    done = subprocess.run([ROOT / "tests/tools/venv", "lowest"], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "bin"


class Machine:
    """Two hosts whose modules answer with a template that makes a file on the controller when Ansible evaluates it."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs, self.made = folder, programs, folder / "made"
        self.template = f"{{{{ lookup('ansible.builtin.pipe', 'touch {self.made}') }}}}"
        (folder / "library").mkdir()
        (folder / "library/answer.py").write_text(MODULE, encoding="utf-8")

    def asks(self, register: str, **answer: Any) -> dict[str, Any]:
        """Return a task that registers an answer."""
        path = self.folder / f"{register}.json"
        path.write_text(json.dumps(answer), encoding="utf-8")
        return {"name": register, "answer": {"file": str(path)}, "register": register}

    def play(self, *plays: dict[str, Any], **variables: Any) -> str:
        """Run plays over both hosts; return the output."""
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
    """Show what the other tests look for: they would see an evaluated answer."""
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
    device = {"type": "gpu", "product": evil, "uuid": "u", "profile": evil}
    parts = {"type": "mig", "product": evil, "uuid": "u", "profile": evil}
    slices = [{"devices": [device, parts]}]
    asked = [
        machine.asks("accelerator_published", nodes={name: {"slices": slices} for name in ("n1", "n2")}),
        machine.asks("__nvidia_mig_applied", steps=[{"description": evil}], devices=[{"mode": evil}], changed=True),
        machine.asks("__dra_driver_started", drivers=[{"name": evil, "devices": [evil]}], changed=True),
    ]
    line, variables = task_of("site.yml", "Put the node in a line")
    shown, _variables = task_of("site.yml", "Show the summary")
    so_far, more = task_of("site.yml", "Say how far this is")
    printed = machine.play(
        {"vars": variables, "tasks": [*asked, line, shown]},
        {"vars": more, "tasks": [so_far]},
        accelerator_name="{{ inventory_hostname }}",
    )
    assert printed.count("failed=0") == 2 and "lookup('ansible.builtin.pipe'" in printed, printed
    assert not machine.made.exists(), printed


def test_upgrade_evaluates_no_answer(machine: Machine) -> None:
    evil = machine.template
    holder = {"namespace": evil, "name": evil, "claims": [evil], "owner": evil}
    asked = [
        machine.asks("__nvidia_driver_plan", steps=[evil]),
        machine.asks("accelerator_leaving", results=[{"pods": [holder], "accelerator_role": "nvidia_driver"}]),
    ]
    kept, variables = task_of("upgrade.yml", "Keep what would be exchanged")
    shown, _variables = task_of("upgrade.yml", "Show the plan")
    printed = machine.play(
        {"vars": variables, "tasks": [*asked, kept, shown]}, {"tasks": [{**shown, "run_once": False}]}
    )
    assert printed.count("failed=0") == 2 and "lookup('ansible.builtin.pipe'" in printed, printed
    assert not machine.made.exists(), printed


def test_report_evaluates_no_answer(machine: Machine, tmp_path: Path) -> None:
    evil = machine.template
    asked = machine.asks(
        "accelerator_node_answer", ansible_facts={"accelerator_report": {"devices": [evil], "words": {evil: evil}}}
    )
    _task, variables = task_of("report.yml", "Ask the cluster, and join what the nodes have answered")
    written = {
        "ansible.builtin.copy": {"content": "{{ accelerator_answers | to_json }}", "dest": str(tmp_path / "out")}
    }
    shown = {"ansible.builtin.debug": {"msg": "{{ accelerator_answers }}"}}
    name = {"ansible.builtin.set_fact": {"accelerator_name": "{{ inventory_hostname }}"}}
    printed = machine.play({"tasks": [name, asked]}, {"hosts": "n1", "vars": variables, "tasks": [written, shown]})
    assert "failed=0" in printed and "ansible.builtin.pipe" in (tmp_path / "out").read_text("utf-8"), printed
    assert not machine.made.exists(), printed


def test_remove_evaluates_no_answer(machine: Machine) -> None:
    evil = machine.template
    node = {
        "driver": {"configuration": []},
        "units": {"dra-accelerators-driver.service": {"ours": True}},
        "devices": {evil: {}},
    }
    claim = {"namespace": evil, "name": evil, "nodes": ["n1", "n2"], "pods": [evil]}
    asked = [
        machine.asks("accelerator_node", **node),
        machine.asks("accelerator_cluster", nodes={name: {"labels": {}, "annotations": {}} for name in ("n1", "n2")}),
        machine.asks("accelerator_claims", claims=[claim]),
    ]
    refused, variables = task_of("remove.yml", "Refuse while pods use them")
    deleted, _variables = task_of("remove.yml", "Delete the pods")
    # The action for each pod is shown instead.
    looped = {
        "ansible.builtin.debug": {"msg": deleted["kubernetes.core.k8s"]},
        **{key: deleted[key] for key in ("loop", "loop_control")},
    }
    printed = machine.play(
        {"vars": variables, "tasks": [*asked, looped, refused]}, accelerator_name="{{ inventory_hostname }}"
    )
    assert (
        printed.count("failed=1") == 2 and "nothing was removed there" in printed and "ansible.builtin.pipe" in printed
    )
    assert not machine.made.exists(), printed


def test_preflight_evaluates_no_part_of_an_answer(machine: Machine) -> None:
    """Neither keys nor values, of the node and of the cluster."""
    role, text = ROOT / "roles/preflight", machine.template
    variables = yaml.safe_load((role / "vars/main.yml").read_text("utf-8"))
    node = {"labels": {text: text, "dra": "label"}, "slices": [{"driver": "gpu.nvidia.com", "name": text}]}
    asked = [
        machine.asks("__preflight_node_asked", devices={text: 1, "ascend": 1}),
        machine.asks("__preflight_cluster_asked", problem=text, nodes={"n": node}, own=[{text: text}]),
    ]
    names = (
        "__preflight_host_answer",
        "__preflight_cluster_answer",
        "__preflight_cluster_other",
        "__preflight_left_out",
    )
    given = {**{name: variables[name] for name in names}, "__preflight_before_binding": False}
    facts = [
        task
        for task in yaml.safe_load((role / "tasks/main.yml").read_text("utf-8"))
        if task["name"].startswith("Keep the")
    ]
    words = [
        "Vendors: {{ __preflight_left_out | join(', ') }}",
        "{{ __preflight_node.labels.dra }} of {{ __preflight_slices | length }}",
    ]
    kept = {"ansible.builtin.set_fact": {"kept": words, "problem": "{{ __preflight_cluster.problem }}"}}
    shown = {"ansible.builtin.debug": {"msg": "{{ [kept, problem, __preflight_node, __preflight_cluster] }}"}}
    given |= {"preflight_node_info": {}, "preflight_cluster_info": {}, "preflight_vendors": ["nvidia"]}
    given |= {"preflight_node_name": "n", "__preflight_drivers": ["gpu.nvidia.com"]}
    printed = machine.play({"vars": given, "tasks": [*asked, *facts, kept, shown]})
    assert printed.count("failed=0") == 2 and "Vendors: ascend" in printed and "label of 1" in printed, printed
    assert len(facts) == 2 and not machine.made.exists(), printed


@pytest.mark.parametrize("playbook", ["tasks/repartition_operation.yml", "drained"])
def test_rescue_evaluates_no_message_of_a_failure(machine: Machine, playbook: str) -> None:
    """What a failed module of a host says is kept by set_fact, and shown."""
    path = ROOT / ("roles/ascend_driver/tasks/drained.yml" if playbook == "drained" else f"playbooks/{playbook}")
    tasks = list(nodes_of(yaml.safe_load(path.read_text("utf-8"))))
    kept = next(task for task in tasks if task.get("name") == "Keep what went wrong")
    names = list(kept["ansible.builtin.set_fact"])
    shown = {"ansible.builtin.debug": {"msg": [f"{{{{ {name} }}}}" for name in names]}}
    failing = machine.asks(
        "asked", failed=True, msg=f"bad {machine.template}", hint=machine.template, error_code="time-is-up"
    )
    printed = machine.play({"tasks": [{"block": [failing], "rescue": [kept, shown]}]})
    assert printed.count("rescued=1") == 2 and printed.count("failed=0") == 2, printed
    assert not machine.made.exists(), printed
