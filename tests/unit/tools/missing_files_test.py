# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Each place where an error could count as "no such file" is listed here: a temporarily unreadable record must not be replaced."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("plugins", "roles")
FACTS = "facts of /proc, /sys, and /dev, which have no state"
#: By file and function, the reason why an error that counts as a missing file loses nothing there.
KNOWN = {
    "plugins/module_utils/_packages/apt.py:_copied": "a copy for one run",
    "plugins/module_utils/_ascend_host/package_installer.py:_entries": "a log of the installer",
    "plugins/module_utils/_ascend_host/package_installer.py:verify": "an error follows",
    "plugins/module_utils/_bundle/archive.py:_members": "not on a node",
    "plugins/module_utils/_bundle/archive.py:is_extracted": "the bundle is unpacked again",
    "plugins/module_utils/_bundle/archive.py:compare_directory": "not on a node",
    "plugins/module_utils/_bundle/archive.py:extract": "the bundle is unpacked again",
    "plugins/module_utils/_bundle/gather.py:_download_wheels": "not on a node",
    "plugins/module_utils/_bundle/gather.py:_copy_file": "not on a node",
    "plugins/module_utils/_bundle/gather.py:is_downloaded": "not on a node",
    "plugins/module_utils/_container_runtime/cdi_spec.py:other_files": "compares kinds, decides nothing about this file",
    "plugins/module_utils/_container_runtime/crio/daemon.py:_paths": "the file is read next, with its error",
    "plugins/module_utils/_container_runtime/crio/daemon.py:running": "an unanswered query counts as unknown",
    "plugins/module_utils/_packages/dnf.py:_drop": "the removal that follows has the error",
    "plugins/module_utils/_host/file_set.py:_is_missing": "the creation that follows has the error",
    "plugins/module_utils/_kubernetes/manifest_files.py:read_all": "not on a node",
    "plugins/module_utils/_host/node_facts.py:is_complete": "the release or environment is created again",
    "plugins/module_utils/_host/node_facts.py:text_of": "facts for a report; the owner of a file reads it again",
    "plugins/module_utils/_packages/argspec.py:verified_files": "an error follows",
    "plugins/module_utils/_container_runtime/config_files.py:_scratch_for": "the temporary file is next to the file",
    "plugins/module_utils/_container_runtime/config_files.py:find_emptied_directories": "the directory stays",
    "plugins/module_utils/_container_runtime/config_files.py:refuse_read_only": "the write that follows has the error",
    "plugins/module_utils/_container_runtime/config_files.py:remove_folder": "the directory stays",
    "plugins/module_utils/_driver_service/leftovers.py:names_in": "the directory stays",
    "plugins/module_utils/_driver_service/leftovers.py:store_is_ours": "the store stays",
    "plugins/module_utils/_host/systemd_unit.py:_start_time": FACTS,
    "plugins/module_utils/_host/systemd_unit.py:_start_ticks": FACTS,
    "plugins/module_utils/_host/systemd_unit.py:command_line": FACTS,
    "plugins/module_utils/_host/vendor_detection.py:character_drivers": FACTS,
    "plugins/module_utils/_host/vendor_detection.py:_known_group": FACTS,
    "plugins/module_utils/_packages/zypper.py:_refresh_view": "a view for one run",
    "plugins/module_utils/core/vendors/host_texts.py:text_or_empty": "facts of the kernel and of the vendors' drivers",
    "plugins/module_utils/core/vendors/ascend/recovery.py:describe_unrestored": "the layout is applied without a wait",
    "plugins/module_utils/core/vendors/ascend/health/watch.py:_stamp": "the file is read again",
    "plugins/module_utils/core/host/cdi.py:_is_valid_file": "the driver writes the file of a claim again",
    "plugins/module_utils/core/discovery/device_locks.py:_is_current": "the lock is taken again",
    "plugins/module_utils/core/vendors/nvidia/generations.py:bus_gpus": FACTS,
    "plugins/module_utils/core/vendors/nvidia/fabric/fabric_process.py:_is_first_process": FACTS,
    "plugins/module_utils/core/vendors/nvidia/fabric/nvswitch.py:_manages_switches": FACTS,
    "plugins/module_utils/core/host/device_users.py:_process_name": FACTS,
    "plugins/module_utils/core/host/device_users.py:_has_open": FACTS,
    "plugins/module_utils/core/host/device_users.py:_may_read_open_files": FACTS,
    "plugins/module_utils/core/host/device_users.py:_has_ptrace_capability": FACTS,
    "plugins/module_utils/core/host/device_users.py:find_file_users": FACTS,
    "plugins/module_utils/core/host/pci.py:_read_attribute": FACTS,
    "plugins/module_utils/core/host/pci.py:numa_node": FACTS,
    "plugins/module_utils/core/host/kubelet_pods.py:pod_of_process": FACTS,
    "plugins/module_utils/core/host/kubelet_pods.py:unit_of_process": FACTS,
    "plugins/module_utils/core/settings/settings_record.py:devices_with_settings": "the record stays; its values are set again the next time",
    "plugins/module_utils/core/host/kubelet_pods.py:pods_of_claims": "names of pods for messages",
    "plugins/module_utils/core/store/prepared_claims.py:wake_driver": FACTS,
    "plugins/module_utils/core/repartition/progress.py:steps": "steps for Events decide nothing",
    "plugins/module_utils/core/host/file_reads.py:device_number": FACTS,
    "plugins/module_utils/core/host/file_reads.py:inode": "the next scan reads it again",
    "plugins/modules/ascend_runtime.py:remove_empty": "the directory stays",
    "plugins/modules/bundle_create.py:read_archive": "not on a node",
    "plugins/modules/bundle_extract.py:previous_manifest": "the bundle is unpacked again",
    "plugins/modules/device_plugin_leftovers.py:is_served": "the socket stays",
    "plugins/modules/device_plugin_leftovers.py:work": "the sockets stay",
    "plugins/modules/fleet_plan.py:write_dest": "an error follows",
    "plugins/modules/node_driver.py:age": FACTS,
    "plugins/modules/node_driver.py:digest": "compares with the digest of the running driver",
    "plugins/modules/node_driver.py:remove": "the removal that follows has the error",
    "plugins/modules/node_driver.py:fingerprint_of": FACTS,
    "roles/dra_driver/files/dra_driver/api/kubeconfig.py:_service_account": "an error follows",
    "roles/dra_driver/files/dra_driver/claims/companion_services.py:has_separate_pid_namespace": FACTS,
    "roles/dra_driver/files/dra_driver/claims/store/files.py:_write_new_store": "the new store stays",
    "roles/dra_driver/files/dra_driver/claims/store/files.py:_is_btrfs": "the file is unchanged; a full disk is reported by the write",
    "roles/dra_driver/files/dra_driver/claims/store/files.py:refuse_full_disk": "the write that follows has the error",
    "roles/dra_driver/files/dra_driver/claims/store/files.py:reserve_log": "the log is reserved later",
    "roles/dra_driver/files/dra_driver/kubelet/sockets.py:identity_of": "the socket stays",
    "roles/dra_driver/files/dra_driver/kubelet/sockets.py:status_paths": "sockets for a report",
    "roles/dra_driver/files/dra_driver/machine.py:delete_file": "the deletion that follows has the error",
    "roles/dra_driver/files/dra_driver/machine.py:delete_state": "the deletion that follows has the error",
    "roles/dra_driver/files/dra_driver/pod.py:change_root": "a mount of the pod",
    "roles/dra_driver/files/dra_driver/run.py:main": "directories of the release",
    "roles/dra_driver/files/dra_driver/supervisors/status.py:run": "the socket is served again",
    "roles/dra_driver/files/dra_driver/supervisors/active_instance.py:was_handed_over": "the lock decides which instance serves",
    "roles/dra_driver/files/pod_status.py:read_status": "the query is repeated",
    "roles/python_environment/files/pack_release.py:collection_version": "not on a node",
    "roles/python_environment/files/pack_release.py:members": "not on a node",
}
EMPTY = ("None", "False", "True", "()", "[]", "{}", "0", "0.0", "''", "b''", "set()", "frozenset()")


def asks_for_a_file(call: ast.Call) -> bool:
    """Return whether a call is ``Path.exists()``, ``os.path.exists(path)``, or similar: from Python 3.14 on, these calls raise no errors."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    if ast.unparse(call.func.value) == "os.path":
        return name in ("exists", "lexists", "isfile", "isdir")
    return name in ("exists", "is_file", "is_dir") and not call.args and not call.keywords


def drops_error(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler of OSError only returns nothing, continues, or passes."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    if not {ast.unparse(each) for each in caught if each} & {"OSError", "PermissionError", "Exception"}:
        return False
    first, *others = handler.body
    if others:
        return False
    if isinstance(first, ast.Return):
        return first.value is None or ast.unparse(first.value) in EMPTY
    return isinstance(first, (ast.Pass, ast.Continue))


def places(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the function of each such call and handler."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if (isinstance(node, ast.Call) and asks_for_a_file(node)) or (
            isinstance(node, ast.ExceptHandler) and drops_error(node)
        ):
            yield function
        yield from places(node, inner)


def test_error_that_counts_as_a_missing_file_is_a_known_one() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{function}"
        for directory in FOLDERS
        for path in sorted((ROOT / directory).rglob("*.py"))
        if "simulator" not in path.parts
        for function in places(ast.parse(path.read_text("utf-8")))
    }
    new = found - set(KNOWN)
    assert not new, f"use System.exists or path_exists, or say in KNOWN why the error loses nothing: {sorted(new)}"
    assert not set(KNOWN) - found, "these places no longer exist: remove them from KNOWN"
