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
from ..status_command import companion_units
from .claims import companions_for, containers_of, containers_using
from .explain import Facts
from .node import DriverOnNode, Node, query_api

DRIVER_UNIT = "dra-accelerators-driver.service"
# The timeout, in seconds, of the query of the journal, and the maximum number of returned lines.
JOURNAL_SECONDS = 20.0
MAX_LOG_LINES = 5


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
    answers, api_problem = query_api(kubeconfig, lambda api: _read_api_objects(api, driver.name, node, namespace, name))
    api_objects: dict[str, Any] = answers or {}
    claim: Mapping[str, Any] | None = api_objects.get("claim")
    uid = ((claim or {}).get("metadata") or {}).get("uid") or (record.uid if record else "")
    path = spec_path(node.configuration.cdi_directory, driver.backend.cdi_kind, record.uid) if record else ""
    slices = api_objects.get("slices")
    companions = companion_units(node.system)
    return Facts(
        name=f"{namespace}/{name}",
        driver=driver.name,
        pool=driver.pool,
        boot_id=node.system.boot_id(),
        claim=claim,
        api_problem=api_problem or api_objects.get("problem", ""),
        record=record,
        store_problem=driver.stored.problem,
        others=[each for each in driver.stored.records if record is None or each.uid != record.uid],
        published=None if slices is None else [each for item in slices for each in item["spec"].get("devices") or ()],
        counters=[each for item in slices or () for each in item["spec"].get("sharedCounters") or ()],
        faults={each["uuid"]: each["fault"] for each in driver.status["devices"] if each["fault"]},
        problems=driver.status["problems"],
        runs=driver.runs,
        cdi_path=path,
        cdi=_read_cdi_file(node, path),
        companions=companions_for(companions, record) if record else companions.get(uid, []),
        containers=containers_using(containers_of(node), record) if record is not None else (),
        log_lines=_read_journal(node, uid, f"{namespace}/{name}"),
    )


async def _read_api_objects(api: ResourceApi, driver: str, node: Node, namespace: str, name: str) -> dict[str, Any]:
    """Return the claim and the slices from the API server. A failure to read the claim is returned as "problem"."""
    answer: dict[str, Any] = {}
    api.client.opaque_of.add(driver)
    try:
        answer["claim"] = await api.claim(namespace, name)
    except ApiError as error:
        answer["problem"] = f"there is no claim {namespace}/{name}" if error.is_not_found else str(error)
    answer["slices"] = (await api.list_slices(driver, node.configuration.node_name))[0]
    return answer


def _read_cdi_file(node: Node, path: str) -> Mapping[str, Any] | None:
    if path:
        with contextlib.suppress(OSError, ValueError):
            document: Mapping[str, Any] = json.loads(node.system.read_text(path))
            return document
    return None


def _read_journal(node: Node, uid: str, name: str) -> list[str]:
    """Return the driver's last log lines about a claim. Empty without a journal."""
    command = ["journalctl", "--no-pager", "--output=cat", "--lines=2000", f"--unit={DRIVER_UNIT}"]
    with contextlib.suppress(AcceleratorError):
        lines = node.system.run(command, timeout=JOURNAL_SECONDS).stdout.splitlines()
        patterns = (uid,) if uid else (f"claim={name} ", f'"{name}"')
        return [line for line in lines if any(each in line for each in patterns)][-MAX_LOG_LINES:]
    return []
