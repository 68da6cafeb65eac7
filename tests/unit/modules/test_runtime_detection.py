# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The container runtime of a node: from the running units, and from the kubelet's endpoint if there are several."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime import kubelet_runtime
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.config import File
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.daemon import (
    ContainerdError,
    Daemon,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.detect import (
    UNITS,
    Choice,
    RuntimeChoiceError,
    choose_runtime,
    endpoint_in,
    kubelet_options,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.k3s_rke2 import (
    place_of,
    ready_daemon,
    refusal,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.systemd_unit import option_values
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, System

RUNNING = "active"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"containerd.service": RUNNING}, Choice("containerd", "containerd.service")),
        ({"crio.service": RUNNING}, Choice("cri-o", "crio.service")),
        ({"k3s-agent.service": RUNNING}, Choice("k3s", "k3s-agent.service")),
        ({"rke2-server.service": RUNNING, "containerd.service": RUNNING}, Choice("rke2", "rke2-server.service")),
        # Docker Engine needs containerd: the component between it and the kubelet decides.
        ({"cri-docker.service": RUNNING, "containerd.service": RUNNING}, Choice("docker", "cri-docker.service")),
        ({"crio.service": RUNNING, "containerd.service": RUNNING}, Choice("cri-o", "crio.service")),
        ({"containerd.service": "failed"}, Choice("containerd", "containerd.service")),
        ({"crio.service": "activating"}, Choice("cri-o", "crio.service")),
        ({"crio.service": "failed", "containerd.service": "failed"}, Choice("containerd", "containerd.service")),
        ({"crio.service": "failed", "containerd.service": RUNNING}, Choice("containerd", "containerd.service")),
    ],
)
def test_runtime_is_detected_by_unit(states: dict[str, str], expected: Choice) -> None:
    assert choose_runtime("auto", states) == expected


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("unix:///run/containerd/containerd.sock", "containerd.service"),
        ("/run/containerd/containerd.sock", "containerd.service"),
        ("unix:///var/run/crio/crio.sock", "crio.service"),
        ("unix:///run/cri-dockerd.sock", "cri-docker.service"),
        ("unix:///run/k3s/containerd/containerd.sock", "k3s.service"),
        ("unix:///run/another.sock", "crio.service"),
        ("", "crio.service"),
    ],
)
def test_several_runtimes_kubelet_endpoint_decides(endpoint: str, expected: str) -> None:
    states = dict.fromkeys(["crio.service", "cri-docker.service", "k3s.service", "containerd.service"], RUNNING)
    assert choose_runtime("auto", states, endpoint).unit == expected


def test_no_runtime_error_names_units() -> None:
    with pytest.raises(RuntimeChoiceError, match=r"None of crio\.service, .* is running") as caught:
        choose_runtime("auto", dict.fromkeys(UNITS, "inactive"))
    assert caught.value.code == "no-runtime"


def test_requested_runtime_is_used_distribution_needs_unit() -> None:
    assert choose_runtime("docker", {}) == Choice("docker")
    assert choose_runtime("rke2", {"rke2-agent.service": "failed"}) == Choice("rke2", "rke2-agent.service")
    with pytest.raises(RuntimeChoiceError, match=r"Neither k3s\.service nor k3s-agent\.service"):
        choose_runtime("k3s", {"rke2-agent.service": RUNNING})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["/usr/bin/kubelet", "--container-runtime-endpoint=unix:///a.sock"],
            {"container-runtime-endpoint": "unix:///a.sock"},
        ),
        (["kubelet", "--config", "/c.yaml", "--v=2"], {"config": "/c.yaml"}),
        (["/hyperkube", "kubelet", "--config-dir=/d"], {"config-dir": "/d"}),
        (["/usr/bin/kubelet-helper", "--config=/c.yaml"], {}),
        (["kubelet", "--config"], {"config": ""}),
        ([""], {}),
        ([], {}),
    ],
)
def test_kubelet_options_are_parsed(words: list[str], expected: dict[str, str]) -> None:
    assert kubelet_options(words) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: KubeletConfiguration\ncontainerRuntimeEndpoint: unix:///run/a.sock\n", "unix:///run/a.sock"),
        ('containerRuntimeEndpoint: "unix:///run/a.sock" # ours\n', "unix:///run/a.sock"),
        ('{"kind": "KubeletConfiguration",\n "containerRuntimeEndpoint": "unix:///run/a.sock"}', "unix:///run/a.sock"),
        ("# containerRuntimeEndpoint: unix:///run/a.sock\n", ""),
        ('containerRuntimeEndpoint: ""\n', ""),
        ("", ""),
    ],
)
def test_kubelet_file_is_parsed(text: str, expected: str) -> None:
    assert endpoint_in(text) == expected


class Node(System):
    """A system with files only, and the running units."""

    def __init__(self, root: Path, running: tuple[str, ...]) -> None:
        super().__init__(str(root))
        self.running = running

    def run(self, argv: list[str], timeout: float, *_: object, **__: object) -> Completed:  # type: ignore[override]
        del timeout
        return Completed(3, "\n".join("active" if unit in self.running else "inactive" for unit in argv[2:]), "")


def node(tmp_path: Path, *running: str, kubelet: str = "", **files: str) -> Node:
    for name, text in {"proc/1/cmdline": "/sbin/init\0", "proc/77/cmdline": kubelet, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Node(tmp_path, running)


def test_two_runtimes_query_running_kubelet(tmp_path: Path) -> None:
    both = ("crio.service", "containerd.service")
    by_flag = node(
        tmp_path,
        *both,
        kubelet="/usr/bin/kubelet\0--container-runtime-endpoint=unix:///run/containerd/containerd.sock\0",
    )
    assert kubelet_runtime.find(by_flag, "auto").runtime == "containerd"
    files = {
        "etc/kubelet.yaml": "containerRuntimeEndpoint: unix:///var/run/crio/crio.sock\n",
        "etc/kubelet.d/90-site.conf": "containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n",
    }
    by_file = node(
        tmp_path, *both, kubelet="kubelet\0--config=/etc/kubelet.yaml\0--config-dir=/etc/kubelet.d\0", **files
    )
    assert kubelet_runtime.find(by_file, "auto").runtime == "containerd"
    (tmp_path / "etc/kubelet.d/90-site.conf").unlink()
    assert kubelet_runtime.find(by_file, "auto").runtime == "cri-o"


def test_docker_with_cri_dockerd_must_be_requested(tmp_path: Path) -> None:
    machine = node(tmp_path, "cri-docker.service", "containerd.service")
    with pytest.raises(RuntimeChoiceError, match="passes no CDI devices") as caught:
        kubelet_runtime.find(machine, "auto")
    assert caught.value.code == "cri-dockerd"
    assert kubelet_runtime.find(machine, "docker") == Choice("docker")


def test_distribution_without_drop_ins_rejection_names_settings() -> None:
    place = place_of("rke2", "/data/rke2/")
    file, wanted = File(place.generated, "version = 3\n"), ["/etc/cdi", "/srv/cdi"]
    error = refusal("rke2-agent.service", place, file, "CDI is off", wanted)
    assert isinstance(error, ContainerdError)
    assert error.code == "distribution"
    for words in (
        "/data/rke2/agent/etc/containerd/config-v3.toml.tmpl",
        'cdi_spec_dirs = ["/etc/cdi", "/srv/cdi"]',
        "rke2-agent.service",
    ):
        assert words in f"{error} {error.hint}"


@pytest.mark.parametrize(
    ("unit", "program"),
    [
        ("k3s-agent.service", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"),
        ("snap.microk8s.daemon-containerd.service", "/var/snap/microk8s/current/args/containerd.toml"),
    ],
)
def test_distribution_without_program_is_rejected(tmp_path: Path, unit: str, program: str) -> None:
    machine = node(tmp_path, unit, "containerd.service")
    choice = kubelet_runtime.find(machine, "auto")
    assert choice.unit == unit
    with pytest.raises(ContainerdError, match=f"{program} does not exist") as caught:
        ready_daemon(machine, place_of(choice.runtime), unit, ["/etc/cdi"], 1)
    assert unit in caught.value.hint


def test_microk8s_error_names_its_template(tmp_path: Path) -> None:
    place = place_of("microk8s")
    file = File(place.generated, 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n')
    error = refusal("snap.microk8s.daemon-containerd.service", place, file, "CDI is off", ["/etc/cdi"])
    for words in ("containerd-template.toml", "enable_cdi = true", '[plugins."io.containerd.grpc.v1.cri"]', "MicroK8s"):
        assert words in f"{error} {error.hint}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["containerd"], {}),
        (["/usr/bin/containerd", "-c", "/a.toml", "-a=/a.sock"], {"config": "/a.toml", "address": "/a.sock"}),
        (["containerd", "--log-level", "info", "--config=/a.toml"], {"config": "/a.toml"}),
        ([], {}),
    ],
)
def test_containerd_flags_are_parsed(words: list[str], expected: dict[str, str]) -> None:
    assert option_values(words, Daemon.options) == expected
