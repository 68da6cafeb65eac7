# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""When a fault of a GPU or an NPU is seen where people and programs look for it, and when it is gone again.

Each place is listened to, so that what is there for a moment is not missed: slices, pods and Events by watches of the API, what
the driver says and its metrics by a program on the node that asks both again and again. Times are those of this machine, which
is the nodes' as well.
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
#: Of the taint, by what the metric calls it.
NO_TAINT = "None"
PORT = 9817

#: On the node: one line of JSON whenever what the driver says of a device, or its metric, is another.
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
        told = found.setdefault("metric " + labels["uuid"], [])
        told += [[labels["cause"], labels["effect"]]] if name == "fault" else []
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
    """Have a new process of the driver, which has told nobody of anything yet: the same Event is written once in five minutes."""
    cluster.restart_driver(node)
    cluster.wait("the driver looked", lambda: cluster.status(node)["published"])


def start_listening(cluster: Cluster, node: str) -> None:
    """Have a new process of the driver of GPUs, and wait until it hears what they tell: an Xid from before is never heard."""
    cluster.run(node, "accelerator-simulator", "calls", "--reset")
    start_anew(cluster, node)

    def listens() -> bool:
        calls = json.loads(cluster.run(node, "accelerator-simulator", "calls"))["functions"]
        return bool(calls.get("nvmlDeviceRegisterEvents", 0) >= 8)

    cluster.wait("the driver listens to its GPUs", listens)


@dataclass
class Record:
    """What was so from when on, of each thing, and the Events as they came; both are written by threads."""

    history: dict[str, list[tuple[float, Any]]] = field(default_factory=dict)
    events: list[tuple[float, str, str, str]] = field(default_factory=list)

    def put(self, key: str, value: Any) -> None:
        """Note what is so now."""
        known = self.history.setdefault(key, [])
        if not known or known[-1][1] != value:
            known.append((time.time(), value))

    def first(self, key: str, wanted: Callable[[Any], bool], after: float) -> float | None:
        """The first moment from ``after`` on (seconds since the epoch) at which it was as wanted; None: not yet."""
        known = self.history.get(key, [])
        for place, (since, value) in enumerate(known):
            until = known[place + 1][0] if place + 1 < len(known) else float("inf")
            if until > after and wanted(value):
                return max(since, after)
        return None

    def event(self, subject: str, reason: str, wanted: Callable[[str], bool], after: float) -> float | None:
        """When the first such Event came from ``after`` on; None: not yet."""
        found = (
            at
            for at, about, why, said in tuple(self.events)
            if at >= after and (about, why) == (subject, reason) and wanted(said)
        )
        return next(found, None)


@dataclass(frozen=True)
class Ailment:
    """What a fault is to be seen as: cause, value, and the effect of the taint ("" for none)."""

    cause: str
    value: str = ""
    effect: str = "NoSchedule"

    @property
    def metric(self) -> list[str]:
        """Cause and effect as the metric has them."""
        return ["-".join(part for part in (self.cause, self.value) if part), self.effect or NO_TAINT]

    @property
    def taint(self) -> tuple[str, str, str]:
        """Key without the driver's name, value and effect."""
        return (self.cause, self.value, self.effect)


@dataclass(frozen=True)
class Told:
    """What the driver said of an ailment: how bad it is, in which words (they may change while it lasts), and its name."""

    level: str
    texts: frozenset[str]
    name: str

    def is_in(self, said: str) -> bool:
        """Whether somebody else says the same."""
        return any(text in said for text in self.texts)


@dataclass(frozen=True)
class Holder:
    """A GPU or an NPU with the claim and the pod that have it; ``device`` is what of it the claim holds, by its published name."""

    uuid: str
    device: str
    claim: str
    pod: str


@dataclass(frozen=True)
class Sick:
    """A GPU or an NPU with a fault: how the table calls it, what it is to be seen as, and when it began (seconds since the epoch)."""

    name: str
    holder: Holder
    ailments: tuple[Ailment, ...]
    began: float


class Surfaces:
    """One node's devices of one driver, in all places at once; to be ended by ``close``."""

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
        """End the listening; what runs on the node ends with its input, and not with the program here that passes it on."""
        *watches, asking = self._programs
        for program in watches:
            program.kill()
            program.wait()
        assert asking.stdin is not None
        asking.stdin.close()
        asking.wait(timeout=60)

    def all_well(self, holders: Iterable[Holder]) -> bool:
        """Whether every place has told of these devices, and of nothing that is wrong."""
        last = {key: known[-1][1] for key, known in self.record.history.items()}
        return all(
            last.get(f"status {each.uuid}") == [] == last.get(f"metric {each.uuid}")
            and last.get(f"taint {each.device}") == frozenset()
            and last.get(f"pod {each.pod}") == HEALTHY
            for each in holders
        )

    @staticmethod
    def expected(ailments: Iterable[Ailment]) -> tuple[str, ...]:
        """The places that are to tell of these ailments: all, but that what is informative makes no taint."""
        return tuple(place for place in PLACES if place != "taint" or any(each.effect for each in ailments))

    def wait_seen(self, sick: Sequence[Sick], timeout: float = 180) -> dict[str, dict[str, float | None]]:
        """Wait until every place tells of all of these; returns when, by name. Fails with what is missing after ``timeout`` (s)."""
        return self._wait("told", sick, lambda each: self.seen(each.holder, each.ailments, each.began), timeout)

    def wait_gone(self, sick: Sequence[Sick], ended: float, timeout: float = 180) -> dict[str, dict[str, float | None]]:
        """The same until every place has told of the end, from ``ended`` on."""
        return self._wait("gone", sick, lambda each: self.gone(each.holder, each.ailments, ended), timeout)

    def _wait(
        self, what: str, sick: Sequence[Sick], look: Callable[[Sick], dict[str, float | None]], timeout: float
    ) -> dict[str, dict[str, float | None]]:
        until = time.monotonic() + timeout
        while True:
            found = {each.name: look(each) for each in sick}
            missing = {
                each.name: left
                for each in sick
                if (left := [place for place in self.expected(each.ailments) if found[each.name][place] is None])
            }
            if not missing:
                return found
            if time.monotonic() > until:
                raise AssertionError(f"waited {timeout} s for: {what}; missing: {missing}\n{self._picture(sick)}")
            time.sleep(0.2)

    def _picture(self, sick: Sequence[Sick]) -> str:
        words = {word for each in sick for word in (each.holder.uuid, each.holder.device, each.holder.pod)}
        said = [
            f"{key}: {known[-1][1]}"
            for key, known in sorted(self.record.history.items())
            if key.split(" ")[-1] in words
        ]
        return "\n".join([*said, *(f"{about} {why}: {text}" for _at, about, why, text in self.record.events[-40:])])

    def seen(self, holder: Holder, ailments: Iterable[Ailment], after: float) -> dict[str, float | None]:
        """When each place told of all these ailments first, from ``after`` on; None for one that has not yet."""
        wanted = tuple(ailments)
        told, find = self._told(holder, wanted, after), self.record.first
        taints = {each.taint for each in wanted if each.effect}
        state = "Unhealthy" if any(each.level != "informative" for each in told) else "Healthy"
        return {
            "status": find(f"status {holder.uuid}", lambda now: _has(now, wanted), after),
            "metric": find(f"metric {holder.uuid}", lambda now: all(each.metric in now for each in wanted), after),
            "taint": find(f"taint {holder.device}", lambda now: taints <= now, after) if taints else None,
            "pod status": find(
                f"pod {holder.pod}", lambda now: now[0] == state and all(each.is_in(now[1]) for each in told), after
            )
            if told
            else None,
            "Event": self._last_event(holder, told, after),
        }

    def gone(self, holder: Holder, ailments: Iterable[Ailment], after: float) -> dict[str, float | None]:
        """When each place told of nothing any more, from ``after`` on; for Events, when the end of each of these was told."""
        wanted, find = tuple(ailments), self.record.first
        ends = [
            Told(each.level, frozenset({f"{each.name} is over"}), each.name) for each in self._told(holder, wanted, 0.0)
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

    def _told(self, holder: Holder, wanted: tuple[Ailment, ...], after: float) -> tuple[Told, ...]:
        """What the driver said of these ailments since then; nothing until it has told of all."""
        known = [now for since, now in self.record.history.get(f"status {holder.uuid}", []) if since >= after]
        if not any(_has(now, wanted) for now in known):
            return ()
        found = []
        for ailment in wanted:
            said = [each for now in known for each in now if (each[0], each[1]) == (ailment.cause, ailment.value)]
            texts = frozenset(f"{message} {remedy}".strip() for *_key, message, remedy in said)
            found.append(Told(said[-1][2], texts, f"{ailment.cause} {ailment.value}".rstrip()))
        return tuple(found)

    def _last_event(
        self, holder: Holder, told: Iterable[Told], after: float, reason: str = "DeviceUnhealthy"
    ) -> float | None:
        """When the last of those who are to be told was: claim, pod, and the node of what is more than informative; None: not yet."""
        moments: list[float] = []
        for each in told:
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
                told = json.loads(line)
                if told.get("type") not in ("DELETED", "BOOKMARK", "ERROR"):
                    take(told)

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

    def _asked(self, told: Mapping[str, Any]) -> None:
        for key, value in told.items():
            self.record.put(key, value)


def _has(now: Iterable[list[str]], wanted: Iterable[Ailment]) -> bool:
    found = {(each[0], each[1]) for each in now}
    return all((each.cause, each.value) in found for each in wanted)


def _resources(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for container in pod.get("status", {}).get("containerStatuses", ()):
        for each in container.get("allocatedResourcesStatus", ()):
            yield from each["resources"]


@dataclass
class Times:
    """The table at the end: seconds from the fault until each place tells of it, and from its end until none does."""

    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, each: Sick, seen: Mapping[str, float | None], ended: float, gone: Mapping[str, float | None]) -> None:
        """Add one fault with the moments at which each place told of it and of its end; None where a place does not."""
        cells = [
            f"{moment - begin:.1f}" if (moment := found[place]) is not None else "-"
            for found, begin in ((seen, each.began), (gone, ended))
            for place in PLACES
        ]
        self.rows.append((each.name, *cells))

    def print(self) -> None:
        """Print the table, beside what pytest keeps."""
        if not self.rows:
            return
        head = ("fault", *PLACES, *(f"{place} gone" for place in PLACES))
        lines = ["| " + " | ".join(row) + " |" for row in (head, tuple("---" for _cell in head), *self.rows)]
        sys.__stdout__.write("\n" + "\n".join(["Seconds until a fault is told, and until its end is", *lines]) + "\n")
        sys.__stdout__.flush()
