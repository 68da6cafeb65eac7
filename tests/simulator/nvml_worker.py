# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Processes that use NVML through nvidia-ml-py: one JSON request per input line, one JSON answer per output line.

Handles have the form ``{"handle": [type, number]}``, structures ``{"struct": name, "fields": {…}}``. An answer
contains the result and the passed structures after the call, or NVML's error number.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

Perform = Callable[[dict[str, Any]], dict[str, Any]]
_library = ""

HANDLES = {
    "device": pynvml.c_nvmlDevice_t,
    "gpu_instance": pynvml.c_nvmlGpuInstance_t,
    "compute_instance": pynvml.c_nvmlComputeInstance_t,
    "event_set": pynvml.c_nvmlEventSet_t,
}


def encode(value: Any) -> Any:
    """Return a pynvml result as JSON data."""
    for name, kind in HANDLES.items():
        if isinstance(value, kind):
            return {"handle": [name, ctypes.cast(value, ctypes.c_void_p).value or 0]}
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        return {name: encode(getattr(value, name)) for name, *_type in value._fields_}
    if isinstance(value, ctypes.Array):
        return [encode(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, pynvml.nvmlFriendlyObject):
        return {name: encode(content) for name, content in vars(value).items()}
    return value.value if isinstance(value, ctypes._SimpleCData) else value


def decode(value: Any) -> Any:
    """Return an argument from JSON data."""
    if isinstance(value, dict) and "handle" in value:
        kind, number = value["handle"]
        return ctypes.cast(ctypes.c_void_p(number), HANDLES[kind])
    if isinstance(value, dict) and "struct" in value:
        made = getattr(pynvml, value["struct"])()
        for name, content in value.get("fields", {}).items():
            setattr(made, name, content)
        return made
    if isinstance(value, dict) and "bytes" in value:
        return value["bytes"].encode("latin-1")
    return value


def array_of(kind: Any, limit: int, call: Callable[[Any, Any], Any]) -> list[Any]:
    """Return the items that a call writes into an array."""
    items, count = (kind * limit)(), ctypes.c_uint(limit)
    call(items, ctypes.byref(count))
    return list(items[: count.value])


def possible_placements(owner: Any, profile: int, of_compute: bool = False) -> list[list[int]]:
    """Return placements with two calls: first their number, then the array."""
    name = (
        "nvmlGpuInstanceGetComputeInstancePossiblePlacements"
        if of_compute
        else "nvmlDeviceGetGpuInstancePossiblePlacements"
    )
    count = ctypes.c_uint()
    getattr(pynvml, name)(owner, profile, None, ctypes.byref(count))
    items = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    getattr(pynvml, name)(owner, profile, items, ctypes.byref(count))
    return [[item.start, item.size] for item in items]


def create_at(owner: Any, profile: int, start: int, size: int, of_compute: bool = False) -> Any:
    """Create an instance at a placement."""
    placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    name = (
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
        if of_compute
        else "nvmlDeviceCreateGpuInstanceWithPlacement"
    )
    return getattr(pynvml, name)(owner, profile, ctypes.byref(placement))


def gpu_instances(device: Any, profile: int) -> list[Any]:
    """Return all GPU instances of a profile."""
    return array_of(
        pynvml.c_nvmlGpuInstance_t,
        16,
        lambda items, count: pynvml.nvmlDeviceGetGpuInstances(device, profile, items, count),
    )


def compute_instances(instance: Any, profile: int) -> list[Any]:
    """Return all compute instances of a profile in a GPU instance."""
    return array_of(
        pynvml.c_nvmlComputeInstance_t,
        16,
        lambda items, count: pynvml.nvmlGpuInstanceGetComputeInstances(instance, profile, items, count),
    )


def symbol(name: str, *arguments: Any) -> list[Any]:
    """Call a C symbol directly. Unsigned integers by reference are written as ``{"out": n}``."""
    cells = [
        ctypes.c_ulonglong(item["out"]) if isinstance(item, dict) and "out" in item else item for item in arguments
    ]
    passed = [
        ctypes.byref(cell) if isinstance(cell, (ctypes.c_ulonglong, ctypes.Structure)) else cell for cell in cells
    ]
    code = getattr(pynvml.nvmlLib, name)(*passed)
    return [code, *(encode(cell) for cell in cells if isinstance(cell, (ctypes.c_ulonglong, ctypes.Structure)))]


def masked(name: str, handle: Any, first: int, numbers: list[int]) -> int:
    """Return a symbol's return code for a structure of one word and a mask of 255 bits."""
    words = (ctypes.c_uint * 9)(first)
    for number in numbers:
        words[1 + number // 32] |= 1 << number % 32
    return int(getattr(pynvml.nvmlLib, name)(handle, ctypes.byref(words)))


def every_symbol(names: list[str], handle: Any) -> dict[str, int]:
    """Return the return codes of symbols for a handle or NULL, with NULL for all other arguments."""
    return {name: getattr(pynvml.nvmlLib, name)(decode(handle), *[None] * 7) for name in names}


def drain(events: Any, milliseconds: int) -> list[Any]:
    """Return the events until a wait times out, and the error of that wait."""
    found = []
    while True:
        try:
            found.append(pynvml.nvmlEventSetWait_v2(events, milliseconds))
        except pynvml.NVMLError as error:
            return [found, error.value]


def control(command: str) -> dict[str, Any]:
    """Send one control command to the simulator."""
    reply = ctypes.create_string_buffer(1 << 22)
    library = ctypes.CDLL("libnvidia-ml.so.1")
    code = library.acceleratorSimulatorControl(command.encode(), reply, len(reply))
    return {"code": code, **json.loads(reply.value)}


def cuda(function: str, *arguments: int) -> int:
    """Call a function of the CUDA driver next to the library."""
    return int(getattr(ctypes.CDLL(str(Path(_library).with_name("libcuda.so.1"))), function)(*arguments))


def become(user: int) -> None:
    """Switch from root to a user permanently."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def give_administration_up() -> None:
    """Drop CAP_SYS_ADMIN and stay root, like root in a pod."""
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    library.capget(header, sets)
    for index in (0, 1):
        sets[index] &= ~(1 << 21)
    if library.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def fork_and(function: str, *arguments: Any) -> Any:
    """Return the result of the same call in a forked child that inherited the open library."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(perform({"call": function, "arguments": list(arguments)})).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text)


def fork_and_change_both(gpu: Any, profile: int, rounds: int) -> list[list[int]]:
    """Create and destroy an instance repeatedly in a forked child with the inherited library and in this process, at
    once.

    Returns NVML's return codes of this process and of the child.
    """

    def change() -> list[int]:
        answers = []
        for _round in range(rounds):
            instance = pynvml.c_nvmlGpuInstance_t()
            make = pynvml._nvmlGetFunctionPointer("nvmlDeviceCreateGpuInstance")
            answers.append(make(gpu, ctypes.c_uint(profile), ctypes.byref(instance)))
            answers.append(pynvml._nvmlGetFunctionPointer("nvmlGpuInstanceDestroy")(instance))
        return answers

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(change()).encode())
        os._exit(0)
    os.close(writing)
    own = change()
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return [own, json.loads(text)]


OWN = (
    possible_placements,
    create_at,
    gpu_instances,
    compute_instances,
    symbol,
    masked,
    every_symbol,
    drain,
    control,
    cuda,
    become,
    give_administration_up,
    fork_and,
    fork_and_change_both,
)
OWN_BY_NAME: dict[str, Callable[..., Any]] = {function.__name__: function for function in OWN}


def perform(request: dict[str, Any]) -> dict[str, Any]:
    """Perform one request."""
    name = request["call"]
    function = OWN_BY_NAME.get(name) or getattr(pynvml, name)
    arguments = [decode(argument) for argument in request["arguments"]]
    passed = [
        ctypes.byref(item) if request.get("by_reference") and isinstance(item, ctypes.Structure) else item
        for item in arguments
    ]
    try:
        result = function(*passed)
    except pynvml.NVMLError as error:
        return {"error": error.value}
    return {
        "result": encode(result),
        "structs": [encode(item) for item in arguments if isinstance(item, ctypes.Structure)],
    }


def loaded() -> str:
    """Return the path of this process' library."""
    return _library


def serve(library: str, requests: int, answers: int, perform: Perform) -> None:
    """Load the library and answer requests until the input ends."""
    global _library
    _library = library
    # Later loads of the soname return this library
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    with os.fdopen(requests) as stream, os.fdopen(answers, "w") as output:
        for line in stream:
            output.write(json.dumps(perform(json.loads(line))) + "\n")
            output.flush()


def child(perform: Perform, library: str, requests: int, answers: int) -> int:
    """Fork a process that serves requests; return its PID."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            serve(library, requests, answers, perform)
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    os.close(requests)
    os.close(answers)
    return process


def main(perform: Perform) -> None:
    """Fork a process per request and report exit statuses, until the socket is closed."""
    with socket.socket(fileno=int(sys.argv[1])) as control:
        os.set_inheritable(control.fileno(), False)
        while True:
            text, descriptors, _flags, _address = socket.recv_fds(control, 65536, 2)
            if not text:
                return
            question = json.loads(text)
            if "fork" in question:
                answer = child(perform, question["fork"], *descriptors)
            else:
                answer = os.waitstatus_to_exitcode(os.waitpid(question["status"], 0)[1])
            control.send(str(answer).encode())


if __name__ == "__main__":
    main(perform)
