# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The demo: bare Kubernetes nodes, one playbook, and pods that claim whole accelerators and partitions.

demo.py [mixed|ascend]

Everything is real except for the accelerators, which are simulated below the vendor's own management library. Each
stage checks its result. The demo fails if a pod does not see exactly its claimed devices, if a partition remains, or if
the second run of the playbook changes something. The cluster keeps running.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steps import ROOT, Result, Step, cache, duration, run_steps, say, tool_environment

sys.path.insert(0, str(ROOT))

from tests.cluster.cluster import EXAMPLES, WORLD, Cluster, CommandFailed, parse_recap
from tests.cluster.npus import NpuCluster


class DemoFailed(Exception):
    """An error of a stage. The message has the found and the expected result."""


@dataclass(frozen=True)
class Story:
    """One example: its file, its title, and its containers with a pattern of the output of each program.

    ``device`` is a pattern of each line about a device, and ``devices`` is the number of devices in a container. With
    ``near``, the first number of each line divided by ``near`` has to be the same for all devices: then the devices are
    adjacent.
    """

    file: str
    title: str
    containers: tuple[tuple[str, str], ...]
    sees: str
    device: str = r"^GPU "
    devices: int = 1
    near: int = 0

    def check(self, where: str, log: str) -> tuple[str, ...]:
        """Return the device lines in a container's output. Raise DemoFailed if they differ from the claimed devices."""
        lines = tuple(line.strip() for line in log.splitlines() if re.search(self.sees, line))
        devices = [line for line in log.splitlines() if re.search(self.device, line)]
        if len(lines) != self.devices or len(devices) != self.devices:
            raise DemoFailed(
                f"{where}: expected {self.devices} of devices and of lines like {self.sees!r}, and it shows:\n{log}"
            )
        groups = {int(number) // self.near for line in devices for number in re.findall(r"\d+", line)[:1] if self.near}
        if len(groups) > 1:
            raise DemoFailed(f"{where}: expected NPUs that lie near each other, and it shows:\n{log}")
        return lines


@dataclass(frozen=True)
class Machine:
    """A node of the demo: a profile of the simulator, and the cluster class that reads its devices."""

    silicon: str
    cluster: type[Cluster]


@dataclass(frozen=True)
class Demo:
    """One demo: its nodes, its fleet file, and its examples.

    ``fleet`` and the files of ``stories`` and ``unfit`` are in the directory of examples. ``library`` is the source of
    a container's device list. ``commands`` are the commands that an administrator runs on each node.
    """

    world: str
    nodes: tuple[Machine, ...]
    fleet: str
    devices: str
    library: str
    stories: tuple[Story, ...]
    unfit: str
    unfit_pod: str
    again: str
    commands: tuple[str, ...]

    @property
    def silicon(self) -> str:
        """Return the profiles of the nodes as an argument for the world."""
        return ",".join(node.silicon for node in self.nodes)

    def views(self, name: str) -> dict[str, Cluster]:
        """Return the cluster for each node of the world with that name, as its devices are read. Nodes are sorted by name."""
        nodes = self.nodes[0].cluster(name).nodes()
        return {node: machine.cluster(name) for node, machine in zip(nodes, self.nodes, strict=True)}


NPU = r"^\| \d+ +(310P|910)"
GPU_STORIES = (
    Story(
        "whole-gpu-by-memory.yaml",
        "a whole GPU, asked for by its memory",
        (("whole-gpu", "cuda"),),
        r"^GPU 0: .*UUID: GPU-",
    ),
    Story(
        "two-dynamic-mig.yaml",
        "two partitions that did not exist before the pods did",
        (("dynamic-one", "cuda"), ("dynamic-two", "cuda")),
        r"MIG 1g\.10gb",
    ),
    Story(
        "static-mig.yaml",
        "the 3g.40gb partition that the playbook made",
        (("static-3g-40gb", "cuda"),),
        r"MIG 3g\.40gb",
    ),
    Story(
        "shared-claim.yaml",
        "two containers that share one claim",
        (("shared", "first"), ("shared", "second")),
        r"^GPU 0: .*UUID: GPU-",
    ),
)
NPU_STORIES = (
    Story(
        "ascend/whole-npu.yaml",
        "a whole NPU, asked for by its memory",
        (("whole-npu", "npu"),),
        r"^\| \d+ +(310P3|910) +\| OK ",
        NPU,
    ),
    Story(
        "ascend/two-dynamic-vnpus.yaml",
        "two slices that did not exist before the pods did: one by the class of its template, one by its memory (CEL)",
        (("dynamic-quarter", "npu"), ("dynamic-by-memory", "npu")),
        r"^\| \d+ +310Pvir0(2|4\w*) +\| OK ",
        NPU,
    ),
    Story(
        "ascend/static-vnpu.yaml",
        "the slice vir04 that the playbook made",
        (("static-vir04", "npu"),),
        r"^\| \d+ +310Pvir04 +\| OK ",
        NPU,
    ),
)
NEAR_STORIES = (
    Story(
        "ascend/same-card-pair.yaml",
        "two NPUs of one card",
        (("same-card-pair", "npu"),),
        r"^\| \d+ +310P3 +\| OK ",
        NPU,
        devices=2,
        near=1,  # a chip's line begins with the number of its card
    ),
    Story(
        "ascend/same-ring-four.yaml",
        "four NPUs of one ring",
        (("same-ring-four", "npu"),),
        r"^\| \d+ +910 +\| OK ",
        NPU,
        devices=4,
        near=4,  # rings of a 910A are the NPUs 0 to 3 and 4 to 7
    ),
)
GPUS, CHIPS = Machine("8xH100", Cluster), Machine("8x310P-Pro", NpuCluster)
DEMOS = {
    "mixed": Demo(
        world="demo",
        nodes=(GPUS, CHIPS),
        fleet="ascend/mixed-fleet.yml",
        devices="accelerators",
        library="nvidia-smi or npu-smi",
        stories=(*GPU_STORIES, *NPU_STORIES),
        unfit="does-not-fit.yaml",
        unfit_pod="does-not-fit",
        again="two-dynamic-mig.yaml",
        commands=("nvidia-smi -L", "npu-smi info"),
    ),
    "ascend": Demo(
        world="demo-ascend",
        nodes=(CHIPS, Machine("4x300I-Duo", NpuCluster), Machine("8x910A", NpuCluster)),
        fleet="ascend/npu-fleet.yml",
        devices="NPUs",
        library="npu-smi",
        stories=(*NPU_STORIES, *NEAR_STORIES),
        unfit="ascend/npu-does-not-fit.yaml",
        unfit_pod="npu-does-not-fit",
        again="ascend/two-dynamic-vnpus.yaml",
        commands=("npu-smi info", "npu-smi info -m", "npu-smi info"),
    ),
}


def heading(number: int, text: str) -> None:
    """Print the heading of a stage."""
    say()
    say(f"== {number}. {text}")


def command(step: Step, logs: Path, environment: dict[str, str]) -> Result:
    """Run one command as a step. An error ends the demo."""
    (result,) = run_steps([step], logs, environment)
    if result.problem:
        raise DemoFailed(f"{step.name}: {result.problem}")
    return result


def site(demo: Demo, cluster: Cluster, name: str, usual: str, logs: Path, environment: dict[str, str]) -> Result:
    """Run the site playbook on the nodes and print its recap."""
    inventory = logs / "inventory.yml"
    inventory.write_text(cluster.world("inventory"), encoding="utf-8")
    fleet = f"@{EXAMPLES / demo.fleet}"
    playbook: list[str | Path] = ["ansible-playbook", "-i", inventory, ROOT / "playbooks/site.yml", "-e", fleet]
    say(f"    $ ansible-playbook -i {inventory} playbooks/site.yml -e @examples/{demo.fleet}")
    result = command(
        Step(name, usual, playbook, environment={"ANSIBLE_INJECT_FACT_VARS": "false"}),
        logs,
        {**environment, "KUBECONFIG": cluster.world("kubeconfig").strip()},
    )
    if result.log is not None:
        text = result.log.read_text(encoding="utf-8")
        summary, _separator, recap = text.rpartition("PLAY RECAP")
        for line in summary_lines(summary) + recap.splitlines()[1:]:
            if line.strip():
                say(f"    {line}")
    return result


def summary_lines(output: str) -> list[str]:
    """Return the summary that the playbook prints last: the message of its task "Show the summary", a list of lines."""
    shown = output.rpartition("TASK [Show the summary]")[2]
    if "=> {" not in shown:
        return []
    document = json.JSONDecoder().raw_decode(shown, shown.index("=> {") + len("=> "))[0]
    return [str(line) for line in document["msg"]]


def tell(cluster: Cluster, story: Story) -> None:
    """Apply an example, wait for its pods, and print the devices in each container."""
    say()
    say(f"  {story.title}: kubectl apply -f examples/{story.file}")
    started = time.monotonic()
    cluster.apply(EXAMPLES / story.file)
    pods = sorted({pod for pod, container in story.containers})
    cluster.wait_running(*pods)
    seconds = time.monotonic() - started
    seen = []
    for pod, container in story.containers:
        where = f"pod {pod}, container {container}"

        def log(pod: str = pod, container: str = container) -> str:
            return cluster.log(pod, container=container)

        text = cluster.wait(f"{where} printing its devices", log, timeout=30)
        seen.append(story.check(where, text))
        say(f"    {where}, on {cluster.pod(pod)['spec']['nodeName']}:")
        for line in text.splitlines():
            say(f"      {line}")
    same = len(set(seen)) == 1
    if len(seen) > 1 and same != (len(pods) == 1):
        raise DemoFailed(f"{story.file}: containers of one claim see one device, pods of two claims two; seen: {seen}")
    say(f"    running {duration(seconds)} after kubectl apply")


def show_unfit(demo: Demo, cluster: Cluster) -> None:
    """Apply the claim that cannot be satisfied and print the scheduler's reason."""
    say()
    say(f"  a claim that cannot fit: kubectl apply -f examples/{demo.unfit}")
    cluster.apply(EXAMPLES / demo.unfit)

    def reason() -> str:
        conditions = cluster.pod(demo.unfit_pod)["status"].get("conditions", [])
        return next((str(each["message"]) for each in conditions if each.get("reason") == "Unschedulable"), "")

    message = cluster.wait("the scheduler's reason", reason, timeout=60)
    say(f"    pod {demo.unfit_pod} is {cluster.pod(demo.unfit_pod)['status']['phase']}: {message}")


def delete_pods_and_claims(
    demo: Demo, cluster: Cluster, views: dict[str, Cluster], before: dict[str, list[str]]
) -> None:
    """Delete the pods and claims, and wait until their partitions and CDI files are deleted."""
    for file in [*(story.file for story in demo.stories), demo.unfit]:
        cluster.delete(EXAMPLES / file)
    for node, instances in before.items():

        def gone(node: str = node, instances: list[str] = instances) -> bool:
            return sorted(views[node].instances(node)) == instances and not views[node].cdi_files(node)

        cluster.wait(f"{node} in its state before the pods", gone, timeout=120)
        left = f"the {len(instances)} partitions that the playbook made" if instances else "no partition"
        say(f"    {node}: {left}, and no CDI file of a claim")


def run_demo(demo: Demo, name: str) -> int:
    """Run the whole demo on the world with that name and return the exit status."""
    started = time.monotonic()
    logs = cache() / "results" / demo.world
    environment = tool_environment(Path(sys.prefix))
    os.environ.update({name: environment[name] for name in ("PATH", "ANSIBLE_COLLECTIONS_PATH")})
    cluster = Cluster(name)

    *some, last = (node.silicon for node in demo.nodes)
    heading(1, f"A Kubernetes cluster of bare nodes, with the hardware of {', '.join(some)} and {last}")
    up = Step(
        "world up",
        "12 min the first time on a machine, 1 min after that",
        [WORLD, "up", "--name", name, "--nodes", str(len(demo.nodes)), "--silicon", demo.silicon],
        remedy="read the log. Run it again to continue.",
    )
    command(up, logs, environment)
    for line in cluster.kubectl("get", "nodes").splitlines():
        say(f"    {line}")

    heading(2, f"One playbook partitions the {demo.devices} and deploys the node driver")
    first = site(demo, cluster, "site playbook", "3 min", logs, environment)
    views = demo.views(name)
    for node, view in views.items():
        say(f"    {node} publishes {len(view.devices(node))} devices in {len(view.slices(node))} ResourceSlices")

    heading(3, f"Pods claim {demo.devices}; each prints what its own {demo.library} shows")
    before = {node: sorted(view.instances(node)) for node, view in views.items()}
    for story in demo.stories:
        tell(cluster, story)
    show_unfit(demo, cluster)

    heading(4, "The pods are deleted")
    delete_pods_and_claims(demo, cluster, views, before)

    heading(5, "The same playbook again changes nothing")
    second = site(demo, cluster, "site playbook again", "1 min", logs, environment)
    recap = parse_recap(second.log.read_text(encoding="utf-8")) if second.log else {}
    changed = {host: counters["changed"] for host, counters in recap.items() if counters["changed"]}
    if changed or not recap:
        raise DemoFailed(
            f"the second run of the site playbook: expected changed=0 on every host, found {changed or 'no recap'}"
        )

    heading(6, "Summary")
    say(f"  The playbook took {duration(first.seconds)} on {len(views)} nodes; its second run changed nothing.")
    say(
        f"  {sum(len(story.containers) for story in demo.stories)} containers saw exactly the devices they had claimed."
    )
    say(f"  Whole demo: {duration(time.monotonic() - started)}. Logs are under {logs}")
    say()
    world = f"tests/world/world --name {name}"
    say("  The cluster is still up. Look around:")
    say(f"    {world} kubectl get resourceslices,deviceclasses")
    say(f"    {world} kubectl -- apply -f examples/{demo.again}")
    for node, query in zip(views, demo.commands, strict=True):
        say(f"    {world} run {node} -- {query}")
    say(f"    {world} logs {next(iter(views))} dra-accelerators-driver")
    say("  Take it down:")
    say(f"    {world} down")
    return 0


def guarded(name: str, run: Callable[[], int]) -> int:
    """Run the demo. Print an error with its remedy."""
    try:
        return run()
    except (DemoFailed, CommandFailed, AssertionError) as error:
        say()
        say(f"The demo FAILED: {error}")
        say(f"The cluster keeps running. Inspect it with: tests/world/world --name {name} status")
        say(f"Run it again to go on, or start over after `tests/world/world --name {name} down`.")
        return 1
    except KeyboardInterrupt:
        say(f"Stopped. The cluster keeps running; remove it with `tests/world/world --name {name} down`.")
        return 130


def main() -> int:
    """Run the requested demo, by default the one with both vendors."""
    demo = DEMOS[sys.argv[1] if len(sys.argv) > 1 else "mixed"]
    name = os.environ.get("DRA_ACCELERATORS_WORLD", demo.world)
    return guarded(name, lambda: run_demo(demo, name))


if __name__ == "__main__":
    sys.exit(main())
