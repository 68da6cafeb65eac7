# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Record NVML's answers about the first GPU of a machine. The program only reads.

Usage: python tests/silicon/record.py FILE

On a machine with a real GPU it creates the recording that the simulator is compared with (`recorded/`). In the test
world it records the simulator's answers. It calls every reading function of the binding that needs only a GPU, and
those with few other arguments. Errors are answers as well. Values of one specific board (UUID, serial number, position
in the machine) are not recorded.
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
#: Functions with more arguments than the GPU, and the argument values.
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
#: Functions that fill a structure of the caller.
STRUCTURES = {
    "nvmlDeviceGetGpuFabricInfoV": "c_nvmlGpuFabricInfo_v2_t",
    "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles": "c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t",
    "nvmlDeviceWorkloadPowerProfileGetProfilesInfo": "c_nvmlWorkloadPowerProfileProfilesInfo_v1_t",
}
#: Functions with values that identify a board or a machine, or that change constantly.
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
#: Fields of that kind: temperature, energy, power, PCIe counters.
FIELDS_LEFT_OUT = frozenset(
    {74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 94, 169, *range(173, 184), 185, 186, 191, 197, 198}
)


def plain(value: Any) -> Any:
    """Return a value as JSON data."""
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        return {name: plain(getattr(value, name)) for name, *_rest in value._fields_}
    if isinstance(value, (ctypes.Array, list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, (str, int, float, bool)) or value is None else type(value).__name__


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result or its error."""
    try:
        return plain(function(*arguments))
    except pynvml.NVMLError as error:
        return {"error": error.value}
    except (TypeError, ctypes.ArgumentError):  # an error of the binding: it needs other arguments
        return None


def wanted(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required arguments."""
    return [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]


def functions() -> Iterable[tuple[str, Callable[..., Any]]]:
    """Yield the names and the reading functions of the binding."""
    for name in sorted(dir(pynvml)):
        if re.match(r"nvml(Device|System)(Get|Is|Query|Has)", name) and name not in LEFT_OUT:
            yield name, getattr(pynvml, name)


def asked() -> dict[str, Any]:
    """Return every function's answer."""
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
    """Return a structure as a function fills it."""
    made = getattr(pynvml, structure)()
    getattr(pynvml, function)(handle, ctypes.byref(made))
    return made


def placements(handle: Any, profile: int) -> list[list[int]]:
    """Return the possible GPU instances of a profile: start and size."""
    count = ctypes.c_uint(64)
    values = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile, values, ctypes.byref(count))
    return sorted([values[place].start, values[place].size] for place in range(count.value))


def field(handle: Any, number: int) -> Any:
    """Return the answer for one field: its type, and its bits as an integer."""
    (reported,) = pynvml.nvmlDeviceGetFieldValues(handle, [number])
    if reported.nvmlReturn:
        raise pynvml.NVMLError(reported.nvmlReturn)
    return [reported.valueType, reported.value.ullVal]


def main() -> int:
    """Record and write the answers, one per line."""
    pynvml.nvmlInit()
    found = asked()
    pynvml.nvmlShutdown()
    lines = [f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
