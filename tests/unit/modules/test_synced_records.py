# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of vendor packages are on the disk before a record confirms them: rpm and .run packages sync none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_ascend_driver
import test_ascend_runtime
import test_nvidia_container_toolkit
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from driver_node import NEWER, OLDER
from driver_node import Node as NvidiaNode
from nvidia_machine import FakeApt

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
RECORDS = ("/record.json", "/ascend-runtime.json")
Events = list[str]


def nvidia_driver(directory: Path, run_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    node = NvidiaNode(directory, run_here, monkeypatch)
    return [node.run(OLDER), node.run(NEWER), node.run(state="previous"), node.run(state="absent")]


def package_group(directory: Path, run_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    node = test_nvidia_container_toolkit.Node(directory, run_here, monkeypatch)
    older = test_nvidia_container_toolkit.OLDER
    return [node.run(older), node.run("1.18", latest=True), node.run(state="previous"), node.run(state="absent")]


def ascend_driver(directory: Path, run_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    node = test_ascend_driver.Node(directory, run_here, monkeypatch)
    return [node.run(test_ascend_driver.BOTH), node.run(test_ascend_driver.NEWER), node.run(state="absent")]


def ascend_runtime(directory: Path, run_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    node = test_ascend_runtime.Node(directory, run_here, monkeypatch)
    return [node.run("6.0.0"), node.run("7.0.0")]


def record_events(monkeypatch: pytest.MonkeyPatch, system: type[System], events: Events) -> None:
    """Add an event for each change of packages, each sync, and each completed record."""
    write, run, act, remove = System.write_atomic, system.run, FakeApt.act, System.remove_tree

    def write_atomic(self: System, path: str, data: bytes, *words: Any, **options: Any) -> None:
        if path.endswith(RECORDS):
            content = json.loads(data)
            events.append("record" if not (content.get("doing") or content.get("unfinished")) else "begun")
        write(self, path, data, *words, **options)

    def remove_tree(self: System, path: str) -> bool:
        if self.exists(f"{path}/record.json"):
            events.append("record")
        return remove(self, path)

    def run_program(self: Any, argv: Any, *words: Any, **options: Any) -> Any:
        if argv[0] == "bash" and "--check" not in argv:
            events.append("packages")
        return run(self, argv, *words, **options)

    def act_on(self: FakeApt, *words: Any, **options: Any) -> str:
        events.append("packages")
        return act(self, *words, **options)

    monkeypatch.setattr(System, "write_atomic", write_atomic)
    monkeypatch.setattr(System, "remove_tree", remove_tree)
    monkeypatch.setattr(system, "run", run_program)
    monkeypatch.setattr(FakeApt, "act", act_on)


#: The file with the writer of the record, by module.
WRITERS = {
    nvidia_driver: "_packages.package_installer",
    package_group: "_packages.package_installer",
    ascend_driver: "_ascend_host.package_installer",
    ascend_runtime: "ascend_runtime",
}


@pytest.mark.parametrize("work", WRITERS)
def test_files_of_packages_are_synced_before_the_completed_record(
    work: Callable[..., list[Any]],
    tmp_path: Path,
    run_here: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: Events = []
    record_events(monkeypatch, System, events)
    init = System.__init__

    def with_sync(self: System, *words: Any) -> None:
        init(self, *words)
        monkeypatch.setattr(self, "sync_all", lambda: events.append("sync"), raising=False)

    monkeypatch.setattr(System, "__init__", with_sync)
    runs = work(tmp_path / "node", run_here, monkeypatch)
    assert not [each for each in runs if each.get("failed")]
    assert events.count("record") >= len(runs)
    is_synced = True
    for number, event in enumerate(events):
        is_synced = event == "sync" or (is_synced and event != "packages")
        assert event != "record" or is_synced, (number, events)


def test_each_writer_of_records_of_packages_is_tested() -> None:
    callers = {
        ".".join(path.relative_to(PLUGINS).with_suffix("").parts[1:])
        for path in PLUGINS.rglob("*.py")
        if re.search(r"[^f] keep_record\(", path.read_text("utf-8"))
    }
    assert callers == set(WRITERS.values())
