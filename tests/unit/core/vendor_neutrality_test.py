# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Vendor code is in the vendor's directory: neither the core's own files nor the daemons contain a vendor's name or terms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dra_driver import core
from dra_driver.core.vendors.registry import BACKENDS, create

ROOT = Path(__file__).resolve().parents[3]
CORE = Path(core.__file__).parent
DAEMONS = ROOT / "roles/dra_driver/files/dra_driver"
FILES = sorted(
    path
    for path in (*CORE.rglob("*.py"), *DAEMONS.rglob("*.py"))
    if not re.search("_pb2(_grpc)?$", path.stem)
    and not {CORE / "vendors" / vendor for vendor in BACKENDS} & {*path.parents}
)
# Includes "npu" in advance.
VENDOR_WORDS = re.compile(
    r"nvidia|nvml|cuda|gpu|\bxid\b|\bmig(?!rat)|ascend|huawei|\bnpu|\bamd\b|multiprocessor|(copy|jpeg|ofa)Engine",
    re.IGNORECASE,
)
# The list of vendors is the only place that names all of them.
REGISTRY = re.compile(r"from \.(\w+)\.backend import \w+Backend\n|\n(BACKENDS|BY_RUNTIME|WITH_NETWORK_TOOLS): .*\n")


def vendor_words(text: str) -> list[str]:
    return [found.group() for found in VENDOR_WORDS.finditer(text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_shared_files_name_no_vendor(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path == CORE / "vendors/registry.py":
        text = REGISTRY.sub("", text)
    assert vendor_words(text) == []


def test_vendor_words_are_found_in_vendor_files() -> None:
    assert len(FILES) > 40
    assert vendor_words("a GPU, MIG and nvml_call; migration and input are no vendor's") == ["GPU", "MIG", "nvml"]
    for vendor in BACKENDS:
        assert any(vendor_words(path.read_text(encoding="utf-8")) for path in (CORE / "vendors" / vendor).glob("*.py"))


@pytest.mark.parametrize("vendor", BACKENDS)
def test_backend_has_all_members_for_daemons(vendor: str) -> None:
    backend = create(vendor)
    assert backend.vendor == vendor and backend.driver_name and backend.cdi_kind
    assert {kind.device_kind for kind in backend.config_kinds} <= {"device", "partition", "passthrough"}
