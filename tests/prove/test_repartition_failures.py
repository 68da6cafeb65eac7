# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Repartition GPUs of a live cluster with a fault at each step: API server, node, disk, GPU, or pods that cannot be
evicted.

One node with eight H100 is reached by SSH, so that it can become unreachable like a real host. Each failed run has to
name the step and leave the state that docs/repartition.md describes: the layout of the GPU, the record on the node,
and the taint rules on the API server. The next run completes or reverts the operation, alternating by case. Then
exactly one layout remains, and no other pod was affected. `-rP` prints the table.

Two GPUs switch between two layouts. On one (SMALL) two partitions become one, or the reverse, next to pods that keep
running. The other (GREAT) is dynamic with ECC or static without, so that its settings change and the driver receives
new rules. Each test starts from the state that the previous one left.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import ROOT, Cluster, execute
from tests.cluster.manifests import deployment, selected
from tests.prove.failing import (
    BESIDE,
    BY_HAND,
    CUT_OFF,
    FROZEN,
    GREAT,
    HANGS,
    LOST,
    NEIGHBOURS,
    NO_API,
    NO_API_AMIDST,
    NO_ECC,
    NO_ECC_BACK,
    NO_WAY,
    NO_WAY_BACK,
    NOBODY_GOES,
    SMALL,
    Fault,
    Steps,
    Target,
    World,
    of_silicon,
)

WORLD = os.environ.get("DRA_ACCELERATORS_FAILURES_WORLD", "failures")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"

HOLD = "Block new claims on the device in the driver"
DRAIN = "Drain the devices to remove"
UNPREPARED = "Wait until the driver has unprepared the devices to remove"
EMPTY = "Delete the partitions of the GPU for the reset"
SET = "Change the settings of the GPU"
CHANGE = "Change the layout of the GPU"
LOOK = "Verify the layout of the GPU"
LOOK_SET = "Verify the settings of the GPU"
SAY = "Record that the device is about to be published"
DRIVER_LAYOUT_TASK = "Configure the driver's layout of the device"
PUBLISH = "Publish the device and allow new claims in the driver"
WAIT = "Wait until the new layout is published"
OPEN = "Remove the taint of the device"
LET_GO = "Allow new claims on the device in the driver"
#: The first task that fails without an API server in the role that configures the driver.
AUDIENCES = "Read the default audiences of tokens"
KEEP = "Write the layout of the GPUs for the next boot"
STEPS = (HOLD, DRAIN, UNPREPARED, EMPTY, SET, CHANGE, LOOK, LOOK_SET, SAY, DRIVER_LAYOUT_TASK, PUBLISH, WAIT, OPEN)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start a node with its pods and SSH access; yield the world."""
    cluster = Cluster(WORLD, {"dra_driver_inventory_interval": 10})
    if not KEPT:
        cluster.world("down")
    cluster.world("up", "--nodes", "1", "--silicon", "8xH100", timeout=3000)
    (node,) = cluster.nodes()
    layout = [{"match": {"index": each.gpu}, **each.ways[0].rule} for each in (SMALL, GREAT)]
    fleet = {"accelerator_layouts": [{"hosts": "all", "layout": [*layout, *NEIGHBOURS]}]}
    first = cluster.playbook("site.yml", "-e", json.dumps(fleet), check=False)
    assert not first.failed, first.output
    gpus = re.findall(r"^GPU \d+: .*UUID: (GPU-[0-9a-f-]+)", cluster.run(node, "nvidia-smi", "-L"), re.MULTILINE)

    def part(gpu: int, profile: str) -> dict[str, Any]:
        of = f"device.attributes['gpu.nvidia.com'].parentUUID == '{gpus[gpu]}'"
        return selected("mig.nvidia.com", f"device.attributes['gpu.nvidia.com'].profile == '{profile}' && {of}")

    for name, number, exactly in (
        ("small", 3, part(SMALL.gpu, "1g.10gb")),
        ("middle", 1, part(SMALL.gpu, "2g.20gb")),
        ("large", 1, part(SMALL.gpu, "3g.40gb")),
        ("either", 1, part(GREAT.gpu, "1g.10gb")),
        ("beside", 1, part(2, "1g.10gb")),
        ("whole", 1, selected("gpu.nvidia.com", f"device.attributes['gpu.nvidia.com'].uuid == '{gpus[3]}'")),
    ):
        cluster.apply(*deployment(name, number, exactly))
    found = World(cluster, node, by_ssh(cluster, node, tmp_path_factory.mktemp("ssh")))
    for target in (SMALL, GREAT):
        found.ended(target)
    yield found
    if not KEPT:
        cluster.world("down")


def by_ssh(cluster: Cluster, node: str, folder: Path) -> Path:
    """Return an inventory of the world in which the node is reached by SSH as root."""
    key = folder / "key"
    execute(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    public = key.with_suffix(".pub").read_text("utf-8").strip()
    cluster.shell(
        node,
        "export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && apt-get -qq install -y openssh-server >/dev/null"
        f" && install -d -m 700 /root/.ssh && echo '{public}' > /root/.ssh/authorized_keys && systemctl start ssh",
        timeout=600,
    )
    addresses = {each["type"]: each["address"] for each in cluster.get("node", node)["status"]["addresses"]}
    inventory = yaml.safe_load(cluster.world("inventory"))
    inventory["all"]["children"]["accelerator_nodes"]["hosts"][node] |= {
        "ansible_connection": "ssh",
        "ansible_host": addresses["InternalIP"],
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(key),
        # A connection to an unreachable host ends after its keepalive timeout.
        "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        " -o ServerAliveInterval=1 -o ServerAliveCountMax=3 -o ConnectTimeout=5",
    }
    path = folder / "hosts.yml"
    path.write_text(yaml.safe_dump(inventory), encoding="utf-8")
    return path


# ---- observed states

FORMER, NEW, NEITHER = "previous layout", "new layout", "neither layout"
NOTHING = "no record, no taints"


def written(step: str) -> str:
    return f"record of {step}, taints"


DRAINING, APPLYING, PUBLISHING, REVERTING = (
    written(step) for step in ("draining", "applying", "publishing", "reverting")
)
TAINTS = "no record, taints"
UNREACHABLE = "UNREACHABLE!"
PUT_BACK, NOT_PUT_BACK = (
    "previous layout was restored, and the device is available",
    "previous layout could not be restored",
)
NOT_LET_GO, NOT_OPENED = (
    "previous layout was restored, but this failed",
    "has its new layout, but its changed partitions are unavailable",
)


@dataclass(frozen=True)
class Case:
    """A fault at a step: the reported step, the expected messages, the remaining state, and the action of the next
    run.
    """

    fault: Fault
    step: str
    names: str
    says: tuple[str, ...]
    left: str
    reverts: bool = False
    target: Target = SMALL
    starts: int | None = None
    #: Timeout of a drain, in seconds.
    patience: int = 60


#: Without an API server the remaining state is the same from the wait for unprepared claims on, except where the
#: driver is configured. tests/unit/modules/test_repartition_faults.py tests the result at each step as well.
CASES = (
    Case(NO_API, HOLD, DRAIN, (NOT_LET_GO,), f"{FORMER}, {NOTHING}"),
    Case(CUT_OFF, HOLD, HOLD, (UNREACHABLE,), f"{FORMER}, {NOTHING}", reverts=True),
    Case(FROZEN, HOLD, HOLD, ("Read-only file system", PUT_BACK), f"{FORMER}, {NOTHING}"),
    Case(NO_API, DRAIN, DRAIN, (NOT_LET_GO,), f"{FORMER}, {NOTHING}", reverts=True),
    Case(NO_API_AMIDST, DRAIN, DRAIN, (NOT_LET_GO,), f"{FORMER}, {TAINTS}", patience=15),
    Case(HANGS, DRAIN, LET_GO, (UNREACHABLE,), f"{FORMER}, {DRAINING}", reverts=True, patience=15),
    Case(NOBODY_GOES, DRAIN, DRAIN, ("disruption budget", PUT_BACK), f"{FORMER}, {NOTHING}", patience=10),
    Case(NO_API, UNPREPARED, WAIT, (NOT_OPENED,), f"{NEW}, {TAINTS}", reverts=True),
    Case(CUT_OFF, UNPREPARED, UNPREPARED, (UNREACHABLE,), f"{FORMER}, {DRAINING}"),
    Case(FROZEN, UNPREPARED, UNPREPARED, ("Read-only file system", NOT_LET_GO), f"{FORMER}, {DRAINING}", reverts=True),
    Case(HANGS, CHANGE, CHANGE, (UNREACHABLE,), f"{FORMER}, {APPLYING}"),
    Case(of_silicon("nvmlGpuInstanceDestroy"), CHANGE, CHANGE, (PUT_BACK,), f"{FORMER}, {NOTHING}", reverts=True),
    Case(of_silicon("nvmlGpuInstanceCreateComputeInstance"), CHANGE, CHANGE, (PUT_BACK,), f"{FORMER}, {NOTHING}"),
    Case(NO_WAY_BACK, CHANGE, CHANGE, (NOT_PUT_BACK,), f"{NEITHER}, {REVERTING}", reverts=True),
    Case(NO_WAY_BACK, CHANGE, CHANGE, (NOT_PUT_BACK,), f"{NEITHER}, {REVERTING}"),
    Case(LOST, CHANGE, LOOK, (NOT_PUT_BACK,), f"{FORMER}, {REVERTING}", reverts=True),
    Case(CUT_OFF, LOOK, LOOK, (UNREACHABLE,), f"{NEW}, {APPLYING}"),
    Case(BY_HAND, LOOK, LOOK, (PUT_BACK,), f"{FORMER}, {NOTHING}", reverts=True),
    Case(NO_API, LOOK, WAIT, (NOT_OPENED,), f"{NEW}, {TAINTS}"),
    Case(HANGS, SAY, SAY, (UNREACHABLE,), f"{NEW}, {APPLYING}", reverts=True),
    Case(FROZEN, SAY, SAY, ("Read-only file system", NOT_LET_GO), f"{FORMER}, {APPLYING}"),
    Case(CUT_OFF, PUBLISH, PUBLISH, (UNREACHABLE,), f"{NEW}, {PUBLISHING}", reverts=True),
    Case(NO_WAY, PUBLISH, WAIT, (NOT_OPENED,), f"{NEW}, {TAINTS}"),
    Case(NO_API, WAIT, WAIT, (NOT_OPENED,), f"{NEW}, {TAINTS}", reverts=True),
    Case(NO_API, OPEN, OPEN, (NOT_OPENED,), f"{NEW}, {TAINTS}"),
    Case(CUT_OFF, OPEN, KEEP, (UNREACHABLE,), f"{NEW}, {NOTHING}", reverts=True),
    Case(CUT_OFF, EMPTY, EMPTY, (UNREACHABLE,), f"{FORMER}, {APPLYING}", True, GREAT, 0),
    Case(NO_ECC_BACK, CHANGE, CHANGE, (NOT_PUT_BACK,), f"{NEITHER}, {REVERTING}", True, GREAT, 0),
    Case(HANGS, SET, SET, (UNREACHABLE,), f"{FORMER}, {APPLYING}", False, GREAT, 0),
    Case(CUT_OFF, LOOK_SET, LOOK_SET, (UNREACHABLE,), f"{NEW}, {APPLYING}", True, GREAT, 1),
    Case(NO_ECC, SET, SET, (PUT_BACK,), f"{FORMER}, {NOTHING}", False, GREAT, 1),
    Case(HANGS, DRIVER_LAYOUT_TASK, DRIVER_LAYOUT_TASK, (UNREACHABLE,), f"{NEW}, {PUBLISHING}", False, GREAT, 0),
    Case(NO_API, DRIVER_LAYOUT_TASK, AUDIENCES, (NOT_PUT_BACK,), f"{FORMER}, {REVERTING}", True, GREAT, 1),
)
#: With these faults the pods on the GPU itself do not have to stay: the GPU was lost.
LOSES_PODS = (LOST,)


def name_of(case: Case) -> str:
    return f"{case.step} | {case.fault.words} | {'reverted' if case.reverts else 'finished'}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_failed_step_is_named_and_the_next_run_completes_it(world: World, case: Case, tmp_path: Path) -> None:
    target, file = case.target, tmp_path / "plan.json"
    bring(world, case)
    before, former = world.runs(), world.now[target.gpu]
    more = {
        "accelerator_repartition_file": str(file),
        # When the devices are drained, no remaining step takes long.
        "accelerator_repartition_timeout": f"{{{{ 6 if accelerator_drained is defined else {case.patience} }}}}",
    }
    try:
        with Steps(case.step, lambda: case.fault.begin(world)) as steps:
            failed = world.play(target, 1 - former, steps, **more)
    finally:
        case.fault.mend(world)
    assert steps.wrong is None and steps.done == 1, f"{steps.wrong}\n{failed.output}"
    plan = json.loads(file.read_text())
    (operation,) = plan["nodes"][world.node]["operations"]
    goes = {each["name"] for each in plan["evicted"]}
    stays = {name: each for name, each in before.items() if name not in goes and not is_lost(case, name)}
    assert goes and len(stays) >= len(BESIDE) - 1, (goes, stays)

    named = f"TASK [{case.names}]" if UNREACHABLE in case.says else f'"{case.names}" failed: '
    assert failed.failed and named in failed.output, failed.output
    assert all(each in failed.output.partition(named)[2] for each in case.says), failed.output
    tainted = world.tainted()
    left = f"{world.layout(target)}, {world.record()}, {'taints' if tainted else 'no taints'}"
    print(f"{case.step} | {case.fault.words} | {left} | {'reverted' if case.reverts else 'finished'}")
    assert left == case.left, failed.output
    assert tainted in (set(), set(operation["published"])), (tainted, operation["published"])
    assert stays.items() <= world.runs().items(), "a pod without a removed partition was affected"
    if not tainted and left.startswith(FORMER):
        world.settled(target)

    world.now[target.gpu] = former if case.reverts else 1 - former
    again = world.play(target, world.now[target.gpu])
    assert not again.failed, again.output
    world.ended(target)
    assert stays.items() <= world.runs().items(), "a pod without a removed partition was affected by the next run"
    world.left_by = None


def is_lost(case: Case, pod: str) -> bool:
    """Return whether a pod is lost together with the lost GPU."""
    return case.fault in LOSES_PODS and pod.startswith(("small", "middle", "large"))


def bring(world: World, case: Case) -> None:
    """Bring the GPU into the layout from which the case starts."""
    target, there = case.target, world.now[case.target.gpu]
    if world.left_by is not None:  # an earlier case failed
        again = world.play(world.left_by, world.now[world.left_by.gpu])
        assert not again.failed, again.output
    if case.starts not in (None, there):
        done = world.play(target, 1 - there)
        assert not done.failed, done.output
        world.now[target.gpu] = 1 - there
    world.ended(target)
    world.left_by = target


def test_cases_contain_every_step_of_the_playbook() -> None:
    """Each step of an operation on a GPU has a case, and the names match the playbook."""
    blocks = yaml.safe_load((ROOT / "playbooks/tasks/repartition_operation.yml").read_text(encoding="utf-8"))
    tasks = [task for block in blocks for task in block.get("block", ())]
    of_gpus = [task["name"] for task in tasks if "ascend" not in str(task.get("when", ""))]
    assert of_gpus == list(STEPS)
    assert {each.step for each in CASES} == set(STEPS)
