# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Each rename in product code is listed here, because a rename without a sync can leave an empty file after a power cut."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("plugins", "roles")
#: By file and function, the reason why the rename is safe.
KNOWN = {
    "plugins/module_utils/core/host/file_writes.py:write_atomic": "syncs file and directory",
    "plugins/module_utils/core/host/file_writes.py:move": "syncs file and directories",
    "plugins/module_utils/_host/file_writer.py:_make_link": "a link has no data; its caller syncs the directory",
    "plugins/module_utils/_bundle/archive.py:write": "not on a node",
    "plugins/module_utils/_bundle/archive.py:extract": "is_extracted compares all files with the manifest",
    "plugins/module_utils/_bundle/gather.py:_copy_file": "not on a node",
    "plugins/module_utils/_packages/zypper.py:download": "the package store syncs",
    "plugins/module_utils/core/vendors/ascend/dcmi/helper_server.py:_listen": "a socket",
    "roles/python_environment/files/stamp.py:write_stamp": "syncs file and directory",
    "roles/dra_driver/files/dra_driver/claims/store/files.py:_put_in_place": "syncs the directory",
    "roles/dra_driver/files/dra_driver/claims/store/files.py:replace_older_form": "syncs the directory",
    "roles/dra_driver/files/dra_driver/claims/store/files.py:set_aside": "a copy of a damaged store",
    "roles/dra_driver/files/dra_driver/kubelet/sockets.py:move_to_path": "a socket",
    "roles/dra_driver/files/dra_driver/commands/collect.py:collect": "a support bundle is no state",
}


def renames(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the function of each call that renames a file: ``rename``, ``atomic_move``, ``os.replace``, ``shutil.move``, ``Path.replace``."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            name, count = node.func.attr, len(node.args)
            if (
                name in ("rename", "renames", "atomic_move")
                or (module, name) in (("os", "replace"), ("shutil", "move"))
                or (
                    name == "replace" and count == 1 and not node.keywords and module not in ("dataclasses", "datetime")
                )
            ):
                yield function
        yield from renames(node, inner)


def test_rename_is_a_known_one() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{function}"
        for directory in FOLDERS
        for path in sorted((ROOT / directory).rglob("*.py"))
        if "simulator" not in path.parts
        for function in renames(ast.parse(path.read_text("utf-8")))
    }
    new = found - set(KNOWN)
    assert not new, f"use System.write_atomic or System.move, or say in KNOWN why the rename is safe: {sorted(new)}"
    assert not set(KNOWN) - found, "these renames no longer exist: remove them from KNOWN"
