# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The protocol of the DCMI helper: values that it transfers unchanged, and rejected requests."""

from __future__ import annotations

import inspect
import json
from fractions import Fraction
from typing import Any

import pytest
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, DeviceFaulty, InUse, NotFound
from dra_driver.core.model import Process
from dra_driver.core.vendors.ascend.attributes import SuperPod
from dra_driver.core.vendors.ascend.dcmi import messages
from dra_driver.core.vendors.ascend.dcmi.dcmi import Spot
from dra_driver.core.vendors.ascend.dcmi.helper import Helper
from dra_driver.core.vendors.ascend.readings import (
    NETWORK,
    Condition,
    Identity,
    SliceReading,
    SliceReadings,
    Source,
    Told,
    Work,
)

SPOT = Spot(2, 1)
POD = SuperPod(1, 2, 3, 4) if len(inspect.signature(SuperPod).parameters) == 4 else None
VALUES = (
    None,
    "",
    True,
    (Spot(0), SPOT),
    Identity(2, 3, "NPU-1", "910B", "0000:1b:00.0", 0xD80219E5, board_id=None, super_pod=POD),
    SliceReadings(
        {"aiCores": Fraction(20), "aiCPU": Fraction(7, 2)}, (SliceReading(132, "vir01", None, True, cores=Fraction(1)),)
    ),
    Condition(2, (0x80E18402,), None),
    Work(power=1.5, clocks={"memory": 1e9}),
    Work(),
    (Process(12, "python"),),
    {"aiCores": Fraction(1, 3)},
)
GOOD = {"version": messages.VERSION, "method": "uuid", "arguments": [[0, 0]]}


@pytest.mark.parametrize("value", VALUES)
def test_result_is_transferred_unchanged(value: Any) -> None:
    line = messages.result(value)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert messages.parse_reply(line) == value


def test_event_is_transferred_unchanged() -> None:
    reported = Told(3, 0x80E18402, None, "name")
    assert messages.parse_reply(messages.event(reported)) == reported


@pytest.mark.parametrize(
    "error",
    [
        NotFound("There is no slice", hint="Read the list again.", code="gone"),
        DeviceFaulty("ill", code="no-answer"),
        BackendUnavailable("no driver"),
        InUse("held", pids=(1, 2)),
        AcceleratorError("no room", code="partition"),
    ],
)
def test_error_is_raised_with_its_class_and_texts(error: AcceleratorError) -> None:
    with pytest.raises(type(error)) as caught:
        messages.parse_reply(messages.failure(error))
    assert caught.type is type(error)
    assert caught.value.to_dict() == error.to_dict()


def test_error_of_an_unknown_class_is_raised_as_its_base() -> None:
    with pytest.raises(AcceleratorError) as caught:
        messages.parse_reply(messages.failure(messages.InvalidRequest("no")))
    assert caught.type is AcceleratorError and caught.value.code == "invalid-request"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"error":{}}',
        b'{"error":{"class":"SystemExit","message":"x"}}',
        b'{"result":{"type":"os.system","fields":{}}}',
        b'{"result":{"type":"Spot","fields":{"nothing":1}}}',
    ],
)
def test_reply_of_another_protocol_is_rejected(line: bytes) -> None:
    with pytest.raises(messages.InvalidRequest):
        messages.parse_reply(line)


def test_request_returns_its_arguments() -> None:
    line = messages.request("create", (SPOT, "vir02_1c", 133, None))
    assert messages.parse_request(line) == ("create", (SPOT, "vir02_1c", 133, None))
    assert messages.parse_request(messages.request("condition", (SPOT, {NETWORK}))) == (
        "condition",
        (SPOT, (NETWORK,)),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"method": "subscribe"},
        {"method": "close"},
        {"method": "__class__"},
        {"method": ["uuid"]},
        {"arguments": []},
        {"arguments": [[0, 0], [0, 0]]},
        {"arguments": [[0]]},
        {"arguments": [[-1, 0]]},
        {"arguments": [[True, 0]]},
        {"arguments": [[0, 1 << 40]]},
        {"arguments": ["0"]},
        {"method": "create", "arguments": [[0, 0], "vir01; reboot", 100, None]},
        {"method": "create", "arguments": [[0, 0], "v" * 32, 100, None]},
        {"method": "create", "arguments": [[0, 0], "vir01", -1, None]},
        {"method": "create", "arguments": [[0, 0], "vir01", 100, 256]},
        {"method": "condition", "arguments": [[0, 0], ["disk"]]},
        {"method": "condition", "arguments": [[0, 0], [NETWORK, NETWORK]]},
        {"extra": 1},
    ],
)
def test_request_outside_the_table_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(messages.InvalidRequest):
        messages.parse_request(json.dumps({**GOOD, **change}).encode())


@pytest.mark.parametrize("line", [b"", b"\xff\xfe", b"1", b"null", b"[" * 5000])
def test_request_not_a_mapping_is_rejected(line: bytes) -> None:
    with pytest.raises(messages.InvalidRequest):
        messages.parse_request(line)


def test_table_has_the_methods_of_a_source() -> None:
    """The table has each method of Source. A new method without an entry would fail on nodes only."""
    public = {name for name, _value in inspect.getmembers(Source, inspect.isfunction) if not name.startswith("_")}
    assert set(messages.METHODS) == public - {"close", "subscribe"}
    for name, method in messages.METHODS.items():
        parameters = list(inspect.signature(getattr(Source, name)).parameters)[1:]
        assert len(parameters) == len(method.arguments), name
        assert list(inspect.signature(getattr(Helper, name)).parameters)[1:] == parameters, name
