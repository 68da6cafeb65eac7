# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the queries of docs/monitoring.md and of the dashboard that attribute DCGM exporter metrics to containers, in
Prometheus.

The fleet has a whole GPU of one container, a time-sliced GPU of two, a partitioned GPU, and a free one. The exporter
reports a partition with its GPU's UUID. If it knows pods, it reports a shared GPU once per pod.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard import ROOT, expressions
from prometheus import promtool

PAGE = ROOT / "docs/monitoring.md"
EXPORTER = 'modelName="NVIDIA H100 80GB HBM3",Hostname="node-1",instance="10.0.0.1:9400",job="dcgm-exporter"'
DRIVER = 'instance="10.0.0.1:9817",job="dra-accelerators",driver="gpu.nvidia.com"'
WHOLE, TURNS, CUT, FREE = "GPU-a", "GPU-b", "GPU-c", "GPU-d"


def measured(name: str, uuid: str, value: int, **more: str) -> dict[str, str]:
    """Return a series of the exporter."""
    labels = "".join(f',{key}="{text}"' for key, text in more.items())
    return {"series": f'{name}{{UUID="{uuid}",{EXPORTER}{labels}}}', "values": f"{value}x10"}


def driver_series(name: str, value: int = 1, **labels: str) -> dict[str, str]:
    """Return a series of the node driver."""
    words = "".join(f',{key}="{text}"' for key, text in labels.items())
    return {"series": f"{name}{{{DRIVER}{words}}}", "values": f"{value}x10"}


def container_series(
    pod: str, uuid: str, device_uuid: str, partition_id: str = "", share_id: str = ""
) -> list[dict[str, str]]:
    """Return the driver's series of a container with a device of a separate claim, and of the claim."""
    device = {"uuid": uuid, "device_uuid": device_uuid, "partition_id": partition_id, "share_id": share_id}
    of_claim = {"namespace": "default", "claim": f"claim-{pod}", "device": device_uuid.lower(), **device}
    return [
        driver_series("dra_accelerators_container_device_info", pod=pod, container="main", **of_claim),
        driver_series(
            "dra_accelerators_claim_device_info", request="r", kind="x", profile="", admin="false", **of_claim
        ),
    ]


def partition(number: str) -> dict[str, str]:
    return {"GPU_I_ID": number, "GPU_I_PROFILE": "1g.10gb"}


#: Each metric of a partitioned GPU has one series per partition, and one for the GPU if it has the metric.
SERIES = [
    *container_series("alone", WHOLE, WHOLE),
    *container_series("first", TURNS, TURNS, share_id="1"),
    *container_series("second", TURNS, TURNS, share_id="2"),
    *container_series("small", "MIG-3", CUT, "3"),
    *container_series("other", "MIG-5", CUT, "5"),
    *(
        each
        for name in ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE")
        for each in (
            measured(name, WHOLE, 11),
            measured(name, TURNS, 22, exported_pod="first"),
            measured(name, TURNS, 22, exported_pod="second"),
            measured(name, CUT, 33),
            measured(name, CUT, 3, **partition("3")),
            measured(name, CUT, 5, exported_pod="other", **partition("5")),
            measured(name, CUT, 7, **partition("7")),
            measured(name, FREE, 44),
        )
    ),
    *(
        driver_series("dra_accelerators_device_power_watts", 100, device=uuid.lower(), uuid=uuid, device_uuid=uuid)
        for uuid in (WHOLE, TURNS, CUT, FREE)
    ),
]


def documented() -> dict[str, str]:
    """Return the queries of the page by the comment above each."""
    (block,) = (
        text
        for text in re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        if "DCGM_FI" in text
    )
    found = re.findall(r"^# (.*)\n((?:[^#\n].*\n)+)", block, re.MULTILINE)
    return {title: " ".join(query.split()) for title, query in found}


def evaluate(folder: Path, expression: str, expected: list[dict[str, Any]]) -> None:
    """Evaluate an expression over the fleet with promtool, and compare the result."""
    check = {"expr": expression, "eval_time": "5m", "exp_samples": expected}
    document = {"tests": [{"interval": "1m", "input_series": SERIES, "promql_expr_test": [check]}]}
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(document))
    assert "SUCCESS" in promtool("test", "rules", path)


def by_pod(values: dict[str, int]) -> list[dict[str, Any]]:
    return [{"labels": f'{{pod="{pod}"}}', "value": value} for pod, value in values.items()]


@pytest.mark.parametrize(
    ("about", "values"),
    [("whole GPUs", {"alone": 11, "first": 22, "second": 22}), ("partitions", {"small": 3, "other": 5})],
)
def test_exporter_metrics_are_attributed_to_the_containers_of_the_device(
    tmp_path: Path, about: str, values: dict[str, int]
) -> None:
    (query,) = (text for title, text in documented().items() if about in title)
    evaluate(tmp_path, f"sum by (pod) ({query})", by_pod(values))
    # Nothing is counted twice: one series per container and no other.
    evaluate(tmp_path, f"count({query})", [{"labels": "{}", "value": len(values)}])


@pytest.mark.parametrize("query", [text for text in expressions() if re.search(r"\bon \(", text)])
def test_joins_of_the_dashboard_work_for_the_fleet(tmp_path: Path, query: str) -> None:
    evaluate(tmp_path, f"count({query}) > bool 0", [{"labels": "{}", "value": 1}])
