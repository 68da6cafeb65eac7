# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The Ansible inventory of a world, and the playbook that simulates its nodes' accelerators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import cache, cluster, state
from .commands import execute
from .errors import WorldError
from .pins import COLLECTION_FOLDER, WORLD_FOLDER
from .progress import step
from .state import World

GROUP = "accelerator_nodes"


def inventory(world: World, kubeconfig: str) -> dict[str, Any]:
    """Return the inventory as data. Nodes are reached through Docker, with the Python of an ordinary Debian."""
    hosts: dict[str, dict[str, str]] = {}
    for node in world.nodes:
        variables = {"ansible_host": node.name, "kubernetes_node_name": node.name}
        if node.silicon:
            variables["simulator_machine"] = node.silicon
        hosts[node.name] = variables
    connection = {
        "ansible_connection": "community.docker.docker",
        "ansible_python_interpreter": "/usr/bin/python3",
        # Everything in a node runs as root without sudo.
        "ansible_become": "false",
    }
    return {
        "all": {
            "vars": {"accelerator_kubeconfig": kubeconfig},
            "children": {GROUP: {"hosts": hosts, "vars": connection}},
        }
    }


def as_yaml(value: Any, depth: int = 0) -> str:
    """Return nested mappings of strings as block YAML. Every scalar is quoted, so that it stays a string."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines.append(f"{'  ' * depth}{key}:" + (f"\n{as_yaml(item, depth + 1)}" if item else " {}\n"))
        else:
            escaped = str(item).replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'{"  " * depth}{key}: "{escaped}"\n')
    return "".join(lines)


def text_of(world: World) -> str:
    """Return the inventory as YAML."""
    return as_yaml(inventory(world, cluster.kubeconfig_path(world)))


def write(world: World) -> str:
    """Write the inventory into the world's directory; return its path."""
    path = state.folder(world.name) / "inventory.yml"
    cache.write_atomically(path, text_of(world))
    return str(path)


def apply_silicon(world: World) -> None:
    """Run the playbook that installs the simulator on the nodes; its output goes to stderr."""
    tools = COLLECTION_FOLDER / "tests" / "tools"
    with step("tools", "(first use: usually 120 s)"):
        environment_folder = Path(execute([str(tools / "venv")]).stdout.split()[-1])
    tree = execute([str(tools / "tree")]).stdout.strip()
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": tree,
        "ANSIBLE_FORKS": "2",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "false",
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_PIPELINING": "true",  # half the commands on a node for each task
    }
    command = [
        str(environment_folder / "bin" / "ansible-playbook"),
        "--inventory",
        write(world),
        str(WORLD_FOLDER / "silicon.yml"),
    ]
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise WorldError(
            f"silicon.yml ended with status {done.returncode}; the world itself runs. Repeat the same `up`, or run:\n{' '.join(command)}"
        )
