# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Runs on a node in the driver's Python environment: calls the driver's socket like the kubelet, and measures the
durations.

Standard input: a JSON object ``{"driver": name, "rounds": n, "claims": [{"namespace", "name", "uid"}, …], "parallel":
n}``.

Standard output: a JSON object with lists of seconds. ``prepare`` and ``unprepare`` have one value per call,
``prepare_all`` one per round (until its last parallel call has answered). The others are the costs of the parts in the
same process, with the same disk and API: ``fsync`` (write and sync 4 KiB), ``get`` (one claim over an open
connection), ``cdi`` (write one CDI file), ``edits`` (compare the shared container edits with the disk). Without claims
the only list is ``empty``: calls that prepare nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from dra_driver.api.client import ApiClient
from dra_driver.core.host.cdi import ContainerEdits, DeviceNode, build_spec, write_spec
from dra_driver.core.host.system import System
from dra_driver.core.vendors.ascend.driver_files import CommonEdits as EditsOfNpus
from dra_driver.core.vendors.nvidia.container.common_edits import CommonEdits
from dra_driver.protocol import dra_v1_pb2, dra_v1_pb2_grpc

PLUGINS = "/var/lib/kubelet/plugins"
NPUS = "npu.huawei.com"
KUBECONFIG = "/etc/dra-accelerators/kubeconfig"
PARTS = 50


async def timed(call: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Return the duration of a call in seconds, and its answer."""
    start = time.perf_counter()
    answer = await call()
    return time.perf_counter() - start, answer


def cost_of_fsync(directory: str) -> list[float]:
    """Return the seconds of writing and syncing 4 KiB on the store's file system."""
    seconds = []
    path = os.path.join(directory, "bench-fsync")
    with open(path, "wb", buffering=0) as file:
        for _round in range(PARTS):
            start = time.perf_counter()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    os.unlink(path)
    return seconds


def cost_of_cdi() -> list[float]:
    """Return the seconds of writing one small CDI file like the driver."""
    system = System()
    edits = ContainerEdits(env=("A=B",), device_nodes=(DeviceNode(path="/dev/nvidia0"),))
    seconds = []
    path = "/var/run/cdi/bench.example.com-claim_0.json"
    for _round in range(PARTS):
        spec = build_spec("bench.example.com/claim", {"device": edits})
        start = time.perf_counter()
        write_spec(system, path, spec)
        seconds.append(time.perf_counter() - start)
    os.unlink(path)
    return seconds


def shared_edits(driver: str) -> Callable[[], object]:
    """Return the function with which each prepare checks that the shared container edits still match the disk."""
    if driver == NPUS:
        return EditsOfNpus(System()).current
    version = Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    edits = CommonEdits(System())
    edits.current(version)
    edits.settle(30)
    return lambda: edits.current(version)


def cost_of_edits(driver: str) -> list[float]:
    """Return the seconds of that check."""
    look = shared_edits(driver)
    look()
    seconds = []
    for _round in range(PARTS):
        start = time.perf_counter()
        look()
        seconds.append(time.perf_counter() - start)
    return seconds


async def cost_of_get(claim: dict[str, str]) -> list[float]:
    """Return the seconds of reading one claim over an open connection."""
    client = ApiClient(KUBECONFIG)
    path = f"/apis/resource.k8s.io/v1/namespaces/{claim['namespace']}/resourceclaims/{claim['name']}"
    try:
        await client.get(path)
        return [(await timed(lambda: client.get(path)))[0] for _round in range(PARTS)]
    finally:
        await client.close()


async def cost_of_an_empty_call(directory: str, rounds: int) -> list[float]:
    """Return the seconds of calls that prepare no claim."""
    async with grpc.aio.insecure_channel(f"unix:{directory}/dra.sock") as channel:
        plugin = dra_v1_pb2_grpc.DRAPluginStub(channel)
        return [
            (await timed(lambda: plugin.NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest())))[0]
            for _round in range(rounds)
        ]


def messages(claims: list[dict[str, str]]) -> list[dra_v1_pb2.Claim]:
    return [dra_v1_pb2.Claim(namespace=claim["namespace"], name=claim["name"], uid=claim["uid"]) for claim in claims]


def refuse(answer: Any) -> None:
    """Exit at the first error, because durations of failed calls are meaningless."""
    for uid, response in answer.claims.items():
        if response.error:
            raise SystemExit(f"claim {uid}: {response.error}")


async def main() -> None:
    order = json.load(sys.stdin)
    result: dict[str, list[float]] = {"prepare": [], "unprepare": [], "prepare_all": [], "unprepare_all": []}
    directory = f"{PLUGINS}/{order['driver']}"
    if not order["claims"]:
        json.dump({"empty": await cost_of_an_empty_call(directory, order["rounds"])}, sys.stdout)
        return
    result["fsync"] = cost_of_fsync(directory)
    result["cdi"] = cost_of_cdi()
    result["edits"] = cost_of_edits(order["driver"])
    result["get"] = await cost_of_get(order["claims"][0])
    claims = messages(order["claims"][: order["parallel"]])
    async with grpc.aio.insecure_channel(f"unix:{directory}/dra.sock") as channel:
        plugin = dra_v1_pb2_grpc.DRAPluginStub(channel)
        for _round in range(order["rounds"]):
            for verb, request, call in (
                ("prepare", dra_v1_pb2.NodePrepareResourcesRequest, plugin.NodePrepareResources),
                ("unprepare", dra_v1_pb2.NodeUnprepareResourcesRequest, plugin.NodeUnprepareResources),
            ):
                start = time.perf_counter()
                answers = await asyncio.gather(
                    *(
                        timed(lambda claim=claim, request=request, call=call: call(request(claims=[claim])))
                        for claim in claims
                    )
                )
                result[f"{verb}_all"].append(time.perf_counter() - start)
                for seconds, answer in answers:
                    refuse(answer)
                    result[verb].append(seconds)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
