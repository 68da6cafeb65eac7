# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Operations on a whole world: up, down, status."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from . import binaries, cache, certificates, engine, host, image, nodes, settings, state
from .commands import execute, wait_until
from .errors import WorldError
from .host import Host
from .parallel import in_parallel
from .pins import LABEL, PINNED
from .progress import say, step
from .state import Node, World

READY_SECONDS = 240
DEFAULT_NODES = 2


def kubeconfig_path(world: World) -> str:
    """Return the path of the administrator's kubeconfig on the host."""
    return str(state.folder(world.name) / "kubeconfig")


def kubectl_environment(world: World) -> dict[str, str]:
    """Return the environment that stores kubectl's cache in the world's directory, so that it is removed with the
    world.
    """
    return {"KUBECACHEDIR": str(state.folder(world.name) / "kubectl")}


def commands(world: World) -> dict[str, list[str]]:
    """Return the commands behind ``kubectl``, and behind ``run NAME`` for each container of a world.

    With them, a program that polls every half second does not start this interpreter each time.
    """
    program, cached = binaries.program("kubectl", world.release), kubectl_environment(world).items()
    found = {
        f"run {name}": ["docker", "exec", "--interactive", world.container(name)]
        for name in ("control", *(node.name for node in world.nodes))
    }
    settings = [f"{variable}={value}" for variable, value in cached]
    return {"kubectl": ["env", *settings, str(program), f"--kubeconfig={kubeconfig_path(world)}"], **found}


def kubectl(
    world: World, *arguments: str, check: bool = True, input_text: str | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run the world's version of kubectl and capture its output."""
    command = [str(binaries.program("kubectl", world.release)), f"--kubeconfig={kubeconfig_path(world)}", *arguments]
    return execute(command, check=check, input_text=input_text, timeout=timeout, environment=kubectl_environment(world))


def _lock(name: str) -> Path:
    """Return the lock file of one world. It outlives the world, because a removed lock file would block no other
    process.
    """
    return cache.world_cache() / "locks" / name


def prepare_host(thorough: bool = False, release: str = PINNED) -> None:
    """Prepare the parts that all worlds share: packages, engine, limits, programs, and images."""
    host.require_root()
    host.install_packages()
    engine.ensure_running()
    host.raise_inotify_limit()
    image.build(thorough, release)


def plan(
    name: str,
    count: int | None,
    profiles: list[str],
    present: World | None,
    find_block: Callable[[], int],
    release: str | None = None,
    own_gates: bool = False,
) -> World:
    """Return the desired world. Networks do not change; nodes and profiles follow the arguments.

    Without a count the number of nodes does not change, and without profiles the profiles do not. The release and
    feature gates are set when a world is created. A release other than the pinned one has its own gates.
    """
    wanted = count or (len(present.nodes) if present and present.nodes else DEFAULT_NODES)
    planned = state.plan_nodes(name, wanted, profiles)
    if present is None:
        selected = release or PINNED
        return World(name, find_block(), planned, selected, own_gates or selected != PINNED)
    if (release or present.release) != present.release or (own_gates and not present.own_gates):
        gates = "default gates" if present.own_gates else "the gates of gates.json"
        raise WorldError(
            f"world {name} runs the {present.release} Kubernetes with {gates}: remove it before you change these."
        )
    if not profiles:
        kept = {node.index: node.silicon for node in present.nodes}
        planned = tuple(replace(node, silicon=kept.get(node.index)) for node in planned)
    return replace(present, nodes=planned)


def _find_block() -> int:
    routes = execute(["ip", "-4", "route", "show"]).stdout
    routed = [word for line in routes.splitlines() for word in line.split()[:1] if "/" in word]
    taken = [world.block for world in map(state.load, state.names()) if world is not None]
    return state.free_block([*engine.used_subnets(), *routed], taken)


def _clear_leftovers(name: str, present: World | None) -> None:
    """Remove containers that the stored state does not contain, after a killed run or the loss of the state."""
    known = set() if present is None else {present.control, *(node.name for node in present.nodes)}
    unknown = [container for container in engine.labelled("container", name) if container not in known]
    if unknown:
        say(
            f"removing {', '.join(unknown)}: these containers remain from an earlier run and are not part of world {name}"
        )
        engine.docker("rm", "--force", "--volumes", *unknown)
        for each in unknown:
            engine.docker("volume", "rm", "--force", f"{each}-containerd", check=False)
    if present is None:
        engine.remove_all(name)
        shutil.rmtree(state.folder(name), ignore_errors=True)


def _drop_nodes(world: World, names: list[str]) -> None:
    for name in names:
        say(f"removing node {name}")
        if nodes.status_of(world.control) == "running":
            kubectl(world, "delete", "node", name, "--ignore-not-found", check=False)
        engine.docker("rm", "--force", "--volumes", name, check=False)
        engine.docker("volume", "rm", "--force", f"{name}-containerd", check=False)
        shutil.rmtree(state.folder(world.name) / "nodes" / name, ignore_errors=True)


def _ensure_network(world: World) -> None:
    present = engine.inspect("network", world.network)
    if present is not None:
        subnets = [pool.get("Subnet") for pool in present["IPAM"]["Config"]]
        if subnets != [world.node_subnet]:
            raise WorldError(
                f"network {world.network} has {subnets}, expected {world.node_subnet}: remove world {world.name} and create it again."
            )
        return
    with step("network", world.node_subnet):
        engine.docker(
            "network", "create", "--label", f"{LABEL}={world.name}", "--subnet", world.node_subnet, world.network
        )


def wait_for_api(world: World) -> None:
    """Wait until the API server reports that it is ready."""
    wait_until(
        f"the API server's readiness in {world.control}",
        lambda: kubectl(world, "get", "--raw=/readyz", check=False).returncode == 0,
        READY_SECONDS,
        remedy=lambda: nodes.recent_log(world.control),
    )


def _start_control(world: World, facts: Host) -> None:
    with step("control plane", world.control):
        nodes.ensure_container(world, world.control, world.control_address, nodes.control_files(world), facts, None)
        wait_for_api(world)
        kubectl(world, "apply", "--filename=-", input_text=json.dumps(settings.bootstrap_objects()))


def _start_worker(world: World, node: Node, facts: Host) -> None:
    with step("node", node.name):
        nodes.ensure_container(
            world,
            node.name,
            world.node_address(node),
            nodes.worker_files(world, node, facts),
            facts,
            f"{node.name}-containerd",
        )
        nodes.import_images(node.name, image.pod_images(), image.pods_folder().name)


def read_ready(listed: str) -> dict[str, tuple[bool, str]]:
    """Return from ``kubectl get nodes --output=json`` by node name: whether it is Ready, and the boot ID of that
    report.
    """
    ready: dict[str, tuple[bool, str]] = {}
    for node in json.loads(listed)["items"]:
        conditions = {condition["type"]: condition["status"] for condition in node["status"].get("conditions", [])}
        boot = node["status"].get("nodeInfo", {}).get("bootID", "")
        ready[node["metadata"]["name"]] = (conditions.get("Ready") == "True", boot)
    return ready


def ready_nodes(world: World) -> dict[str, tuple[bool, str]]:
    """Return readiness and boot ID of all nodes; empty while the API server does not answer."""
    done = kubectl(world, "get", "nodes", "--output=json", check=False)
    return read_ready(done.stdout) if done.returncode == 0 else {}


def wait_for_nodes(world: World, names: Iterable[str]) -> None:
    """Wait until Kubernetes reports each of these nodes ready for its current boot.

    A restarted node still counts as ready until its kubelet reports again or its lease expires.
    """
    wanted = list(names)

    def boot(name: str) -> str:
        return engine.inside(name, "cat", "/proc/sys/kernel/random/boot_id", check=False).stdout.strip()

    def lacking() -> list[str]:
        ready = ready_nodes(world)
        return [name for name in wanted if name not in ready or ready[name] != (True, boot(name))]

    def report() -> str:
        return "\n".join(f"{name}:\n{nodes.recent_log(name)}" for name in lacking())

    wait_until(f"readiness of {', '.join(wanted)}", lambda: not lacking(), READY_SECONDS, pause=0.5, remedy=report)


def up(
    name: str,
    count: int | None = None,
    profiles: list[str] | None = None,
    release: str | None = None,
    own_gates: bool = False,
) -> World:
    """Create a world or change it to the requested state. Existing parts stay, and remains of a killed run are
    repaired.
    """
    state.check_name(name)
    written = state.load(name)
    prepare_host(release=release or (written.release if written else PINNED))
    facts = host.inspect_host()
    with cache.locked(_lock(name)):
        present = state.load(name)
        _clear_leftovers(name, present)
        with cache.locked(_lock("networks of all")):
            world = plan(name, count, profiles or [], present, _find_block, release, own_gates)
            state.save(world)
        _drop_nodes(
            world,
            [node.name for node in present.nodes if node not in world.nodes and node.index > len(world.nodes)]
            if present
            else [],
        )
        for container in (world.control, *(node.name for node in world.nodes)):
            if not nodes.uses_current_image(container, world.release):
                say(
                    f"{container} was created from an older node image and stays unchanged: run `down` and `up` to update it"
                )
        certificates.ensure(world)
        cache.write_atomically(
            state.folder(name) / "kubeconfig",
            certificates.kubeconfig_of(world, certificates.authority_folder(world), "admin"),
            0o600,
        )
        _ensure_network(world)
        workers = [partial(_start_worker, world, node, facts) for node in world.nodes]
        forgotten = nodes.status_of(world.control) in ("absent", "created")
        running = [node.name for node in world.nodes if nodes.status_of(node.name) == "running"]
        in_parallel([partial(_start_control, world, facts), *workers])
        if forgotten and running:
            # A kubelet registers its node once at its start. This new control plane does not know the node.
            say(f"the control plane is a new one: starting kubelet again in {', '.join(running)}")
            in_parallel([partial(engine.inside, name, "systemctl", "restart", "kubelet") for name in running])
        with step("ready"):
            wait_for_nodes(world, [node.name for node in world.nodes])
            # Pods in the default namespace are rejected until the controller manager has created their service
            # account.
            account = ("get", "serviceaccount", "default", "--namespace=default")
            wait_until(
                "the default service account",
                lambda: kubectl(world, *account, check=False).returncode == 0,
                READY_SECONDS,
            )
    return world


def down(name: str) -> bool:
    """Remove all parts of a world; return whether there were any."""
    state.check_name(name)
    host.require_root()
    with cache.locked(_lock(name)):
        removed = engine.remove_all(name) if engine.running() else []
        there = state.folder(name).exists()
        shutil.rmtree(state.folder(name), ignore_errors=True)
    return bool(removed) or there


def status(world: World) -> list[str]:
    """Return lines that describe a world."""
    answering = engine.running()
    ready = ready_nodes(world) if answering and nodes.status_of(world.control) == "running" else {}
    lines = [
        f"world       {world.name}",
        f"Kubernetes  {world.release}, {'default gates' if world.own_gates else 'gates of gates.json'}",
        f"API server  {world.server}",
        f"kubeconfig  {kubeconfig_path(world)}",
        f"programs    {binaries.program('kubectl', world.release).parent}",
        f"control     {world.control}: {nodes.status_of(world.control) if answering else 'Docker Engine does not answer'}",
    ]
    for node in world.nodes:
        container = nodes.status_of(node.name) if answering else "unknown"
        known = "not known to Kubernetes"
        if node.name in ready:
            known = "Ready" if ready[node.name][0] else "NotReady"
        silicon = f", silicon {node.silicon}" if node.silicon else ""
        lines.append(f"node        {node.name}: {container}, {known}, {world.node_address(node)}{silicon}")
    return lines
