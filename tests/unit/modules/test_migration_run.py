# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Migrate a node and back: written objects, evicted pods, interrupted runs, and an unchanged second run."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._migration import migration_inventory as inventory
from ansible_collections.dra.accelerators.plugins.module_utils._migration import node_plan as nodes
from ansible_collections.dra.accelerators.plugins.module_utils._migration import node_run as running
from ansible_collections.dra.accelerators.plugins.module_utils._migration import queries as asking
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.modules import device_plugin_migration, device_plugin_migration_info
from migration_world import GPU, MIG, World, claim, daemon_set, device_class, node, plugin_pod, pod, slices

Json = dict[str, Any]
OWN = {nodes.INTERFACE: nodes.BY_PLUGIN}
NAMED = nodes.MigrationOptions(plugins=("kube-system/plugin",), evict=True)


def mover(
    world: World, direction: str = "forward", wishes: nodes.MigrationOptions = NAMED, **options: Any
) -> running.NodeMigration:
    settings: Json = {
        "kubelet_root": "/var/lib/kubelet",
        "timeout": 60,
        "dry": False,
        "clock": world.clock,
        "sleep": world.sleep,
    }
    return running.NodeMigration(world, "a", direction, wishes, **{**settings, **options})  # type: ignore[arg-type]


def own_world(**more: Any) -> World:
    return World(nodes=[node("a", {GPU: 8}, OWN)], pods=[pod("p", {GPU: 1}, on="a"), pod("other", on="a")], **more)


def foreign_world(**template: Any) -> World:
    serving = [plugin_pod("plugin", "a"), plugin_pod("plugin", "b")]
    return World(
        nodes=[node("a", {GPU: 8}), node("b", {GPU: 8})],
        pods=[pod("p", {GPU: 1}, on="a"), pod("far", {GPU: 1}, on="b"), *serving],
        daemonsets=[daemon_set("plugin", **template)],
    )


def names(world: World) -> list[str]:
    return sorted(each["metadata"]["name"] for each in world.kinds["pods"])


def taints(world: World) -> list[Any]:
    return [
        each["value"] for each in world.find("nodes", "a")["spec"].get("taints") or () if each["key"] == nodes.TAINT
    ]


def driver_publishes(world: World) -> None:
    """Publish slices as the role dra_driver does with the claims interface."""
    world.find("nodes", "a")["metadata"]["labels"].pop(nodes.INTERFACE, None)
    world.kinds["resourceslices"] = [slices("a")]
    world.tick()


def driver_offers(world: World) -> None:
    """Label the node as the role dra_driver does with the device plugin interface."""
    world.find("nodes", "a")["metadata"]["labels"][nodes.INTERFACE] = nodes.BY_PLUGIN
    world.kinds["resourceslices"] = []
    world.tick()


def remove_driver(world: World) -> None:
    world.kinds["resourceslices"] = []


def test_close_slow_list_finds_pod_bound_after_taint() -> None:
    """The scheduler binds a pod 3 s after the taint. A list of pods takes 10 s and returns the state at its start: the pod is found."""
    world = World(nodes=[node("a", {GPU: 8}, OWN)])
    marked: list[float] = []
    request, listing = world.request, world.list_all

    def write(method: str, *arguments: Any, **more: Any) -> Json:
        if method == "PATCH":
            marked.append(world.now)
        return request(method, *arguments, **more)

    def read(path: str, query: Any, *keep: Any) -> list[Json]:
        if marked and world.now >= marked[0] + 3 and not evicted:
            evicted.append("late")
            world.kinds["pods"].append(pod("late", {GPU: 1}, on="a"))
        found = listing(path, query, *keep)
        world.now += 10 if path.endswith("/pods") else 0
        return found

    evicted: list[str] = []
    world.request, world.list_all = write, read  # type: ignore[method-assign]
    assert mover(world, timeout=600).drain().evicted == ["default/late"]


@pytest.mark.parametrize(("age", "evicted"), [(2, ["default/late"]), (10, [])])
@pytest.mark.parametrize("direction", ["forward", "back"])
def test_close_after_killed_run_waits_for_scheduler(direction: str, age: int, evicted: list[str]) -> None:
    """The second run after a killed run waits until the scheduler knows the taint, because it can still bind a pod by its earlier state."""
    world = World(nodes=[node("a", {GPU: 8}, OWN if direction == "forward" else {})])
    if direction == "back":
        world.kinds["resourceslices"] = [slices("a")]
    mover(world, direction).drain()
    world.find("nodes", "a")["metadata"]["managedFields"] = [
        {"manager": running.MANAGER, "time": "2026-01-01T00:00:00Z"},
        {"manager": "kubelet", "time": "2026-01-01T00:00:59Z"},
    ]
    late = pod("late", {GPU: 1}, on="a", resources_from_claims=(GPU,) if direction == "back" else ())
    sleep, begin, bound = world.sleep, world.now, list[str]()

    def bind(seconds: float) -> None:
        sleep(seconds)
        if world.now >= begin + 2 and not bound:
            bound.append("late")
            world.kinds["pods"].append(late)
            world.kinds["resourceclaims"] = [claim("c", "a", late, made=True)] if direction == "back" else []

    def now() -> str:
        return f"2026-01-01T00:00:{age:02}Z"

    assert mover(world, direction, dry=True, now=now).drain().up_to_date is not bool(evicted)
    world.sleep = bind  # type: ignore[method-assign]
    done = mover(world, direction, now=now).drain()
    assert done.evicted == evicted and not any("taint" in each for each in done.steps)


def test_close_wait_lists_no_claims_daemon_sets_and_classes() -> None:
    world = foreign_world()
    world.budget = {"p": 3}
    done = mover(world).drain()
    assert "default/p" in done.evicted and world.now >= 6
    assert [world.lists.count(kind) for kind in ("resourceclaims", "daemonsets", "deviceclasses")] == [1, 1, 1]
    driver_publishes(world)
    world.lists.clear()
    mover(world).return_to_service()
    assert [world.lists.count(kind) for kind in ("resourceclaims", "daemonsets", "deviceclasses")] == [1, 1, 1]


def test_back_lists_claims_again_after_wait() -> None:
    """A claim is allocated after the first list. The known claims are read by name while their pods end."""
    first, late = (pod(name, {GPU: 1}, on="a", resources_from_claims=(GPU,)) for name in ("first", "late"))
    world = World(nodes=[node("a", {GPU: 8})], pods=[first], resourceslices=[slices("a")])
    world.kinds["resourceclaims"] = [claim("c", "a", first, made=True)]
    world.budget = {"first": 3}
    sleep = world.sleep

    def sleep_and_allocate(seconds: float) -> None:
        if world.now == 0:
            world.kinds["pods"].append(late)
            world.kinds["resourceclaims"].append(claim("c-late", "a", late, made=True))
        sleep(seconds)

    done = mover(world, "back", sleep=sleep_and_allocate).drain()
    assert done.evicted == ["default/first", "default/late"] and world.now >= 6
    # One list for the plan, one that finds the late claim, and one that finds none.
    assert [world.lists.count(kind) for kind in ("resourceclaims", "daemonsets", "deviceclasses")] == [3, 3, 3]


def test_own_plugin_forward_and_back() -> None:
    world = own_world()
    before = json.dumps(world.kinds["nodes"][0]["spec"])
    done = mover(world).drain()
    assert done.evicted == ["default/p"] and names(world) == ["other"] and taints(world) == ["forward"]
    driver_publishes(world)
    assert mover(world, dry=True).drain().up_to_date
    outcome = mover(world, dry=True).return_to_service()
    assert outcome.steps == ["remove the taint when the devices are published"] and not outcome.up_to_date
    assert (
        mover(world).return_to_service().steps == ["removed the taint dra.accelerators/migration from Node a"]
        and taints(world) == []
    )
    assert mover(world, dry=True).drain().up_to_date and mover(world, dry=True).return_to_service().up_to_date
    assert nodes.RECORD not in world.find("nodes", "a")["metadata"]["annotations"]
    # The second run writes nothing.
    world.writes.clear()
    assert (mover(world).drain().steps, mover(world).return_to_service().steps, world.writes) == ([], [], [])

    unchanged = pod("p", {GPU: 1}, on="a", resources_from_claims=(GPU,))
    world.kinds["pods"].append(unchanged)
    world.kinds["resourceclaims"] = [claim("c", "a", unchanged, made=True)]
    done = mover(world, "back").drain()
    assert done.evicted == ["default/p"] and taints(world) == ["back"]
    driver_offers(world)
    mover(world, "back").return_to_service()
    assert (
        json.dumps(world.find("nodes", "a")["spec"]) == before and world.find("nodes", "a")["metadata"]["labels"] == OWN
    )
    world.writes.clear()
    assert (mover(world, "back").drain().steps, mover(world, "back").return_to_service().steps, world.writes) == (
        [],
        [],
        [],
    )


@pytest.mark.parametrize(
    ("template", "way"),
    [
        ({}, "affinity"),
        ({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}, "affinity"),
        ({"nodeSelector": {"nvidia.com/gpu.deploy.device-plugin": "true"}}, "label"),
    ],
)
def test_foreign_plugin_leaves_one_node_and_returns(template: Json, way: str) -> None:
    world = foreign_world(**template)
    if way == "label":
        for each in world.kinds["nodes"]:
            each["metadata"]["labels"].update(template["nodeSelector"])
    before = json.dumps(
        [world.kinds["daemonsets"][0]["spec"], *(each["metadata"]["labels"] for each in world.kinds["nodes"])]
    )
    mover(world).drain()
    assert names(world) == ["far", "plugin-b"] and world.find("nodes", "a")["status"]["allocatable"] == {GPU: "0"}
    assert (nodes.KEPT_OFF in world.find("nodes", "a")["metadata"]["labels"]) == (way == "affinity")
    driver_publishes(world)
    mover(world).return_to_service()
    assert taints(world) == [] and names(world) == ["far", "plugin-b"]
    assert nodes.record_of(world.find("nodes", "a")["metadata"])["plugins"] == ["kube-system/plugin"]
    world.writes.clear()
    assert (mover(world).drain().steps, mover(world).return_to_service().steps, world.writes) == ([], [], [])

    mover(world, "back").drain()
    remove_driver(world)
    assert mover(world, "back", dry=True).return_to_service().steps == [
        "allow kube-system/plugin on this node",
        "remove the taint when the node offers its resources",
    ]
    mover(world, "back").return_to_service()
    after = json.dumps(
        [world.kinds["daemonsets"][0]["spec"], *(each["metadata"]["labels"] for each in world.kinds["nodes"])]
    )
    # A template without an affinity has the empty one that the API server adds.
    assert json.loads(after.replace(', "affinity": null', "")) == json.loads(before)
    assert names(world) == ["far", "plugin-a", "plugin-b"] and world.find("nodes", "a")["status"]["allocatable"] == {
        GPU: "8"
    }
    assert taints(world) == [] and nodes.record_of(world.find("nodes", "a")["metadata"]) == {}


class Killed(Exception):
    """Simulated end of the run."""


@pytest.mark.parametrize("make", [own_world, foreign_world])
@pytest.mark.parametrize("direction", ["forward", "back"])
def test_run_killed_at_any_write_is_resumed(make: Callable[[], World], direction: str) -> None:
    """A run was interrupted after any write: a second run reaches the same end as an uninterrupted one."""

    def run(world: World) -> None:
        mover(world, direction).drain()
        if direction == "forward":
            driver_publishes(world)
        else:
            (driver_offers if make is own_world else remove_driver)(world)
        mover(world, direction).return_to_service()

    def prepared() -> World:
        world = make()
        if direction == "back":
            mover(world).drain()
            driver_publishes(world)
            mover(world).return_to_service()
            unchanged = pod("q", {GPU: 1}, on="a", resources_from_claims=(GPU,))
            world.kinds["pods"].append(unchanged)
            world.kinds["resourceclaims"] = [claim("c", "a", unchanged, made=True)]
        world.writes.clear()
        return world

    def state(world: World) -> Json:
        found = json.loads(json.dumps(world.kinds))
        for each in [*found["nodes"], *found["daemonsets"]]:
            each["metadata"].pop("resourceVersion")
        found["pods"].sort(key=lambda each: str(each["metadata"]["name"]))
        return dict(found)

    def limited(request: Any, budget: list[int], method: str, path: str, **options: Any) -> Json:
        if method != "GET":
            if not budget[0]:
                raise Killed
            budget[0] -= 1
        answer: Json = request(method, path, **options)
        return answer

    whole = prepared()
    run(whole)
    assert len(whole.writes) >= 3
    for last in range(len(whole.writes)):
        world = prepared()
        request = world.request
        budget = [last]
        world.request = partial(limited, request, budget)  # type: ignore[method-assign]
        with pytest.raises(Killed):
            run(world)
        world.request = request  # type: ignore[method-assign]
        # A dry run reports beforehand whether there are changes.
        up_to_date = mover(world, direction, dry=True).drain().up_to_date
        world.writes.clear()
        assert bool(mover(world, direction).drain().steps) != up_to_date, f"after {last} writes"
        assert bool(world.writes) != up_to_date and mover(world, direction, dry=True).drain().up_to_date
        run(world)
        assert state(world) == state(whole), f"cut short after {last} writes"


def test_close_respects_budgets_and_names_them_at_timeout() -> None:
    world = own_world()
    world.budget = {"p": 3}
    done = mover(world).drain()
    assert done.evicted == ["default/p"] and world.now >= 3 * running.POLL_SECONDS
    stuck = own_world()
    stuck.budget = {"p": 10**6}
    with pytest.raises(running.TimeIsUp, match=r"default/p \(.*disruption budget") as caught:
        mover(stuck).drain()
    assert caught.value.pods == ("default/p",) and names(stuck) == ["other", "p"] and taints(stuck) == ["forward"]


def test_close_blocked_or_check_mode_changes_nothing() -> None:
    world = own_world()
    with pytest.raises(running.Blocked, match="The option evict does not allow the eviction") as caught:
        mover(world, wishes=nodes.MigrationOptions()).drain()
    assert caught.value.to_dict()["problems"][0]["code"] == "no-consent" and world.writes == []
    done = mover(world, dry=True).drain()
    assert done.evicted == ["default/p"] == done.blocked_by and not done.up_to_date and world.writes == []
    assert done.steps == [
        "add the taint dra.accelerators/migration=forward:NoSchedule, which keeps new pods off the node",
        "these pods are evicted: default/p",
    ]
    # The node was not drained, so there is nothing to return to service.
    assert mover(world, dry=True).return_to_service().up_to_date
    # The run waits for pods that it does not evict.
    waits = nodes.MigrationOptions(accept=frozenset({"no-consent"}))
    done = mover(world, wishes=waits, dry=True).drain()
    assert (done.evicted, done.blocked_by) == ([], ["default/p"])
    assert done.steps[-1] == "this run waits for these pods: default/p"
    with pytest.raises(running.TimeIsUp):
        mover(world, wishes=waits).drain()
    assert not any(path.endswith("/eviction") for _method, path in world.writes)


def test_close_conflict_is_retried() -> None:
    world = own_world()
    world.conflicts = 2
    mover(world).drain()
    assert taints(world) == ["forward"]


def test_foreign_taints_are_kept() -> None:
    world = own_world()
    theirs = {"key": "example.com/mine", "effect": "NoSchedule"}
    world.find("nodes", "a")["spec"]["taints"] = [theirs]
    mover(world).drain()
    driver_publishes(world)
    mover(world).return_to_service()
    assert world.find("nodes", "a")["spec"]["taints"] == [theirs]


def test_close_pods_tolerating_everything_do_not_return_without_plugin() -> None:
    world = foreign_world()
    everything = [{"operator": "Exists"}]
    world.kinds["pods"][0] = pod("p", {GPU: 1}, on="a", tolerations=everything)
    sleep = world.sleep

    def again(seconds: float) -> None:
        sleep(seconds)
        if world.find("nodes", "a")["status"]["allocatable"][GPU] != "0" and "p2" not in names(world):
            world.kinds["pods"].append(pod("p2", {GPU: 1}, on="a", tolerations=everything))

    done = mover(world, sleep=again, timeout=600)
    with pytest.raises(running.TimeIsUp):
        # The pod returns while the plugin runs: the wait has a limit.
        mover(world, sleep=again, timeout=1).drain()
    world.kinds["pods"] = [each for each in world.kinds["pods"] if each["metadata"]["name"] != "p2"]
    done.drain()
    assert "p2" not in names(world)


def test_close_older_kubernetes_gets_no_empty_resource() -> None:
    world = own_world()
    world.minor = "34+"
    mover(world).drain()
    driver_publishes(world)
    patched: list[str] = []
    request = world.request

    def seen(method: str, path: str, **options: Any) -> Json:
        answer: Json = request(method, path, **options)
        if path.endswith("/status"):
            patched.append(path)
            if len(patched) == 1:
                # The kubelet still reports the plugin.
                world.find("nodes", "a")["status"]["allocatable"][GPU] = "0"
        return answer

    world.request = seen  # type: ignore[method-assign]
    steps = mover(world, timeout=300).return_to_service().steps
    assert len(patched) == 2 and world.find("nodes", "a")["status"]["allocatable"] == {}
    assert steps == [
        f"removed {GPU} from the status of Node a",
        "removed the taint dra.accelerators/migration from Node a",
    ]


# ---------------------------------------------------------------------- classes, leftovers


def services(*resources: str, classes: tuple[Json, ...] = ()) -> dict[str, inventory.Service]:
    return inventory.find_services(resources, classes)


def test_prepare_creates_missing_classes() -> None:
    world = World(deviceclasses=[device_class("gpu.nvidia.com")])
    kept = world.find("deviceclasses", "gpu.nvidia.com")["spec"]["selectors"]
    lines = running.prepare(world, services(GPU, MIG, "nvidia.com/gpu.shared"), dry=False)  # type: ignore[arg-type]
    assert lines == ["updated DeviceClass gpu.nvidia.com", "created DeviceClass mig-1g.10gb.nvidia.com"]
    whole = world.find("deviceclasses", "gpu.nvidia.com")["spec"]
    assert whole == {"selectors": kept, "extendedResourceName": GPU}
    part = world.find("deviceclasses", "mig-1g.10gb.nvidia.com")["spec"]
    assert part["extendedResourceName"] == MIG and "'1g.10gb'" in part["selectors"][0]["cel"]["expression"]
    classes = tuple(world.kinds["deviceclasses"])
    assert running.prepare(world, services(GPU, MIG, classes=classes), dry=False) == []  # type: ignore[arg-type]


def test_prepare_foreign_class_or_disabled_gate_is_rejected() -> None:
    with pytest.raises(AcceleratorError, match="another program or person created them"):
        running.prepare(World(deviceclasses=[device_class("gpu.nvidia.com", ours=False)]), services(GPU), dry=False)  # type: ignore[arg-type]
    world = World()
    world.drops_names = True
    with pytest.raises(AcceleratorError, match="DRAExtendedResource") as caught:
        running.prepare(world, services(GPU), dry=False)  # type: ignore[arg-type]
    assert caught.value.code == "gate-off"
    assert not asking.read_gate(world)["kept"] and asking.read_gate(World())["kept"]  # type: ignore[arg-type]


def test_finish_removes_shared_leftovers_with_last_node() -> None:
    closed = daemon_set("plugin", affinity=nodes.affinity_with({}))
    classes = [
        device_class("mig-1g.10gb.nvidia.com", MIG),
        device_class("gpu.nvidia.com", GPU),
        device_class("mine", "nvidia.com/mig-2g.20gb"),
    ]
    world = World(
        nodes=[node("a", {}, {nodes.KEPT_OFF: nodes.OFF})],
        daemonsets=[closed],
        deviceclasses=classes,
        resourceslices=[slices("a")],
    )
    assert running.remove_shared_objects(world, dry=False) == []  # type: ignore[arg-type]
    world.find("nodes", "a")["metadata"]["labels"] = {}
    world.kinds["resourceslices"] = []
    outcome = [
        "removed the affinity for dra.accelerators/device-plugin from DaemonSet kube-system/plugin",
        "removed DeviceClass mig-1g.10gb.nvidia.com",
    ]
    assert running.remove_shared_objects(world, dry=True) == outcome and world.writes == []  # type: ignore[arg-type]
    assert running.remove_shared_objects(world, dry=False) == outcome  # type: ignore[arg-type]
    assert sorted(each["metadata"]["name"] for each in world.kinds["deviceclasses"]) == ["gpu.nvidia.com", "mine"]
    assert running.remove_shared_objects(world, dry=False) == []  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the modules


def test_info_module_reports_migration(run_here: Callable[..., Json], monkeypatch: pytest.MonkeyPatch) -> None:
    world = foreign_world()
    world.kinds["nodes"].append(node("bare"))
    monkeypatch.setattr(device_plugin_migration_info, "connect", lambda _module, **_options: world)
    outcome = run_here("device_plugin_migration_info", {})
    assert [each["name"] for each in outcome["pods"]] == ["far", "p"] and set(outcome["nodes"]) == {"a", "b"}
    assert (
        outcome["counts"] == {"pods": 2, "by_plugin": 2, "by_claims": 0}
        and outcome["gate"]["kept"]
        and outcome["leftovers"] == []
    )
    assert [each["name"] for each in outcome["plugins"]] == ["plugin"]
    assert len(outcome["blocked"]) == 4 and "kube-system/plugin" in outcome["blocked"][0]
    free = run_here("device_plugin_migration_info", {"nodes": ["a"], "plugins": ["*"], "evict": True})
    assert free["blocked"] == [] and [each["verb"] for each in free["nodes"]["a"]["steps"]][:2] == ["taint", "evict"]
    assert world.writes == []
    world.find("nodes", "a")["spec"]["taints"] = [nodes.taint_of("forward")]
    assert "was interrupted" in run_here("device_plugin_migration_info", {})["leftovers"][0]


def test_module_migrates_a_node(run_here: Callable[..., Json], monkeypatch: pytest.MonkeyPatch) -> None:
    world = own_world()
    monkeypatch.setattr(device_plugin_migration, "connect", lambda _module, **_options: world)
    monkeypatch.setattr(running.time, "sleep", world.sleep)
    options = {"state": "drained", "node": "a"}
    assert run_here("device_plugin_migration", options)["error_code"] == "blocked"
    outcome = run_here("device_plugin_migration", {**options, "evict": True}, check=True)
    assert outcome["changed"] and outcome["evicted"] == ["default/p"] == outcome["blocked_by"] and world.writes == []
    assert (
        not outcome["up_to_date"]
        and run_here("device_plugin_migration", {**options, "state": "in_service"}, check=True)["up_to_date"]
    )
    prepared = run_here("device_plugin_migration", {"state": "prepared"})
    assert prepared["steps"] == ["created DeviceClass gpu.nvidia.com"]
    assert not run_here("device_plugin_migration", {"state": "prepared"})["changed"]
    assert run_here("device_plugin_migration", {"state": "drained"})["failed"]
