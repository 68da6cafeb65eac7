# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The driver in a pod: it changes to the node's root, keeps its own modules, and applies a changed configuration."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import dra_driver
import pytest
import yaml
from dra_driver import cli, config, node
from dra_driver.api.kubeconfig import SERVICE_ACCOUNT, SERVICE_ACCOUNT_VARIABLE, load_access
from dra_driver.config import InvalidConfiguration, load
from dra_driver.status_command import query_status
from dra_driver.supervisors.configuration import ConfigurationSupervisor

STATUS = Path(__file__).resolve().parents[3] / "roles/dra_driver/files/pod_status.py"
# As root of a separate user namespace if the user is not root.
AS_ROOT = [] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user"]


def run_in(root: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(dra_driver.__file__).parents[1]), *filter(None, sys.path)])
    variables = {**os.environ, "PYTHONPATH": path, "DRA_DRIVER_HOST": root, **environment}
    return subprocess.run(
        [*AS_ROOT, sys.executable, *command], env=variables, capture_output=True, text=True, check=False
    )


def test_command_in_the_node_root_uses_the_modules_of_the_image() -> None:
    done = run_in("/", "-m", "dra_driver.pod", "version")
    assert (done.returncode, done.stdout.strip()) == (0, dra_driver.__version__), done.stderr
    late = "import encodings.punycode, wave, dra_driver.commands.redact as mine, grpc.aio; print(wave.__file__, mine.__file__)"
    requested = f"import os, sys; from dra_driver.pod import change_root; change_root('/'); {late}; print(os.environ['{SERVICE_ACCOUNT_VARIABLE}'])"
    done = run_in("/", "-c", requested)
    modules, account = done.stdout.splitlines()
    assert all(each.startswith("/proc/self/fd/") for each in modules.split()), "late imports come from the image"
    assert account.startswith("/proc/self/fd/") and account.endswith("kubernetes.io/serviceaccount")


def test_command_without_the_node_root_names_the_missing_mount(tmp_path: Path) -> None:
    done = run_in(str(tmp_path), "-m", "dra_driver.pod", "version")
    assert done.returncode == 1 and f"{tmp_path} does not show the node's /proc" in done.stderr
    done = run_in("", "-m", "dra_driver.pod", "version")
    assert done.returncode == 1 and "DRA_DRIVER_HOST is not set" in done.stderr


def test_load_access_reads_the_token_at_the_path_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SERVICE_ACCOUNT.startswith("/var/run/secrets/")
    (tmp_path / "ca.crt").write_text("authority")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(SERVICE_ACCOUNT_VARIABLE, str(tmp_path))
    access = load_access("")
    assert (access.server, access.token_file) == ("https://10.0.0.1:443", f"{tmp_path}/token")


def test_configuration_instance_is_the_uid_of_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "driver.yaml"
    path.write_text("node_name: node-1\n")
    monkeypatch.setenv(config.INSTANCE_VARIABLE, "0a1b-2c3d")
    assert load(str(path)).instance == "0a1b-2c3d"
    monkeypatch.setenv(config.INSTANCE_VARIABLE, "../x")
    with pytest.raises(InvalidConfiguration, match="DRA_DRIVER_INSTANCE"):
        load(str(path))


def test_commands_without_a_service_config_read_the_config_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, pod = tmp_path / "driver.yaml", tmp_path / "driver-pod.yaml"
    monkeypatch.setattr(config, "DEFAULT_PATH", str(service))
    monkeypatch.setattr(config, "POD_PATH", str(pod))
    assert config.default_path() == str(service)
    pod.touch()
    assert config.default_path() == str(pod)
    words = (
        ["status"],
        ["reload"],
        ["claims"],
        ["devices"],
        ["explain", "a"],
        ["collect"],
        ["probe", "liveness"],
        ["recovered", "all"],
    )
    assert {cli._parser().parse_args(each).config for each in words} == {str(pod)}
    service.touch()
    assert config.default_path() == str(service)


@pytest.mark.parametrize(("change", "ends"), [({"inventory_interval": 7}, False), ({"node_name": "node-2"}, True)])
def test_changed_configuration_is_applied_or_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], ends: bool
) -> None:
    monkeypatch.setattr(node, "CONFIGURATION_SECONDS", 0.02)
    path = tmp_path / "driver.yaml"
    path.write_text(yaml.safe_dump({"node_name": "node-1"}))

    async def main() -> None:
        taken, stop = asyncio.Event(), asyncio.Event()
        supervisor = ConfigurationSupervisor(load(str(path)), lambda: load(str(path)), lambda _found: taken.set())
        tasks = [
            asyncio.ensure_future(supervisor.run()),
            asyncio.ensure_future(node._watch_configuration(supervisor, str(path), stop)),
        ]
        path.write_text("{")  # a partial write
        await asyncio.sleep(0.1)
        assert not taken.is_set() and not stop.is_set()
        path.write_text(yaml.safe_dump({"node_name": "node-1", **change}))
        await asyncio.wait_for((stop if ends else taken).wait(), 30)
        assert (taken.is_set(), stop.is_set()) == (not ends, ends)
        for task in tasks:
            task.cancel()

    asyncio.run(main())


ANSWER = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print(os.getpid(), flush=True)
connection = server.accept()[0]
connection.sendall(b'{"pid": %d, "ready": true}' % os.getpid())
"""


def test_living_process_in_a_pod_has_its_pid_on_the_node(tmp_path: Path) -> None:
    """The PID in the pod belongs to another process on the node, which must not get the reload signal: the node's PID is used."""
    path = str(tmp_path / "status.sock")
    unshare = ["unshare", *AS_ROOT[1:], "--pid", "--fork", "--kill-child"]
    with subprocess.Popen([*unshare, sys.executable, "-c", ANSWER, path], stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None and outer.stdout.readline().strip() == "1"
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        reported = query_status("gpu.nvidia.com", path)
    assert reported["ready"] and str(reported["pid"]) in children


SERVES = {
    "role": "serving",
    "instance": "u",
    "configuration": "d",
    "ready": True,
    "published": True,
    "devices": [1, 2],
}


@pytest.mark.parametrize(
    ("wanted", "reported", "output"),
    [
        (("d", "u", "0"), [SERVES], ""),
        (("", "", "0"), [SERVES], ""),
        (("d", "", "0.1"), [SERVES, SERVES], ""),
        (("d", "u", "0"), [{**SERVES, "role": "standby"}], "no pod serves"),
        (("d", "u", "0"), [{**SERVES, "configuration": "other"}], "another configuration"),
        (("d", "v", "0"), [SERVES], "not yet that of the pod v"),
        (("d", "u", "0.1"), [SERVES, {**SERVES, "instance": "old"}], "another instance serves"),
        (
            ("d", "u", "0"),
            [{**SERVES, "configuration": "other", "refused": {"digest": "d", "problem": "metrics_address"}}],
            "starts again for its configuration: metrics_address",
        ),
        (("d", "u", "0"), [{**SERVES, "ready": False, "problems": ["store"]}], "store"),
    ],
)
def test_role_waits_for_the_serving_pod(
    tmp_path_factory: pytest.TempPathFactory, wanted: tuple[str, ...], reported: list[dict[str, object]], output: str
) -> None:
    root = tmp_path_factory.mktemp("s")
    directory = root / "plugins/gpu.nvidia.com"
    directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "status-1.sock"))
        server.listen()

        def answer() -> None:
            for each in reported:
                connection = server.accept()[0]
                connection.sendall(json.dumps(each).encode())
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        done = subprocess.run(
            [sys.executable, STATUS, root, *wanted, "gpu.nvidia.com"], capture_output=True, text=True, check=False
        )
        thread.join(5)
    assert not thread.is_alive(), "it polls as often as requested"
    assert done.returncode == (1 if output else 0) and output in done.stdout
    if not output:
        (serving,) = json.loads(done.stdout)
        assert len(serving["devices"]) == 2, "the summary of the site playbook counts them"
