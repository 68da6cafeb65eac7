# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Operations of the cluster tests on a world, like a user's: apply, wait, read a log, run on a node, reboot it.

All operations use the world's own command, ``docker exec``, and ``kubectl``. A failing test shows a command that a
person can repeat.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

ROOT = Path(__file__).resolve().parents[2]
WORLD = ROOT / "tests" / "world" / "world"
EXAMPLES = ROOT / "examples"
DRIVER = "gpu.nvidia.com"
DRIVER_UNIT = "dra-accelerators-driver.service"
PLUGIN_DIRECTORY = f"/var/lib/kubelet/plugins/{DRIVER}"

# Kinds of objects that are created and deleted without the test's action.
PASSING_KINDS = {
    "events",
    "leases",
    "endpoints",
    "endpointslices",
    "pods",
    "controllerrevisions",
    "podmetrics",
    "nodemetrics",
}
FOOTPRINT = r"""
find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /usr -o -path /root -o -path /var/tmp \
    -o -path /var/log -o -path /var/cache -o -path /var/backups -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/lib/containerd \
    -o -path /var/lib/systemd -o -path /var/lib/kubelet/pods -o -path /var/lib/kubelet/pki -o -path /etc/alternatives \
    -o -path /etc/python3.11 -o -path /etc/ld.so.cache -o -path '/var/lib/kubelet/*_state' -o -path '/var/lib/kubelet/device-plugins/*' \
    -o -path /var/lib/accelerator-simulator -o -path /var/lib/cni \) -prune -o \
    -printf '%p\t%y %m %u %g %l\n'
find /etc -xdev \( -path /etc/alternatives -o -path /etc/python3.11 -o -path /etc/ld.so.cache \) -prune -o -type f -exec md5sum {} + |
    sed -E 's/^(\S+)  (.*)$/content of \2\t\1/'
"""

# No file or unit with our name or a driver's name may remain, not even in a directory that is excluded above.
OWN_FOOTPRINT = r"""
find / /run /tmp /dev/shm -xdev \( -path /proc -o -path /sys \) -prune \
    -o \( -iname '*dra-accelerators*' -o -iname '*dra_accelerators*' -o -name '*gpu.nvidia.com*' -o -name '*npu.huawei.com*' \
       -o -path '/run/cdi*' \) -printf '%p\t%y\n'
systemctl list-units --all --plain --no-legend '*dra-accelerators*' | cut -d' ' -f1
"""

T = TypeVar("T")


class CommandFailed(AssertionError):
    """A command of the test failed. The message contains the command and its output."""


def execute(
    argv: Iterable[object],
    *,
    text: str | None = None,
    timeout: float = 600,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output."""
    words = [str(word) for word in argv]
    completed = subprocess.run(words, input=text, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    if check and completed.returncode != 0:
        raise CommandFailed(
            f"{' '.join(words)}\nreturned {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
        )
    return completed


def copy_of_the_collection(tree: Path) -> Path:
    """Copy the files of this collection that Ansible needs into a collections tree; return the collection's directory."""
    copy = tree / "ansible_collections/dra/accelerators"
    for name in ("meta", "plugins", "roles", "playbooks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "galaxy.yml", copy)
    return copy


@dataclass(frozen=True)
class Recap:
    """The result of one playbook run: the counters of Ansible's recap per host, and the whole output."""

    hosts: dict[str, dict[str, int]]
    output: str

    @property
    def changed(self) -> int:
        return sum(host["changed"] for host in self.hosts.values())

    @property
    def failed(self) -> int:
        return sum(host["failed"] + host["unreachable"] for host in self.hosts.values())


def parse_recap(output: str) -> dict[str, dict[str, int]]:
    """Read the ``PLAY RECAP`` lines of an ansible-playbook run."""
    hosts: dict[str, dict[str, int]] = {}
    tail = output.partition("PLAY RECAP")[2]
    for line in tail.splitlines():
        match = re.match(r"^(\S+)\s+:\s+(ok=\d+.*)$", line)
        if match:
            hosts[match.group(1)] = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match.group(2))}
    return hosts


class Cluster:
    """One world of the test cluster, with its nodes, its API, and the playbooks that run on it.

    Every playbook receives ``variables`` in addition to the fleet file of the examples. Methods about one vendor's
    devices use those of ``driver``.
    """

    driver = DRIVER
    fleet = EXAMPLES / "fleet.yml"

    def __init__(self, name: str, variables: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.variables = dict(variables or {})
        self._commands: dict[str, list[str]] = {}

    # The world itself

    def replace_boards(self, node: str, *words: str) -> None:
        """Give a node the boards of ``world up`` with these words. They are in other slots, so the numbers of the old ones are removed.

        The driver starts with new numbers, as docs/layout.md describes it.
        """
        self.run(node, "systemctl", "stop", DRIVER_UNIT)
        self.world("up", *words, timeout=3000)
        self.run(node, "rm", "-f", f"{PLUGIN_DIRECTORY}/numbers.json")
        self.run(node, "systemctl", "start", DRIVER_UNIT)

    def world(self, *arguments: object, timeout: float = 1800, check: bool = True, text: str | None = None) -> str:
        """Call the world's command with ``--name`` of this world; returns its standard output."""
        verb, *rest = arguments
        if verb in ("up", "down"):
            self._commands = {}
        return execute([WORLD, verb, "--name", self.name, *rest], timeout=timeout, check=check, text=text).stdout

    def _command(self, name: str) -> list[str]:
        """Return the start of a command as ``world commands`` prints it. This avoids an interpreter start for each
        call.
        """
        if not self._commands:
            self._commands = json.loads(self.world("commands"))
        return self._commands[name]

    def run(self, node: str, *argv: object, check: bool = True, timeout: float = 300, text: str | None = None) -> str:
        """Run a command on a node, as root, with ``text`` as its standard input; returns its standard output."""
        return execute([*self._command(f"run {node}"), *argv], check=check, timeout=timeout, text=text).stdout

    def shell(self, node: str, script: str, *, check: bool = True, timeout: float = 300) -> str:
        """Run a shell script on a node, as root; returns its standard output."""
        return self.run(node, "sh", "-c", script, check=check, timeout=timeout)

    def heal(self, node: str, *devices: object) -> None:
        """Clear injected faults of devices of a node (all by default), and report the recovery to its driver."""
        self.run(node, "accelerator-simulator", "clear", *devices)
        self.run(node, "dra-driver", "recovered", "all")

    # The API

    def kubectl(
        self, *arguments: object, text: str | None = None, check: bool = True, timeout: float = 120, merge: bool = False
    ) -> str:
        """Call ``kubectl`` as the cluster administrator; return its standard output, and with ``merge`` its standard
        error too.
        """
        completed = execute([*self._command("kubectl"), *arguments], text=text, check=check, timeout=timeout)
        return completed.stdout + (completed.stderr if merge else "")

    def get(self, *arguments: object) -> Any:
        """Return the parsed JSON of ``kubectl get … -o json``."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *documents: dict[str, Any] | Path) -> None:
        """Apply manifests: parsed documents or files of ``examples/``."""
        for document in documents:
            text = document.read_text(encoding="utf-8") if isinstance(document, Path) else yaml.safe_dump(document)
            self.kubectl("apply", "-f", "-", text=text)

    def delete(self, *documents: dict[str, Any] | Path, wait: bool = True) -> None:
        """Delete the objects that ``apply`` created. A missing object is no error."""
        for document in documents:
            text = document.read_text(encoding="utf-8") if isinstance(document, Path) else yaml.safe_dump(document)
            self.kubectl(
                "delete",
                "-f",
                "-",
                "--ignore-not-found",
                f"--wait={str(wait).lower()}",
                "--timeout=180s",
                text=text,
                timeout=240,
            )

    def nodes(self) -> list[str]:
        """Return the names of the worker nodes, sorted."""
        return sorted(item["metadata"]["name"] for item in self.get("nodes")["items"])

    def slices(self, node: str | None = None) -> list[dict[str, Any]]:
        """Return the ResourceSlices of our driver, of one node or of all, sorted by name."""
        items = self.get("resourceslices")["items"]
        return sorted(
            (
                item
                for item in items
                if item["spec"]["driver"] == self.driver and node in (None, item["spec"].get("nodeName"))
            ),
            key=lambda item: str(item["metadata"]["name"]),
        )

    def devices(self, node: str) -> dict[str, dict[str, Any]]:
        """Return the published devices of a node by name."""
        return {device["name"]: device for item in self.slices(node) for device in item["spec"].get("devices", [])}

    def pod(self, name: str, namespace: str = "default") -> dict[str, Any]:
        document: dict[str, Any] = self.get("pod", name, "-n", namespace)
        return document

    def log(self, pod: str, namespace: str = "default", container: str | None = None) -> str:
        """Return the output of a pod's container so far."""
        extra = ["-c", container] if container else []
        return self.kubectl("logs", pod, "-n", namespace, *extra)

    # Waiting

    def wait(self, what: str, probe: Callable[[], T | None], timeout: float = 120, interval: float = 0.5) -> T:
        """Call ``probe`` until it returns a true value; return that value.

        Fails with the cluster's state after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        last: object = None
        while True:
            try:
                last = probe()
            except CommandFailed as error:
                last = error
            if last and not isinstance(last, CommandFailed):
                return last
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout} s for: {what}; last answer: {last!r}\n{self.picture()}")
            time.sleep(interval)

    def wait_running(self, *pods: str, namespace: str = "default", timeout: float = 180) -> None:
        """Wait until all containers of the pods run."""
        wanted = set(pods)

        def running() -> bool:
            items = self.get("pods", "-n", namespace)["items"]
            up = {
                item["metadata"]["name"]
                for item in items
                if item["status"].get("phase") == "Running"
                and all("running" in status.get("state", {}) for status in item["status"].get("containerStatuses", []))
            }
            return wanted <= up

        self.wait(f"pods {', '.join(sorted(wanted))} running", running, timeout)

    def picture(self) -> str:
        """Return the cluster's state for the message of a failed wait."""
        parts = [
            self.kubectl("get", "pods,resourceclaims,resourceslices", "-A", "-o", "wide", check=False),
            self.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp", check=False)[-4000:],
        ]
        for node in self.nodes():
            parts.append(
                f"--- {node}: " + self.run(node, "journalctl", "-u", DRIVER_UNIT, "-n", "40", "--no-pager", check=False)
            )
        return "\n".join(parts)

    # The node's hardware, and the files and records of the driver

    def instances(self, node: str) -> list[str]:
        """Return the MIG devices of the node's ``nvidia-smi -L``, one line each."""
        return [
            line.strip() for line in self.run(node, "nvidia-smi", "-L").splitlines() if line.strip().startswith("MIG ")
        ]

    def cdi_files(self, node: str) -> list[str]:
        """Return the names of our claims' CDI files on a node."""
        return self.shell(node, f"ls /var/run/cdi 2>/dev/null | grep '^k8s.{self.driver}-claim' || true").split()

    def companions(self, node: str) -> list[str]:
        """Return the services of a node that run for claims, and the files written for them."""
        listed = self.run(
            node, "systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", "dra-accelerators-*@*.service"
        )
        files = self.shell(node, "ls /run/dra-accelerators/companions")
        return [*(line.split()[0] for line in listed.splitlines()), *files.split()]

    def status(self, node: str) -> dict[str, Any]:
        """Return what the driver's ``status`` command reports for our driver: its state and the prepared claims."""
        said = self.run(
            node,
            *("env", "PYTHONPATH=/opt/dra-accelerators/current", "/opt/dra-accelerators/venv/bin/python"),
            *("-m", "dra_driver.cli", "status", "--json"),
            check=False,
        )
        (found,) = (each for each in json.loads(said) if each["driver"] == self.driver)
        return dict(found)

    def recorded(self, node: str) -> dict[str, str]:
        """Return the state (preparing, prepared) of each claim in the store of a node's driver, by UID."""
        return {claim["uid"]: claim["state"] for claim in self.status(node)["claims"]}

    def uid(self, claim: str) -> str:
        """Return the UID of a claim in the default namespace."""
        return str(self.get("resourceclaim", claim, "-n", "default")["metadata"]["uid"])

    def said(self, node: str, *texts: str) -> int:
        """Return how many log lines of a node's driver since boot contain all these texts."""
        lines = self.run(node, "journalctl", "-b", "-u", DRIVER_UNIT, "-o", "cat", "--no-pager").splitlines()
        return sum(all(text in line for text in texts) for line in lines)

    def driver_pid(self, node: str) -> int:
        return int(self.run(node, "systemctl", "show", "--property=MainPID", "--value", DRIVER_UNIT).strip())

    def restart_driver(self, node: str) -> None:
        self.run(node, "systemctl", "restart", DRIVER_UNIT)
        self.wait_registered(node)

    def wait_registered(self, node: str, timeout: float = 90) -> None:
        """Wait until the driver's socket exists and its service is active, so that the kubelet can use it."""
        self.wait(
            f"driver on {node} serving",
            lambda: (
                self.shell(
                    node,
                    f"test -S /var/lib/kubelet/plugins/{self.driver}/dra.sock && systemctl is-active --quiet {DRIVER_UNIT} && echo yes",
                    check=False,
                ).strip()
                == "yes"
            ),
            timeout,
        )

    # Playbooks

    def inventory(self, *, controllers: bool = False) -> Path:
        """Write the world's Ansible inventory and return its path. With ``controllers``, all nodes are controller
        hosts too.
        """
        word = "-controllers" if controllers else ""
        path = Path(os.environ.get("PYTEST_CLUSTER_TMP", "/tmp")) / f"inventory-{self.name}{word}.yml"
        text = self.world("inventory")
        if controllers:
            document = yaml.safe_load(text)
            document["all"]["children"]["accelerator_controllers"] = {"children": {"accelerator_nodes": {}}}
            text = yaml.safe_dump(document)
        path.write_text(text, encoding="utf-8")
        return path

    def playbook(
        self,
        name: str,
        *arguments: object,
        check: bool = True,
        timeout: float = 1800,
        tree: Path | None = None,
        inventory: Path | None = None,
        programs: Path | None = None,
    ) -> Recap:
        """Run a playbook of the collection on this world's nodes with the fleet file of the examples.

        ``tree`` is a collections tree with another copy of the collection below
        ``ansible_collections/dra/accelerators``.
        ``programs`` is the directory of another Ansible's programs.
        """
        argv, environment = self.playbook_command(name, *arguments, tree=tree, inventory=inventory, programs=programs)
        completed = execute(argv, timeout=timeout, check=check, env=environment)
        return Recap(parse_recap(completed.stdout), completed.stdout + completed.stderr)

    def playbook_command(
        self,
        name: str,
        *arguments: object,
        tree: Path | None = None,
        inventory: Path | None = None,
        programs: Path | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line of ``playbook`` and its environment, for tests that do not wait for its end."""
        environment = dict(os.environ)
        if programs is not None:
            environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
            environment.pop("PYTHONPATH", None)
        environment["KUBECONFIG"] = self.world("kubeconfig").strip()
        environment["ANSIBLE_FORCE_COLOR"] = "false"
        environment["ANSIBLE_NOCOLOR"] = "true"
        environment["ANSIBLE_INJECT_FACT_VARS"] = "false"
        # Pipelining needs half the commands on the node for each task. The demo and molecule run with Ansible's
        # default.
        environment["ANSIBLE_PIPELINING"] = "true"
        folder = ROOT
        if tree is not None:
            folder = tree / "ansible_collections/dra/accelerators"
            environment["ANSIBLE_COLLECTIONS_PATH"] = str(tree)
        argv = [
            programs / "ansible-playbook" if programs else "ansible-playbook",
            "-i",
            inventory or self.inventory(),
            folder / "playbooks" / name,
            "-e",
            f"@{self.fleet}",
            *(("-e", json.dumps(self.variables)) if self.variables else ()),
            *arguments,
        ]
        return [str(word) for word in argv], environment

    # Files and objects that remain after a removal

    def footprint(self) -> dict[str, str]:
        """Return every file of every node and every API object, with the facts that identify its version.

        Excluded are packages of the distribution and their caches, which a removal keeps, logs, and the state of
        kubelet and containerd. Files with our name and CDI files are included even there.
        """
        found = {}
        for node in self.nodes():
            for script in (OWN_FOOTPRINT, FOOTPRINT):
                for line in self.shell(node, script, timeout=600).splitlines():
                    path, _tab, facts = line.partition("\t")
                    found[f"{node}:{path}"] = facts
        kinds = self.kubectl("api-resources", "--verbs=list", "-o", "name").split()
        kept = sorted(kind for kind in kinds if kind.partition(".")[0] not in PASSING_KINDS)
        for item in self.get(",".join(kept), "-A")["items"]:
            metadata = item["metadata"]
            name = f"{item['kind']} {metadata.get('namespace', '')}/{metadata['name']}"
            found[name] = ""
            if item["kind"] == "Node":
                answer = {key: metadata.get(key, {}) for key in ("labels", "annotations")}
                found[name] = json.dumps([answer, item["spec"]], sort_keys=True)
        return found
