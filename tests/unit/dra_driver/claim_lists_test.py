# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Lists of waiting claims, which the active controller writes for each node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from controller_steps import CLAIMS, DRIVER, NODES, new_cleanup_loop, run, running, until
from dra_driver.api.client import ApiClient, ApiError
from dra_driver.claims.pre_binding_lists import MOST_CLAIMS, ListedClaim, awaited_allocation, read_list, write_list
from dra_driver.controller import claim_lists
from dra_driver.controller.claim_lists import list_text
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.facts import ClaimFacts
from hypothesis import given
from hypothesis import strategies as st
from object_server import ObjectServer

LISTS = "/api/v1/namespaces/drivers/configmaps"
SIGN = f"{LISTS}/waiting-claims"


def node(server: ObjectServer, name: str, **metadata: Any) -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    server.put(f"{NODES}/{name}", {"metadata": {"uid": f"uid-of-{name}", **metadata}, "status": ready})


def allocation(pool: str, *devices: str, at: str = "2026-01-01T00:00:00Z", driver: str = DRIVER) -> dict[str, Any]:
    """Return the status of a claim whose devices are prepared before the pod is bound."""
    results = [
        {"driver": driver, "pool": pool, "device": device, "bindingConditions": ["example.com/Prepared"]}
        for device in devices or ("gpu-0",)
    ]
    field = {"key": "metadata.name", "operator": "In", "values": [pool]}
    selector = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"allocation": {"devices": {"results": results}, "nodeSelector": selector, "allocationTimestamp": at}}


def claim(server: ObjectServer, name: str, status: dict[str, Any]) -> None:
    server.put(f"{CLAIMS}/{name}", {"metadata": {"namespace": "team", "uid": f"uid-{name}"}, "status": status})


def listed(server: ObjectServer, name: str) -> list[str]:
    """Return the names of the claims in the list of a node."""
    return [each.name for each in read_list(server.objects.get(f"{LISTS}/waiting-claims-{name}", {}))]


def writes(server: ObjectServer, name: str) -> int:
    """Return the number of requests that write the list of a node, including failed ones."""
    path = f"{LISTS}/waiting-claims-{name}"
    return sum(found == path and method in ("PATCH", "DELETE") for method, found in server.log)


def acting(client: ApiClient, **options: Any) -> Any:
    return running(new_cleanup_loop(client, ControllerMetrics(), driver_namespace="drivers", **options).run())


def test_list_of_a_node_has_its_waiting_claims(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        node(server, "a")
        node(server, "b")
        claim(server, "first", allocation("a"))
        async with acting(client):
            await until(lambda: listed(server, "a") == ["first"])
            claim(server, "second", allocation("a", "gpu-1", "gpu-2"))
            claim(server, "other", allocation("b"))
            claim(server, "foreign", allocation("a", driver="net.example.com"))
            plain = allocation("a")
            del plain["allocation"]["devices"]["results"][0]["bindingConditions"]
            claim(server, "bound-first", plain)
            await until(lambda: listed(server, "a") == ["first", "second"] and listed(server, "b") == ["other"])
            found = server.objects[f"{LISTS}/waiting-claims-a"]
            owner = {"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "uid-of-a"}
            assert found["metadata"]["ownerReferences"] == [owner]
            assert found["metadata"]["labels"]["app.kubernetes.io/component"] == "controller"
            await until(lambda: SIGN in server.objects)
            claim(server, "first", {})
            server.remove(f"{CLAIMS}/second")
            await until(lambda: f"{LISTS}/waiting-claims-a" not in server.objects)
            assert listed(server, "b") == ["other"]

    run(tmp_path, scenario)


def test_claims_of_other_nodes_cause_no_event_for_a_node(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for name in ("quiet", "busy"):
            node(server, name)
        claim(server, "kept", allocation("quiet"))
        async with acting(client):
            await until(lambda: listed(server, "quiet") == ["kept"])
            before = writes(server, "quiet")
            for number in range(200):
                claim(server, f"other-{number:03}", allocation("busy", f"gpu-{number}"))
                if number % 40 == 39:
                    await until(lambda number=number: len(listed(server, "busy")) == number + 1)
            assert writes(server, "quiet") == before
            version = server.objects[f"{LISTS}/waiting-claims-quiet"]["metadata"]["resourceVersion"]
            for number in range(200):
                claim(server, f"other-{number:03}", {})
            await until(lambda: f"{LISTS}/waiting-claims-busy" not in server.objects)
            assert server.objects[f"{LISTS}/waiting-claims-quiet"]["metadata"]["resourceVersion"] == version
            # Simultaneous claims cause one write.
            assert writes(server, "busy") < 40

    run(tmp_path, scenario)


def test_list_changes_with_the_allocation_only(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        node(server, "a")
        claim(server, "c", allocation("a"))
        async with acting(client):
            await until(lambda: listed(server, "a") == ["c"])
            (first,) = read_list(server.objects[f"{LISTS}/waiting-claims-a"])
            before = writes(server, "a")
            prepared = {"type": "Ready", "status": "True"}
            devices = [{"driver": DRIVER, "pool": "a", "device": "gpu-0", "conditions": [prepared]}]
            claim(server, "c", {**allocation("a"), "devices": devices})
            claim(server, "d", allocation("a", "gpu-1"))
            await until(lambda: listed(server, "a") == ["c", "d"])
            assert writes(server, "a") == before + 1
            claim(server, "c", allocation("a", "gpu-2"))
            await until(lambda: read_list(server.objects[f"{LISTS}/waiting-claims-a"])[0] != first)
            (again, _other) = read_list(server.objects[f"{LISTS}/waiting-claims-a"])
            assert again._replace(allocation="") == first._replace(allocation="")

    run(tmp_path, scenario)


@pytest.mark.parametrize(("status", "retry_after"), [(500, ""), (403, ""), (429, "0.2"), (404, "")])
def test_failed_write_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, retry_after: str
) -> None:
    monkeypatch.setattr(claim_lists, "RETRY_FIRST", 0.05)
    monkeypatch.setattr(claim_lists, "RETRY_SECONDS", 0.05)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        server.retry_after = retry_after
        server.refusals += [("PATCH", LISTS, status)] * 4
        node(server, "a")
        claim(server, "c", allocation("a"))
        async with acting(client):
            await until(lambda: listed(server, "a") == ["c"] and SIGN in server.objects)
            assert not server.refusals

    run(tmp_path, scenario)


@pytest.mark.parametrize("status", [403, 429, 500])
def test_sign_new_lists_are_refused_is_not_renewed_until_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    for name in ("RETRY_FIRST", "RETRY_LIMIT", "RETRY_SECONDS", "RENEW_SECONDS"):
        monkeypatch.setattr(claim_lists, name, 0.05)
    monkeypatch.setattr(claim_lists, "FAILING_SECONDS", 0.3, raising=False)

    def renewals(server: ObjectServer) -> int:
        return sum(found == SIGN and method == "PATCH" for method, found in server.log)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        node(server, "a")
        claim(server, "c", allocation("a"))
        async with acting(client):
            await until(lambda: listed(server, "a") == ["c"])
            request, is_refused = client.request, [True]

            async def refuse_new_lists(method: str, path: str, **options: Any) -> Any:
                if is_refused[0] and method == "PATCH" and path == f"{LISTS}/waiting-claims-b":
                    server.log.append((method, path))
                    raise ApiError("exceeded quota: configmaps", status=status, reason="Forbidden")
                return await request(method, path, **options)

            monkeypatch.setattr(client, "request", refuse_new_lists)
            node(server, "b")
            claim(server, "d", allocation("b"))
            await until(lambda: writes(server, "b") > 8)
            before = renewals(server)
            # Changes of existing lists show nothing about new ones.
            claim(server, "e", allocation("a", "gpu-1"))
            await until(lambda: listed(server, "a") == ["c", "e"])
            tried = writes(server, "b")
            await until(lambda: writes(server, "b") > tried + 8)
            assert renewals(server) == before
            is_refused[0] = False
            await until(lambda: listed(server, "b") == ["d"] and renewals(server) > before)

    run(tmp_path, scenario)


def test_sign_is_renewed_while_the_list_of_one_node_of_several_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server refuses one list, such as an immutable ConfigMap: this affects its node only."""
    for name in ("RETRY_FIRST", "RETRY_LIMIT", "RETRY_SECONDS", "RENEW_SECONDS"):
        monkeypatch.setattr(claim_lists, name, 0.05)
    monkeypatch.setattr(claim_lists, "FAILING_SECONDS", 0.1)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        apply = server._apply

        def refuse(path: str, present: Any, body: Any) -> Any:
            return server._error(422) if path.endswith("waiting-claims-d") else apply(path, present, body)

        server._apply = refuse  # type: ignore[method-assign]
        for name in "abcd":
            node(server, name)
            claim(server, name, allocation(name))
        async with acting(client):
            await until(lambda: writes(server, "d") > 8 and listed(server, "c") == ["c"])
            await asyncio.sleep(0.2)
            before = sum(each == ("PATCH", SIGN) for each in server.log)
            await until(lambda: sum(each == ("PATCH", SIGN) for each in server.log) > before + 2)

    run(tmp_path, scenario)


def test_changes_by_others_are_repaired(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        node(server, "a")
        claim(server, "c", allocation("a"))
        path = f"{LISTS}/waiting-claims-a"
        async with acting(client):
            await until(lambda: listed(server, "a") == ["c"])
            server.put(path, {**server.objects[path], "data": {"claims": ""}})
            await until(lambda: listed(server, "a") == ["c"])
            server.remove(path)
            await until(lambda: listed(server, "a") == ["c"])

    run(tmp_path, scenario)


def test_new_leader_corrects_lists_of_the_previous_one(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for name in ("a", "b", "c"):
            node(server, name)
            claim(server, f"of-{name}", allocation(name))
        async with acting(client):
            await until(lambda: all(listed(server, name) for name in "abc"))
        unchanged = server.objects[f"{LISTS}/waiting-claims-c"]
        server.remove(f"{CLAIMS}/of-a")
        claim(server, "more", allocation("b"))
        async with acting(client):
            await until(lambda: f"{LISTS}/waiting-claims-a" not in server.objects)
            await until(lambda: listed(server, "b") == ["more", "of-b"])
        assert server.objects[f"{LISTS}/waiting-claims-c"] == unchanged

    run(tmp_path, scenario)


def test_list_belongs_to_the_present_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_lists, "COMPARE_SECONDS", 0.2)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        claim(server, "c", allocation("a"))
        async with acting(client):
            await until(lambda: SIGN in server.objects)
            assert listed(server, "a") == [], "there is no Node that could own it"
            node(server, "a")
            await until(lambda: listed(server, "a") == ["c"])
            node(server, "a", uid="another")
            path = f"{LISTS}/waiting-claims-a"
            await until(lambda: server.objects[path]["metadata"]["ownerReferences"][0]["uid"] == "another")

    run(tmp_path, scenario)


@pytest.mark.parametrize("options", [{"may_act": lambda: False}, {"dry_run": True}])
def test_without_leadership_and_in_a_dry_run_nothing_is_written(tmp_path: Path, options: dict[str, Any]) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        node(server, "a")
        claim(server, "c", allocation("a"))
        measurements = ControllerMetrics()
        made = new_cleanup_loop(client, measurements, driver_namespace="drivers", **options)
        async with running(made.run()):
            await until(lambda: b"pass_duration_seconds_count 3" in measurements.text() or None)
            await asyncio.sleep(2 * claim_lists.GATHER_SECONDS + claim_lists.SPREAD_SECONDS)
        assert not [entry for entry in server.log if entry[0] in ("PATCH", "DELETE", "POST")]

    run(tmp_path, scenario)


def test_sign_is_written_soon_after_it_could_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_lists, "RETRY_SECONDS", 0.05)
    requested: list[bool] = []

    def may_act() -> bool:
        requested.append(len(requested) >= 3)
        return requested[-1]

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        async with acting(client, may_act=may_act):
            await until(lambda: SIGN in server.objects)

    run(tmp_path, scenario)


def test_list_has_a_limit_that_keeps_claims_without_devices() -> None:
    def facts(number: int, prepared: bool) -> ClaimFacts:
        name = f"{number:04}".rjust(253, "c")
        return ClaimFacts("n" * 63, name, "u" * 36, "a", (DRIVER,), (), (), False, prepared, "a", "0" * 8)

    prepared = [facts(number, True) for number in range(MOST_CLAIMS)]
    waiting = [facts(number, False) for number in range(MOST_CLAIMS, MOST_CLAIMS + 10)]
    text = list_text([*prepared, *waiting])
    assert len(text) < 1024 * 1024
    found = read_list({"data": {"claims": text}})
    assert len(found) == MOST_CLAIMS and {each.name for each in waiting} <= {each.name for each in found}
    assert text == list_text([*reversed(waiting), *reversed(prepared)])


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


@given(st.lists(st.builds(ListedClaim, NAMES, NAMES, NAMES, st.from_regex(r"[0-9a-f]{8}", fullmatch=True))))
def test_read_list_returns_the_written_list(claims: list[ListedClaim]) -> None:
    assert read_list({"data": {"claims": write_list(claims)}}) == tuple(claims)


@given(st.text())
def test_read_list_any_text_raises_no_error(text: str) -> None:
    assert all("/" not in each.namespace + each.name for each in read_list({"data": {"claims": text}}))


def test_read_list_skips_lines_with_invalid_names() -> None:
    lines = (
        "team/../../nodes u 00000000\nteam/c?x=1 u 00000000\nteam/c u 00000000\nteam/c u 00000000 more\n/c u 00000000"
    )
    assert read_list({"data": {"claims": lines}}) == (ListedClaim("team", "c", "u", "00000000"),)
    assert read_list({}) == read_list({"data": None}) == ()


def test_allocations_differ_by_their_time_and_devices() -> None:
    def of(*devices: str, **options: Any) -> tuple[str, str]:
        return awaited_allocation(allocation("a", *devices, **options), [DRIVER])

    assert of("x", "y") == of("y", "x")
    assert len({of("x"), of("y"), of("x", at="2026-01-01T00:00:01Z")}) == 3
    assert of("x", driver="net.example.com") == ("", "") == awaited_allocation({}, [DRIVER])
