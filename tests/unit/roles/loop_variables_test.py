# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Loop variables differ from all variables of their role, because Ansible warns about conflicts at each run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROLES = Path(__file__).resolve().parents[3] / "roles"


@pytest.mark.parametrize("role", sorted(path.name for path in ROLES.iterdir()))
def test_no_loop_variable_is_a_variable_of_its_role(role: str) -> None:
    files = [*(ROLES / role).glob("vars/*.yml"), *(ROLES / role).glob("defaults/*.yml")]
    known = {name for path in files for name in yaml.safe_load(path.read_text("utf-8")) or ()}
    loops = {
        name
        for path in (ROLES / role).glob("tasks/*.yml")
        for name in re.findall(r"loop_var: (\w+)", path.read_text("utf-8"))
    }
    assert not loops & known
