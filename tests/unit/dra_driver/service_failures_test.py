# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Failures of claims leave nothing behind, are undone later if necessary, and are reported with a remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from claim_steps import SMALL, SMALL_2, prepare_all, run, unprepare_all
from dra_driver.core.errors import AcceleratorError, InUse
from machine_model import Claims, Node


@pytest.mark.parametrize("method", ["set_partitioning", "create_partition", "device"])
def test_failing_hardware_leaves_nothing_behind(tmp_path: Path, method: str) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL, "gpu-1-mig-2g20gb-14-0")
        node.backend.failures[method] = [InUse("Processes hold the GPU", pids=[17], hint="Stop them.")]
        (error,) = await prepare_all(node, claim)
        assert "Stop them" in error
        assert (node.partitions(), node.cdi_files(), node.store.claims) == ([], (), {})
        assert not any(device.partitioning.enabled for device in node.gpus.devices())
        assert set(node.store.meta) == {"schema_version"}
        assert await prepare_all(node, claim) == [""]

    run(tmp_path, scenario)


def test_claim_that_could_not_be_undone_is_undone_later(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        real = node.service.hardware.write_cdi

        def fails(*arguments: Any) -> None:
            node.backend.failures["destroy_partition"] = [InUse("busy")] * 2
            raise AcceleratorError("no space left on device")

        object.__setattr__(node.service.hardware, "write_cdi", fails)
        assert "no space" in (await prepare_all(node, claim))[0]
        assert not node.store.claims[claim.uid].prepared
        with pytest.raises(InUse):
            await node.service.forget(claim.uid, prepared_too=False)
        await node.service.forget(claim.uid, prepared_too=False)
        assert (node.store.claims, node.partitions()) == ({}, [])
        object.__setattr__(node.service.hardware, "write_cdi", real)
        assert await prepare_all(node, claim) == [""]
        await node.service.forget(claim.uid, prepared_too=False)
        assert node.store.claims[claim.uid].prepared

    run(tmp_path, scenario)


def test_files_that_cannot_be_written_are_named_with_what_to_do_and_leave_nothing(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        real = node.service.hardware.write_cdi

        def fails(*arguments: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/var/run/cdi/x.json")

        object.__setattr__(node.service.hardware, "write_cdi", fails)
        (error,) = await prepare_all(node, claim)
        assert "Read-only file system: '/var/run/cdi/x.json'. Check that the disk is not full or read-only" in error
        assert "See the driver's log" not in error
        assert (node.partitions(), node.cdi_files(), node.store.claims) == ([], (), {})
        object.__setattr__(node.service.hardware, "write_cdi", real)
        assert await prepare_all(node, claim) == [""]

    run(tmp_path, scenario)


def test_second_partition_failing_takes_the_first_back(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL, SMALL_2)
        real = node.backend.create_partition
        made = []

        def second_fails(*arguments: Any) -> Any:
            if made:
                raise AcceleratorError("NVML error 999")
            made.append(real(*arguments))
            return made[0]

        node.backend.create_partition = second_fails  # type: ignore[method-assign]
        assert "999" in (await prepare_all(node, claim))[0]
        assert made
        assert (node.partitions(), node.store.claims) == ([], {})

    run(tmp_path, scenario)


def test_prepare_unwritable_cdi_directory_fails(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        (tmp_path / "root/var/run").mkdir(parents=True, exist_ok=True)
        (tmp_path / "root/var/run/cdi").write_text("a file")
        claim = claims.allocate("a", SMALL)
        (error,) = await prepare_all(node, claim)
        assert error
        assert node.partitions() == []
        (tmp_path / "root/var/run/cdi").unlink()
        assert await prepare_all(node, claim) == [""]
        assert len(node.partitions()) == 1

    run(tmp_path, scenario)


def test_partition_in_use_blocks_unprepare_until_it_is_free(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare_all(node, claim) == [""]
        gpu = node.gpus.template(0).uuid
        with node.gpus.state() as state:
            state[gpu]["partitions"][0]["pids"] = [4711]
        assert "in use" in (await unprepare_all(node, claim))[0]
        assert claim.uid in node.store.claims
        with node.gpus.state() as state:
            state[gpu]["partitions"][0]["pids"] = []
        assert await unprepare_all(node, claim) == [""]
        assert node.partitions() == []

    run(tmp_path, scenario)


def test_prepared_claim_whose_file_is_lost_is_mended(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare_all(node, claim) == [""]
        before = node.cdi(claim.uid)
        node.service.hardware.remove_cdi(claim.uid)
        assert await prepare_all(node, claim) == [""]
        assert node.cdi(claim.uid) == before

    run(tmp_path, scenario)
