# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Create, stop, and restart the containers that act as nodes, and write their files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from . import cache, certificates, engine, host, image, settings
from .archive import Entry, write_tar
from .commands import tail, wait_until
from .errors import WorldError
from .gates import feature_gates
from .host import Host
from .pins import BUSYBOX_IMAGE, LABEL, NODE_IMAGE, PAUSE_IMAGE, PROBE_IMAGE, PYTHON_IMAGE
from .state import Node, World

CONTROL_SERVICES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "world-network")
WORKER_SERVICES = ("containerd", "kubelet", "kube-proxy", "world-network")
#: Short names that `component` accepts in addition to the full ones.
SERVICE_NAMES = {
    "apiserver": "kube-apiserver",
    "controller-manager": "kube-controller-manager",
    "scheduler": "kube-scheduler",
}
START_SECONDS = 180
STOP_SECONDS = 30
_IMAGES_RECORD = "/var/lib/containerd/world-images"
_FILES_RECORD = "/etc/world/files.json"


def _enabled(services: Sequence[str]) -> list[Entry]:
    wants = "etc/systemd/system/multi-user.target.wants"
    return [Entry(f"{wants}/{service}.service", link=f"../{service}.service") for service in services]


def common_files(world: World, own: Node | None) -> list[Entry]:
    """Return the files of every container: routes, and the host's package sources and certificates."""
    files = [
        Entry("etc/world/routes", settings.routes(world, own).encode(), 0o755),
        # Processes that ignore SIGTERM (mostly PID 1 of pods) must not delay every reboot by 90 s.
        Entry("etc/systemd/system.conf.d/world.conf", b"[Manager]\nDefaultTimeoutStopSec=8s\n"),
        Entry("etc/pip.conf", host.pip_settings(host.pip_listing()).encode()),
    ]
    sources = host.debian_sources()
    if sources:
        files.append(Entry("etc/apt/sources.list", sources.encode()))
    apt = host.apt_settings()
    if apt:
        files.append(Entry("etc/apt/apt.conf.d/90world", apt.encode()))
    bundle = host.certificate_bundle()
    if bundle is not None:
        files.append(Entry(host.NODE_CERTIFICATE_BUNDLE.lstrip("/"), bundle.read_bytes()))
    return files


def gates_to_set(world: World) -> dict[str, bool]:
    """Return the feature gates that the world sets. gates.json applies only to the pinned Kubernetes."""
    return {} if world.own_gates else feature_gates()


def control_files(world: World) -> list[Entry]:
    """Return all files of the control plane."""
    folder = certificates.authority_folder(world)
    pki = settings.PKI.lstrip("/")
    files = common_files(world, None)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".crt", ".key", ".pub"):
            files.append(Entry(f"{pki}/{path.name}", path.read_bytes(), 0o644 if path.suffix != ".key" else 0o600))
    for name in ("controller-manager", "scheduler"):
        text = certificates.kubeconfig_of(world, folder, name, "https://127.0.0.1:6443")
        files.append(Entry(f"etc/kubernetes/{name}.conf", text.encode(), 0o600))
    files.append(
        Entry("etc/kubernetes/scheduler.json", json.dumps(settings.scheduler_configuration(), indent=2).encode())
    )
    units = settings.control_units(world, gates_to_set(world))
    files += [Entry(f"etc/systemd/system/{name}", text.encode()) for name, text in units.items()]
    return files + _enabled(CONTROL_SERVICES)


def worker_files(world: World, node: Node, facts: Host) -> list[Entry]:
    """Return all files of a worker."""
    authority = certificates.authority_folder(world)
    resolver = host.resolver_settings(Path("/etc/resolv.conf").read_text())
    resolvers = [line.split()[1] for line in resolver.splitlines()]
    kubelet = settings.kubelet_configuration(world, facts, gates_to_set(world), resolvers)
    identity = certificates.kubeconfig_of(world, certificates.node_folder(world, node), "kubelet")
    proxy = certificates.kubeconfig_of(world, authority, "kube-proxy")
    return [
        *common_files(world, node),
        Entry(f"{settings.PKI.lstrip('/')}/ca.crt", (authority / "ca.crt").read_bytes()),
        Entry("var/lib/kubelet/config.yaml", json.dumps(kubelet, indent=2).encode()),
        Entry("etc/kubernetes/kubelet.conf", identity.encode(), 0o600),
        Entry("etc/kubernetes/kube-proxy.conf", proxy.encode(), 0o600),
        Entry(
            "etc/kubernetes/kube-proxy.yaml", json.dumps(settings.kube_proxy_configuration(world), indent=2).encode()
        ),
        Entry("etc/kubernetes/resolv.conf", resolver.encode()),
        Entry("etc/containerd/config.toml", settings.containerd_configuration(facts).encode()),
        Entry("etc/cni/net.d/10-world.conflist", settings.pod_network(world, node).encode()),
        Entry("etc/crictl.yaml", b"runtime-endpoint: unix:///run/containerd/containerd.sock\n"),
        *_enabled(WORKER_SERVICES),
    ]


def run_arguments(
    world: World, name: str, address: str, facts: Host, variables: dict[str, str], volume: str | None
) -> list[str]:
    """Return the arguments of ``docker create`` for one container.

    It does not use ``--privileged``, which fails on a host with limited capabilities and would add the host's real
    devices to the node. All capabilities of the host and permission for all device nodes suffice.
    """
    dropped = [word for name in facts.missing_capabilities for word in ("--cap-drop", name)]
    volumes = ["--volume", f"{volume}:/var/lib/containerd"] if volume else []
    environment = [word for variable, value in sorted(variables.items()) for word in ("--env", f"{variable}={value}")]
    return [
        *("--name", name, "--hostname", name, "--label", f"{LABEL}={world.name}"),
        *("--network", world.network, "--ip", address),
        *("--cap-add", "ALL", *dropped),
        *(
            "--security-opt",
            "seccomp=unconfined",
            "--security-opt",
            "apparmor=unconfined",
            "--security-opt",
            "systempaths=unconfined",
            "--security-opt",
            "label=disable",
        ),
        *("--device-cgroup-rule", "a *:* rwm", "--cgroupns", "private"),
        *("--tmpfs", "/run:rw,exec,nosuid,nodev,mode=755", "--tmpfs", "/run/lock", "--tmpfs", "/tmp:rw,exec,mode=1777"),
        *volumes,
        *("--stop-signal", "SIGRTMIN+3", "--stop-timeout", str(STOP_SECONDS), "--restart", "unless-stopped"),
        *environment,
    ]


def status_of(name: str) -> str:
    """Return Docker's state of a container (``running``, ``exited`` …), or ``absent``."""
    described = engine.inspect("container", name)
    return "absent" if described is None else str(described["State"]["Status"])


def image_of(name: str) -> str | None:
    """Return the full name of a container's image, or None if the container does not exist."""
    described = engine.inspect("container", name)
    return None if described is None else str(described["Config"]["Image"])


def file_digests(files: Sequence[Entry]) -> dict[str, str]:
    """Return a digest of the content, mode, and link of each file, by path."""
    return {entry.path: cache.digest(entry.data, f"{entry.mode:o} {entry.link}") for entry in files}


def services_of(path: str, services: Sequence[str]) -> set[str]:
    """Return the container's services that must restart if the file at ``path`` changes."""
    stem = PurePosixPath(path).stem
    if path.startswith(settings.PKI.lstrip("/")):
        return set(services) - {"world-network", "containerd"}
    if path == "etc/world/routes":
        return {"world-network"}
    if path.startswith("etc/containerd/"):
        return {"containerd"}
    if path == "var/lib/kubelet/config.yaml":
        return {"kubelet"}
    return {service for service in services if service in (stem, f"kube-{stem}")}


def ensure_container(
    world: World, name: str, address: str, files: list[Entry], facts: Host, volume: str | None
) -> bool:
    """Create, fill, and start one container; return whether anything was changed.

    A record in the container lists the digests of the written files, which shows interrupted runs and changed
    settings. Only files with a new digest are written, so that later changes by a role are kept.
    """
    wanted = file_digests(files)
    present = status_of(name)
    if present in ("created", "dead", "removing"):
        engine.docker("rm", "--force", "--volumes", name)
        present = "absent"
    if present == "absent":
        if volume:
            engine.docker("volume", "create", "--label", f"{LABEL}={world.name}", volume)
        variables = host.proxy_variables(os.environ, world.cluster_subnet)
        arguments = run_arguments(world, name, address, facts, variables, volume)
        engine.docker("create", *arguments, image.node_image(world.release))
    elif present == "paused":
        engine.docker("unpause", name)
        present = "running"
    written = {} if present == "absent" else _read_record(name)
    changed = [entry for entry in files if written.get(entry.path) != wanted[entry.path]]
    if changed:
        # The record is written last: an interrupted copy is repeated.
        mark = Entry(_FILES_RECORD.lstrip("/"), json.dumps(wanted, sort_keys=True).encode())
        engine.copy_tar(write_tar([*changed, mark]), name)
    if present != "running":
        engine.docker("start", name)
    elif changed:
        services = CONTROL_SERVICES if name == world.control else WORKER_SERVICES
        again = sorted(set().union(*(services_of(entry.path, services) for entry in changed)))
        engine.inside(name, "systemctl", "daemon-reload")
        if again:
            engine.inside(name, "systemctl", "restart", *again)
    return present != "running" or bool(changed)


def _read_record(name: str) -> dict[str, str]:
    """Return the digests of the files written to a container; empty if they are unknown."""
    done = subprocess.run(["docker", "cp", f"{name}:{_FILES_RECORD}", "-"], capture_output=True, check=False)
    if done.returncode != 0:
        return {}
    try:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            stream = archive.extractfile(archive.getmembers()[0])
            values = json.loads(stream.read()) if stream else {}
    except (tarfile.TarError, IndexError, ValueError):
        return {}
    return {str(path): str(value) for path, value in values.items()} if isinstance(values, dict) else {}


def system_state(name: str) -> str:
    """Return systemd's state of a container: ``running``, ``degraded``, ``starting`` …; empty while it does not
    answer.
    """
    return engine.inside(name, "systemctl", "is-system-running", check=False).stdout.strip()


def wait_for_system(name: str) -> None:
    """Wait until systemd has started its units."""
    wait_until(
        f"the start of systemd in {name}",
        lambda: system_state(name) in ("running", "degraded"),
        START_SECONDS,
        remedy=lambda: recent_log(name),
    )


def recent_log(name: str) -> str:
    """Return the last log lines of a container for an error message."""
    failed = engine.inside(name, "systemctl", "--failed", "--no-legend", check=False).stdout
    journal = engine.inside(name, "journalctl", "--no-pager", "--lines=15", "--priority=warning", check=False).stdout
    return tail(
        f"{failed}\n{journal}" if failed or journal else engine.docker("logs", "--tail", "15", name, check=False).stdout
    )


def import_images(name: str, archive: Path, mark: str | None = None) -> bool:
    """Load an image archive into a worker's containerd. With ``mark``, skip an archive whose mark is recorded in the container."""
    wait_until(
        f"containerd in {name}",
        lambda: engine.inside(name, "ctr", "version", check=False).returncode == 0,
        START_SECONDS,
        remedy=lambda: recent_log(name),
    )
    if mark is not None:
        present = engine.inside(name, "cat", _IMAGES_RECORD, check=False).stdout.strip()
        listed = engine.inside(
            name, "ctr", "--namespace", "k8s.io", "images", "ls", "--quiet", check=False
        ).stdout.split()
        if present == mark and {PAUSE_IMAGE, BUSYBOX_IMAGE, PROBE_IMAGE, PYTHON_IMAGE} <= set(listed):
            return False
    with archive.open("rb") as stream:
        command = ["docker", "exec", "--interactive", name, "ctr", "--namespace", "k8s.io", "images", "import", "-"]
        done = subprocess.run(command, stdin=stream, capture_output=True, check=False)
    if done.returncode != 0:
        raise WorldError(f"loading {archive} into {name} failed: {tail(done.stderr.decode(errors='replace'))}")
    if mark is not None:
        engine.inside(name, "sh", "-c", f"echo {mark} >{_IMAGES_RECORD}")
    return True


def reboot(name: str, hard: bool = False) -> None:
    """Restart a container, cleanly or like after a power cut."""
    if status_of(name) == "absent":
        raise WorldError(f"{name} does not exist: run `world up` again.")
    if hard:
        engine.docker("kill", "--signal", "KILL", name, check=False)
        wait_until(f"the end of {name}", lambda: status_of(name) != "running", STOP_SECONDS)
        engine.docker("start", name)
    else:
        engine.docker("restart", "--time", str(STOP_SECONDS), name)


def uses_current_image(name: str, release: str) -> bool:
    """Return whether a container uses the node image of the current pins."""
    used = image_of(name)
    return used is None or not used.startswith(NODE_IMAGE) or used == image.node_image(release)
