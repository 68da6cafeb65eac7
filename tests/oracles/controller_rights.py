# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The objects of the roles dra_controller and dra_driver for the permissions of their accounts, and the policies that
limit them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml
from ansible.plugins.filter.core import FilterModule

from tests.fleets import DRIVER

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE, ACCOUNT = "dra-accelerators-controller", "controller"
DRIVER_NAMESPACE, POD_NAMESPACE = "dra-accelerators", "dra-accelerators-driver"
SECRET = "dra-accelerators-controller-authority"


def _rendered(role: str, template: str = "cluster_objects.yaml.j2", **variables: Any) -> list[dict[str, Any]]:
    """Return the objects in a role's template."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(ROOT / f"roles/{role}/templates"), trim_blocks=True)
    environment.filters.update({name: FilterModule().filters()[name] for name in ("to_json", "bool")})
    text = environment.get_template(template).render(**variables)
    return [each for each in yaml.safe_load_all(text) if each]


def driver_objects(*, read_pods: bool = False, metrics_authorization: bool = False) -> list[dict[str, Any]]:
    """Return the objects of the role dra_driver for all nodes."""
    return _rendered(
        "dra_driver",
        __dra_driver_shared_names=[DRIVER],
        dra_driver_namespace=DRIVER_NAMESPACE,
        __dra_driver_user=f"system:serviceaccount:{DRIVER_NAMESPACE}:driver-",
        __dra_driver_pod_user=f"system:serviceaccount:{DRIVER_NAMESPACE}-driver:driver",
        __dra_driver_token_audiences=["https://kubernetes.default.svc"],
        __dra_driver_token_limit=2592000,
        dra_driver_token_lifetime=2592000,
        __dra_driver_shared_metrics_authorization=metrics_authorization,
        __dra_driver_shared_read_pods=read_pods,
    )


def node_objects(node: str) -> list[dict[str, Any]]:
    """Return the objects of the role dra_driver for one node whose layout has devices with binding conditions."""
    return _rendered(
        "dra_driver",
        "node_objects.yaml.j2",
        dra_driver_namespace=DRIVER_NAMESPACE,
        __dra_driver_batch=[node],
        __dra_driver_ahead_nodes=[node],
        __dra_driver_claim_watchers=[],
    )


def pod_objects(*, waiting_claims: bool) -> list[dict[str, Any]]:
    """Return the objects of the role dra_driver for all driver pods. ``waiting_claims``: a layout has devices with
    binding conditions.
    """
    return _rendered(
        "dra_driver",
        "pod_objects.yaml.j2",
        dra_driver_namespace=DRIVER_NAMESPACE,
        dra_driver_pod_namespace=POD_NAMESPACE,
        __dra_driver_api_ports=[6443],
        __dra_driver_metrics_peers=[],
        __dra_driver_shared_lists_claims=False,
        __dra_driver_has_namespace=True,
        __dra_driver_shared_waiting_claims=waiting_claims,
        __dra_driver_handler="dra-accelerators-driver",
    )


def objects(form: str = "deployment") -> list[dict[str, Any]]:
    """Return the objects of the role dra_controller with the report enabled. The form ``service`` renews its own
    token.
    """
    return _rendered(
        "dra_controller",
        dra_controller_drivers=[DRIVER],
        dra_controller_namespace=NAMESPACE,
        dra_controller_driver_namespace=DRIVER_NAMESPACE,
        __dra_controller_account=ACCOUNT,
        __dra_controller_subject=f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}",
        __dra_controller_webhook_secret=SECRET,
        __dra_controller_token_audiences=["https://kubernetes.default.svc"],
        __dra_controller_token_limit=2592000,
        dra_controller_token_lifetime=2592000,
        dra_controller_metrics_authorization=False,
        dra_controller_webhook=True,
        dra_controller_report=True,
        dra_controller_deploy_as=form,
    )
