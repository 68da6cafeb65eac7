# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare the module cdi_spec with nvidia-ctk on the same simulated node: same devices and names, and each container
edit.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from nvidia_ctk_test import generated

# The module searches libraries at a node's paths, so the test replaces these.
OURS = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
files = importlib.import_module("ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.container.driver_files")
files.LIBRARY_FOLDERS = (sys.argv[1],)
module = importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.cdi_spec")
with patch_module_args({"vendor": ["nvidia"], "directory": sys.argv[2]}):
    module.main()
"""

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


#: Explained differences of a device in nvidia-ctk's output, with the wording of docs/container-edits.md. An unused
#: explanation is an error.
EXPLAINED = {
    "permissions of /dev/nvidia#: rwm, ours rw": "containers do not create device nodes",
    "permissions of /dev/nvidia-caps/nvidia-cap#: rwm, ours r": "read access to a capability node grants the capability",
    "fileMode of /dev/nvidia#: 0o666, ours none": "The control group restricts which devices a container can open",
    "fileMode of /dev/nvidia-caps/nvidia-cap#: 0o444, ours none": "The control group restricts which devices a container can open",
    "type of /dev/nvidia#: none, ours c": "without a type the runtime reads the node on the host",
    "type of /dev/nvidia-caps/nvidia-cap#: none, ours c": "without a type the runtime reads the node on the host",
    "hook apply-cuda-memory-limits": "the claim's configuration sets memory limits",
}
#: The same for the common edits of all devices. Additional names of a library are links of a hook there, and mounts
#: here.
EXPLAINED_OF_ALL = {
    "permissions of *: rwm, ours rw": "containers do not create device nodes",
    "fileMode of *: 0o666, ours none": "The control group restricts which devices a container can open",
    "type of *: none, ours c": "without a type the runtime reads the node on the host",
    "env NVIDIA_CTK_LIBCUDA_DIR": "nothing in driver or toolkit reads it",
    "hook create-symlinks": "each name is a separate mount of the library",
    "hook enable-cuda-compat": "a newer CUDA in the image than in the driver needs the toolkit",
    "hook disable-device-node-modification": "the container cannot create device nodes",
    "hook update-application-profile": "the container can open only its devices",
    "hook update-ldcache": "which both sources use if it is installed",
}


def nodes(edits: Json) -> set[str]:
    return {one["path"] for one in edits.get("deviceNodes", ())}


def verb_of(hook: Json) -> str:
    """Return the command of a toolkit hook."""
    words: list[str] = [word for word in hook["args"][1:] if word != "hook"]
    return words[0]


def differences(theirs: Json, ours: Json, *, shared: bool = False) -> set[str]:
    """Return the differences of two edits as short descriptions. Node numbers count as one, as do the shared nodes."""
    kinds = {"deviceNodes", "hooks", "env", "mounts"}
    found = {f"edits of the kind {kind}" for kind in (set(theirs) | set(ours)) - kinds}
    mine, other = ({one["path"]: one for one in each.get("deviceNodes", ())} for each in (ours, theirs))
    found |= {f"node {path}" for path in set(mine) ^ set(other)}
    for path in set(mine) & set(other):
        title = "*" if shared else re.sub(r"[0-9]+$", "#", path)
        one, two = ({"minor": 0, **each[path]} for each in (other, mine))
        for key in sorted((set(one) | set(two)) - {"path"}):
            if one.get(key) != two.get(key):
                said = [
                    oct(each[key]) if key == "fileMode" and key in each else each.get(key, "none")
                    for each in (one, two)
                ]
                found.add(f"{key} of {title}: {said[0]}, ours {said[1]}")
    verbs = [{verb_of(hook) for hook in each.get("hooks", ())} for each in (theirs, ours)]
    found |= {f"hook {verb}" for verb in verbs[0] ^ verbs[1]}
    found |= {f"env {entry.partition('=')[0]}" for entry in set(theirs.get("env", ())) ^ set(ours.get("env", ()))}
    return found | {f"mount {each}" for each in mounts(theirs) ^ mounts(ours)}


def mounts(edits: Json) -> set[tuple[str, str, tuple[str, ...]]]:
    """Return mounts of files at their own paths. Mounts of a library at another name replace a hook's link."""
    return {
        (one["hostPath"], one["containerPath"], tuple(one["options"]))
        for one in edits.get("mounts", ())
        if one["hostPath"] == one["containerPath"] or ".so" not in one["containerPath"]
    }


def names(edits: Json) -> dict[str, str]:
    """Return the additional names of libraries, from mounts or links, with their target files."""
    found = {
        one["containerPath"]: one["hostPath"]
        for one in edits.get("mounts", ())
        if one["hostPath"] != one["containerPath"]
    }
    links = {}
    for hook in edits.get("hooks", ()):
        if verb_of(hook) == "create-symlinks":
            for text in hook["args"]:
                target, between, link = text.partition("::")
                if between:
                    links[link] = f"{link.rpartition('/')[0]}/{target}"
    for link, first in links.items():
        target = first
        while target in links:
            target = links[target]
        found[link] = target
    return found


def test_each_device_has_the_edits_of_nvidia_except_documented_differences(
    nvidia_ctk: Path, library: Path, tmp_path: Path
) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    ours = f"{sys.executable} {tmp_path / 'ours.py'} {library} {tmp_path / 'cdi'}"
    # The module prints its failures to standard output.
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
    # The module names partitions by their index, nvidia-ctk by the library's order. By UUID they are the same.
    counted = {name for name in mine if ":" in name}
    assert len(counted) == 3
    # A partition's device nodes identify it, so they match its entries in both files.
    by_nodes = {frozenset(nodes(mine[name])): mine[name] for name in counted}
    assert {frozenset(nodes(other[name])) for name in counted} == set(by_nodes)
    beside = {
        name: by_nodes[frozenset(nodes(edits))] if name in counted else mine[name] for name, edits in other.items()
    }
    found = {name: differences(edits, beside[name]) for name, edits in other.items()}
    assert set().union(*found.values()) == set(EXPLAINED)
    partitions = {name for name in found if name in counted or name.startswith("MIG-")}
    of_memory = "hook apply-cuda-memory-limits"
    assert all((of_memory in found[name]) == (name not in partitions) for name in found)
    theirs_all, mine_all = theirs["containerEdits"], written["containerEdits"]
    assert differences(theirs_all, mine_all, shared=True) == set(EXPLAINED_OF_ALL)
    further = names(theirs_all)
    assert further and {name: names(mine_all).get(name) for name in further} == further


def test_docs_contain_every_explanation() -> None:
    page = " ".join((ROOT / "docs/container-edits.md").read_text("utf-8").split())
    assert not [words for words in (*EXPLAINED.values(), *EXPLAINED_OF_ALL.values()) if words not in page]
