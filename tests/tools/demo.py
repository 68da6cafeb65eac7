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

from steps import ROOT, Result, Step, cache, duration, print_lines, run_steps, tool_environment

sys.path.insert(0, str(ROOT))

from tests.cluster.cluster import EXAMPLES, WORLD, Cluster, CommandFailed, parse_recap
from tests.cluster.npus import NpuCluster


class DemoFailed(Exception):
    """An error of a stage. The message has the found and the expected result."""


@dataclass(frozen=True)
class Example:
    """An example manifest, and the expected output of its containers. Each container prints its devices."""

    file: str
    title: str
    #: Pairs of a pod and a container.
    containers: tuple[tuple[str, str], ...]
    #: Pattern of the line about an expected device.
    expected_line: str
    #: Pattern of the line about any device.
    device_line: str = r"^GPU "
    #: The number of devices in a container.
    devices: int = 1
    #: The size of a group of adjacent devices, or 0. The first number of a line is the device's position.
    group_size: int = 0

    def check(self, where: str, log: str) -> tuple[str, ...]:
        """Return the device lines in a container's output. Raise DemoFailed if they differ from the claimed devices."""
        lines = tuple(line.strip() for line in log.splitlines() if re.search(self.expected_line, line))
        devices = [line for line in log.splitlines() if re.search(self.device_line, line)]
        if len(lines) != self.devices or len(devices) != self.devices:
            raise DemoFailed(
                f"{where}: expected {self.devices} devices, each with a line like {self.expected_line!r}; the output is:\n{log}"
            )
        groups = {
            int(number) // self.group_size
            for line in devices
            for number in re.findall(r"\d+", line)[:1]
            if self.group_size
        }
        if len(groups) > 1:
            raise DemoFailed(f"{where}: expected adjacent NPUs; the output is:\n{log}")
        return lines


@dataclass(frozen=True)
class Machine:
    """A node of the demo: a profile of the simulator, and the cluster class that reads its devices."""

    silicon: str
    cluster: type[Cluster]


@dataclass(frozen=True)
class Demo:
    """One demo. Files are in the directory of examples."""

    world: str
    nodes: tuple[Machine, ...]
    #: The fleet file for the site playbook.
    fleet: str
    #: The name of the devices, and of the programs that list them in a container.
    devices: str
    device_programs: str
    examples: tuple[Example, ...]
    #: An example that no node can satisfy, and the name of its pod.
    unsatisfiable: str
    unsatisfiable_pod: str
    #: An example for the user to try after the demo.
    suggested_example: str
    #: The command for each node that lists its devices.
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
GPU_EXAMPLES = (
    Example(
        "whole-gpu-by-memory.yaml",
        "a whole GPU, selected by its memory",
        (("whole-gpu", "cuda"),),
        r"^GPU 0: .*UUID: GPU-",
    ),
    Example(
        "two-dynamic-mig.yaml",
        "two partitions that the driver creates for the pods",
        (("dynamic-one", "cuda"), ("dynamic-two", "cuda")),
        r"MIG 1g\.10gb",
    ),
    Example(
        "static-mig.yaml",
        "the 3g.40gb partition that the playbook created",
        (("static-3g-40gb", "cuda"),),
        r"MIG 3g\.40gb",
    ),
    Example(
        "shared-claim.yaml",
        "two containers that share one claim",
        (("shared", "first"), ("shared", "second")),
        r"^GPU 0: .*UUID: GPU-",
    ),
)
NPU_EXAMPLES = (
    Example(
        "ascend/whole-npu.yaml",
        "a whole NPU, selected by its memory",
        (("whole-npu", "npu"),),
        r"^\| \d+ +(310P3|910) +\| OK ",
        NPU,
    ),
    Example(
        "ascend/two-dynamic-vnpus.yaml",
        "two vNPUs that the driver creates for the pods: one selected by the class of its template, one by its memory (CEL)",
        (("dynamic-quarter", "npu"), ("dynamic-by-memory", "npu")),
        r"^\| \d+ +310Pvir0(2|4\w*) +\| OK ",
        NPU,
    ),
    Example(
        "ascend/static-vnpu.yaml",
        "the vNPU vir04 that the playbook created",
        (("static-vir04", "npu"),),
        r"^\| \d+ +310Pvir04 +\| OK ",
        NPU,
    ),
)
ADJACENT_EXAMPLES = (
    Example(
        "ascend/same-card-pair.yaml",
        "two NPUs of one card",
        (("same-card-pair", "npu"),),
        r"^\| \d+ +310P3 +\| OK ",
        NPU,
        devices=2,
        group_size=1,  # a chip's line begins with the number of its card
    ),
    Example(
        "ascend/same-ring-four.yaml",
        "four NPUs of one ring",
        (("same-ring-four", "npu"),),
        r"^\| \d+ +910 +\| OK ",
        NPU,
        devices=4,
        group_size=4,  # rings of a 910A are the NPUs 0 to 3 and 4 to 7
    ),
)
GPU_NODE, NPU_NODE = Machine("8xH100", Cluster), Machine("8x310P-Pro", NpuCluster)
DEMOS = {
    "mixed": Demo(
        world="demo",
        nodes=(GPU_NODE, NPU_NODE),
        fleet="ascend/mixed-fleet.yml",
        devices="accelerators",
        device_programs="nvidia-smi or npu-smi",
        examples=(*GPU_EXAMPLES, *NPU_EXAMPLES),
        unsatisfiable="does-not-fit.yaml",
        unsatisfiable_pod="does-not-fit",
        suggested_example="two-dynamic-mig.yaml",
        commands=("nvidia-smi -L", "npu-smi info"),
    ),
    "ascend": Demo(
        world="demo-ascend",
        nodes=(NPU_NODE, Machine("4x300I-Duo", NpuCluster), Machine("8x910A", NpuCluster)),
        fleet="ascend/npu-fleet.yml",
        devices="NPUs",
        device_programs="npu-smi",
        examples=(*NPU_EXAMPLES, *ADJACENT_EXAMPLES),
        unsatisfiable="ascend/npu-does-not-fit.yaml",
        unsatisfiable_pod="npu-does-not-fit",
        suggested_example="ascend/two-dynamic-vnpus.yaml",
        commands=("npu-smi info", "npu-smi info -m", "npu-smi info"),
    ),
}


def print_heading(number: int, text: str) -> None:
    """Print the heading of a stage."""
    print_lines()
    print_lines(f"== {number}. {text}")


def run_command(step: Step, logs: Path, environment: dict[str, str]) -> Result:
    """Run one command as a step. An error ends the demo."""
    (result,) = run_steps([step], logs, environment)
    if result.problem:
        raise DemoFailed(f"{step.name}: {result.problem}")
    return result


def run_site_playbook(
    demo: Demo, cluster: Cluster, name: str, usual: str, logs: Path, environment: dict[str, str]
) -> Result:
    """Run the site playbook on the nodes and print its recap."""
    inventory = logs / "inventory.yml"
    inventory.write_text(cluster.world("inventory"), encoding="utf-8")
    fleet = f"@{EXAMPLES / demo.fleet}"
    playbook: list[str | Path] = ["ansible-playbook", "-i", inventory, ROOT / "playbooks/site.yml", "-e", fleet]
    print_lines(f"    $ ansible-playbook -i {inventory} playbooks/site.yml -e @examples/{demo.fleet}")
    result = run_command(
        Step(name, usual, playbook, environment={"ANSIBLE_INJECT_FACT_VARS": "false"}),
        logs,
        {**environment, "KUBECONFIG": cluster.world("kubeconfig").strip()},
    )
    if result.log is not None:
        text = result.log.read_text(encoding="utf-8")
        summary, _separator, recap = text.rpartition("PLAY RECAP")
        for line in summary_lines(summary) + recap.splitlines()[1:]:
            if line.strip():
                print_lines(f"    {line}")
    return result


def summary_lines(output: str) -> list[str]:
    """Return the summary that the playbook prints last: the message of its task "Show the summary", a list of lines."""
    shown = output.rpartition("TASK [Show the summary]")[2]
    if "=> {" not in shown:
        return []
    document = json.JSONDecoder().raw_decode(shown, shown.index("=> {") + len("=> "))[0]
    return [str(line) for line in document["msg"]]


def run_example(cluster: Cluster, example: Example) -> None:
    """Apply an example, wait for its pods, and print the devices in each container."""
    print_lines()
    print_lines(f"  {example.title}: kubectl apply -f examples/{example.file}")
    started = time.monotonic()
    cluster.apply(EXAMPLES / example.file)
    pods = sorted({pod for pod, container in example.containers})
    cluster.wait_running(*pods)
    seconds = time.monotonic() - started
    device_lines = []
    for pod, container in example.containers:
        where = f"pod {pod}, container {container}"

        def log(pod: str = pod, container: str = container) -> str:
            return cluster.log(pod, container=container)

        text = cluster.wait(f"{where} printing its devices", log, timeout=30)
        device_lines.append(example.check(where, text))
        print_lines(f"    {where}, on {cluster.pod(pod)['spec']['nodeName']}:")
        for line in text.splitlines():
            print_lines(f"      {line}")
    has_one_device = len(set(device_lines)) == 1
    if len(device_lines) > 1 and has_one_device != (len(pods) == 1):
        raise DemoFailed(
            f"{example.file}: expected one device for containers of one claim, and different devices for different claims; found: {device_lines}"
        )
    print_lines(f"    running {duration(seconds)} after kubectl apply")


def run_unsatisfiable_example(demo: Demo, cluster: Cluster) -> None:
    """Apply the claim that cannot be satisfied and print the scheduler's reason."""
    print_lines()
    print_lines(f"  a claim that no node can satisfy: kubectl apply -f examples/{demo.unsatisfiable}")
    cluster.apply(EXAMPLES / demo.unsatisfiable)

    def reason() -> str:
        conditions = cluster.pod(demo.unsatisfiable_pod)["status"].get("conditions", [])
        return next((str(each["message"]) for each in conditions if each.get("reason") == "Unschedulable"), "")

    message = cluster.wait("the scheduler's reason", reason, timeout=60)
    print_lines(
        f"    pod {demo.unsatisfiable_pod} is {cluster.pod(demo.unsatisfiable_pod)['status']['phase']}: {message}"
    )


def delete_pods_and_claims(
    demo: Demo, cluster: Cluster, views: dict[str, Cluster], before: dict[str, list[str]]
) -> None:
    """Delete the pods and claims, and wait until their partitions and CDI files are deleted."""
    for file in [*(example.file for example in demo.examples), demo.unsatisfiable]:
        cluster.delete(EXAMPLES / file)
    for node, instances in before.items():

        def gone(node: str = node, instances: list[str] = instances) -> bool:
            return sorted(views[node].instances(node)) == instances and not views[node].cdi_files(node)

        cluster.wait(f"{node} in its state before the pods", gone, timeout=120)
        left = f"the {len(instances)} partitions that the playbook created" if instances else "no partition"
        print_lines(f"    {node}: {left}, and no CDI file of a claim")


def run_demo(demo: Demo, name: str) -> int:
    """Run the whole demo on the world with that name and return the exit status."""
    started = time.monotonic()
    logs = cache() / "results" / demo.world
    environment = tool_environment(Path(sys.prefix))
    os.environ.update({name: environment[name] for name in ("PATH", "ANSIBLE_COLLECTIONS_PATH")})
    cluster = Cluster(name)

    *some, last = (node.silicon for node in demo.nodes)
    print_heading(1, f"A Kubernetes cluster of bare nodes, with the hardware of {', '.join(some)} and {last}")
    up = Step(
        "world up",
        "12 min the first time on a machine, 1 min after that",
        [WORLD, "up", "--name", name, "--nodes", str(len(demo.nodes)), "--silicon", demo.silicon],
        remedy="read the log. Run it again to continue.",
    )
    run_command(up, logs, environment)
    for line in cluster.kubectl("get", "nodes").splitlines():
        print_lines(f"    {line}")

    print_heading(2, f"One playbook partitions the {demo.devices} and deploys the node driver")
    first = run_site_playbook(demo, cluster, "site playbook", "3 min", logs, environment)
    views = demo.views(name)
    for node, view in views.items():
        print_lines(
            f"    {node} publishes {len(view.devices(node))} devices in {len(view.slices(node))} ResourceSlices"
        )

    print_heading(3, f"Pods claim {demo.devices}; each prints its devices with {demo.device_programs}")
    before = {node: sorted(view.instances(node)) for node, view in views.items()}
    for example in demo.examples:
        run_example(cluster, example)
    run_unsatisfiable_example(demo, cluster)

    print_heading(4, "The pods are deleted")
    delete_pods_and_claims(demo, cluster, views, before)

    print_heading(5, "The same playbook again changes nothing")
    second = run_site_playbook(demo, cluster, "site playbook again", "1 min", logs, environment)
    recap = parse_recap(second.log.read_text(encoding="utf-8")) if second.log else {}
    changed = {host: counters["changed"] for host, counters in recap.items() if counters["changed"]}
    if changed or not recap:
        raise DemoFailed(
            f"the second run of the site playbook: expected changed=0 on every host, found {changed or 'no recap'}"
        )

    print_heading(6, "Summary")
    print_lines(f"  The playbook took {duration(first.seconds)} on {len(views)} nodes; its second run changed nothing.")
    print_lines(
        f"  {sum(len(example.containers) for example in demo.examples)} containers had exactly their claimed devices."
    )
    print_lines(f"  Whole demo: {duration(time.monotonic() - started)}. Logs are under {logs}")
    print_lines()
    world = f"tests/world/world --name {name}"
    print_lines("  The cluster keeps running. Commands to inspect it:")
    print_lines(f"    {world} kubectl get resourceslices,deviceclasses")
    print_lines(f"    {world} kubectl -- apply -f examples/{demo.suggested_example}")
    for node, query in zip(views, demo.commands, strict=True):
        print_lines(f"    {world} run {node} -- {query}")
    print_lines(f"    {world} logs {next(iter(views))} dra-accelerators-driver")
    print_lines("  Remove it:")
    print_lines(f"    {world} down")
    return 0


def run_with_remedy(name: str, run: Callable[[], int]) -> int:
    """Run the demo. Print an error with its remedy."""
    try:
        return run()
    except (DemoFailed, CommandFailed, AssertionError) as error:
        print_lines()
        print_lines(f"The demo FAILED: {error}")
        print_lines(f"The cluster keeps running. Inspect it with: tests/world/world --name {name} status")
        print_lines(f"Run it again to continue, or start again after `tests/world/world --name {name} down`.")
        return 1
    except KeyboardInterrupt:
        print_lines(f"Stopped. The cluster keeps running; remove it with `tests/world/world --name {name} down`.")
        return 130


def main() -> int:
    """Run the requested demo, by default the one with both vendors."""
    demo = DEMOS[sys.argv[1] if len(sys.argv) > 1 else "mixed"]
    name = os.environ.get("DRA_ACCELERATORS_WORLD", demo.world)
    return run_with_remedy(name, lambda: run_demo(demo, name))


if __name__ == "__main__":
    sys.exit(main())
