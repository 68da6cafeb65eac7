# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the role dra_controller writes into a cluster for the controller's account: its rights, and the policy that limits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml
from ansible.plugins.filter.core import FilterModule

from tests.fleets import DRIVER

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE, ACCOUNT = "dra-accelerators-controller", "controller"
SECRET = "dra-accelerators-controller-authority"


def objects() -> list[dict[str, Any]]:
    """What the role writes for a controller that gives the report."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "roles/dra_controller/templates"), trim_blocks=True
    )
    environment.filters.update({name: FilterModule().filters()[name] for name in ("to_json", "bool")})
    text = environment.get_template("cluster_objects.yaml.j2").render(
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
    return [each for each in yaml.safe_load_all(text) if each]
