# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Inject each fault once into each API request of the node driver's process, between the process and a real API
server.

The driver runs on the simulated node of the chaos test (tests/chaos), which needs root. ``driver_faults_test.py``
starts this program.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.__main__ import LIBRARY, enter, set_import_paths
from tests.oracles.fault_cases import FaultRuns, Request, every, rotated, without_volatile
from tests.oracles.fault_proxy import FaultProxy

if TYPE_CHECKING:
    from tests.chaos.node import Node
    from tests.oracles.cluster_modules_test import Server

Json = dict[str, Any]
#: The driver's account, from the role's templates.
NODE, OTHER_NODE, SPACE, NAMESPACE = "fault-node", "fault-other", "driver-faults", "dra-accelerators"
ACCOUNT, READER = f"driver-{NODE}", "metrics-reader"
DRA = "/apis/resource.k8s.io/v1"
#: The lists of the controller, which does not run here.
LISTS, SIGN, LIST = f"/api/v1/namespaces/{NAMESPACE}/configmaps", "waiting-claims", f"waiting-claims-{NODE}"
CLAIMS, SLICES = f"{DRA}/namespaces/{SPACE}/resourceclaims", f"{DRA}/resourceslices"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
EVENTS = (f"/api/v1/namespaces/{SPACE}/events", "/api/v1/namespaces/default/events")
OTHER = "other.example.com"
SECONDS = 90.0
#: The device of each claim: a whole GPU, a dynamic partition, a partition with binding conditions, and a device that
#: does not exist. The other claims do not belong to this node's driver.
WHOLE, PARTITION, AWAITED, MISSING = "gpu-3", "gpu-1-mig-1g10gb-19-6", "gpu-7-mig-1g10gb-19-0", "gpu-99"


def wait(what: str, condition: Callable[[], Any], explain: Callable[[], str] = str, pause: float = 0.05) -> None:
    """Wait until a condition is true. Raises AssertionError."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {SECONDS:g} s for: {what}\n{explain()}"
        time.sleep(pause)


def part_of(request: Request) -> str:
    """Return the part of the driver that sends a request."""
    kind = request[1]
    parts = ("token", "configmaps", "resourceclaims", "tokenreviews", "subjectaccessreviews", "events", "pods")
    return next((part for part in parts if part in kind), "slices")


class Scene:
    """The objects at the API server, and the driver on its node. ``play`` runs the scenario."""

    def __init__(self, server: Server, proxy: FaultProxy, node: Node, folder: Path) -> None:
        from dra_driver.core import certificates

        from tests.bench.api_server import free_port

        self._server, self._proxy, self._node = server, proxy, node
        self._kubeconfig, self._metrics = folder / "kubeconfig", f"127.0.0.1:{free_port()}"
        now = datetime.datetime.now(datetime.timezone.utc)
        pair = certificates.create_ca(now, 86400.0)
        serving = certificates.create_serving_certificate(pair, ["127.0.0.1"], now=now, seconds=86400.0)
        self._authority = pair.certificate.decode()
        for name, data in (("certificate", serving.certificate), ("key", serving.key)):
            (folder / name).write_bytes(data)
        uid = server.request("GET", f"/api/v1/nodes/{NODE}")["metadata"]["uid"]
        bound = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": uid}
        self._token = self._request_token(NAMESPACE, ACCOUNT, {"boundObjectRef": bound})
        self._reader = self._request_token(SPACE, READER, {"audiences": ["dra-accelerators-metrics"]})
        self._untouched: dict[str, str] = {}
        node.configure(
            node_name=NODE,
            kubeconfig=str(self._kubeconfig),
            metrics_address=self._metrics,
            metrics_certificate=str(folder / "certificate"),
            metrics_key=str(folder / "key"),
            metrics_authorization=True,
            read_pods=True,
        )

    def _request_token(self, namespace: str, account: str, spec: Json) -> str:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self._server.request("POST", path, body)["status"]["token"])

    def _items(self, path: str) -> list[Json]:
        found: list[Json] = self._server.request("GET", path)["items"]
        return found

    # ------------------------------------------------------------------ the initial objects

    def _lay(self) -> None:
        from api_model import kubeconfig

        self._kubeconfig.write_text(json.dumps(kubeconfig(self._proxy.url, token=self._token)), encoding="utf-8")
        for path in (CLAIMS, PODS, *EVENTS):
            for each in self._items(path):
                self._server.request("DELETE", f"{path}/{each['metadata']['name']}", {"gracePeriodSeconds": 0})
        for each in self._slices():
            self._server.request("DELETE", f"{SLICES}/{each['metadata']['name']}", {})
        for each in self._items(LISTS):
            if each["metadata"]["name"] in (SIGN, LIST):
                self._server.request("DELETE", f"{LISTS}/{each['metadata']['name']}", {})
        self._server.request("POST", LISTS, {"metadata": {"name": SIGN}, "data": {"renewed": "now"}})
        pool = {"name": "previous", "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": self._node.driver, "nodeName": NODE, "pool": pool, "devices": [{"name": "gpu-0"}]}
        self._server.request("POST", SLICES, {"metadata": {"name": f"{NODE}-previous"}, "spec": spec})
        self._claim("whole", WHOLE)
        self._claim("partition", PARTITION)
        self._claim("gone", "gpu-6")
        self._claim("missing", MISSING)
        self._claim("ahead")
        self._claim("elsewhere", WHOLE, pool=OTHER_NODE)
        self._claim("other", WHOLE, driver=OTHER)
        self._untouched = self._versions()

    def _versions(self) -> dict[str, str]:
        """Return the versions of the claims that the driver must not change."""
        return {
            each["metadata"]["name"]: each["metadata"]["resourceVersion"]
            for each in self._items(CLAIMS)
            if each["metadata"]["name"] in ("elsewhere", "other", "missing")
        }

    def _claim(self, name: str, device: str = "", *, pool: str = NODE, driver: str = "", **more: Any) -> None:
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "any"}}]}}
        self._server.request("POST", CLAIMS, {"metadata": {"name": name}, "spec": spec})
        if device:
            self._allocate(name, device, pool=pool, driver=driver, **more)

    def _allocate(self, name: str, device: str, *, pool: str = NODE, driver: str = "", **more: Any) -> None:
        claim = self._server.request("GET", f"{CLAIMS}/{name}")
        result = {"request": "gpu", "driver": driver or self._node.driver, "pool": pool, "device": device, **more}
        field = {"key": "metadata.name", "operator": "In", "values": [pool]}
        allocation = {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        }
        if more:
            allocation["allocationTimestamp"] = datetime.datetime.now(datetime.timezone.utc).isoformat()
        claim["status"] = {"allocation": allocation}
        self._server.request("PUT", f"{CLAIMS}/{name}/status", claim)

    # ------------------------------------------------------------------ the state

    def _slices(self) -> list[Json]:
        return self._items(f"{SLICES}?fieldSelector=spec.nodeName%3D{NODE}")

    def _published(self) -> list[Json]:
        """Return the slices without names and generation; empty while the pool is incomplete or not the only one."""
        specs = [each["spec"] for each in self._slices()]
        pools = {
            (each["pool"]["name"], each["pool"]["generation"], each["pool"]["resourceSliceCount"]) for each in specs
        }
        if {(name, count) for name, _generation, count in pools} != {(NODE, len(specs))} or len(pools) != 1:
            return []
        found: list[Json] = without_volatile([{**each, "pool": {**each["pool"], "generation": 0}} for each in specs])
        return found

    def _status(self, name: str) -> list[Json]:
        found: list[Json] = (self._server.request("GET", f"{CLAIMS}/{name}").get("status") or {}).get("devices") or []
        return found

    def _stored(self) -> dict[str, str]:
        from tests.chaos.snapshot import read_store

        found: dict[str, str] = read_store(self._node.store)["claims"]
        return found

    def _reference(self, name: str) -> tuple[str, str]:
        return name, str(self._server.request("GET", f"{CLAIMS}/{name}")["metadata"]["uid"])

    def _ask(self, method: str, name: str, uid: str) -> str:
        """Call the driver like the kubelet; return its error."""
        from dra_driver.protocol import dra_v1_pb2, dra_v1_pb2_grpc

        stub = dra_v1_pb2_grpc.DRAPluginStub(self._node._channel)
        claim = dra_v1_pb2.Claim(namespace=SPACE, name=name, uid=uid)
        answer = getattr(stub, method)(getattr(dra_v1_pb2, f"{method}Request")(claims=[claim]), timeout=45)
        return str(answer.claims[uid].error)

    def _call(self, method: str, name: str, uid: str) -> None:
        """Call until there is no error, like the kubelet."""
        errors: list[str] = []
        wait(
            f"{method} of {name} succeeds",
            lambda: errors.append(self._ask(method, name, uid)) or not errors[-1],
            lambda: f"{errors[-1]}\n{self._node.log_tail()}",
            pause=0.5,
        )

    @contextlib.contextmanager
    def _pod(self) -> Iterator[None]:
        """Create a pod, and serve the kubelet's list with the device in both containers. Only the pod's spec shows
        which one uses it.
        """
        import grpc
        from dra_driver.kubelet.pod_resources import socket_path
        from dra_driver.protocol import pod_resources_pb2, pod_resources_pb2_grpc

        listed = pod_resources_pb2.ListPodResourcesResponse()
        pod = listed.pod_resources.add(name="pod", namespace=SPACE)
        containers = []
        for name, request in (("first", "gpu"), ("second", "network")):
            claims = [{"name": "devices", "request": request}]
            containers.append({"name": name, "image": "i", "resources": {"claims": claims}})
            claim = pod.containers.add(name=name).dynamic_resources.add(claim_name="whole", claim_namespace=SPACE)
            claim.claim_resources.add(driver_name=self._node.driver, pool_name=NODE, device_name=WHOLE)
            claim.claim_resources.add(driver_name=OTHER, pool_name=NODE, device_name="network")
        spec = {
            "automountServiceAccountToken": False,
            "resourceClaims": [{"name": "devices", "resourceClaimName": "whole"}],
            "containers": containers,
        }
        self._server.request("POST", PODS, {"metadata": {"name": "pod"}, "spec": spec})

        class Kubelet(pod_resources_pb2_grpc.PodResourcesListerServicer):
            def List(self, request: Any, context: Any) -> Any:
                return listed

        path = Path(socket_path("/var/lib/kubelet"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(2))
        pod_resources_pb2_grpc.add_PodResourcesListerServicer_to_server(Kubelet(), server)
        server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield
        finally:
            server.stop(0).wait()

    def _is_scraped(self) -> bool:
        """Return whether the metrics are served and attribute the device to the container that requests it."""
        context = ssl.create_default_context(cadata=self._authority)
        headers = {"Authorization": f"Bearer {self._reader}"}
        request = urllib.request.Request(f"https://{self._metrics}/metrics", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return False
        found = [line for line in lines if line.startswith("dra_accelerators_container_device_info{")]
        return len(found) == 1 and 'container="first"' in found[0]

    # ------------------------------------------------------------------ the scenario

    def play(self, _faults: Mapping[Request, str]) -> Json:
        """Publish, prepare and unprepare claims, write statuses, restore changed slices, and drop a deleted claim."""
        from dra_driver.core.dra.device_json import FAILED_CONDITION, PREPARED_CONDITION

        from tests.chaos.snapshot import snapshot

        node, said = self._node, self._node.log_tail
        if self._stored() or node.pid:  # an earlier run has failed
            self._begin_anew()
        self._lay()
        self._proxy.phase = "start"
        node.log.write_text("", encoding="utf-8")
        node.start(short_waits=True)
        wait("the devices are published", self._published, said)
        published = self._published()
        self._proxy.phase = "claims"
        references = {name: self._reference(name) for name in ("whole", "partition", "gone", "missing", "ahead")}
        for name in ("whole", "partition", "gone"):
            self._call("NodePrepareResources", *references[name])
        for _time in range(2):
            wait(
                "a claim of a missing device is refused",
                lambda: MISSING in self._ask("NodePrepareResources", *references["missing"]),
                said,
                pause=0.5,
            )
        conditions = {"bindingConditions": [PREPARED_CONDITION], "bindingFailureConditions": [FAILED_CONDITION]}
        self._allocate("ahead", AWAITED, **conditions)
        line = f"{SPACE}/ahead {references['ahead'][1]} 00000000\n"
        self._server.request("POST", LISTS, {"metadata": {"name": LIST}, "data": {"claims": line}})
        for name in ("whole", "partition", "gone", "ahead"):
            wait(f"the status of claim {name} is written", lambda name=name: self._status(name), said)
        with self._pod():
            wait("the metrics name the container of the device", self._is_scraped, said, pause=0.5)
        self._proxy.phase = "slices"
        first, second = self._slices()[:2]
        self._server.request("DELETE", f"{SLICES}/{first['metadata']['name']}", {})
        second["spec"]["pool"]["resourceSliceCount"] += 1
        self._server.request("PUT", f"{SLICES}/{second['metadata']['name']}", second)
        wait("the slices are restored", lambda: self._published() == published, said)
        self._proxy.phase = "gone"
        self._server.request("DELETE", f"{CLAIMS}/gone", {})
        wait("the deleted claim is dropped", lambda: references["gone"][1] not in self._stored(), said)
        self._proxy.phase = "leave"
        self._call("NodeUnprepareResources", *references["partition"])
        claim = self._server.request("GET", f"{CLAIMS}/ahead")
        self._server.request("PUT", f"{CLAIMS}/ahead/status", {**claim, "status": {}})
        self._server.request("DELETE", f"{LISTS}/{LIST}", {})
        wait("the abandoned claim is unprepared", lambda: references["ahead"][1] not in self._stored(), said)
        wait("the token is renewed", lambda: self._token not in self._kubeconfig.read_text(), said)
        assert not node.has_ended(), f"the driver ended\n{said()}"
        uid = references["whole"][1]
        state = {
            "slices": self._published(),
            "claims": self._items(CLAIMS),
            "node": json.loads(json.dumps(snapshot(node)).replace(uid, "UID")),
            "repeated events": self._repeated_events(),
        }
        assert self._versions() == self._untouched, "the driver changed claims of others"
        self._call("NodeUnprepareResources", *references["whole"])
        self._proxy.phase = "stop"
        node.stop()
        return state

    def _begin_anew(self) -> None:
        """Remove all state of an earlier run from the node."""
        from tests.chaos import node_namespaces

        node = self._node
        if node.pid:
            node.kill()
        for path in node.state.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        node.boot(node_namespaces.boot_id())

    def _repeated_events(self) -> list[str]:
        """Return the Events that exist more than twice. An Event whose answer was lost can exist twice. A rejected one
        is lost.
        """
        found = [
            f"{each['reason']} {each['involvedObject']['name']} {each['message']}"
            for path in EVENTS
            for each in self._items(path)
        ]
        return sorted({each for each in found if found.count(each) > 2})


def main() -> int:
    """Run the scenario; return 1 if a run has failed."""
    set_import_paths()
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="of an administrator, as JSON")
    parser.add_argument(
        "--rotate", action="store_true", help="one run, in which each request meets one fault by rotation"
    )
    parser.add_argument("--only", default="", help="only requests and faults with this text")
    options = parser.parse_args()
    vendor = enter("nvidia")
    from cluster_modules_test import Server

    from tests.chaos.node import Node

    folder = Path("/run/driver-faults")
    node = Node(vendor, Path(os.environ[LIBRARY]), folder / "log")
    folder.mkdir()  # in the /run of the node
    with contextlib.closing(node), FaultProxy(options.kubeconfig) as proxy:
        runs = FaultRuns(proxy, Scene(Server(options.kubeconfig), proxy, node, folder).play)
        requests = runs.record()
        for faults in [rotated(requests, 0)] if options.rotate else every(requests, part_of):
            if options.only in str(faults):
                runs.inject(faults)
        try:
            runs.conclude()
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
