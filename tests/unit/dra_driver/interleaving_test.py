# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Calls of Prepare and Unprepare of one claim in any interleaving: the last call decides the final state."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from claim_steps import SMALL, prepare, run, unprepare
from dra_driver.claims.call_results import Outcome
from dra_driver.claims.store.records import ClaimReference
from dra_driver.supervisors.kubelet_calls import KubeletCalls
from hypothesis import given
from hypothesis import strategies as st
from machine_model import Claims, Node

PREPARE, UNPREPARE, CANCEL, READY, NOT_READY, CLOSE, OPEN = (
    "prepare",
    "unprepare",
    "cancel",
    "ready",
    "not-ready",
    "close",
    "open",
)


def test_prepare_that_waited_for_readiness_fails_after_unprepare(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        node.service.set_ready("the driver is starting")
        preparing = asyncio.ensure_future(prepare(node, claim))
        await asyncio.sleep(0.01)
        assert await unprepare(node, claim) == ""
        node.service.set_ready()
        assert "unprepared after this call" in await preparing
        assert not node.store.claims and not node.partitions() and not node.cdi_files()
        assert await prepare(node, claim) == "", "a later call prepares it"

    run(tmp_path, scenario)


def test_prepare_succeeds_if_the_concurrent_unprepare_fails(tmp_path: Path) -> None:
    """The unprepare failed, so the claim is still prepared, and the concurrent prepare succeeds."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        node.service._ready_seconds = 60.0
        assert await prepare(node, claim) == ""
        node.service.set_ready("the driver is starting")
        preparing = asyncio.ensure_future(prepare(node, claim))
        unpreparing = asyncio.ensure_future(unprepare(node, claim))
        await asyncio.sleep(0.01)
        with node.gpus.state() as state:
            state[node.gpus.template(0).uuid]["partitions"][0]["pids"] = [4711]
        node.service.set_ready()
        assert "in use" in await unpreparing
        assert await preparing == ""
        assert node.store.claims[claim.uid].prepared

    run(tmp_path, scenario)


class Recorder:
    """Forwards calls to the service of a node, and records their order."""

    def __init__(self, node: Node) -> None:
        self._service = node.service
        self.calls: list[str] = []

    async def prepare(self, references: Sequence[ClaimReference]) -> Mapping[str, Outcome]:
        self.calls.append(PREPARE)
        return await self._service.prepare(references)

    async def unprepare(self, references: Sequence[ClaimReference]) -> Mapping[str, Outcome]:
        self.calls.append(UNPREPARE)
        return await self._service.unprepare(references)


class CallSequence:
    """Starts calls for one claim, and events between them."""

    def __init__(self, node: Node, reference: ClaimReference) -> None:
        self.node = node
        self.recorder = Recorder(node)
        self._reference = reference
        self._intake = KubeletCalls("gpu.nvidia.com")
        self._intake.open(self.recorder)
        self._is_open = True
        self.started: list[tuple[str, asyncio.Task[Mapping[str, Outcome]]]] = []

    def step(self, what: str, number: int = 0) -> None:
        if what in (PREPARE, UNPREPARE):
            call = self._intake.prepare if what == PREPARE else self._intake.unprepare
            self.started.append((what, asyncio.ensure_future(call([self._reference]))))
        elif what == CANCEL and self.started:
            self.started[number % len(self.started)][1].cancel()
        elif what in (READY, NOT_READY):
            self.node.service.set_ready("" if what == READY else "the hardware does not answer")
        elif what == CLOSE:
            self._intake.close()
            self._is_open = False
        elif what == OPEN and not self._is_open:
            self._intake.open(self.recorder)
            self._is_open = True

    async def settle(self) -> None:
        """Let all calls end, including those without a waiting caller."""
        self.step(OPEN)
        self.step(READY)
        await asyncio.gather(*(task for _what, task in self.started), return_exceptions=True)
        await self.node.service.drain(10)


STEPS = st.lists(
    st.tuples(
        st.sampled_from([PREPARE, PREPARE, UNPREPARE, UNPREPARE, CANCEL, READY, NOT_READY, CLOSE, OPEN]),
        st.integers(0, 9),
        st.sampled_from([0, 0, 1, 2, 3, 5, 20, 200]),
    ),
    max_size=14,
)


@pytest.mark.prove
@given(st.sampled_from([NOT_READY, READY, CLOSE]), STEPS)
def test_final_state_is_that_of_the_last_call(first: str, steps: list[tuple[str, int, int]]) -> None:
    async def main(directory: Path) -> None:
        claims = Claims()
        node = Node(directory, claims)
        node.service._ready_seconds = 60.0  # so that no call ends because of this timeout
        await node.start()
        reference = claims.allocate("a", SMALL)
        sequence = CallSequence(node, reference)
        sequence.step(first)
        for what, number, rounds in steps:
            sequence.step(what, number)
            for _round in range(rounds):
                await asyncio.sleep(0)
        await sequence.settle()
        if CANCEL not in [what for what, _number, _rounds in steps]:
            assert sequence.recorder.calls == [what for what, _task in sequence.started], (
                "no call overtakes another one"
            )
        if sequence.recorder.calls and sequence.recorder.calls[-1] == PREPARE:
            assert node.store.claims[reference.uid].prepared
            assert node.cdi_files() == (reference.uid,)
            assert len(node.partitions()) == 1
        else:
            assert not node.store.claims
            assert not node.cdi_files()
            assert not node.partitions()
        for what, task in sequence.started:
            if what == UNPREPARE and not task.cancelled():
                assert task.result()[reference.uid].error == ""
        assert not node.service._calls
        node.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(asyncio.wait_for(main(Path(directory)), 60))
