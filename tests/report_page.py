# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The page of the playbook ``report``, for tests: made of a picture as the module template makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from ansible.plugins.filter.core import FilterModule
from ansible_collections.dra.accelerators.plugins.filter.csp_hash import csp_hash

TEMPLATES = Path(__file__).resolve().parents[1] / "playbooks/templates"


def page(picture: dict[str, Any]) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update({name: FilterModule().filters()[name] for name in ("to_json", "extract")})
    environment.filters["dra.accelerators.csp_hash"] = csp_hash
    return environment.get_template("report.html.j2").render(accelerator_report={"picture": picture})
