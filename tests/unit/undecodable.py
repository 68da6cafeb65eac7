# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""API objects with values that Python's json module cannot decode, as a user can store them, and API answers with them."""

from __future__ import annotations

import copy
import json
from typing import Any

Json = dict[str, Any]
LEVELS = 5000
NESTED = "[" * LEVELS + "]" * LEVELS
#: A placeholder in an object for a value that json.dumps cannot write.
MARK = "@value@"
#: Values that the API server stores in a field that it does not check, by their fault.
VALUES: dict[str, bytes] = {
    "nested arrays": NESTED.encode(),
    "nested objects": b'{"a":' * LEVELS + b"0" + b"}" * LEVELS,
    "number beyond a float": b'{"a":-1.5e400}',
    "long integer": b'{"a":' + b"9" * LEVELS + b"}",
    "surrogate": b'{"a":"\\ud800"}',
}
OWN, OTHER = "gpu.nvidia.com", "other.example.com"


def dumps(value: Any, mark: bytes = NESTED.encode()) -> bytes:
    """Return JSON as the API server writes it, with a value instead of each mark."""
    return json.dumps(value, separators=(",", ":")).encode().replace(json.dumps(MARK).encode(), mark)


def claim(name: str, *, opaque: str = "", managed: bool = False, data: str = "", spec: Any = None) -> Json:
    """Return a claim with the mark in these fields; ``opaque`` and ``data`` are drivers' names."""
    metadata: Json = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "7"}
    if managed:
        metadata["managedFields"] = [{"manager": "someone", "fieldsV1": {"f:spec": MARK}}]
    requests = [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]
    config = [{"requests": ["r"], "opaque": {"driver": opaque, "parameters": {"a": MARK}}}] if opaque else []
    results = [{"request": "r", "driver": OWN, "pool": "node-1", "device": name}]
    status: Json = {"allocation": {"devices": {"results": results, "config": copy.deepcopy(config)}}}
    if data:
        status["devices"] = [{"driver": data, "pool": "node-1", "device": name, "data": {"a": MARK}}]
    devices: Json = {"requests": requests, "config": config}
    return {
        "kind": "ResourceClaim",
        "apiVersion": "resource.k8s.io/v1",
        "metadata": metadata,
        "spec": {"devices": devices, **({"unknown": spec} if spec is not None else {})},
        "status": status,
    }
