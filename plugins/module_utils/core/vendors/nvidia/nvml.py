# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Call NVML through its Python binding, and convert its errors to those of the core.

The binding (distribution nvidia-ml-py) is imported when the backend is opened, never before.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...errors import (
    AcceleratorError,
    BackendUnavailable,
    DeviceFaulty,
    DoesNotFit,
    InUse,
    NotFound,
    NotPermitted,
    Unsupported,
)
from ...model import NO_ANSWER
from .health import faults

# NVML return values, from the header.
SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_POWER = 8
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
IRQ_ISSUE = 11
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
OPERATING_SYSTEM = 17
LIB_RM_VERSION_MISMATCH = 18
IN_USE = 19
INSUFFICIENT_RESOURCES = 23
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
INVALID_STATE = 29
UNKNOWN = 999

INIT_NO_GPUS = 1  # nvmlInitWithFlags: a host without a GPU is not an error
GPU_INSTANCE_PROFILES = 0x12
COMPUTE_INSTANCE_PROFILES = 0x9
ENGINE_PROFILE_SHARED = 0
NO_INSTANCE = 0xFFFFFFFF

_ERRORS: Mapping[int, tuple[type[AcceleratorError], str, str]] = MappingProxyType(
    {
        UNINITIALIZED: (BackendUnavailable, "NVML is not initialised", ""),
        INVALID_ARGUMENT: (AcceleratorError, "NVML refused an argument", ""),
        NOT_SUPPORTED: (Unsupported, "the device or its present mode does not support this", ""),
        NO_PERMISSION: (NotPermitted, "the caller lacks the permission", "Run as root, with CAP_SYS_ADMIN."),
        NOT_FOUND: (NotFound, "NVML did not find the object", ""),
        DRIVER_NOT_LOADED: (
            BackendUnavailable,
            "the NVIDIA driver is not loaded",
            "Load the kernel module with `modprobe nvidia`, or install the driver.",
        ),
        LIBRARY_NOT_FOUND: (
            BackendUnavailable,
            "the library libnvidia-ml.so.1 was not found",
            "Install the NVIDIA driver's user space.",
        ),
        INSUFFICIENT_POWER: (
            DeviceFaulty,
            "the GPU does not get enough power",
            "See that all its external power cables are connected.",
        ),
        TIMEOUT: (DeviceFaulty, "the GPU did not answer in time", "Look for Xid and NVRM lines in the kernel log."),
        IRQ_ISSUE: (
            DeviceFaulty,
            "the driver has trouble with the GPU's interrupts",
            "Look for NVRM lines in the kernel log.",
        ),
        FUNCTION_NOT_FOUND: (Unsupported, "the driver's NVML does not have this function", "Use a newer driver."),
        GPU_IS_LOST: (
            DeviceFaulty,
            "the GPU is lost: it has fallen off the bus or does not answer",
            "Look for Xid 79 in the kernel log; a power cycle of the machine may be needed.",
        ),
        RESET_REQUIRED: (DeviceFaulty, "the GPU needs a reset", "Reset it with `nvidia-smi --gpu-reset`."),
        OPERATING_SYSTEM: (
            DeviceFaulty,
            "the operating system keeps the GPU's device node from the caller",
            "Look for a device cgroup that does not allow /dev/nvidia*.",
        ),
        LIB_RM_VERSION_MISMATCH: (
            BackendUnavailable,
            "the loaded kernel module and libnvidia-ml.so.1 have different versions",
            "Reload the kernel modules or reboot after the driver's update.",
        ),
        IN_USE: (InUse, "the object is in use", ""),
        INSUFFICIENT_RESOURCES: (DoesNotFit, "the GPU has insufficient free resources", ""),
        ARGUMENT_VERSION_MISMATCH: (Unsupported, "the driver does not know this version of the call", ""),
        DEPRECATED: (Unsupported, "the driver's NVML does not support this function any more", ""),
        GPU_NOT_FOUND: (NotFound, "there is no such GPU", ""),
        INVALID_STATE: (AcceleratorError, "the device is in a state that does not allow this", ""),
        UNKNOWN: (
            DeviceFaulty,
            "the driver met an error that it has no name for (999)",
            "Look for Xid and NVRM lines in the kernel log; a reset of the GPU often helps.",
        ),
    }
)
_CODES: Mapping[int, str] = MappingProxyType(
    {
        INVALID_ARGUMENT: "invalid-argument",
        INSUFFICIENT_POWER: faults.INSUFFICIENT_POWER,
        TIMEOUT: NO_ANSWER,
        GPU_IS_LOST: faults.GPU_LOST,
        RESET_REQUIRED: faults.RESET_REQUIRED,
        OPERATING_SYSTEM: faults.NO_PERMISSION,
        INVALID_STATE: "invalid-state",
        GPU_NOT_FOUND: "gpu-not-found",
        FUNCTION_NOT_FOUND: "function-not-found",
    }
)


def error_of(value: int, doing: str) -> AcceleratorError:
    """Return the core's error for an NVML return value. ``doing`` names the operation and its object."""
    kind, found, hint = _ERRORS.get(value, (AcceleratorError, f"NVML returned error {value}", ""))
    return kind(f"{doing}: {found}", hint=hint, code=_CODES.get(value, "" if value in _ERRORS else f"nvml-{value}"))


class Nvml:
    """The NVML library. All methods can be called from several threads once it is open."""

    def __init__(self) -> None:
        self._binding: Any = None

    @property
    def is_open(self) -> bool:
        """Return whether NVML is open."""
        return self._binding is not None

    def open(self) -> None:
        """Load and initialize the library. Raises BackendUnavailable with the reason; NVML stays closed then."""
        if self._binding is not None:
            return
        try:
            binding: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise BackendUnavailable(
                f"The Python binding of NVML cannot be imported: {error}",
                hint="Install the distribution nvidia-ml-py into the interpreter that runs this.",
            ) from error
        try:
            binding.nvmlInitWithFlags(INIT_NO_GPUS)
        except binding.NVMLError as error:
            found = error_of(error.value, "Opening NVML")
            if isinstance(found, BackendUnavailable):
                raise found from error
            raise BackendUnavailable(found.message, hint=found.hint) from error
        self._binding = binding

    def close(self) -> None:
        """Shut the library down. It can be opened again."""
        binding, self._binding = self._binding, None
        if binding is not None:
            try:
                binding.nvmlShutdown()
            except binding.NVMLError as error:
                raise error_of(error.value, "Closing NVML") from error

    def call(self, function: str, *arguments: Any, doing: str = "") -> Any:
        """Call a function of the binding and return its result.

        Raises the core's error, whose text begins with ``doing``.
        """
        binding = self._binding
        if binding is None:
            raise BackendUnavailable(f"{doing or function}: NVML is not open", hint="Open the backend first.")
        method = getattr(binding, function, None)
        if method is None:
            raise error_of(FUNCTION_NOT_FOUND, doing or function)
        try:
            return method(*arguments)
        except binding.NVMLError as error:
            raise error_of(error.value, doing or function) from error

    def optional(self, function: str, *arguments: Any, default: Any = None, doing: str = "") -> Any:
        """Call a function that some drivers and boards do not support; return ``default`` then."""
        try:
            return self.call(function, *arguments, doing=doing)
        except Unsupported:
            return default

    def number(self, function: str, *arguments: Any, doing: str = "") -> int | None:
        """Call a function that fills in a number, and return the number; None if the driver or board does not support it.

        The binding has one default object for all calls of such a function, so threads would read each other's results.
        """
        value = self.optional(function, *arguments, ctypes.c_uint(), doing=doing)
        return int(value) if value is not None else None

    def filled(self, function: str, structure: str, *arguments: Any, doing: str = "") -> Any:
        """Call a function that fills in a structure of the binding, and return the structure; None if it is not supported."""
        made = getattr(self._binding, structure, None)
        if made is None:
            return None
        value = made()
        try:
            self.call(function, *arguments, ctypes.byref(value), doing=doing)
        except Unsupported:
            return None
        return value

    def structure(self, name: str) -> Any:
        """Return a new structure of the binding."""
        return getattr(self._binding, name)()

    def array(self, structure: str, length: int) -> Any:
        """Return a new array of a structure of the binding."""
        return (getattr(self._binding, structure) * length)()

    def placement(self, start: int, size: int) -> Any:
        """Return a reference to a new placement structure."""
        return ctypes.byref(self._binding.c_nvmlGpuInstancePlacement_t(start, size))

    def listed(self, function: str, structure: str, length: int, *arguments: Any, doing: str = "") -> tuple[Any, ...]:
        """Call a function that fills an array of the caller, and return the filled elements."""
        count = ctypes.c_uint(length)
        values = self.array(structure, max(length, 1))
        self.call(function, *arguments, values, ctypes.byref(count), doing=doing)
        return tuple(values[position] for position in range(min(count.value, length)))

    def counted(self, function: str, structure: str, *arguments: Any, doing: str = "") -> tuple[Any, ...]:
        """Call such a function for the length first, then for the elements, and return these."""
        count = ctypes.c_uint(0)
        self.call(function, *arguments, None, ctypes.byref(count), doing=doing)
        return self.listed(function, structure, count.value, *arguments, doing=doing) if count.value else ()


def text(value: Any) -> str:
    """Return a text field of an NVML structure, which is bytes or a string, as a string."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
