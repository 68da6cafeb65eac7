# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Call DCMI through ctypes in a separate process: one JSON request per input line, one JSON answer per output line.

An output parameter is written as ``["u32", n]``, ``["i32", n]``, ``["u8", n]``, ``["u32s", count]``, ``["text",
size]``, ``["struct", name, fields]``, or ``["structs", name, count]``. ``["value", name, fields]`` is a structure by
value. The answer contains the return code and the values of the parameters after the call.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.simulator import nvml_worker
from tests.simulator.dcmi_structures import STRUCTURES, encode

SCALARS = {"u32": ctypes.c_uint, "i32": ctypes.c_int, "u8": ctypes.c_ubyte}
_kept: list[Any] = []
_events: list[Any] = []


def library() -> Any:
    """Return the library that was loaded at the start."""
    return ctypes.CDLL(nvml_worker.loaded())


def place(specification: Any) -> Any:
    """Return the C value of an argument."""
    if isinstance(specification, int):
        return specification
    if specification is None:
        return None
    kind, *rest = specification
    if kind in SCALARS:
        return SCALARS[kind](rest[0])
    if kind == "u32s":
        return (ctypes.c_uint * rest[0])()
    if kind == "text":
        return ctypes.create_string_buffer(rest[0])
    if kind == "structs":
        return (STRUCTURES[rest[0]] * rest[1])()
    made = STRUCTURES[rest[0]]()
    for name, value in (rest[1] if len(rest) > 1 else {}).items():
        setattr(made, name, value.encode() if isinstance(value, str) else value)
    return made


def dcmi(name: str, *specifications: Any) -> dict[str, Any]:
    """Call a function of DCMI. Return its return code and its output parameters."""
    places = [place(specification) for specification in specifications]
    passed = []
    for item, specification in zip(places, specifications):
        by_value = isinstance(item, int) or item is None or specification[0] == "value"
        passed.append(ctypes.c_int(item) if isinstance(item, int) else item if by_value else ctypes.byref(item))
    code = getattr(library(), name)(*passed)
    answers = []
    for item, specification in zip(places, specifications):
        if isinstance(specification, list) and specification[0] != "value":
            scalar = specification[0] in SCALARS
            answers.append(item.value if scalar or specification[0] == "text" else encode(item))
    return {"code": code, "out": [item.decode() if isinstance(item, bytes) else item for item in answers]}


def subscribe(card: int, device: int, fields: dict[str, Any]) -> int:
    """Subscribe to fault events, and record them for `events`. Return the code of the subscription."""
    function = ctypes.CFUNCTYPE(None, ctypes.POINTER(STRUCTURES["event"]))(
        lambda event: _events.append(encode(event.contents)["dms_event"])
    )
    _kept.append(function)
    return int(library().dcmi_subscribe_fault_event(card, device, place(["value", "event_filter", fields]), function))


def events(count: int) -> list[Any]:
    """Return the recorded events when there are ``count`` of them, or after 10 s."""
    end = time.monotonic() + 10
    while len(_events) < count and time.monotonic() < end:
        time.sleep(0.01)
    return list(_events)


def control(command: str) -> dict[str, Any]:
    """Send one control command to the simulator."""
    reply = ctypes.create_string_buffer(1 << 20)
    code = library().acceleratorSimulatorControl(command.encode(), reply, len(reply))
    return {"code": code, **json.loads(reply.value)}


def churn(card: int, chip: int, template: str, rounds: int) -> list[int]:
    """Create and destroy a vNPU repeatedly; return the codes."""
    codes = []
    for _round in range(rounds):
        request = [
            "struct",
            "create_vdev_res_stru",
            {"vdev_id": 0xFFFFFFFF, "vfg_id": 0xFFFFFFFF, "template_name": template},
        ]
        made = dcmi("dcmi_create_vdevice", card, chip, request, ["struct", "create_vdev_out"])
        codes.append(made["code"])
        if made["code"] == 0:
            codes.append(dcmi("dcmi_set_destroy_vdevice", card, chip, made["out"][1]["vdev_id"])["code"])
    return codes


def leave_mount_namespace() -> None:
    """Move this process into a separate mount namespace, like systemd options that restrict files."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def two_threads(card: int, chip: int, device: int) -> list[int]:
    """Query one chip from a second thread while this thread queries another chip. Return the codes."""
    codes = []

    def query(number: int) -> None:
        codes.append(dcmi("dcmi_get_device_health", number, chip, ["u32", 9])["code"])

    thread = threading.Thread(target=query, args=(card,))
    thread.start()
    time.sleep(0.3)
    query(device)
    thread.join()
    return codes


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        dcmi,
        subscribe,
        events,
        control,
        churn,
        leave_mount_namespace,
        two_threads,
        nvml_worker.become,
        nvml_worker.give_administration_up,
    )
}


def perform(request: dict[str, Any]) -> dict[str, Any]:
    """Perform one request."""
    return {"result": FUNCTIONS[request["call"]](*request["arguments"])}


if __name__ == "__main__":
    nvml_worker.main(perform)
