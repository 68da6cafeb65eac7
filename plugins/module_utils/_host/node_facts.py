# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read the state of a node from its files and commands. ``read_node_facts`` reads everything; the parsers have no side effects.

Needs only the standard library, because it also runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._kubernetes.service_account import read_identity
from ..core.errors import AcceleratorError
from ..core.host.system import System, text_or_none
from ..core.partitioning.rules import parse_rules
from ..core.vendors.ascend.dcmi.boundary import HELPER_UNIT
from .vendor_detection import FOREIGN_UNITS, LAYOUT_UNITS, ascend_facts, character_drivers, devices_by_vendor

MARKER = "https://github.com/dra-accelerators/dra.accelerators"
# A release is named by its version and the digest of its content, an environment by the digest of its inputs.
OWN_PROGRAMS = re.compile(r"releases/[^/]+-[0-9a-f]{8}|venvs/[0-9a-f]{12}")
# Each of these services records in the file ``proven-NAME`` of the root the release and environment with which it last became ready.
RECORDED = ("driver", "controller")
UNIT_FOLDER = "/etc/systemd/system"
DRIVER_UNIT = "dra-accelerators-driver.service"
# A second instance of the driver, which serves while the first one restarts. The instance name is a part of its socket names.
RELIEF_UNIT = "dra-accelerators-relief.service"
RELIEF_INSTANCE = "00000001"
# Applies the device settings at each boot.
SETTINGS_UNIT = "dra-accelerators-settings.service"
OWN_UNITS = (
    DRIVER_UNIT,
    RELIEF_UNIT,
    "dra-accelerators-token.service",
    "dra-accelerators-token.timer",
    HELPER_UNIT,
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
# Programs of NVIDIA's container toolkit that configure the library path inside containers.
TOOLKIT = ("/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-ctk")
# The toolkit's directory if NVIDIA's GPU Operator installs it. The container runtime uses that toolkit.
OPERATOR_TOOLKIT = ("/usr/local/nvidia/toolkit/nvidia-cdi-hook", "/usr/local/nvidia/toolkit/nvidia-ctk")
COMMAND_SECONDS = 30.0
# The sections of a kubeconfig that describe the connection to the cluster. The section "users" contains the kubelet's identity.
PUBLIC_SECTIONS = ("apiVersion", "kind", "clusters", "contexts", "current-context")
FINGERPRINT = "DRA_ACCELERATORS_FINGERPRINT"
INTERPRETER_PROGRAM = (
    "import importlib.util as u, json, os, platform, sys\n"
    "print(json.dumps({'version': platform.python_version(), 'identity': sys.version,"
    " 'venv': all(u.find_spec(m) for m in ('venv', 'ensurepip')),"
    " 'directory': os.path.realpath(sys.base_prefix)}))"
)
#: Directories that the units hide from services (systemd.exec(5), ProtectHome= and PrivateTmp=).
HIDDEN_FROM_SERVICES = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """Parse the output of ``systemctl show`` for several units: one block of properties for each unit."""
    units = {}
    for block in text.strip().split("\n\n"):
        facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if facts.get("Id"):
            units[facts["Id"]] = facts
    return units


def unit_facts(found: Mapping[str, str], text: str | None) -> dict[str, Any]:
    """Return the facts of a unit: its states in systemd, and whether its file has the collection's mark."""
    return {
        "exists": found.get("LoadState") not in (None, "", "not-found"),
        "active": found.get("ActiveState", "inactive"),
        "enabled": found.get("UnitFileState", ""),
        "file": found.get("FragmentPath", ""),
        "managed": text is not None and MARKER in text,
        "need_reload": found.get("NeedDaemonReload") == "yes",
        "main_pid": int(found.get("MainPID") or 0),
        "restarts": int(found.get("NRestarts") or 0),
        "type": found.get("Type", ""),
    }


def public_sections(text: str) -> str:
    """Return the sections of a kubeconfig that contain no identity. Without such sections the result is empty."""
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except ValueError:
            return ""
        return json.dumps({key: value for key, value in document.items() if key in PUBLIC_SECTIONS})
    lines, is_public = [], False
    for line in text.splitlines():
        # A YAML list can be unindented below its key.
        if line and not line[0].isspace() and not line.startswith(("- ", "-\t")) and line != "-":
            key = re.match(r"""^["']?([A-Za-z-]+)["']?\s*:""", line)
            is_public = bool(key) and key.group(1) in PUBLIC_SECTIONS  # type: ignore[union-attr]
        if is_public:
            lines.append(line)
    return "\n".join(lines) + "\n" if lines else ""


def parse_os_release(text: str) -> dict[str, str]:
    """Parse /etc/os-release."""
    found = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Z_]+", key):
            found[key.lower()] = value.strip().strip("\"'")
    return found


def fingerprint_in_environment(environment: bytes) -> str:
    """Return the fingerprint in a process's environment, or an empty string."""
    for word in environment.split(b"\0"):
        name, _equals, value = word.partition(b"=")
        if name.decode("utf-8", "replace") == FINGERPRINT:
            return value.decode("utf-8", "replace")
    return ""


def read_unit_facts(system: System, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the facts of units, with one systemd query for all. On a node without systemd, no unit exists."""
    try:
        shown = system.run(["systemctl", "show", f"--property={','.join(UNIT_PROPERTIES)}", *names], COMMAND_SECONDS)
    except AcceleratorError:
        found: dict[str, dict[str, str]] = {}
    else:
        found = parse_units(shown.stdout)
    return {name: unit_facts(found.get(name, {}), text_of(system, f"{UNIT_FOLDER}/{name}")) for name in names}


def text_of(system: System, path: str) -> str | None:
    """Return the text of a file, or None if it cannot be read."""
    try:
        return system.read_text(path)
    except OSError:
        return None


def selinux_mode(enforce: str | None) -> str:
    """Return the SELinux mode: "enforcing", "permissive" or "disabled". ``enforce`` is the kernel's value, or None if it has none."""
    if enforce is None:
        return "disabled"
    return "enforcing" if enforce.strip() == "1" else "permissive"


def is_hidden_from_services(path: str) -> bool:
    """Return whether the units of this collection hide an absolute path from their services."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in HIDDEN_FROM_SERVICES)


def read_interpreter_facts(system: System, path: str) -> dict[str, Any]:
    """Return the facts of a Python interpreter of the node."""
    unknown = {"version": "", "identity": "", "venv": False, "directory": "", "hidden_from_services": False}
    try:
        done = system.run([path, "-c", INTERPRETER_PROGRAM], COMMAND_SECONDS)
    except AcceleratorError as error:
        return {**unknown, "problem": str(error)}
    except OSError as error:
        return {**unknown, "problem": f"{path}: {error.strerror}"}
    try:
        facts = {**unknown, **json.loads(done.stdout), "problem": ""}
        return {**facts, "hidden_from_services": is_hidden_from_services(facts["directory"])}
    except ValueError:
        output = done.stderr.strip() or done.stdout.strip() or "no output"
        return {**unknown, "problem": f"{path} ended with status {done.returncode}: {output[-300:]}"}


def read_nvidia_facts(system: System) -> dict[str, Any]:
    """Return the version of NVIDIA's driver from nvidia-smi."""
    try:
        done = system.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], COMMAND_SECONDS)
    except AcceleratorError as error:
        return {"answers": False, "version": "", "problem": str(error)}
    output = f"{done.stdout.strip()} {done.stderr.strip()}".strip() or "no output"
    if done.returncode != 0:
        return {"answers": False, "version": "", "problem": output[:300]}
    # For a faulty GPU the line has an error text instead of a version. The driver version is the same for all GPUs.
    versions = [line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"\s*\d+(\.\d+)+\s*", line)]
    return {"answers": True, "version": versions[0] if versions else "", "problem": "" if versions else output[:300]}


def uvm_facts(system: System) -> dict[str, str]:
    """Return whether the kernel module nvidia-uvm is ``loaded``, or ``installed`` for the running kernel; "" if neither."""
    if any(name == "nvidia-uvm" for _major, name in character_drivers(system)):
        return {"uvm": "loaded"}
    modules = text_or_none(system, f"/lib/modules/{os.uname().release}/modules.dep") or ""
    return {"uvm": "installed" if re.search(r"/nvidia[-_](current[-_])?uvm\.ko[.a-z0-9]*:", modules) else ""}


def numa_memory_facts(system: System) -> dict[str, list[str]]:
    """Return the PCI addresses of the GPUs whose memory the driver adds to the kernel as a NUMA node.

    Facts: NVIDIA/open-gpu-kernel-modules, kernel-open/nvidia/nv-procfs.c: only such a GPU has the file numa_status.
    """
    folder = "/proc/driver/nvidia/gpus"
    found = [name for name in system.list_directory(folder) if system.exists(f"{folder}/{name}/numa_status")]
    return {"numa_memory": sorted(found)}


def toolkit_facts(system: System) -> dict[str, Any]:
    """Return the installed programs of NVIDIA's container toolkit, and their lowest version; "" if no program reports one.

    The version includes the toolkit of NVIDIA's GPU Operator. The driver does not use that toolkit, so its programs are
    not returned.
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


def read_kubelet_facts(system: System, root: str, kubeconfigs: Sequence[str]) -> dict[str, Any]:
    """Return the kubelet's directories, its registered plugin sockets, and its connection to the cluster."""
    found = next((path for path in kubeconfigs if system.exists(path)), "")
    registry, plugins = f"{root}/plugins_registry", f"{root}/device-plugins"
    return {
        "root": root,
        "directories": all(system.exists(path) for path in (f"{root}/plugins", registry)),
        "sockets": [f"{registry}/{name}" for name in system.list_directory(registry) if name.endswith(".sock")],
        "device_plugins": [
            f"{plugins}/{name}"
            for name in system.list_directory(plugins)
            if name.endswith(".sock") and name != "kubelet.sock"
        ],
        "kubeconfig": found,
        "cluster": public_sections(text_of(system, found) or "") if found else "",
    }


def is_complete(system: System, directory: str) -> bool:
    """Return whether a release or environment has a stamp (``stamp.py`` of the role python_environment) that matches its files.

    After a power failure files can be empty. An empty stamp of an earlier version of the collection does not count.
    """
    try:
        sizes = json.loads(system.read_text(f"{directory}/complete"))["sizes"]
        path = str(system.path(directory))
        return bool(sizes) and all(os.lstat(f"{path}/{name}").st_size == size for name, size in sizes.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def read_program_facts(system: System, root: str) -> dict[str, Any]:
    """Return the releases and environments in the root directory, newest first: the active, the complete, and all.

    Directories without the name of a release or an environment belong to others and are not returned.
    """
    found = [f"{kind}/{name}" for kind in ("releases", "venvs") for name in system.list_directory(f"{root}/{kind}")]
    times = {name: system.path(f"{root}/{name}").stat().st_mtime for name in found if OWN_PROGRAMS.fullmatch(name)}
    names = sorted(times, key=lambda name: (-times[name], name))
    complete = [name for name in names if is_complete(system, f"{root}/{name}")]

    def linked_name(name: str) -> str:
        path = system.path(f"{root}/{name}")
        target = "/".join(path.readlink().parts[-2:]) if path.is_symlink() else ""
        return target.partition("/")[2] if OWN_PROGRAMS.fullmatch(target) else ""

    def proven(service: str) -> dict[str, str]:
        # The first two lines name the release and the environment. The others name the saved files.
        lines = (text_of(system, f"{root}/proven-{service}") or "").splitlines()
        programs, files = lines[:2], "".join(lines[2:])
        is_known = [each.partition("/")[0] for each in programs] == ["releases", "venvs"] and set(programs) <= set(
            names
        )
        release, environment = [each.partition("/")[2] for each in programs] if is_known else ("", "")
        digest = hashlib.sha256(files.encode()).hexdigest() if is_known and files else ""
        return {"release": release, "environment": environment, "files": digest}

    return {
        "path": root,
        "exists": system.exists(root),
        "release": linked_name("current"),
        "environment": linked_name("venv"),
        "releases": [name.partition("/")[2] for name in complete if name.startswith("releases/")],
        "environments": [name.partition("/")[2] for name in complete if name.startswith("venvs/")],
        "names": names,
        "proven": {service: proven(service) for service in RECORDED},
        "usable": system.exists(f"{root}/venv/bin/python"),
    }


def read_driver_facts(system: System, unit: Mapping[str, Any], configuration: str, *, verify: bool) -> dict[str, Any]:
    """Return the files and the fingerprint of the running node driver, and the facts of its identity."""
    fingerprint = ""
    if unit["main_pid"]:
        try:
            fingerprint = fingerprint_in_environment(system.read_bytes(f"/proc/{unit['main_pid']}/environ"))
        except OSError:
            fingerprint = ""
    return {
        "configuration": system.list_directory(configuration),
        "fingerprint": fingerprint,
        "identity": read_identity(text_of(system, f"{configuration}/kubeconfig"), verify=verify),
    }


def layout_problem(layout: Any) -> str:
    """Return the error in the rules of a layout, or an empty string. The check needs no device and no driver."""
    try:
        parse_rules(layout)
    except AcceleratorError as error:
        return str(error)
    return ""


def read_node_facts(
    system: System,
    *,
    kubelet_root: str,
    kubeconfigs: Sequence[str],
    root: str,
    configuration: str,
    interpreters: Sequence[str],
    verify: bool,
) -> dict[str, Any]:
    """Return all facts of the node, without any change."""
    units = read_unit_facts(system, (*OWN_UNITS, *FOREIGN_UNITS, *RUNTIME_UNITS, *KUBELET_UNITS))
    uname = os.uname()
    return {
        "platform": {
            "system": uname.sysname,
            "machine": uname.machine,
            "kernel": uname.release,
            "systemd": system.exists("/run/systemd/system"),
            "iommu": bool(system.list_directory("/sys/kernel/iommu_groups")),
            "selinux": selinux_mode(text_of(system, "/sys/fs/selinux/enforce")),
            "os_release": parse_os_release(text_of(system, "/etc/os-release") or ""),
        },
        "interpreters": {path: read_interpreter_facts(system, path) for path in interpreters},
        "units": {name: units[name] for name in OWN_UNITS},
        "runtime": {name: units[name] for name in RUNTIME_UNITS},
        "managers": [name for name in FOREIGN_UNITS if units[name]["exists"] and _is_active_or_enabled(units[name])],
        "kubelet": {**read_kubelet_facts(system, kubelet_root, kubeconfigs), "unit": units[KUBELET_UNITS[0]]},
        "devices": devices_by_vendor(system),
        "ascend": ascend_facts(system),
        "nvidia": {
            **read_nvidia_facts(system),
            **uvm_facts(system),
            **numa_memory_facts(system),
            **toolkit_facts(system),
        },
        "programs": read_program_facts(system, root),
        "driver": read_driver_facts(system, units[DRIVER_UNIT], configuration, verify=verify),
    }


def _is_active_or_enabled(unit: Mapping[str, Any]) -> bool:
    return unit["active"] in ("active", "activating", "reloading") or unit["enabled"] in ("enabled", "enabled-runtime")
