# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The comparison of node states after a check mode run in the molecule scenarios, so that no role changes anything unseen."""

from __future__ import annotations

import importlib.util
import json
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PATH = ROOT / "molecule/shared/files/node_state.py"
SCENARIOS = sorted(
    path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml") if path.parent.name != "default"
)
CHANGES_TOLD, NOTHING_TOLD = (f"side_effect ../shared/check_{what}.yml" for what in ("changes", "nothing"))


@pytest.fixture(name="node_state", scope="module")
def fixture_node_state() -> types.ModuleType:
    """Return the program as a module. It is in no Python package."""
    spec = importlib.util.spec_from_file_location("node_state", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Path:
    """Return a directory with a node's files."""
    (tmp_path / "etc/modprobe.d").mkdir(parents=True)
    (tmp_path / "etc/modprobe.d/nvidia.conf").write_text("options nvidia a=1\n", encoding="utf-8")
    (tmp_path / "etc/link").symlink_to("modprobe.d")
    (tmp_path / "etc/__pycache__").mkdir()
    return tmp_path


def write_again(path: Path) -> None:
    """Write the same content again, with a modification time 1 s later."""
    text, before = path.read_text(encoding="utf-8"), path.stat().st_mtime_ns
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(before, before + 10**9))


def point_elsewhere(path: Path) -> None:
    """Change the target of a link."""
    path.unlink()
    path.symlink_to("elsewhere")


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "made": ("etc/modprobe.d/nouveau.conf", Path.touch),
    "created directory": ("var", Path.mkdir),
    "removed": ("etc/modprobe.d/nvidia.conf", Path.unlink),
    "rewritten": ("etc/modprobe.d/nvidia.conf", write_again),
    "longer": (
        "etc/modprobe.d/nvidia.conf",
        lambda path: path.write_text("options nvidia a=1 b=2\n", encoding="utf-8"),
    ),
    "other mode": ("etc/modprobe.d/nvidia.conf", lambda path: path.chmod(0o600)),
    "directory with another mode": ("etc/modprobe.d", lambda path: path.chmod(0o700)),
    "link elsewhere": ("etc/link", point_elsewhere),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_file_is_the_only_difference(node_state: types.ModuleType, node: Path, change: str) -> None:
    """A created, removed, or changed file is the only reported line."""
    name, make = CHANGES[change]
    before = node_state.files(str(node))
    make(node / name)
    lines = node_state.differences(before, node_state.files(str(node)))
    assert [line.partition(": ")[0] for line in lines] == [f"file {node / name}"]


def test_files_changed_without_a_role_are_no_difference(node_state: types.ModuleType, node: Path) -> None:
    """Python caches, directory times, and the boards' own file, which each query writes, are not differences."""
    before = node_state.files(str(node))
    (node / "etc/__pycache__/a.pyc").touch()
    (node / "etc/libnvidia-gpusim.so.580.95.05").touch()
    os.utime(node / "etc/modprobe.d", ns=(1, 1))
    assert node_state.differences(before, node_state.files(str(node))) == []


def test_object_labels_and_content_are_compared(node_state: types.ModuleType) -> None:
    """Status, version, and managers of an object are ignored. Labels and content are compared."""
    written = {
        "kind": "Node",
        "metadata": {"name": "a", "labels": {"b": "c"}, "resourceVersion": "1", "managedFields": [1]},
    }
    beat = {**written, "metadata": {**written["metadata"], "resourceVersion": "2"}, "status": {"phase": "Ready"}}  # type: ignore[dict-item]
    labelled = {**written, "metadata": {"name": "a", "labels": {"b": "d"}}}
    assert (
        node_state.describe_object(beat) == node_state.describe_object(written) != node_state.describe_object(labelled)
    )


def test_units_installed_or_enabled_are_compared(node_state: types.ModuleType) -> None:
    """Static units of packages are ignored. A unit that restarts repeatedly has no run to compare."""
    shown = "\n\n".join(
        f"NRestarts={restarts}\nId={name}\nActiveState=active\nFragmentPath={place}/{name}\nUnitFileState={enabled}\nInvocationID=a1"
        for name, place, enabled, restarts in (
            ("mine.service", "/etc/systemd/system", "disabled", 0),
            ("apt-daily.service", "/usr/lib/systemd/system", "static", 0),
            ("persistence.service", "/usr/lib/systemd/system", "enabled", 0),
            ("kubelet.service", "/usr/lib/systemd/system", "enabled", 7),
        )
    )
    assert node_state.units(shown) == {
        "unit mine.service": "disabled active a1",
        "unit persistence.service": "enabled active a1",
        "unit kubelet.service": "enabled restarts repeatedly",
    }


def test_boards_are_compared_by_their_settings(node_state: types.ModuleType) -> None:
    """Boards of one or two vendors: a reader causes no difference, a partition does."""
    gpu = {"index": 0, "mig_mode_current": 0, "gpu_instances": [], "open": False}

    def shown(**changed: object) -> dict[str, str]:
        shown = {"generation": len(changed), "cuda_version": 13000, "gpus": [{**gpu, **changed}]}
        return node_state.boards(json.dumps(shown))  # type: ignore[no-any-return]

    assert list(shown()) == ["machine of gpus", "board 0 of gpus"]
    assert shown(open=True) == shown() != shown(gpu_instances=[{"profile": "1g.10gb"}])
    both = {"nvidia": {"gpus": [gpu]}, "ascend": {"vnpu_mode": "docker", "npus": [{"number": 0}]}}
    other = {**both, "ascend": {"vnpu_mode": "vm", "npus": [{"number": 0}]}}
    boards, others = (node_state.boards(json.dumps(each)) for each in (both, other))
    assert set(boards) == {f"{each} of {kind}" for kind in ("gpus", "npus") for each in ("machine", "board 0")}
    assert [key for key in boards if boards[key] != others[key]] == ["machine of npus"]
    assert node_state.boards("") == {}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_scenario_runs_check_mode(scenario: str) -> None:
    """Check mode runs before the role changes anything, and after the idempotence run, if the scenario has one."""
    shared = yaml.safe_load((ROOT / ".config/molecule/config.yml").read_text(encoding="utf-8"))
    own = yaml.safe_load((ROOT / "molecule" / scenario / "molecule.yml").read_text(encoding="utf-8"))
    steps = {**shared, **own}["scenario"]["test_sequence"]
    # A read-only role reports no changes, not even the first time.
    first = NOTHING_TOLD if scenario == "preflight" else CHANGES_TOLD
    assert steps[steps.index("converge") - 1] == first
    assert "idempotence" not in steps or steps[steps.index("idempotence") + 1] == NOTHING_TOLD
