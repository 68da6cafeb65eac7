# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a node whose driver runs as a pod, from the first run to the removal: it has all functions of the service, and
a removal leaves nothing.

A separate world with one node. Each test starts from the state that the previous one left.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER_UNIT, EXAMPLES, execute
from tests.cluster.container_edits import check_hook_environment
from tests.cluster.machines import drivers, listed
from tests.cluster.manifests import claim, deployed, device_named, mps, pod
from tests.cluster.shown_secrets import check_no_secret
from tests.cluster.test_28_mps import computing, daemons, modes, printed_limits
from tests.cluster.token_requests import request_token, token_of, with_token
from tests.debian import programs
from tests.prove.pods import DYNAMIC, NAMESPACE, PodForm, bare_world, images, the_pod, variables

MACHINES = [{"match": {"index": [5, 6]}, "mode": "dynamic", "passthrough": True}, *DYNAMIC]


@pytest.fixture(scope="module")
def form() -> Iterator[PodForm]:
    """Yield a bare world with its footprint."""
    with bare_world("pod") as form:
        yield form


def test_first_run_reports_the_devices_and_second_run_changes_nothing(form: PodForm) -> None:
    checked = form.playbook("site.yml", "--check", "--diff")
    assert not checked.failed and "DaemonSet" in checked.output, checked.output
    assert form.cluster.footprint() | images(form.cluster, form.node) == form.before
    first = form.playbook("site.yml")
    assert not first.failed, first.output
    (line,) = re.findall(rf"{form.node}\s+(\d+)\s+NVIDIA H100", first.output)
    assert line == "8", first.output
    assert f"{form.node}: the driver was started or reloaded, and is ready, 8 devices" in first.output
    again = form.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output


OPEN_DEVICE = """
import errno, os, stat, sys
path = "/host/dev/dra-accelerators-test"
os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(int(sys.argv[1]), 0))
try:
    os.close(os.open(path, os.O_RDONLY))
    print("opened")
except OSError as error:
    print(errno.errorcode[error.errno])
finally:
    os.unlink(path)
"""


def test_runtime_class_is_reserved_for_the_driver(form: PodForm) -> None:
    """A tenant's pod with the driver's RuntimeClass could open every device of the vendors."""
    cluster = form.cluster

    def with_class(namespace: str, account: str) -> dict[str, Any]:
        document = pod("hostile", node=form.node)
        document["metadata"]["namespace"] = namespace
        document["spec"] |= {"runtimeClassName": "dra-accelerators-driver", "serviceAccountName": account}
        return document

    def dry_run(document: dict[str, Any]) -> str:
        """Return the API server's answer to a server-side dry run."""
        return cluster.kubectl(
            "create", "--dry-run=server", "-f", "-", text=json.dumps(document), check=False, merge=True
        )

    refused = "RuntimeClass dra-accelerators-driver is reserved for the node driver"
    assert refused in dry_run(with_class("default", "default"))
    assert refused in dry_run(with_class(NAMESPACE, "default"))
    assert refused not in dry_run(with_class(NAMESPACE, "driver"))
    deployment = deployed("hostile", 1, with_class("default", "default")["spec"] | {"restartPolicy": "Always"})
    cluster.apply(deployment)
    try:
        cluster.wait(
            "the ReplicaSet reports the rejection", lambda: refused in json.dumps(cluster.get("events")["items"])
        )
        assert not [each for each in cluster.get("pods")["items"] if each["metadata"]["name"].startswith("hostile")]
    finally:
        cluster.delete(deployment)
    # The driver's own container opens NVIDIA's devices and no others (21 is SCSI generic, 10 are miscellaneous
    # devices).
    name = the_pod(cluster)["metadata"]["name"]
    opened = {
        major: cluster.kubectl(
            "exec", name, "-n", NAMESPACE, "-c", "driver", "--", "python3", "-c", OPEN_DEVICE, str(major)
        ).strip()
        for major in (195, 21, 10)
    }
    assert opened == {195: "ENXIO", 21: "EPERM", 10: "EPERM"}


SPECIFICATION = "/etc/containerd/dra-accelerators-driver.json"
#: Removes the major number of nvidia-caps from the specification, as if the kernel had chosen another one at the last
#: boot.
FORGET_CAPS = f"""
import json
document = json.load(open("{SPECIFICATION}"))
(major,) = [int(line.split()[0]) for line in open("/proc/devices") if line.split()[1:] == ["nvidia-caps"]]
rules = document["linux"]["resources"]["devices"]
document["linux"]["resources"]["devices"] = [each for each in rules if each.get("major") != major]
assert len(document["linux"]["resources"]["devices"]) == len(rules) - 1
json.dump(document, open("{SPECIFICATION}", "w"), indent=1, sort_keys=True)
"""


def test_changed_major_number_is_reported_and_repaired_by_the_playbook(form: PodForm) -> None:
    """A container keeps the device rules of its creation, even if the runtime handler has new ones."""
    cluster = form.cluster

    def status() -> str:
        program = "/opt/dra-accelerators/release/dra_driver/run.py"
        command = (
            "python3",
            "-IB",
            program,
            "dra_driver.pod",
            "status",
            "--config",
            "/etc/dra-accelerators/driver-pod.yaml",
        )
        name = the_pod(cluster)["metadata"]["name"]
        return cluster.kubectl("exec", name, "-n", NAMESPACE, "-c", "driver", "--", *command, check=False, merge=True)

    ready, denied = "gpu.nvidia.com: ready", "may not open /dev/nvidia-caps/nvidia-cap1"
    assert ready in status()
    cluster.run(form.node, "python3", "-c", FORGET_CAPS)
    # The rules of the run before the reboot.
    former = "s/^device_rules: .*/device_rules: 0a1b2c3d4e5f6a7b/"
    cluster.run(form.node, "sed", "-i", former, "/etc/dra-accelerators/driver-pod.yaml")
    cluster.run(form.node, "systemctl", "restart", "containerd")
    cluster.kubectl("delete", "pod", the_pod(cluster)["metadata"]["name"], "-n", NAMESPACE, "--wait=true")
    cluster.wait("the driver names the device node", lambda: denied in status())
    repaired = form.playbook("site.yml", "--tags", "driver")
    assert not repaired.failed, repaired.output
    assert ready in (text := status()) and denied not in text, text
    again = form.playbook("site.yml", "--tags", "driver")
    assert (again.failed, again.changed) == (0, 0), again.output


TOKEN_RIGHT = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "Role",
    "metadata": {"name": "token-requests", "namespace": NAMESPACE},
    "rules": [{"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]}],
}
TOKEN_BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "token-requests", "namespace": NAMESPACE},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "token-requests"},
    "subjects": [{"kind": "ServiceAccount", "name": "driver", "namespace": NAMESPACE}],
}


def test_token_of_the_pod_gets_no_other_token(form: PodForm, tmp_path: Path) -> None:
    """The pod's service account has no right to request tokens. With the right, a policy rejects each request."""
    cluster = form.cluster
    stolen = with_token(cluster, form.token(), tmp_path)

    def answers() -> list[str]:
        """Return the answers to requests for the node's own token: bound to it, unbound, for 10 years, and for another
        audience.
        """
        requests: list[tuple[str | None, dict[str, Any]]] = [
            (form.node, {"expirationSeconds": 3600}),
            (None, {"expirationSeconds": 3600}),
            (form.node, {"expirationSeconds": 315360000}),
            (form.node, {"audiences": ["sts.example.com"]}),
        ]
        return [request_token(stolen, NAMESPACE, "driver", bound, **spec) for bound, spec in requests]

    for answer in answers():
        assert "cannot create resource" in answer and "serviceaccounts/token" in answer, answer
    cluster.apply(TOKEN_RIGHT, TOKEN_BINDING)
    try:
        policy = "ValidatingAdmissionPolicy 'dra-accelerators-driver-tokens'"
        cluster.wait("the right is in effect", lambda: all(policy in answer for answer in answers()), timeout=30)
    finally:
        cluster.delete(TOKEN_BINDING, TOKEN_RIGHT)


def test_hook_does_not_inherit_the_environment_of_the_container(form: PodForm) -> None:
    check_hook_environment(form.cluster, form.node, form.restart)
    form.cluster.wait("the claim is removed from the store", lambda: not form.cluster.recorded(form.node))


def test_output_with_diff_and_verbosity_shows_no_token(form: PodForm) -> None:
    """Change from the pod to the service, which writes a token to the node, and back, which removes it, and run a
    removal in check mode.
    """
    loud = ("--diff", "-vvv")
    of_the_pod = form.token()
    service = form.playbook("site.yml", *loud, dra_driver_deploy_as="service")
    assert not service.failed, service.output
    tokens = [of_the_pod, token_of(form.cluster, form.node)]
    removals = [form.playbook("remove.yml", "--check", *loud, dra_driver_deploy_as="service")]
    back = form.playbook("site.yml", *loud)
    assert not back.failed, back.output
    tokens.append(form.token())
    removals.append(form.playbook("remove.yml", "--check", *loud))
    assert "/etc/dra-accelerators/kubeconfig" in removals[0].output
    for recap in (service, back, *removals):
        assert not recap.failed, recap.output
        check_no_secret(recap.output, *tokens)
    again = form.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output


def test_node_is_read_only_except_the_paths_that_the_pod_writes(form: PodForm) -> None:
    seen = form.sees()
    writable = set(seen["writable"])
    assert not writable & {"/host", "/host/run", "/host/proc", "/host/sys"}
    assert {"/host/run/cdi", "/host/run/dra-accelerators/companions"} <= writable
    # The node's runtime can mount nested file systems read-only: control groups are, because a writable one permits an
    # escape.
    assert [each for each in sorted(writable) if each.startswith("/host/sys")] == []
    assert len(seen["opened"]) >= 3 and set(seen["opened"].values()) == {"EROFS"}, seen["opened"]


def test_metrics_are_served_at_the_port_that_prometheus_scrapes(form: PodForm) -> None:
    found = the_pod(form.cluster)
    (container,) = found["spec"]["containers"]
    assert [(each["name"], each["containerPort"]) for each in container["ports"]] == [("metrics", 9817)]
    assert "hostPort" not in container["ports"][0]
    url = f"http://{found['status']['podIP']}:9817/metrics"
    look = f"import urllib.request as u; print(u.urlopen('{url}', timeout=9).read().decode())"
    told_of = form.cluster.run(form.node, "python3", "-c", look)
    assert 'dra_accelerators_devices{driver="gpu.nvidia.com",state="well"} 8.0' in told_of


def test_running_pod_loads_a_changed_configuration(form: PodForm) -> None:
    cluster, before = form.cluster, form.process()
    documents = form.held("kept")
    changed = form.playbook("site.yml", "--tags", "driver", dra_driver_log_level="debug")
    assert not changed.failed, changed.output
    assert form.process() == before, "the log's level is taken over while it runs"
    # A change that needs a new process restarts the container. The claim stays prepared.
    changed = form.playbook("site.yml", "--tags", "driver", dra_driver_cdi_directory="/run/cdi")
    assert not changed.failed, changed.output
    assert form.process() == (before[0], before[1] + 1)
    assert list(cluster.recorded(form.node).values()) == ["prepared"]
    cluster.delete(*reversed(documents))
    cluster.wait("nothing is left of it", lambda: not cluster.recorded(form.node) and not cluster.cdi_files(form.node))


def test_reload_command_on_the_node(form: PodForm) -> None:
    cluster, path, before = form.cluster, "/etc/dra-accelerators/driver-pod.yaml", form.process()
    cluster.run(form.node, "sed", "-i", "s/^inventory_interval: .*/inventory_interval: 7/", path)
    began = time.monotonic()
    cluster.run(form.node, "dra-driver", "reload")
    assert time.monotonic() - began < 9 and form.process() == before
    cluster.run(form.node, "sed", "-i", "s/^inventory_interval: .*/inventory_interval: true/", path)
    said = cluster.shell(form.node, "dra-driver reload 2>&1 || true")
    assert "inventory_interval" in said and form.process() == before
    assert not form.playbook("site.yml", "--tags", "driver").failed


def test_claims_share_a_gpu_through_mps(form: PodForm) -> None:
    cluster, node = form.cluster, form.node
    gpu = cluster.run(node, "nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", "3").strip()
    whole = claim("shared", device_class="gpu.nvidia.com", expression=device_named(gpu))
    whole["spec"]["devices"]["config"] = [mps(defaultActiveThreadPercentage=25, defaultPinnedDeviceMemoryLimit="2Gi")]
    documents = [whole, computing("shared", "shared", node)]
    cluster.apply(*documents)
    cluster.wait_running("shared")
    assert printed_limits(cluster, "shared")["multiprocessors"] == 33
    ((unit, _pid),) = daemons(cluster, node).items()
    assert cluster.uid("shared") in unit
    cluster.delete(*reversed(documents))
    cluster.wait("the daemon has ended", lambda: not cluster.companions(node))
    assert set(modes(cluster, node)) == {"Default"}


def test_gpu_is_passed_to_a_virtual_machine_and_returned(form: PodForm) -> None:
    cluster, node = form.cluster, form.node
    layout = {"accelerator_layouts": [{"hosts": node, "layout": MACHINES}]}
    refused = form.playbook("site.yml", "--tags", "preflight", check=False, **layout)
    assert refused.failed and "dra_driver_pod_passthrough" in refused.output, refused.output
    changed = form.playbook("site.yml", "--tags", "layout,driver", dra_driver_pod_passthrough=True, **layout)
    assert not changed.failed, changed.output
    added = the_pod(cluster)["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
    assert {"SYS_PTRACE", "DAC_READ_SEARCH"} <= set(added)
    writable = {each for each in form.sees()["writable"] if each.startswith("/host/sys")}
    named = ("/host/sys/bus/pci/drivers", "/host/sys/devices")
    assert writable >= set(named) and {each for each in writable if not each.startswith(named)} == set()
    cluster.wait(
        "GPUs are offered to virtual machines", lambda: {"gpu-vfio-5", "gpu-vfio-6"} <= set(cluster.devices(node))
    )
    example = EXAMPLES / "vfio.yaml"
    cluster.apply(example)
    cluster.wait_running("vfio")
    assert listed(cluster, node) == 7 and list(drivers(cluster, node).values()) == ["vfio-pci vfio-pci"]
    cluster.delete(example)
    cluster.wait("the GPU is back", lambda: listed(cluster, node) == 8 and not drivers(cluster, node))


def test_pod_without_host_processes_rejects_mps_by_name(form: PodForm) -> None:
    cluster, node = form.cluster, form.node
    assert not form.playbook("site.yml", "--tags", "layout,driver", dra_driver_pod_host_pid=False).failed
    assert cluster.run(node, "dra-driver", "reload") is not None, "the process is called by its number on the node"
    plain = form.held("plain")
    wanted = claim("shared", device_class="gpu.nvidia.com")
    wanted["spec"]["devices"]["config"] = [mps(defaultActiveThreadPercentage=25)]
    documents = [wanted, pod("shared", "shared", node=node)]
    cluster.apply(*documents)
    cluster.wait(
        "the refusal as an event",
        lambda: "dra_driver_pod_host_pid" in " ".join(cluster.kubectl("get", "events", "-o", "yaml").split()),
    )
    cluster.delete(*reversed(documents), *reversed(plain))
    cluster.wait("nothing is left", lambda: not cluster.recorded(node) and not cluster.companions(node))
    assert not form.playbook("site.yml", "--tags", "driver").failed


def test_image_is_pushed_to_a_registry(form: PodForm, tmp_path: Path) -> None:
    """Use Debian's registry on this host. The world's nodes do not pull from it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config = tmp_path / "registry.json"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "images")}}
    config.write_text(json.dumps({"version": "0.1", "storage": storage, "http": {"addr": f"127.0.0.1:{port}"}}))
    repository = f"127.0.0.1:{port}/site/driver"
    push = {
        **variables(form.base),
        "driver_image_delivery": "push",
        "driver_image_repository": repository,
        "driver_image_manifest_arguments": ["--insecure"],
        "ansible_python_interpreter": sys.executable,
    }
    play = tmp_path / "push.yml"
    roles = [{"role": "dra.accelerators.driver_image"}]
    play.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "vars": push, "roles": roles}]))

    def run() -> str:
        command = ["ansible-playbook", "-i", "localhost,", "-c", "local", play]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"ANSIBLE_NOCOLOR": "1"}
        )
        return done.stdout + done.stderr

    def tags() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/site/driver/tags/list", timeout=10) as answer:
            return list(json.loads(answer.read())["tags"])

    said = run()
    assert "failed=1" in said and "refused" in said, "the registry is not running yet"
    with (tmp_path / "log").open("wb") as log:
        registry = subprocess.Popen(
            [programs("docker-registry") / "docker-registry", "serve", config], stdout=log, stderr=log
        )
    try:
        form.cluster.wait("the registry answers", lambda: _answers(port))
        said = run()
        assert "failed=0" in said and "changed=0" not in said, said
        (tag,) = tags()
        assert re.fullmatch(r"\d+\.\d+\.\d+-[0-9a-f]{8}-[0-9a-f]{8}", tag)
        said = run()
        assert "changed=0" in said and "failed=0" in said, said
        assert tags() == [tag]
    finally:
        registry.terminate()
        registry.wait(30)
        left = execute(["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository]).stdout.split()
        execute(["docker", "image", "rm", "--force", *left])


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5):
            return True
    except OSError:
        return False


def test_removal_with_a_used_claim_needs_force_and_leaves_nothing(form: PodForm) -> None:
    cluster, node = form.cluster, form.node
    form.held("held")
    refused = form.playbook("remove.yml", check=False)
    assert refused.failed and "held" in refused.output, refused.output
    cluster.wait("the driver is ready", lambda: cluster.status(node)["ready"])
    assert not cluster.get("node", node)["spec"].get("unschedulable")
    checked = form.playbook("remove.yml", "--check", "-e", "accelerator_remove_force=true")
    assert not checked.failed and checked.changed, checked.output
    cluster.wait_running("held")
    forced = ("-e", "accelerator_remove_force=true", "-e", "accelerator_remove_reset_layout=true")
    removed = form.playbook("remove.yml", *forced)
    assert not removed.failed, removed.output
    cluster.kubectl("delete", "resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    # The kubelet deletes the directories of a deleted pod in its next periodic cleanup.
    cluster.wait(
        "no log directory of a pod of the driver", lambda: NAMESPACE not in cluster.run(node, "ls", "/var/log/pods")
    )
    after = cluster.footprint() | images(cluster, node)
    difference = {key: (form.before.get(key), after.get(key)) for key in form.before.keys() | after.keys()}
    assert {key: both for key, both in difference.items() if both[0] != both[1]} == {}
    assert NAMESPACE not in cluster.kubectl("get", "namespaces", "-o", "name")
    assert "not-found" in cluster.run(node, "systemctl", "show", "--property=LoadState", DRIVER_UNIT)
    again = form.playbook("remove.yml")
    assert (again.failed, again.changed) == (0, 0), again.output
