# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role monitoring where Prometheus runs in the cluster: drivers that are pods are found by a PodMonitor, where that kind is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/monitoring"
POD = {"dra_driver_form": "daemonset"}
KNOWN = {"__monitoring_knows_rules": True, "__monitoring_knows_pods": True}


def kinds(tmp_path: Path, **hosts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The objects by their kind, as each host would have them written if all hosts were the fleet."""
    tmp_path.mkdir(exist_ok=True)
    for name in ("templates", "files"):
        (tmp_path / name).symlink_to(ROLE / name)
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    tasks = [
        {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")},
        {"ansible.builtin.debug": {"msg": "{{ __monitoring_objects | to_json | b64encode }}"}},
    ]
    told = play(tmp_path, tasks, {name: {**defaults, **variables} for name, variables in hosts.items()}).told
    assert set(told) == set(hosts)
    return {name: {each["kind"]: each for each in objects} for name, objects in told.items()}


def test_a_pod_monitor_is_written_where_a_driver_is_a_pod_and_the_kind_is_known(tmp_path: Path) -> None:
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
    assert (endpoint["port"], endpoint["honorLabels"]) == ("metrics", True)
    assert {each["targetLabel"] for each in endpoint["relabelings"]} == {"instance", "driver_pod", "job"}
