# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The migration from device plugins to claims: affected workloads, their replacements, remaining steps of a node, and blockers."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._migration import migration_inventory as inventory
from ansible_collections.dra.accelerators.plugins.module_utils._migration import node_plan as nodes
from ansible_collections.dra.accelerators.plugins.module_utils._migration import queries as asking
from hypothesis import given
from hypothesis import strategies as st
from migration_world import GPU, MIG, claim, daemon_set, device_class, node, plugin_pod, pod, slices

Json = dict[str, Any]
ROOT = "/var/lib/kubelet"
OWN = {nodes.INTERFACE: nodes.BY_PLUGIN}
ALL = nodes.MigrationOptions(plugins=("*",), evict=True, evict_unmanaged=True)


def cluster(**kinds: Any) -> asking.Cluster:
    return asking.Cluster(**{name: value if name == "workloads" else tuple(value) for name, value in kinds.items()})


def plan(
    found: asking.Cluster, name: str, wishes: nodes.MigrationOptions = ALL, direction: str = "forward"
) -> nodes.Plan:
    stock = asking.build_inventory(found, direction=direction, kubelet_root=ROOT)
    known = [
        f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found.workloads.get("DaemonSet", ())
    ]
    view = asking.node_states(found, stock, [name], ROOT)[name]
    return nodes.plan(view, direction, wishes, stock.services, known)


def verbs(made: nodes.Plan) -> list[str]:
    return [each.verb for each in made.steps]


def evicted(made: nodes.Plan) -> list[str]:
    return [one.key for each in made.steps for one in each.pods]


def codes(made: nodes.Plan) -> list[str]:
    return sorted(each.code for each in made.blocks)


# ---------------------------------------------------------------------- affected workloads


def test_amounts_are_added_up_like_in_the_scheduler() -> None:
    def of(number: int) -> Json:
        return {"resources": {"requests": {GPU: str(number), "cpu": "1", "nvidia.com/hostdev": "4"}}}

    spec = {"containers": [of(1), of(2)], "initContainers": [of(2), {**of(1), "restartPolicy": "Always"}, of(4)]}
    assert inventory.requested_amounts(spec) == {GPU: 5}
    assert inventory.requested_amounts({"containers": [of(0)]}) == {}


def test_owner_of_pod_is_top_controller() -> None:
    sets = [
        {"metadata": {"uid": "uid-rs", "ownerReferences": [{"kind": "Deployment", "name": "web", "controller": True}]}}
    ]
    owner_of = inventory.owner_lookup(sets)
    assert owner_of(pod("a")["metadata"]) == "Deployment/web"
    assert owner_of(pod("a", owner=("StatefulSet", "db"))["metadata"]) == "StatefulSet/db"
    assert owner_of(pod("a", owner=None)["metadata"]) == ""


KNOWN = [GPU, MIG, "nvidia.com/gpu.shared", "huawei.com/Ascend910"]
NAMES = [*KNOWN, "nvidia.com/hostdev", "cpu", "example.com/gpu"]


@st.composite
def pods(draw: st.DrawFn) -> Json:
    requested = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), max_size=3))
    resources_from_claims = tuple(each for each in requested if draw(st.booleans()))
    return pod(
        f"pod-{draw(st.integers(0, 10**6))}",
        {name: str(number) for name, number in requested.items()},
        on=draw(st.sampled_from(["", "a", "b"])),
        owner=draw(st.sampled_from([None, ("ReplicaSet", "rs")])),
        resources_from_claims=resources_from_claims if draw(st.booleans()) else (),
        phase=draw(st.sampled_from(["Running", "Pending", "Succeeded"])),
    )


@given(st.lists(pods(), max_size=8, unique_by=lambda each: each["metadata"]["name"]), st.booleans())
def test_every_pod_is_named_once_and_only_users_are_evicted(found: list[Json], own: bool) -> None:
    labels = OWN if own else {}
    daemons = [] if own else [daemon_set("plugin")]
    serving = [] if own else [plugin_pod("plugin", "a"), plugin_pod("plugin", "b")]
    there = cluster(
        nodes=[node("a", {GPU: 8}, labels), node("b", {GPU: 8}, labels)],
        pods=[*found, *serving],
        workloads={"DaemonSet": daemons},
    )
    stock = asking.build_inventory(there, direction="forward", kubelet_root=ROOT)
    asks = [each for each in found if inventory.requested_amounts(each["spec"])]
    assert sorted(each.name for each in stock.pods) == sorted(each["metadata"]["name"] for each in asks)
    by_name = {each["metadata"]["name"]: each for each in found}
    for name in ("a", "b"):
        gone = [one for each in plan(there, name).steps for one in each.pods]
        assert len({each.uid for each in gone}) == len(gone)
        for each in gone:
            one = by_name[each.name]
            requested = inventory.requested_amounts(one["spec"])
            assert requested and one["spec"]["nodeName"] == name and one["status"]["phase"] != "Succeeded"
            assert set(requested) - inventory.resources_from_claims(one), "pods with claims are not evicted"
        # No workload is missing.
        missing = {
            each["metadata"]["name"]
            for each in asks
            if each["spec"]["nodeName"] == name
            and each["status"]["phase"] != "Succeeded"
            and set(inventory.requested_amounts(each["spec"])) - inventory.resources_from_claims(each)
        }
        assert {each.name for each in gone} == missing


def test_workloads_are_named_by_their_controller() -> None:
    template = {"template": {"spec": pod("x", {GPU: 1})["spec"]}}
    metadata = {"namespace": "default", "name": "it"}
    above = {**metadata, "ownerReferences": [{"kind": "Deployment", "name": "it", "controller": True}]}
    there = cluster(
        workloads={
            "Deployment": [{"metadata": metadata, "spec": {**template, "replicas": 2}}],
            "ReplicaSet": [{"metadata": above, "spec": template}],
            "CronJob": [{"metadata": metadata, "spec": {"jobTemplate": {"spec": template}}}],
            "StatefulSet": [{"metadata": metadata, "spec": {"template": {"spec": {"containers": []}}}}],
        }
    )
    found = asking.build_inventory(there, direction="forward", kubelet_root=ROOT).workloads
    assert [(each["kind"], each["replicas"]) for each in found] == [("CronJob", None), ("Deployment", 2)]
    assert found[0]["becomes"] == {
        GPU: "unchanged in the pod. The DeviceClass gpu.nvidia.com, which the migration creates, provides it"
    }


# ---------------------------------------------------------------------- replacements


def test_newest_class_serves_a_resource() -> None:
    classes = [
        device_class("z", GPU, created="2026-02-01T00:00:00Z"),
        device_class("a", GPU, created="2026-02-01T00:00:00Z"),
        device_class("old", GPU),
    ]
    found = inventory.find_services([GPU, MIG, "nvidia.com/gpu.shared"], classes)
    assert (found[GPU].device_class, found[GPU].exists) == ("a", True)
    assert (found[MIG].device_class, found[MIG].exists) == ("mig-1g.10gb.nvidia.com", False)
    assert (
        found["nvidia.com/gpu.shared"].problem
        == "not available through claims, because it is a replica of nvidia.com/gpu"
    )


def test_quotas_have_replacements() -> None:
    per_class, count = f"gpu.nvidia.com{inventory.PER_CLASS}", inventory.CLAIM_COUNT
    quota = {
        "metadata": {"namespace": "default", "name": "gpus"},
        "spec": {
            "hard": {
                f"requests.{GPU}": "4",
                per_class: "2",
                count: "10",
                "pods": "9",
                "requests.nvidia.com/hostdev": "1",
            }
        },
        "status": {"used": {per_class: "1", count: "1"}},
    }
    services = inventory.find_services([GPU], [device_class("gpu.nvidia.com", GPU)])
    found = inventory.quota_facts(quota, services, {GPU: 2, "": 1})
    assert found is not None
    entries = {each["entry"]: each["becomes"] for each in found["entries"]}
    assert set(entries) == {f"requests.{GPU}", per_class, count}
    assert (
        entries[f"requests.{GPU}"].startswith("still counts pods") and f"{per_class}: 4" in entries[f"requests.{GPU}"]
    )
    assert [each["code"] for each in found["problems"]] == ["quota"] and per_class in found["problems"][0]["text"]
    full = inventory.quota_facts(quota, services, {GPU: 1, "": 1})
    assert full is not None and not full["problems"]
    assert inventory.quota_facts({**quota, "spec": {"hard": {"pods": "9"}}}, services, {}) is None


def test_limit_ranges_are_reported() -> None:
    item = {
        "metadata": {"namespace": "n", "name": "l"},
        "spec": {"limits": [{"type": "Container", "max": {GPU: "2", "cpu": "4"}}]},
    }
    found = inventory.limit_range_facts(item)
    assert found is not None and found["resources"] == [GPU] and found["becomes"].startswith("still limits pods")
    assert inventory.limit_range_facts({**item, "spec": {"limits": [{"max": {"cpu": "4"}}]}}) is None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"schedulerName": "volcano"}, "other-scheduler"),
        ({"tolerations": [{"operator": "Exists"}]}, "comes-back"),
        ({"containers": [{"resources": {"limits": {GPU: "33"}}}]}, "too-many-devices"),
        ({"containers": [{"resources": {"limits": {"nvidia.com/gpu.shared": "1"}}}]}, "shared-resource"),
    ],
)
def test_pod_obstacle_needs_acceptance(changes: Json, code: str) -> None:
    there = cluster(nodes=[node("a", {GPU: 8}, OWN)], pods=[pod("p", {GPU: 1}, on="a", **changes)])
    assert codes(plan(there, "a")) == [code]
    accepting = nodes.MigrationOptions(evict=True, accept=frozenset({code}))
    assert codes(plan(there, "a", accepting)) == []


# ---------------------------------------------------------------------- steps of a node, forward


def test_plan_node_with_own_plugin() -> None:
    there = cluster(
        nodes=[node("a", {GPU: 8}, OWN)],
        pods=[pod("p", {GPU: 1}, on="a"), pod("other", {}, on="a"), pod("waits", {GPU: 1})],
    )
    made = plan(there, "a")
    assert (
        verbs(made) == ["taint", "evict", "driver", "untaint"] and evicted(made) == ["default/p"] and not made.problems
    )
    assert codes(plan(there, "a", nodes.MigrationOptions())) == ["no-consent"]
    lonely = cluster(nodes=there.nodes, pods=[pod("p", {GPU: 1}, on="a", owner=None)])
    assert codes(plan(lonely, "a", nodes.MigrationOptions(evict=True))) == ["no-controller"]


def test_plan_migrated_node_has_no_steps() -> None:
    zero = node("a", {GPU: 0})
    there = cluster(nodes=[zero], slices=[slices("a")], pods=[pod("p", {GPU: 1}, on="a", resources_from_claims=(GPU,))])
    made = plan(there, "a")
    assert made.steps == () and made.document()["done"]
    # An interrupted run has left its taint.
    zero["spec"]["taints"] = [nodes.taint_of("forward")]
    assert verbs(plan(cluster(nodes=[zero], slices=[slices("a")]), "a")) == ["driver", "untaint"]
    assert plan(cluster(), "gone").blocks[0].code == "no-node"


FOREIGN: dict[str, Any] = {
    "nodes": [node("a", {GPU: 8}), node("b", {GPU: 8})],
    "pods": [pod("p", {GPU: 1}, on="a"), plugin_pod("plugin", "a"), plugin_pod("plugin", "b")],
    "workloads": {
        "DaemonSet": [daemon_set("plugin"), daemon_set("logs", volumes=[{"hostPath": {"path": "/var/log"}}])]
    },
}


def test_plan_foreign_plugin_is_detected_and_named() -> None:
    there = cluster(**FOREIGN)
    stock = asking.build_inventory(there, direction="forward", kubelet_root=ROOT)
    assert [(each.key, sorted(each.nodes), each.way) for each in stock.plugins] == [
        ("kube-system/plugin", ["a", "b"], "affinity")
    ]
    made = plan(there, "a")
    assert made.kind == nodes.FOREIGN and verbs(made) == ["taint", "evict", "withdraw", "driver", "untaint"]
    assert codes(plan(there, "a", nodes.MigrationOptions(evict=True))) == ["plugin-not-named"]
    assert codes(plan(there, "a", nodes.MigrationOptions(evict=True, plugins=("kube-system/plugin",)))) == []
    # A different kubelet root means a different directory.
    assert asking.build_inventory(there, direction="forward", kubelet_root="/data/kubelet").plugins == ()


def test_plan_plugin_of_an_operator_is_blocked() -> None:
    operated = daemon_set("plugin")
    operated["metadata"]["ownerReferences"] = [{"kind": "ClusterPolicy", "name": "c", "controller": True}]
    there = cluster(**{**FOREIGN, "workloads": {"DaemonSet": [operated]}})
    assert codes(plan(there, "a")) == ["plugin-is-operated"]
    switch = "nvidia.com/gpu.deploy.device-plugin"
    operated["spec"]["template"]["spec"]["nodeSelector"] = {switch: "true"}
    assert codes(plan(there, "a")) == []
    assert asking.build_inventory(there, direction="forward", kubelet_root=ROOT).plugins[0].label == switch


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"labels": {"nvidia.com/gpu.replicas": "4"}}, "replicas"),
        ({"labels": {"nvidia.com/mig.config": "all-1g.10gb"}}, "manager"),
    ],
)
def test_plan_node_labels_block(changes: Json, code: str) -> None:
    there = cluster(**{**FOREIGN, "nodes": [node("a", {GPU: 8}, changes["labels"])]})
    assert codes(plan(there, "a")) == [code]


def test_plan_plugins_without_daemon_set_are_blocked() -> None:
    alone = cluster(
        nodes=[node("a", {GPU: 8})],
        pods=[pod("static", on="a", owner=None, volumes=plugin_pod("x", "a")["spec"]["volumes"])],
    )
    assert codes(plan(alone, "a")) == ["plugin-is-a-pod"]
    assert codes(plan(cluster(nodes=[node("a", {GPU: 8})]), "a")) == ["plugin-unknown"]
    # Resources of other plugins in the vendor's domain are ignored.
    assert plan(cluster(nodes=[node("a", {"nvidia.com/hostdev": 8})]), "a").steps == ()


# ---------------------------------------------------------------------- back


def test_plan_back_evicts_pods_with_claims() -> None:
    made, written, far = (
        pod("made", {GPU: 1}, on="a", resources_from_claims=(GPU,)),
        pod("written", on="a"),
        pod("far", on="b"),
    )
    former = claim("c4", "a", pod("none", on="a"))
    former["status"]["reservedFor"][0]["uid"] = "another"
    there = cluster(
        nodes=[node("a", {GPU: 0}), node("b")],
        pods=[made, written, far, pod("none", on="a")],
        slices=[slices("a"), slices("b")],
        # The last claim was for an earlier pod with the same name as a current one.
        claims=[claim("c1", "a", made, made=True), claim("c2", "a", written), claim("c3", "b", far), former],
    )
    found = plan(there, "a", direction="back")
    assert verbs(found) == ["taint", "evict", "driver", "untaint"]
    assert evicted(found) == ["default/made", "default/written"]
    assert codes(found) == ["claims-of-users"] and "default/written" in found.blocks[0].text
    own = cluster(nodes=[node("a", {GPU: 8}, OWN)])
    assert plan(own, "a", direction="back").steps == ()


def test_plan_back_to_foreign_plugin_needs_it() -> None:
    item = node("a", {GPU: 0}, {nodes.KEPT_OFF: nodes.OFF})
    item["metadata"]["annotations"] = {nodes.RECORD: '{"plugins": ["kube-system/plugin"]}'}
    there = cluster(nodes=[item], slices=[slices("a")], workloads={"DaemonSet": [daemon_set("plugin")]})
    found = plan(there, "a", direction="back")
    assert (
        found.kind == nodes.FOREIGN and verbs(found) == ["taint", "driver", "restore", "untaint"] and not found.blocks
    )
    lost = cluster(nodes=[item], slices=[slices("a")])
    assert codes(plan(lost, "a", direction="back")) == ["plugin-is-gone"]


# ---------------------------------------------------------------------- a DaemonSet's affinity

EXPRESSIONS = st.fixed_dictionaries({"key": st.sampled_from("xyz"), "operator": st.just("Exists")})
TERMS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"matchExpressions": st.lists(EXPRESSIONS, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"matchFields": st.lists(EXPRESSIONS, min_size=1, max_size=1)}),
    ),
    min_size=1,
    max_size=2,
)
REQUIRED = TERMS.map(lambda terms: {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}})
AFFINITIES = st.one_of(
    st.none(),
    REQUIRED.map(lambda each: {"nodeAffinity": each}),
    st.just({"podAntiAffinity": {"x": []}}),
    REQUIRED.map(lambda each: {"nodeAffinity": {**each, "preferredDuringSchedulingIgnoredDuringExecution": []}}),
)


@given(AFFINITIES)
def test_affinity_round_trips(affinity: Json | None) -> None:
    spec = {"affinity": affinity}
    closed = {"affinity": nodes.affinity_with(spec)}
    assert nodes.excludes(closed) and not nodes.excludes(spec)
    assert nodes.affinity_with(closed) == closed["affinity"]
    assert nodes.affinity_without(closed) == affinity
    assert nodes.affinity_without(spec) == affinity
