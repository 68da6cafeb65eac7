# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The command line of the test world."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from . import binaries, cluster, engine, gates, host, image, inventory, nodes, state
from .errors import WorldError
from .parallel import in_parallel
from .pins import PINNED, RELEASES, WORLD_FOLDER
from .progress import say, step
from .state import World

DEFAULT_NAME = "world"

#: The simulator's files, with the machine profiles in directories named `machines`.
MACHINES = WORLD_FOLDER.parent.parent / "roles/simulator/files"


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs. ``--name`` is accepted before and after the verb."""
    naming = argparse.ArgumentParser(add_help=False)
    naming.add_argument(
        "--name", default=argparse.SUPPRESS, metavar="WORLD", help=f"name of the world (default {DEFAULT_NAME})"
    )
    top = argparse.ArgumentParser(
        prog="world",
        description="A real Kubernetes cluster on this machine, made of systemd containers.",
        parents=[naming],
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text, parents=[naming])

    build = verb("build", "build programs and images; complete ones are kept")
    build.add_argument(
        "--only",
        choices=("worlds", "oracles", "long-oracles", "peers", "linters"),
        help="the parts of worlds, the reference programs of tests, those of tests marked `prove`, those of `make bench`, "
        "or those of `make lint`",
    )
    build.add_argument("--prune", action="store_true", help="then remove the builds and images of other pins")
    build.add_argument("--release", choices=tuple(RELEASES), default=PINNED, help="release of Kubernetes")
    build.add_argument("--verify", action="store_true", help="read every cached file and compare it with its stamp")
    up = verb("up", "create or change a world")
    up.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help=f"number of workers (default: unchanged, {cluster.DEFAULT_NODES} for a new world)",
    )
    up.add_argument(
        "--silicon",
        default="",
        metavar="PROFILE[,PROFILE...]",
        help="accelerators of the nodes: one profile for all, or one for each",
    )
    up.add_argument(
        "--release",
        choices=tuple(RELEASES),
        help=f"Kubernetes of a new world (default {PINNED}); any but {PINNED} has its own gates",
    )
    up.add_argument("--own-gates", action="store_true", help="a new world with no feature gate set")
    up.add_argument(
        "--no-silicon-setup",
        action="store_true",
        help="store the profiles, but do not install the simulator on the nodes",
    )
    down = verb("down", "remove a world with its containers, volumes, network, and state")
    down.add_argument("--all", action="store_true", help="remove every world")
    engine_verb = verb("engine", "start Docker Engine, or stop an unused one that this command started")
    engine_verb.add_argument("action", choices=("start", "stop"))
    verb("status", "print the state of a world")
    verb("list", "print the names of all worlds")
    verb("kubeconfig", "print the path of the administrator's kubeconfig")
    verb("gates", "compare the feature gates of the API server with gates.json")
    verb("inventory", "print an Ansible inventory of the nodes")
    verb("commands", "print the commands behind `kubectl` and `run` as JSON, for programs that call them often")
    kubectl = verb("kubectl", "run kubectl on the world")
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    shell = verb("shell", "open a shell in a node (or `control`)")
    shell.add_argument("node")
    run = verb("run", "run a command in a node (or `control`)")
    run.add_argument("node")
    run.usage = "world run [--name WORLD] NODE -- COMMAND ..."
    reboot = verb("reboot", "reboot a node and wait until it is ready again")
    reboot.add_argument("node")
    reboot.add_argument("--hard", action="store_true", help="like a power failure")
    for name, text in (
        ("stop", "shut a node down cleanly"),
        ("start", "start a stopped node and wait until it is ready"),
    ):
        verb(name, text).add_argument("node")
    component = verb("component", "stop, start or restart one service of the control plane or of a node")
    component.add_argument("action", choices=("stop", "start", "restart", "kill"))
    component.add_argument("service", help=f"{', '.join(sorted(nodes.SERVICE_NAMES))}, etcd, kubelet, containerd ...")
    component.add_argument("--node", default="control", help="node of the service (default: the control plane)")
    load = verb("load", "load a Docker image, or an archive of images, into every node")
    load.add_argument("image", metavar="IMAGE|ARCHIVE")
    logs = verb("logs", "print the journal of a node (or `control`), or of one service there")
    logs.add_argument("node")
    logs.add_argument("service", nargs="?")
    logs.add_argument("--lines", type=int, default=200)
    logs.add_argument("--follow", action="store_true")
    return top


def _without_separator(words: Sequence[str]) -> list[str]:
    return list(words[1:] if words and words[0] == "--" else words)


def _exec(command: list[str]) -> int:
    """Replace this process by a command."""
    sys.stdout.flush()
    os.execvp(command[0], command)


def _interactive() -> list[str]:
    """Return options of ``docker exec``: a terminal if there is one, and always input, so that it can be piped in."""
    return ["--interactive", "--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else ["--interactive"]


def machine_profiles(names: str) -> list[str]:
    """Return the machine profiles in a list with commas. Raises WorldError for a profile that the simulator does not have."""
    found = [name for name in names.split(",") if name]
    known = sorted(path.stem for path in MACHINES.glob("**/machines/*.json"))
    if unknown := [name for name in found if name not in known]:
        raise WorldError(
            f"--silicon: the simulator has no machine {', '.join(unknown)}. Use one of {', '.join(known)}."
        )
    return found


def _up(arguments: argparse.Namespace, name: str) -> int:
    profiles = machine_profiles(arguments.silicon)
    world = cluster.up(name, arguments.nodes, profiles, arguments.release, arguments.own_gates)
    if any(node.silicon for node in world.nodes) and not arguments.no_silicon_setup:
        with step("silicon", ", ".join(node.silicon or "none" for node in world.nodes)):
            inventory.apply_silicon(world)
    print("\n".join(cluster.status(world)))
    return 0


def _build(arguments: argparse.Namespace) -> int:
    worlds = arguments.only in (None, "worlds")
    if worlds:
        cluster.prepare_host(arguments.verify, arguments.release)
    if arguments.only != "worlds":
        host.require_root()
        host.install_packages()
    if arguments.only in (None, "oracles"):
        binaries.build_oracles(arguments.verify)
    if arguments.only == "long-oracles":
        binaries.build_long_oracles(arguments.verify)
    if arguments.only == "peers":
        binaries.build_peers(arguments.verify)
    if arguments.only == "linters":
        for name, path in binaries.build_linters(arguments.verify).items():
            print(f"{name} {path}")
    for removed in image.prune() if arguments.prune else []:
        say(f"removed {removed}")
    if worlds:
        print(image.node_image(arguments.release))
    return 0


def _down(arguments: argparse.Namespace, name: str) -> int:
    names = sorted({*state.names(), *engine.worlds()}) if arguments.all else [name]
    for each in names:
        say(f"world {each}: removed" if cluster.down(each) else f"world {each}: does not exist")
    return 0


def _start(world: World, name: str) -> None:
    engine.docker("start", name)
    _wait_until_ready(world, name)


def _wait_until_ready(world: World, name: str) -> None:
    """Wait until a started container is ready."""
    nodes.wait_for_system(name)
    if name == world.control:
        cluster.wait_for_api(world)
    else:
        cluster.wait_for_nodes(world, [name])


def _reboot(world: World, name: str, hard: bool) -> None:
    with step("reboot", name):
        nodes.reboot(name, hard)
        _wait_until_ready(world, name)


def _load(world: World, wanted: str) -> None:
    archive = Path(wanted)
    with tempfile.TemporaryDirectory(prefix="world-load-") as folder:
        if not archive.is_file():
            if engine.inspect("image", wanted) is None:
                raise WorldError(f"{wanted} is neither an archive nor a Docker image: build or import it first.")
            archive = Path(folder) / "image.tar"
            engine.docker("save", "--output", str(archive), wanted)
        in_parallel([partial(nodes.import_images, node.name, archive) for node in world.nodes])
    say(f"{wanted}: loaded into {', '.join(node.name for node in world.nodes)}")


def _component(world: World, arguments: argparse.Namespace) -> int:
    service = nodes.SERVICE_NAMES.get(arguments.service, arguments.service)
    options = ["--signal=KILL"] if arguments.action == "kill" else []
    engine.inside(world.container(arguments.node), "systemctl", arguments.action, *options, service)
    return 0


def dispatch(arguments: argparse.Namespace) -> int:
    """Run the requested verb; return the exit status."""
    name = state.check_name(getattr(arguments, "name", DEFAULT_NAME))
    if arguments.verb == "build":
        return _build(arguments)
    if arguments.verb == "up":
        return _up(arguments, name)
    if arguments.verb == "down":
        return _down(arguments, name)
    if arguments.verb == "engine":
        host.require_root()
        if arguments.action == "start":
            host.install_packages()
            engine.ensure_running()
        else:
            say(engine.stop())
        return 0
    if arguments.verb == "list":
        print("".join(f"{each}\n" for each in state.names()), end="")
        return 0
    return _on_world(arguments, state.require(name))


def _on_world(arguments: argparse.Namespace, world: World) -> int:
    verb = arguments.verb
    container = world.container(arguments.node) if getattr(arguments, "node", None) else ""
    if verb == "status":
        print("\n".join(cluster.status(world)))
    elif verb == "kubeconfig":
        print(cluster.kubeconfig_path(world))
    elif verb == "inventory":
        print(inventory.text_of(world), end="")
    elif verb == "gates":
        found = gates.differences(cluster.kubectl(world, "get", "--raw=/metrics").stdout)
        if found:
            raise WorldError("\n".join(["the API server and gates.json differ:", *found]))
        print(f"{len(gates.feature_gates())} gates match gates.json")
    elif verb == "commands":
        print(json.dumps(cluster.commands(world)))
    elif verb == "kubectl":
        return _exec([*cluster.commands(world)["kubectl"], *_without_separator(arguments.arguments)])
    elif verb == "shell":
        return _exec(["docker", "exec", *_interactive(), container, "/bin/bash", "-l"])
    elif verb == "run":
        return _exec(["docker", "exec", *_interactive(), container, *arguments.command])
    elif verb == "reboot":
        host.require_root()
        _reboot(world, container, arguments.hard)
    elif verb == "stop":
        engine.docker("stop", container)
    elif verb == "start":
        _start(world, container)
    elif verb == "component":
        return _component(world, arguments)
    elif verb == "load":
        _load(world, arguments.image)
    elif verb == "logs":
        service = nodes.SERVICE_NAMES.get(arguments.service or "", arguments.service)
        options = [f"--unit={service}"] if service else []
        follow = ["--follow"] if arguments.follow else []
        return _exec(
            ["docker", "exec", container, "journalctl", "--no-pager", f"--lines={arguments.lines}", *follow, *options]
        )
    return 0


def _verb_of(words: Sequence[str]) -> str | None:
    """Return the verb of a command line: its first word that is neither an option nor the value of ``--name``."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        del rest[: 2 if rest[0] == "--name" else 1]
    return rest[0] if rest else None


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. After ``run``, all words after ``--`` are the command."""
    own, command = list(words), []
    if _verb_of(words) == "run" and "--" in words:
        position = own.index("--")
        own, command = own[:position], own[position + 1 :]
    arguments = parser().parse_args(own)
    if arguments.verb == "run":
        if not command:
            raise WorldError(f"a command is missing: write `world run {arguments.node} -- COMMAND ...`.")
        arguments.command = command
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. Errors with a remedy are printed to stderr in a few lines without a traceback."""
    try:
        return dispatch(parse(sys.argv[1:] if words is None else words))
    except WorldError as error:
        print(f"world: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("world: interrupted. Run the same command again to continue.", file=sys.stderr)
        return 130
