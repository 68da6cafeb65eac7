# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Break the product on purpose, one place after the other, and require a failing test each time.

It works in a temporary copy of the checkout. First the named tests have to pass with the unchanged product. Then each
break is made alone, and at least one of its tests has to fail. A test that still passes would not find that fault in
the product either.

usage: break_product.py [--list] [--check] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from steps import ROOT, print_lines

DRIVER = "roles/dra_driver/files/dra_driver"
CORE = "plugins/module_utils/core"
ASCEND = f"{CORE}/vendors/ascend"
NVML = "roles/simulator/files/nvml"
DCMI = "roles/simulator/files/dcmi"
#: One scenario of the backend on the simulated library, by its name.
ON_DCMI = "tests/simulator/backend/ascend_test.py::test_on_dcmi[{}]"
PLUGIN_TEST = "tests/unit/dra_driver/device_plugin_test.py"
FORMS_TEST = "tests/unit/dra_driver/store_schema_test.py"


@dataclass(frozen=True)
class Break:
    """A change of one file that breaks the product."""

    name: str
    #: The wrong behavior of the broken product.
    fault: str
    file: str
    #: A text that occurs once in the file, and its replacement.
    text: str
    replacement: str
    #: At least one of these tests has to fail.
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str:
        """Return why this break cannot be made in a checkout, or ""."""
        path = root / self.file
        found = path.read_text(encoding="utf-8").count(self.text) if path.is_file() else 0
        missing = [each for each in self.tests if not _exists(root, each)]
        if found != 1:
            return f"{self.file} contains the text of {self.name} {found} times, expected once: update the list in break_product.py"
        return f"{self.name} names {', '.join(missing)}, which does not exist" if missing else ""


def _exists(root: Path, test: str) -> bool:
    file, _colons, name = test.partition("::")
    name = name.partition("[")[0]  # without its parameters
    path = root / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))


BREAKS = (
    Break(
        "same-device-twice",
        "a device that another claim holds is prepared for the next claim",
        f"{DRIVER}/claims/plan.py",
        "    if set(one.device_uuids).isdisjoint(other.device_uuids):\n        return False\n",
        "    if not set(one.device_uuids).isdisjoint(other.device_uuids):\n        return False\n",
        ("tests/unit/dra_driver/service_test.py::test_prepare_overlap_is_rejected_with_the_other_claim",),
    ),
    Break(
        "both-ways",
        "devices are offered by the device plugin while they are published for claims",
        f"{DRIVER}/supervisors/interface_change.py",
        '                await self._api.delete_slice(item["metadata"]["name"])\n',
        "                pass\n",
        (f"{PLUGIN_TEST}::test_device_plugin_deletes_slices_before_it_offers_devices",),
    ),
    Break(
        "plugin-forgets-claims",
        "a device that a claim has is offered to pods without a claim",
        f"{CORE}/dra/device_plugin_model.py",
        "        if device.uuid in held:\n            continue\n",
        "",
        (f"{PLUGIN_TEST}::test_device_plugin_deletes_slices_before_it_offers_devices",),
    ),
    Break(
        "claims-forget-plugin",
        "devices are published for claims while containers use them through the device plugin",
        f"{DRIVER}/supervisors/interface_change.py",
        "        if held:\n            holders",
        "        if not held:\n            holders",
        (f"{PLUGIN_TEST}::test_device_plugin_device_in_use_blocks_publication",),
    ),
    Break(
        "half-prepared",
        "recovery does not complete or undo half-prepared claims",
        f"{DRIVER}/claims/startup_recovery.py",
        "        if not record.prepared:\n            undo.append(record.uid)\n",
        "        if not record.prepared:\n            continue\n",
        ("tests/unit/dra_driver/recovery_test.py::test_recovery_killed_at_each_stage_of_prepare",),
    ),
    Break(
        "restart-forgets",
        "claims count as complete after a reboot, although their partitions no longer exist",
        f"{DRIVER}/claims/startup_recovery.py",
        "    if record.boot_id != boot_id or (record.devices and record.uid not in cdi_uids):\n        return True\n",
        "    if record.devices and record.uid not in cdi_uids:\n        return False\n",
        (
            "tests/unit/dra_driver/recovery_test.py::test_recovery_killed_at_each_stage_of_prepare",
            "tests/unit/dra_driver/recovery_test.py::test_recovery_static_partition_is_restored_with_the_layout",
        ),
    ),
    Break(
        "store-empty",
        "a rebuilt store lacks the claims",
        f"{DRIVER}/claims/store/tables.py",
        "    for record in content.claims.values():\n        write(connection, Change(put=record), {})\n",
        "",
        ("tests/unit/dra_driver/store_rebuild_test.py::test_rebuild_on_a_failing_disk_is_complete_or_absent",),
    ),
    Break(
        "store-hangs",
        "a change that cannot be written is never answered",
        f"{DRIVER}/claims/store/store.py",
        '                self._notify_callers(group, StoreError(f"The store {self.path} could not write a change: {error!r}"))\n',
        "",
        ("tests/unit/dra_driver/store_writing_test.py::test_unserializable_change_fails_alone",),
    ),
    Break(
        "store-disk",
        "a prepare is answered before the record of its claim is on disk",
        f"{DRIVER}/claims/store/store.py",
        "        unsynced = [] if wait_for_sync else [pending for pending in group if pending.change.durable]\n",
        "        unsynced: list[PendingChange] = []\n",
        (
            "tests/unit/dra_driver/store_begin_test.py::test_begin_change_is_visible_at_once_and_done_when_on_disk",
            "tests/unit/dra_driver/service_test.py::test_one_prepare_costs_one_read_and_one_commit_for_each_transition",
        ),
    ),
    Break(
        "store-rows",
        "the rows of a claim's previous devices stay after it gets other devices",
        f"{DRIVER}/claims/store/tables.py",
        "previous is not None and _index_values(record) == _index_values(previous)",
        "previous is not None",
        ("tests/unit/dra_driver/store_begin_test.py::test_tables_equal_memory_after_any_changes",),
    ),
    Break(
        "turned-bit",
        "a previous value with a changed bit is accepted",
        f"{DRIVER}/claims/store/schema.py",
        '        if not has_valid_checksum(row["checksum"], row["key"], row["value"]):\n',
        '        if not row["checksum"]:\n',
        (f"{FORMS_TEST}::test_open_changed_row_is_damage_and_other_rows_are_sound",),
    ),
    Break(
        "no-way-back",
        "data of the previous release counts as damaged",
        f"{CORE}/store/prepared_claims.py",
        "found in (NO_CHECKSUM, checksum(*texts))",
        "found == checksum(*texts)",
        (f"{FORMS_TEST}::test_downgrade_and_upgrade_keep_the_store_usable",),
    ),
    Break(
        "foreign-socket",
        "a socket that another program serves is removed",
        f"{DRIVER}/kubelet/sockets.py",
        "    if server is not None:\n        raise SocketError(",
        "    if server == path:\n        raise SocketError(",
        (
            "tests/unit/dra_driver/kubelet_server_test.py::test_start_with_a_served_socket_keeps_it_and_names_the_process",
        ),
    ),
    Break(
        "asks-for-ever",
        "an instance that has handed over requests a hand-over again after its restart",
        f"{DRIVER}/vendor.py",
        "is_active, takes_over = await instance_lock.acquire_or_wait_for_disk(), not instance_lock.was_handed_over\n",
        "is_active, takes_over = await instance_lock.acquire_or_wait_for_disk(), True\n",
        ("tests/unit/dra_driver/active_instance_test.py::test_standby_instance_serves_again_without_a_request",),
    ),
    Break(
        "takes-over-blindly",
        "an instance that cannot serve takes over from one that serves",
        f"{DRIVER}/vendor.py",
        "                await self._serving.check_can_serve()\n                break\n",
        "                break\n",
        (
            "tests/unit/dra_driver/active_instance_test.py::test_failed_instance_requests_no_handover_and_serves_when_needed",
        ),
    ),
    Break(
        "write-storm",
        "the publisher does not wait as long as the API server asks for",
        f"{DRIVER}/publish/publish_plan.py",
        "    return replace(found, retry_at=now + retry_after) if retry_after is not None else found\n",
        "    return found\n",
        ("tests/unit/dra_driver/publish_plan_test.py::test_throttled_server_gets_no_requests_until_its_retry_after",),
    ),
    Break(
        "generation",
        "slices of a pool are rewritten with the old generation",
        f"{CORE}/dra/resource_slices.py",
        "newest = max((int(",
        "newest = min((int(",
        (
            "tests/unit/core/resource_slices_test.py::test_plan_pool_any_history_converges",
            "tests/unit/core/resource_slices_test.py::test_plan_pool_removes_orphaned_slices",
        ),
    ),
    Break(
        "static-in-use",
        "a layout change destroys partitions that processes or claims hold",
        f"{CORE}/partitioning/layout_plan.py",
        "    if blockers and refuse:\n        raise _in_use(device, rule, blockers)\n    return LayoutPlan(",
        "    if blockers and not refuse:\n        raise _in_use(device, rule, blockers)\n    return LayoutPlan(",
        ("tests/unit/core/layout_plan_test.py::test_plan_layout_claim_on_needed_partition_is_named",),
    ),
    Break(
        "edits-frozen",
        "container edits are not updated after changes on the disk",
        f"{CORE}/vendors/nvidia/container/common_edits.py",
        "return generated.driver_version == driver_version and fingerprint == generated.fingerprint",
        "return generated.driver_version == driver_version",
        ("tests/unit/core/common_edits_test.py::test_common_edits_missing_socket_is_not_mounted",),
    ),
    Break(
        "wrong-device-reported",
        "metrics attribute a partition's claim to the whole device",
        f"{DRIVER}/monitoring/view.py",
        '            return self.device.partition_uuid or ""\n',
        "            return self.device.device_uuid\n",
        ("tests/unit/dra_driver/monitoring_test.py::test_claim_is_attributed_while_it_is_prepared",),
    ),
    Break(
        "secret-in-bundle",
        "the support bundle contains the node's token",
        f"{DRIVER}/commands/collect.py",
        "                data = redact(text, secrets).encode(",
        "                data = text.encode(",
        ("tests/unit/dra_driver/diagnostic_commands_test.py::test_collect_archive_has_all_files_and_no_secret",),
    ),
    Break(
        "ends-unseen",
        "a fault of a device ends with the first scan that does not find it",
        f"{CORE}/health/tracker.py",
        "        if moment.clock - well_since < VERIFY_SECONDS:\n",
        "        if moment.clock < well_since:\n",
        ("tests/unit/core/health_tracker_test.py::test_tracker_fault_end_is_verified",),
    ),
    Break(
        "evicts-for-a-moment",
        "pods are evicted for a fault that only one scan has found",
        f"{CORE}/health/tracker.py",
        '        return "NoSchedule" if effect == "NoExecute" and not self.is_confirmed else effect\n',
        "        return effect\n",
        ("tests/unit/core/health_tracker_test.py::test_tracker_evicts_only_after_second_scan",),
    ),
    Break(
        "wrong-capability",
        "a container gets the capability nodes of another partition",
        f"{CORE}/vendors/nvidia/container/container_edits.py",
        "_CAPABILITIES_OF_INSTANCE = 9\n",
        "_CAPABILITIES_OF_INSTANCE = 8\n",
        ("tests/unit/core/container_edits_test.py::test_device_edits_partition_capability_nodes_from_proc_or_rule",),
    ),
    Break(
        "drift-at-once",
        "the controller reports a drift after a single observation",
        f"{DRIVER}/controller/drift.py",
        "        result[finding.key] = Drift(finding, since, now - since >= lasting)\n",
        "        result[finding.key] = Drift(finding, since, True)\n",
        ("tests/unit/dra_driver/controller_drift_test.py::test_follow_only_uninterrupted_findings_last",),
    ),
    Break(
        "placements-overlap",
        "the simulated board creates instances with overlapping placements",
        f"{NVML}/mig.c",
        "    if (!placement_free(gpu, start, size) || ",
        "    if (",
        ("tests/simulator/nvml_mig_test.py::test_invalid_placement_and_occupied_placement_have_different_errors",),
    ),
    Break(
        "claims-overruled",
        "settings of the node overwrite the settings of a claim",
        f"{CORE}/settings/settings_plan.py",
        "    if claimed is not None:\n",
        "    if claimed is not None and not claimed.claims:\n",
        ("tests/unit/core/node_settings_test.py::test_plan_settings_process_or_claim_in_use_is_named",),
    ),
    Break(
        "everybody-may",
        "the simulated driver lets every user change a board",
        f"{NVML}/api_modes.c",
        "    WRITE_CALL();\n    call.gpu_write->compute_mode = mode;\n",
        "    call.gpu_write->compute_mode = mode;\n",
        ("tests/simulator/nvml_mig_modes_test.py::test_only_administrators_change_and_list_instances",),
    ),
    Break(
        "whole-beside-slices",
        "a whole NPU is published as if its slices used none of its capacity",
        f"{ASCEND}/offers.py",
        "found.append(_whole(device, counter_set(device).counters))",
        "found.append(_whole(device, {}))",
        ("tests/unit/core/ascend_offers_test.py::test_whole_chip_excludes_all_slices",),
    ),
    Break(
        "foreign-room",
        "the capacity of slices that another program created is offered again",
        f"{ASCEND}/offers.py",
        "    for partition in _adopted(device, owned) if owned is not None else ():\n",
        "    for partition in _adopted(device, owned) if owned is None else ():\n",
        ("tests/unit/core/ascend_offers_test.py::test_foreign_slices_only_fitting_devices_are_offered",),
    ),
    Break(
        "gone-by-word",
        "a slice counts as deleted because the driver reports so, although the chip lists it",
        f"{ASCEND}/slices.py",
        "    failed = _change(remove, lambda now, _error: slice_id not in _ids(now), read)\n",
        "    failed = _change(remove, lambda now, _error: True, read)\n",
        ("tests/unit/core/ascend_destroy_test.py::test_destroy_slice_still_listed_fails",),
    ),
    Break(
        "good-by-exit",
        "a command of npu-smi that exits with 0 counts as successful",
        f"{ASCEND}/npu_smi/npu_smi_output.py",
        '    if status == 0 and said.get("status", "").upper() == "OK":\n',
        "    if status == 0:\n",
        ("tests/unit/core/npu_smi_output_test.py::test_refuse_failure_requires_success_in_output",),
    ),
    Break(
        "chip-by-half",
        "NPUs are identified by only a part of the die ID",
        f"{ASCEND}/names.py",
        '"".join(f"{word:08x}" for word in die)',
        '"".join(f"{word:08x}" for word in die[:2])',
        ("tests/unit/core/ascend_parts_test.py::test_chip_uuid_is_derived_from_die_id",),
    ),
    Break(
        "codes-unread",
        "the remedies of the vendor's error codes are not read",
        f"{ASCEND}/health/codes.py",
        "        kind = KINDS.get(code, Kind(of_level, _LOOK_UP))\n",
        "        kind = Kind(of_level, _LOOK_UP)\n",
        ("tests/unit/core/ascend_parts_test.py::test_signs_of_error_codes_have_severity_and_remedy",),
    ),
    Break(
        "node-of-the-host",
        "a container gets the device node of its slice with the host's name",
        f"{ASCEND}/driver_files.py",
        '(node(system, slice_node(number), f"/dev/davinci{number}"),)',
        "(node(system, slice_node(number)),)",
        (ON_DCMI.format("edits_contain_nodes_and_mounts_of_a_container"),),
    ),
    Break(
        "under-a-program",
        "a slice is destroyed while a program uses it",
        f"{ASCEND}/slices.py",
        '    if found.processes:\n        raise InUse(\n            f"Destroying',
        '    if found.processes is None:\n        raise InUse(\n            f"Destroying',
        (ON_DCMI.format("impossible_vnpus_are_rejected_with_a_reason"),),
    ),
    Break(
        "counters-of-chips",
        "the simulated NPU does not count its AICPU",
        f"{DCMI}/vnpu.c",
        "        if (left == ABSENT || (uint32_t)left >= template->amounts[resource])\n",
        "        if (left == ABSENT || resource == AICPU || (uint32_t)left >= template->amounts[resource])\n",
        ("tests/simulator/dcmi_property_test.py::test_310p_every_maximal_set_is_created_and_nothing_more_fits",),
    ),
    Break(
        "groups-of-chips",
        "the simulated NPU creates a slice although no vGroup has the capacity",
        f"{DCMI}/vnpu.c",
        "    return !board->groups || choose_group(chip, template, group) ? SUCCESS : INVALID_ARGUMENT;\n",
        "    return !board->groups || choose_group(chip, template, group) ? SUCCESS : SUCCESS;\n",
        ("tests/simulator/dcmi_vnpu_test.py::test_fragmented_groups_reject_what_the_counters_allow",),
    ),
    Break(
        "boot-without-slices",
        "a boot of the simulated machine does not create its slices again",
        f"{DCMI}/persist.c",
        "        else if (section && machine->recover)\n",
        "        else if (section && !machine->recover)\n",
        ("tests/simulator/dcmi_vnpu_test.py::test_boot_restores_vnpus",),
    ),
    Break(
        "nodes-for-nothing",
        "a simulated NPU is listed without its device node",
        f"{DCMI}/visibility.c",
        '        bool found = node_openable(machine, "davinci", chip->board.physical);\n',
        "        bool found = chip->board.card < CHIPS_MAX;\n",
        ("tests/simulator/dcmi_chips_test.py::test_npu_without_a_device_node_is_not_listed",),
    ),
    Break(
        "one-chip-for-two",
        "two containers use the same simulated NPU",
        f"{DCMI}/visibility.c",
        "    if (!on_host(machine) && !take_all(machine))\n",
        "    if (!on_host(machine) && !take_all(machine) && !device_count)\n",
        ("tests/simulator/dcmi_chips_test.py::test_npu_of_one_container_is_rejected_for_another",),
    ),
    Break(
        "good-exit",
        "the simulated npu-smi always exits with 0",
        f"{DCMI}/npu-smi.c",
        "{ return code == OK ? 0 : (code - 1000) & 0xFF; }",
        "{ return code == OK ? 0 : 0; }",
        ("tests/simulator/npu_smi_test.py::test_rejected_commands_report_their_reason_and_status",),
    ),
)


def copy_of(root: Path, target: Path) -> None:
    """Copy the tracked and untracked files of the checkout that git does not ignore."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, destination = root / name, target / name
        if source.is_file() or source.is_symlink():
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination, follow_symlinks=False)


def run_tests(copy: Path, tests: tuple[str, ...], *, stop: bool, seconds: float) -> tuple[bool, str]:
    """Run tests in the copy. Return whether all passed, and the names of the failed ones. A test beyond the time limit has failed."""
    command = [sys.executable, "-m", "pytest", *tests, "-q", "--tb=no", *(["-x"] if stop else [])]
    # Use no path of the checkout, and no bytecode of an earlier source.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(copy / ".pycache")}
    try:
        done = subprocess.run(
            command, cwd=copy, capture_output=True, text=True, check=False, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {seconds:.0f} s"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode} in {copy}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0, ", ".join(failed)


def find_unnoticed_breaks(chosen: tuple[Break, ...], copy: Path) -> list[str]:
    """Run the tests with each break in a copy of the checkout. Return a line for each break that no test notices."""
    copy_of(ROOT, copy)
    tests = tuple(dict.fromkeys(test for each in chosen for test in each.tests))
    print_lines(f"the unchanged product, {len(tests)} tests")
    passed, failed = run_tests(copy, tests, stop=False, seconds=3600)
    if not passed:
        return [f"tests fail without a break: {failed}"]
    problems = []
    for each in chosen:
        path = copy / each.file
        original = path.read_text(encoding="utf-8")
        path.write_text(original.replace(each.text, each.replacement), encoding="utf-8")
        started = time.monotonic()
        try:
            passed, failed = run_tests(copy, each.tests, stop=True, seconds=300)
        finally:
            path.write_text(original, encoding="utf-8")
        seconds = time.monotonic() - started
        print_lines(f"{'NOT NOTICED' if passed else 'noticed'}  {each.name}: {each.fault} ({seconds:.0f} s) {failed}")
        if passed:
            problems.append(f"no test fails although {each.fault} ({each.name}, {each.file})")
    return problems


def remove_tree_of_links(copy: Path) -> None:
    """Remove the tree of links that the copy's tests have created in the cache."""
    program = copy / "tests/tools/tree"
    if program.exists():
        tree = subprocess.run([program], check=True, capture_output=True, text=True).stdout.strip()
        shutil.rmtree(tree)


def main(arguments: list[str]) -> int:
    """Run the command. Return 0 if each break makes a test fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these breaks")
    parser.add_argument("--list", action="store_true", help="print all breaks, and change nothing")
    parser.add_argument("--check", action="store_true", help="only check whether each break can still be made")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {each.name for each in BREAKS}
    if unknown:
        parser.error(f"unknown names: {', '.join(sorted(unknown))}; --list prints the names")
    chosen = tuple(each for each in BREAKS if not options.names or each.name in options.names)
    if options.list:
        for each in chosen:
            print_lines(f"{each.name}: {each.fault} ({each.file}; {', '.join(each.tests)})")
        return 0
    problems = [problem for each in chosen if (problem := each.problem(ROOT))]
    if not problems and not options.check:
        with tempfile.TemporaryDirectory(prefix="dra-accelerators-broken-") as directory:
            copy = Path(directory).resolve()
            try:
                problems = find_unnoticed_breaks(chosen, copy)
            finally:
                remove_tree_of_links(copy)
    for line in problems:
        print_lines(f"error: {line}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
