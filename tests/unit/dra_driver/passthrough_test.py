# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims of whole devices for virtual machines: published, prepared, refused, and unprepared devices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER
from claim_steps import prepare, run, unprepare
from dra_driver.claims.store.records import record_of_document
from dra_driver.core.errors import AcceleratorError, InUse
from dra_driver.core.model import Process
from dra_driver.core.store.prepared_claims import prepared_claims
from dra_driver.core.vendors.nvidia.vendor import FACTS
from dra_driver.inventory import survey
from machine_model import Claims, Node

RULES = ({"match": {}, "mode": "dynamic", "passthrough": True},)
GPU, OTHER = "gpu-vfio-0", "gpu-vfio-1"


def config(**iommu: Any) -> list[dict[str, Any]]:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", "iommu": iommu}
    return [{"opaque": {"driver": DRIVER, "parameters": parameters}}]


def drivers(node: Node) -> list[str]:
    return [node.system.driver(node.gpus.template(index).pci_address) for index in range(node.gpus.count)]


def nodes(node: Node, uid: str) -> list[str]:
    (device,) = node.cdi(uid)["devices"]
    return [each["path"] for each in device["containerEdits"]["deviceNodes"]]


def offers_of(node: Node) -> Any:
    assert node.survey is not None
    return node.survey.offers, node.survey.counter_sets


def test_passthrough_claim_is_prepared_and_unprepared(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        before = offers_of(node)
        claim = claims.allocate("machine", GPU)
        assert await prepare(node, claim) == ""
        assert drivers(node) == ["vfio-pci", "nvidia"]
        assert nodes(node, claim.uid) == ["/dev/vfio/40", "/dev/vfio/vfio"]
        assert node.cdi(claim.uid)["containerEdits"] == {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}
        await node.scan()
        assert offers_of(node) == before, "nothing is published again"
        assert await prepare(node, claim) == ""
        assert await unprepare(node, claim) == ""
        assert drivers(node) == ["nvidia", "nvidia"] and node.cdi_files() == ()
        await node.scan()
        assert offers_of(node) == before

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_device_open_by_the_persistence_daemon_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The persistence daemon closes the device when the claim disables persistence mode: the device can be switched."""
    from dra_driver.core.host import device_users

    async def scenario(node: Node, claims: Claims) -> None:
        other: list[Process] = [Process(8, "monitor")]

        def persistence() -> bool:
            with node.gpus.state() as state:
                return bool(state[node.gpus.template(0).uuid]["knobs"]["persistence"])

        def users(_system: Any, _numbers: Any) -> tuple[Process, ...]:
            daemon = [Process(7, FACTS.persistence_daemon)] if persistence() else []
            return (*daemon, *other)

        monkeypatch.setattr(device_users, "find_device_users", users)
        claim = claims.allocate("machine", GPU)
        output = await prepare(node, claim)
        assert "8 (monitor)" in output and "persiste" not in output and persistence()
        other.clear()
        assert await prepare(node, claim) == "" and not persistence()
        assert drivers(node) == ["vfio-pci", "nvidia"]
        assert await unprepare(node, claim) == "" and persistence()

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_restart_keeps_the_detached_device(tmp_path: Path) -> None:
    claims = Claims()

    async def main() -> None:
        node = Node(tmp_path, claims, rules=RULES)
        await node.start()
        before = offers_of(node)
        claim = claims.allocate("machine", GPU)
        assert await prepare(node, claim) == ""
        node.close()
        node = Node(tmp_path, claims, rules=RULES)
        await node.scan()
        assert offers_of(node) == before
        await node.start()
        assert drivers(node) == ["vfio-pci", "nvidia"]
        assert await unprepare(node, claim) == ""
        assert drivers(node) == ["nvidia", "nvidia"]
        node.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kernel_has_it", "policy", "api_device", "expected"),
    [
        (True, "PreferIommuFD", True, ["/dev/vfio/devices/vfio0", "/dev/vfio/vfio", "/dev/iommu"]),
        (True, "PreferIommuFD", False, ["/dev/vfio/devices/vfio0", "/dev/vfio/vfio"]),
        (True, "LegacyOnly", True, ["/dev/vfio/40", "/dev/vfio/vfio"]),
        (False, "PreferIommuFD", True, ["/dev/vfio/40", "/dev/vfio/vfio"]),
    ],
)
def test_passthrough_interface_follows_claim_and_kernel(
    tmp_path: Path, kernel_has_it: bool, policy: str, api_device: bool, expected: list[str]
) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.system.iommufd = kernel_has_it
        claim = claims.allocate("machine", GPU, config=config(backendPolicy=policy, enableAPIDevice=api_device))
        assert await prepare(node, claim) == ""
        assert nodes(node, claim.uid) == expected

    run(tmp_path, scenario, rules=RULES)


@pytest.mark.parametrize("iommu", [{}, {"backendPolicy": "Both"}, {"backendPolicy": "LegacyOnly", "mode": 1}])
def test_passthrough_invalid_config_is_rejected_before_any_change(tmp_path: Path, iommu: dict[str, Any]) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        output = await prepare(node, claims.allocate("machine", GPU, config=config(**iommu)))
        assert "VfioDeviceConfig is wrong: iommu." in output and drivers(node) == ["nvidia", "nvidia"]
        assert node.store.claims == {} and node.system.written == []

    run(tmp_path, scenario, rules=RULES)


@pytest.mark.parametrize("held", ["gpu-0", "gpu-0-mig-1g10gb-19-0", {"device": "gpu-0", "adminAccess": True}])
def test_passthrough_device_of_another_claim_is_rejected(tmp_path: Path, held: Any) -> None:
    """The scheduler's counters prevent conflicts, but a claim with administrator access consumes none: a held device is refused."""

    async def scenario(node: Node, claims: Claims) -> None:
        other = claims.allocate("other", held)
        assert await prepare(node, other) == ""
        machine = claims.allocate("machine", GPU)
        assert "is still prepared for claim default/other" in await prepare(node, machine)
        assert await unprepare(node, other) == ""
        assert await prepare(node, machine) == ""
        assert "is still prepared for claim default/machine" in await prepare(node, other)

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_admin_access_is_rejected(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        output = await prepare(node, claims.allocate("machine", {"device": GPU, "adminAccess": True}))
        assert "changes nothing on a device" in output and drivers(node) == ["nvidia", "nvidia"]

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_device_in_use_names_the_processes(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with node.gpus.state() as state:
            state[node.gpus.template(0).uuid]["pids"] = [4711]
        output = await prepare(node, claims.allocate("machine", GPU))
        assert "cannot be passed through" in output and "4711" in output
        assert drivers(node) == ["nvidia", "nvidia"]

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_shared_iommu_group_names_the_other_devices(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.system.add("0000:ff:00.1", "40", "snd_hda_intel", "0x040300")
        output = await prepare(node, claims.allocate("machine", GPU))
        assert "its IOMMU group 40 holds 0000:ff:00.1 (snd_hda_intel) as well" in output
        assert node.store.claims == {}

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_second_device_fails_rolls_back_the_first(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        put, second = node.system.put, node.gpus.template(1).pci_address

        def refusing(path: str, text: str) -> None:
            if path.endswith("vfio-pci/bind") and text == second:
                raise OSError(16, "Device or resource busy")
            put(path, text)

        node.system.put = refusing  # type: ignore[method-assign]
        output = await prepare(node, claims.allocate("machine", GPU, OTHER))
        assert "Device or resource busy" in output
        assert drivers(node) == ["nvidia", "nvidia"] and node.store.claims == {} and node.cdi_files() == ()
        with node.gpus.state() as state:
            assert all(entry["knobs"]["persistence"] for entry in state.values())

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_running_virtual_machine_keeps_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dra_driver.core.host import passthrough

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("machine", GPU)
        assert await prepare(node, claim) == ""

        def busy(_system: Any, paths: Any, what: str, **_more: Any) -> None:
            raise InUse(f"{what} is in use: {', '.join(paths)} is open in 99 (qemu)", pids=[99])

        with monkeypatch.context() as patched:
            patched.setattr(passthrough, "require_unused", busy)
            output = await unprepare(node, claim)
        assert "/dev/vfio/40 is open in 99 (qemu)" in output
        assert claim.uid in node.store.claims and drivers(node) == ["vfio-pci", "nvidia"]
        assert await unprepare(node, claim) == "" and drivers(node) == ["nvidia", "nvidia"]

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_failed_reattach_keeps_the_claim(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("machine", GPU)
        assert await prepare(node, claim) == ""
        node.backend.failures["attach"] = [AcceleratorError("the kernel does not want to")]
        assert "does not want to" in await unprepare(node, claim)
        assert claim.uid in node.store.claims
        assert await unprepare(node, claim) == "" and drivers(node) == ["nvidia", "nvidia"]

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_without_the_rule_is_not_published(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert node.survey is not None
        names = {offer.name for offer in node.survey.offers}
        assert not names & {GPU, OTHER}
        with_rule = survey(node.backend, node.survey.findings, Node(tmp_path / "other", claims, rules=RULES).rules, {})
        assert {offer.name for offer in with_rule.offers} == names | {GPU, OTHER}

    (tmp_path / "other").mkdir()
    run(tmp_path, scenario)


def test_passthrough_claim_with_both_kinds_has_all_device_nodes(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("both", GPU, "gpu-1")
        assert await prepare(node, claim) == ""
        paths = {
            device["name"]: [each["path"] for each in device["containerEdits"]["deviceNodes"]]
            for device in node.cdi(claim.uid)["devices"]
        }
        assert sorted(paths.values()) == [["/dev/nvidia1"], ["/dev/vfio/40", "/dev/vfio/vfio"]]
        assert await unprepare(node, claim) == ""

    run(tmp_path, scenario, rules=RULES)


def test_passthrough_record_is_rejected_by_an_older_release(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("machine", GPU)) == ""
        assert await prepare(node, claims.allocate("plain", "gpu-1")) == ""
        away, plain = node.store.claims.values()
        assert '"version":4' in away.document and '"version":1' in plain.document
        assert '"passthrough"' not in plain.document
        assert record_of_document(away.document) == away
        (claim,) = (each for each in prepared_claims(str(node.folder / "state" / "state.db")) if each.away)
        assert claim.uid == away.uid and claim.away == away.passthrough_devices
        broken = away.document.replace('"former":"nvidia"', '"former":1')
        with pytest.raises(ValueError, match="a handover cannot be read"):
            record_of_document(broken)

    run(tmp_path, scenario, rules=RULES)
