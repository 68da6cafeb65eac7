# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Create the device metadata files of KEP-5304, from which a container reads the attributes of its devices.

A program in a container finds its devices' attributes, for example the UUID of a partition, below a directory that is
equal for all drivers. There is one file per request, mounted with the request's first device. Source: ``api/metadata``
of the Go helper.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..host.cdi import Mount
from ..model import AttributeValue
from .device_json import attribute_json

#: The newest version first: readers use the first version that they support.
VERSIONS = ("metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1")
KIND = "DeviceMetadata"
FOLDER = "/var/run/kubernetes.io/dra-device-attributes"
#: The annotation, on a claim from a template, with the pod's name for the claim.
POD_CLAIM_ANNOTATION = "resource.kubernetes.io/pod-claim-name"
MOST_ATTRIBUTES = 32
# The names of requests and of a pod's claims are DNS labels, those of claims and drivers DNS subdomains.
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class DeviceMetadata:
    """One device of a claim; ``request`` is the full name of its request, with the subrequest."""

    request: str
    driver: str
    pool: str
    name: str
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True)
class ClaimName:
    """The name of a claim in the API server, and its name in the pod if it was created from a template ("" otherwise)."""

    namespace: str
    name: str
    uid: str
    pod_claim: str = ""


def folder(cdi_directory: str, cdi_kind: str) -> str:
    """Return the directory of all claims' files. It is next to the CDI files, and like them is deleted by a reboot.

    Runtimes read files in a CDI directory, but no subdirectories.
    """
    return f"{cdi_directory.rstrip('/')}/{cdi_kind.partition('/')[0]}-metadata"


def content(claim: ClaimName, devices: Sequence[DeviceMetadata]) -> bytes:
    """Return the content of one request's file: one JSON object for each version, one after the other."""
    requests: dict[str, list[dict[str, Any]]] = {}
    for device in devices:
        attributes = sorted(device.attributes.items())[:MOST_ATTRIBUTES]
        requests.setdefault(device.request, []).append(
            {
                "driver": device.driver,
                "pool": device.pool,
                "name": device.name,
                "attributes": {name: attribute_json(value) for name, value in attributes},
            }
        )
    body: dict[str, Any] = {
        "kind": KIND,
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1},
        **({"podClaimName": claim.pod_claim} if claim.pod_claim else {}),
        "requests": [{"name": name, "devices": found} for name, found in requests.items()],
    }
    text = json.dumps(body)[1:]
    return "".join(f'{{"apiVersion": "{version}", {text}\n' for version in VERSIONS).encode()


def check_pod_claim(name: str) -> None:
    """Raise ValueError for a value of the annotation that is not "" or a DNS label: the name becomes a part of a path."""
    if name and not _LABEL.fullmatch(name):
        raise ValueError(
            f"The annotation {POD_CLAIM_ANNOTATION} is {name[:100]!r}; expected the name of a claim in the pod: at most 63 "
            "lower-case letters, digits, and hyphens"
        )


def pod_claim_in(data: bytes) -> str | None:
    """Return the pod's name for the claim from a file.

    Returns "" without such a name, and None for a file of another kind or with a name that ``check_pod_claim`` rejects.
    """
    try:
        read = json.loads(data.partition(b"\n")[0])
        name = str(read.get("podClaimName", ""))
        check_pod_claim(name)
        return name if read["kind"] == KIND else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def mount(driver: str, claim: ClaimName, base_request: str, host_path: str) -> Mount:
    """Return the mount of one request's file. Raises ValueError for a name that cannot be a part of a path."""
    check_pod_claim(claim.pod_claim)
    for what, name, form in (
        ("claim", claim.name, _NAME),
        ("driver", driver, _NAME),
        ("request", base_request, _LABEL),
    ):
        if not form.fullmatch(name):
            raise ValueError(f"The {what} name {name[:100]!r} cannot be a part of a path; expected a DNS name")
    place = f"resourceclaimtemplates/{claim.pod_claim}" if claim.pod_claim else f"resourceclaims/{claim.name}"
    return Mount(host_path, f"{FOLDER}/{place}/{base_request}/{driver}-metadata.json", options=("ro", "bind"))
