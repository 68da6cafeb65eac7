# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Device metadata for containers in the format of KEP-5304."""

from __future__ import annotations

import json

import pytest
from board_model import device
from dra_driver.core.dra import device_metadata
from dra_driver.core.dra.device_metadata import ClaimName, DeviceMetadata
from dra_driver.core.model import Version
from dra_driver.core.vendors.nvidia.offers import attributes_of, offers

CLAIM = ClaimName("team", "claim-x7", "0uid", "gpu")
GPU = device("h100-80", enabled=True, places=((19, 0),))


def test_content_has_each_version_newest_first() -> None:
    attributes = {"uuid": "GPU-1", "driverVersion": Version("580.95.5"), "numaNode": 1, "ok": True}
    devices = [DeviceMetadata("r/small", "gpu.example.com", "node", "gpu-0", attributes)]
    first, second = (json.loads(line) for line in device_metadata.content(CLAIM, devices).splitlines())
    assert (first.pop("apiVersion"), second.pop("apiVersion")) == device_metadata.VERSIONS
    assert (
        first
        == second
        == {
            "kind": "DeviceMetadata",
            "metadata": {"name": "claim-x7", "namespace": "team", "uid": "0uid", "generation": 1},
            "podClaimName": "gpu",
            "requests": [
                {
                    "name": "r/small",
                    "devices": [
                        {
                            "driver": "gpu.example.com",
                            "pool": "node",
                            "name": "gpu-0",
                            "attributes": {
                                "driverVersion": {"version": "580.95.5"},
                                "numaNode": {"int": 1},
                                "ok": {"bool": True},
                                "uuid": {"string": "GPU-1"},
                            },
                        }
                    ],
                }
            ],
        }
    )


def test_mount_template_claim_uses_pod_claim_name() -> None:
    made = device_metadata.mount("gpu.example.com", CLAIM, "r", "/host/r.json")
    directory = "/var/run/kubernetes.io/dra-device-attributes"
    assert made.container_path == f"{directory}/resourceclaimtemplates/gpu/r/gpu.example.com-metadata.json"
    assert (made.host_path, made.options) == ("/host/r.json", ("ro", "bind"))
    own = device_metadata.mount("gpu.example.com", ClaimName("team", "mine", "0uid"), "r", "/host/r.json")
    assert own.container_path == f"{directory}/resourceclaims/mine/r/gpu.example.com-metadata.json"


def test_pod_claim_in_reads_written_content() -> None:
    assert device_metadata.pod_claim_in(device_metadata.content(CLAIM, [])) == "gpu"
    assert device_metadata.pod_claim_in(device_metadata.content(ClaimName("team", "mine", "0uid"), [])) == ""
    assert [device_metadata.pod_claim_in(data) for data in (b"", b"{", b"[]", b'{"kind": "Other"}')] == [None] * 4


@pytest.mark.parametrize("name", ["../../../etc", "a/b", "..", ".", "/etc", "A", "a\n", "a" * 64, "-a", "a.b"])
def test_pod_claim_name_that_is_no_label_is_rejected(name: str) -> None:
    """Users can set the annotation on their claims, and its value becomes a part of a path: a value that is no label is rejected."""
    claim = ClaimName("team", "mine", "0uid", name)
    with pytest.raises(ValueError, match="pod-claim-name"):
        device_metadata.check_pod_claim(name)
    with pytest.raises(ValueError, match="pod-claim-name"):
        device_metadata.mount("gpu.example.com", claim, "r", "/host/r.json")
    assert device_metadata.pod_claim_in(device_metadata.content(claim, [])) is None, (
        "also as an earlier release has written it"
    )


@pytest.mark.parametrize(
    ("driver", "claim", "request_name"),
    [("../gpu", "mine", "r"), ("gpu.example.com", "../mine", "r"), ("gpu.example.com", "mine", "../r")],
)
def test_mount_name_outside_directory_is_rejected(driver: str, claim: str, request_name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a part of a path"):
        device_metadata.mount(driver, ClaimName("team", claim, "0uid"), request_name, "/host/r.json")


def test_attributes_are_published_ones_with_partition_uuid() -> None:
    (partition,) = GPU.partitions
    (published,) = offers(GPU, dynamic=False)
    assert attributes_of(GPU, partition) == published.attributes
    assert attributes_of(GPU, partition)["uuid"] == partition.uuid
    whole = device("h100-80", enabled=False)
    (offered,) = offers(whole, dynamic=False)
    assert attributes_of(whole, None) == offered.attributes
