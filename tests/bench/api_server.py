# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""An etcd and an API server alone, on this machine's own addresses and in one folder: for what needs many objects and no node."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "world"))

from world_cli import binaries
from world_cli.gates import feature_gates
from world_cli.settings import RUNTIME_CONFIGURATION, gates_flag

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
#: 4 GiB: what a large fleet needs besides its objects' former versions.
ETCD_QUOTA_BYTES = 4 << 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ApiServer:
    """Both programs, of the versions that the test world pins. ``kubeconfig`` is that of an administrator.

    ``off`` are feature gates that the API server has off. ``guest_token`` is that of a user without rights.
    """

    def __init__(self, folder: Path, off: Sequence[str] = ()) -> None:
        self._folder = folder
        self._gates = feature_gates() | dict.fromkeys(off, False)
        self.guest_token = secrets.token_hex(16)
        self._token = secrets.token_hex(16)
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.kubeconfig = folder / "kubeconfig"
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Both run until the end of this, and have ended then."""
        try:
            self._start()
            yield
        finally:
            self._stop()

    def _start(self) -> None:
        subprocess.run([ROOT / "tests/world/world", "build", "--only", "worlds"], check=True, stdout=subprocess.DEVNULL)
        client, peer, port = free_port(), free_port(), free_port()
        self.url, etcd = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{client}"
        self._run(
            "etcd",
            f"--data-dir={self._folder}/etcd",
            "--unsafe-no-fsync=true",
            "--log-level=warn",
            f"--quota-backend-bytes={ETCD_QUOTA_BYTES}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
        )
        (self._folder / "tokens").write_text(
            f'{self._token},admin,admin,"system:masters"\n{self.guest_token},guest,guest\n'
        )
        key = self._folder / "service-account.key"
        subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key], check=True)
        self._run(
            "kube-apiserver",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--etcd-servers={etcd}",
            f"--cert-dir={self._folder}/certificates",
            f"--token-auth-file={self._folder}/tokens",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.255.255.0/24",
            f"--runtime-config={','.join(RUNTIME_CONFIGURATION)}",
            *gates_flag(self._gates),
            "--profiling=false",
        )
        self._wait()
        authority = self._folder / "certificates/apiserver.crt"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "alone", "cluster": {"server": self.url, "certificate-authority": str(authority)}}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "alone", "context": {"cluster": "alone", "user": "admin"}}],
            "current-context": "alone",
        }
        self.kubeconfig.write_text(json.dumps(document))

    def _run(self, program: str, *arguments: str) -> None:
        with (self._folder / f"{program}.log").open("wb") as log:
            command = [str(binaries.program(program)), *arguments]
            self._processes.append((program, subprocess.Popen(command, stdout=log, stderr=log)))

    def _stop(self) -> None:
        for _name, process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _wait(self) -> None:
        # Its certificate is made as it starts; whoever asks here only asks whether it is there.
        context = ssl._create_unverified_context()
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {self._token}"})
        deadline = time.monotonic() + START_SECONDS
        last: OSError | None = None
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5, context=context):
                    return
            except OSError as error:  # refused, and HTTPError while it is not ready
                last = error
            ended = [name for name, process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("*.log")))
                raise AssertionError(f"the API server is not ready ({last}); ended: {ended}\n{logs}")
            time.sleep(0.5)
