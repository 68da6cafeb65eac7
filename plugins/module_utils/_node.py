# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What a node is: pure readers of what its files and commands say, and the one function that asks them all.

Needs the standard library alone, because it also runs where nothing is installed yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ._identity import look as look_at_identity
from ._vendors import FOREIGN_UNITS, LAYOUT_UNITS, ascend_facts, devices_by_vendor
from .core.errors import AcceleratorError
from .core.layout_rules import parse_rules
from .core.system import System

MARKER = "https://github.com/dra-accelerators/dra.accelerators"
# A release is named by its version and the digest of its content, an environment by the digest of what it is made from.
OWN_PROGRAMS = re.compile(r"releases/[^/]+-[0-9a-f]{8}|venvs/[0-9a-f]{12}")
UNIT_FOLDER = "/etc/systemd/system"
DRIVER_UNIT = "dra-accelerators-driver.service"
# Another instance of the driver, which serves while that is started again. An instance's name is a part of its sockets' names.
RELIEF_UNIT = "dra-accelerators-relief.service"
RELIEF_INSTANCE = "00000001"
# It makes settings of devices at each boot.
SETTINGS_UNIT = "dra-accelerators-settings.service"
OWN_UNITS = (
    DRIVER_UNIT,
    RELIEF_UNIT,
    "dra-accelerators-token.service",
    "dra-accelerators-token.timer",
    *LAYOUT_UNITS,
    SETTINGS_UNIT,
)
RUNTIME_UNITS = (
    "containerd.service",
    "crio.service",
    "cri-docker.service",
    "k3s.service",
    "k3s-agent.service",
    "rke2-server.service",
    "rke2-agent.service",
)
KUBELET_UNITS = ("kubelet.service",)
UNIT_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "FragmentPath",
    "NeedDaemonReload",
    "MainPID",
    "NRestarts",
    "Type",
)
# Programs of NVIDIA's container toolkit that make libraries known inside containers.
TOOLKIT = ("/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-ctk")
# Where NVIDIA's GPU Operator installs its toolkit, which the container runtime uses.
OPERATOR_TOOLKIT = ("/usr/local/nvidia/toolkit/nvidia-cdi-hook", "/usr/local/nvidia/toolkit/nvidia-ctk")
COMMAND_SECONDS = 30.0
# The kubeconfig's sections that say how the cluster is reached; the kubelet's identity is in another.
OPEN_SECTIONS = ("apiVersion", "kind", "clusters", "contexts", "current-context")
FINGERPRINT = "DRA_ACCELERATORS_FINGERPRINT"
ASK_INTERPRETER = (
    "import importlib.util as u, json, os, platform, sys\n"
    "print(json.dumps({'version': platform.python_version(), 'identity': sys.version,"
    " 'venv': all(u.find_spec(m) for m in ('venv', 'ensurepip')),"
    " 'folder': os.path.realpath(sys.base_prefix)}))"
)
#: Folders that the units' protections hide (systemd.exec(5), ProtectHome= and PrivateTmp=).
HIDDEN_FROM_SERVICES = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """Read the answer of ``systemctl show`` on several units: one block of properties for each."""
    units = {}
    for block in text.strip().split("\n\n"):
        facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if facts.get("Id"):
            units[facts["Id"]] = facts
    return units


def unit_facts(found: Mapping[str, str], text: str | None) -> dict[str, Any]:
    """What is returned of a unit: systemd's words for it, and whether its file bears the collection's mark."""
    return {
        "exists": found.get("LoadState") not in (None, "", "not-found"),
        "active": found.get("ActiveState", "inactive"),
        "enabled": found.get("UnitFileState", ""),
        "file": found.get("FragmentPath", ""),
        "ours": text is not None and MARKER in text,
        "need_reload": found.get("NeedDaemonReload") == "yes",
        "main_pid": int(found.get("MainPID") or 0),
        "restarts": int(found.get("NRestarts") or 0),
        "type": found.get("Type", ""),
    }


def open_sections(text: str) -> str:
    """Return of a kubeconfig what everybody may see: all but the users, which hold the identity."""
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except ValueError:
            return ""
        return json.dumps({key: value for key, value in document.items() if key in OPEN_SECTIONS})
    kept, keep = [], False
    for line in text.splitlines():
        # A list may stand at the margin too, below its key.
        if line and not line[0].isspace() and not line.startswith(("- ", "-\t")) and line != "-":
            key = re.match(r"""^["']?([A-Za-z-]+)["']?\s*:""", line)
            keep = bool(key) and key.group(1) in OPEN_SECTIONS  # type: ignore[union-attr]
        if keep:
            kept.append(line)
    return "\n".join(kept) + "\n" if kept else ""


def parse_os_release(text: str) -> dict[str, str]:
    """Read /etc/os-release."""
    found = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Z_]+", key):
            found[key.lower()] = value.strip().strip("\"'")
    return found


def started_from(environment: bytes) -> str:
    """Return the fingerprint in a process's environment, or nothing."""
    for word in environment.split(b"\0"):
        name, _equals, value = word.partition(b"=")
        if name.decode("utf-8", "replace") == FINGERPRINT:
            return value.decode("utf-8", "replace")
    return ""


def ask_units(system: System, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what systemd knows of units, one answer for all. A node without systemd has none."""
    try:
        shown = system.run(["systemctl", "show", f"--property={','.join(UNIT_PROPERTIES)}", *names], COMMAND_SECONDS)
    except AcceleratorError:
        found: dict[str, dict[str, str]] = {}
    else:
        found = parse_units(shown.stdout)
    return {name: unit_facts(found.get(name, {}), text_of(system, f"{UNIT_FOLDER}/{name}")) for name in names}


def text_of(system: System, path: str) -> str | None:
    """Return a file's text, or None where there is none."""
    try:
        return system.read_text(path)
    except OSError:
        return None


def selinux_of(enforce: str | None) -> str:
    """Return how SELinux is: "enforcing", "permissive" or "disabled". ``enforce`` is the kernel's word, None where it has none."""
    if enforce is None:
        return "disabled"
    return "enforcing" if enforce.strip() == "1" else "permissive"


def is_hidden_from_services(path: str) -> bool:
    """Whether services with the protections of this collection's units do not see what lies at an absolute path."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in HIDDEN_FROM_SERVICES)


def ask_interpreter(system: System, path: str) -> dict[str, Any]:
    """Return what a Python interpreter of the node says of itself."""
    nothing = {"version": "", "identity": "", "venv": False, "folder": "", "hidden_from_services": False}
    try:
        answer = system.run([path, "-c", ASK_INTERPRETER], COMMAND_SECONDS)
    except AcceleratorError as error:
        return {**nothing, "problem": str(error)}
    except OSError as error:
        return {**nothing, "problem": f"{path}: {error.strerror}"}
    try:
        said = {**nothing, **json.loads(answer.stdout), "problem": ""}
        return {**said, "hidden_from_services": is_hidden_from_services(said["folder"])}
    except ValueError:
        words = answer.stderr.strip() or answer.stdout.strip() or "no output"
        return {**nothing, "problem": f"{path} ended with status {answer.returncode}: {words[-300:]}"}


def ask_nvidia(system: System) -> dict[str, Any]:
    """Return the version of NVIDIA's driver, as its own tool says it."""
    try:
        answer = system.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], COMMAND_SECONDS)
    except AcceleratorError as error:
        return {"answers": False, "version": "", "problem": str(error)}
    words = f"{answer.stdout.strip()} {answer.stderr.strip()}".strip() or "no output"
    if answer.returncode != 0:
        return {"answers": False, "version": "", "problem": words[:300]}
    # A GPU that is sick shows words in the place of a version; the driver is the same for all.
    versions = [line.strip() for line in answer.stdout.splitlines() if re.fullmatch(r"\s*\d+(\.\d+)+\s*", line)]
    return {"answers": True, "version": versions[0] if versions else "", "problem": "" if versions else words[:300]}


def toolkit_facts(system: System) -> dict[str, Any]:
    """Return the installed programs of NVIDIA's container toolkit, and the lowest version of them; "" if none reports one.

    The version includes the toolkit of NVIDIA's GPU Operator. The driver does not use that one, so its programs are not returned.
    """
    versions = []
    for program in (*TOOLKIT, *OPERATOR_TOOLKIT):
        if system.exists(program):
            with contextlib.suppress(AcceleratorError):
                answer = system.run([program, "--version"], COMMAND_SECONDS)
                found = re.search(r"version (\d{1,9}(?:\.\d{1,9}){1,3})", answer.stdout[:1000])
                versions += [found[1]] if answer.returncode == 0 and found else []
    lowest = min(versions, key=lambda version: [int(part) for part in version.split(".")], default="")
    return {"toolkit": [path for path in TOOLKIT if system.exists(path)], "toolkit_version": lowest}


def ask_kubelet(system: System, root: str, kubeconfigs: Sequence[str]) -> dict[str, Any]:
    """Return where the kubelet keeps things, which sockets it has been given, and how it reaches its cluster."""
    found = next((path for path in kubeconfigs if system.exists(path)), "")
    registry, plugins = f"{root}/plugins_registry", f"{root}/device-plugins"
    return {
        "root": root,
        "folders": all(system.exists(path) for path in (f"{root}/plugins", registry)),
        "sockets": [f"{registry}/{name}" for name in system.list_directory(registry) if name.endswith(".sock")],
        "device_plugins": [
            f"{plugins}/{name}"
            for name in system.list_directory(plugins)
            if name.endswith(".sock") and name != "kubelet.sock"
        ],
        "kubeconfig": found,
        "cluster": open_sections(text_of(system, found) or "") if found else "",
    }


def is_complete(system: System, directory: str) -> bool:
    """Return whether a release or environment has a stamp (``stamp.py`` of the role python_environment) and its files match that stamp.

    After a power cut files can be empty. An empty stamp of an earlier version of the collection does not count.
    """
    try:
        sizes = json.loads(system.read_text(f"{directory}/complete"))["sizes"]
        path = str(system.path(directory))
        return bool(sizes) and all(os.lstat(f"{path}/{name}").st_size == size for name, size in sizes.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def ask_root(system: System, root: str) -> dict[str, Any]:
    """Return what the folder of environment and releases holds: what is in use, what is complete, all newest first.

    What does not bear the name of a release or an environment is somebody else's, and is not named.
    """
    found = [f"{kind}/{name}" for kind in ("releases", "venvs") for name in system.list_directory(f"{root}/{kind}")]
    times = {name: system.path(f"{root}/{name}").stat().st_mtime for name in found if OWN_PROGRAMS.fullmatch(name)}
    names = sorted(times, key=lambda name: (-times[name], name))
    complete = [name for name in names if is_complete(system, f"{root}/{name}")]

    def link(name: str) -> str:
        path = system.path(f"{root}/{name}")
        target = "/".join(path.readlink().parts[-2:]) if path.is_symlink() else ""
        return target.partition("/")[2] if OWN_PROGRAMS.fullmatch(target) else ""

    return {
        "path": root,
        "exists": system.exists(root),
        "release": link("current"),
        "environment": link("venv"),
        "releases": [name.partition("/")[2] for name in complete if name.startswith("releases/")],
        "environments": [name.partition("/")[2] for name in complete if name.startswith("venvs/")],
        "names": names,
        "usable": system.exists(f"{root}/venv/bin/python"),
    }


def ask_driver(system: System, unit: Mapping[str, Any], configuration: str, *, verify: bool) -> dict[str, Any]:
    """Return what the node driver was started from, and what its identity is worth."""
    fingerprint = ""
    if unit["main_pid"]:
        try:
            fingerprint = started_from(system.read_bytes(f"/proc/{unit['main_pid']}/environ"))
        except OSError:
            fingerprint = ""
    return {
        "configuration": system.list_directory(configuration),
        "fingerprint": fingerprint,
        "identity": look_at_identity(text_of(system, f"{configuration}/kubeconfig"), verify=verify),
    }


def layout_problem(layout: Any) -> str:
    """Return what is wrong with the rules of a layout, or nothing. No GPU and no driver is needed to know."""
    try:
        parse_rules(layout)
    except AcceleratorError as error:
        return str(error)
    return ""


def ask(
    system: System,
    *,
    kubelet_root: str,
    kubeconfigs: Sequence[str],
    root: str,
    configuration: str,
    interpreters: Sequence[str],
    verify: bool,
) -> dict[str, Any]:
    """Ask for everything; changes nothing."""
    units = ask_units(system, (*OWN_UNITS, *FOREIGN_UNITS, *RUNTIME_UNITS, *KUBELET_UNITS))
    uname = os.uname()
    return {
        "platform": {
            "system": uname.sysname,
            "machine": uname.machine,
            "kernel": uname.release,
            "systemd": system.exists("/run/systemd/system"),
            "iommu": bool(system.list_directory("/sys/kernel/iommu_groups")),
            "selinux": selinux_of(text_of(system, "/sys/fs/selinux/enforce")),
            "os_release": parse_os_release(text_of(system, "/etc/os-release") or ""),
        },
        "interpreters": {path: ask_interpreter(system, path) for path in interpreters},
        "units": {name: units[name] for name in OWN_UNITS},
        "runtime": {name: units[name] for name in RUNTIME_UNITS},
        "managers": [name for name in FOREIGN_UNITS if units[name]["exists"] and _runs(units[name])],
        "kubelet": {**ask_kubelet(system, kubelet_root, kubeconfigs), "unit": units[KUBELET_UNITS[0]]},
        "devices": devices_by_vendor(system),
        "ascend": ascend_facts(system),
        "nvidia": {**ask_nvidia(system), **toolkit_facts(system)},
        "programs": ask_root(system, root),
        "driver": ask_driver(system, units[DRIVER_UNIT], configuration, verify=verify),
    }


def _runs(unit: Mapping[str, Any]) -> bool:
    return unit["active"] in ("active", "activating", "reloading") or unit["enabled"] in ("enabled", "enabled-runtime")
