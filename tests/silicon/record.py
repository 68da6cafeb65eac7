# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Writes down what NVML answers about a machine's first GPU. It only reads.

Usage: python tests/silicon/record.py FILE

On a machine with a real GPU this makes the recording that the simulator is held against (`recorded/`); in the test world it tells what the
simulator says. Every function of the binding is called that reads and needs nothing but a GPU, and those whose further arguments are
few; errors are answers as well. What is one board's alone (UUID, serial number, place in the machine) is not written down.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pynvml

PROFILES = range(0x12)
FIELDS = range(1, 251)
LINKS = range(18)
#: Functions with more arguments than the GPU, and the values for these.
ARGUMENTS: Mapping[str, Iterable[tuple[int, ...]]] = {
    "nvmlDeviceGetClockInfo": [(kind,) for kind in range(4)],
    "nvmlDeviceGetMaxClockInfo": [(kind,) for kind in range(4)],
    "nvmlDeviceGetApplicationsClock": [(kind,) for kind in range(4)],
    "nvmlDeviceGetDefaultApplicationsClock": [(kind,) for kind in range(4)],
    "nvmlDeviceGetMaxCustomerBoostClock": [(kind,) for kind in range(4)],
    "nvmlDeviceGetMinMaxClockOfPState": [(kind, 0) for kind in range(3)],
    "nvmlDeviceGetTemperatureThreshold": [(kind,) for kind in range(8)],
    "nvmlDeviceGetTotalEccErrors": [(kind, counter) for kind in range(2) for counter in range(2)],
    "nvmlDeviceGetRetiredPages": [(cause,) for cause in range(2)],
    "nvmlDeviceGetNvLinkState": [(link,) for link in LINKS],
    "nvmlDeviceGetGpuInstanceProfileInfo": [(number, version) for number in PROFILES for version in (1, 2)],
    "nvmlDeviceGetAPIRestriction": [(kind,) for kind in range(3)],
    "nvmlDeviceGetInforomVersion": [(kind,) for kind in range(5)],
}
#: Functions that fill in a structure that the caller makes.
STRUCTURES = {
    "nvmlDeviceGetGpuFabricInfoV": "c_nvmlGpuFabricInfo_v2_t",
    "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles": "c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t",
    "nvmlDeviceWorkloadPowerProfileGetProfilesInfo": "c_nvmlWorkloadPowerProfileProfilesInfo_v1_t",
}
#: What tells one board or one machine from another, and what changes from moment to moment.
LEFT_OUT = frozenset(
    {
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetSerial",
        "nvmlDeviceGetPdi",
        "nvmlDeviceGetBoardId",
        "nvmlDeviceGetIrqNum",
        "nvmlDeviceGetPlatformInfo",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetConfComputeGpuCertificate",
        "nvmlDeviceGetConfComputeGpuAttestationReport",
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetPcieReplayCounter",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetLastBBXFlushTime",
        "nvmlSystemGetProcessName",
    }
)
#: Fields of that kind: temperature, energy, power, PCIe's counters.
FIELDS_LEFT_OUT = frozenset(
    {74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 94, 169, *range(173, 184), 185, 186, 191, 197, 198}
)


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        return {name: plain(getattr(value, name)) for name, *_rest in value._fields_}
    if isinstance(value, (ctypes.Array, list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, (str, int, float, bool)) or value is None else type(value).__name__


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function answers, or its error."""
    try:
        return plain(function(*arguments))
    except pynvml.NVMLError as error:
        return {"error": error.value}
    except (TypeError, ctypes.ArgumentError):  # the binding's own: it wants something else
        return None


def wanted(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a function must be given."""
    return [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]


def functions() -> Iterable[tuple[str, Callable[..., Any]]]:
    """The functions of the binding that read, and their names."""
    for name in sorted(dir(pynvml)):
        if re.match(r"nvml(Device|System)(Get|Is|Query|Has)", name) and name not in LEFT_OUT:
            yield name, getattr(pynvml, name)


def asked() -> dict[str, Any]:
    """Every function's answer."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found: dict[str, Any] = {}
    for name, function in functions():
        if name in ARGUMENTS:
            for arguments in ARGUMENTS[name]:
                found[" ".join((name, *map(str, arguments)))] = answer(function, handle, *arguments)
        elif name.startswith("nvmlSystem"):
            if not wanted(function):
                found[name] = answer(function)
        elif [each.lower() for each in wanted(function)] in (["handle"], ["device"]):
            found[name] = answer(function, handle)
    for name, structure in STRUCTURES.items():
        found[name] = answer(filled, name, structure, handle)
    found["nvmlDeviceGetMemoryInfo_v2"] = answer(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    infos = [each for name, each in found.items() if name.startswith("nvmlDeviceGetGpuInstanceProfileInfo")]
    for number in sorted({info["id"] for info in infos if "id" in info}):
        found[f"nvmlDeviceGetGpuInstancePossiblePlacements {number}"] = answer(placements, handle, number)
    memory = found["nvmlDeviceGetSupportedMemoryClocks"]
    for clock in memory if isinstance(memory, list) else ():
        name = "nvmlDeviceGetSupportedGraphicsClocks"
        found[f"{name} {clock}"] = answer(getattr(pynvml, name), handle, clock)
    address = pynvml.nvmlDeviceGetPciInfo_v3(handle)
    found["nvmlDeviceGetPciInfo_v3"] = {"device": address.pciDeviceId, "subsystem": address.pciSubSystemId}
    for number in FIELDS:
        if number not in FIELDS_LEFT_OUT:
            found[f"field {number}"] = answer(field, handle, number)
    return {name: each for name, each in found.items() if each is not None}


def filled(function: str, structure: str, handle: Any) -> Any:
    """A structure as a function leaves it."""
    made = getattr(pynvml, structure)()
    getattr(pynvml, function)(handle, ctypes.byref(made))
    return made


def placements(handle: Any, profile: int) -> list[list[int]]:
    """Where GPU instances of a profile can be: start and size."""
    count = ctypes.c_uint(64)
    values = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile, values, ctypes.byref(count))
    return sorted([values[place].start, values[place].size] for place in range(count.value))


def field(handle: Any, number: int) -> Any:
    """The answer for one field: its type, and its bits as a number."""
    (told,) = pynvml.nvmlDeviceGetFieldValues(handle, [number])
    if told.nvmlReturn:
        raise pynvml.NVMLError(told.nvmlReturn)
    return [told.valueType, told.value.ullVal]


def main() -> int:
    """Record, and write: an answer a line."""
    pynvml.nvmlInit()
    found = asked()
    pynvml.nvmlShutdown()
    lines = [f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
