# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The objects that the roles dra_controller and dra_driver write for the rights of their accounts, and the policies that limit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml
from ansible.plugins.filter.core import FilterModule

from tests.fleets import DRIVER

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE, ACCOUNT = "dra-accelerators-controller", "controller"
DRIVER_NAMESPACE = "dra-accelerators"
SECRET = "dra-accelerators-controller-authority"


def _rendered(role: str, **variables: Any) -> list[dict[str, Any]]:
    """Return the objects in a role's template."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(ROOT / f"roles/{role}/templates"), trim_blocks=True)
    environment.filters.update({name: FilterModule().filters()[name] for name in ("to_json", "bool")})
    text = environment.get_template("cluster_objects.yaml.j2").render(**variables)
    return [each for each in yaml.safe_load_all(text) if each]


def driver_objects(*, read_pods: bool = False) -> list[dict[str, Any]]:
    """Return what the role dra_driver writes for all nodes."""
    return _rendered(
        "dra_driver",
        __dra_driver_shared_names=[DRIVER],
        dra_driver_namespace=DRIVER_NAMESPACE,
        __dra_driver_user=f"system:serviceaccount:{DRIVER_NAMESPACE}:driver-",
        __dra_driver_pod_user=f"system:serviceaccount:{DRIVER_NAMESPACE}-driver:driver",
        __dra_driver_token_audiences=["https://kubernetes.default.svc"],
        __dra_driver_token_limit=2592000,
        dra_driver_token_lifetime=2592000,
        __dra_driver_shared_metrics_authorization=False,
        __dra_driver_shared_read_pods=read_pods,
    )


def objects() -> list[dict[str, Any]]:
    """What the role writes for a controller that gives the report."""
    return _rendered(
        "dra_controller",
        dra_controller_drivers=[DRIVER],
        dra_controller_namespace=NAMESPACE,
        __dra_controller_account=ACCOUNT,
        __dra_controller_subject=f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}",
        __dra_controller_webhook_secret=SECRET,
        __dra_controller_token_audiences=["https://kubernetes.default.svc"],
        __dra_controller_token_limit=2592000,
        dra_controller_token_lifetime=2592000,
        dra_controller_metrics_authorization=False,
        dra_controller_webhook=True,
        dra_controller_report=True,
        dra_controller_form="deployment",
    )
