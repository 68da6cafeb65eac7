# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Send invalid requests to the driver's real sockets, and prepare claims with invalid opaque configurations.

The driver keeps running and answers each of them. A refused request leaves nothing behind: not in the store, not in a
file, and not on the boards. Hypothesis generates them. Earlier findings are among the examples below, and the seed of a
run is printed. A shrunk failure is kept in its database (``HYPOTHESIS_STORAGE_DIRECTORY``), so that the next run begins
with it.
"""

from __future__ import annotations

import copy
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from dra_driver.protocol import (
    dra_health_v1_pb2,
    dra_health_v1alpha1_pb2,
    dra_v1_pb2,
    dra_v1beta1_pb2,
    plugin_registration_pb2,
)
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.chaos.errors import Broken, CrashLoop, Leaked
from tests.chaos.node import CDI, COMPANIONS, REGISTRY, Node
from tests.chaos.prepared_claims import PreparedClaims
from tests.chaos.results import Row
from tests.chaos.snapshot import paths_below
from tests.chaos.vendor import FuzzConfiguration

V1, V1BETA1 = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
PREPARE, UNPREPARE = "NodePrepareResources", "NodeUnprepareResources"
DRA = tuple(f"/{service}/{method}" for service in (V1, V1BETA1) for method in (PREPARE, UNPREPARE))
REGISTRATION = tuple(f"/pluginregistration.Registration/{method}" for method in ("GetInfo", "NotifyRegistrationStatus"))
#: The streams of device health, with the module of their messages.
HEALTH_STREAMS: dict[str, Any] = {
    "/v1.DRAResourceHealth/NodeWatchResources": dra_health_v1_pb2,
    "/v1alpha1.DRAResourceHealth/NodeWatchResources": dra_health_v1alpha1_pb2,
}
UNKNOWN_METHODS = (f"/{V1}/NodeDestroyEverything", "/grpc.health.v1.Health/Check", "/", "//")
#: grpcio's error for an unreadable request, and its other possible errors: an unknown method, and a registration that
#: the kubelet reports as failed.
DECODE_ERROR = "google.protobuf.message.DecodeError"
EXPECTED_CODES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION}
ANSWER_SECONDS = 30.0
EXAMPLES = 1000
#: Values with which an attacker would try to access other files, objects, and rows.
MALICIOUS_TEXTS = (
    "",
    ".",
    "..",
    "../..",
    "../../plugins_registry",
    "/etc",
    "a/../b",
    "%2e%2e",
    "x\0y",
    "a" * 300,
    "?watch=1",
    "'; DROP TABLE claims",
)

Call = tuple[str, bytes]


def as_bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString())


texts = st.one_of(
    st.sampled_from(MALICIOUS_TEXTS), st.sampled_from(("default", "static", "kube-system")), st.text(max_size=30)
)
claims = st.builds(dra_v1_pb2.Claim, namespace=texts, name=texts, uid=texts)
requests = st.lists(claims, max_size=4).map(
    lambda found: as_bytes(dra_v1_pb2.NodePrepareResourcesRequest(claims=found))
)
reported = st.builds(plugin_registration_pb2.RegistrationStatus, plugin_registered=st.booleans(), error=texts).map(
    as_bytes
)


def mutate(data: bytes, changes: list[tuple[int, int, int]]) -> bytes:
    """Change, insert, and remove bytes at places of a message."""
    found = bytearray(data)
    for way, place, value in changes:
        where = place % (len(found) + 1)
        if way == 0:
            found[where:where] = bytes([value])
        elif way == 1:
            del found[where : where + 1 + value % 4]
        elif where < len(found):
            found[where] = value
    return bytes(found)


changes = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8)
bodies = st.one_of(requests, st.builds(mutate, requests, changes), st.binary(max_size=200))
calls = st.one_of(
    st.tuples(st.sampled_from(DRA), bodies),
    st.tuples(st.sampled_from(REGISTRATION), st.one_of(reported, bodies)),
    st.tuples(st.sampled_from(sorted(HEALTH_STREAMS)), bodies),
    st.tuples(st.sampled_from(UNKNOWN_METHODS), bodies),
)


def request_of_claim(namespace: str, name: str, uid: str) -> bytes:
    """Return a request about one claim."""
    return as_bytes(
        dra_v1_pb2.NodePrepareResourcesRequest(claims=[dra_v1_pb2.Claim(namespace=namespace, name=name, uid=uid)])
    )


#: Earlier findings, which are always tried first.
EARLIER_FINDINGS: tuple[list[Call], ...] = (
    [(DRA[1], request_of_claim("default", "static", ".."))],  # removed the driver's own directory
    [(DRA[1], request_of_claim("", "", ""))],  # removed the files with device attributes of all containers
    [(DRA[0], request_of_claim("..", "../../nodes/node-1", "u"))],  # requested another object from the API server
)


class NodeState:
    """All state that a refused request could change, in a form that is fast to read."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._store = sqlite3.connect(f"file:{node.store}?mode=ro", uri=True)

    def __call__(self) -> dict[str, Any]:
        return {
            "hardware": self._node.vendor.hardware(self._node.silicon),
            "made again": self._node.vendor.recreated_partitions(),
            "claims": self._store.execute("SELECT * FROM claims ORDER BY uid").fetchall(),
            "meta": self._store.execute("SELECT * FROM meta ORDER BY key").fetchall(),
            "state": [
                name
                for name in paths_below(self._node.state)
                if not name.startswith(("state.db", "health.json", "locks"))
            ],
            "registry": paths_below(REGISTRY),
            "cdi": [name for name in paths_below(CDI) if name != self._node.metadata.name],
            "companions": sorted(os.listdir(COMPANIONS)),
        }

    def close(self) -> None:
        self._store.close()


def assert_running(node: Node) -> None:
    """Raise CrashLoop if the driver has ended, after a new one was started for the next examples."""
    if node.has_ended():
        status, said = node.wait_ended(), node.log_tail()
        node.start()
        raise CrashLoop(f"the driver ended with {status}\n{said}")


def send(channels: dict[str, grpc.Channel], call: Call) -> tuple[Call, Any]:
    """Begin one call with raw bytes."""
    path, body = call
    channel = channels["registration" if path in REGISTRATION else "service"]
    if path in HEALTH_STREAMS:
        return call, channel.unary_stream(path)(body, timeout=ANSWER_SECONDS)
    return call, channel.unary_unary(path).future(body, timeout=ANSWER_SECONDS)


def check_answer(call: Call, answer: Any) -> None:
    """Assert that a call was answered for the claims in its request. Raises Broken."""
    path, body = call
    try:
        if path in HEALTH_STREAMS:
            HEALTH_STREAMS[path].NodeWatchResourcesResponse.FromString(next(answer))
            answer.cancel()
            return
        said = answer.result()
    except grpc.RpcError as error:
        code = error.code()  # type: ignore[attr-defined]
        if code not in EXPECTED_CODES and DECODE_ERROR not in str(error.details()):  # type: ignore[attr-defined]
            raise Broken(f"{path} of {body!r} was answered with {code}: {error}") from None
        return
    if path in DRA:
        messages = dra_v1_pb2 if V1 in path else dra_v1beta1_pb2
        method = path.rpartition("/")[2]
        asked = {claim.uid for claim in getattr(messages, f"{method}Request").FromString(body).claims}
        found = getattr(messages, f"{method}Response").FromString(said).claims
        if set(found) != asked:
            raise Broken(f"{path} of {body!r} was answered for {sorted(found)}, and asked for {sorted(asked)}")
        if method == PREPARE and not all(entry.error for entry in found.values()):
            raise Broken(f"{path} of {body!r}: a claim that does not exist was prepared: {found}")


def database() -> DirectoryBasedExampleDatabase:
    folder = Path(os.environ.get("HYPOTHESIS_STORAGE_DIRECTORY") or Path.home() / ".cache/dra-accelerators/hypothesis")
    return DirectoryBasedExampleDatabase(folder / "chaos")


def rounds(number: int, examples: int, test: Callable[..., None]) -> Callable[[], None]:
    """Return a Hypothesis test as one round of a run, with its own seed and number of examples."""
    made = settings(
        max_examples=examples,
        deadline=None,
        database=database(),
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],
        print_blob=True,
        report_multiple_bugs=False,
    )(test)
    found: Callable[[], None] = seed(number)(made)
    return found


def fuzz_requests(node: Node, row: Row, *, number: int, count: int, seconds: float) -> None:
    """Send ``count`` requests to the sockets, many of them in parallel."""
    held_claims = PreparedClaims(node, ("static",))
    seen = NodeState(node)
    state = {"seen": seen()}  # the end of one example is the start of the next
    channels = {
        "service": grpc.insecure_channel(f"unix:{node.state}/dra.sock"),
        "registration": grpc.insecure_channel(f"unix:{REGISTRY}/{node.driver}-reg.sock"),
    }

    def requests_on_the_sockets(batch: list[Call]) -> None:
        before = state["seen"]
        for call, answer in [send(channels, call) for call in batch]:
            check_answer(call, answer)
            row.runs += 1
        assert_running(node)
        after = state["seen"] = seen()
        if after != before:
            changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
            raise Leaked(f"refused requests have changed {changed}")
        node.api.clear_records()

    def test() -> Callable[..., None]:
        made = given(st.lists(calls, min_size=1, max_size=40))(requests_on_the_sockets)
        for batch in EARLIER_FINDINGS:
            made = example(batch)(made)
        return made

    try:
        repeat(test, row, number=number, count=count, seconds=seconds, each=5)
    finally:
        seen.close()
        for channel in channels.values():
            channel.close()
    node.wait_serving()  # some requests reported to the driver that the kubelet refuses it
    held_claims.await_prepared(ignoring=("meta",))
    held_claims.release()


def repeat(
    test: Callable[[], Callable[..., None]], row: Row, *, number: int, count: int, seconds: float, each: int
) -> None:
    """Repeat rounds of a test until ``count`` requests or the time limit. ``each`` is the average number of requests per example."""
    began, target = time.monotonic(), row.runs + count
    turn = 0
    while row.runs < target and time.monotonic() - began < seconds:
        left = target - row.runs
        rounds(number * 1000 + turn, min(EXAMPLES, max(1, left // each)), test())()
        turn += 1


def misplaced_values(words: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Return a strategy for misplaced values. ``words`` are valid in other places."""
    return st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            texts,
            st.sampled_from(("-1", "1e400", "9" * 40, *words, 10**30, -1, 0)),
        ),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
        max_leaves=6,
    )


def edits(words: tuple[str, ...]) -> st.SearchStrategy[list[tuple[int, int, str, Any]]]:
    """Return a strategy for changes of a configuration."""
    each = st.tuples(st.integers(0, 3), st.integers(0, 1000), texts, misplaced_values(words))
    return st.lists(each, min_size=1, max_size=3)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a document with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutate_configuration(config: Mapping[str, Any], changes: list[tuple[int, int, str, Any]]) -> dict[str, Any]:
    """Return a configuration with values replaced, and fields removed, added, and renamed anywhere in its parameters."""
    made = copy.deepcopy(dict(config))
    for way, place, name, value in changes:
        found = list(places(made["opaque"]))[1:]  # without the driver's name
        container, key = found[place % len(found)]
        if way == 0:
            container[key] = value
        elif isinstance(container, dict) and container is not made["opaque"]:
            kept = container.pop(key) if way in (1, 3) else value
            if way != 1:
                container[name] = kept
    return made


def fuzz_opaque_configurations(node: Node, row: Row, *, number: int, count: int, seconds: float) -> None:
    """Prepare ``count`` claims with invalid or almost valid opaque configurations: they are refused, or prepared and unprepared."""
    PreparedClaims(node, ("static",)).release()  # creates the directories that stay
    seen = NodeState(node)
    state = {"seen": seen()}
    one_claim = st.tuples(st.sampled_from(node.vendor.fuzz_configurations), edits(node.vendor.fuzz_words))

    def opaque_configurations(found: tuple[FuzzConfiguration, list[tuple[int, int, str, Any]]]) -> None:
        (devices, config), changes = found
        before = state["seen"]
        uid = node.api.allocate("fuzzed", *devices, config=[mutate_configuration(config, changes)])
        answer = node.call_once(PREPARE, "fuzzed", uid)
        row.runs += 1
        assert_running(node)
        if not answer.error:
            node.unprepare("fuzzed", uid)
            row.runs += 1
        elif "See the driver's log" in answer.error:
            raise Broken(f"a configuration was rejected with an unexpected error: {answer.error}")
        after = state["seen"] = seen()
        if after != before:
            changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
            raise Leaked(
                f"{'a rejected configuration has' if answer.error else 'an unprepared claim has'} changed {changed}"
            )
        node.api.clear_records()

    try:
        repeat(
            lambda: given(one_claim)(opaque_configurations), row, number=number, count=count, seconds=seconds, each=1
        )
    finally:
        seen.close()
