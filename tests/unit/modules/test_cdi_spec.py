# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module cdi_spec: names, differences, and conflicts, and the whole file on simulated NPUs. tests/oracles uses NVIDIA's own program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime import cdi_spec as cdi_specs
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.cdi import ContainerEdits, validate_spec
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.modules import cdi_spec
from test_ascend_vnpu import Node, static

from tests.simulator.backend.npu_machine import DATA, NpuMachine
from tests.simulator.nvml_builds import build

OWN = "/etc/cdi/dra-accelerators-huawei.com-npu.json"
THEIRS = {
    "cdiVersion": "0.5.0",
    "kind": "huawei.com/npu",
    "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}],
}
IN_YAML = """
cdiVersion: 0.5.0
kind: "huawei.com/npu"
devices:
- name: "7"
  containerEdits: {deviceNodes: [{path: /dev/davinci7}]}
- containerEdits: {env: [A=b]}
  name: NPU-1
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    machine = NpuMachine(tmp_path / "root")
    machine.power_on("8x310P-Pro", build(sources=DATA / "dcmi").folder)
    return Node(machine, tmp_path)


def put(root: Path, path: str, text: str) -> Path:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


def test_kind_and_file_names() -> None:
    assert cdi_specs.kind_of("gpu.nvidia.com") == "nvidia.com/gpu"
    assert cdi_specs.file_of("/etc/cdi/", cdi_specs.kind_of("npu.huawei.com")) == OWN
    with pytest.raises(AcceleratorError) as caught:
        cdi_specs.specification("no kind", {"0": ContainerEdits(env=("A=b",))}, ContainerEdits())
    assert caught.value.code == "invalid-kind"
    assert cdi_specs.specification("a.b/c", {}, ContainerEdits(env=("A=b",))) is None


def test_differences_are_listed_by_device() -> None:
    one, other = ({"env": [f"A={letter}"]} for letter in "bc")
    before = {
        "devices": [{"name": "0", "containerEdits": one}, {"name": "1", "containerEdits": one}],
        "containerEdits": one,
    }
    after = {
        "devices": [{"name": "1", "containerEdits": other}, {"name": "2", "containerEdits": one}],
        "containerEdits": one,
    }
    changes = {each["name"]: each["change"] for each in cdi_specs.differences(before, after)}
    assert changes == {"1": "changed", "2": "added", "0": "removed", "": "same"}
    assert {each["change"] for each in cdi_specs.differences(None, after)} == {"added"}
    assert {each["change"] for each in cdi_specs.differences(after, None)} == {"removed"}
    assert cdi_specs.differences(cdi_specs.parse_file("{broken"), None) == []


def test_files_with_same_devices_are_found(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    put(tmp_path, OWN, json.dumps(THEIRS))
    put(tmp_path, "/etc/cdi/other-kind.json", json.dumps({**THEIRS, "kind": "huawei.com/other"}))
    put(tmp_path, "/etc/cdi/.hidden.json", json.dumps(THEIRS))
    put(tmp_path, "/etc/cdi/theirs.txt", json.dumps(THEIRS))
    place = put(tmp_path, "/run/cdi/theirs.json", json.dumps(THEIRS))
    put(tmp_path, "/run/cdi/theirs.yaml", IN_YAML)
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("../run")

    def others(names: set[str]) -> list[cdi_specs.Other]:
        return cdi_specs.other_files(system, ("/etc/cdi", "/var/run/cdi", "/run/cdi"), OWN, "huawei.com/npu", names)

    found = others({"0", "NPU-1"})
    assert found == [
        cdi_specs.Other("/run/cdi/theirs.json", ("0",)),
        cdi_specs.Other("/run/cdi/theirs.yaml", ("NPU-1",)),
    ]
    assert others({"1", "all"}) == []
    returned = cdi_specs.refuse_conflicts(found, OWN, system)
    assert len(returned) == 2
    for other, text in zip(found, returned, strict=True):
        assert text.endswith(f"Runtimes use the devices of {other.path}")
    here = cdi_specs.refuse_conflicts(
        [cdi_specs.Other("/etc/cdi/x.json", ("0",))], "/var/run/cdi/dra-accelerators-huawei.com-npu.json", system
    )
    assert "Runtimes use the devices of /var/run/cdi/dra-accelerators" in here[0]
    place.rename(tmp_path / "etc/cdi/theirs.json")
    with pytest.raises(
        AcceleratorError, match=r"/etc/cdi/theirs\.json also defines the devices 0, in the same directory"
    ) as caught:
        cdi_specs.refuse_conflicts(others({"0", "1"}), OWN, system)
    assert caught.value.code == "cdi-conflict"


def test_module_waits_for_the_vendor_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim would get the driver's own list at once, but a permanent file waits for the better one."""
    returned = [ContainerEdits(env=("FROM=us",))]

    class Backend:
        def open(self) -> None: ...

        def close(self) -> None:
            returned.append(ContainerEdits(env=("TOO=late",)))

        def discover(self) -> tuple[()]:
            return ()

        def driver_edits(self) -> ContainerEdits:
            return returned[-1]

        def settle(self, seconds: float) -> None:
            returned.append(ContainerEdits(env=("FROM=them",)))

    monkeypatch.setattr(cdi_specs, "entries", lambda *_arguments: {"0": ContainerEdits(env=("A=b",))})
    params = {"match": None, "names": ["index"], "all": False}
    spec, unanswered = cdi_spec.content_of(Backend(), "nvidia.com/gpu", params)  # type: ignore[arg-type]
    assert spec is not None and spec["containerEdits"] == {"env": ["FROM=them"]} and unanswered == []


@pytest.mark.prove
def test_module_writes_file_for_all_npus(node: Node) -> None:
    root = node.machine.root
    dry_run = node.run("cdi_spec", check=True)
    (spec,) = dry_run["specs"]
    assert dry_run["changed"] and spec["exists"] and spec["path"] == OWN and not (root / OWN.lstrip("/")).exists()
    (written,) = node.run("cdi_spec")["specs"]
    content = json.loads((root / OWN.lstrip("/")).read_text())
    validate_spec(content)
    names = [each["name"] for each in content["devices"]]
    assert {*map(str, range(8)), "all"} <= set(names) and sum(name.startswith("NPU-") for name in names) == 8
    assert written["kind"] == content["kind"] == "huawei.com/npu" and written["cdi_version"] == content["cdiVersion"]
    edits = {each["name"]: each["containerEdits"] for each in content["devices"]}
    assert [one["path"] for one in edits["3"]["deviceNodes"]] == ["/dev/davinci3"]
    assert len(edits["all"]["deviceNodes"]) == 8
    assert "/dev/davinci_manager" in {one["path"] for one in content["containerEdits"]["deviceNodes"]}
    # The same content in another format is no change.
    (root / OWN.lstrip("/")).write_text(json.dumps(content))
    again = node.run("cdi_spec")
    assert not again["changed"] and {each["change"] for each in again["specs"][0]["devices"]} == {"same"}

    few = node.run("cdi_spec", vendor=["ascend"], match={"index": [1, 2]}, names=["index"], all=False)
    assert {each["name"] for each in few["specs"][0]["devices"] if each["change"] == "same"} == {"1", "2", ""}
    assert '"3"' in few["diff"][0]["before"] and '"3"' not in few["diff"][0]["after"]
    gone = node.run("cdi_spec", state="absent")
    assert gone["changed"] and not (root / OWN.lstrip("/")).exists()
    # Without devices there is no file, because an empty CDI file is invalid.
    nothing = node.run("cdi_spec", match={"index": 99})
    assert not nothing["changed"] and not nothing["specs"][0]["exists"]


def test_module_partitioned_chip_is_listed_as_slices(node: Node) -> None:
    made = node.run(layout=static({"vir02": 2}, index=0))
    uuids = [each["uuid"] for each in made["after"][0]["partitions"]]
    node.run("cdi_spec")
    content = json.loads((node.machine.root / OWN.lstrip("/")).read_text())
    edits = {each["name"]: each["containerEdits"] for each in content["devices"]}
    assert "0" not in edits and {"0:0", "0:1", "1", *uuids} <= set(edits)
    assert edits["0:0"]["deviceNodes"][0]["hostPath"].startswith("/dev/vdavinci")


@pytest.mark.prove
def test_module_second_file_for_same_kind_is_rejected(node: Node) -> None:
    put(node.machine.root, "/etc/cdi/theirs.json", json.dumps(THEIRS))
    refused = node.run("cdi_spec")
    assert refused["failed"] and refused["error_code"] == "cdi-conflict"
    other: dict[str, Any] = node.run("cdi_spec", kind="example.com/npu", vendor=["ascend"])
    assert other["changed"] and not other.get("warnings")
