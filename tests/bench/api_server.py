# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""An etcd and an API server on local addresses in one directory, for tests that need many objects and no node."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "world"))

from world_cli import binaries
from world_cli.gates import feature_gates
from world_cli.pins import OLDEST, PINNED
from world_cli.settings import RUNTIME_CONFIGURATION, gates_flag

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
#: 4 GiB: a large fleet's objects with their previous versions.
ETCD_QUOTA_BYTES = 4 << 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Served:
    """Config of an API server: its Kubernetes release, feature gates, and more options."""

    release: str = PINNED
    gates: Mapping[str, bool] = field(default_factory=feature_gates)
    options: Sequence[str] = (f"--runtime-config={','.join(RUNTIME_CONFIGURATION)}",)


#: The oldest supported release with its default feature gates.
OLDEST_SERVED = Served(OLDEST, gates={}, options=())


class ApiServer:
    """Both programs, of the versions that the test world pins or ``served`` names. ``kubeconfig`` is an
    administrator's.

    ``off`` are disabled feature gates of the API server. ``guest_token`` belongs to a user without permissions.
    """

    def __init__(self, folder: Path, off: Sequence[str] = (), served: Served | None = None) -> None:
        self._folder = folder
        self._served = served or Served(gates=feature_gates() | dict.fromkeys(off, False))
        self.guest_token = secrets.token_hex(16)
        self._token = secrets.token_hex(16)
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.kubeconfig = folder / "kubeconfig"
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run both until the context ends."""
        try:
            self._start()
            yield
        finally:
            self._stop()

    @contextlib.contextmanager
    def beside(self, served: Served) -> Iterator[str]:
        """Run another API server with the same etcd, certificate, and users until the context ends; yield its URL."""
        self._build(served.release)
        before = len(self._processes)
        try:
            yield self._serve(f"kube-apiserver-{before}", served)
        finally:
            self._stop(before)

    def write_kubeconfig(self, path: Path, url: str) -> None:
        """Write the administrator's kubeconfig for an address of these API servers."""
        authority = self._folder / "certificates/apiserver.crt"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "alone", "cluster": {"server": url, "certificate-authority": str(authority)}}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "alone", "context": {"cluster": "alone", "user": "admin"}}],
            "current-context": "alone",
        }
        path.write_text(json.dumps(document))

    def _start(self) -> None:
        self._build(self._served.release)
        client, peer = free_port(), free_port()
        self._etcd = f"http://127.0.0.1:{client}"
        self._run(
            "etcd",
            f"--data-dir={self._folder}/etcd",
            "--unsafe-no-fsync=true",
            "--log-level=warn",
            f"--quota-backend-bytes={ETCD_QUOTA_BYTES}",
            "--watch-progress-notify-interval=5s",  # as kubeadm sets it: the API server sends bookmarks to idle watches
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
        )
        (self._folder / "tokens").write_text(
            f'{self._token},admin,admin,"system:masters"\n{self.guest_token},guest,guest\n'
        )
        key = self._folder / "service-account.key"
        subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key], check=True)
        self.url = self._serve("kube-apiserver", self._served)
        self.write_kubeconfig(self.kubeconfig, self.url)

    def _build(self, release: str) -> None:
        command = [str(ROOT / "tests/world/world"), "build", "--only", "worlds", "--release", release]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def _serve(self, name: str, served: Served) -> str:
        url, key = f"https://127.0.0.1:{free_port()}", self._folder / "service-account.key"
        self._run(
            "kube-apiserver",
            "--bind-address=127.0.0.1",
            f"--secure-port={url.rpartition(':')[2]}",
            f"--etcd-servers={self._etcd}",
            f"--cert-dir={self._folder}/certificates",
            f"--token-auth-file={self._folder}/tokens",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.255.255.0/24",
            *gates_flag(dict(served.gates)),
            *served.options,
            "--profiling=false",
            name=name,
            release=served.release,
        )
        self._wait(url)
        return url

    def _run(self, program: str, *arguments: str, name: str = "", release: str = PINNED) -> None:
        with (self._folder / f"{name or program}.log").open("wb") as log:
            command = [str(binaries.program(program, release)), *arguments]
            self._processes.append((name or program, subprocess.Popen(command, stdout=log, stderr=log)))

    def _stop(self, first: int = 0) -> None:
        for _name, process in reversed(self._processes[first:]):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        del self._processes[first:]

    def _wait(self, url: str) -> None:
        # Its certificate is created at the start. This request only checks that the server answers.
        context = ssl._create_unverified_context()
        request = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {self._token}"})
        deadline = time.monotonic() + START_SECONDS
        last: OSError | None = None
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5, context=context):
                    return
            except OSError as error:  # connection refused, and HTTPError while it is not ready
                last = error
            ended = [name for name, process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("*.log")))
                raise AssertionError(f"the API server is not ready ({last}); ended: {ended}\n{logs}")
            time.sleep(0.5)
