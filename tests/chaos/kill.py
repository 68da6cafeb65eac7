# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Kill the driver while it prepares, unprepares, and recovers claims of each kind: at each stage, and at any instant.

A case kills it once, or a second time during recovery. After its restart each claim is prepared or completely removed
before the kubelet's next call: the visible state of the node is that of before the claim, or that of an undisturbed
driver. Then the kubelet repeats the prepare, or unprepares the claim.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.callers import Kubelet, caller_of
from tests.chaos.claim_kinds import COMPANIONS, SETTINGS, Kind
from tests.chaos.errors import Broken, CrashLoop, Leaked, Lost
from tests.chaos.node import Node
from tests.chaos.results import Results
from tests.chaos.snapshot import Snapshot, check_files, difference, snapshot

FAULT = "kill"
#: The key in a snapshot for the partitions that a reboot creates again, by device.
RECREATED_PARTITIONS = "made again"
PartitionsByDevice = Mapping[str, Sequence[str]]
RECOVERY_STAGES = ("recovery-planned", "recovery-step-done")
#: The time limit (s) for the stages of a recovery. Afterwards a driver that should die at a stage counts as past it.
SETTLE_SECONDS = 20.0
#: One case in this number is killed a second time, during recovery.
SECOND_KILL_ONE_IN = 4


@dataclass(frozen=True)
class Case:
    """One case: when the driver is killed, and the kubelet's next call."""

    #: The call of the kubelet: prepare or unprepare.
    verb: str
    #: The stage at which the driver is killed, or "" for any instant.
    stage: str
    #: The instant: the time after the start of the call, as a fraction of its usual duration.
    delay_fraction: float
    #: The stage of the recovery at which the driver is killed again, or the time (s) after its start. Empty: only one kill.
    second_stage: str
    second_delay: float
    #: Whether the kubelet then prepares the claim again. Otherwise it unprepares the claim.
    is_repeated: bool
    #: Whether the claim was prepared and unprepared before with the same allocation, which its status shows.
    was_prepared: bool

    def describe(self) -> str:
        where = f"at {self.stage}" if self.stage else f"after {self.delay_fraction:.2f} of {self.verb}'s time"
        again = f", again {f'at {self.second_stage}' if self.second_stage else f'{self.second_delay:.3f} s after the start'}"
        second = again if self.second_stage or self.second_delay else ""
        then = "prepared again" if self.is_repeated else "unprepared"
        before = " of a claim that was prepared before" if self.was_prepared else ""
        return f"{self.verb}{before} killed {where}{second}; then it is {then}"


@dataclass(frozen=True)
class Undisturbed:
    """The states of a kind without a fault: before and prepared, and the duration of its calls in seconds."""

    caller: Kubelet
    neighbors: tuple[Kubelet, ...]
    before: Snapshot
    prepared: Snapshot
    seconds: dict[str, float]


def cases(kind: Kind, seed: int, only: int | None = None) -> Iterator[tuple[int, Case]]:
    """Yield cases for all stages, then for any instants without an end. The seed and the number determine a case."""
    stages = [("prepare", stage) for stage in kind.prepare_stages] + [
        ("unprepare", stage) for stage in kind.unprepare_stages
    ]
    stage_cases = [(verb, stage, is_repeated) for verb, stage in stages for is_repeated in (True, False)]
    number = 0 if only is None else only
    while only is None or number == only:
        chance = random.Random(f"{seed}/{kind.name}/{number}")
        verb, stage, is_repeated = (
            stage_cases[number]
            if number < len(stage_cases)
            else (chance.choice(["prepare", "unprepare"]), "", chance.random() < 0.5)
        )
        has_second_kill = chance.randrange(SECOND_KILL_ONE_IN) == 0
        second_stage = chance.choice(["", *RECOVERY_STAGES]) if has_second_kill else ""
        second_delay = chance.uniform(0, 0.3) if has_second_kill and not second_stage else 0.0
        delay_fraction = 0.0 if stage else chance.uniform(0, 1.3)
        yield (
            number,
            Case(
                verb,
                stage,
                delay_fraction,
                second_stage,
                second_delay,
                is_repeated=is_repeated,
                was_prepared=chance.random() < 0.5,
            ),
        )
        number += 1


def measure_undisturbed(node: Node, kind: Kind) -> Undisturbed:
    """Prepare a claim of the kind several times without a fault, and verify that its traces are always the same."""
    neighbors = tuple(caller_of(node, node.kinds[name]) for name in kind.prepared_neighbors)
    for neighbor in neighbors:
        neighbor.prepare()
    caller = caller_of(node, kind)
    caller.prepare()
    caller.await_status()
    caller.abandon()
    before = snapshot(node)
    seconds = {"prepare": 0.0, "unprepare": 0.0}
    prepared: Snapshot = {}
    node.silicon.command("calls reset")
    for _time in range(3):
        began = time.perf_counter()
        caller.prepare()
        middle = time.perf_counter()
        found = snapshot(node)
        check_files(node)
        if prepared and (text := difference(found, prepared)):
            raise Leaked(f"two undisturbed prepares differ\n{text}")
        prepared = found
        ending = time.perf_counter()
        caller.abandon()
        seconds = {"prepare": middle - began, "unprepare": time.perf_counter() - ending}
        if text := difference(snapshot(node), before):
            raise Leaked(f"after an undisturbed unprepare\n{text}")
    others = {int(process["pid"]) for process in node.silicon.command("calls")["processes"]} - {node.pid}
    # Programs for claims call the function too, and some settings belong to a program only.
    if others and not kind.stages_of_kind & (COMPANIONS | SETTINGS):
        raise Broken(
            f"{len(others)} programs have asked the devices' library on the way of a claim, ignoring the driver"
        )
    if not difference(prepared, before):
        raise Lost("a prepared claim changes nothing on the node, so the comparison proves nothing")
    return Undisturbed(caller, neighbors, before, prepared, seconds)


def run_kills(
    node: Node, kind: Kind, results: Results, *, seed: int, runs: int, seconds: float, only: int | None
) -> None:
    """Run ``runs`` cases, or until the time limit (s). All cases with stages run in any event."""
    undisturbed = measure_undisturbed(node, kind)
    stages = 2 * (len(kind.prepare_stages) + len(kind.unprepare_stages))
    deadline = time.monotonic() + seconds
    for number, case in cases(kind, seed, only):
        if only is None and (number >= runs or (number >= stages and time.monotonic() > deadline)):
            break
        with results.case(node, FAULT, kind.name, number, case.describe()):
            run_case(node, undisturbed, case)
        node.api.clear_records()
    for neighbor in undisturbed.neighbors:
        neighbor.end_pod()


def run_case(node: Node, undisturbed: Undisturbed, case: Case) -> None:
    """Run one case on a node with a running driver. Before and after it, only the neighbors are prepared."""
    caller = undisturbed.caller
    for neighbor in undisturbed.neighbors:
        neighbor.prepare()
    caller.set_previous_status(case.was_prepared)
    if case.verb == "unprepare":
        caller.prepare()
    if case.stage:
        node.kill()
        start_with_stop_point(node, case.stage, undisturbed)
    answered = kill_during_call(node, case, undisturbed)
    if case.second_stage or case.second_delay:
        kill_during_recovery(node, case)
    node.start_ready(**caller.options)
    found = await_settled_state(node, undisturbed, case)
    if answered and found != case.verb:
        raise (Lost if case.verb == "prepare" else Leaked)(
            f"{case.verb} was answered without an error, and after the restart the claim is {found}d"
        )
    check_files(node)
    if case.is_repeated:
        caller.prepare()
        caller.bind()
        if text := unexpected_difference(snapshot(node), undisturbed.prepared, undisturbed, case):
            raise Lost(f"after the second prepare\n{text}")
        check_files(node)
        caller.end_pod()
    else:
        caller.abandon()
    if text := unexpected_difference(snapshot(node), undisturbed.before, undisturbed, case):
        raise Leaked(f"after the unprepare\n{text}")


def start_with_stop_point(node: Node, stage: str, undisturbed: Undisturbed) -> None:
    """Start a driver that dies at a stage of the claim. The recovery of each neighbor can pass the same stage before."""
    for passed in range(1 + len(undisturbed.neighbors)):
        try:
            node.start(f"{stage}:{passed + 1}" if passed else stage, **undisturbed.caller.options)
            if undisturbed.neighbors:
                node.wait_until("the neighbors are recovered", lambda: node.has_ended() or node.status()["ready"])
        except CrashLoop:
            if passed == len(undisturbed.neighbors):
                raise
        if not node.has_ended():
            return
        node.kill()


def kill_during_call(node: Node, case: Case, undisturbed: Undisturbed) -> bool:
    """Call the driver and kill it. Return whether it answered before, without an error."""
    answered = undisturbed.caller.start_call(case.verb)
    if case.stage:
        status = node.wait_ended()
        if status != -signal.SIGKILL:
            raise CrashLoop(f"the driver ended with {status} and not by its own SIGKILL at {case.stage}")
    else:
        time.sleep(case.delay_fraction * undisturbed.seconds[case.verb])
        node.kill()
    return answered()


def kill_during_recovery(node: Node, case: Case) -> None:
    """Start the driver and kill it again. A driver that has already recovered is killed at rest."""
    node.start(case.second_stage, serves=False)
    deadline = time.monotonic() + (2.0 if case.second_stage else case.second_delay)
    while not node.has_ended() and time.monotonic() < deadline:
        time.sleep(0.002)
    if node.has_ended() and (status := node.wait_ended()) != -signal.SIGKILL:
        raise CrashLoop(f"the driver ended with {status} while it recovered")
    if node.pid:
        node.kill()


def await_settled_state(node: Node, undisturbed: Undisturbed, case: Case) -> str:
    """Wait until the node is in the state with or without the prepared claim. Return which one. Raises Leaked."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = snapshot(node)
        without, with_it = (
            unexpected_difference(found, expected, undisturbed, case)
            for expected in (undisturbed.before, undisturbed.prepared)
        )
        if not without or not with_it:
            return "unprepare" if not without else "prepare"
        if time.monotonic() > deadline:
            raise Leaked(
                "the claim is neither prepared nor removed; differences from a node without the claim:\n"
                f"{without}\nand from a node with the prepared claim:\n{with_it}"
            )
        time.sleep(0.02)


def unexpected_difference(found: Snapshot, expected: Snapshot, undisturbed: Undisturbed, case: Case) -> str:
    """Return the difference from the expected state, without differences that no driver can prevent.

    A library that creates partitions again after a reboot records each one before it creates or destroys it. If it is
    killed in between, its record differs from the partitions until the next change. At a stage the driver is not in a
    library call, so the records have to be right. At any instant they are between those of a node with and without the
    claim.
    """
    if not case.stage and _are_between(
        found[RECREATED_PARTITIONS],
        undisturbed.before[RECREATED_PARTITIONS],
        undisturbed.prepared[RECREATED_PARTITIONS],
    ):
        expected = {**expected, RECREATED_PARTITIONS: found[RECREATED_PARTITIONS]}
    return difference(found, expected)


def _are_between(found: PartitionsByDevice, least: PartitionsByDevice, most: PartitionsByDevice) -> bool:
    return all(
        set(least.get(device, ())) <= set(found.get(device, ())) <= set(most.get(device, ()))
        for device in {*found, *least, *most}
    )
