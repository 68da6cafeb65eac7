# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""docs/monitoring.md and the code name the same metrics, labels, and alerts. Rules and dashboards use no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.metrics import PREFIX, MetricsRegistry
from dra_driver.monitoring.families import COUNTER, FAMILIES

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
RULES = ROOT / "roles/monitoring/files/rules.yml"
DASHBOARD = ROOT / "roles/monitoring/files/dashboard.json"


def metrics() -> dict[str, set[str]]:
    """Return each metric with its labels, as in a scrape."""
    found = {
        f"{PREFIX}_{name}" + ("_total" if family.kind == COUNTER else ""): set(family.labels)
        for name, family in FAMILIES.items()
    }
    for each in vars(MetricsRegistry()).values():
        for family in each.describe() if hasattr(each, "describe") and hasattr(each, "labels") else ():
            found[family.name + ("_total" if family.type == "counter" else "")] = set(each._labelnames)
    return {**found, f"{PREFIX}_build_info": {"version"}}


def controllers_metrics() -> set[str]:
    """Return the names of the controller's metrics without those of every process."""
    named = re.findall(rf"^# TYPE ({PREFIX}_\w+) ", ControllerMetrics().text().decode(), re.MULTILINE)
    return {name for name in named if not name.endswith("_created")}


def test_docs_controller_page_names_its_metrics() -> None:
    page = (ROOT / "docs/controller.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `({PREFIX}_controller_\w+)` \|", page, re.MULTILINE)
    assert len(rows) > 5 and set(rows) == controllers_metrics()


def test_docs_page_names_every_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(dra_accelerators_\w+)` \| (\w+) \| (.*?) \| .+ \|$", PAGE, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", labels)) for name, _kind, labels in rows} == metrics()


def test_docs_page_explains_every_alert() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^### (\w+)$", PAGE, re.MULTILINE) == alerts


def test_rules_and_dashboard_use_existing_metrics() -> None:
    known = metrics()
    texts = [
        *(
            target["expr"]
            for panel in json.loads(DASHBOARD.read_text())["panels"]
            for target in panel.get("targets", ())
        ),
        *(rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]),
    ]
    used = {name for text in texts for name in re.findall(rf"(?<![:\w]){PREFIX}_\w+", text)}
    assert len(used) > 20
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in used} <= set(known) | controllers_metrics()


#: Sources of the values of each label. Unlimited values (names of claims and pods) occur only on series that end with
#: the node's current objects. Permanent counters and histograms have fixed or limited values.
OF_THE_NODE = {
    *(
        "driver",
        "pool",
        "device",
        "uuid",
        "device_uuid",
        "partition_id",
        "index",
        "product",
        "pci_bus_id",
        "numa_node",
        "profile",
        "part",
        "version",
    ),
    *("namespace", "claim", "claim_uid", "request", "share_id", "pod", "container"),
}
WORDS = {
    *("state", "kind", "cause", "effect", "owner", "admin", "source", "clock", "capacity"),
    *("operation", "stage", "outcome", "method", "verb", "change", "step", "finding", "le"),
}
LIMITED = {"code", "profile", "resource"}


def test_labels_have_a_limited_number_of_values() -> None:
    for name, labels in metrics().items():
        assert labels <= OF_THE_NODE | WORDS | LIMITED, name
    lasting = set().union(
        *(set(each._labelnames) for each in vars(MetricsRegistry()).values() if hasattr(each, "_labelnames"))
    )
    assert lasting <= WORDS | LIMITED | {"driver"}
