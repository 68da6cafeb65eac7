# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Fuzz the parsers of the core: opaque configurations, CDI edits, quantities, mig-parted files, and tool outputs.

Each parser raises its documented errors only, within bounded memory and processor time (tests/unit/bounded.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from dra_driver.core import quantity
from dra_driver.core.dra.opaque_config import ConfigRefused, decode_configuration
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host.cdi import ContainerEdits, build_spec, validate_spec
from dra_driver.core.vendors.ascend import configs as ascend_configs
from dra_driver.core.vendors.ascend.npu_smi import npu_smi_output
from dra_driver.core.vendors.nvidia import configs as nvidia_configs
from dra_driver.core.vendors.nvidia.mig_parted import rules_from_mig_parted
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.bounded import run_bounded

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=40)
    | st.sampled_from(["/dev/nvidia0", "A=b", "createContainer", "1Gi", "9" * 5000, "\x00", "\ud800", "{{ 1 }}"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=20), inner, max_size=6),
    max_leaves=20,
)
EDIT_KEYS = st.sampled_from(["env", "deviceNodes", "mounts", "hooks", "additionalGids", "other"])
ENTRY_KEYS = st.sampled_from(
    [
        "path",
        "hostPath",
        "containerPath",
        "hookName",
        "args",
        "env",
        "timeout",
        "type",
        "permissions",
        "major",
        "options",
    ]
)
ENTRIES = st.lists(st.dictionaries(ENTRY_KEYS, JSON, max_size=5) | JSON, max_size=4)
EDITS = st.dictionaries(EDIT_KEYS, ENTRIES | JSON, max_size=5)
KINDS = (*nvidia_configs.CONFIG_KINDS, *ascend_configs.CONFIG_KINDS)


def length_of(value: Any) -> int:
    return len(repr(value))


@st.composite
def opaque_parameters(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters with the identity of a known kind, and known and unknown fields with any value."""
    kind = draw(st.sampled_from(KINDS))
    names = st.sampled_from([*kind.record.fields, "unknown"]) | st.text(max_size=20)
    content = draw(st.dictionaries(names, JSON, max_size=8))
    return {**content, "apiVersion": kind.api_version, "kind": kind.name}


@given(st.one_of(opaque_parameters(), st.dictionaries(st.text(max_size=20), JSON, max_size=8)))
@example({"apiVersion": "x" * 100_000, "kind": ["y"] * 100_000})
@example(
    {
        "apiVersion": KINDS[0].api_version,
        "kind": KINDS[0].name,
        **{f"{number:04}{'k' * 60}": 1 for number in range(3000)},
    }
)
def test_opaque_configuration_any_value_raises_documented_error(parameters: dict[str, Any]) -> None:
    run_bounded(decode_configuration, KINDS, parameters, errors=(ConfigRefused,), size=length_of(parameters))


@given(EDITS | JSON)
@example({"env": [5]})
@example({"deviceNodes": [{"path": "/dev/x", "permissions": 7}]})
@example({"hooks": [{"hookName": "createContainer", "path": "/x", "timeout": "soon"}]})
@example({"mounts": [{"hostPath": ["/"], "containerPath": "/x", "options": 3}]})
def test_container_edits_any_value_raises_value_error(edits: Any) -> None:
    found = run_bounded(ContainerEdits.from_dict, edits, errors=(ValueError,), size=length_of(edits))
    if found:
        # Accepted edits are a valid CDI file, which JSON can hold.
        text = json.dumps(build_spec("vendor.com/device", {"one": found}))
        validate_spec(json.loads(text))


@given(st.text(max_size=60) | st.integers() | JSON)
@example("9" * 100_000)
@example("1e999")
@example({"": ["9" * 20_000]})
@example("٣")
def test_quantity_any_value_raises_value_error(value: Any) -> None:
    run_bounded(quantity.parse, value, errors=(ValueError,), size=length_of(value))


@given(JSON | st.fixed_dictionaries({"version": st.just("v1"), "mig-configs": st.dictionaries(st.just("all"), JSON)}))
def test_mig_parted_file_any_value_raises_accelerator_error(document: Any) -> None:
    run_bounded(rules_from_mig_parted, document, "all", (), errors=(AcceleratorError,), size=length_of(document))


WORDS = st.sampled_from(
    [
        "NPU ID", "Chip ID", "Chip Logic ID", "Phy-ID", "Name", "AICORE", "VPC", "Vnpu ID", "Template Name", "Health", "Power(W)",
        "Process id", "Container ID", "Memory(GB)", "Bus-Id", "HBM-Usage(MB)", "NPU0", "CPU Affinity", "|", "+---+", "OK", ":", "/",
        "0", "7", "³", "0x1F", "-1", "NA", "9" * 5000,
    ]
)  # fmt: skip
LINES = st.lists(WORDS | st.text(max_size=12), max_size=10).map(" ".join)
OUTPUTS = st.lists(LINES, max_size=12).map("\n".join) | st.text(max_size=300)


@pytest.mark.parametrize(
    "parse",
    [
        npu_smi_output.parse_chips, npu_smi_output.parse_chip_numbers, npu_smi_output.parse_templates, npu_smi_output.parse_vnpus,
        npu_smi_output.parse_health, npu_smi_output.parse_links, npu_smi_output.parse_is_container_mode, npu_smi_output.parse_are_dies_separate,
        npu_smi_output.parse_is_recovery_on, npu_smi_output.parse_is_shared, npu_smi_output.parse_driver_version,
    ],
    ids=lambda parse: parse.__name__,
)  # fmt: skip
@given(output=OUTPUTS)
@example(output="| " * 20_000)
@example(output="NPU ID : ³")
@example(output="Name AICORE Memory(GB)\n" + "vir01 1 1\n" * 2000)
def test_npu_smi_output_any_text_raises_unread_output(parse: Callable[[str], Any], output: str) -> None:
    run_bounded(parse, output, errors=(npu_smi_output.UnexpectedOutput,), size=len(output))


@given(status=st.integers(-255, 255), output=OUTPUTS)
def test_npu_smi_failure_any_text_raises_accelerator_error(status: int, output: str) -> None:
    run_bounded(
        npu_smi_output.raise_failure, status, output, "Creating a vNPU", errors=(AcceleratorError,), size=len(output)
    )
