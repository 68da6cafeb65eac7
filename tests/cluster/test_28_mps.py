# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test containers of a claim that compute at the same time through MPS: inside, on the node, and after the claim's
deletion.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.cluster import EXAMPLES, Cluster
from tests.cluster.manifests import claim, device_named, dynamic, mps, pod

#: Creates its own CUDA context, prints its limits, and keeps the context.
COMPUTE = """
import ctypes, json, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    return getattr(cuda, name)(*arguments)
device, context, memory, sms, size = (ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int(), ctypes.c_size_t())
answers = {"init": call("cuInit", 0)}
call("cuDeviceGet", ctypes.byref(device), 0)
answers["context"] = call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuDeviceGetAttribute", ctypes.byref(sms), 16, device)
answers["multiprocessors"] = sms.value
call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
answers["memory"] = size.value >> 20
answers["within"] = call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 30))
answers["beyond"] = call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 << 30))
print(json.dumps(answers), flush=True)
time.sleep(3600)
"""
OUT_OF_MEMORY, DEVICE_UNAVAILABLE = 2, 46


def computing(name: str, claimed: str, node: str) -> dict[str, Any]:
    """Return a pod with one container that computes."""
    wanted = pod(name, claimed, node=node, image="localhost/python:latest")
    wanted["spec"]["containers"][0]["command"] = ["python3", "-c", COMPUTE]
    return wanted


def printed_limits(cluster: Cluster, name: str) -> dict[str, int]:
    """Return the limits that the pod's program printed."""
    found: dict[str, int] = json.loads(
        cluster.wait(f"the output of {name}", lambda: cluster.log(name).strip().splitlines()[-1:] or None)[0]
    )
    return found


def printed(cluster: Cluster, name: str, last: str, container: str | None = None) -> str:
    """Return a pod's output as soon as it contains this text."""
    return cluster.wait(
        f"{name} prints {last!r}", lambda: last in (said := cluster.log(name, container=container)) and said
    )


def modes(cluster: Cluster, node: str) -> list[str]:
    """Return the compute mode of each GPU of a node."""
    return cluster.run(node, "nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader").split()


def daemons(cluster: Cluster, node: str) -> dict[str, int]:
    """Return the process ID of each MPS control daemon that runs for claims on the node, by unit."""
    units = [unit for unit in cluster.companions(node) if unit.startswith("dra-accelerators-mps@")]
    return {unit: int(cluster.run(node, "systemctl", "show", "--property=MainPID", "--value", unit)) for unit in units}


def test_containers_share_a_gpu_through_their_mps_daemon(clean: Cluster) -> None:
    example = EXAMPLES / "mps.yaml"
    clean.apply(example)
    clean.wait_running("mps")
    for container in ("first", "second"):
        log = printed(clean, "mps", "30G", container)
        assert [line for line in log.splitlines() if line[0].isdigit()] == ["50.0", "30G"]
    node = clean.pod("mps")["spec"]["nodeName"]
    assert sorted(set(modes(clean, node))) == ["Default", "Exclusive_Process"]
    ((unit, _pid),) = daemons(clean, node).items()
    assert clean.uid("mps") in unit
    clean.delete(example)
    assert (clean.companions(node), set(modes(clean, node))) == ([], {"Default"})


def test_partition_is_shared_through_its_mps_daemon(clean: Cluster) -> None:
    example = EXAMPLES / "mps-on-mig.yaml"
    clean.apply(example)
    clean.wait_running("mps-on-mig")
    for container in ("first", "second"):
        log = printed(clean, "mps-on-mig", "50.0", container)
        assert log.count("MIG 2g.20gb") == 1
    node = clean.pod("mps-on-mig")["spec"]["nodeName"]
    assert len(daemons(clean, node)) == 1
    clean.delete(example)
    assert clean.companions(node) == []


def test_processes_get_the_limits_of_their_claim(clean: Cluster) -> None:
    """Two pods share a claim for a GPU in exclusive mode, and one uses a partition; each claim has its own limits."""
    node = clean.nodes()[1]
    gpu = clean.run(node, "nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", "3").strip()
    whole = claim("whole", device_class="gpu.nvidia.com", expression=device_named(gpu))
    whole["spec"]["devices"]["config"] = [mps(defaultActiveThreadPercentage=25, defaultPinnedDeviceMemoryLimit="2Gi")]
    part = claim("part", device_class="mig.nvidia.com", expression=dynamic("3g.40gb"))
    part["spec"]["devices"]["config"] = [
        mps("MigDeviceConfig", defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit="3Gi")
    ]
    documents = [
        part,
        computing("of-part", "part", node),
        whole,
        *(computing(name, "whole", node) for name in ("one", "two")),
    ]
    # The partition first: its GPU may need a change of the MIG mode, which failed once while the others began to
    # compute.
    clean.apply(*documents[:2])
    clean.wait_running("of-part")
    clean.apply(*documents[2:])
    clean.wait_running("one", "two")
    for name in ("one", "two"):
        # A quarter of 132 multiprocessors.
        assert printed_limits(clean, name) == {
            "init": 0,
            "context": 0,
            "multiprocessors": 33,
            "memory": 2048,
            "within": 0,
            "beyond": OUT_OF_MEMORY,
        }
    # Half of 60 multiprocessors.
    assert printed_limits(clean, "of-part") == {
        "init": 0,
        "context": 0,
        "multiprocessors": 30,
        "memory": 3072,
        "within": 0,
        "beyond": OUT_OF_MEMORY,
    }
    listed = clean.run(node, "nvidia-smi", "--query-compute-apps=gpu_uuid,name", "--format=csv,noheader")
    assert listed.count("nvidia-cuda-mps-server") == 2 and listed.count(gpu) == 3
    # No other process can compute there, because the daemon has the GPU.
    program = COMPUTE.replace("time.sleep(3600)", "")
    variables = (f"CUDA_VISIBLE_DEVICES={gpu}", "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
    outside = json.loads(clean.run(node, "env", *variables, "python3", "-c", program))
    assert outside["context"] == DEVICE_UNAVAILABLE
    clean.delete(*reversed(documents))
    assert (clean.companions(node), set(modes(clean, node)), clean.instances(node)) == ([], {"Default"}, [])


def test_users_run_concurrently_if_the_claim_allows_it(clean: Cluster) -> None:
    """Without multiUser, the second user's first CUDA call waits until the first user's process ends."""
    node = clean.nodes()[1]
    wanted = claim("users", device_class="gpu.nvidia.com")
    wanted["spec"]["devices"]["config"] = [mps(multiUser=True, defaultActiveThreadPercentage=50)]
    users = [computing(f"user-{number}", "users", node) for number in (1001, 1002)]
    for number, user in zip((1001, 1002), users):
        user["spec"]["securityContext"] = {"runAsUser": number, "runAsGroup": number}
    clean.apply(wanted, *users)
    clean.wait_running("user-1001", "user-1002")
    for name in ("user-1001", "user-1002"):
        assert (printed_limits(clean, name)["context"], printed_limits(clean, name)["multiprocessors"]) == (0, 66)
    listed = clean.run(node, "nvidia-smi", "--query-compute-apps=pid,name", "--format=csv,noheader").splitlines()
    (server,) = {line.partition(",")[0] for line in listed if "nvidia-cuda-mps-server" in line}
    assert len(listed) == 3 and clean.run(node, "stat", "-c", "%u", f"/proc/{server}").strip() == "0"
    clean.delete(*reversed(users), wanted)
    assert clean.companions(node) == []


def test_daemon_survives_the_driver_and_is_restarted_after_a_crash(clean: Cluster) -> None:
    node = clean.nodes()[1]
    wanted = claim("lasting", device_class="gpu.nvidia.com")
    wanted["spec"]["devices"]["config"] = [mps(defaultActiveThreadPercentage=25, defaultPinnedDeviceMemoryLimit="2Gi")]
    documents = [wanted, computing("before", "lasting", node)]
    clean.apply(*documents)
    clean.wait_running("before")
    first = printed_limits(clean, "before")
    ((unit, pid),) = daemons(clean, node).items()
    clean.restart_driver(node)
    clean.wait("the claim is prepared again", lambda: clean.recorded(node).get(clean.uid("lasting")) == "prepared")
    assert daemons(clean, node) == {unit: pid}
    clean.run(node, "kill", "-9", pid)
    again = clean.wait("another daemon", lambda: (now := daemons(clean, node)[unit]) not in (0, pid) and now)
    clean.wait(
        "the daemon has its settings",
        lambda: clean.run(node, "systemctl", "is-active", unit, check=False).strip() == "active",
    )
    late = computing("after", "lasting", node)
    clean.apply(late)
    clean.wait_running("after")
    assert (printed_limits(clean, "after"), daemons(clean, node)) == (first, {unit: again})
    clean.delete(late, *reversed(documents))
    assert clean.companions(node) == []


@pytest.mark.prove
def test_daemon_is_started_after_a_reboot(clean: Cluster) -> None:
    """Neither the daemon nor its partition survives the reboot: the driver creates both before the pod restarts."""
    node = clean.nodes()[1]
    wanted = claim("rebooted", device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
    wanted["spec"]["devices"]["config"] = [mps("MigDeviceConfig", defaultActiveThreadPercentage=50)]
    documents = [wanted, computing("rebooted", "rebooted", node)]
    documents[1]["spec"]["restartPolicy"] = "Always"
    clean.apply(*documents)
    clean.wait_running("rebooted")
    first, before = printed_limits(clean, "rebooted"), list(daemons(clean, node))
    assert first["multiprocessors"] == 8  # half of 16
    clean.world("reboot", node)
    clean.wait_registered(node, timeout=180)

    def restarted() -> bool:
        (status,) = clean.pod("rebooted")["status"]["containerStatuses"]
        return bool(status["restartCount"] >= 1 and "running" in status["state"])

    clean.wait("the pod runs again", restarted, timeout=300)
    assert (printed_limits(clean, "rebooted"), list(daemons(clean, node))) == (first, before)
    clean.delete(*reversed(documents))
    assert (clean.companions(node), clean.instances(node)) == ([], [])


#: Tries each path to a daemon of the directory as another user, and as root to verify that the path works.
REACH = """
import errno, json, os, socket, sys
directory = sys.argv[1]
def connect():
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.connect(directory + "/pipe/control")
ways = {"list": lambda: os.listdir(directory), "connect": connect, "write": lambda: open(directory + "/shm/planted", "w").close()}
def tried(way):
    try:
        way()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "possible"
print(json.dumps({name: tried(way) for name, way in ways.items()}))
"""


def test_local_users_reach_no_daemon(clean: Cluster) -> None:
    node = clean.nodes()[1]
    wanted = claim("closed", device_class="gpu.nvidia.com")
    wanted["spec"]["devices"]["config"] = [mps(defaultActiveThreadPercentage=50)]
    documents = [wanted, computing("closed", "closed", node)]
    clean.apply(*documents)
    clean.wait_running("closed")
    folder = f"/run/dra-accelerators/companions/{clean.uid('closed')}.0"
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    reached = json.loads(clean.run(node, *nobody, "python3", "-c", REACH, folder))
    assert reached == {"list": "EACCES", "connect": "EACCES", "write": "EACCES"}
    assert json.loads(clean.run(node, "python3", "-c", REACH, folder))["list"] == "possible"
    clean.run(node, "rm", "-f", f"{folder}/shm/planted")
    # A symbolic link of a container cannot redirect a program of the node.
    mounted = clean.shell(node, f"grep ' {folder} ' /proc/mounts")
    assert "nosymfollow" in mounted and "size=1048576k" in mounted, "a claim cannot use up the node's memory"
    clean.delete(*reversed(documents))
    assert clean.companions(node) == []


def test_driver_start_stops_a_daemon_without_a_claim(clean: Cluster) -> None:
    node = clean.nodes()[1]
    uid = "00000000-0000-4000-8000-00000000dead"
    folder = "/run/dra-accelerators/companions"
    variables = "\\n".join(
        (
            f"CUDA_MPS_PIPE_DIRECTORY={folder}/{uid}.0/pipe",
            f"CUDA_MPS_LOG_DIRECTORY={folder}/{uid}.0/log",
            "CUDA_VISIBLE_DEVICES=0",
        )
    )
    clean.shell(
        node,
        f"printf '{variables}\\n' > {folder}/{uid}.0.environment; echo get_server_list > {folder}/{uid}.0.commands; "
        f"systemctl start dra-accelerators-mps@{uid}.0.service",
    )
    assert len(daemons(clean, node)) == 1
    clean.restart_driver(node)
    clean.wait("nothing is left of it", lambda: not clean.companions(node))


def test_unsupported_sharing_is_rejected_with_a_reason(clean: Cluster) -> None:
    wanted = claim("two", device_class="mig.nvidia.com", expression=dynamic("1g.10gb"), count=2)
    wanted["spec"]["devices"]["config"] = [mps("MigDeviceConfig")]
    clean.apply(wanted, pod("two", "two"))
    clean.wait(
        "the refusal as an event",
        lambda: (
            "a container reaches the MPS daemon of one MIG device"
            in " ".join(clean.kubectl("get", "events", "-o", "yaml").split())
        ),
    )
    assert clean.pod("two")["status"]["phase"] == "Pending"
