# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Install a bare NPU node: the site playbook installs the driver, the firmware, and ascend-docker-runtime with its
options, and pods get their NPUs from that runtime, like containers of a Docker Engine on the same node.

The packages are simulated (tests/packages). The driver's contains the files of a simulated NPU's driver. The runtime's
contains a program that replaces runc like the vendor's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import EXAMPLES, ROOT, Recap, execute
from tests.cluster.manifests import claim
from tests.cluster.npus import NpuCluster

WORLD = os.environ.get("DRA_ACCELERATORS_NPU_RUNTIME_WORLD", "npu-runtime")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
EXAMPLE = "ascend/vendor-runtime.yaml"
#: The driver version that the simulated NPUs report.
DRIVER, NEWER_DRIVER, FIRMWARE, RUNTIME, NEWER_RUNTIME = "25.2.0", "25.5.1", "7.7.0.1.231", "6.0.0", "7.0.0"
PROGRAM = "/usr/local/Ascend/Ascend-Docker-Runtime/ascend-docker-runtime"
INSTALLED = "/usr/local/Ascend/Ascend-Docker-Runtime/ascend_docker_runtime_install.info"
LOG = "/var/log/ascend-docker-runtime/runtime-run.log"
HAVING = "/opt/driver-of-the-vendor"
LAYOUT = ["vir02", "vir04"]
#: Environment of images for these chips.
LIBRARIES = "--env=LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common"
#: Examples whose pods also run without that runtime, and the names of chips and vNPUs that their containers show.
SEEN = {
    "ascend/whole-npu.yaml": {"whole-npu": ["310P3"]},
    "ascend/near-npus.yaml": {"near-npus": ["310P3", "310P3"]},
    "ascend/static-vnpu.yaml": {"static-vir04": ["310Pvir04"]},
}
#: A node before a driver is installed: its NPUs are only on the bus.
WITHOUT_DRIVER = f"""set -eu
cd /
rm -f usr/local/Ascend/driver/version.info
mkdir -p {HAVING}
cp -a --parents usr/local/Ascend/driver usr/local/dcmi usr/local/bin/npu-smi etc/ld.so.conf.d/ascend_driver_so.conf {HAVING}
rm -rf usr/local/Ascend usr/local/dcmi usr/local/bin/npu-smi etc/ld.so.conf.d/ascend_driver_so.conf etc/ascend_install.info etc/vnpu.cfg*
rm -f dev/davinci* dev/vdavinci* dev/devmm_svm dev/hisi_hdc dev/dvpp_cmdlist
userdel HwHiAiUser
"""
#: A site's Docker Engine config. The node's disk is a container's, on which Docker cannot create layers; its volume
#: can.
SITE = """{
  "data-root": "/var/lib/containerd/docker",
  "bridge": "none", "iptables": false,
  "labels": ["of=the-site"]
}
"""
ENGINE = """set -eu
mkdir -p /etc/docker
cat >/etc/docker/daemon.json
apt-get -q update
DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends -o Dpkg::Options::=--force-confold docker.io
systemctl is-active docker.service
ctr -n k8s.io images export --platform linux/amd64 /root/probe.tar docker.io/library/debian:12
docker load --quiet --input /root/probe.tar
"""


def package(folder: Path, kind: str, version: str, **values: str) -> Path:
    """Create a package on the controller, as an administrator gets it from the vendor."""
    words = [f"{name}={value}" for name, value in values.items()]
    made = execute([sys.executable, "-B", ROOT / "tests/packages/make.py", folder, kind, version, *words])
    return Path(made.stdout.strip())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def runtime_variables(path: Path) -> dict[str, Any]:
    return {"ascend_runtime_package": str(path), "ascend_runtime_checksum": digest(path)}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the vendor's packages on the controller."""
    folder = tmp_path_factory.mktemp("packages")
    return {
        "driver": package(folder, "driver", DRIVER, FILES=HAVING),
        "firmware": package(folder, "firmware", FIRMWARE),
        "newer driver": package(folder, "driver", NEWER_DRIVER, EFFECT="It takes effect immediately."),
        RUNTIME: package(folder, "runtime", RUNTIME),
        NEWER_RUNTIME: package(folder, "runtime", NEWER_RUNTIME),
    }


@pytest.fixture(scope="module")
def npus() -> Iterator[NpuCluster]:
    """Yield one node with eight NPUs without any of the vendor's software."""
    made = NpuCluster(WORLD)
    if not KEPT:
        made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "8x310P-Pro", timeout=3000)
    made.shell(made.nodes()[0], f"[ -e {HAVING} ] || {{ {WITHOUT_DRIVER} }}")
    yield made
    if not KEPT:
        made.world("down")


@pytest.fixture(scope="module")
def node(npus: NpuCluster) -> str:
    """Return the node's name."""
    (found,) = npus.nodes()
    return found


@pytest.fixture(scope="module")
def before(npus: NpuCluster, node: str) -> dict[str, str]:
    """Return containerd's config files before the installation."""
    return engine_files(npus, node)


@pytest.fixture(scope="module")
def first(npus: NpuCluster, packages: dict[str, Path], before: dict[str, str]) -> Recap:
    """Run the site playbook for the first time with the driver and the runtime enabled."""
    npus.variables = {
        "accelerator_ascend_driver_enabled": True,
        "ascend_driver_package": str(packages["driver"]),
        "ascend_driver_firmware": str(packages["firmware"]),
        "ascend_driver_checksums": {packages[kind].name: digest(packages[kind]) for kind in ("driver", "firmware")},
        "ascend_driver_accept_eula": True,
        "ascend_driver_reboot": True,
        "ascend_driver_reboot_command": "systemctl reboot",
        # The kernel is the test host's, without headers here.
        "ascend_driver_build": False,
        "accelerator_ascend_runtime_enabled": True,
        **runtime_variables(packages[RUNTIME]),
        "ascend_runtime_accept_eula": True,
        "dra_driver_vendor_runtimes": ["ascend"],
    }
    return npus.playbook("site.yml", check=False)


@pytest.fixture(scope="module")
def docker(npus: NpuCluster, node: str, first: Recap) -> str:
    """Install Debian's Docker Engine with the site's config; return the ID of a running container."""
    assert not first.failed
    npus.run(node, "sh", "-c", ENGINE, text=SITE, timeout=600)
    return npus.run(node, "docker", "run", "--detach", "--network=none", "debian:12", "sleep", "3600").strip()


def engine_files(npus: NpuCluster, node: str) -> dict[str, str]:
    """Return the config files of the node's engines."""
    said = npus.shell(node, "find /etc/containerd /etc/docker -type f -not -name '*.dpkg-*' 2>/dev/null || true")
    return {path: npus.run(node, "cat", path) for path in said.split() if not path.endswith("key.json")}


def boot_id(npus: NpuCluster, node: str) -> str:
    return npus.run(node, "cat", "/proc/sys/kernel/random/boot_id").strip()


def of_the_newer_driver(packages: dict[str, Path]) -> dict[str, Any]:
    """Return a site's variables for a newer driver."""
    path = packages["newer driver"]
    known = {packages[kind].name: digest(packages[kind]) for kind in ("newer driver", "firmware")}
    return {"ascend_driver_package": str(path), "ascend_driver_checksums": known}


def installed_driver(npus: NpuCluster, node: str) -> str:
    """Return the version in the driver's version.info."""
    text = npus.run(node, "cat", "/usr/local/Ascend/driver/version.info")
    return re.findall(r"^Version=(.*)$", text, re.MULTILINE)[0]


def handlers(npus: NpuCluster, node: str) -> dict[str, str]:
    """Return the programs of the running containerd's runtime handlers; empty for its default."""
    info = json.loads(npus.run(node, "crictl", "info"))["config"]["containerd"]["runtimes"]
    return {name: (each.get("options") or {}).get("BinaryName", "") for name, each in info.items()}


def through(example: str) -> dict[str, Any]:
    """Return an example's objects with pods that use the runtime class."""
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / example).read_text(encoding="utf-8"))
    for item in document["items"]:
        if item["kind"] == "Pod":
            item["spec"]["runtimeClassName"] = "ascend"
    return document


def listed(text: str) -> list[str]:
    """Return the names of all chips and vNPUs in the output of npu-smi."""
    return re.findall(r"^\| \d+ +(310P\w*) +\| OK ", text, re.MULTILINE)


def seen_by(npus: NpuCluster, pod: str) -> list[str]:
    """Return the devices that a pod's npu-smi lists."""
    return listed(npus.wait(f"{pod} printing its devices", lambda: npus.log(pod), timeout=60))


def nodes_in(npus: NpuCluster, pod: str) -> set[str]:
    """Return the NPU device nodes in a pod's container."""
    return set(re.findall(r"v?davinci\d+", npus.kubectl("exec", pod, "--", "ls", "/dev")))


def has_only_its_layout(npus: NpuCluster, node: str) -> bool:
    """Return whether the node has only the layout's vNPUs, and no CDI file of a claim."""
    return sorted(line.split()[2] for line in npus.instances(node)) == LAYOUT and not npus.cdi_files(node)


def test_node_without_a_driver_is_rejected_by_name(npus: NpuCluster, node: str) -> None:
    refused = npus.playbook("site.yml", "--tags", "preflight", check=False)
    assert refused.failed and "/dev/davinci_manager" in refused.output, refused.output


def test_the_site_installs_driver_firmware_and_runtime_on_a_bare_node(
    npus: NpuCluster, node: str, first: Recap, before: dict[str, str]
) -> None:
    assert not first.failed, first.output
    said = npus.shell(
        node,
        "cat /usr/local/Ascend/driver/version.info /usr/local/Ascend/firmware/version.info /etc/ascend_install.info",
    )
    assert f"Version={DRIVER}" in said and f"Version={FIRMWARE}" in said and "Driver_Install_Status=complete" in said
    assert handlers(npus, node)["ascend"] == PROGRAM and handlers(npus, node)["runc"] == ""
    now = engine_files(npus, node)
    assert all(now[path].startswith(text) for path, text in before.items()), now
    assert has_only_its_layout(npus, node)


def test_pods_get_their_npus_from_the_runtime(npus: NpuCluster, node: str, first: Recap) -> None:
    assert not first.failed
    npus.shell(node, f"rm -f {LOG}")
    npus.apply(EXAMPLES / EXAMPLE)
    npus.wait_running("npu-by-runtime", "vnpu-by-runtime")
    assert seen_by(npus, "npu-by-runtime") == ["310P3"] and seen_by(npus, "vnpu-by-runtime") == ["310Pvir02"]
    for pod, virtual in (("npu-by-runtime", False), ("vnpu-by-runtime", True)):
        # Of its first process: a variable that the runtime adds is not in later processes of the engine.
        environment = npus.kubectl("exec", pod, "--", "cat", "/proc/1/environ").split("\0")
        assert "ASCEND_DOCKER_RUNTIME=True" in environment
        number = next(each.partition("=")[2] for each in environment if each.startswith("ASCEND_VISIBLE_DEVICES="))
        assert nodes_in(npus, pod) == {f"davinci{number}"}
        assert ("ASCEND_RUNTIME_OPTIONS=VIRTUAL" in environment) == virtual
        assert f"{'slices' if virtual else 'NPUs'} [{number}]" in npus.run(node, "cat", LOG)
    for name in npus.cdi_files(node):
        document = json.loads(npus.run(node, "cat", f"/var/run/cdi/{name}"))
        edits = [document.get("containerEdits", {}), *(each["containerEdits"] for each in document["devices"])]
        assert all(set(each) <= {"env", "mounts"} for each in edits), document
        assert not any(mount["hostPath"].startswith("/usr/local") for each in edits for mount in each.get("mounts", []))
    npus.delete(EXAMPLES / EXAMPLE)
    npus.wait("the node has only its layout", lambda: has_only_its_layout(npus, node))


@pytest.mark.parametrize("example", SEEN)
def test_unchanged_examples_work_with_the_runtime(npus: NpuCluster, node: str, first: Recap, example: str) -> None:
    assert not first.failed
    runtime_class = next(item for item in through(EXAMPLE)["items"] if item["kind"] == "RuntimeClass")
    npus.apply(runtime_class, through(example))
    npus.wait_running(*SEEN[example])
    for pod, names in SEEN[example].items():
        assert seen_by(npus, pod) == names and len(nodes_in(npus, pod)) == len(names)
    npus.delete(through(example))
    npus.wait("the node has only its layout", lambda: has_only_its_layout(npus, node))


def test_pod_without_the_runtime_class_runs_without_npus(npus: NpuCluster, node: str, first: Recap) -> None:
    assert not first.failed
    npus.apply(EXAMPLES / "ascend/whole-npu.yaml")
    npus.wait_running("whole-npu")
    assert nodes_in(npus, "whole-npu") == set()
    npus.delete(EXAMPLES / "ascend/whole-npu.yaml")
    npus.wait("the node has only its layout", lambda: has_only_its_layout(npus, node))


def test_claim_that_the_runtime_variable_cannot_express_is_rejected(npus: NpuCluster, node: str, first: Recap) -> None:
    assert not first.failed
    wanted = claim("two-requests", device_class="npu.huawei.com")
    (request,) = wanted["spec"]["devices"]["requests"]
    wanted["spec"]["devices"]["requests"] = [request, {**request, "name": "other"}]
    user = through("ascend/whole-npu.yaml")["items"][1]
    user["metadata"]["name"] = "two-requests"
    user["spec"]["resourceClaims"][0]["resourceClaimName"] = "two-requests"
    npus.apply(wanted, user)

    def said() -> str:
        found = json.loads(npus.kubectl("get", "events", "-n", "default", "-o", "json"))["items"]
        named = (each for each in found if each["involvedObject"]["name"] == "two-requests")
        return next((str(each["message"]) for each in named if "vendor_runtimes" in each["message"]), "")

    assert "2 requests" in npus.wait("an Event with the reason", said, timeout=90)
    npus.delete(user, wanted)
    npus.wait("the node has only its layout", lambda: has_only_its_layout(npus, node))


def test_second_run_changes_nothing_while_pods_run(npus: NpuCluster, node: str, first: Recap) -> None:
    assert not first.failed
    npus.apply(EXAMPLES / EXAMPLE)
    npus.wait_running("npu-by-runtime", "vnpu-by-runtime")
    boot = boot_id(npus, node)
    again = npus.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output
    assert boot_id(npus, node) == boot
    npus.delete(EXAMPLES / EXAMPLE)


def test_a_newer_driver_is_not_installed_under_pods_that_have_npus(
    npus: NpuCluster, node: str, first: Recap, packages: dict[str, Path]
) -> None:
    assert not first.failed
    npus.apply(EXAMPLES / "ascend/whole-npu.yaml")
    npus.wait_running("whole-npu")
    refused = npus.playbook(
        "site.yml", "--tags", "vendor_driver", "-e", json.dumps(of_the_newer_driver(packages)), check=False
    )
    assert refused.failed and "Prepared claims have NPUs" in refused.output and "whole-npu" in refused.output
    assert installed_driver(npus, node) == DRIVER
    npus.delete(EXAMPLES / "ascend/whole-npu.yaml")
    npus.wait("the node has only its layout", lambda: has_only_its_layout(npus, node))


def test_newer_driver_is_installed_on_an_idle_node_and_downgraded(
    npus: NpuCluster, node: str, first: Recap, packages: dict[str, Path]
) -> None:
    """The newer driver takes effect at once. The previous one, which the node has kept, needs a reboot."""
    assert not first.failed
    process, boot = npus.driver_pid(node), boot_id(npus, node)
    wanted = json.dumps(of_the_newer_driver(packages))
    replaced = npus.playbook("site.yml", "--tags", "vendor_driver", "-e", wanted)
    assert not replaced.failed and installed_driver(npus, node) == NEWER_DRIVER, replaced.output
    npus.wait_registered(node)
    assert npus.driver_pid(node) != process and boot_id(npus, node) == boot
    again = npus.playbook("site.yml", "--tags", "vendor_driver", "-e", wanted)
    assert (again.failed, again.changed) == (0, 0), again.output
    back = npus.playbook("site.yml", "--tags", "vendor_driver", "-e", "ascend_driver_state=previous")
    assert not back.failed and installed_driver(npus, node) == DRIVER, back.output
    npus.wait_registered(node)
    assert boot_id(npus, node) != boot
    npus.apply(EXAMPLES / EXAMPLE)
    npus.wait_running("npu-by-runtime", "vnpu-by-runtime")
    assert seen_by(npus, "npu-by-runtime") == ["310P3"]
    npus.delete(EXAMPLES / EXAMPLE)
    npus.wait("the node has only its layout", lambda: has_only_its_layout(npus, node))


def known_to_docker(npus: NpuCluster, node: str) -> dict[str, str]:
    """Return the programs of the running Docker's runtimes."""
    said = json.loads(npus.run(node, "docker", "info", "--format", "{{json .}}"))
    assert said["DefaultRuntime"] == "runc"
    return {name: each.get("path", "") for name, each in said["Runtimes"].items()}


def in_docker(npus: NpuCluster, node: str, *words: str) -> list[str]:
    """Return the devices that npu-smi lists in a Docker container with these options."""
    words = ("--rm", "--network=none", LIBRARIES, *words, "debian:12")
    return listed(npus.run(node, "docker", "run", *words, "sh", "-c", "npu-smi info || true"))


def is_container_running(npus: NpuCluster, node: str, container: str) -> bool:
    """Return whether a container from the start of the test still runs without a restart."""
    said = npus.run(node, "docker", "inspect", "--format", "{{.State.Running}} {{.RestartCount}}", container)
    return said.split() == ["true", "0"]


def test_docker_gets_the_runtime_without_a_restart(npus: NpuCluster, node: str, docker: str) -> None:
    assert "ascend" not in known_to_docker(npus, node)
    started = npus.run(node, "systemctl", "show", "--property=MainPID", "docker.service")
    npus.variables = {**npus.variables, "ascend_runtime_engines": ["containerd", "docker"]}
    done = npus.playbook("site.yml", "--tags", "runtime")
    assert (done.failed, done.changed) == (0, 1), done.output
    assert known_to_docker(npus, node)["ascend"] == PROGRAM
    site = json.loads(npus.run(node, "cat", "/etc/docker/daemon.json"))
    assert site == {**json.loads(SITE), "runtimes": {"ascend": {"path": PROGRAM}}}
    again = npus.playbook("site.yml", "--tags", "runtime")
    assert (again.failed, again.changed) == (0, 0), again.output
    assert npus.run(node, "systemctl", "show", "--property=MainPID", "docker.service") == started
    assert is_container_running(npus, node, docker)


def test_docker_containers_get_their_named_npus(npus: NpuCluster, node: str, docker: str) -> None:
    slices = {template: vid for _chip, vid, template in (line.split() for line in npus.instances(node))}
    by = ("--runtime=ascend",)
    assert in_docker(npus, node, *by, "--env=ASCEND_VISIBLE_DEVICES=6") == ["310P3"]
    assert in_docker(npus, node, *by, "--env=ASCEND_VISIBLE_DEVICES=4-5,npu-7") == ["310P3"] * 3
    for template, vid in slices.items():
        words = (f"--env=ASCEND_VISIBLE_DEVICES={vid}", "--env=ASCEND_RUNTIME_OPTIONS=VIRTUAL")
        assert in_docker(npus, node, *by, *words) == [f"310P{template}"]
    assert in_docker(npus, node, *by) == in_docker(npus, node, *by, "--env=ASCEND_VISIBLE_DEVICES=void") == []
    assert in_docker(npus, node, "--env=ASCEND_VISIBLE_DEVICES=6") == []
    # Then the files are mounts of the container and not created by a hook.
    words = npus.run(node, "cat", INSTALLED)
    npus.run(node, "tee", INSTALLED, text=words.replace("=legacy", "=cdi"))
    assert in_docker(npus, node, *by, "--env=ASCEND_VISIBLE_DEVICES=6") == ["310P3"]
    npus.run(node, "tee", INSTALLED, text=words)


def test_runtime_is_updated_while_containers_run(
    npus: NpuCluster, node: str, docker: str, packages: dict[str, Path]
) -> None:
    words = ("--name=by-the-runtime", "--runtime=ascend", "--env=ASCEND_VISIBLE_DEVICES=6", "--network=none", LIBRARIES)
    image = "debian:12"
    npus.run(node, "docker", "run", "--detach", *words, image, "sleep", "3600")
    npus.variables = {**npus.variables, **runtime_variables(packages[NEWER_RUNTIME])}
    done = npus.playbook("site.yml", "--tags", "runtime")
    assert not done.failed and done.changed, done.output
    assert f"version=v{NEWER_RUNTIME}" in npus.run(node, "cat", INSTALLED)
    assert listed(npus.run(node, "docker", "exec", "by-the-runtime", "npu-smi", "info")) == ["310P3"]
    assert in_docker(npus, node, "--runtime=ascend", "--env=ASCEND_VISIBLE_DEVICES=5") == ["310P3"]


def test_removal_is_rejected_while_a_container_uses_the_runtime(npus: NpuCluster, node: str, docker: str) -> None:
    refused = npus.playbook("remove.yml", check=False)
    assert refused.failed and "has started are running" in refused.output, refused.output
    # The runtime that the containers need is still installed, and so is everything else.
    npus.wait_registered(node)
    assert handlers(npus, node)["ascend"] == known_to_docker(npus, node)["ascend"] == PROGRAM
    npus.run(node, "docker", "rm", "--force", "by-the-runtime")


def test_removal_restores_the_previous_state_and_keeps_the_driver(
    npus: NpuCluster, node: str, docker: str, before: dict[str, str]
) -> None:
    done = npus.playbook("remove.yml")
    assert not done.failed, done.output
    assert engine_files(npus, node) == {**before, "/etc/docker/daemon.json": SITE}
    assert "ascend" not in handlers(npus, node) and "ascend" not in known_to_docker(npus, node)
    assert is_container_running(npus, node, docker)
    rest = (
        "find /usr/local/Ascend /etc/ascend-docker-runtime.d /var/lib/dra-accelerators -maxdepth 1 2>/dev/null || true"
    )
    folder = "/usr/local/Ascend"
    assert sorted(npus.shell(node, rest).split()) == [
        *(folder, f"{folder}/driver", f"{folder}/firmware"),
        *("/var/lib/dra-accelerators", "/var/lib/dra-accelerators/ascend"),
    ]
    assert listed(npus.run(node, "npu-smi", "info"))
    again = npus.playbook("remove.yml")
    assert (again.failed, again.changed) == (0, 0), again.output
