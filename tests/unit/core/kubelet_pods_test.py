# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The pods of processes and claims, from the files of kernel and kubelet on a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dra_driver.core.host import kubelet_pods
from dra_driver.core.host.system import System

UID = "0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55"
UNDERSCORES = UID.replace("-", "_")


def put(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (
            f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORES}.slice/cri-containerd-1f.scope\n",
            UID,
        ),
        (f"12:devices:/kubepods/besteffort/pod{UID}/1f\n1:name=systemd:/\n", UID),
        (f"0::/../../kubepods-burstable-pod{UNDERSCORES}.slice/crio-1f.scope\n", UID),
        ("0::/system.slice/nvidia-persistenced.service\n", ""),
        ("0::/user.slice/podman-4711.scope\n", ""),
        ("", ""),
    ],
)
def test_pod_of_process_from_cgroup(tmp_path: Path, cgroup: str, uid: str) -> None:
    put(tmp_path, "proc/4711/cgroup", cgroup)
    assert kubelet_pods.pod_of_process(System(str(tmp_path)), 4711) == uid
    assert kubelet_pods.pod_of_process(System(str(tmp_path)), 1) == "", "it has gone"


def test_running_pods_are_listed(tmp_path: Path) -> None:
    other = UID.replace("0a7f", "1a7f")
    assert kubelet_pods.running_pods(System(str(tmp_path))) == ()
    for pid, uid in ((1, ""), (20, UID), (21, UID), (30, other)):
        put(tmp_path, f"proc/{pid}/cgroup", f"0::/kubepods/besteffort/pod{uid}/1f\n" if uid else "0::/init.scope\n")
    put(tmp_path, "proc/meminfo", "")
    for name in (f"team-a_training-0_{UID}", "team-a_has-ended_2a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55"):
        (tmp_path / "var/log/pods" / name).mkdir(parents=True)
    assert kubelet_pods.running_pods(System(str(tmp_path))) == (other, "team-a/training-0")


def test_pod_names_from_log_directories(tmp_path: Path) -> None:
    for name in (f"team-a_training-0_{UID}", "kube-system_kube-proxy-x_uid-2", "stray"):
        (tmp_path / "var/log/pods" / name).mkdir(parents=True)
    assert kubelet_pods.pod_names(System(str(tmp_path))) == {
        UID: "team-a/training-0",
        "uid-2": "kube-system/kube-proxy-x",
    }
    assert kubelet_pods.pod_names(System(str(tmp_path / "none"))) == {}


def test_pods_of_claims_from_kubelet_checkpoint(tmp_path: Path) -> None:
    state = {"ClaimUID": "claim-1", "ClaimName": "c", "Namespace": "team-a", "PodUIDs": {UID: {}}, "DriverState": {}}
    data = {"kind": "DRACheckpoint", "ClaimInfoStateList": [state, {**state, "ClaimUID": "claim-2", "PodUIDs": None}]}
    put(tmp_path, "kubelet/dra_manager_state", json.dumps({"Data": json.dumps(data), "Checksum": 1}))
    system = System(str(tmp_path))
    assert kubelet_pods.pods_of_claims(system, "/kubelet") == {"claim-1": (UID,), "claim-2": ()}
    assert kubelet_pods.pods_of_claims(system, "/elsewhere") == {}
    for text in ("", "{}", "[]", '{"Data": "none"}', '{"Data": "{\\"ClaimInfoStateList\\": [1]}"}'):
        put(tmp_path, "kubelet/dra_manager_state", text)
        assert kubelet_pods.pods_of_claims(system, "/kubelet") == {}, text
