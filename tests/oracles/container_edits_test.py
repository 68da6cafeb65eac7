# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare nvidia-ctk with our own container edits, item by item, on a node with Debian's packages of NVIDIA's user
space.

The simulator provides the kernel's part and libnvidia-ml, because the real library calls a kernel module. Every
difference is in EXPLAINED, with the wording of docs/container-edits.md. An unused explanation is an error too.
"""

from __future__ import annotations

import json
import posixpath
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from driver_root import COMPUTE, GRAPHICS, driver_root

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/simulator/files"
CURRENT = "/usr/lib/x86_64-linux-gnu/nvidia/current"
SOCKET = "/run/nvidia-persistenced/socket"

#: Differences between nvidia-ctk's list and ours.
EXPLAINED = {
    "env NVIDIA_CTK_LIBCUDA_DIR": "nothing in driver or toolkit reads it",
    "hook create-symlinks": "each name is a separate mount of the library",
    "hook enable-cuda-compat": "a newer CUDA in the image than in the driver needs the toolkit",
    "hook disable-device-node-modification": "the container cannot create device nodes",
    "hook update-application-profile": "the container can open only its devices",
    "permissions rwm": "containers do not create device nodes",
    "fileMode": "The control group restricts which devices a container can open",
}
ON_A_NODE = """
set -eu
mount --make-rprivate /
mkdir -p /var/lib/accelerator-simulator
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib/accelerator-simulator
mkdir /run/layer; mount -t tmpfs tmpfs /run/layer; mkdir /run/layer/above /run/layer/work /run/layer/node
node=/run/layer/node
mount -t overlay overlay -o lowerdir={root},upperdir=/run/layer/above,workdir=/run/layer/work $node
install -m 644 {library}/libnvidia-ml.so.{version} $node{current}/
simulator() {{ PYTHONPATH={files} {python} -c 'import sys; from accelerator_simulator.cli import main; sys.exit(main())' "$@"; }}
simulator --configuration {work}/machine.json --library-folder $node{current} power-on >&2
mkdir -p $node/proc $node/sys $node/dev $node/oracle $node/work
for name in proc sys dev; do mount --rbind /$name $node/$name; done
mount --bind {core} $node/oracle; mount --bind {work} $node/work
[ -z "{ctk}" ] || install -m 755 {ctk} $node/usr/bin/nvidia-ctk
exec chroot $node /usr/bin/python3 -B /work/inside.py
"""
INSIDE = """
import importlib, json, os, socket, subprocess, sys, types
os.makedirs("/run/nvidia-persistenced")
socket.socket(socket.AF_UNIX).bind("/run/nvidia-persistenced/socket")
package = types.ModuleType("core"); package.__path__ = ["/oracle"]; sys.modules["core"] = package
files = importlib.import_module("core.vendors.nvidia.container.driver_files")
common_edits = importlib.import_module("core.vendors.nvidia.container.common_edits")
edits = importlib.import_module("core.vendors.nvidia.container.container_edits")
System = importlib.import_module("core.host.system").System
version = sys.argv[1] if len(sys.argv) > 1 else open("/work/version").read()
system, said = System(), {}
files.create_uvm_nodes(system)
said["ours"] = files.driver_edits(system, version).to_dict()
theirs = ["/usr/bin/nvidia-ctk", "--quiet", "cdi", "generate", "--mode=nvml", "--format=json"]
done = subprocess.run([*theirs, "--nvidia-cdi-hook-path=/usr/bin/nvidia-ctk"], stdout=subprocess.PIPE, check=True)
said["theirs"] = json.loads(done.stdout)
kept = common_edits.CommonEdits(system)
said["first"] = kept.current(version).to_dict()
kept.settle(60)
said["settled"] = kept.current(version).to_dict()
os.unlink("/run/nvidia-persistenced/socket")
said["gone"] = kept.current(version).to_dict()
class Gpu: minor, pci_address = 3, "0000:00:00.0"
said["gpu"] = edits.device_edits(system, Gpu, None).to_dict()
with open("/work/said.json", "w") as file:
    json.dump(said, file)
"""


@dataclass(frozen=True)
class Points:
    """Container edits as separate items."""

    env: frozenset[str]
    nodes: frozenset[tuple[str, int, int]]
    permissions: frozenset[str]
    modes: frozenset[int]
    mounts: frozenset[tuple[str, str, tuple[str, ...]]]
    names: Mapping[str, str]
    hooks: Mapping[str, tuple[str, ...]]


def points(edits: Mapping[str, Any]) -> Points:
    """Return the items of container edits. A library's name from a link or mount is listed with its target."""
    hooks: dict[str, tuple[str, ...]] = {}
    links: dict[str, str] = {}
    for hook in edits.get("hooks", ()):
        assert hook["args"][:2] == ["nvidia-ctk", "hook"] and hook["path"] == "/usr/bin/nvidia-ctk"
        verb, arguments = hook["args"][2], tuple(hook["args"][3:])
        if verb == "create-symlinks":
            for text in arguments[1::2]:
                target, _between, link = text.partition("::")
                links[link] = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
        hooks[verb] = hooks.get(verb, ()) + arguments
    names = {}
    for link, target in links.items():
        while target in links:
            target = links[target]
        names[link] = target
    mounts = set()
    for mount in edits["mounts"]:
        host, inside = mount["hostPath"], mount["containerPath"]
        if ".so" in inside and host != inside:
            names[inside] = host
        else:
            mounts.add((host, inside, tuple(mount["options"])))
    nodes = edits["deviceNodes"]
    return Points(
        env=frozenset(entry.partition("=")[0] for entry in edits["env"]),
        nodes=frozenset((node["path"], node["major"], node.get("minor", 0)) for node in nodes),
        permissions=frozenset(node["permissions"] for node in nodes),
        modes=frozenset(node["fileMode"] for node in nodes if "fileMode" in node),
        mounts=frozenset(mounts),
        names=names,
        hooks=hooks,
    )


def differences(theirs: Points, ours: Points) -> set[str]:
    """Return the differences of the two lists as short descriptions. Library names in our list only are checked
    separately.
    """
    found = {f"env {name}" for name in theirs.env ^ ours.env}
    found |= {f"node {node}" for node in theirs.nodes ^ ours.nodes}
    found |= {f"mount {mount}" for mount in theirs.mounts ^ ours.mounts}
    found |= {f"permissions {each}" for each in theirs.permissions - ours.permissions}
    found |= {"fileMode"} if theirs.modes != ours.modes else set()
    found |= {f"hook {verb}" for verb in set(theirs.hooks) ^ set(ours.hooks)}
    found |= {f"hook {verb}: {theirs.hooks[verb]} {ours.hooks[verb]}" for verb in set(theirs.hooks) & set(ours.hooks)
              if sorted(theirs.hooks[verb]) != sorted(ours.hooks[verb])}  # fmt: skip
    return found | {f"name {name} -> {to}" for name, to in theirs.names.items() if ours.names.get(name) != to}


@pytest.fixture(
    scope="module",
    params=[pytest.param(COMPUTE, id="compute"), pytest.param(GRAPHICS, id="graphics", marks=pytest.mark.prove)],
)
def said(
    request: pytest.FixtureRequest, nvidia_ctk: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return the edits of nvidia-ctk and of our code on the node."""
    root, version = driver_root(request.param)
    work = tmp_path_factory.mktemp("work")
    library = tmp_path_factory.mktemp("library")
    subprocess.run(["make", "-s", "-C", FILES / "nvml", f"OUT={library}", f"DRIVER_VERSION={version}"], check=True)
    machine = {"machine": "8xH100", "identity": "oracle", "driver_version": version}
    (work / "machine.json").write_text(json.dumps(machine))
    (work / "version").write_text(version)
    (work / "inside.py").write_text(INSIDE)
    script = ON_A_NODE.format(
        root=root,
        library=library,
        version=version,
        current=CURRENT,
        files=FILES,
        python="python3",
        work=work,
        core=ROOT / "plugins/module_utils/core",
        ctk=nvidia_ctk,
    )
    run = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, Any]] = json.loads((work / "said.json").read_text())
    return found


def test_container_edits_equal_those_of_nvidia_except_documented_differences(said: dict[str, dict[str, Any]]) -> None:
    theirs, ours = points(said["theirs"]["containerEdits"]), points(said["ours"])
    assert differences(theirs, ours) == set(EXPLAINED)
    # Names in our list only are the host's own names in its loader's directories.
    beyond = {name: to for name, to in ours.names.items() if name not in theirs.names}
    assert beyond and all(to.startswith("/usr/lib/") for to in beyond.values())
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= {posixpath.basename(name) for name in beyond}


def test_docs_contain_every_explanation() -> None:
    page = " ".join((ROOT / "docs/container-edits.md").read_text().split())
    for words in EXPLAINED.values():
        assert words in page


def test_shared_edits_come_from_nvidia_ctk_and_follow_file_changes(
    said: dict[str, dict[str, Any]],
) -> None:
    assert said["first"] == said["ours"]
    theirs = points(said["theirs"]["containerEdits"])
    hooks = {verb: words for verb, words in theirs.hooks.items() if verb != "disable-device-node-modification"}
    assert len(hooks) == len(theirs.hooks) - 1
    assert points(said["settled"]) == replace(theirs, permissions=frozenset({"rw"}), hooks=hooks)
    assert SOCKET in {mount["hostPath"] for mount in said["settled"]["mounts"]}
    assert SOCKET not in {mount["hostPath"] for mount in said["gone"]["mounts"]}


def test_gpu_has_the_device_node_of_nvidia_ctk(said: dict[str, dict[str, Any]]) -> None:
    (theirs,) = (device for device in said["theirs"]["devices"] if device["name"] == "3")
    nodes = theirs["containerEdits"]["deviceNodes"]
    assert [(node["path"], node["major"], node["minor"]) for node in nodes] == [
        (node["path"], node["major"], node["minor"]) for node in said["gpu"]["deviceNodes"]
    ]
