# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Detect disagreements in the cluster and their duration, and the progress of a rollout. Report each change once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from dra_driver.controller import drift, progress
from dra_driver.controller.cleanup.cleanup_plan import ClusterView
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.facts import NodeFacts, RuleFacts, SliceFacts, node_facts, slice_facts
from dra_driver.controller.reporting import ENDED, REASONS, Reporter
from dra_driver.core.partitioning.layout_differences import ANNOTATION
from hypothesis import given
from hypothesis import strategies as st

OURS, THEIRS = "gpu.example.com", "other.example.com"
NODES = ("a", "b", "c")

some_nodes = st.builds(
    NodeFacts, st.sampled_from(NODES), st.just("uid"), st.booleans(), st.just(False), st.sampled_from(("", "1", "2"))
)
some_slices = st.builds(
    SliceFacts,
    st.sampled_from("stuvwxyz"),
    st.just("uid"),
    st.sampled_from((OURS, THEIRS)),
    st.sampled_from((*NODES, "")),
    st.sampled_from(("p", "q")),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(((), ("d",), ("d", "e"))),
    st.sampled_from(((), (("0 (GPU-0)", "+ 1g"),), (("0 (GPU-0)", "− 2g"), ("1 (GPU-1)", "+ 1g")))),
)


@st.composite
def views(draw: Any) -> ClusterView:
    nodes = {node.name: node for node in draw(st.lists(some_nodes, max_size=3))}
    return ClusterView(nodes, draw(st.lists(some_slices, max_size=6)))


def node(name: str, release: str = "1", *, ready: bool = True, uses_device_plugin: bool = False) -> NodeFacts:
    return NodeFacts(name, f"uid-{name}", ready, False, release, uses_device_plugin)


def a_slice(name: str, at: str = "a", generation: int = 1, count: int = 1, **more: Any) -> SliceFacts:
    return SliceFacts(name, f"uid-{name}", OURS, at, at or "shared", generation, count, True)._replace(**more)


def view_of(nodes: list[NodeFacts], slices: list[SliceFacts]) -> ClusterView:
    return ClusterView({each.name: each for each in nodes}, slices)


def kinds(view: ClusterView, changed_at: float | None = None) -> list[tuple[str, str]]:
    return [(one.kind, one.node) for one in drift.findings(view, (OURS,), changed_at=changed_at)]


@pytest.mark.parametrize(
    ("view", "found"),
    [
        (view_of([node("a")], [a_slice("s")]), []),
        (view_of([], [a_slice("s")]), [(drift.NODE_ABSENT, "a")]),
        (view_of([node("a", ready=False)], [a_slice("s")]), [(drift.NODE_NOT_READY, "a")]),
        (view_of([node("a", ready=False)], []), [(drift.NODE_NOT_READY, "a")]),
        (view_of([node("a", release="", ready=False)], []), []),
        (view_of([node("a")], []), [(drift.NO_SLICES, "a")]),
        (view_of([node("a")], [a_slice("s", is_managed=False)]), [(drift.NO_SLICES, "a")]),
        (view_of([node("a", release="")], []), []),
        (view_of([node("a", uses_device_plugin=True)], []), []),
        (view_of([node("a", uses_device_plugin=True, ready=False)], []), [(drift.NODE_NOT_READY, "a")]),
        (view_of([node("a")], [a_slice("s", count=2)]), [(drift.POOL_INCOMPLETE, "a")]),
        (
            view_of([node("a")], [a_slice("s", generation=2, count=2), a_slice("t", count=2)]),
            [(drift.POOL_INCOMPLETE, "a")],
        ),
        (view_of([node("a")], [a_slice("s", generation=2), a_slice("t")]), [(drift.POOL_MIXED, "a")]),
        (view_of([node("a")], [a_slice("s", tainted=("d",))]), [(drift.DEVICE_TAINTED, "a")]),
        (view_of([], [a_slice("s", at="", count=2)]), [(drift.POOL_INCOMPLETE, "")]),
        (view_of([node("a")], [a_slice("s", differing=(("0 (GPU-0)", "+ 1g"),))]), [(drift.LAYOUT_DIFFERS, "a")]),
        (
            view_of([node("a")], [a_slice("s", generation=2), a_slice("t", differing=(("0 (GPU-0)", "+ 1g"),))]),
            [(drift.POOL_MIXED, "a")],
        ),
    ],
)
def test_findings_of_a_view(view: ClusterView, found: list[tuple[str, str]]) -> None:
    assert kinds(view) == found


def test_findings_nodes_without_the_most_frequent_release_are_behind() -> None:
    view = view_of([node("a"), node("b", "2"), node("c", "2")], [a_slice(name, at=name) for name in NODES])
    assert kinds(view) == [], "nothing is known of when they changed"
    assert kinds(view, changed_at=1.0) == [(drift.RELEASE_BEHIND, "a")]
    even = view_of([node("a"), node("b", "2")], [a_slice(name, at=name) for name in "ab"])
    assert kinds(even, changed_at=1.0) == [(drift.RELEASE_BEHIND, "a")], "one of two is reported, not both"


@given(view=views(), other=views())
def test_follow_only_uninterrupted_findings_last(view: ClusterView, other: ClusterView) -> None:
    """A finding that was interrupted restarts its time. Slices of other drivers are not reported."""
    first = drift.track({}, drift.findings(view, (OURS,)), now=0.0, lasting=10.0)
    second = drift.track(first, drift.findings(other, (OURS,)), now=5.0, lasting=10.0)
    third = drift.track(second, drift.findings(view, (OURS,)), now=10.0, lasting=10.0)
    assert not any(each.lasting for each in (*first.values(), *second.values()))
    assert {key for key, each in third.items() if each.lasting} == set(first) & set(second)
    assert set(third) == set(first)
    for key in first:
        assert key.event.driver in ("", OURS)
    # Each finding is reported once, and its end is reported.
    begun, ended = drift.reports({}, third, 10.0)
    assert set(begun) == {key.event for key, each in third.items() if each.lasting} and not ended
    assert drift.reports(begun, third, 10.0) == ({}, {})
    removed, over = drift.reports(begun, {}, 10.0)
    assert not removed and set(over) == set(begun)
    assert all(report.message for report in (*begun.values(), *over.values()))


def test_findings_pool_is_incomplete_exactly_as_for_the_scheduler() -> None:
    """Only the newest generation counts, and it needs the number of slices that it states."""
    for present in range(1, 4):
        for wanted in range(1, 4):
            old = [a_slice("old", generation=1, count=wanted)]
            new = [a_slice(f"n{number}", generation=2, count=wanted) for number in range(present)]
            found = {one.kind for one in drift.findings(view_of([node("a", "")], [*old, *new]), (OURS,))}
            assert (drift.POOL_INCOMPLETE in found) == (present < wanted)


@given(before=views(), after=views())
def test_changes_lead_from_the_previous_to_the_current_releases(before: ClusterView, after: ClusterView) -> None:
    known = progress.releases(before)
    changed = progress.release_changes(known, after)
    assert {**known, **{one.node: one.release for one in changed}} == {**known, **progress.releases(after)}
    assert all(one.release and one.former != one.release for one in changed)
    assert progress.release_changes(None, after) == [] == progress.release_changes(progress.releases(after), after)
    assert sum(progress.count_nodes(after, ()).values()) == len(progress.releases(after))


def test_counts_less_frequent_releases_are_counted_together() -> None:
    nodes = [node(f"n{number}", str(number)) for number in range(12)] + [node("m", "0", ready=False), node("l", "1")]
    counted = progress.count_nodes(view_of(nodes, []), {"l"})
    assert len({release for release, _state in counted}) == progress.MOST_RELEASES + 1
    assert counted[progress.OTHER, progress.READY] == 4
    assert counted["0", progress.NOT_READY] == counted["1", progress.DRIFTING] == 1


def test_facts_have_release_and_taints() -> None:
    assert node_facts({"metadata": {"name": "a", "labels": {"dra.accelerators/release": "0.1.0-12ab"}}}).release == (
        "0.1.0-12ab"
    )
    devices = [
        {"name": "d", "taints": [{"key": "k", "effect": "NoExecute"}]},
        {"name": "e", "taints": [{"key": "k", "effect": "None"}]},
        {"name": "f", "basic": {"taints": [{"key": "k", "effect": "NoSchedule"}]}},
        {"name": "g", "basic": {}},
    ]
    assert slice_facts({"metadata": {"name": "s"}, "spec": {"devices": devices}}).tainted == ("d", "f")


class Written:
    """A recorder of reports instead of Events. It refuses them while ``full``."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, str, str]] = []
        self.refused: list[str] = []
        self.full = False

    def _write(self, kind: str, subject: Any, reason: str, message: str) -> bool:
        if self.full:
            self.refused.append(subject.name)
        else:
            self.said.append((kind, subject.name, reason, message))
        return not self.full

    def warning(self, subject: Any, reason: str, message: str, *, action: str) -> bool:
        return self._write("Warning", subject, reason, message)

    def normal(self, subject: Any, reason: str, message: str, *, action: str) -> bool:
        return self._write("Normal", subject, reason, message)

    def taken(self) -> list[tuple[str, str]]:
        """Return the names and reasons since the last call."""
        output, self.said = self.said, []
        return [(name, reason) for _kind, name, reason, _message in output]


@dataclasses.dataclass
class Scene:
    written: Written
    measurements: ControllerMetrics
    reporter: Reporter

    def report_changes(self, view: ClusterView, now: float) -> list[tuple[str, str]]:
        asyncio.run(self.reporter.report_changes(view, {}, now))
        return self.written.taken()

    def counted(self, line: str) -> bool:
        return f"dra_accelerators_controller_{line}\n" in self.measurements.text().decode()


def scene(**options: Any) -> Scene:
    written, measurements = Written(), ControllerMetrics()
    events: Any = written
    return Scene(
        written,
        measurements,
        Reporter(drivers=(OURS,), events=events, measurements=measurements, lasting=10.0, **options),
    )


def test_drift_is_reported_once_when_it_lasts_and_once_when_it_ends() -> None:
    subject = scene()
    healthy, faulty = (view_of([node("a")], [a_slice("s", count=count)]) for count in (1, 2))
    assert subject.report_changes(faulty, 0.0) == subject.report_changes(faulty, 9.0) == []
    assert subject.counted('drift{kind="pool-incomplete"} 0.0')
    assert subject.report_changes(faulty, 10.0) == [("a", "PoolIncomplete")]
    assert subject.counted('drift{kind="pool-incomplete"} 1.0')
    assert subject.counted('nodes{release="1",state="drifting"} 1.0')
    assert subject.report_changes(faulty, 11.0) == subject.report_changes(faulty, 1000.0) == []
    assert subject.report_changes(healthy, 1001.0) == [("a", ENDED)]
    assert subject.counted('drift{kind="pool-incomplete"} 0.0')
    assert subject.counted('nodes{release="1",state="ready"} 1.0')
    assert subject.report_changes(healthy, 1002.0) == []


def test_drift_failed_event_is_retried_and_a_dry_run_writes_none() -> None:
    subject, dry = scene(), scene(dry_run=True)
    faulty, healthy = view_of([node("a")], []), view_of([node("a")], [a_slice("s")])
    subject.report_changes(faulty, 0.0), dry.report_changes(faulty, 0.0)
    subject.written.full = True
    assert subject.report_changes(faulty, 20.0) == dry.report_changes(faulty, 20.0) == []
    assert subject.counted('drift{kind="no-slices"} 1.0') and dry.counted('drift{kind="no-slices"} 1.0')
    subject.written.full = False
    assert subject.report_changes(faulty, 21.0) == [("a", "DevicesNotPublished")]
    subject.written.full = True
    assert subject.report_changes(healthy, 22.0) == []
    subject.written.full = False
    assert subject.report_changes(healthy, 23.0) == [("a", ENDED)]


def test_drift_shared_pool_is_reported_on_its_slice_in_one_message() -> None:
    subject = scene()
    devices = tuple(f"d{number}" for number in range(7))
    view = view_of([], [a_slice("s", at="", tainted=devices)])
    subject.report_changes(view, 0.0)
    asyncio.run(subject.reporter.report_changes(view, {}, 10.0))
    ((kind, name, reason, message),) = subject.written.said
    assert (kind, name, reason) == ("Warning", "s", "DevicesTainted")
    assert "d0, d1, d2, d3, d4 and 2 more" in message
    assert subject.counted('drift{kind="device-tainted"} 7.0')


def drained(*pairs: tuple[str, str]) -> ClusterView:
    """Return nodes with drain rules, one per pair of node and operation."""
    rules = [RuleFacts(f"rule-{number}", f"uid-{number}", *pair) for number, pair in enumerate(pairs)]
    slices = [a_slice(name, at=name) for name in NODES]
    return dataclasses.replace(view_of([node(name) for name in NODES], slices), rules=rules)


def test_drain_is_reported_for_each_node() -> None:
    subject = scene()
    assert subject.report_changes(drained(("c", "upgrade")), 0.0) == [], "the initial state is no change"
    assert subject.counted("draining_nodes 1.0")
    both = drained(("a", "repartition"), ("a", "repartition"), ("c", "upgrade"))
    assert subject.report_changes(both, 1.0) == [("a", "DevicesDrained")]
    assert subject.report_changes(drained(("a", "repartition"), ("c", "upgrade")), 2.0) == [], (
        "one of two rules is lifted"
    )
    assert subject.report_changes(drained(("b", "repartition"), ("c", "upgrade")), 3.0) == [
        ("b", "DevicesDrained"),
        ("a", "DevicesReturned"),
    ]
    assert subject.counted("draining_nodes 2.0") and subject.counted("drains_ended_total 1.0")
    assert subject.report_changes(drained(), 4.0) == [("b", "DevicesReturned"), ("c", "DevicesReturned")]
    assert subject.counted("draining_nodes 0.0") and subject.counted("drains_ended_total 3.0")


def test_drain_messages_have_the_number_of_drained_nodes() -> None:
    found = progress.drains(drained(("a", "repartition"), ("a", "repartition"), ("c", "upgrade")))
    message = progress.drain_begun_message(
        ("a", "repartition"), found["a", "repartition"], progress.drained_nodes(found)
    )
    assert "drained by the operation repartition (2 DeviceTaintRules)" in message
    assert message.endswith("Nodes with drained devices: 2.")
    ended = progress.drain_ended_message(("a", "repartition"), 0)
    assert ended == "The operation repartition drains no device of node a any more. Nodes with drained devices: 0."


def test_drain_failed_event_is_retried_with_the_latest_state() -> None:
    subject = scene()
    subject.report_changes(drained(), 0.0)
    subject.written.full = True
    assert subject.report_changes(drained(("a", "repartition")), 1.0) == []
    assert subject.report_changes(drained(), 2.0) == []
    subject.written.full = False
    assert subject.report_changes(drained(), 3.0) == [("a", "DevicesReturned")], (
        "of two unreported states the later one counts"
    )
    subject.reporter.forget()
    assert subject.counted("draining_nodes 0.0")


@given(
    st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from("xy"))),
    st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from("xy"))),
)
def test_each_drain_that_began_ends_once(first: list[tuple[str, str]], then: list[tuple[str, str]]) -> None:
    before, after = progress.drains(drained(*first)), progress.drains(drained(*then))
    begun, ended = progress.drain_changes(before, after)
    assert (set(before) | set(begun)) - set(ended) == set(after)
    assert progress.drain_changes(after, before) == (ended, begun)
    assert progress.drain_changes(None, after) == ([], [])


def test_roll_out_is_reported_for_each_node_and_when_it_stops() -> None:
    subject = scene()
    slices = [a_slice(name, at=name) for name in NODES]

    def at(*given: str) -> ClusterView:
        return view_of([node(name, release) for name, release in zip(NODES, given)], slices)

    assert subject.report_changes(at("1", "1", "1"), 0.0) == [], "the initial state is no change"
    assert subject.report_changes(at("2", "1", "1"), 100.0) == [("a", "ReleaseChanged")]
    assert subject.counted('nodes{release="2",state="ready"} 1.0')
    assert subject.report_changes(at("2", "2", "1"), 105.0) == [("b", "ReleaseChanged")]
    assert subject.report_changes(at("2", "2", "1"), 114.0) == [], "it may go on"
    assert subject.report_changes(at("2", "2", "1"), 115.0) == [("c", "ReleaseBehind")]
    assert subject.report_changes(at("2", "2", "2"), 120.0) == [("c", ENDED), ("c", "ReleaseChanged")]
    assert subject.counted("release_changes_total 3.0") and not subject.counted('nodes{release="1",state="ready"} 0.0')
    subject.reporter.forget()
    assert not subject.counted('nodes{release="2",state="ready"} 3.0'), "another one acts"
    assert subject.report_changes(at("1", "2", "2"), 130.0) == [], "nothing is known of before"


def test_drain_pass_ends_at_first_refused_event() -> None:
    subject = scene()
    subject.report_changes(drained(), 0.0)
    subject.written.full = True
    subject.report_changes(drained(("a", "repartition"), ("b", "repartition")), 1.0)
    assert subject.written.refused == ["a"]


class CountedNodes(dict[str, NodeFacts]):
    """Nodes that count their complete reads."""

    reads = 0

    def items(self) -> Any:
        self.reads += 1
        return super().items()


@pytest.mark.parametrize("full", [True, False])
def test_roll_out_messages_do_not_read_all_nodes_again(full: bool) -> None:
    def read(changed: int) -> int:
        subject = scene()
        subject.report_changes(ClusterView({name: node(name) for name in names}, []), 0.0)
        nodes = CountedNodes({name: node(name, "2" if number < changed else "1") for number, name in enumerate(names)})
        subject.written.full = full
        output = subject.report_changes(ClusterView(nodes, []), 1.0)
        assert len(output) == (0 if full else changed)
        return nodes.reads

    names = [f"n{number:02}" for number in range(40)]
    assert read(1) == read(39)


def test_roll_out_pass_ends_at_first_refused_event() -> None:
    subject = scene()
    subject.report_changes(view_of([node(name) for name in NODES], []), 0.0)
    subject.written.full = True
    subject.report_changes(view_of([node(name, "2") for name in NODES], []), 1.0)
    assert subject.written.refused == ["a"]
    subject.report_changes(view_of([node(name, "2") for name in NODES], []), 2.0)
    assert subject.written.refused == ["a", "b"], "the refused node waits behind the others"
    subject.written.full = False
    output = subject.report_changes(view_of([node(name, "2") for name in NODES], []), 3.0)
    assert sorted(output) == [(name, "ReleaseChanged") for name in NODES]


def test_drift_each_kind_has_a_reason_and_messages() -> None:
    assert set(REASONS) == set(drift.KINDS) and len(set(REASONS.values())) == len(drift.KINDS)
    for kind in drift.KINDS:
        at = (kind, "n", OURS, "p")
        assert drift.begun_message(at, [drift.Finding(*at, device="d", detail="the difference")], 600)
        assert drift.ended_message(at)


def test_drift_layout_differences_of_a_node_are_reported() -> None:
    output = {
        f"GPU-{number}": {"index": number, "wanted": "static", "steps": ["− 1g at 0", "+ 2g at 2"], "error": ""}
        for number in range(12)
    }
    item = {
        "metadata": {
            "name": "s",
            "annotations": {ANNOTATION: json.dumps(output)},
            "managedFields": [{"manager": "dra-accelerators-driver"}],
        },
        "spec": {"driver": OURS, "nodeName": "a", "pool": {"name": "a", "generation": 1, "resourceSliceCount": 1}},
    }
    facts = slice_facts(item)
    assert [device for device, _how in facts.differing] == [f"{number} (GPU-{number})" for number in range(12)]
    (report,) = drift.report_all(drift.findings(view_of([node("a")], [facts]), (OURS,))).values()
    assert report.node == "a" and "0 (GPU-0): − 1g at 0; + 2g at 2" in report.message and "and 7 more" in report.message
    assert len(report.message) < 1024 and "--limit a" in report.message
    item["metadata"]["annotations"][ANNOTATION] = "no JSON object"
    assert slice_facts(item).differing == ()
