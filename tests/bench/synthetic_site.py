# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Run the site playbook for nodes that do not exist, and measure the processor time of the Ansible controller.

Each node answers like one on which the playbook has run before: nothing changes. ``connection/synthetic.py`` sends the
answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ROOT / "roles/python_environment/files"
INTERPRETER = "/usr/bin/python3"
#: What the module node_info reports of the interpreter.
IDENTITY = "3.11.2 (main)"
GPUS = 8
CLUSTER = {"server": "https://192.0.2.1:6443", "certificate-authority-data": "QUJD" * 350}
LAYOUT = [{"hosts": "accelerator_nodes", "layout": [{"match": {}, "mode": "dynamic"}]}]
RECAP = re.compile(r"^(?P<host>\S+)\s+: ok=(?P<ok>\d+)\s+changed=(?P<changed>\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """The processor time and the duration of one run in seconds, the number of tasks of the last node, and the printed text."""

    nodes: int
    processor: float
    seconds: float
    tasks: int
    output: str


def names(number: int) -> list[str]:
    """Return the names of the nodes."""
    return [f"node-{position:04}" for position in range(number)]


def _node(name: str, release: str) -> dict[str, Any]:
    reference = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"{name}-gpu"}}
    return {
        "exists": True,
        "uid": f"uid-of-{name}",
        "ready": "True",
        "kubelet": "v1.36.0",
        "runtime": "containerd://2.3.7",
        "unschedulable": False,
        "annotations": {f"example.com/annotation-{number}": "a value of an annotation" for number in range(10)},
        "labels": {f"example.com/label-{number}": "value" for number in range(30)}
        | {"dra.accelerators/release": release},
        "allocatable": {"cpu": "192", "memory": "2Ti", "pods": "110"},
        "published": {"devices": GPUS, "products": ["NVIDIA H100 80GB HBM3"], "partitions": {}},
        "slices": [
            {
                "name": f"{name}-gpu",
                "driver": "gpu.nvidia.com",
                "pool": name,
                "generation": 1,
                "expected": 1,
                "managed": True,
                "devices": [],
                "object": reference,
            }
        ],
    }


def _cluster(nodes: list[str], release: str) -> dict[str, Any]:
    return {
        "changed": False,
        "reached": True,
        "problem": "",
        "versions": ["v1", "v1beta2"],
        "counters": {"kept": True, "problem": ""},
        "namespace": {"exists": True},
        # The playbook queries without its own objects and accounts.
        "accounts": [],
        "classes": {"gpu.nvidia.com": True, "mig.nvidia.com": True},
        "duplicates": [],
        "own": [],
        "nodes": {name: _node(name, release) for name in nodes},
        "claims": [],
        "needs": {},
    }


def _unit(*, ours: bool = True) -> dict[str, Any]:
    return {
        "exists": True,
        "managed": ours,
        "active": "active",
        "enabled": "enabled",
        "file": "/etc/systemd/system/unit",
        "need_reload": False,
        "main_pid": 411,
        "restarts": 0,
        "type": "simple",
    }


def _node_info(release: str) -> dict[str, Any]:
    # The same text as __python_environment_key of the role python_environment.
    requirements = (FILES / "requirements.lock").read_text(encoding="utf-8").rstrip()
    environment = hashlib.sha256(f"{INTERPRETER}{IDENTITY}{requirements}stamped".encode()).hexdigest()[:12]
    units = ["driver", "layout", "settings", "vnpu-layout"]
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": CLUSTER}],
        "contexts": [{"name": "kubelet", "context": {"cluster": "cluster", "user": "kubelet"}}],
        "current-context": "kubelet",
    }
    return {
        "changed": False,
        "platform": {
            "system": "Linux",
            "machine": "x86_64",
            "kernel": "6.1.0",
            "systemd": True,
            "iommu": True,
            "selinux": "disabled",
            "os_release": {"id": "debian", "version_id": "12"},
        },
        "interpreters": {
            INTERPRETER: {
                "version": "3.11.2",
                "identity": IDENTITY,
                "venv": True,
                "directory": "/usr",
                "hidden_from_services": False,
                "problem": "",
            }
        },
        "units": {f"dra-accelerators-{unit}.service": _unit() for unit in units},
        "runtime": {"containerd.service": _unit(ours=False)},
        "managers": [],
        "kubelet": {
            "root": "/var/lib/kubelet",
            "directories": True,
            "sockets": ["/var/lib/kubelet/plugins_registry/gpu.nvidia.com-00000000-reg.sock"],
            "device_plugins": [],
            "kubeconfig": "/etc/kubernetes/kubelet.conf",
            "cluster": yaml.safe_dump(kubeconfig),
            "unit": _unit(ours=False),
        },
        "nvidia": {
            "answers": True,
            "version": "580.95.05",
            "problem": "",
            "uvm": "loaded",
            "toolkit": ["/usr/bin/nvidia-ctk"],
            "toolkit_version": "1.17.8",
        },
        "devices": {"nvidia": [f"0000:{gpu:02x}:00.0" for gpu in range(GPUS)]},
        "ascend": {"answers": False, "version": "", "library": "", "group": "", "problem": "no driver"},
        "programs": {
            "path": "/opt/dra-accelerators",
            "exists": True,
            "release": release,
            "environment": environment,
            "releases": [release],
            "environments": [environment],
            "names": [f"releases/{release}", f"venvs/{environment}"],
            "proven": {
                service: {"release": release, "environment": environment, "files": ""}
                for service in ("driver", "controller")
            },
            "usable": True,
        },
        "driver": {
            "configuration": ["driver.yaml", "kubeconfig"],
            "fingerprint": "1f2e3d4c5b6a7988",
            "identity": {
                "exists": True,
                "account": "system:serviceaccount:dra-accelerators:driver-@node@",
                "node": "@node@",
                "node_uid": "uid-of-@node@",
                "seconds_left": 86400,
                "lifetime": 86400,
                "cluster": CLUSTER,
                "accepted": True,
                "problem": "",
            },
        },
        "layout_problem": "",
    }


def _file_set(release: str, environment: str) -> dict[str, Any]:
    links = [
        {"path": "/opt/dra-accelerators/venv", "state": "link", "target": f"venvs/{environment}"},
        {"path": "/opt/dra-accelerators/current", "state": "link", "target": f"releases/{release}"},
    ]
    return {"changed": False, "changed_paths": [], "files": links, "previous": []}


#: The kinds of the objects of each node.
KINDS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")


def _written_object(name: str, kind: str) -> dict[str, Any]:
    """Return what ``kubernetes.core.k8s`` returns about one of several objects."""
    rules = [{"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["get", "list", "watch"]}]
    metadata = {
        "name": f"dra-accelerators-{name}",
        "namespace": "dra-accelerators",
        "uid": f"uid-of-{name}",
        "resourceVersion": "1",
    }
    result = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": metadata, "rules": rules}
    return {"changed": False, "result": result, "duration": 0, "method": "update", "warnings": []}


def answers(number: int) -> dict[str, Any]:
    """Return the answer of each module for a fleet of this size."""
    pack = [sys.executable, str(FILES / "pack_release.py"), "--collection", str(ROOT)]
    named = subprocess.run(pack, check=True, capture_output=True, text=True).stdout
    release = json.loads(named)["name"]
    node_info = _node_info(release)
    return {
        "cluster_info": _cluster(names(number), release),
        "node_info": node_info,
        "command": {"changed": False, "rc": 0, "stdout": named, "stderr": "", "cmd": [], "delta": ""},
        "runtime_cdi": {
            "changed": False,
            "up_to_date": True,
            "files": [],
            "directories": [],
            "restarted": False,
            "stops": 0,
            "pods": [],
        },
        "nvidia_mig": {
            "changed": False,
            "steps": [],
            "devices": [{"index": gpu, "mode": "dynamic", "partitions": []} for gpu in range(GPUS)],
        },
        "file_set": _file_set(release, node_info["programs"]["environment"]),
        "node_driver": {
            "changed": False,
            "steps": [],
            "waiting": [],
            "drivers": [{"driver": "gpu.nvidia.com", "ready": True, "published": True, "problems": []}],
            "device_count": GPUS,
        },
        "service_account_token": {"changed": False, "token": "token"},
        "token_audiences_info": {"changed": False, "audiences": ["https://kubernetes.default.svc"]},
        "k8s": {
            "changed": False,
            "result": {"results": [_written_object(name, kind) for name in names(number) for kind in KINDS]},
        },
    }


def run(folder: Path, number: int, programs: Path, *arguments: str, forks: int = 5) -> Cost:
    """Run the site playbook for a number of nodes with the Ansible in ``programs``; return the cost.

    Raises RuntimeError if the run fails or changes a node.
    """
    (folder / "answers.json").write_text(json.dumps(answers(number)), encoding="utf-8")
    nodes = {"hosts": dict.fromkeys(names(number)), "vars": {"accelerator_layouts": LAYOUT}}
    inventory = {
        "all": {
            "vars": {"ansible_connection": "synthetic", "ansible_python_interpreter": INTERPRETER},
            "hosts": {"localhost": None},
            "children": {"accelerator_nodes": nodes},
        }
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    tree = subprocess.run([ROOT / "tests/tools/tree"], check=True, capture_output=True, text=True).stdout.strip()
    environment = {
        **os.environ,
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
        "ANSIBLE_CONNECTION_PLUGINS": str(HERE / "connection"),
        "ANSIBLE_COLLECTIONS_PATH": tree,
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_FORKS": str(forks),
        "DRA_ACCELERATORS_SYNTHETIC": str(folder / "answers.json"),
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [programs / "ansible-playbook", "-i", folder / "hosts.yml", "dra.accelerators.site", *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    output = done.stdout + done.stderr
    recap = {found["host"]: found for found in RECAP.finditer(output)}
    if done.returncode or not set(names(number)) <= recap.keys():
        raise RuntimeError(f"The run for {number} nodes failed:\n{output[:3000]}\n...\n{output[-6000:]}")
    changed = sorted(name for name, found in recap.items() if found["changed"] != "0")
    if changed:
        raise RuntimeError(f"The run for {number} nodes changed {changed}:\n{output[-6000:]}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(number, processor, seconds, int(recap[names(number)[-1]]["ok"]), output)


def main(arguments: list[str]) -> None:
    """Entry point: the directory of Ansible's programs, the numbers of nodes, then options of ansible-playbook."""
    numbers = [int(argument) for argument in arguments[1:] if argument.isdecimal()]
    options = [argument for argument in arguments[1:] if not argument.isdecimal()]
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            cost = run(Path(folder), number, Path(arguments[0]), *options)
        if "ANSIBLE_CALLBACKS_ENABLED" in os.environ:
            sys.stdout.write(cost.output.partition("PLAY RECAP")[2])
        sys.stdout.write(
            f"{number} nodes: {cost.processor:.1f} s of processor time, {cost.processor / number:.2f} s for each node, "
            f"{cost.seconds:.1f} s, {cost.tasks} tasks\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
