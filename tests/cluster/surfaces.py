# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Record when a device fault appears in status, metrics, taints, pod status, and Events, and when it disappears.

Watches of the API report ResourceSlices, pods, and Events. A program on the node polls the driver's status socket and
its metrics every 0.2 s, so that short states are recorded too. All times come from the clock of the test host, which
the nodes share.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.cluster import Cluster

PLACES = ("status", "metric", "taint", "pod status", "Event")
HEALTHY = ("Healthy", "")
#: Value of the metric's ``effect`` label for a fault without a taint.
NO_TAINT = "None"
PORT = 9817

#: Program for the node: prints one line of JSON whenever the status or the metric of a device changes.
ASK = """
import json, re, socket, sys, threading, time, urllib.request

DRIVER, PORT = sys.argv[1:]

def status():
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(5)
        asked.connect(f"/var/lib/kubelet/plugins/{DRIVER}/status.sock")
        with asked.makefile() as answer:
            devices = json.loads(answer.read())["devices"]
    keys = ("cause", "value", "severity", "message", "remedy")
    return {"status " + device["uuid"]: [[each[key] for key in keys] for each in device["ailments"]] for device in devices}

def metric():
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5).read().decode()
    found = {}
    for name, line in re.findall("^dra_accelerators_device_(info|fault){(.*)}", text, re.M):
        labels = dict(re.findall('(\\w+)="([^"]*)"', line))
        faults = found.setdefault("metric " + labels["uuid"], [])
        faults += [[labels["cause"], labels["effect"]]] if name == "fault" else []
    return found

def follow(ask):
    before = {}
    while True:
        try:
            new = {key: value for key, value in ask().items() if before.get(key) != value}
        except (OSError, ValueError):
            new = {}  # the driver is being started
        if new:
            sys.stdout.write(json.dumps(new) + "\\n")
            sys.stdout.flush()
            before.update(new)
        time.sleep(0.2)

threading.Thread(target=follow, args=(metric,), daemon=True).start()
threading.Thread(target=follow, args=(status,), daemon=True).start()
sys.stdin.read()  # whoever listens has gone
"""


def start_anew(cluster: Cluster, node: str) -> None:
    """Restart the driver: a process writes the same Event at most once in five minutes."""
    cluster.restart_driver(node)
    cluster.wait("a scan of the driver", lambda: cluster.status(node)["published"])


def start_listening(cluster: Cluster, node: str) -> None:
    """Restart the GPU driver and wait until it has registered for GPU events, because earlier Xids are not delivered."""
    cluster.run(node, "accelerator-simulator", "calls", "--reset")
    start_anew(cluster, node)

    def listens() -> bool:
        calls = json.loads(cluster.run(node, "accelerator-simulator", "calls"))["functions"]
        return bool(calls.get("nvmlDeviceRegisterEvents", 0) >= 8)

    cluster.wait("the driver listens to its GPUs", listens)


@dataclass
class Record:
    """The values of each key with the time from which they hold, and the received Events. Threads write both."""

    history: dict[str, list[tuple[float, Any]]] = field(default_factory=dict)
    events: list[tuple[float, str, str, str]] = field(default_factory=list)

    def put(self, key: str, value: Any) -> None:
        """Record the current value of a key, if it has changed."""
        known = self.history.setdefault(key, [])
        if not known or known[-1][1] != value:
            known.append((time.time(), value))

    def first(self, key: str, wanted: Callable[[Any], bool], after: float) -> float | None:
        """Return the first time from ``after`` on at which the value matches, in seconds since the epoch; None if none
        does.
        """
        known = self.history.get(key, [])
        for place, (since, value) in enumerate(known):
            until = known[place + 1][0] if place + 1 < len(known) else float("inf")
            if until > after and wanted(value):
                return max(since, after)
        return None

    def event(self, subject: str, reason: str, wanted: Callable[[str], bool], after: float) -> float | None:
        """Return the time of the first matching Event from ``after`` on; None if there is no such Event."""
        found = (
            at
            for at, about, why, said in tuple(self.events)
            if at >= after and (about, why) == (subject, reason) and wanted(said)
        )
        return next(found, None)


@dataclass(frozen=True)
class ExpectedFault:
    """A fault as the driver reports it: cause, value, and the effect of the taint ("" for no taint)."""

    cause: str
    value: str = ""
    effect: str = "NoSchedule"

    @property
    def metric(self) -> list[str]:
        """Return the cause and effect labels of the fault metric."""
        return ["-".join(part for part in (self.cause, self.value) if part), self.effect or NO_TAINT]

    @property
    def taint(self) -> tuple[str, str, str]:
        """Return the key without the driver's name, the value, and the effect."""
        return (self.cause, self.value, self.effect)


@dataclass(frozen=True)
class FaultReport:
    """What the driver's status reported for a fault: severity, message texts (they may change over time), and name."""

    level: str
    texts: frozenset[str]
    name: str

    def is_in(self, said: str) -> bool:
        """Return whether a message contains one of these texts."""
        return any(text in said for text in self.texts)


@dataclass(frozen=True)
class Holder:
    """A GPU or an NPU with the claim and the pod that use it. ``device`` is the published name of the allocated
    device.
    """

    uuid: str
    device: str
    claim: str
    pod: str


@dataclass(frozen=True)
class FaultyDevice:
    """A GPU or an NPU with a fault: its name in the table, the expected reports, and its start in seconds since the
    epoch.
    """

    name: str
    holder: Holder
    expected_faults: tuple[ExpectedFault, ...]
    began: float


class Surfaces:
    """Recorder of all reports about one driver's devices on one node. Call ``close`` at the end."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.record = Record()
        self._node, self._driver = node, cluster.driver
        kubectl = [*cluster._command("kubectl"), "get", "--raw"]
        resource = f"/apis/resource.k8s.io/v1/resourceslices?watch=1&fieldSelector=spec.nodeName%3D{node}"
        python = "/opt/dra-accelerators/venv/bin/python"
        self._programs = [
            self._follow([*kubectl, resource], self._slice),
            self._follow([*kubectl, "/api/v1/namespaces/default/pods?watch=1"], self._pod),
            self._follow([*kubectl, "/api/v1/events?watch=1"], self._event),
            self._follow(
                [*cluster._command(f"run {node}"), python, "-u", "-c", ASK, self._driver, str(PORT)], self._asked
            ),
        ]

    def close(self) -> None:
        """Stop the watches and the program on the node. The latter exits when its standard input is closed."""
        *watches, asking = self._programs
        for program in watches:
            program.kill()
            program.wait()
        assert asking.stdin is not None
        asking.stdin.close()
        asking.wait(timeout=60)

    def all_well(self, holders: Iterable[Holder]) -> bool:
        """Return whether every source has reported these devices, and reports no fault."""
        last = {key: known[-1][1] for key, known in self.record.history.items()}
        return all(
            last.get(f"status {each.uuid}") == [] == last.get(f"metric {each.uuid}")
            and last.get(f"taint {each.device}") == frozenset()
            and last.get(f"pod {each.pod}") == HEALTHY
            for each in holders
        )

    @staticmethod
    def expected(expected_faults: Iterable[ExpectedFault]) -> tuple[str, ...]:
        """Return the sources that report these faults: all, but no taint if every fault is informative."""
        return tuple(place for place in PLACES if place != "taint" or any(each.effect for each in expected_faults))

    def wait_seen(self, devices: Sequence[FaultyDevice], timeout: float = 180) -> dict[str, dict[str, float | None]]:
        """Wait until every source reports all faults; return the times by name.

        Fails with the missing reports after ``timeout`` seconds.
        """
        return self._wait(
            "reported", devices, lambda each: self.seen(each.holder, each.expected_faults, each.began), timeout
        )

    def wait_gone(
        self, devices: Sequence[FaultyDevice], ended: float, timeout: float = 180
    ) -> dict[str, dict[str, float | None]]:
        """Wait until every source has reported the end of all faults, from ``ended`` on; return the times by name."""
        return self._wait(
            "recovered", devices, lambda each: self.gone(each.holder, each.expected_faults, ended), timeout
        )

    def _wait(
        self,
        what: str,
        devices: Sequence[FaultyDevice],
        read: Callable[[FaultyDevice], dict[str, float | None]],
        timeout: float,
    ) -> dict[str, dict[str, float | None]]:
        until = time.monotonic() + timeout
        while True:
            found = {each.name: read(each) for each in devices}
            missing = {
                each.name: left
                for each in devices
                if (left := [place for place in self.expected(each.expected_faults) if found[each.name][place] is None])
            }
            if not missing:
                return found
            if time.monotonic() > until:
                raise AssertionError(f"waited {timeout} s for: {what}; missing: {missing}\n{self._picture(devices)}")
            time.sleep(0.2)

    def _picture(self, devices: Sequence[FaultyDevice]) -> str:
        words = {word for each in devices for word in (each.holder.uuid, each.holder.device, each.holder.pod)}
        said = [
            f"{key}: {known[-1][1]}"
            for key, known in sorted(self.record.history.items())
            if key.split(" ")[-1] in words
        ]
        return "\n".join([*said, *(f"{about} {why}: {text}" for _at, about, why, text in self.record.events[-40:])])

    def seen(self, holder: Holder, expected_faults: Iterable[ExpectedFault], after: float) -> dict[str, float | None]:
        """Return when each source first reported all these faults, from ``after`` on; None for a source without a
        report.
        """
        wanted = tuple(expected_faults)
        reports, find = self._reports(holder, wanted, after), self.record.first
        taints = {each.taint for each in wanted if each.effect}
        state = "Unhealthy" if any(each.level != "informative" for each in reports) else "Healthy"
        return {
            "status": find(f"status {holder.uuid}", lambda now: _has(now, wanted), after),
            "metric": find(f"metric {holder.uuid}", lambda now: all(each.metric in now for each in wanted), after),
            "taint": find(f"taint {holder.device}", lambda now: taints <= now, after) if taints else None,
            "pod status": find(
                f"pod {holder.pod}", lambda now: now[0] == state and all(each.is_in(now[1]) for each in reports), after
            )
            if reports
            else None,
            "Event": self._last_event(holder, reports, after),
        }

    def gone(self, holder: Holder, expected_faults: Iterable[ExpectedFault], after: float) -> dict[str, float | None]:
        """Return when each source stopped reporting a fault, from ``after`` on; for Events, when the recovery was
        reported.
        """
        wanted, find = tuple(expected_faults), self.record.first
        ends = [
            FaultReport(each.level, frozenset({f"{each.name} is over"}), each.name)
            for each in self._reports(holder, wanted, 0.0)
        ]
        return {
            "status": find(f"status {holder.uuid}", lambda now: not now, after),
            "metric": find(f"metric {holder.uuid}", lambda now: not now, after),
            "taint": find(f"taint {holder.device}", lambda now: not now, after)
            if any(each.effect for each in wanted)
            else None,
            "pod status": find(f"pod {holder.pod}", lambda now: now == HEALTHY, after),
            "Event": self._last_event(holder, ends, after, "DeviceRecovered"),
        }

    def _reports(self, holder: Holder, wanted: tuple[ExpectedFault, ...], after: float) -> tuple[FaultReport, ...]:
        """Return what the status reported for these faults since ``after``; empty until it has reported all of them."""
        known = [now for since, now in self.record.history.get(f"status {holder.uuid}", []) if since >= after]
        if not any(_has(now, wanted) for now in known):
            return ()
        found = []
        for fault in wanted:
            said = [each for now in known for each in now if (each[0], each[1]) == (fault.cause, fault.value)]
            texts = frozenset(f"{message} {remedy}".strip() for *_key, message, remedy in said)
            found.append(FaultReport(said[-1][2], texts, f"{fault.cause} {fault.value}".rstrip()))
        return tuple(found)

    def _last_event(
        self, holder: Holder, reports: Iterable[FaultReport], after: float, reason: str = "DeviceUnhealthy"
    ) -> float | None:
        """Return when the last expected Event arrived, or None if one is missing.

        Events are expected for the claim and the pod, and for the node unless the fault is informative.
        """
        moments: list[float] = []
        for each in reports:
            subjects = {f"ResourceClaim {holder.claim}": "", f"Pod {holder.pod}": ""}
            if each.level != "informative":
                subjects[f"Node {self._node}"] = holder.uuid
            for subject, name in subjects.items():
                found = self.record.event(
                    subject, reason, lambda said, each=each, name=name: each.is_in(said) and name in said, after
                )
                if found is None:
                    return None
                moments.append(found)
        return max(moments, default=None)

    def _follow(self, argv: list[str], take: Callable[[Any], None]) -> subprocess.Popen[str]:
        program = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def read() -> None:
            assert program.stdout is not None
            for line in program.stdout:
                event = json.loads(line)
                if event.get("type") not in ("DELETED", "BOOKMARK", "ERROR"):
                    take(event)

        threading.Thread(target=read, daemon=True).start()
        return program

    def _slice(self, change: Mapping[str, Any]) -> None:
        for device in change["object"]["spec"].get("devices") or ():
            found = frozenset(
                (each["key"].removeprefix(f"{self._driver}/"), each.get("value", ""), each["effect"])
                for each in device.get("taints", ())
            )
            self.record.put(f"taint {device['name']}", found)

    def _pod(self, change: Mapping[str, Any]) -> None:
        for each in _resources(change["object"]):
            self.record.put(f"pod {change['object']['metadata']['name']}", (each["health"], each.get("message", "")))

    def _event(self, change: Mapping[str, Any]) -> None:
        event = change["object"]
        about = event.get("involvedObject", {})
        subject = f"{about.get('kind')} {about.get('name')}"
        self.record.events.append((time.time(), subject, str(event.get("reason")), str(event.get("message"))))

    def _asked(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self.record.put(key, value)


def _has(now: Iterable[list[str]], wanted: Iterable[ExpectedFault]) -> bool:
    found = {(each[0], each[1]) for each in now}
    return all((each.cause, each.value) in found for each in wanted)


def _resources(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for container in pod.get("status", {}).get("containerStatuses", ()):
        for each in container.get("allocatedResourcesStatus", ()):
            yield from each["resources"]


@dataclass
class Times:
    """The final table: seconds from the start of a fault to each report, and from its end to each report of the end."""

    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(
        self, each: FaultyDevice, seen: Mapping[str, float | None], ended: float, gone: Mapping[str, float | None]
    ) -> None:
        """Add one fault with the times of its reports and of the reports of its end; None where a source does not
        report it.
        """
        cells = [
            f"{moment - begin:.1f}" if (moment := found[place]) is not None else "-"
            for found, begin in ((seen, each.began), (gone, ended))
            for place in PLACES
        ]
        self.rows.append((each.name, *cells))

    def print(self) -> None:
        """Print the table to the real standard output, which pytest does not capture."""
        if not self.rows:
            return
        head = ("fault", *PLACES, *(f"{place} gone" for place in PLACES))
        lines = ["| " + " | ".join(row) + " |" for row in (head, tuple("---" for _cell in head), *self.rows)]
        sys.__stdout__.write(
            "\n" + "\n".join(["Seconds until a fault is reported, and until its end is reported", *lines]) + "\n"
        )
        sys.__stdout__.flush()
