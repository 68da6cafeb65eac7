# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The active parts of the controller with an HTTP server: watch, leader election, and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from controller_steps import (
    CLAIMS,
    LEASE,
    NODES,
    OWN_CLAIMS,
    RULES,
    SLICES,
    candidate,
    cluster_of,
    new_cleanup_loop,
    run,
    running,
    until,
)
from dra_driver.api.client import ApiClient
from dra_driver.api.watching import Watched
from dra_driver.controller.cleanup.cleanup_loop import GATHER_SECONDS, WatchEnded
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.facts import RuleFacts, rule_facts
from dra_driver.controller.lease import LeaseTimes
from dra_driver.deadlines import within
from object_server import ObjectServer


def watched(client: ApiClient, **options: Any) -> Watched[str]:
    async def path() -> str:
        return NODES

    async def soon(_seconds: float) -> None:
        await asyncio.sleep(0.01)

    def keep(item: dict[str, Any]) -> str | None:
        return item.get("spec", {}).get("kept")

    return Watched(client, "Nodes", path, keep, wait=soon, **options)


def test_watched_list_is_read_in_pages_and_followed(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for number in range(7):
            server.put(f"{NODES}/n{number}", {"spec": {"kept": str(number)}})
        nodes = watched(client, page=3)
        async with running(nodes.run()):
            await until(lambda: server.count("WATCH", NODES))
            assert (len(nodes.items), server.count("GET", NODES)) == (7, 3)
            server.put(f"{NODES}/new", {"spec": {"kept": "new"}})
            server.put(f"{NODES}/n0", {"spec": {"kept": "changed"}})
            server.put(f"{NODES}/n1", {"spec": {}})
            server.remove(f"{NODES}/n2")
            await until(lambda: len(nodes.items) == 6)
            assert nodes.items["/n0"] == "changed" and nodes.items["/new"] == "new"
            server.end_watches()
            await until(lambda: server.count("WATCH", NODES) == 2)
            assert server.count("GET", NODES) == 3, "a watch that ends is taken up where it ended"
            server.objects.pop(f"{NODES}/n3")
            server.end_watches(error=410)
            await until(lambda: "/n3" not in nodes.items)
            assert server.count("GET", NODES) == 5, "a watch with an expired version lists again"

    run(tmp_path, scenario)


def test_watched_without_a_connection_is_not_current(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        server.put(f"{NODES}/a", {"spec": {"kept": "a"}})
        nodes = watched(client)
        seen: list[bool] = []
        nodes._changed = lambda: seen.append(nodes.current)
        async with running(nodes.run()):
            await until(lambda: server.count("WATCH", NODES))
            server.refusals += [("WATCH", NODES, 500), ("GET", NODES, 500)]
            server.end_watches()
            await until(lambda: not nodes.current)
            await until(lambda: nodes.current)
            assert nodes.items == {"/a": "a"}

    run(tmp_path, scenario)


@pytest.mark.parametrize("turns", range(6))
def test_watched_wait_can_be_cancelled_at_any_time(turns: int) -> None:
    async def scenario() -> None:
        happened = asyncio.Event()

        async def loop() -> None:
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(happened.wait(), 0.001)
                await asyncio.sleep(0)

        task = asyncio.ensure_future(loop())
        await asyncio.sleep(0)
        happened.set()
        for _turn in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _pending = await asyncio.wait((task,), timeout=5)
        assert done and task.cancelled()

    asyncio.run(scenario())


def test_lease_follower_leads_after_the_leader_releases_it(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        leading: list[str] = []
        terms = LeaseTimes(lease_seconds=4.0, renew_seconds=2.0, retry_seconds=0.05)
        one, two = (candidate(client, name, times=terms) for name in ("one", "two"))

        async def work(name: str) -> None:
            leading.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                leading.remove(name)

        async with running(two.run_as_leader(lambda: work("two"))):
            async with running(one.run_as_leader(lambda: work("one"))):
                await until(lambda: leading)
                (first,) = leading
                elector = {"one": one, "two": two}[first]
                assert elector.holds and server.objects[LEASE]["spec"]["holderIdentity"] == first
                await asyncio.sleep(3.0)
                assert leading == [first] and elector.holds, "it is renewed"
            await until(lambda: leading == ["two"])
            assert server.objects[LEASE]["spec"]["holderIdentity"] == "two"
        assert not leading and server.objects[LEASE]["spec"]["holderIdentity"] == "", "it is released"

    run(tmp_path, scenario)


def test_lease_running_renewal_at_the_end_does_not_keep_the_lease(tmp_path: Path) -> None:
    """A renewal that is in flight at the stop still reaches the API server, and makes the release's resource version outdated."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        elector = candidate(client, "one", times=LeaseTimes(lease_seconds=4.0, renew_seconds=2.0, retry_seconds=0.05))

        async def work() -> None:
            await asyncio.Event().wait()

        async with running(elector.run_as_leader(work)):
            await until(lambda: elector.holds)
            await until(lambda: server.count("PUT", LEASE) > 1)
            send, sent = client.request, asyncio.Event()

            async def unheard(method: str, path: str, **options: Any) -> Any:
                answer = await send(method, path, **options)
                if method == "PUT" and not sent.is_set():
                    sent.set()
                    await asyncio.Event().wait()
                return answer

            client.request = unheard  # type: ignore[method-assign]
            await until(sent.is_set)
        assert server.objects[LEASE]["spec"]["holderIdentity"] == "", "it is released"

    run(tmp_path, scenario)


def test_lease_leader_without_renewals_stops_and_is_replaced(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        elector, state = candidate(client, "one"), []

        async def work() -> None:
            state.append("works")
            try:
                await asyncio.Event().wait()
            finally:
                state.append("stopped")

        async def thief() -> None:
            while True:
                server.put(LEASE, {"spec": {"holderIdentity": "thief", "acquireTime": "t"}})
                await asyncio.sleep(0.05)

        async with running(elector.run_as_leader(work)):
            await until(lambda: state == ["works"])
            server.refusals += [("GET", LEASE, 503)] * 1000
            await until(lambda: state == ["works", "stopped"])
            assert not elector.holds
            assert server.objects[LEASE]["spec"]["holderIdentity"] == "one", "the API server cannot be reached"
            server.refusals.clear()
            await until(lambda: state[-1] == "works")
            async with running(thief()):
                await until(lambda: state[-1] == "stopped")
                await asyncio.sleep(0.2)
                assert state[-1] == "stopped", "it belongs to another one now, who renews it"

    run(tmp_path, scenario)


def ours_left(server: ObjectServer) -> set[str]:
    kept = {path for path in server.objects if path.startswith((SLICES, RULES))}
    return kept | {
        path for path, one in server.objects.items() if path.startswith(OWN_CLAIMS) and one["status"].get("allocation")
    }


def test_pass_removes_objects_of_the_absent_node_only(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        measurements = ControllerMetrics()
        before = ours_left(server)
        removed = {f"{SLICES}/gone", f"{RULES}/gone", f"{OWN_CLAIMS}/gone-free", f"{OWN_CLAIMS}/gone-left"}
        async with running(new_cleanup_loop(client, measurements).run()):
            await until(lambda: ours_left(server) == before - removed)
            await until(lambda: server.objects[f"{OWN_CLAIMS}/gone-free"]["metadata"]["finalizers"] == ["else/held"])
            # An action counts after the server's answer.
            done = b'actions_total{action="deallocate-claim",outcome="done"} 2.0'
            await until(lambda: done in measurements.text())

        def reported() -> list[str]:
            reported_events = [one["message"] for path, one in server.objects.items() if "/events/" in path]
            return [text.partition(").")[2] for text in reported_events if "deleted" in text]

        await until(reported)
        assert reported() == [" The controller deleted 1 ResourceSlice and 1 DeviceTaintRule of it."]
        assert server.objects[f"{OWN_CLAIMS}/gone-used"]["metadata"]["finalizers"][0] == "dra.accelerators/held"
        assert b'actions_total{action="delete-slice",outcome="done"} 1.0' in measurements.text()

    run(tmp_path, scenario)


@pytest.mark.parametrize("first_list_answers", [False, True])
def test_watch_that_ends_stops_the_controller_for_a_restart(tmp_path: Path, first_list_answers: bool) -> None:
    """A watch ends before or after its first list: the controller stops. Otherwise it would hold the Lease without data."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        mine = new_cleanup_loop(client, ControllerMetrics())

        async def end() -> None:
            if first_list_answers:
                await asyncio.wait_for(mine.claims.synced.wait(), 10)
            raise RuntimeError("a fault of ours")

        mine.nodes.run = end  # type: ignore[method-assign]
        with pytest.raises(WatchEnded, match="The watch of Nodes has ended") as raised:
            await asyncio.wait_for(mine.run(), 10)
        assert str(raised.value.__cause__) == "a fault of ours"

    run(tmp_path, scenario)


def test_pass_reports_drift_and_progress_while_it_leads(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        def appear(release: str) -> None:
            labels = {"dra.accelerators/release": release}
            conditions = [{"type": "Ready", "status": "True"}]
            server.put(f"{NODES}/bare", {"metadata": {"labels": labels}, "status": {"conditions": conditions}})

        def reported_events() -> set[str]:
            return {one["reason"] for path, one in server.objects.items() if "/events/" in path}

        appear("1")
        measurements = ControllerMetrics()
        async with running(new_cleanup_loop(client, measurements, lasting=0.2).run()):
            await until(lambda: "DevicesNotPublished" in reported_events())
            assert b'drift{kind="no-slices"} 1.0' in measurements.text()
            appear("2")
            await until(lambda: "ReleaseChanged" in reported_events())
            assert b'nodes{release="2",state="drifting"} 1.0' in measurements.text()
        assert b'drift{kind="no-slices"} 0.0' in measurements.text() and b"nodes{" not in measurements.text()

    run(tmp_path, scenario)


def test_dry_run_writes_nothing_and_prints_the_plan(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        measurements = ControllerMetrics()
        async with running(new_cleanup_loop(client, measurements, dry_run=True).run()):
            await until(lambda: b'action="deallocate-claim",outcome="dry-run"} 2.0' in measurements.text())
        assert {method for method, _path in server.log} == {"GET", "WATCH"}
        planned = await new_cleanup_loop(client, measurements).plan_once()
        assert [f"{action.verb} {action.name}" for action in planned] == [
            "delete-slice gone",
            "delete-rule gone",
            "release-claim gone-free",
            "release-claim gone-left",
            "deallocate-claim gone-free",
            "deallocate-claim gone-left",
        ]

    run(tmp_path, scenario)


@pytest.mark.parametrize("after", [0.0, 0.2])
def test_pass_lifts_rules_of_a_killed_drain_if_enabled(tmp_path: Path, after: float) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        labels = {"app.kubernetes.io/managed-by": "dra-accelerators", "dra.accelerators/node": "here"}
        operation = {**labels, "dra.accelerators/drain": "monday"}
        by = [{"manager": "dra.accelerators.device-drain"}]
        server.put(f"{NODES}/here", {"metadata": {"labels": {}}})
        server.put(f"{RULES}/drained", {"metadata": {"labels": operation, "managedFields": by}})
        server.put(f"{RULES}/foreign", {"metadata": {"labels": operation, "managedFields": [{"manager": "kubectl"}]}})
        server.put(f"{RULES}/marked", {"metadata": {"labels": labels, "managedFields": by}})
        measurements = ControllerMetrics()
        async with running(new_cleanup_loop(client, measurements, lift_drains_after=after, lasting=0.1).run()):
            await until(lambda: b'drift{kind="drain-left"} 1.0' in measurements.text())
            if after:
                await until(lambda: b'action="lift-rule",outcome="done"} 1.0' in measurements.text())
                await until(lambda: b'drift{kind="drain-left"} 0.0' in measurements.text())
                await until(lambda: b'objects{kind="drains"} 0.0' in measurements.text())
            else:
                assert b'objects{kind="drains"} 1.0' in measurements.text()
        left = {path.rpartition("/")[2] for path in server.objects if path.startswith(RULES)}
        assert left == {"foreign", "marked"} | (set() if after else {"drained"})

    run(tmp_path, scenario)


def test_pass_without_leadership_writes_nothing(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        requested: list[bool] = []
        async with running(
            new_cleanup_loop(client, ControllerMetrics(), may_act=lambda: bool(requested.append(True))).run()
        ):
            await until(lambda: len(requested) > 3)
        assert {method for method, _path in server.log} == {"GET", "WATCH"}

    run(tmp_path, scenario)


def test_end_of_leadership_frees_the_objects_of_the_cluster(tmp_path: Path) -> None:
    async def lead(client: ApiClient) -> weakref.ref[Any]:
        measurements = ControllerMetrics()
        subject = new_cleanup_loop(client, measurements)
        async with running(subject.run()):
            await until(lambda: b'objects{kind="nodes"} 1.0' in measurements.text())
            assert gc.get_freeze_count()
        return weakref.ref(subject)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        ended = [await lead(client) for _term in range(3)]
        gc.collect()
        # asyncio can keep the exception of the last canceled task, and its frames, until the next one.
        assert [each() for each in ended[:-1]] == [None, None]
        assert not gc.get_freeze_count()

    run(tmp_path, scenario)


def test_new_claims_are_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.controller.cleanup.cleanup_loop.FREEZE_CLAIMS", 2, raising=False)
    frozen: list[int] = []
    freeze = gc.freeze

    def count() -> None:
        freeze()
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(gc, "freeze", count)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        subject = new_cleanup_loop(client, ControllerMetrics())
        async with running(subject.run()):
            await until(lambda: frozen and server.count("WATCH", CLAIMS))
            names = [f"new-{number}" for number in range(20)]
            for name in names:
                server.put(
                    f"{CLAIMS}/{name}", server.objects[f"{CLAIMS}/here-used"] | {"metadata": {"namespace": "team"}}
                )
            await until(lambda: {f"team/{name}" for name in names} <= set(subject.claims.items))
            await until(lambda: len(frozen) >= 2)

    run(tmp_path, scenario)


@pytest.mark.parametrize(("node", "starts"), [("here", False), ("gone", True)])
def test_changed_claim_starts_a_pass_only_for_an_absent_node(tmp_path: Path, node: str, starts: bool) -> None:
    """Claims of existing nodes change often: only a claim of an absent node starts a pass. Otherwise passes would never end."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        subject = new_cleanup_loop(client, ControllerMetrics(), grace=3600, interval=3600)
        passes, one_pass = list[int](), subject._pass

        async def count() -> None:
            passes.append(len(passes))
            await one_pass()

        subject._pass = count  # type: ignore[method-assign]
        async with running(subject.run()):
            await until(lambda: passes and server.count("WATCH", CLAIMS))
            # The lists at the start of the watches also start a pass.
            await until(lambda: len(passes) >= 1 and not subject._changed.is_set())
            await asyncio.sleep(2 * GATHER_SECONDS)
            before = len(passes)
            path = f"{CLAIMS}/{node}-used"
            changed = {**server.objects[path], "metadata": {"namespace": "team", "finalizers": ["new/held"]}}
            previous = subject.claims.items[f"team/{node}-used"]
            server.put(path, changed)
            await until(lambda: subject.claims.items[f"team/{node}-used"] != previous)
            assert subject._changed.is_set() is starts
            if starts:
                await until(lambda: len(passes) > before)
            assert (len(passes) > before) is starts

    run(tmp_path, scenario)


def test_pass_node_that_returned_unseen_keeps_its_objects(tmp_path: Path) -> None:
    """The watch has not reported the node yet: the answer of the API server decides, and everything is kept."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        measurements = ControllerMetrics()
        before = ours_left(server)
        # A read by name finds the node, but the list before did not.
        server.objects[f"{NODES}/gone"] = {"metadata": {"name": "gone", "uid": "u"}}
        subject = new_cleanup_loop(client, measurements)
        subject.nodes._keep = lambda item: None if item["metadata"]["name"] == "gone" else subject_facts(item)
        async with running(subject.run()):
            await until(lambda: b'action="deallocate-claim",outcome="not-needed"} 2.0' in measurements.text())
        assert ours_left(server) == before

    from dra_driver.controller.facts import node_facts as subject_facts

    run(tmp_path, scenario)


@pytest.mark.prove
@pytest.mark.parametrize("unserved", ["/pods/", "/nodes/gone", "/resourceclaims/"])
def test_pass_answers_without_a_reason_do_not_count_as_deleted(tmp_path: Path, unserved: str) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        claims = {
            path: one["status"]
            for path, one in server.objects.items()
            # No pod is read for a claim without reservations.
            if path.startswith(OWN_CLAIMS) and (unserved != "/pods/" or one["status"]["reservedFor"])
        }
        measurements = ControllerMetrics()
        server.unserved = (unserved,)
        async with running(new_cleanup_loop(client, measurements).run()):
            await until(lambda: server.count("GET", unserved) > 5)
            assert {path: server.objects[path]["status"] for path in claims} == claims
            assert b'action="deallocate-claim",outcome="not-needed"} 0.0' in measurements.text()
            server.unserved = ()
            await until(lambda: b'action="deallocate-claim",outcome="done"} 2.0' in measurements.text())
        assert server.objects[f"{OWN_CLAIMS}/gone-used"]["status"] == claims[f"{OWN_CLAIMS}/gone-used"]

    run(tmp_path, scenario)


def test_pass_drain_renewed_unseen_is_not_lifted(tmp_path: Path) -> None:
    """The watch has not reported the renewal yet: the answer of the API server decides, and the drain stays."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        labels = {"app.kubernetes.io/managed-by": "dra-accelerators", "dra.accelerators/node": "here"}
        rule = {
            "labels": {**labels, "dra.accelerators/drain": "monday"},
            "annotations": {"dra.accelerators/drain-renewed": "now"},
            "managedFields": [{"manager": "dra.accelerators.device-drain"}],
        }
        server.put(f"{NODES}/here", {"metadata": {"labels": {}}})
        server.put(f"{RULES}/drained", {"metadata": rule})
        measurements = ControllerMetrics()
        subject = new_cleanup_loop(client, measurements, lift_drains_after=0.1)

        def previous(item: Any) -> RuleFacts | None:
            found = rule_facts(item)
            return found._replace(renewed="before") if found else None

        subject.rules._keep = previous
        async with running(subject.run()):
            await until(lambda: b'action="lift-rule",outcome="not-needed"} 0.0' not in measurements.text())
        assert f"{RULES}/drained" in server.objects

    run(tmp_path, scenario)
