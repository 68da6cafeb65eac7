# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Records of the modules' changes on a node: a written record can be read, and invalid content is reported."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host import docker_runtime, driver_packages
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd import (
    plan as containerd_plan,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker import (
    runtimes as docker_runtimes,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host import change_record
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError

KINDS: tuple[tuple[Any, Any], ...] = (
    (
        driver_packages,
        driver_packages.Record({"driver": {"version": "25.2"}}, {"driver": {"version": "25.0"}}, "boot", "firmware"),
    ),
    (docker_runtime, docker_runtime.Record(("/usr/local/Ascend",))),
    (
        containerd_plan,
        containerd_plan.Record({"/a": containerd_plan.Entry(True, "digest", {"b": 1})}, ("/c",), restart=True),
    ),
    (docker_runtimes, docker_runtimes.Record(None, "digest")),
)


@pytest.mark.parametrize(("module", "record"), KINDS)
def test_record_round_trips(module: Any, record: Any) -> None:
    assert module.read_record(record.to_text(), "/record") == record


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"version": 1}', '{"version": 2}', '"version"'])
@pytest.mark.parametrize("module", [module for module, _record in KINDS])
def test_record_invalid_text_is_named_with_remedy(module: Any, text: str) -> None:
    with pytest.raises(AcceleratorError, match=r"The record .*/record of .* cannot be read") as caught:
        module.read_record(text, "/record")
    assert caught.value.code == "damaged-record" and "record" in caught.value.hint


def test_record_unknown_version_is_named() -> None:
    with pytest.raises(AcceleratorError, match="version 2"):
        change_record.read('{"version": 2}', "/record", dict, of="changed", hint="Remove it.")
