# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A cluster whose GPUs are repartitioned under running pods while faults occur: two operations, their observation, and
the faults.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.cluster import EXAMPLES, PLUGIN_DIRECTORY, ROOT, Cluster, Recap, execute, parse_recap
from tests.prove.repartitioning import consistent, containers, pods, profiles, records, rules, wait_ready
from tests.unit.json_server import JsonHandler, JsonServer

CALLBACKS = ROOT / "tests/unit/modules/ansible_plugins/callback"
RECORD = f"{PLUGIN_DIRECTORY}/repartition.json"

# ---- two operations


@dataclass(frozen=True)
class Way:
    """One of two layouts of a GPU: its rule, its partitions while its pods run, and how many pods it has room for."""

    rule: dict[str, Any]
    partitions: dict[str, int]
    ready: dict[str, int]
    ecc: bool = True


@dataclass(frozen=True)
class Target:
    """A GPU and its two layouts."""

    gpu: int
    ways: tuple[Way, Way]
    sets: bool = False


FIRST = {"3g.40gb": 1, "1g.10gb": 4}
SECOND = {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}
BOTH = {"3g.40gb": 1, "1g.10gb": 2}
#: In the first layout three small pods run. The second replaces two small partitions by one for the middle pod.
SMALL = Target(
    0,
    (
        Way({"mode": "static", "partitions": FIRST}, FIRST, {"small": 3, "middle": 0}),
        Way({"mode": "static", "partitions": SECOND}, SECOND, {"small": 2, "middle": 1}),
    ),
)
#: Its pod uses a partition that is created for it, or an existing one.
GREAT = Target(
    1,
    (
        Way({"mode": "dynamic"}, {"1g.10gb": 1}, {"either": 1}),
        Way({"mode": "static", "partitions": BOTH}, BOTH, {"either": 1}, ecc=False),
    ),
    sets=True,
)
NEIGHBOURS: list[dict[str, Any]] = [
    {"match": {"index": 2}, "mode": "static", "partitions": {"1g.10gb": 2}},
    {"match": {}, "mode": "whole"},
]
BESIDE = {"large": 1, "beside": 1, "whole": 1}


class Steps(JsonServer):
    """HTTP server that Ansible calls before each task. It runs a function at the first task with a given name.

    Ansible is killed if the function fails.
    """

    def __init__(self, step: str, what: Callable[[], None]) -> None:
        self.done = 0
        self.wrong: Exception | None = None
        steps = self

        class Handler(JsonHandler):
            def do_POST(self) -> None:
                if self.body()["task"] == step and not steps.done:
                    steps.done += 1
                    try:
                        what()
                    except (
                        AssertionError,
                        OSError,
                        subprocess.SubprocessError,
                    ) as error:  # reported by the test, which waits for Ansible
                        steps.wrong = error
                self.answer(200, {"kill": steps.wrong is not None})

        super().__init__(Handler)


@dataclass
class World:
    """The cluster of one node, the inventory that reaches it by SSH, and the current layout of each GPU."""

    cluster: Cluster
    node: str
    inventory: Path
    now: dict[int, int] = field(default_factory=lambda: {SMALL.gpu: 0, GREAT.gpu: 0})
    #: Target of an operation that may not have completed.
    left_by: Target | None = None

    def play(self, target: Target, way: int, steps: Steps | None = None, **more: Any) -> Recap:
        """Run the playbook with one GPU in the given layout. ``steps`` is called for each task."""
        ways = {**self.now, target.gpu: way}
        layout = [{"match": {"index": each.gpu}, **each.ways[ways[each.gpu]].rule} for each in (SMALL, GREAT)]
        said: dict[str, Any] = {
            "accelerator_layouts": [{"hosts": "all", "layout": [*layout, *NEIGHBOURS]}],
            "accelerator_repartition_evict": True,
            "accelerator_repartition_timeout": 120,
        }
        if target.sets:
            said |= {
                "accelerator_nvidia_settings_enabled": True,
                "nvidia_settings_rules": [{"match": {"index": target.gpu}, "ecc": target.ways[way].ecc}],
                "nvidia_settings_reset": "when_needed",
            }
        argv, environment = self.cluster.playbook_command(
            *("repartition.yml", "-e", f"@{EXAMPLES / 'repartition.yml'}", "-e", json.dumps({**said, **more})),
            inventory=self.inventory,
        )
        if steps is not None:
            environment |= {"ANSIBLE_CALLBACK_PLUGINS": str(CALLBACKS), "ANSIBLE_CALLBACKS_ENABLED": "at_step"}
            environment["AT_STEP"] = f"{steps.url}/step"
        done = execute(argv, env=environment, check=False, timeout=900)
        return Recap(parse_recap(done.stdout), done.stdout + done.stderr)

    def runs(self) -> dict[str, tuple[str, str, int]]:
        """Return each pod's UID, container ID, and restart count, by pod name."""
        there = pods(self.cluster)
        return {
            name: (there[name]["metadata"]["uid"], *each)
            for name, each in containers(self.cluster).items()
            if name in there
        }

    def ecc(self, gpu: int) -> bool:
        words = ("--query-gpu=ecc.mode.current", "--format=csv,noheader", "-i", gpu)
        return self.cluster.run(self.node, "nvidia-smi", *words).strip() == "Enabled"

    def layout(self, target: Target) -> str:
        """Return which layout the GPU has: the previous, the new, or neither. Partitions that claims create are
        optional.
        """
        there, ecc = profiles(self.cluster, self.node, target.gpu), self.ecc(target.gpu)
        now = self.now[target.gpu]
        for word, number in (("previous layout", now), ("new layout", 1 - now)):
            way = target.ways[number]
            if ecc == way.ecc and (there == way.partitions or (way.rule["mode"] == "dynamic" and not there)):
                return word
        return "neither layout"

    def record(self) -> str:
        """Return the step of the operation that is recorded on the node."""
        text = self.cluster.shell(self.node, f"cat {RECORD} 2>/dev/null || true")
        return f"record of {json.loads(text)['step']}" if text else "no record"

    def tainted(self) -> set[str]:
        """Return the devices that DeviceTaintRules on the API server taint."""
        return {each["spec"]["deviceSelector"]["device"] for each in self.cluster.get("devicetaintrules")["items"]}

    def settled(self, target: Target) -> None:
        """Wait until all pods run for which the GPU's layout has room, and all pods on other GPUs."""
        wait_ready(self.cluster, **target.ways[self.now[target.gpu]].ready, **BESIDE)

    def ended(self, target: Target) -> None:
        """Assert that the GPU has exactly one layout with its pods, and that no taint rule or record remains."""
        way = target.ways[self.now[target.gpu]]
        assert not rules(self.cluster) and not records(self.cluster)
        self.settled(target)
        assert self.ecc(target.gpu) == way.ecc
        if way.rule["mode"] == "static":
            consistent(self.cluster, self.node, target.gpu, way.partitions)
            return
        assert profiles(self.cluster, self.node, target.gpu) == way.partitions
        mine = [each for name, each in self.cluster.devices(self.node).items() if name.startswith(f"gpu-{target.gpu}-")]
        assert mine and not any("uuid" in each["attributes"] for each in mine), "the GPU is published as dynamic"


# ---- faults


@dataclass(frozen=True)
class Fault:
    """A fault: its description, a function that causes it, and one that repairs it whether or not it is present."""

    words: str
    begin: Callable[[World], None]
    mend: Callable[[World], None]


BUDGET = {
    "apiVersion": "policy/v1",
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "all", "namespace": "default"},
    "spec": {"minAvailable": "100%", "selector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}},
}


def stop_api(world: World) -> None:
    world.cluster.world("component", "stop", "apiserver")


def start_api(world: World) -> None:
    cluster = world.cluster
    cluster.world("component", "start", "apiserver")
    cluster.wait("the API server answers", lambda: cluster.kubectl("get", "--raw", "/readyz", check=False) == "ok", 180)
    # The controller manager reconnects its watches only after a pause: see test_outages.py.
    cluster.world("component", "restart", "controller-manager")


def stop_api_in_a_drain(world: World) -> None:
    """Forbid all evictions, and stop the API server as soon as there are taints."""
    world.cluster.apply(BUDGET)

    def watch() -> None:
        world.cluster.wait("there are taints", lambda: rules(world.cluster), 60)
        stop_api(world)

    threading.Thread(target=watch, daemon=True).start()


def start_api_after_a_drain(world: World) -> None:
    start_api(world)
    world.cluster.delete(BUDGET)


def cut(world: World, verb: str) -> None:
    """Drop all traffic to and from the node."""
    for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o")):
        world.cluster.run(world.node, "iptables", "-w", verb, chain, way, "eth0", "-j", "DROP", check=verb == "-I")


def cut_from_api(world: World, verb: str) -> None:
    """Drop traffic from the node to the API server. SSH connections still work."""
    words = ("OUTPUT", "-o", "eth0", "-p", "tcp", "--dport", "6443", "-j", "DROP")
    world.cluster.run(world.node, "iptables", "-w", verb, *words, check=verb == "-I")


def join_api(world: World) -> None:
    cut_from_api(world, "-D")
    back(world)


def join(world: World) -> None:
    cut(world, "-D")
    back(world)


def hang(world: World) -> None:
    """Pause all processes of the node: like a hung machine, it exists but does not answer."""
    execute(["docker", "pause", world.node])


def go_on(world: World) -> None:
    execute(["docker", "unpause", world.node], check=False)
    back(world)


def back(world: World) -> None:
    def ready() -> bool:
        conditions = world.cluster.get("node", world.node)["status"]["conditions"]
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    world.cluster.wait("the node is ready again", ready, 180)


def freeze_disk(world: World) -> None:
    """Make the driver's state directory read-only."""
    there = PLUGIN_DIRECTORY
    world.cluster.shell(world.node, f"mount --bind {there} {there} && mount -o remount,bind,ro {there}")


def thaw_disk(world: World) -> None:
    world.cluster.run(world.node, "umount", PLUGIN_DIRECTORY, check=False)


def refuse(gpu: int, *calls: tuple[str, ...]) -> Callable[[World], None]:
    def begin(world: World) -> None:
        for call in calls:
            world.cluster.run(world.node, "accelerator-simulator", "fault", gpu, "call", *call)

    return begin


def clear(world: World) -> None:
    world.cluster.heal(world.node, "all")


def lose(world: World) -> None:
    world.cluster.run(world.node, "accelerator-simulator", "fault", SMALL.gpu, "lost")


def meddle(world: World) -> None:
    """Destroy one of the newly created partitions with ``nvidia-smi`` while it is not in use."""
    gpu, fresh = SMALL.gpu, "2g.20gb" if world.now[SMALL.gpu] == 0 else "1g.10gb"
    listed = world.cluster.run(world.node, "nvidia-smi", "mig", "-lgi")
    numbers = re.findall(rf"^\|\s+{gpu}\s+MIG {re.escape(fresh)}\s+\d+\s+(\d+)\s", listed, re.MULTILINE)
    last = max(numbers, key=int)
    hand = f"nvidia-smi mig -i {gpu}"
    world.cluster.shell(world.node, f"{hand} -dci -gi {last} && {hand} -dgi -gi {last}")


ALWAYS, ONCE = ("fail", "999"), ("fail", "999", "nth", "1")
MAKE, SET_ECC = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlDeviceSetEccMode"


def of_silicon(call: str) -> Fault:
    return Fault(f"{call} fails", refuse(SMALL.gpu, (call, *ONCE)), clear)


NO_API = Fault("no API server from here on", stop_api, start_api)
NO_API_AMIDST = Fault("no API server once the taints are there", stop_api_in_a_drain, start_api_after_a_drain)
CUT_OFF = Fault("the node is cut off from here on", lambda world: cut(world, "-I"), join)
NO_WAY = Fault("the node does not reach the API server from here on", lambda world: cut_from_api(world, "-I"), join_api)
HANGS = Fault("the node hangs from here on", hang, go_on)
FROZEN = Fault(
    "the record cannot be written",
    freeze_disk,
    thaw_disk,
)
NO_WAY_BACK = Fault("no partition can be made any more", refuse(SMALL.gpu, (MAKE, *ALWAYS)), clear)
NO_ECC = Fault(f"{SET_ECC} fails", refuse(GREAT.gpu, (SET_ECC, *ONCE)), clear)
NO_ECC_BACK = Fault(
    "no partition can be made, and ECC not set", refuse(GREAT.gpu, (MAKE, *ALWAYS), (SET_ECC, *ALWAYS)), clear
)
BY_HAND = Fault("another program destroys a partition", meddle, lambda _world: None)
LOST = Fault("the GPU is lost and returns", lose, clear)
NOBODY_GOES = Fault(
    "a PodDisruptionBudget allows no eviction",
    lambda world: world.cluster.apply(BUDGET),
    lambda world: world.cluster.delete(BUDGET),
)
