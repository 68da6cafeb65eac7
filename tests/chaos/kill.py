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
from tests.chaos.errors import Broken, CrashLoop, Leaked, Lost
from tests.chaos.kinds import COMPANIONS, SETTINGS, Kind
from tests.chaos.node import Node
from tests.chaos.results import Results
from tests.chaos.snapshot import Snapshot, check_files, difference, snapshot

FAULT = "kill"
#: The key in a snapshot for the partitions that a reboot creates again, by device.
NOTES = "made again"
Notes = Mapping[str, Sequence[str]]
RECOVERY = ("recovery-planned", "recovery-step-done")
#: The time limit (s) for the stages of a recovery. Afterwards a driver that should die at a stage counts as past it.
SETTLE_SECONDS = 20.0
#: One case in this number is killed a second time, during recovery.
AGAIN = 4


@dataclass(frozen=True)
class Case:
    """One case. With ``stage`` "" it kills at an instant: ``part`` of the usual duration after the start of the call.

    ``was_prepared`` is true if the claim was prepared and unprepared before with the same allocation, which its status
    shows.
    """

    verb: str
    stage: str
    part: float
    again: str
    again_part: float
    stays: bool
    was_prepared: bool

    def describe(self) -> str:
        where = f"at {self.stage}" if self.stage else f"after {self.part:.2f} of {self.verb}'s time"
        again = f", again {f'at {self.again}' if self.again else f'{self.again_part:.3f} s after the start'}"
        second = again if self.again or self.again_part else ""
        then = "asked for again" if self.stays else "given back"
        before = " of a claim that was prepared before" if self.was_prepared else ""
        return f"{self.verb}{before} killed {where}{second}; then it is {then}"


@dataclass(frozen=True)
class Usual:
    """The states of a kind without a fault: before and prepared, and the duration of its calls in seconds."""

    caller: Kubelet
    neighbours: tuple[Kubelet, ...]
    before: Snapshot
    prepared: Snapshot
    seconds: dict[str, float]


def cases(kind: Kind, seed: int, only: int | None = None) -> Iterator[tuple[int, Case]]:
    """Yield all stages, then any instants, without an end. The number alone determines each case."""
    stages = [("prepare", stage) for stage in kind.prepare_stages] + [
        ("unprepare", stage) for stage in kind.unprepare_stages
    ]
    fixed = [(*each, stays) for each in stages for stays in (True, False)]
    number = 0 if only is None else only
    while only is None or number == only:
        chance = random.Random(f"{seed}/{kind.name}/{number}")
        verb, stage, stays = (
            fixed[number]
            if number < len(fixed)
            else (chance.choice(["prepare", "unprepare"]), "", chance.random() < 0.5)
        )
        twice = chance.randrange(AGAIN) == 0
        again = chance.choice(["", *RECOVERY]) if twice else ""
        part = chance.uniform(0, 0.3) if twice and not again else 0.0
        moment = 0.0 if stage else chance.uniform(0, 1.3)
        yield number, Case(verb, stage, moment, again, part, stays, was_prepared=chance.random() < 0.5)
        number += 1


def usual(node: Node, kind: Kind) -> Usual:
    """Prepare a claim of the kind several times without a fault, and verify that its traces are always the same."""
    neighbours = tuple(caller_of(node, node.kinds[name]) for name in kind.beside)
    for neighbour in neighbours:
        neighbour.prepare()
    caller = caller_of(node, kind)
    caller.prepare()
    caller.await_status()
    caller.give_up()
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
        caller.give_up()
        seconds = {"prepare": middle - began, "unprepare": time.perf_counter() - ending}
        if text := difference(snapshot(node), before):
            raise Leaked(f"after an undisturbed unprepare\n{text}")
    others = {int(process["pid"]) for process in node.silicon.command("calls")["processes"]} - {node.pid}
    # Programs for claims call the function too, and some settings belong to a program only.
    if others and not kind.does & (COMPANIONS | SETTINGS):
        raise Broken(
            f"{len(others)} programs have asked the devices' library on the way of a claim, besides the driver"
        )
    if not difference(prepared, before):
        raise Lost("a prepared claim leaves no trace: the comparison proves nothing")
    return Usual(caller, neighbours, before, prepared, seconds)


def campaign(
    node: Node, kind: Kind, results: Results, *, seed: int, runs: int, seconds: float, only: int | None
) -> None:
    """Run ``count`` cases, or as many as fit into the time. Cases with stages always run."""
    ordinary = usual(node, kind)
    stages = 2 * (len(kind.prepare_stages) + len(kind.unprepare_stages))
    deadline = time.monotonic() + seconds
    for number, case in cases(kind, seed, only):
        if only is None and (number >= runs or (number >= stages and time.monotonic() > deadline)):
            break
        with results.case(node, FAULT, kind.name, number, case.describe()):
            play(node, ordinary, case)
        node.api.forget()
    for neighbour in ordinary.neighbours:
        neighbour.leave()


def play(node: Node, ordinary: Usual, case: Case) -> None:
    """Run one case on a node with a running driver, on which only the neighbors are prepared. The same holds at its end."""
    caller = ordinary.caller
    for neighbour in ordinary.neighbours:
        neighbour.prepare()
    caller.had_before(case.was_prepared)
    if case.verb == "unprepare":
        caller.prepare()
    if case.stage:
        node.kill()
        start_to_die(node, case.stage, ordinary)
    answered = killed(node, case, ordinary)
    if case.again or case.again_part:
        kill_the_recovery(node, case)
    node.start(**caller.options)
    node.wait_ready()
    found = settled(node, ordinary, case)
    if answered and found != case.verb:
        raise (Lost if case.verb == "prepare" else Leaked)(
            f"{case.verb} was answered without an error, and after the restart the claim is {found}d"
        )
    check_files(node)
    if case.stays:
        caller.prepare()
        caller.bind()
        if text := departure(snapshot(node), ordinary.prepared, ordinary, case):
            raise Lost(f"prepared again\n{text}")
        check_files(node)
        caller.leave()
    else:
        caller.give_up()
    if text := departure(snapshot(node), ordinary.before, ordinary, case):
        raise Leaked(f"given back\n{text}")


def start_to_die(node: Node, stage: str, ordinary: Usual) -> None:
    """Start a driver that dies at a stage of the claim. The recovery of each neighbor can pass the same stage before."""
    for passed in range(1 + len(ordinary.neighbours)):
        try:
            node.start(f"{stage}:{passed + 1}" if passed else stage, **ordinary.caller.options)
            if ordinary.neighbours:
                node.until("the neighbours are recovered", lambda: node.ended() or node.status()["ready"])
        except CrashLoop:
            if passed == len(ordinary.neighbours):
                raise
        if not node.ended():
            return
        node.kill()


def killed(node: Node, case: Case, ordinary: Usual) -> bool:
    """Call the driver and kill it. Return whether it answered before, without an error."""
    answered = ordinary.caller.begin(case.verb)
    if case.stage:
        status = node.wait_ended()
        if status != -signal.SIGKILL:
            raise CrashLoop(f"the driver ended with {status} and not by its own SIGKILL at {case.stage}")
    else:
        time.sleep(case.part * ordinary.seconds[case.verb])
        node.kill()
    return answered()


def kill_the_recovery(node: Node, case: Case) -> None:
    """Start the driver and kill it again. A driver that has already recovered is killed at rest."""
    node.start(case.again, serves=False)
    deadline = time.monotonic() + (2.0 if case.again else case.again_part)
    while not node.ended() and time.monotonic() < deadline:
        time.sleep(0.002)
    if node.ended() and (status := node.wait_ended()) != -signal.SIGKILL:
        raise CrashLoop(f"the driver ended with {status} while it recovered")
    if node.pid:
        node.kill()


def settled(node: Node, ordinary: Usual, case: Case) -> str:
    """Wait until the node is in the state with or without the prepared claim. Return which one. Raises Leaked."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = snapshot(node)
        without, with_it = (
            departure(found, expected, ordinary, case) for expected in (ordinary.before, ordinary.prepared)
        )
        if not without or not with_it:
            return "unprepare" if not without else "prepare"
        if time.monotonic() > deadline:
            raise Leaked(
                f"neither prepared nor gone; what differs from a node without the claim:\n{without}\nfrom prepared:\n{with_it}"
            )
        time.sleep(0.02)


def departure(found: Snapshot, expected: Snapshot, ordinary: Usual, case: Case) -> str:
    """Return the difference from the expected state, without differences that no driver can prevent.

    A library that creates partitions again after a reboot records each one before it creates or destroys it. If it is
    killed in between, its record differs from the partitions until the next change. At a stage the driver is not in a
    library call, so the records have to be right. At any instant they are between those of a node with and without the
    claim.
    """
    if not case.stage and _are_between(found[NOTES], ordinary.before[NOTES], ordinary.prepared[NOTES]):
        expected = {**expected, NOTES: found[NOTES]}
    return difference(found, expected)


def _are_between(found: Notes, least: Notes, most: Notes) -> bool:
    return all(
        set(least.get(device, ())) <= set(found.get(device, ())) <= set(most.get(device, ()))
        for device in {*found, *least, *most}
    )
