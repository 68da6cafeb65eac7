# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role monitoring with Prometheus in the cluster: a PodMonitor finds drivers that are pods, if that kind exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/monitoring"
POD = {"dra_driver_deploy_as": "daemonset"}
KNOWN = {"__monitoring_knows_rules": True, "__monitoring_knows_pods": True}


def kinds(tmp_path: Path, **hosts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the objects by kind for each host, as if that host were the whole fleet."""
    tmp_path.mkdir(exist_ok=True)
    for name in ("templates", "files"):
        (tmp_path / name).symlink_to(ROLE / name)
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    tasks = [
        {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")},
        {"ansible.builtin.debug": {"msg": "{{ __monitoring_objects | to_json | b64encode }}"}},
    ]
    reported = play(tmp_path, tasks, {name: {**defaults, **variables} for name, variables in hosts.items()}).messages
    assert set(reported) == set(hosts)
    return {name: {each["kind"]: each for each in objects} for name, objects in reported.items()}


def test_pod_monitor_is_written_for_driver_pods_if_the_kind_exists(tmp_path: Path) -> None:
    services = kinds(tmp_path / "services", known=KNOWN)
    assert set(services["known"]) == {"ConfigMap", "PrometheusRule"}
    found = kinds(
        tmp_path / "pods",
        known={**POD, **KNOWN, "monitoring_pod_monitor_labels": {"release": "site"}},
        unknown={**POD},
        leaving={**KNOWN, "monitoring_state": "absent", "monitoring_pods": False},
    )
    assert set(found["unknown"]) == {"ConfigMap"}
    assert "PodMonitor" in found["leaving"]
    monitor = found["known"]["PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "site"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["dra-accelerators-driver"]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    assert {each["targetLabel"] for each in endpoint["relabelings"][:-1]} == {"instance", "driver_pod", "job"}


#: Samples of a driver under an attacker's control: labels of another target, names of other programs, and its own.
HOSTILE = [
    {"__name__": "dra_accelerators_part_ready", "instance": "n2:9817", "job": "kubelet", "driver_pod": "other"},
    {"__name__": "kube_daemonset_status_number_ready", "daemonset": "dra-accelerators-driver-1"},
    {"__name__": "up", "instance": "n2:9817"},
    {"__name__": "dra_accelerators_claim_consumed_capacity_bytes", "namespace": "team-a", "pod": "training-0"},
]
TARGET = {"instance": "n1:9817", "job": "dra-accelerators", "driver_pod": "driver-1"}


def scraped(
    honored: bool, rules: list[dict[str, Any]], target: dict[str, str], sample: dict[str, str]
) -> dict[str, str]:
    """Return the labels that Prometheus stores for a sample, or {} if it drops the sample."""
    labels = dict(sample)
    for name, value in target.items():
        if name in labels and honored:
            continue
        if name in labels:
            labels[f"exported_{name}"] = labels[name]
        labels[name] = value
    for rule in rules:
        (source,) = rule.get("source_labels") or rule["sourceLabels"]
        assert rule["action"] == "keep"
        if not re.fullmatch(rule["regex"], labels[source]):
            return {}
    return labels


def check_no_impersonation(honored: bool, rules: list[dict[str, Any]], target: dict[str, str]) -> None:
    """Assert that samples of a hostile driver are stored as its own or dropped."""
    stored = [scraped(honored, rules, target, sample) for sample in HOSTILE]
    assert [bool(each) for each in stored] == [True, False, False, True]
    for each in filter(None, stored):
        assert each.items() >= TARGET.items()
    assert (stored[-1]["namespace"], stored[-1]["pod"]) == ("team-a", "training-0"), "pods that use devices"
    for name in ("process_start_time_seconds", "python_info", "dra_accelerators_controller_leader"):
        assert scraped(honored, rules, target, {"__name__": name})


def test_scrape_jobs_do_not_let_a_driver_impersonate_targets(tmp_path: Path) -> None:
    for name in ("templates", "files"):
        (tmp_path / name).symlink_to(ROLE / name)
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    text = "lookup('ansible.builtin.template', 'scrape.yml.j2') | from_yaml"
    tasks = [
        {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")},
        {"ansible.builtin.debug": {"msg": "{{ " + text + " | to_json | b64encode }}"}},
    ]
    host = {**defaults, **POD, "monitoring_controller_pods": True, "ansible_managed": "Ansible"}
    jobs = play(tmp_path, tasks, {"host": host}).messages["host"]["scrape_configs"]
    assert [each["job_name"].removeprefix("dra-accelerators") for each in jobs] == ["", "-pods", "-controller"]
    for each in jobs:
        check_no_impersonation(each.get("honor_labels", False), each["metric_relabel_configs"], TARGET)


def test_pod_monitors_do_not_let_a_driver_impersonate_targets(tmp_path: Path) -> None:
    """The Prometheus operator adds labels of the pod to a target, which the last relabeling removes."""
    monitor = kinds(tmp_path, known={**POD, **KNOWN})["known"]["PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    dropped = endpoint["relabelings"][-1]
    assert dropped["action"] == "labeldrop"
    added = {"namespace": "dra-accelerators-driver", "pod": "driver-1", "container": "driver", "endpoint": "metrics"}
    target = {name: value for name, value in added.items() if not re.fullmatch(dropped["regex"], name)} | TARGET
    check_no_impersonation(endpoint["honorLabels"], endpoint["metricRelabelings"], target)


def test_targets_are_hosts_of_the_cluster_of_the_host(tmp_path: Path) -> None:
    """Hosts a and b are in two clusters. Host c has a Prometheus outside of both, which scrapes all."""
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    tasks: list[dict[str, Any]] = [
        {"ansible.builtin.add_host": {"name": name, "groups": [group]}, "changed_when": False}
        for group, name in (
            ("accelerator_nodes", "a"),
            ("accelerator_nodes", "b"),
            ("accelerator_controllers", "a"),
            ("accelerator_controllers", "b"),
        )
    ]
    reported = "{{ [monitoring_targets, monitoring_pods, monitoring_controller_targets, monitoring_controller_pods] | to_json | b64encode }}"
    tasks += [
        {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")},
        {"ansible.builtin.debug": {"msg": reported}},
    ]
    hosts = {
        "a": {**defaults, "accelerator_kubeconfig": "/a", **POD, "dra_controller_deploy_as": "deployment"},
        "b": {**defaults, "accelerator_kubeconfig": "/b"},
        "c": {**defaults, "accelerator_kubeconfig": "/c"},
    }
    found = play(tmp_path, tasks, hosts, group="accelerator_monitoring").messages
    assert found["a"] == [[], True, [], True]
    assert found["b"] == [["b:9817"], False, ["b:9779"], False]
    assert found["c"] == [["b:9817"], True, [], True]
