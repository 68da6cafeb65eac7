# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""CDI files: the lowest sufficient version, no content that a runtime refuses, and atomic writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from dra_driver.core.host import cdi
from dra_driver.core.host.cdi import ContainerEdits, DeviceNode, Hook, Mount
from dra_driver.core.host.system import System
from hypothesis import given
from hypothesis import strategies as st

KIND = "k8s.gpu.nvidia.com/claim"
NODE = ContainerEdits(device_nodes=(DeviceNode("/dev/nvidia0", type="c", major=195, minor=0),))


@pytest.mark.parametrize(
    ("spec", "version"),
    [
        ({"kind": "a.b/c", "devices": [{"name": "x"}]}, "0.3.0"),
        ({"kind": "a/c", "devices": [{"name": "x", "containerEdits": {"mounts": [{"type": "tmpfs"}]}}]}, "0.4.0"),
        ({"kind": "a/c", "devices": [{"name": "7x"}]}, "0.5.0"),
        ({"kind": "a/c", "devices": [], "containerEdits": {"deviceNodes": [{"hostPath": "/dev/y"}]}}, "0.5.0"),
        ({"kind": "a/c.d", "devices": []}, "0.6.0"),
        ({"kind": "a/c", "annotations": {"k": "v"}, "devices": []}, "0.6.0"),
        ({"kind": "a/c", "devices": [{"name": "x", "annotations": {"k": "v"}}]}, "0.6.0"),
        ({"kind": "a/c", "devices": [{"name": "x", "containerEdits": {"additionalGids": [5]}}]}, "0.7.0"),
        ({"kind": "a/c", "devices": [{"name": "x", "containerEdits": {"intelRdt": {"closID": "a"}}}]}, "0.7.0"),
        ({"kind": "a/c", "devices": [{"name": "x", "containerEdits": {"netDevices": [{"name": "e"}]}}]}, "1.1.0"),
        ({"kind": "a/c", "devices": [{"name": "x", "containerEdits": {"intelRdt": {"schemata": ["x"]}}}]}, "1.1.0"),
    ],
)
def test_minimum_version_is_lowest_for_all_fields(spec: dict[str, Any], version: str) -> None:
    assert cdi.minimum_version(spec) == version


@given(
    digit=st.booleans(),
    host_path=st.booleans(),
    kind=st.sampled_from(["k8s.gpu.nvidia.com/claim", "a/b.c"]),
    mount_type=st.booleans(),
    annotated=st.booleans(),
    gids=st.booleans(),
)
def test_build_spec_declares_version_of_its_fields(
    digit: bool, host_path: bool, kind: str, mount_type: bool, annotated: bool, gids: bool
) -> None:
    edits = ContainerEdits(
        device_nodes=(DeviceNode("/dev/a", "/dev/b" if host_path else ""),),
        mounts=(Mount("/h", "/c", type="tmpfs" if mount_type else ""),),
        additional_gids=(4,) if gids else (),
    )
    name, annotations = "0-gpu" if digit else "gpu", {"k": "v"} if annotated else None
    spec = cdi.build_spec(kind, {name: edits}, annotations=annotations)
    shared = cdi.build_spec(kind, {name: NODE}, common=edits, annotations=annotations)
    for built in (spec, shared):
        cdi.validate_spec(built)
        assert built["cdiVersion"] == cdi.minimum_version(built) == spec["cdiVersion"]
    assert shared["containerEdits"] == edits.to_dict() == spec["devices"][0]["containerEdits"]
    minors = [3]
    minors += [4] if mount_type else []
    minors += [5] if digit or host_path else []
    minors += [6] if annotated or kind.endswith(".c") else []
    minors += [7] if gids else []
    assert spec["cdiVersion"] == f"0.{max(minors)}.0"


def test_build_spec_of_a_claim_has_expected_content() -> None:
    common = ContainerEdits(
        env=("NVIDIA_VISIBLE_DEVICES=void",), mounts=(Mount("/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1"),)
    )
    hook = Hook("createContainer", "/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook", "update-ldcache"), timeout=5)
    spec = cdi.build_spec(KIND, {"gpu": ContainerEdits.merge(NODE, ContainerEdits(hooks=(hook,)))}, common)
    assert spec == {
        "cdiVersion": "0.3.0",
        "kind": KIND,
        "devices": [
            {
                "name": "gpu",
                "containerEdits": {
                    "deviceNodes": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}],
                    "hooks": [
                        {
                            "hookName": "createContainer",
                            "path": "/usr/bin/nvidia-cdi-hook",
                            "args": ["nvidia-cdi-hook", "update-ldcache"],
                            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
                            "timeout": 5,
                        }
                    ],
                },
            }
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "mounts": [
                {
                    "hostPath": "/usr/lib/libcuda.so.1",
                    "containerPath": "/usr/lib/libcuda.so.1",
                    "options": ["ro", "nosuid", "nodev", "bind"],
                }
            ],
        },
    }


def test_merge_edits_removes_duplicates_and_keeps_last_variable() -> None:
    merged = ContainerEdits.merge(
        NODE,
        ContainerEdits(env=("A=1", "B=2"), additional_gids=(4,)),
        NODE,
        ContainerEdits(env=("A=3",), additional_gids=(4,)),
    )
    assert merged.env == ("A=3", "B=2") and merged.device_nodes == NODE.device_nodes and merged.additional_gids == (4,)
    assert not ContainerEdits() and merged


@pytest.mark.parametrize(
    ("kind", "devices", "text"),
    [
        ("1vendor/claim", {"gpu": NODE}, "vendor '1vendor'"),
        ("vendor", {"gpu": NODE}, "class ''"),
        ("vendor/c-", {"gpu": NODE}, "class 'c-'"),
        (KIND, {}, "at least one device"),
        (KIND, {"gpu/0": NODE}, "device name 'gpu/0'"),
        (KIND, {"gpu": ContainerEdits()}, "no container edits"),
        (KIND, {"gpu": ContainerEdits(env=("NAME",))}, "must be NAME=value"),
        (KIND, {"gpu": ContainerEdits(device_nodes=(DeviceNode("dev/x"),))}, "absolute path"),
        (KIND, {"gpu": ContainerEdits(device_nodes=(DeviceNode("/dev/x", type="z"),))}, "type 'z'"),
        (KIND, {"gpu": ContainerEdits(device_nodes=(DeviceNode("/dev/x", permissions="rx"),))}, "permissions 'rx'"),
        (KIND, {"gpu": ContainerEdits(mounts=(Mount("", "/x"),))}, "hostPath"),
        (KIND, {"gpu": ContainerEdits(hooks=(Hook("never", "/x"),))}, "hook 'never'"),
        (KIND, {"gpu": ContainerEdits(hooks=(Hook("poststop", "x"),))}, "absolute path"),
        (KIND, {"gpu": ContainerEdits(hooks=(Hook("poststop", "/x", timeout=0),))}, "above 0 s"),
    ],
)
def test_validate_spec_invalid_content_is_rejected(kind: str, devices: dict[str, ContainerEdits], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cdi.build_spec(kind, devices)


def test_validate_spec_low_version_or_duplicate_name_is_rejected() -> None:
    device = {"name": "7x", "containerEdits": {"env": ["A=1"]}}
    with pytest.raises(ValueError, match=r"0\.5\.0 is needed"):
        cdi.validate_spec({"cdiVersion": "0.3.0", "kind": KIND, "devices": [device]})
    with pytest.raises(ValueError, match="exists twice"):
        cdi.validate_spec({"cdiVersion": "1.0.0", "kind": KIND, "devices": [device, device]})
    cdi.validate_spec({"cdiVersion": "v1.0.0", "kind": KIND, "devices": [device]})


def test_container_edits_of_other_programs_round_trip() -> None:
    written = {
        "env": ["A=B"],
        "deviceNodes": [{"path": "/dev/a", "major": 195, "minor": 0, "fileMode": 438, "permissions": "rwm", "gid": 44}],
        "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro", "rbind"], "type": "bind"}],
        "hooks": [{"hookName": "createContainer", "path": "/x", "args": ["x"], "env": ["D=1"], "timeout": 5}],
        "additionalGids": [44],
    }
    assert ContainerEdits.from_dict(written).to_dict() == written
    assert ContainerEdits.from_dict({}) == ContainerEdits()


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({"netDevices": []}, "unknown keys: netDevices"),
        ({"mounts": [{"hostPath": "/a", "containerPath": "/b", "flags": 1}]}, "Mount with unknown keys: flags"),
        ({"hooks": [{"hookName": "never", "path": "/x"}]}, "hook 'never'"),
        ({"deviceNodes": ["/dev/a"]}, "deviceNodes has str instead of a mapping"),
        ({"mounts": 5}, "mounts is int instead of a list"),
        ([], "no container edits"),
    ],
)
def test_container_edits_unsupported_content_is_rejected(written: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ContainerEdits.from_dict(written)


def test_write_spec_round_trips_on_disk(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    path = cdi.spec_path("/var/run/cdi/", KIND, "11-22")
    assert path == "/var/run/cdi/k8s.gpu.nvidia.com-claim_11-22.json"
    spec = cdi.build_spec(KIND, {"11-22-gpu-0": NODE})
    cdi.write_spec(system, path, spec)
    assert json.loads((tmp_path / path[1:]).read_text()) == spec
    common = ContainerEdits(env=("A=\u00e4",), mounts=(cdi.Mount("/lib/a.so", "/lib/a.so"),))
    for edits in (common, ContainerEdits()):
        spec = cdi.build_spec(KIND, {"11-22-gpu-0": NODE}, edits, {"note": "x"})
        cdi.write_spec(system, path, spec, edits)
        assert (tmp_path / path[1:]).read_text() == json.dumps(spec) + "\n"
    (tmp_path / "var/run/cdi/nvidia.yaml").write_text("")
    (tmp_path / "var/run/cdi/k8s.gpu.nvidia.com-other_x.json").write_text("")
    assert cdi.list_specs(system, "/var/run/cdi", KIND) == ("11-22",)
    assert cdi.remove_spec(system, path) and not cdi.remove_spec(system, path)
    assert cdi.list_specs(system, "/var/run/cdi", KIND) == ()
    assert cdi.list_specs(system, "/nowhere", KIND) == ()


def test_write_spec_is_atomic_and_failure_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(str(tmp_path))
    system.write_atomic("/cdi/a.json", b"old", mode=0o640)
    assert (tmp_path / "cdi/a.json").stat().st_mode & 0o777 == 0o640
    seen: list[str] = []

    def failing(_source: str, target: str) -> None:
        seen.extend(path.name for path in Path(target).parent.iterdir())
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no space"):
        system.write_atomic("/cdi/a.json", b"new")
    assert (tmp_path / "cdi/a.json").read_bytes() == b"old"
    assert [path.name for path in (tmp_path / "cdi").iterdir()] == ["a.json"]
    temporary = [name for name in seen if name != "a.json"]
    assert len(temporary) == 1 and not temporary[0].endswith((".json", ".yaml"))
