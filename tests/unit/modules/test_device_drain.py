# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Drain devices and return them to service: evicted pods, written objects, reasons for a blocked drain, and an unchanged second run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._drain import drain_plan as drain
from ansible_collections.dra.accelerators.plugins.module_utils._drain import drain_run as running
from ansible_collections.dra.accelerators.plugins.module_utils._drain.drain_plan import Consent, DrainRequest
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import ApiError
from ansible_collections.dra.accelerators.plugins.modules import device_drain
from drain_world import DRIVER, DrainWorld, busy_cluster, claim_of, device_with_counters, pool
from migration_world import node, pod

Json = dict[str, Any]
YES, NO, NOTHING = Consent(True), Consent(False), Consent(None)


def drainer(world: DrainWorld, consent: Consent = YES, **options: Any) -> running.Drainer:
    settings = {key: options.pop(key) for key in ("timeout", "grace_period", "dry", "now", "held") if key in options}
    asked = DrainRequest(**{"node": "a", "operation": "new-driver", **options})
    return running.Drainer(
        world,  # type: ignore[arg-type]
        asked,
        consent,
        clock=world.clock,
        sleep=world.sleep,
        **{"timeout": 60, "now": lambda: "then", **settings},
    )


def names(world: DrainWorld) -> list[str]:
    return sorted(each["metadata"]["name"] for each in world.kinds["pods"])


def test_drain_node_evicts_pods_and_returns_to_service() -> None:
    world = busy_cluster()
    done = drainer(world, reason="A new driver.").drain()
    assert world.evicted_pods == ["p0", "p1", "part"] and names(world) == ["far", "none"]
    assert world.rule_targets() == [("a", "")]
    assert done.steps == [
        f"tainted {DRIVER}/a/*",
        "evicted default/p0",
        "evicted default/p1",
        "evicted default/part",
    ]
    (rule,) = world.kinds["devicetaintrules"]
    assert rule["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "dra-accelerators",
        "dra.accelerators/drain": "new-driver",
        "dra.accelerators/node": "a",
    }
    assert rule["metadata"]["annotations"]["dra.accelerators/drain-since"] == "then"
    assert rule["metadata"]["annotations"]["dra.accelerators/reason"] == "A new driver."
    assert rule["spec"]["taint"] == {"key": "dra.accelerators/drain", "value": "new-driver", "effect": "NoSchedule"}
    # The second drain and the second return to service write nothing.
    world.writes.clear()
    assert (drainer(world, reason="A new driver.").drain().steps, world.writes) == ([], [])
    assert drainer(world).return_to_service().steps == [f"removed the taint of {DRIVER}/a/*"]
    world.writes.clear()
    assert (drainer(world).return_to_service().steps, world.writes, world.rule_targets()) == ([], [], [])


def refuse_evictions(world: DrainWorld, error: ApiError, *pods: str) -> list[str]:
    """Refuse the evictions of these pods. Return the list of refused requests, which grows."""
    request, refused = world.request, []

    def answer(method: str, path: str, **options: Any) -> Any:
        if path.endswith("/eviction") and path.split("/")[-2] in pods:
            refused.append(path)
            raise error
        return request(method, path, **options)

    world.request = answer  # type: ignore[method-assign]
    return refused


@pytest.mark.parametrize(
    ("status", "causes", "words"),
    [
        (403, ("NamespaceTerminating",), "The namespace is being deleted"),
        (403, (), "does not allow the eviction: p0 is protected"),
        (400, (), "failed: p0 is protected"),
        (422, (), "failed: p0 is protected"),
    ],
)
def test_drain_rejected_eviction_of_one_pod_evicts_others(status: int, causes: tuple[str, ...], words: str) -> None:
    world = busy_cluster()
    error = ApiError("p0 is protected", status=status, reason="Forbidden", causes=causes)
    refused = refuse_evictions(world, error, "p0")
    with pytest.raises(running.TimeIsUp) as caught:
        drainer(world).drain()
    assert world.evicted_pods == ["p1", "part"] and len(refused) > 1
    ((pod_key, reason),) = [(each["pod"], each["reason"]) for each in caught.value.blocked]
    assert pod_key == "default/p0" and words in reason


@pytest.mark.parametrize(("status", "requests"), [(401, 1), (403, 3)])
def test_drain_without_eviction_permission_fails_at_once(status: int, requests: int) -> None:
    world = busy_cluster()
    refused = refuse_evictions(world, ApiError("not permitted", status=status), "p0", "p1", "part")
    with pytest.raises(ApiError, match="not permitted"):
        drainer(world).drain()
    assert len(refused) == requests


def test_drain_named_device_evicts_its_holders_only() -> None:
    world = busy_cluster()
    done = drainer(world, devices=("gpu-1",)).drain()
    assert done.evicted == ["default/p1"] and names(world) == ["far", "none", "p0", "part"]
    assert world.rule_targets() == [("a", "gpu-1")]
    assert [each["metadata"]["name"] for each in world.kinds["resourceclaims"] if each["status"].get("allocation")] == [
        "c0",
        "cp",
        "cf",
    ]


def test_drain_overlapping_devices_are_drained_together() -> None:
    world = busy_cluster()
    done = drainer(world, devices=("gpu-2",), overlapping=True).drain()
    assert done.evicted == ["default/part"]
    assert world.rule_targets() == [("a", "gpu-2"), ("a", "gpu-2-mig-0"), ("a", "gpu-2-mig-2")]
    # The other half of the GPU does not overlap with this one.
    half = busy_cluster()
    drainer(half, devices=("gpu-2-mig-2",), overlapping=True).drain()
    assert half.rule_targets() == [("a", "gpu-2"), ("a", "gpu-2-mig-2")] and half.evicted_pods == []


def test_drain_named_claims_keeps_their_devices_drained() -> None:
    world = busy_cluster()
    assert drainer(world, claims=("default/c0",)).drain().evicted == ["default/p0"]
    assert world.rule_targets() == [("a", "gpu-0")]
    assert drainer(world, claims=("default/c0",)).drain().steps == []
    assert world.rule_targets() == [("a", "gpu-0")]


@pytest.mark.parametrize("devices", [(), ("gpu-0",)])
def test_drain_without_consent_changes_nothing_and_names_pods(devices: tuple[str, ...]) -> None:
    world = busy_cluster()
    with pytest.raises(running.Blocked, match=r"use devices of a: default/p0 \(claim c0\)") as caught:
        drainer(world, NOTHING, devices=devices).drain()
    assert [each["code"] for each in caught.value.to_dict()["problems"]] == ["no-consent"] and world.writes == []
    # Without claims no pod is evicted.
    world.kinds["resourceclaims"] = []
    drainer(world, NOTHING, devices=devices).drain()
    assert len(world.rule_targets()) == 1


def test_drain_wait_reads_claims_by_name() -> None:
    world = busy_cluster()
    world.unending = {"p0"}
    sleep = world.sleep

    def ends(seconds: float) -> None:
        if world.now > 100:
            world.unending.clear()
        sleep(seconds)

    world.sleep = ends  # type: ignore[method-assign]
    drainer(world, timeout=600).drain()
    # One list at the start, and one at the end that finds no new claims.
    assert world.claim_reads.count("list") == 2 and world.claim_reads[-1] == "list"
    assert set(world.claim_reads) == {"list", "c0", "c1", "cp"} and world.claim_reads.count("c0") > 40


def test_drain_unused_devices_again_lists_claims_once() -> None:
    """The taint existed when the list began, so no claim was allocated after it: one list is enough."""
    world = busy_cluster()
    drainer(world).drain()
    world.claim_reads.clear()
    listing = world.list_all

    def read(path: str, query: Any, *keep: Any) -> list[Json]:
        found = listing(path, query, *keep)
        world.now += 10 if path.endswith("/resourceclaims") else 0
        return found

    world.list_all = read  # type: ignore[method-assign]
    assert drainer(world).drain().steps == [] and world.claim_reads == ["list"]


@pytest.mark.parametrize("held", [["default/c0", "default/c1", "default/cp", "default/gone"], []])
def test_plan_with_known_claims_lists_none(held: list[str]) -> None:
    world = busy_cluster()
    done = drainer(world, dry=True, held=held).drain()
    assert world.claim_reads == [each.partition("/")[2] for each in held]
    assert done.evicted == (["default/p0", "default/p1", "default/part"] if held else [])


def test_drain_with_known_claims_finds_new_claims() -> None:
    """The last claim was allocated after the caller listed the claims: the drain still finds it."""
    world = busy_cluster()
    assert drainer(world, held=["default/c0"]).drain().evicted == ["default/p0", "default/p1", "default/part"]
    assert world.claim_reads[0] == "c0" and world.claim_reads[-1] == "list"
    world = busy_cluster()
    assert drainer(world, held=[]).drain().evicted == ["default/p0", "default/p1", "default/part"]


def test_drain_claim_allocated_during_wait_is_drained() -> None:
    world = busy_cluster()
    late = pod("late", on="a")
    sleep = world.sleep

    def comes(seconds: float) -> None:
        sleep(seconds)
        if late not in world.kinds["pods"] and "p0" not in names(world) and "late" not in world.evicted_pods:
            world.kinds["pods"].append(late)
            world.kinds["resourceclaims"].append(claim_of("c-late", "a", "gpu-0", pods=(late,)))

    world.sleep = comes  # type: ignore[method-assign]
    assert drainer(world).drain().evicted == ["default/p0", "default/p1", "default/part", "default/late"]


def test_drain_failed_eviction_is_retried() -> None:
    world = busy_cluster()
    request = world.request
    failures = {"p0": [503, 0, 429, 500], "p1": [500]}

    def fails(method: str, path: str, **more: Any) -> Json:
        name = path.split("/")[-2]
        if path.endswith("/eviction") and failures.get(name):
            raise ApiError("the server is away", status=failures[name].pop())
        return request(method, path, **more)

    world.request = fails  # type: ignore[method-assign]
    done = drainer(world).drain()
    assert sorted(done.evicted) == ["default/p0", "default/p1", "default/part"] and not any(failures.values())


def test_drain_without_eviction_waits_for_pods() -> None:
    world = busy_cluster()
    sleep = world.sleep

    def ends(seconds: float) -> None:
        if world.now > 20:
            world.find("pods", "p0")["metadata"]["deletionTimestamp"] = "now"
        sleep(seconds)

    found = drainer(world, NO, devices=("gpu-0",))
    found._sleep = ends
    done = found.drain()
    assert world.evicted_pods == [] and done.evicted == [] and 20 < done.waited < 60 and "p0" not in names(world)


def test_drain_check_mode_lists_pods_and_writes_nothing() -> None:
    world = busy_cluster()
    done = drainer(world, dry=True).drain()
    assert done.evicted == ["default/p0", "default/p1", "default/part"] and world.writes == [] and world.now == 0
    assert done.steps[0] == f"taint {DRIVER}/a/*" and done.plan is not None
    asked = drainer(world, NOTHING, dry=True).drain()
    assert (
        asked.plan is not None and [each.code for each in asked.plan.problems] == ["no-consent"] and asked.evicted == []
    )
    reported = device_drain.result(done)
    assert reported["pods"][0] == {
        "namespace": "default",
        "name": "p0",
        "uid": "uid-default-p0",
        "claims": ["c0"],
        "owner": "ReplicaSet/rs",
        "deleting": False,
    }
    assert reported["claims"][0]["devices"] == [f"{DRIVER}/a/gpu-0"] and reported["changed"]


def test_drain_respects_budgets_and_names_them_at_timeout() -> None:
    world = busy_cluster()
    world.budget = {"p0": 3}
    assert "default/p0" in drainer(world).drain().evicted and world.now >= 3 * running.POLL_SECONDS
    stuck = busy_cluster()
    stuck.budget = {"p0": 10**6}
    stuck.unending = {"p1"}
    found = drainer(stuck)
    with pytest.raises(
        running.TimeIsUp, match=r"default/p0 \(.*disruption budget.*default/p1 \(it is terminating"
    ) as caught:
        found.drain()
    assert [(each["pod"], each["claims"]) for each in caught.value.blocked] == [
        ("default/p0", ["c0"]),
        ("default/p1", ["c1"]),
    ]
    assert stuck.rule_targets() == [("a", "")] and found.done.evicted == ["default/p1", "default/part"]


def test_drain_unreleased_claim_is_named() -> None:
    world = busy_cluster()
    world.tick = lambda: None  # type: ignore[method-assign]
    world.kinds["pods"] = []
    with pytest.raises(running.TimeIsUp, match=r"claim default/c0 .*no running pod uses it"):
        drainer(world, devices=("gpu-0",)).drain()


def test_drain_pods_without_controller_need_separate_consent() -> None:
    alone = pod("alone", on="a", owner=None)

    def world() -> DrainWorld:
        claims = [claim_of("c", "a", "gpu-0", pods=(alone,))]
        return DrainWorld(
            nodes=[node("a")],
            pods=[alone],
            resourceslices=[pool("a", device_with_counters("gpu-0", 0))],
            resourceclaims=claims,
        )

    one = world()
    with pytest.raises(running.Blocked, match="no controller that creates a replacement"):
        drainer(one).drain()
    assert one.writes == []
    two = world()
    assert drainer(two, Consent(True, evict_unmanaged=True)).drain().evicted == ["default/alone"]


def test_drain_pod_group_members_but_rejects_other_consumers() -> None:
    member = pod("member", on="a", schedulingGroup={"podGroupName": "team"})
    claims = [claim_of("c", "a", "gpu-0", groups=("team",))]
    slices = [pool("a", device_with_counters("gpu-0", 0))]
    world = DrainWorld(
        nodes=[node("a")], pods=[member, pod("other", on="a")], resourceslices=slices, resourceclaims=claims
    )
    found = drainer(world, dry=True).drain()
    assert found.evicted == ["default/member"]
    claims[0]["status"]["reservedFor"] = [{"resource": "robots", "name": "r", "uid": "u"}]
    strange = DrainWorld(nodes=[node("a")], resourceslices=slices, resourceclaims=claims)
    with pytest.raises(running.Blocked, match="robots r"):
        drainer(strange).drain()


def test_held_by_ignores_ended_and_replaced_pods() -> None:
    done, other = pod("done", on="a", phase="Succeeded"), pod("other", on="a")
    former = {**other, "metadata": {**other["metadata"], "uid": "former"}}
    held = drain.held_by(
        [drain.Target(DRIVER, "a")],
        [claim_of("c", "a", "gpu-0", pods=(done, former))],
        DrainRequest("a"),
    )
    assert len(held) == 1 and drain.holders_of(held, [done, other]) == ()


def test_drain_pod_bound_before_rule_is_evicted() -> None:
    """The scheduler binds a pod with state from before the rule: the pod appears after the first empty list, and is evicted."""
    world = busy_cluster()
    sleep, late = world.sleep, pod("late", on="a")

    def comes(seconds: float) -> None:
        sleep(seconds)
        if not late["status"].get("was"):
            late["status"]["was"] = True
            world.kinds["pods"].append(late)
            world.kinds["resourceclaims"].append(claim_of("cl", "a", "gpu-2-mig-2", pods=(late,)))

    found = drainer(world, devices=("gpu-2-mig-2",))
    found._sleep = comes
    assert found.drain().evicted == ["default/late"]


def test_drain_slow_list_finds_claim_allocated_after_rule() -> None:
    """The scheduler allocates 3 s after the rule. Listing the claims takes 10 s and returns the state at its start: the claim is found."""
    world, late = busy_cluster(), pod("late", on="a")
    world.kinds["resourceclaims"] = []
    ruled: list[float] = []
    rule, listing = world._rule, world.list_all

    def write(method: str, *arguments: Any) -> Json:
        if method == "POST":
            ruled.append(world.now)
        return rule(method, *arguments)

    def read(path: str, query: Any, *keep: Any) -> list[Json]:
        if ruled and world.now >= ruled[0] + 3 and "late" not in world.evicted_pods and late not in world.kinds["pods"]:
            world.kinds["pods"].append(late)
            world.kinds["resourceclaims"].append(claim_of("cl", "a", "gpu-0", pods=(late,)))
        found = listing(path, query, *keep)
        world.now += 10 if path.endswith("/resourceclaims") else 0
        return found

    world._rule, world.list_all = write, read  # type: ignore[method-assign]
    assert drainer(world).drain().evicted == ["default/late"]


@pytest.mark.parametrize(("age", "evicted"), [(2, ["default/late"]), (4, ["default/late"]), (10, [])])
def test_drain_after_killed_run_waits_for_scheduler(age: int, evicted: list[str]) -> None:
    """The second run after a killed run waits until the scheduler knows the rule, because it can still allocate by its earlier state."""
    world, late = busy_cluster(), pod("late", on="a")
    world.kinds["resourceclaims"] = []
    drainer(world).drain()
    (rule,) = world.kinds["devicetaintrules"]
    rule["metadata"]["managedFields"][0]["time"] = "2026-01-01T00:00:00Z"
    sleep, begin = world.sleep, world.now

    def allocate(seconds: float) -> None:
        sleep(seconds)
        if world.now >= begin + 2 and "late" not in world.evicted_pods and late not in world.kinds["pods"]:
            world.kinds["pods"].append(late)
            world.kinds["resourceclaims"].append(claim_of("cl", "a", "gpu-0", pods=(late,)))

    world.sleep = allocate  # type: ignore[method-assign]
    done = drainer(world, now=lambda: f"2026-01-01T00:00:{age:02}Z").drain()
    assert done.evicted == evicted and not any("taint" in each for each in done.steps)


def test_drain_keeps_rules_of_other_operations_and_nodes() -> None:
    world = busy_cluster()
    drainer(world, operation="other", devices=("gpu-0",)).drain()
    drainer(world, node="b", devices=("gpu-0",)).drain()
    drainer(world, devices=("gpu-0", "gpu-1")).drain()
    done = drainer(world, devices=("gpu-1",)).drain()
    assert done.steps == [f"removed the taint of {DRIVER}/a/gpu-0"]
    assert [(each["operation"], each["device"]) for each in done.others] == [("other", "gpu-0")]
    assert drainer(world).return_to_service().steps == [f"removed the taint of {DRIVER}/a/gpu-1"]
    assert world.rule_targets() == [("a", "gpu-0"), ("b", "gpu-0")]
    assert len(drainer(world, node="").return_to_service().steps) == 1 and world.rule_targets() == [("a", "gpu-0")]


def test_drain_resumed_rule_is_renewed_and_only_old_ones_are_removed() -> None:
    world = busy_cluster()
    times = {"begin": "2026-01-01T00:00:00Z", "soon": "2026-01-01T00:09:00Z", "late": "2026-01-01T01:00:00Z"}

    def at(when: str) -> running.Drainer:
        return drainer(world, now=lambda: times[when])

    at("begin").drain()
    assert at("soon").drain().steps == []
    assert at("soon").return_to_service(older_than=600).steps == [] and world.rule_targets() == [("a", "")]
    # An hour later another run takes over the rule: its creation time stays, and its renewal time is new.
    assert at("late").drain().steps == [f"tainted {DRIVER}/a/*"]
    (rule,) = world.kinds["devicetaintrules"]
    notes = rule["metadata"]["annotations"]
    assert notes["dra.accelerators/drain-since"] == times["begin"]
    assert notes["dra.accelerators/drain-renewed"] == times["late"]
    assert at("late").drain().steps == []
    assert at("late").return_to_service(older_than=1800).steps == []
    assert at("late").return_to_service().steps == [f"removed the taint of {DRIVER}/a/*"]


def test_rule_without_age_is_not_leftover() -> None:
    rule = {"metadata": {"name": "r"}}
    assert drain.rule_age(rule, "2026-01-01T00:00:00Z") is None and not drain.is_abandoned(
        rule, "2026-01-01T00:00:00Z", 1
    )
    rule["metadata"]["creationTimestamp"] = "2025-12-31T23:59:00Z"  # type: ignore[assignment]
    assert drain.rule_age(rule, "2026-01-01T00:00:00Z") == 60.0


@pytest.mark.parametrize(
    ("published", "wanted", "same"),
    [
        ("580.95.5", "580.95.05", True),
        ("24.1.0-rc.2", "24.1.rc2", True),
        ("25.0.0-rc.1.1", "25.0.RC1.1", True),
        ("25.2.0", "25.2", True),
        ("24.1.0-rc.1", "24.1.rc2", False),
        ("24.1.0", "24.1.rc2", False),
    ],
)
def test_version_comparison_ignores_vendor_spelling(published: str, wanted: str, *, same: bool) -> None:
    slices = [pool("a", {"name": "gpu-0", "attributes": {"driverVersion": {"version": published}}})]
    pools = [drain.Target(DRIVER, "a")]
    assert (not drain.attribute_differences(slices, DrainRequest(node="a"), pools, {"driverVersion": wanted})) is same


def test_drain_rejected_rule_removes_earlier_rules() -> None:
    world = busy_cluster()
    world.maximum_rules = 1
    with pytest.raises(ApiError):
        drainer(world, devices=("gpu-0", "gpu-1")).drain()
    assert world.rule_targets() == [] and world.evicted_pods == []


@pytest.mark.parametrize("last", range(5))
def test_drain_killed_at_any_write_is_resumed(last: int) -> None:
    world = busy_cluster()
    request, left = world.request, [last]

    class Killed(Exception):
        pass

    def until(method: str, path: str, **more: Any) -> Json:
        if method != "GET":
            if not left[0]:
                raise Killed
            left[0] -= 1
        return request(method, path, **more)

    world.request = until  # type: ignore[method-assign]
    if last < 4:
        with pytest.raises(Killed):
            drainer(world).drain()
    world.request = request  # type: ignore[method-assign]
    drainer(world).drain()
    assert names(world) == ["far", "none"] and world.rule_targets() == [("a", "")]


def test_drain_without_published_slices_keeps_rules() -> None:
    world = busy_cluster()
    drainer(world, devices=("gpu-0",)).drain()
    world.kinds["resourceslices"] = []
    assert drainer(world, devices=("gpu-0",)).drain().steps == [] and world.rule_targets() == [("a", "gpu-0")]
    unpublished = busy_cluster()
    unpublished.kinds["resourceslices"] = []
    drainer(unpublished).drain()
    assert unpublished.evicted_pods == ["p0", "p1", "part"] and unpublished.rule_targets() == [("a", "")]


def test_drain_grace_period_is_sent() -> None:
    world = busy_cluster()
    drainer(world, devices=("gpu-0",), grace_period=7).drain()
    assert world.options == [{"preconditions": {"uid": "uid-default-p0"}, "gracePeriodSeconds": 7}]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"devices": ("gpu-9",)}, "no-device"),
        ({"node": "c"}, "no-node"),
        ({"operation": "two words"}, "invalid-operation"),
        ({"operation": "o" * 64}, "invalid-operation"),
    ],
)
def test_drain_invalid_request_is_rejected(asked: Json, code: str) -> None:
    world = busy_cluster()
    with pytest.raises(drain.DrainError) as caught:
        drainer(world, **asked).drain()
    assert caught.value.code == code and world.writes == []


def test_drain_server_without_rules_or_foreign_rule_is_rejected() -> None:
    world = busy_cluster()
    world.served = False
    with pytest.raises(ApiError) as caught:
        drainer(world)
    assert caught.value.code == "api-version"
    taken = busy_cluster()
    drainer(taken).drain()
    taken.kinds["devicetaintrules"][0]["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    assert drainer(taken).return_to_service().steps == [] and taken.rule_targets() == [("a", "")]


def test_return_to_service_waits_until_devices_are_published_as_expected() -> None:
    world = busy_cluster()
    drainer(world, drivers=(DRIVER,)).drain()

    def publishes(version: str) -> None:
        for each in world.kinds["resourceslices"]:
            for device in each["spec"]["devices"]:
                device["attributes"] = {"driverVersion": {"version": version}}

    publishes("580.65.6")
    with pytest.raises(running.TimeIsUp, match=r"has driverVersion 580\.65\.6, expected 580\.105\.08"):
        drainer(world).return_to_service({"driverVersion": "580.105.08"})
    assert world.rule_targets() == [("a", "")]
    sleep = world.sleep

    def later(seconds: float) -> None:
        sleep(seconds)
        if world.now > 100:
            publishes("580.105.8")

    found = drainer(world)
    found._sleep = later
    assert found.return_to_service({"driverVersion": "580.105.08"}).waited > 0 and world.rule_targets() == []
    # Without drained devices the call does not wait.
    assert drainer(world).return_to_service({"driverVersion": "1"}).waited == 0


def test_module_options_that_need_a_node(run_here: Callable[..., Json], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a node the module removes an operation's rules on all nodes. Without the DeviceTaintRule API there are no rules."""
    world = busy_cluster()
    for name in ("a", "b"):
        drainer(world, node=name, devices=("gpu-0",)).drain()
    monkeypatch.setattr(device_drain, "connect", lambda module, **_options: world)
    opening = {"state": "in_service", "operation": "new-driver"}
    refused = run_here("device_drain", {**opening, "published": {"driverVersion": 1}})
    assert refused["error_code"] == "no-node" and len(world.rule_targets()) == 2
    assert len(run_here("device_drain", opening)["steps"]) == 2 and world.rule_targets() == []
    world.served = False
    assert not run_here("device_drain", {**opening, "node": "a"})["changed"]
    drained = run_here("device_drain", {"state": "drained", "node": "a", "evict": True})
    assert drained["error_code"] == "api-version"
    assert run_here("device_drain", {"state": "drained"})["failed"]


def test_drain_lists_published_pools() -> None:
    world = busy_cluster()
    assert drainer(world, drivers=(DRIVER,), dry=True).drain().published == [f"{DRIVER}/a"]
    world.kinds["resourceslices"][0]["spec"]["pool"]["resourceSliceCount"] = 2
    done = drainer(world, drivers=(DRIVER,), dry=True).drain()
    assert done.published == []
    world.kinds["resourceslices"] = []
    drainer(world).drain()
    with pytest.raises(running.TimeIsUp, match="is not published"):
        drainer(world).return_to_service({"driverVersion": "1"})
