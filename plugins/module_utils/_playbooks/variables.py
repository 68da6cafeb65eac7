# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables ``accelerator_*`` of the playbooks: those that users set, and those that the playbooks set.

``docs/variables.md`` is generated from ``VARIABLES``: ``tests/tools/checks/variables_page.py --write``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

PREFIX = "accelerator_"
#: Prefixes of roles that no other collection uses. Names such as nvidia_driver_branch can belong to other roles.
ROLE_PREFIXES = ("dra_controller_", "dra_driver_")
#: The lowest similarity of a suggested name, and of two words with a few different letters, such as a plural.
SIMILAR, SAME_WORD = 0.7, 0.8
#: Words that mean the same in names of variables.
SYNONYMS = (
    frozenset({"dest", "destination", "dir", "directory", "file", "folder", "path"}),
    frozenset({"continue", "go"}),
    frozenset({"authority", "ca"}),
    frozenset({"max", "maximum", "most"}),
)


class Variable(NamedTuple):
    """A variable that users set: its type, its default, and its purpose, each as Markdown."""

    type: str
    default: str
    purpose: str


#: The variables that users set, by topic and name.
VARIABLES: dict[str, dict[str, Variable]] = {
    "All playbooks": {
        "accelerator_vendors": Variable(
            "list of str", "[nvidia]", "The vendors whose devices a node can have: `nvidia`, `ascend`."
        ),
        "accelerator_layouts": Variable(
            "list of dict",
            "[]",
            "[Layouts](layout.md): entries with `hosts` (a pattern) and `layout` (rules).",
        ),
        "accelerator_kubeconfig": Variable(
            "path", "`KUBECONFIG`", "The kubeconfig of the node's cluster on the Ansible controller."
        ),
        "accelerator_kubeconfig_context": Variable("str", "the current context", "The context in that kubeconfig."),
        "accelerator_node_name": Variable("str", "`inventory_hostname`", "The name of the host's Node object."),
        "accelerator_kubelet_root": Variable("path", "/var/lib/kubelet", "The kubelet's root directory on the node."),
        "accelerator_become": Variable(
            "bool",
            "true",
            "Whether tasks on nodes run as root with `become`. Set it to false if the connection's user is root.",
        ),
        "accelerator_serial": Variable("int, percentage, or list", "100", "The number of nodes in a batch."),
        "accelerator_continue_on_failure": Variable(
            "bool", "false", "Whether the next batch starts after a node of a batch has failed."
        ),
        "accelerator_proxy": Variable(
            "dict", "{}", "Environment variables of the proxy for downloads: `http_proxy`, `https_proxy`, `no_proxy`."
        ),
    },
    "Site": {
        "accelerator_nvidia_driver_enabled": Variable(
            "bool", "false", "Whether the role `nvidia_driver` installs the driver."
        ),
        "accelerator_nvidia_fabric_manager_enabled": Variable(
            "bool", "false", "Whether the role `nvidia_fabric_manager` installs the fabric manager."
        ),
        "accelerator_nvidia_container_toolkit_enabled": Variable(
            "bool", "false", "Whether the role `nvidia_container_toolkit` installs the toolkit."
        ),
        "accelerator_nvidia_settings_enabled": Variable(
            "bool", "false", "Whether the role `nvidia_settings` applies persistent settings of GPUs."
        ),
        "accelerator_ascend_driver_enabled": Variable(
            "bool", "false", "Whether the role `ascend_driver` installs driver and firmware."
        ),
        "accelerator_ascend_runtime_enabled": Variable(
            "bool", "false", "Whether the role `ascend_runtime` installs the vendor's container runtime."
        ),
        "accelerator_container_runtime_enabled": Variable(
            "bool", "true", "Whether the role `container_runtime` enables CDI in the node's container runtime."
        ),
        "accelerator_node_features_enabled": Variable(
            "bool", "false", "Whether the role `node_features` writes labels of the devices."
        ),
        "accelerator_form_serial": Variable(
            "int", "1", "The number of nodes at a time on which `driver_form` changes how the driver is deployed."
        ),
    },
    "Remove": {
        "accelerator_remove_force": Variable(
            "bool", "false", "Whether pods that use devices are deleted. Otherwise a node with such pods is refused."
        ),
        "accelerator_remove_timeout": Variable("int", "300", "Seconds to wait until no claim holds a device."),
        "accelerator_remove_reset_layout": Variable("bool", "false", "Whether all partitions are removed."),
        "accelerator_remove_drivers": Variable(
            "bool", "false", "Whether the enabled vendors' drivers are removed too."
        ),
        "accelerator_remove_device_classes": Variable(
            "bool", "true", "Whether the DeviceClasses are removed with the last driver of the cluster."
        ),
        "accelerator_remove_gone": Variable(
            "list of str", "[]", "Names of nodes that no longer exist, whose objects are removed."
        ),
    },
    "Repartition": {
        "accelerator_repartition_evict": Variable(
            "bool",
            "unset",
            "Whether pods that use changed devices are evicted. Unset: the plan names them and fails.",
        ),
        "accelerator_repartition_evict_unmanaged": Variable(
            "bool", "false", "Whether pods without a controller are evicted too. Nothing creates them again."
        ),
        "accelerator_repartition_prefer": Variable(
            "str", "pods", "What the plan keeps if it cannot keep both: `pods` or `partitions`."
        ),
        "accelerator_repartition_max_unavailable": Variable(
            "int or percentage", "25%", "The devices of the fleet that can be unavailable at a time."
        ),
        "accelerator_repartition_serial": Variable("int", "1", "The number of nodes at a time."),
        "accelerator_repartition_timeout": Variable(
            "int", "900", "Seconds to wait for the end of pods and for published devices, per operation."
        ),
        "accelerator_repartition_grace_period": Variable("int", "the pod's", "Seconds that an evicted pod has to end."),
        "accelerator_repartition_left_after": Variable(
            "int", "21600", "Seconds without renewal after which the taints of an interrupted run are removed."
        ),
        "accelerator_repartition_file": Variable("path", "unset", "The file for the plan as JSON."),
    },
    "Upgrade": {
        "accelerator_upgrade_evict": Variable(
            "bool", "unset", "Whether pods that use devices are evicted. Unset: the playbook names them and fails."
        ),
        "accelerator_upgrade_evict_unmanaged": Variable(
            "bool", "false", "Whether pods without a controller are evicted too."
        ),
        "accelerator_upgrade_serial": Variable("int", "1", "The number of nodes at a time."),
        "accelerator_upgrade_timeout": Variable("int", "900", "Seconds to wait for the end of pods."),
        "accelerator_upgrade_grace_period": Variable("int", "the pod's", "Seconds that an evicted pod has to end."),
    },
    "Report": {
        "accelerator_report_cluster": Variable("bool", "true", "Whether the report reads the cluster."),
        "accelerator_report_explain": Variable("bool", "true", "Whether the report explains pending claims."),
        "accelerator_report_file": Variable("path", "accelerators.md", "The file for the summary."),
        "accelerator_report_page": Variable("path", "that file with `.html`", "The file for the page."),
        "accelerator_report_data": Variable("path", "that file with `.json`", "The file for the data."),
        "accelerator_report_reasons": Variable(
            "dict", "{}", "Reasons of devices that are out of service, by host and device."
        ),
    },
    "Plan": {
        "accelerator_plan_wanted": Variable("list of dict", "[]", "Requests as counts. See [plans](plan.md)."),
        "accelerator_plan_src": Variable(
            "str", "empty", "Files and directories of manifests with requests, separated by commas."
        ),
        "accelerator_plan_namespace": Variable(
            "str", "unset (all namespaces)", "The namespace whose pending pods count, and of manifests without one."
        ),
        "accelerator_plan_pending_for": Variable(
            "str", "unset", "The time for which pods must have been pending: `1d`, `90m`, `0s`."
        ),
        "accelerator_plan_max_moves": Variable("int", "0", "The largest number of claims that can get another device."),
        "accelerator_plan_time_limit": Variable("int", "60", "Time limit of the solver in seconds."),
        "accelerator_plan_write": Variable(
            "bool", "false; true in check mode", "Whether the plan is written as a file of variables."
        ),
        "accelerator_plan_file": Variable("path", "layouts.yml", "The file of variables."),
        "accelerator_plan_cluster": Variable("bool", "true", "Whether the plan reads the cluster."),
        "accelerator_plan_cluster_src": Variable(
            "str", "empty", "Files with a cluster's objects, separated by commas, in place of the cluster."
        ),
        "accelerator_plan_nodes_src": Variable(
            "path", "unset", "A file with the facts of nodes, in place of the nodes."
        ),
        "accelerator_plan_keep_nodes": Variable(
            "path", "unset", "The file in which the facts of the nodes are stored."
        ),
    },
    "Why": {
        "accelerator_why_pods": Variable(
            "str", "empty", "Names of pods, separated by commas, each as `name` or `namespace/name`."
        ),
        "accelerator_why_claims": Variable("str", "empty", "Names of claims, separated by commas."),
        "accelerator_why_namespace": Variable(
            "str",
            "default",
            "The namespace of names without one. Without names: its pending pods and claims.",
        ),
        "accelerator_why_src": Variable("path", "unset", "A file of manifests that are not applied yet."),
        "accelerator_why_cluster_src": Variable(
            "str", "empty", "Files with a cluster's objects, separated by commas, in place of the cluster."
        ),
        "accelerator_why_nodes_src": Variable(
            "path", "unset", "A file with the facts of nodes, in place of the nodes."
        ),
        "accelerator_why_file": Variable("path", "unset", "The file for the data as JSON."),
    },
    "Offline": {
        "accelerator_offline_bundle": Variable(
            "path", "empty", "The archive that all roles install from. See [offline sites](offline.md)."
        ),
        "accelerator_offline_checksum": Variable("str", "empty", "The SHA-256 digest of its manifest."),
        "accelerator_offline_allow_unpinned": Variable(
            "bool", "false", "Whether a bundle without that digest is accepted."
        ),
        "accelerator_offline_directory": Variable(
            "path", "the archive's with `.d`", "The directory for the unpacked bundle."
        ),
        "accelerator_platform": Variable(
            "dict",
            "the host's facts",
            "Distribution, release, machine, and kernel of a host that the playbook `bundle` cannot reach.",
        ),
        "accelerator_bundle_dest": Variable(
            "path", "required by `bundle`", "The archive that the playbook `bundle` writes."
        ),
        "accelerator_bundle_cache": Variable("path", "the archive's with `.parts`", "The directory for downloads."),
        "accelerator_bundle_packages": Variable("list of str", "[]", "Additional packages of a host's distribution."),
        "accelerator_bundle_mirrors": Variable("dict", "{}", "Package sources that replace a distribution's own."),
        "accelerator_bundle_control": Variable(
            "dict", "this machine's", "Python version and machine of the Ansible controller on the site."
        ),
        "accelerator_bundle_interpreter": Variable("path", "Ansible's", "The Python whose pip downloads wheels."),
        "accelerator_bundle_pip_environment": Variable("dict", "`accelerator_proxy`", "The environment of pip."),
        "accelerator_bundle_refresh": Variable(
            "bool", "false", "Whether the playbook checks for newer versions of files that it has downloaded."
        ),
    },
}
_SET_BY_PLAYBOOKS = """
accelerator_answers accelerator_api accelerator_api_result accelerator_api_text accelerator_before_changes
accelerator_blocks accelerator_boot_changed accelerator_boot_layout_before accelerator_boot_written
accelerator_changed accelerator_changed_gpu accelerator_changed_npu accelerator_checked_hosts accelerator_checks_pod
accelerator_claims accelerator_claims_asked accelerator_claims_leaders accelerator_claims_left accelerator_cluster
accelerator_cluster_asked accelerator_cluster_nodes accelerator_columns accelerator_conflicts accelerator_connection
accelerator_controller_api accelerator_controller_cluster accelerator_controller_form accelerator_controller_forms
accelerator_controller_leaders accelerator_controller_leads accelerator_controller_leaves accelerator_controller_rest
accelerator_cordon accelerator_count accelerator_deployment_hosts accelerator_device_names accelerator_drain
accelerator_drained accelerator_drains_driver accelerator_driver_enabled accelerator_driver_names
accelerator_driver_plans accelerator_driver_roles accelerator_drivers_changed accelerator_drivers_drained
accelerator_drivers_to_come accelerator_evicted_pods accelerator_eviction_plan accelerator_exchanges
accelerator_existing_nodes accelerator_failed_hosts accelerator_failed_nodes accelerator_failure
accelerator_failure_reason accelerator_fleet accelerator_fleet_planned accelerator_gathered accelerator_gone
accelerator_gone_answer accelerator_gone_cluster accelerator_gone_hosts accelerator_gone_keys accelerator_gone_number
accelerator_gone_objects accelerator_gone_owners accelerator_gone_published accelerator_gone_results
accelerator_gone_unknown accelerator_group accelerator_group_hosts accelerator_group_names accelerator_has_driver
accelerator_has_evict accelerator_healthy accelerator_held accelerator_here accelerator_host_api accelerator_idle
accelerator_image accelerator_image_files accelerator_image_host accelerator_image_need accelerator_images
accelerator_imports_image accelerator_is_controller accelerator_is_idle accelerator_layout_entries accelerator_layout_seen
accelerator_leaders accelerator_leads accelerator_left accelerator_left_of_gone accelerator_left_out accelerator_line
accelerator_lines
accelerator_links accelerator_made accelerator_mark accelerator_marked accelerator_marks accelerator_may_evict
accelerator_may_evict_unmanaged accelerator_migration accelerator_migration_api accelerator_migration_direction
accelerator_migration_method accelerator_migration_node accelerator_mode_counts accelerator_modes accelerator_name
accelerator_names accelerator_needed_hosts accelerator_needs accelerator_node accelerator_node_answer
accelerator_node_asked accelerator_node_asked_again accelerator_node_layout accelerator_node_plan accelerator_numbered
accelerator_of_gone accelerator_operation accelerator_operation_number accelerator_own accelerator_own_keys
accelerator_own_units accelerator_parts accelerator_paths accelerator_peers accelerator_plan accelerator_plan_dest
accelerator_plan_writes accelerator_planned accelerator_planned_operations accelerator_planned_steps accelerator_plans
accelerator_pod accelerator_pod_deleted accelerator_pods_of_claims accelerator_profile_counts accelerator_progress
accelerator_published accelerator_python accelerator_release_error accelerator_remaining_nodes
accelerator_remaining_text accelerator_report accelerator_report_data_used accelerator_report_joined
accelerator_report_stem accelerator_reserved accelerator_restore_error accelerator_role accelerator_role_evicts
accelerator_role_evicts_unmanaged accelerator_root accelerator_rules_of_npus accelerator_run accelerator_saved
accelerator_settings_seen accelerator_settled accelerator_silent accelerator_slices accelerator_stale_operations
accelerator_steps accelerator_stray accelerator_texts accelerator_there accelerator_timeout accelerator_unknown
accelerator_unreachable accelerator_user accelerator_users accelerator_uuids accelerator_vendors_of_fleet
accelerator_vendors_of_node accelerator_wanted accelerator_why
"""
#: Variables that tasks of the playbooks set, with ``vars`` too, and those of their plays.
SET_BY_PLAYBOOKS = frozenset(_SET_BY_PLAYBOOKS.split())
#: Variables that the inventory plugin ``accelerators`` sets on each node.
SET_BY_INVENTORY = frozenset(
    {
        "accelerator_available",
        "accelerator_counts",
        "accelerator_drivers",
        "accelerator_node",
        "accelerator_products",
        "accelerator_profiles",
        "accelerator_tainted",
        "accelerator_types",
    }
)
NAMES = frozenset(name for variables in VARIABLES.values() for name in variables)


def unknown(names: Iterable[str], options: Collection[str] = ()) -> list[str]:
    """Return the names with one of the prefixes that nothing reads, sorted. ``options``: the options of the roles."""
    known = {*NAMES, *SET_BY_PLAYBOOKS, *SET_BY_INVENTORY, *options}
    return sorted(name for name in set(names) - known if name.startswith((PREFIX, *ROLE_PREFIXES)))


def nearest(name: str, options: Collection[str] = ()) -> str:
    """Return the known name that is most similar to an unknown one with the same prefix, or "" without a similar one."""
    prefix = next(each for each in (PREFIX, *ROLE_PREFIXES) if name.startswith(each))
    given = name.removeprefix(prefix)
    known = sorted(each.removeprefix(prefix) for each in {*NAMES, *options} if each.startswith(prefix))
    scores = {each: _similarities(given, each) for each in known}
    best = max(known, key=lambda each: scores[each], default="")
    return prefix + best if best and scores[best][0] >= SIMILAR else ""


def _similarities(one: str, other: str) -> tuple[float, float]:
    """Return the larger of the similarities of words and of text, and the similarity of text. Both are from 0 to 1."""
    text = difflib.SequenceMatcher(None, one, other).ratio()
    return max(text, _word_similarity(one.split("_"), other.split("_"))), text


def _word_similarity(words: Sequence[str], others: Sequence[str]) -> float:
    """Return the mean over all words of two names: the similarity to the most similar word of the other name."""
    best = [max(_same_word(each, other) for other in others) for each in words]
    best += [max(_same_word(each, word) for word in words) for each in others]
    return sum(best) / len(best)


def _same_word(one: str, other: str) -> float:
    """Return 1 for equal words and synonyms, the similarity of words with a few different letters, and otherwise 0."""
    if one == other or any({one, other} <= each for each in SYNONYMS):
        return 1.0
    similarity = difflib.SequenceMatcher(None, one, other).ratio()
    return similarity if similarity >= SAME_WORD else 0.0
