# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test MPS on the simulated boards: a daemon, its server, and CUDA processes. tests/oracles/mps_test.py tests the
daemon's output.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.simulator.mps_support import (
    CONNECTION_FAILED,
    EXCLUSIVE,
    GIB,
    INVALID_VALUE,
    MIB,
    NO_DEVICE,
    OUT_OF_MEMORY,
    PROHIBITED,
    RPC_FAILURE,
    SECONDS,
    UNAVAILABLE,
    Cuda,
    Mps,
    load,
    partition,
    processes,
    until,
)
from tests.simulator.nvml_support import IN_USE, SUCCESS, Silicon

FIRST = "GPU-00000000-0000-4000-8000-000000000000"
SECOND = "GPU-00000001-0000-4000-8000-000000000001"
SERVER_MIB, CLIENT_MIB = 30, 16


@pytest.fixture
def silicon(bare_silicon: Silicon) -> Silicon:
    load(bare_silicon)
    return bare_silicon


@pytest.fixture
def mps(bare_silicon: Silicon) -> Iterator[Mps]:
    """Yield a daemon of the first GPU that is not started yet."""
    daemon = Mps(bare_silicon, variables={"CUDA_VISIBLE_DEVICES": "0"})
    yield daemon
    daemon.stop()


def test_server_starts_and_is_listed_as_a_process_of_its_devices(silicon: Silicon, mps: Mps) -> None:
    mps.variables["CUDA_VISIBLE_DEVICES"] = f"{FIRST},2"
    mps.start()
    assert mps.ask("get_server_list") == "" and processes(silicon) == {}
    assert mps.ask("start_server -uid 65534") == ""
    server = mps.server()
    assert os.stat(f"/proc/{server}").st_uid == 65534
    for gpu, pids in enumerate([[server], [], [server]]):
        assert list(processes(silicon, gpu)) == pids
    assert processes(silicon)[server]["memory_mib"] == SERVER_MIB
    listed = silicon.smi(
        "--query-compute-apps=pid,process_name,used_memory,gpu_uuid", "--format=csv,noheader", "-i", "0"
    )
    assert listed.stdout == f"{server}, nvidia-cuda-mps-server, {SERVER_MIB} MiB, {FIRST}\n", listed.stderr
    assert silicon.smi("--query-compute-apps=pid", "--format=csv").stdout.split() == ["pid", str(server), str(server)]
    assert silicon.smi("--query-compute-apps=nothing", "--format=csv").returncode == 2
    assert silicon.smi("--query-compute-apps=pid", "--format=csv,nohead").returncode == 2
    assert mps.ask(f"get_device_client_list {server}").splitlines()[0] == FIRST
    assert mps.ask(f"get_client_list {server}") == ""
    mps.ask(f"shutdown_server {server}")
    until("no server", lambda: not mps.ask("get_server_list"))
    assert f"Server {server} exited with status 0" in mps.log()
    assert processes(silicon) == {}
    assert mps.run("quit").returncode == 0


@pytest.mark.parametrize("visible", ["", "9", "GPU-no", "MIG-no"])
def test_a_server_without_a_device_does_not_start(silicon: Silicon, mps: Mps, visible: str) -> None:
    mps.variables["CUDA_VISIBLE_DEVICES"] = visible
    mps.start()
    mps.ask("start_server -uid 0")
    until("the server's end", lambda: "exited with status 1" in mps.log())
    assert mps.ask("get_server_list") == "" and processes(silicon) == {}
    assert mps.client()("cuInit", 0) == CONNECTION_FAILED
    assert mps.run("quit").returncode == 1


def test_commands_about_a_running_server(silicon: Silicon, mps: Mps) -> None:
    mps.start()
    mps.ask("set_default_active_thread_percentage 40", "set_default_device_pinned_mem_limit 0 8G")
    client = mps.client()
    assert client.open() == SUCCESS
    server, pid = mps.server(), client.process.pid
    assert mps.ask(f"get_active_thread_percentage {server}") == "40.0"
    assert mps.ask(f"set_active_thread_percentage {server} 25") == "25.0"
    assert mps.ask("get_default_active_thread_percentage") == "40.0"
    assert mps.ask(f"get_device_pinned_mem_limit {server} 0") == "8G"
    assert mps.ask(f"set_device_pinned_mem_limit {server} 0 512M") == ""
    assert mps.ask(f"get_device_pinned_mem_limit {server} 0") == "512M"
    assert mps.ask(f"get_client_list {server}") == str(pid)
    assert mps.ask("get_device_client_list").split() == [FIRST, str(pid)]
    heading, row = mps.ask("ps").splitlines()
    assert heading.split() == ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]
    assert [row.split()[index] for index in (0, 2, 3)] == [str(pid), str(server), FIRST]
    # Existing clients keep their limits
    assert client.multiprocessors() == 53
    assert mps.client(CUDA_VISIBLE_DEVICES="0").open() == SUCCESS
    assert mps.processes[-1].multiprocessors() == 33
    assert mps.processes[-1]("cuDeviceTotalMem_v2", 0) == 512 * MIB
    assert mps.ask(f"terminate_client {server} 1").splitlines() == ["Invalid process 1!", "1"]
    assert mps.ask(f"terminate_client {server} {pid}") == "0"
    assert client.allocate(MIB) == RPC_FAILURE
    assert pid not in processes(silicon)


@pytest.mark.parametrize(
    ("default", "own", "seen"),
    [("100", None, 132), ("50", None, 66), ("50", "25", 33), ("25", "50", 33), ("33.5", None, 45), ("0.01", "x", 1)],
)
def test_a_client_sees_its_share_of_the_multiprocessors(
    silicon: Silicon, mps: Mps, default: str, own: str | None, seen: int
) -> None:
    mps.start()
    mps.ask(f"set_default_active_thread_percentage {default}")
    client = mps.client(**({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": own} if own else {}))
    assert client("cuInit", 0) == SUCCESS
    assert client.multiprocessors() == seen


@pytest.mark.parametrize(
    ("default", "own", "limit"),
    [("4096M", None, 4096), ("4096M", "0=1G", 1024), ("1G", "0=2G,1=1M", 1024), (None, "0=7M", 7)],
)
def test_a_client_gets_no_more_memory_than_its_limit(
    silicon: Silicon, mps: Mps, default: str | None, own: str | None, limit: int
) -> None:
    mps.start()
    if default:
        mps.ask(f"set_default_device_pinned_mem_limit 0 {default}")
    client = mps.client(**({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": own} if own else {}))
    assert client.open() == SUCCESS
    assert client("cuDeviceTotalMem_v2", 0) == limit * MIB
    address = client("cuMemAlloc_v2", (limit - 1) * MIB)
    assert client("cuMemGetInfo_v2") == [MIB, limit * MIB]
    assert processes(silicon)[client.process.pid]["memory_mib"] == limit - 1 + CLIENT_MIB
    assert client.allocate(MIB + 1) == OUT_OF_MEMORY
    assert client.allocate(MIB) == SUCCESS
    assert client.allocate(1) == OUT_OF_MEMORY
    # Each client has its own limit
    other = mps.client(**({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": own} if own else {}))
    assert other.open() == SUCCESS and other.allocate(limit * MIB) == SUCCESS
    assert client("cuMemFree_v2", address) == SUCCESS
    assert client("cuMemFree_v2", address) == INVALID_VALUE
    assert client.allocate((limit - 1) * MIB) == SUCCESS


def test_all_clients_together_get_no_more_memory_than_the_device_has(silicon: Silicon, mps: Mps) -> None:
    mps.start()
    first, second = mps.client(), mps.client()
    assert [first.open(), second.open()] == [SUCCESS, SUCCESS]
    assert first.allocate(60 * GIB) == SUCCESS
    assert second.allocate(40 * GIB) == OUT_OF_MEMORY
    assert second.allocate(10 * GIB) == SUCCESS
    first.kill()
    until("the first client has ended", lambda: mps.clients() == [second.process.pid])
    assert second.allocate(40 * GIB) == SUCCESS


def test_server_has_the_devices_of_the_daemon_in_its_order(silicon: Silicon, mps: Mps) -> None:
    mps.variables["CUDA_VISIBLE_DEVICES"] = "2,1"
    mps.start()
    client, narrowed, strange = (
        mps.client(),
        mps.client(CUDA_VISIBLE_DEVICES="1"),
        mps.client(CUDA_VISIBLE_DEVICES=FIRST),
    )
    assert client("cuInit", 0) == SUCCESS and client("cuDeviceGetCount") == 2
    assert client("cuDeviceGetName", 0) == "NVIDIA L4" and client("cuDeviceGet", 2) == 101
    assert narrowed("cuInit", 0) == SUCCESS and narrowed("cuDeviceGetCount") == 1
    assert narrowed("cuDeviceGetUuid_v2", 0) == SECOND.removeprefix("GPU-").replace("-", "")
    assert strange("cuInit", 0) == NO_DEVICE
    assert sorted(mps.clients()) == sorted([client.process.pid, narrowed.process.pid])
    assert narrowed.process.pid not in processes(silicon, 2) and narrowed.process.pid in processes(silicon, 1)
    assert client("cuGetErrorName", 805) == "CUDA_ERROR_MPS_CONNECTION_FAILED"


def test_a_client_is_listed_until_it_ends(silicon: Silicon, mps: Mps) -> None:
    mps.start()
    killed, ended = mps.client(), mps.client()
    assert killed("cuInit", 0) == SUCCESS and ended("cuInit", 0) == SUCCESS
    server = mps.server()
    assert mps.clients() == [killed.process.pid, ended.process.pid]
    assert set(processes(silicon)) == {server, killed.process.pid, ended.process.pid}
    assert killed("fork") == 3
    killed.kill()
    until("one client", lambda: mps.clients() == [ended.process.pid])
    assert ended.close() == 0
    until("no client", lambda: not mps.clients())
    assert set(processes(silicon)) == {server}


def test_killed_server_ends_the_connections_of_its_clients(silicon: Silicon, mps: Mps) -> None:
    mps.start()
    client = mps.client()
    assert client.open() == SUCCESS
    server = mps.server()
    os.kill(server, signal.SIGKILL)
    until("its end", lambda: f"Server {server} exited with status 137" in mps.log())
    assert processes(silicon) == {}
    assert client.allocate(MIB) == RPC_FAILURE
    assert client("cuCtxCreate_v2", 0, 0) != SUCCESS
    again = mps.client()
    assert again.open() == SUCCESS and mps.server() != server
    assert set(processes(silicon)) == {mps.server(), again.process.pid}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_killed_daemon_leaves_no_files_and_can_be_restarted(silicon: Silicon, mps: Mps, end: signal.Signals) -> None:
    mps.start()
    client = mps.client()
    assert client.open() == SUCCESS
    server = mps.server()
    assert mps.daemon
    mps.daemon.send_signal(end)
    assert mps.daemon.wait(SECONDS) == -end
    assert processes(silicon).keys() <= {server}
    until("the server's end", lambda: not processes(silicon))
    assert client.allocate(MIB) == RPC_FAILURE
    assert mps.run("get_server_list").returncode == 1
    without = mps.client()
    assert without.open() == SUCCESS and without.multiprocessors() == 132
    without.close()
    mps.start()
    again = mps.client()
    assert again.open() == SUCCESS
    assert mps.clients() == [again.process.pid]


def test_process_without_a_daemon_has_the_whole_device(silicon: Silicon, mps: Mps) -> None:
    alone = mps.client(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10", CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1M")
    assert alone.open() == SUCCESS
    assert alone("cuDeviceGetCount") == 3 and alone.multiprocessors() == 132
    assert alone("cuDeviceTotalMem_v2", 0) == 81559 * MIB
    assert alone.allocate(80 * GIB) == OUT_OF_MEMORY and alone.allocate(60 * GIB) == SUCCESS
    other = mps.client()
    assert other.open() == SUCCESS and other.allocate(60 * GIB) == OUT_OF_MEMORY
    assert set(processes(silicon)) == {alone.process.pid, other.process.pid}
    context = alone("cuDevicePrimaryCtxRetain", 0)
    assert alone("cuCtxSetCurrent", context) == SUCCESS and alone.allocate(MIB) == SUCCESS
    assert alone("cuDevicePrimaryCtxRelease_v2", 0) == SUCCESS and alone.allocate(MIB) == 201
    alone.kill()
    assert set(processes(silicon)) == {other.process.pid}


def test_exclusive_mode_allows_one_process_or_one_server(silicon: Silicon, mps: Mps) -> None:
    root = silicon.client()
    root("nvmlDeviceSetComputeMode", root.gpu(), EXCLUSIVE)
    first, second = mps.client(), mps.client()
    assert [first.open(), second.open()] == [SUCCESS, UNAVAILABLE]
    context = first("cuDevicePrimaryCtxRetain", 0)
    assert context > 1000 and first("cuCtxDestroy_v2", context) == SUCCESS
    # The daemon's server must wait too
    mps.start()
    assert mps.client()("cuInit", 0) == CONNECTION_FAILED
    first.kill()
    clients = [mps.client(), mps.client()]
    assert [client.open() for client in clients] == [SUCCESS, SUCCESS]
    assert mps.clients() == [client.process.pid for client in clients]
    outside = Cuda(silicon.environment | {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
    assert outside.open() == UNAVAILABLE
    for client in clients:
        client.close()
    mps.ask(f"shutdown_server {mps.server()}")
    until("no server", lambda: not mps.ask("get_server_list"))
    assert outside.open() == SUCCESS
    outside.close()


def test_prohibited_mode_allows_no_contexts(silicon: Silicon, mps: Mps) -> None:
    root = silicon.client()
    root("nvmlDeviceSetComputeMode", root.gpu(), PROHIBITED)
    assert mps.client().open() == UNAVAILABLE
    mps.start()
    assert mps.client().open() == UNAVAILABLE


def test_users_are_served_in_sequence(silicon: Silicon, mps: Mps) -> None:
    mps.start()
    first, second = mps.client(), mps.client(user=65534)
    assert first.open() == SUCCESS
    server = mps.server()
    second.send("cuInit", 0)
    until("the second waits", lambda: f"NEW CLIENT {second.process.pid} from user 65534" in mps.log())
    assert mps.clients() == [first.process.pid]
    first.close()
    assert second.receive() == [SUCCESS]
    assert mps.server() != server and os.stat(f"/proc/{mps.server()}").st_uid == 65534
    assert set(processes(silicon)) == {mps.server(), second.process.pid}


@pytest.mark.parametrize("option", ["-M", "-multiuser-server"])
def test_users_are_served_concurrently_if_configured(silicon: Silicon, mps: Mps, option: str) -> None:
    """MPS treats all of them as root's clients."""
    mps.start(option)
    mps.ask("set_default_active_thread_percentage 50")
    first, second = mps.client(user=65533), mps.client(user=65534)
    assert (first.open(), second.open()) == (SUCCESS, SUCCESS)
    server = mps.server()
    assert os.stat(f"/proc/{server}").st_uid == 0
    assert sorted(mps.clients()) == sorted(client.process.pid for client in (first, second))
    assert (first.multiprocessors(), second.multiprocessors()) == (66, 66)
    assert set(processes(silicon)) == {server, first.process.pid, second.process.pid}


def test_quit_waits_for_clients_unless_it_has_a_timeout(silicon: Silicon, mps: Mps) -> None:
    mps.start()
    client = mps.client()
    assert client.open() == SUCCESS
    with subprocess.Popen([mps.program], env=mps.environment, stdin=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdin
        waiting.stdin.write("quit\n")
        waiting.stdin.flush()
        until("the daemon gets the command", lambda: "Cmd:quit" in mps.log())
        assert mps.ask("get_server_list") == "The MPS control daemon is shutting down"
        assert mps.client()("cuInit", 0) == CONNECTION_FAILED
        assert waiting.poll() is None and client.allocate(MIB) == SUCCESS
        client.close()
        assert waiting.wait(SECONDS) == 0
    mps.start()
    client = mps.client()
    assert client.open() == SUCCESS
    assert mps.run("quit -t 0").returncode == 1
    assert client.allocate(MIB) == RPC_FAILURE and processes(silicon) == {}


def test_mig_instance_has_a_separate_daemon(bare_silicon: Silicon, mps: Mps) -> None:
    load(bare_silicon, mig=True)
    root, instance, compute, uuid = partition(bare_silicon, 0)
    _root, _instance, _compute, other_uuid = partition(bare_silicon, 3)
    mps.variables["CUDA_VISIBLE_DEVICES"] = uuid
    other = Mps(bare_silicon, "other", {"CUDA_VISIBLE_DEVICES": other_uuid})
    try:
        mps.start()
        other.start()
        mps.ask("set_default_active_thread_percentage 50", "set_default_device_pinned_mem_limit 0 1G")
        other.ask("set_default_active_thread_percentage 25")
        client = mps.client(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=2G")
        neighbour = other.client()
        assert [client.open(), neighbour.open()] == [SUCCESS, SUCCESS]
        assert [client.multiprocessors(), neighbour.multiprocessors()] == [8, 4]
        for each, its in ((client, uuid), (neighbour, other_uuid)):
            assert each("cuDeviceGetCount") == 1
            assert each("cuDeviceGetUuid_v2", 0) == its.removeprefix("MIG-").replace("-", "")
        # A server's default limit is not enforced on MIG devices, but a client's own limit is
        assert client("cuDeviceTotalMem_v2", 0) == 2 * GIB
        assert client.allocate(2 * GIB) == SUCCESS and client.allocate(1) == OUT_OF_MEMORY
        assert mps.client().open() == SUCCESS and mps.processes[-1].allocate(3 * GIB) == SUCCESS
        assert neighbour.allocate(9 * GIB) == SUCCESS and neighbour.allocate(GIB) == OUT_OF_MEMORY
        here = {pid: entry["gpu_instance"] for pid, entry in processes(bare_silicon).items()}
        assert len({here[mps.server()], here[client.process.pid]}) == 1
        assert here[other.server()] == here[neighbour.process.pid] != here[mps.server()]
        assert root.code("nvmlComputeInstanceDestroy", compute) == IN_USE
        for each in mps.processes:
            each.close()
        assert root.code("nvmlComputeInstanceDestroy", compute) == IN_USE
        assert mps.run("quit").returncode == 0
        assert root.code("nvmlComputeInstanceDestroy", compute) == SUCCESS
        assert root.code("nvmlGpuInstanceDestroy", instance) == SUCCESS
        assert neighbour.allocate(MIB) == SUCCESS
    finally:
        other.stop()


def test_exclusive_mode_applies_to_each_mig_instance(bare_silicon: Silicon, mps: Mps) -> None:
    load(bare_silicon, mig=True)
    root, _instance, compute, uuid = partition(bare_silicon, 0)
    _root, _other, _compute, other_uuid = partition(bare_silicon, 3)
    root("nvmlDeviceSetComputeMode", root("nvmlComputeInstanceGetInfo", compute)["device"], EXCLUSIVE)
    codes = [mps.client(CUDA_VISIBLE_DEVICES=each).open() for each in (uuid, other_uuid, uuid)]
    assert codes == [SUCCESS, SUCCESS, UNAVAILABLE]


def test_container_needs_only_the_pipe_directory(silicon: Silicon, mps: Mps) -> None:
    """In a container the state of the boards is read-only and the process is no administrator. The daemon counts it
    anyway.
    """
    mps.start()
    state = next((silicon.folder / "lib").glob("libnvidia-gpusim.so.*"))
    script = f"mount --make-rprivate / && mount --bind {state} {state} && mount -o remount,bind,ro {state}"
    script += ' && exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "$@"'
    program = (
        "import ctypes, sys; cuda = ctypes.CDLL('libcuda.so.1'); print(cuda.cuInit(0), flush=True); sys.stdin.read()"
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh", "python3", "-c", program]
    with subprocess.Popen(
        command, env=mps.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "0\n"
        assert mps.clients() == [process.pid]
        assert set(processes(silicon)) == {mps.server(), process.pid}
    until("the client has ended", lambda: not mps.clients())


@pytest.mark.parametrize("message", [b"", b"x", b"x" * 4096])
def test_invalid_message_ends_only_its_connection(silicon: Silicon, mps: Mps, message: bytes) -> None:
    mps.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(mps.folder / "pipe/control"))
        stranger.settimeout(SECONDS)
        if message:
            stranger.send(message)
        else:
            stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(4096) == b""
    assert mps.ask("get_default_active_thread_percentage") == "100.0"
    assert mps.client().open() == SUCCESS
