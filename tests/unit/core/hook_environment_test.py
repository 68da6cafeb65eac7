# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Every CDI hook has an environment: without one, a runtime runs it as root with the variables of the container image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dra_driver.core.host.cdi import (
    HOOK_ENVIRONMENT,
    ContainerEdits,
    Hook,
    build_spec,
    list_invalid_specs,
    repair_hooks,
    spec_path,
    validate_spec,
    write_spec,
)
from dra_driver.core.host.system import Completed, System
from dra_driver.core.vendors.nvidia.container import container_toolkit
from dra_driver.core.vendors.nvidia.container.driver_files import HOOK_PROGRAMS, driver_edits
from hypothesis import given
from hypothesis import strategies as st
from node_model import FOLDER, VERSION, Node

KIND = "k8s.gpu.nvidia.com/claim"
STRINGS = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=10)
PATHS = st.from_regex(r"/[a-z0-9.]{0,3}[a-z0-9]", fullmatch=True)
HOOKS = st.fixed_dictionaries(
    {
        "hookName": st.sampled_from(["prestart", "createRuntime", "createContainer", "startContainer"]),
        "path": PATHS,
    },
    optional={
        "args": st.lists(STRINGS, max_size=3),
        "env": st.lists(STRINGS.map("A={}".format), max_size=2) | st.none(),
        "timeout": st.integers(1, 60),
    },
)


def hooks_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    edits = [spec.get("containerEdits") or {}, *(device["containerEdits"] for device in spec["devices"])]
    return [hook for each in edits for hook in each.get("hooks", ())]


def nvidia_ctk(system: Node, hooks: list[dict[str, Any]]) -> ContainerEdits:
    """Return the edits that nvidia-ctk reports with these hooks."""
    mounts = [
        {"hostPath": path, "containerPath": path, "options": ["ro"]}
        for path in (f"{FOLDER}/libcuda.so.{VERSION}", f"{FOLDER}/libnvidia-ml.so.{VERSION}")
    ]
    document = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [],
        "containerEdits": {"mounts": mounts, "hooks": hooks},
    }
    system.answers = [Completed(0, json.dumps(document), "")]
    return container_toolkit.common_edits(system, VERSION)


@pytest.fixture
def system(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.driver()
    return node


@pytest.mark.parametrize("program", [path for path, _arguments in HOOK_PROGRAMS])
def test_driver_files_hook_has_environment(tmp_path: Path, program: str) -> None:
    node = Node(tmp_path)
    node.driver()
    node.file(program)
    (hook,) = driver_edits(node, VERSION).hooks
    assert hook.path == program and hook.env == HOOK_ENVIRONMENT


def test_nvidia_ctk_before_1_17_8_hooks_get_environment(system: Node) -> None:
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk", "args": ["nvidia-ctk", "hook", "chmod"]}
    edits = nvidia_ctk(system, [hook, {**hook, "env": []}, {**hook, "env": ["NVIDIA_CTK_DEBUG=false"]}])
    assert [each.env for each in edits.hooks] == [HOOK_ENVIRONMENT, HOOK_ENVIRONMENT, ("NVIDIA_CTK_DEBUG=false",)]


@given(st.lists(HOOKS, max_size=4), st.lists(HOOKS, max_size=4))
def test_written_spec_every_hook_has_environment(of_device: list[dict[str, Any]], common: list[dict[str, Any]]) -> None:
    node = {"deviceNodes": [{"path": "/dev/nvidia0"}]}
    edits = [ContainerEdits.from_dict({**node, "hooks": hooks}) for hooks in (of_device, common)]
    spec = build_spec(KIND, {"gpu": ContainerEdits.merge(*edits)}, edits[1])
    assert all(hook["env"] for hook in hooks_of(spec))
    assert all(hook["env"] for hook in hooks_of(build_spec(KIND, {"gpu": edits[0]}, edits[1])))


@pytest.mark.parametrize("environment", [{}, {"env": []}, {"env": None}])
def test_validate_spec_hook_without_environment_is_rejected(environment: dict[str, Any]) -> None:
    hook = {"hookName": "createContainer", "path": "/usr/bin/tool", **environment}
    device = {"name": "gpu", "containerEdits": {"hooks": [hook]}}
    with pytest.raises(ValueError, match=r"/usr/bin/tool\) has no environment.*Set env"):
        validate_spec({"cdiVersion": "1.0.0", "kind": KIND, "devices": [device]})
    with pytest.raises(ValueError, match="has no environment"):
        build_spec(KIND, {"gpu": ContainerEdits(hooks=(Hook("createContainer", "/usr/bin/tool", env=()),))})


def test_validate_spec_hook_environment_without_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="NAME=value"):
        build_spec(KIND, {"gpu": ContainerEdits(hooks=(Hook("createContainer", "/x", env=("PATH",)),))})


@pytest.mark.parametrize(
    "edits",
    [
        {"mounts": [{"hostPath": "../../etc", "containerPath": "/x"}]},
        {"mounts": [{"hostPath": "/a/../../etc", "containerPath": "/x"}]},
        {"mounts": [{"hostPath": "/a", "containerPath": "/x/../y"}]},
        {"mounts": [{"hostPath": "/a\nb", "containerPath": "/x"}]},
        {"deviceNodes": [{"path": "/dev/../etc"}]},
        {"deviceNodes": [{"path": "/dev/a", "hostPath": "dev/a"}]},
        {"hooks": [{"hookName": "createContainer", "path": "/usr/../tmp/x"}]},
        {"env": ["A=\0b"]},
    ],
)
def test_container_edits_path_or_variable_that_misleads_is_rejected(edits: dict[str, Any]) -> None:
    """Output of a hostile tool: paths in CDI edits have to be absolute and without ".."."""
    with pytest.raises(ValueError, match=r"without '\.\.'|absolute path|NUL"):
        ContainerEdits.from_dict(edits)


def test_list_invalid_specs_names_files_of_earlier_releases(tmp_path: Path) -> None:
    system = Node(tmp_path)
    spec = build_spec(KIND, {"gpu": ContainerEdits(hooks=(Hook("createContainer", "/x"),))})
    for uid in ("valid", "without-environment", "truncated", "list"):
        write_spec(system, spec_path("/cdi", KIND, uid), spec)
    del spec["devices"][0]["containerEdits"]["hooks"][0]["env"]
    write_spec(system, spec_path("/cdi", KIND, "without-environment"), spec)
    system.file(spec_path("/cdi", KIND, "truncated"), '{"cdiVersion": "0.3')
    system.file(spec_path("/cdi", KIND, "list"), "[]")
    assert set(list_invalid_specs(system, "/cdi", KIND)) == {"without-environment", "truncated", "list"}


def test_file_that_cannot_be_repaired_leaves_no_other_hook_without_environment(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook"}
    spec = {"cdiVersion": "0.5.0", "kind": KIND, "devices": [{"name": "d", "containerEdits": {"hooks": [hook]}}]}
    for uid in ("a", "b", "c"):
        write_spec(system, spec_path("/cdi", KIND, uid), spec)
    for uid in ("a", "b"):
        broken = system.path(spec_path("/cdi", KIND, uid))
        broken.unlink()
        broken.mkdir()  # reading it fails, as with a disk error
    with pytest.raises(OSError, match="Is a directory"):
        repair_hooks(system, "/cdi", KIND)
    (repaired,) = hooks_of(json.loads(system.read_text(spec_path("/cdi", KIND, "c"))))
    assert repaired["env"] == list(HOOK_ENVIRONMENT)
