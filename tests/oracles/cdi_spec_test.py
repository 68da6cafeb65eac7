# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module cdi_spec beside nvidia-ctk, on the same simulated node: the same devices by the same names, each with the same nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nvidia_ctk_test import generated

# The module looks for libraries where they are on a node, so it is told where they are here.
OURS = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
files = importlib.import_module("ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.driver_files")
files.LIBRARY_FOLDERS = (sys.argv[1],)
module = importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.cdi_spec")
with patch_module_args({"vendor": ["nvidia"], "directory": sys.argv[2]}):
    module.main()
"""

Json = dict[str, Any]


def nodes(edits: Json) -> set[str]:
    return {one["path"] for one in edits.get("deviceNodes", ())}


def test_the_same_devices_with_the_same_nodes(nvidia_ctk: Path, library: Path, tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    ours = f"{sys.executable} {tmp_path / 'ours.py'} {library} {tmp_path / 'cdi'}"
    # What the module says of a failure is on its standard output.
    before = "\n".join(
        f"{ours} > {tmp_path / name} || {{ cat {tmp_path / name} >&2; exit 1; }}" for name in ("said", "again")
    )
    theirs: Json = generated(nvidia_ctk, library, tmp_path, before)
    said = (tmp_path / "said").read_text()
    assert json.loads(said)["changed"] and not json.loads((tmp_path / "again").read_text())["changed"]
    (spec,) = json.loads(said)["specs"]
    written: Json = json.loads(Path(spec["path"]).read_text())
    assert written["kind"] == theirs["kind"] == "nvidia.com/gpu"
    mine = {each["name"]: each["containerEdits"] for each in written["devices"]}
    other = {each["name"]: each["containerEdits"] for each in theirs["devices"]}
    assert set(mine) == set(other)
    # Partitions are counted by their numbers here, and there as the library lists them; by UUID they are the same.
    counted = {name for name in mine if ":" in name}
    assert len(counted) == 3
    for name in sorted(set(mine) - counted):
        assert nodes(mine[name]) == nodes(other[name]), name
    assert sorted(map(sorted, (nodes(mine[name]) for name in counted))) == sorted(
        map(sorted, (nodes(other[name]) for name in counted))
    )
    assert nodes(written["containerEdits"]) >= {"/dev/nvidiactl", "/dev/nvidia-uvm"}
    mounted = {one["hostPath"] for one in written["containerEdits"]["mounts"]}
    assert {one["hostPath"] for one in theirs["containerEdits"]["mounts"] if "lib" in one["hostPath"]} & mounted
