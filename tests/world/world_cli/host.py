# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Facts of the host below the world, and the few changes that the world makes to it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .commands import execute
from .errors import WorldError
from .pins import DEBIAN_SUITE, HOST_PROGRAMS
from .progress import say, step

#: Capabilities in the order of their bits in the kernel's headers.
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER"),
    *("SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE"),
    *("SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP"),
    *("MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF"),
    "CHECKPOINT_RESTORE",
)
CERTIFICATE_BUNDLES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/ca-bundle.pem"),
)
NODE_CERTIFICATE_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_INSTANCES_NEEDED = 4096


@dataclass(frozen=True)
class Host:
    """Facts of the host that determine how nodes run."""

    cgroup_version: int
    missing_capabilities: tuple[str, ...] = ()

    @property
    def can_lower_oom_score(self) -> bool:
        """Return whether a container can get a lower OOM score than its runtime."""
        return "SYS_RESOURCE" not in self.missing_capabilities


def read_capabilities(status: str) -> int:
    """Return the bounding set in the text of ``/proc/<pid>/status`` as a bit mask."""
    found = re.search(r"^CapBnd:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    return int(found.group(1), 16) if found else 0


def inspect_host(root: Path = Path("/")) -> Host:
    """Return the facts of the host. ``root`` is the parent of its /sys and /proc."""
    unified = (root / "sys/fs/cgroup/cgroup.controllers").exists()
    capabilities = read_capabilities((root / "proc/self/status").read_text())
    # Capabilities that the kernel does not know are not missing. Docker would reject their names.
    known = CAPABILITIES[: int((root / "proc/sys/kernel/cap_last_cap").read_text()) + 1]
    missing = tuple(name for bit, name in enumerate(known) if not capabilities >> bit & 1)
    return Host(cgroup_version=2 if unified else 1, missing_capabilities=missing)


def require_root() -> None:
    """Raise a one-line WorldError if not run by root."""
    if os.geteuid() != 0:
        raise WorldError(
            "the test world needs root to install and start Docker Engine and to build its node image: run it with sudo."
        )


def missing_packages(present: Mapping[str, bool]) -> list[str]:
    """Return the Debian packages of the missing programs, without duplicates, in the order of the pins."""
    packages: list[str] = []
    for program, names in HOST_PROGRAMS.items():
        if not present[program]:
            packages += [name for name in names.split() if name not in packages]
    return packages


def install_packages() -> None:
    """Install the missing programs of the host.

    Raises WorldError without apt-get.
    """
    present = {program: find_program(program) is not None for program in HOST_PROGRAMS}
    packages = missing_packages(present)
    if not packages:
        return
    lacking = ", ".join(program for program, there in present.items() if not there)
    if shutil.which("apt-get") is None:
        raise WorldError(
            f"this machine lacks {lacking} and has no apt-get to install them: install them and try again."
        )
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with step("host packages", " ".join(packages)):
        execute(["apt-get", "update", "-q"], environment=quiet)
        execute(["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages], environment=quiet)


def find_program(name: str) -> str | None:
    """Return the path of a program, including in directories that only root's PATH contains."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")


def raise_inotify_limit() -> None:
    """Raise the host's limit: systemd, kubelet, and containerd of every node use inotify instances of the host."""
    try:
        present = int(INOTIFY_INSTANCES.read_text())
        if present < INOTIFY_INSTANCES_NEEDED:
            INOTIFY_INSTANCES.write_text(str(INOTIFY_INSTANCES_NEEDED))
            say(f"fs.inotify.max_user_instances of this machine: {present} -> {INOTIFY_INSTANCES_NEEDED}")
    except OSError as error:
        say(
            f"fs.inotify.max_user_instances could not be raised to {INOTIFY_INSTANCES_NEEDED} ({error}): nodes beyond the third may fail to start"
        )


def certificate_bundle() -> Path | None:
    """Return the certificates that this host trusts, including the site's own."""
    return next((path for path in CERTIFICATE_BUNDLES if path.is_file()), None)


def debian_sources() -> str:
    """Return this host's package sources if it runs the nodes' release; else empty, so that the bootstrap's sources
    apply.
    """
    release = Path("/etc/os-release")
    same = release.is_file() and f"VERSION_CODENAME={DEBIAN_SUITE}" in release.read_text()
    deb822 = Path("/etc/apt/sources.list.d/debian.sources")
    classic = Path("/etc/apt/sources.list")
    if same and deb822.is_file():
        return deb822_to_lines(deb822.read_text())
    if same and classic.is_file() and "deb " in classic.read_text():
        return classic.read_text()
    return ""


def deb822_to_lines(text: str) -> str:
    """Return the stanzas of a ``.sources`` file as one-line sources, without disabled stanzas and other types."""
    lines: list[str] = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, list[str]] = {}
        for line in stanza.splitlines():
            if ":" in line and not line.startswith(("#", " ", "\t")):
                name, value = line.split(":", 1)
                fields[name.strip().lower()] = value.split()
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            components = " ".join(fields.get("components", []))
            lines += [
                f"deb {uri} {suite} {components}"
                for uri in fields.get("uris", [])
                for suite in fields.get("suites", [])
            ]
    return "".join(f"{line}\n" for line in lines)


def mirror(sources: str) -> str | None:
    """Return the first mirror of the bootstrap's suite in one-line sources, or None for debootstrap's default."""
    for line in sources.splitlines():
        words = re.sub(r"\[[^]]*\]", " ", line).split()
        if len(words) >= 3 and words[0] == "deb" and words[2] == DEBIAN_SUITE:
            return words[1]
    return None


@functools.cache
def apt_settings() -> str:
    """Return this host's settings for mirror access (proxies, certificates, clock checks) for the nodes' apt."""
    if shutil.which("apt-config") is None:
        return ""
    wanted = re.compile(r"^Acquire::(http|https|ftp|Retries|Check-Date|Check-Valid-Until)\b.*;$")
    dump = execute(["apt-config", "dump"]).stdout
    return "".join(f"{line}\n" for line in dump.splitlines() if wanted.match(line))


def pip_settings(listed: str) -> str:
    """Return the nodes' ``/etc/pip.conf`` from the output of ``pip config list`` on this host.

    Settings of an index, a proxy, or a timeout are copied. Paths of this host are not, and the certificates are
    replaced by the nodes' bundle. Environment variables override files.
    """
    wanted = (
        "index-url",
        "extra-index-url",
        "trusted-host",
        "proxy",
        "timeout",
        "default-timeout",
        "retries",
        "find-links",
    )
    ranked: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        found = re.match(r"^(global|:env:|install|user|site)\.([A-Za-z-]+)='(.*)'$", line.strip())
        if not found:
            continue
        origin, name, value = found.groups()
        name = name.lower()
        if name not in wanted or (name == "find-links" and "://" not in value):
            continue
        rank = 1 if origin == ":env:" else 0
        if name not in ranked or ranked[name][0] <= rank:
            ranked[name] = (rank, value)
    lines = [
        f"{name.replace('default-timeout', 'timeout')} = {value}" for name, (_rank, value) in sorted(ranked.items())
    ]
    return "\n".join(["[global]", f"cert = {NODE_CERTIFICATE_BUNDLE}", *lines, ""])


@functools.cache
def pip_listing() -> str:
    """Return the output of ``pip config list`` on this host; empty without pip."""
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip is None:
        return ""
    return subprocess.run([pip, "config", "list"], capture_output=True, text=True, check=False).stdout


def resolver_settings(text: str) -> str:
    """Return a ``resolv.conf`` for pods: this host's servers without local addresses."""
    servers = [line.split()[1] for line in text.splitlines() if line.startswith("nameserver") and len(line.split()) > 1]
    reachable = [server for server in servers if not server.startswith("127.") and server != "::1"]
    return "".join(f"nameserver {server}\n" for server in reachable)


def proxy_variables(environment: Mapping[str, str], cluster_networks: str) -> dict[str, str]:
    """Return proxy variables for programs in nodes. The world's own networks are excluded from the proxy."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    chosen = {name: environment[name] for name in names if environment.get(name)}
    if chosen:
        present = environment.get("NO_PROXY") or environment.get("no_proxy")
        excluded = ",".join(part for part in (present, "localhost,127.0.0.1", cluster_networks) if part)
        chosen.update(NO_PROXY=excluded, no_proxy=excluded)
    return chosen
