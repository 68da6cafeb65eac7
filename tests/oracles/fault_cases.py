# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run a scenario of a daemon for each of its API requests and each fault, and compare the end states."""

from __future__ import annotations

import difflib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.errors import Broken
from tests.oracles.fault_proxy import FAULTS, Fault, FaultProxy

#: The phase of the scenario, and the kind of the request.
Request = tuple[str, str]
#: Maximum additional requests of a kind compared with the run without a fault, and per second. More indicate a loop
#: without a wait.
MORE_REQUESTS, REQUESTS_PER_SECOND = 12, 4.0
#: Fields that differ between two equal runs.
VOLATILE = frozenset(
    {
        *("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "lastTransitionTime"),
        *("created", "acquireTime", "renewTime", "leaseTransitions", "timeAdded", "allocationTimestamp", "selfLink"),
    }
)


def without_volatile(found: Any) -> Any:
    """Return a state without the fields that differ between equal runs, and with sorted lists."""
    if isinstance(found, dict):
        return {
            key: without_volatile(value)
            for key, value in found.items()
            if key not in VOLATILE and not (key == "name" and "generateName" in found)
        }
    if isinstance(found, list):
        return sorted((without_volatile(each) for each in found), key=json.dumps)
    return found


def describe(faults: Mapping[Request, str]) -> str:
    return "; ".join(f"{fault} at {kind} ({phase})" for (phase, kind), fault in faults.items())


def lines_of(state: Any) -> list[str]:
    return json.dumps(state, indent=1, sort_keys=True).splitlines()


@dataclass
class Played:
    """One run: the end state, the requests, and the duration in seconds."""

    state: Any
    requests: Counter[str]
    seconds: float


@dataclass
class FaultRuns:
    """Runs of the scenario. ``play`` returns its end state, or raises AssertionError if it does not reach that.

    It sets ``phase`` of the proxy, and its argument is the faults that the run will meet.
    """

    proxy: FaultProxy
    play: Callable[[Mapping[Request, str]], Any]
    results: dict[tuple[Request, str], str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def record(self) -> list[Request]:
        """Run without a fault and clear all results; return the requests, each once in the order of their first
        occurrence.
        """
        self.results.clear()
        self.failures.clear()
        self._usual = self._play({})
        return list(dict.fromkeys(self.proxy.requests))

    def _play(self, faults: Mapping[Request, str]) -> Played:
        left = dict(faults)

        def choose(_number: int, request: Request) -> Fault | None:
            name = left.pop(request, None)
            return FAULTS[name] if name is not None else None

        self.proxy.arm(choose)
        began = time.monotonic()
        state = without_volatile(self.play(faults))
        return Played(state, Counter(kind for _phase, kind in self.proxy.requests), time.monotonic() - began)

    def inject(self, faults: Mapping[Request, str]) -> None:
        """Run with each of these faults once, and compare the end state with that without a fault.

        If a run with several faults fails, each of them is injected alone.
        """
        began = time.monotonic()
        try:
            problem = self._compare(self._play(faults))
        except (AssertionError, Broken) as error:
            problem = str(error)
        seconds = time.monotonic() - began
        result = f"FAILED: {describe(faults)}: {problem}" if problem else f"ok: {describe(faults)}"
        print(f"{seconds:5.1f} s {result}", flush=True)
        for request, fault in faults.items():
            is_met = request in self.proxy.injected
            self.results[request, fault] = "not sent" if not is_met else "FAILED" if problem else "ok"
        if not problem:
            return
        self.failures.append(f"{describe(faults)}: {problem}")
        if len(faults) > 1:
            for request, fault in faults.items():
                self.inject({request: fault})

    def _compare(self, found: Played) -> str:
        """Return the differences from a run without a fault."""
        if found.state != self._usual.state:
            lines = difflib.unified_diff(
                lines_of(self._usual.state), lines_of(found.state), "usual", "with the fault", n=2
            )
            return "\n".join(lines)
        rate = max(self._usual.seconds, found.seconds) * REQUESTS_PER_SECOND
        for kind, number in found.requests.items():
            most = max(2 * self._usual.requests[kind] * found.seconds / self._usual.seconds, rate) + MORE_REQUESTS
            if number > most:
                return f"{number} requests {kind}, expected at most {most:.0f}"
        return ""

    def conclude(self) -> None:
        """Print the table. Raises AssertionError with the failures."""
        print(self.table(), flush=True)
        assert not self.failures, f"{len(self.failures)} runs failed:\n" + "\n\n".join(self.failures)

    def table(self) -> str:
        """Return the results of all requests and faults as text, one row per request."""
        requests = list(dict.fromkeys(request for request, _fault in self.results))
        rows = []
        for phase, kind in requests:
            found: dict[str, list[str]] = {}
            for (request, fault), outcome in self.results.items():
                if request == (phase, kind):
                    found.setdefault(outcome, []).append(fault)
            rows.append(
                f"{phase:8} {kind:60} " + "; ".join(f"{each}: {', '.join(names)}" for each, names in found.items())
            )
        return "\n".join(rows)


def applicable(kind: str) -> list[str]:
    """Return the faults that a request of this kind can meet."""
    return [name for name, fault in FAULTS.items() if not fault.is_of_watch or kind.startswith("watch ")]


def every(requests: Sequence[Request], part_of: Callable[[Request], str]) -> list[dict[Request, str]]:
    """Return runs with all faults of each kind of request at its first phase, and one fault, by rotation, at its later
    phases.

    ``part_of`` returns the part of the daemon that sends a request. A run has at most one fault per part.
    """
    tasks: dict[str, list[tuple[Request, str]]] = {}
    known: set[str] = set()
    for number, request in enumerate(requests):
        names = applicable(request[1])
        chosen = names if request[1] not in known else [names[number % len(names)]]
        tasks.setdefault(part_of(request), []).extend((request, name) for name in chosen)
        known.add(request[1])
    columns = itertools.zip_longest(*tasks.values())
    return [dict(task for task in column if task is not None) for column in columns]


def rotated(requests: Sequence[Request], offset: int) -> dict[Request, str]:
    """Return one fault for each kind of request at its first phase, by rotation."""
    first = {kind: (phase, kind) for phase, kind in reversed(requests)}
    found = [request for request in requests if first[request[1]] == request]
    return {
        request: applicable(request[1])[(5 * number + offset) % len(applicable(request[1]))]
        for number, request in enumerate(found)
    }
