# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Collect the facts for ``explain``: stores, API server, CDI file, systemd, kubelet, and journal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from ..api.client import ApiError
from ..api.resources import ResourceApi
from ..claims.store.records import ClaimRecord
from ..core.errors import AcceleratorError
from ..core.host.cdi import spec_path
from ..status_command import companions_of
from .claims import containers_of, containers_with, programs_of
from .explain import Facts
from .node import DriverOnNode, Node, ask_api

UNIT = "dra-accelerators-driver.service"
JOURNAL_SECONDS = 20.0
LINES = 5


class UnknownClaim(AcceleratorError):
    """The argument matches several claims."""

    default_code = "unknown-claim"


def facts_of(node: Node, claim: str, kubeconfig: str = "") -> list[Facts]:
    """Return the facts about a claim, one item for each driver of the node. Raises UnknownClaim."""
    recorded = node.find(claim)
    names = {record.describe() for _driver, record in recorded}
    if len(names) > 1:
        raise UnknownClaim(f"{claim} means several claims: {', '.join(sorted(names))}", hint="Name the namespace.")
    name = names.pop() if names else claim if "/" in claim else f"default/{claim}"
    namespace, _slash, short = name.partition("/")
    found = []
    for driver in node.drivers:
        record = next((each for owner, each in recorded if owner is driver), None)
        found.append(_facts(node, driver, namespace, short, record, kubeconfig or node.configuration.kubeconfig))
    return found


def _facts(
    node: Node, driver: DriverOnNode, namespace: str, name: str, record: ClaimRecord | None, kubeconfig: str
) -> Facts:
    answers, api_problem = ask_api(kubeconfig, lambda api: _ask(api, driver.name, node, namespace, name))
    asked: dict[str, Any] = answers or {}
    claim: Mapping[str, Any] | None = asked.get("claim")
    uid = ((claim or {}).get("metadata") or {}).get("uid") or (record.uid if record else "")
    path = spec_path(node.configuration.cdi_directory, driver.backend.cdi_kind, record.uid) if record else ""
    slices = asked.get("slices")
    companions = companions_of(node.system)
    return Facts(
        name=f"{namespace}/{name}",
        driver=driver.name,
        pool=driver.pool,
        boot_id=node.system.boot_id(),
        claim=claim,
        api_problem=api_problem or asked.get("problem", ""),
        record=record,
        store_problem=driver.stored.problem,
        others=[each for each in driver.stored.records if record is None or each.uid != record.uid],
        published=None if slices is None else [each for item in slices for each in item["spec"].get("devices") or ()],
        counters=[each for item in slices or () for each in item["spec"].get("sharedCounters") or ()],
        faults={each["uuid"]: each["fault"] for each in driver.status["devices"] if each["fault"]},
        problems=driver.status["problems"],
        runs=driver.runs,
        cdi_path=path,
        cdi=_file(node, path),
        companions=programs_of(companions, record) if record else companions.get(uid, []),
        containers=containers_with(containers_of(node), record) if record is not None else (),
        said=_journal(node, uid, f"{namespace}/{name}"),
    )


async def _ask(api: ResourceApi, driver: str, node: Node, namespace: str, name: str) -> dict[str, Any]:
    """Return the claim and the slices from the API server. A failure to read the claim is returned as "problem"."""
    answer: dict[str, Any] = {}
    api.client.opaque_of.add(driver)
    try:
        answer["claim"] = await api.claim(namespace, name)
    except ApiError as error:
        answer["problem"] = f"there is no claim {namespace}/{name}" if error.is_not_found else str(error)
    answer["slices"] = (await api.list_slices(driver, node.configuration.node_name))[0]
    return answer


def _file(node: Node, path: str) -> Mapping[str, Any] | None:
    if path:
        with contextlib.suppress(OSError, ValueError):
            document: Mapping[str, Any] = json.loads(node.system.read_text(path))
            return document
    return None


def _journal(node: Node, uid: str, name: str) -> list[str]:
    """Return the driver's last log lines about a claim. Empty without a journal."""
    command = ["journalctl", "--no-pager", "--output=cat", "--lines=2000", f"--unit={UNIT}"]
    with contextlib.suppress(AcceleratorError):
        lines = node.system.run(command, timeout=JOURNAL_SECONDS).stdout.splitlines()
        meant = (uid,) if uid else (f"claim={name} ", f'"{name}"')
        return [line for line in lines if any(each in line for each in meant)][-LINES:]
    return []
