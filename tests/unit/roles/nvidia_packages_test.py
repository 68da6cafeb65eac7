# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The roles of the NVIDIA packages: refused platforms, skipped nodes, and the sources of packages and keys."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from playing import play

ROLES = Path(__file__).resolve().parents[3] / "roles"
DEBIAN = {"id": "debian", "version_id": "12", "pretty_name": "Debian GNU/Linux 12 (bookworm)"}
ROCKY = {"id": "rocky", "version_id": "9.5", "pretty_name": "Rocky Linux 9.5 (Blue Onyx)"}
SUSE = {"id": "sles", "version_id": "15.6", "pretty_name": "SUSE Linux Enterprise Server 15 SP6"}
EULER = {"id": "openEuler", "version_id": "24.03", "pretty_name": "openEuler 24.03 (LTS)"}
FEDORA = {"id": "fedora", "version_id": "43", "pretty_name": "Fedora Linux 43"}
OLD_ROCKY = {"id": "rocky", "version_id": "7.9", "pretty_name": "Rocky Linux 7.9"}
DIGEST = {"a_1_amd64.deb": "0" * 64}


def node(release: dict[str, str], *, gpus: bool = True, machine: str = "x86_64") -> dict[str, Any]:
    return {"platform": {"os_release": release, "machine": machine}, "devices": {"nvidia": ["0"]} if gpus else {}}


@pytest.mark.parametrize("role", ["nvidia_container_toolkit", "nvidia_fabric_manager"])
def test_unsupported_platforms_and_packages_without_a_digest_are_rejected(role: str, tmp_path: Path) -> None:
    brought = {
        f"{role}_source": "files",
        f"{role}_files": ["/srv/a_1_amd64.deb", "/srv/b_1_amd64.deb"],
        f"{role}_checksums": DIGEST,
    }
    hosts = {"fedora": {"on": FEDORA}, "rocky": {"on": OLD_ROCKY}, "debian": {"on": DEBIAN, **brought}}
    # The first two tasks refuse the platform. The third one would query the host.
    tasks = yaml.safe_load((ROLES / role / "tasks/apply.yml").read_text("utf-8"))[:2]
    given = {name: {f"{role}_node_info": node(each.pop("on")), **each} for name, each in hosts.items()}
    defaults = yaml.safe_load((ROLES / role / "defaults/main.yml").read_text("utf-8"))
    read = {"ansible.builtin.include_vars": str(ROLES / role / "vars/main.yml")}
    played = play(tmp_path, [read, *tasks], {name: {**defaults, **each} for name, each in given.items()})
    output = {name: each["msg"] for name, each in played.failed.items()}
    assert set(output) == set(hosts), played.output
    assert "Rocky Linux 7.9" in output["rocky"] and "Fedora Linux 43" in output["fedora"]
    assert "b_1_amd64.deb" in output["debian"] and "a_1_amd64.deb" not in output["debian"].partition("Write")[0]


def test_coherent_memory_becomes_a_parameter_of_the_module(tmp_path: Path) -> None:
    role = ROLES / "nvidia_driver"
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text("utf-8"))
    own = {"nvidia_driver_parameters": {"nvidia": {"NVreg_EnableMSI": 1}, "nvidia_uvm": {"uvm_debug": 1}}}
    given = {
        "plain": {**defaults},
        "driver": {**defaults, **own, "nvidia_driver_coherent_memory": "driver"},
    }
    tasks = [
        {"ansible.builtin.include_vars": str(role / "vars/main.yml")},
        {"ansible.builtin.fail": {"msg": "{{ __nvidia_driver_parameters | to_json }}"}},
    ]
    played = play(tmp_path, tasks, given)
    output = {name: yaml.safe_load(each["msg"]) for name, each in played.failed.items()}
    assert output == {
        "plain": {},
        "driver": {
            "nvidia": {"NVreg_EnableMSI": 1, "NVreg_CoherentGPUMemoryMode": "driver"},
            "nvidia_uvm": {"uvm_debug": 1},
        },
    }


def test_toolkit_source_and_skipped_nodes(tmp_path: Path) -> None:
    role = ROLES / "nvidia_container_toolkit"
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text("utf-8"))
    given: dict[str, dict[str, Any]] = {
        "vendor": {"node": node(DEBIAN)},
        "arm": {"node": node(DEBIAN, machine="aarch64")},
        "rocky": {"node": node(ROCKY)},
        "suse": {"node": node(SUSE, machine="aarch64")},
        "euler": {
            "node": node(EULER),
            "nvidia_container_toolkit_repository": "http://mirror/nvidia/stable/rpm/x86_64/",
        },
        "mirror": {
            "node": node(DEBIAN),
            "nvidia_container_toolkit_repository": "http://mirror/nvidia/stable/deb/amd64/",
        },
        "flat": {"node": node(DEBIAN), "nvidia_container_toolkit_repository": "http://mirror/toolkit/"},
        "bare": {"node": node(DEBIAN, gpus=False), "nvidia_container_toolkit_source": "configured"},
        "leaving": {"node": node(DEBIAN, gpus=False), "nvidia_container_toolkit_state": "absent"},
    }
    names = ("repository", "key_url", "skipped", "source")
    reported = ", ".join(f"'{name}': __nvidia_container_toolkit_{name}" for name in names)
    tasks = [
        {"ansible.builtin.include_vars": str(role / "vars/main.yml")},
        {"ansible.builtin.debug": {"msg": f"{{{{ {{{reported}}} | to_json | b64encode }}}}"}},
    ]
    hosts = {
        name: {**defaults, "nvidia_container_toolkit_node_info": each.pop("node"), **each}
        for name, each in given.items()
    }
    played = play(tmp_path, tasks, hosts)
    assert set(played.messages) == set(hosts), played.output
    vendor = "https://nvidia.github.io/libnvidia-container"
    assert {name: (each["repository"].strip(), each["key_url"].strip()) for name, each in played.messages.items()} == {
        "vendor": (f"{vendor}/stable/deb/amd64", f"{vendor}/gpgkey"),
        "arm": (f"{vendor}/stable/deb/arm64", f"{vendor}/gpgkey"),
        "rocky": (f"{vendor}/stable/rpm/x86_64", f"{vendor}/gpgkey"),
        "suse": (f"{vendor}/stable/rpm/aarch64", f"{vendor}/gpgkey"),
        "euler": ("http://mirror/nvidia/stable/rpm/x86_64/", "http://mirror/nvidia/gpgkey"),
        "mirror": ("http://mirror/nvidia/stable/deb/amd64/", "http://mirror/nvidia/gpgkey"),
        "flat": ("http://mirror/toolkit/", "http://mirror/toolkit/gpgkey"),
        "bare": (f"{vendor}/stable/deb/amd64", f"{vendor}/gpgkey"),
        "leaving": (f"{vendor}/stable/deb/amd64", f"{vendor}/gpgkey"),
    }
    assert {name for name, each in played.messages.items() if str(each["skipped"]).strip() == "True"} == {"bare"}
    (fingerprint,) = played.messages["vendor"]["source"]["fingerprints"]
    assert len(fingerprint) == 40 and not played.messages["bare"]["source"] and not played.messages["leaving"]["source"]


#: NVIDIA's repository directory, key file, and key fingerprint according to the vendor's guide, by distribution and
#: release.
AT_VENDOR = "https://developer.download.nvidia.com/compute/cuda/repos"
FIRST_DEBIAN = ("3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC")
NEXT_DEBIAN = ("8793F200.pub", "02182E60104FCDC26EAE1B8597A5D4CB8793F200")
FIRST_RPM = ("D42D0685.pub", "610C7B14E068A878070DA4E99CD0A493D42D0685")
NEXT_SUSE = ("3A8B5622.pub", "CF65941A859D4B4E6870F188736A284B3A8B5622")
#: No fingerprint of this key is known here. The operator sets it.
NEXT_RED_HAT = ("CDF6BA43.pub", "")
FOLDERS: dict[tuple[str, str], tuple[str, tuple[str, str]]] = {
    ("debian", "12"): ("debian12", FIRST_DEBIAN),
    ("debian", "13"): ("debian13", NEXT_DEBIAN),
    ("ubuntu", "22.04"): ("ubuntu2204", FIRST_DEBIAN),
    ("ubuntu", "24.04"): ("ubuntu2404", FIRST_DEBIAN),
    **{(name, "8.10"): ("rhel8", FIRST_RPM) for name in ("rhel", "rocky", "almalinux")},
    **{(name, "9.6"): ("rhel9", FIRST_RPM) for name in ("rhel", "rocky", "almalinux")},
    **{(name, "10.0"): ("rhel10", NEXT_RED_HAT) for name in ("rhel", "rocky", "almalinux")},
    ("ol", "9.6"): ("rhel9", FIRST_RPM),
    ("sles", "15.7"): ("sles15", FIRST_RPM),
    ("opensuse-leap", "15.6"): ("opensuse15", FIRST_RPM),
    ("sles", "16.0"): ("suse16", NEXT_SUSE),
    ("opensuse-leap", "16.0"): ("suse16", NEXT_SUSE),
}
#: A package that identifies the catalog of a family.
KNOWN_BY = {
    "debian": "nvidia-kernel-open-dkms",
    "ubuntu": "nvidia-dkms-open",
    "rhel": "kmod-nvidia-open-dkms",
    "sles": "nvidia-open-driver-G07",
}
FAMILY_OF = {"rocky": "rhel", "almalinux": "rhel", "ol": "rhel", "opensuse-leap": "sles", "openEuler": "rhel"}


def test_driver_source_on_each_platform(tmp_path: Path) -> None:
    """The role reads the variables of the family, then those of the release. The second host of each is an ARM server."""
    role = ROLES / "nvidia_driver"
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text("utf-8"))
    apply = yaml.safe_load((role / "tasks/apply.yml").read_text("utf-8"))
    knows, reads, refuses = apply[:3]
    reads = {**reads, "ansible.builtin.include_vars": f"{role}/vars/{reads['ansible.builtin.include_vars']}"}
    names = ("repository", "key_url", "source", "catalog", "headers")
    reported = ", ".join(f"'{name}': __nvidia_driver_{name}" for name in names)
    tasks = [
        {"ansible.builtin.include_vars": str(role / "vars/main.yml")},
        knows,
        reads,
        refuses,
        {"ansible.builtin.debug": {"msg": f"{{{{ {{{reported}}} | to_json | b64encode }}}}"}},
    ]

    def host(name: str, release: str, machine: str, **more: Any) -> dict[str, Any]:
        there = node({"id": name, "version_id": release, "pretty_name": f"{name} {release}"}, machine=machine)
        return {
            **defaults,
            "nvidia_driver_node_info": there,
            "__nvidia_driver_fetched_key": {"content": "a key"},
            **more,
        }

    machines = {"x86_64": "x86_64", "aarch64": "sbsa"}
    hosts = {
        f"{name}_{release}_{machine}".replace(".", "-"): host(name, release, machine)
        for name, release in FOLDERS
        for machine in machines
    }
    mirror = "http://mirror/rhel9/"
    euler = {
        f"openEuler_{release}": host("openEuler", release, "x86_64", nvidia_driver_repository=mirror)
        for release in ("22.03", "24.03")
    }
    # Configured fingerprints override the known ones. Without a configured repository there is no source.
    given = host("rhel", "10.0", "x86_64", nvidia_driver_repository_fingerprints=["F" * 40])
    bare = host("openEuler", "24.03", "x86_64")
    played = play(tmp_path, tasks, {**hosts, **euler, "given": given, "bare": bare})
    assert set(played.messages) == {*hosts, *euler, "given"}, played.output
    assert set(played.failed) == {"bare"} and "no repository for openEuler 24.03" in played.failed["bare"]["msg"]

    for (name, release), (directory, (key, fingerprint)) in FOLDERS.items():
        for machine, at_vendor in machines.items():
            output = played.messages[f"{name}_{release}_{machine}".replace(".", "-")]
            address = f"{AT_VENDOR}/{directory}/{at_vendor}"
            assert (output["repository"].strip(), output["key_url"].strip()) == (address, f"{address}/{key}"), name
            assert output["source"]["uris"] == [address] and output["source"]["key"] == "a key"
            assert output["source"]["fingerprints"] == ([fingerprint] if fingerprint else []), (name, release)
            packages = {package for offer in output["catalog"] for package in offer["packages"]}
            known = {family for family, package in KNOWN_BY.items() if package in packages}
            assert known == {FAMILY_OF.get(name, name)} and output["headers"], (name, release)
    for name in euler:
        output = played.messages[name]
        assert (
            output["repository"].strip() == mirror
            and output["key_url"].strip() == f"http://mirror/rhel9/{FIRST_RPM[0]}"
        )
        assert output["source"]["fingerprints"] == [FIRST_RPM[1]]
        assert any(KNOWN_BY["rhel"] in offer["packages"] for offer in output["catalog"])
    assert played.messages["given"]["source"]["fingerprints"] == ["F" * 40]


def with_stand_ins(tasks: list[dict[str, Any]], stand_ins: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tasks with replaced modules and roles. Keys are a module's name, or a role's name with its task file."""
    found = []
    for task in tasks:
        made = dict(task)
        for key in ("block", "rescue", "always"):
            if key in made:
                made[key] = with_stand_ins(made[key], stand_ins)
        for key, requested in task.items():
            includes = key == "ansible.builtin.include_role"
            name = requested["name"] if includes else key
            if name in stand_ins:
                del made[key]
                made.pop("vars", None)
                made.update(stand_ins[name])
        found.append(made)
    return found


@pytest.mark.parametrize("role", ["nvidia_container_toolkit", "nvidia_fabric_manager"])
def test_uploaded_packages_are_removed_if_not_installed(role: str, tmp_path: Path) -> None:
    brought = tmp_path / "brought"
    brought.mkdir()
    (brought / "a_1_amd64.deb").write_text("a package")
    tasks = yaml.safe_load((ROLES / role / "tasks/apply.yml").read_text("utf-8"))
    last = [each for each in tasks if "block" in each][-1]
    (exchange,) = (each for each in last["block"] if each["name"].endswith("and clean up"))
    given = {
        f"__{role}_plan": {"steps": ["install a 1"], "changes": ["install a 1"], "up_to_date": False},
        f"__{role}_package_directory": str(brought),
        f"__{role}_copies": ["/srv/a_1_amd64.deb"],
        f"__{role}_bundled": ["a=1"],
        f"{role}_proxy": {},
    }
    clear = {"ansible.builtin.copy": {"content": "", "dest": str(tmp_path / "cleared"), "mode": "0644"}}
    stand_ins = {
        f"dra.accelerators.{role}": {"ansible.builtin.fail": {"msg": "It does not start."}},
        "dra.accelerators.offline": clear,
    }
    played = play(tmp_path, with_stand_ins([exchange], stand_ins), {"node": given})
    assert played.failed["node"]["msg"] == "It does not start.", played.output
    assert not brought.exists() and (tmp_path / "cleared").exists(), played.output


@pytest.mark.parametrize(
    ("restarts", "reboot", "says"),
    [(True, True, ""), (True, "", "requires a reboot"), (False, True, "")],
)
def test_driver_without_published_devices_is_rolled_back(
    *, restarts: bool, reboot: bool | str, says: str, tmp_path: Path
) -> None:
    """A driver that publishes no devices is rolled back. If that needs a reboot, the role reboots with consent and asks for it without."""
    tasks = yaml.safe_load((ROLES / "nvidia_driver/tasks/verify_published.yml").read_text("utf-8"))
    started = tmp_path / "started"
    back = {"after": {"version": "580.1"}, "reboot_required": restarts}
    stand_ins: dict[str, dict[str, Any]] = {
        "dra.accelerators.device_drain": {"ansible.builtin.fail": {"msg": "Not published."}},
        "dra.accelerators.nvidia_driver": {"ansible.builtin.set_fact": {"__nvidia_driver_rollback": back}},
        "dra.accelerators.machine_restart": {
            "ansible.builtin.copy": {"content": "", "dest": str(started), "mode": "0644"}
        },
    }
    given = {
        "__nvidia_driver_moves_pod": False,
        "__nvidia_driver_may_restart": bool(reboot),
        "__nvidia_driver_result": {"previous_available": True, "after": {"version": "595.1"}},
        "nvidia_driver_node_name": "node",
        "nvidia_driver_reboot": reboot,
    }
    made = with_stand_ins(tasks, stand_ins)
    for each in made[0]["rescue"]:
        # The fact replaces the registered result.
        each.pop("register", None)
    played = play(tmp_path, made, {"node": given})
    output = played.failed["node"]["msg"]
    assert "were not published with the driver 595.1: Not published." in output, played.output
    assert "Restored the driver 580.1." in output and (says in output), output
    assert ("requires a reboot" in output) == bool(says)
    assert started.exists() == (restarts and bool(reboot))


@pytest.mark.parametrize(
    ("given", "after", "says"),
    [
        ({}, False, "nvidia_fabric_manager_reboot is not set"),
        ({"nvidia_driver_reboot": False}, False, ""),
        ({"nvidia_driver_reboot": True}, False, ""),
        ({"nvidia_driver_reboot": True}, True, "has another driver loaded than 580.2"),
        ({"nvidia_driver_reboot": True, "nvidia_fabric_manager_reboot": False}, False, ""),
    ],
)
def test_fabric_manager_that_waits_for_a_driver_stops_the_run_by_default(
    given: dict[str, Any], *, after: bool, says: str, tmp_path: Path
) -> None:
    """The driver role left a pending reboot: with consent the reboot and the check run, without consent the run fails."""
    role = ROLES / "nvidia_fabric_manager"
    restart = ROLES / "machine_restart/tasks/main.yml"
    started, requested = tmp_path / "started", tmp_path / "asked"
    there = {"reboot_required": True, "driver_version": "580.2", "needs": ["nvidia-fabricmanager"]}
    touch: dict[str, Any] = {"mode": "0644", "content": ""}
    stand_ins: dict[str, dict[str, Any]] = {
        "ansible.builtin.reboot": {"ansible.builtin.copy": {**touch, "dest": str(started)}},
        "dra.accelerators.nvidia_fabric_manager": {
            "ansible.builtin.set_fact": {"__nvidia_fabric_manager_result": {**there, "reboot_required": after}}
        },
    }
    made = []
    for each in yaml.safe_load((role / "tasks/restart.yml").read_text("utf-8")):
        if "ansible.builtin.include_role" in each:
            # The role's own tasks, with its variables.
            block = with_stand_ins(yaml.safe_load(restart.read_text("utf-8")), stand_ins)
            made.append({"vars": each["vars"], "block": block})
            continue
        (stood_in,) = with_stand_ins([each], stand_ins)
        # The fact replaces the registered result.
        if stood_in.pop("register", ""):
            made.append({"ansible.builtin.copy": {**touch, "dest": str(requested)}, "when": each["when"]})
        made.append(stood_in)
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text("utf-8"))
    read = {"ansible.builtin.include_vars": str(role / "vars/main.yml")}
    host = {**defaults, **given, "__nvidia_fabric_manager_result": there}
    played = play(tmp_path, [read, *made, {"ansible.builtin.debug": {"msg": "What follows runs."}}], {"node": host})
    consents = given.get("nvidia_fabric_manager_reboot", given.get("nvidia_driver_reboot")) is True
    assert (started.exists(), requested.exists()) == (consents, consents), played.output
    assert ("What follows runs." in played.output) == (not says)
    assert played.status == (2 if says else 0) and says in played.output
    pending = "requires a reboot to apply the driver 580.2 with nvidia-fabricmanager"
    assert (pending in played.output) != consents


def test_messages_of_toolkit_and_engines(tmp_path: Path) -> None:
    """A message appears only for changes. Skipped engines are not reported."""
    skipped = {"changed": False, "skipped": True}
    quiet: dict[str, Any] = {"steps": [], "missing_requirements": {}, "unmanaged": [], "up_to_date": True}
    containerd = {
        "up_to_date": False,
        "files": ["/etc/containerd/x.toml"],
        "restarted": True,
        "pods": ["team-a/pod"],
    }
    docker = {"up_to_date": False, "file": "/etc/docker/daemon.json", "reloaded": True}
    hosts: dict[str, dict[str, Any]] = {
        "quiet": {"plan": quiet, "containerd": {"up_to_date": True}, "docker": {"up_to_date": True}},
        "packages": {
            "plan": {**quiet, "steps": ["install the toolkit"], "missing_requirements": {"hold": "It is held."}}
        },
        "engines": {"plan": quiet, "containerd": containerd, "docker": docker},
        "owed": {"plan": quiet, "containerd": {**containerd, "files": [], "pods": []}},
        "leaves": {
            "plan": {**quiet, "unmanaged": ["nvidia-container-toolkit 1.18"]},
            "docker": docker,
            "state": "absent",
        },
    }
    defaults = yaml.safe_load((ROLES / "nvidia_container_toolkit/defaults/main.yml").read_text("utf-8"))
    given = {
        name: {
            **defaults,
            "nvidia_container_toolkit_state": each.get("state", "present"),
            "__nvidia_container_toolkit_plan": each["plan"],
            "__nvidia_container_toolkit_containerd": each.get("containerd", skipped),
            "__nvidia_container_toolkit_docker": each.get("docker", skipped),
        }
        for name, each in hosts.items()
    }
    read = {"ansible.builtin.include_vars": str(ROLES / "nvidia_container_toolkit/vars/main.yml")}
    tell = {"ansible.builtin.debug": {"msg": "{{ __nvidia_container_toolkit_messages | to_json | b64encode }}"}}
    played = play(tmp_path, [read, tell], given)
    assert played.status == 0, played.output
    assert played.messages == {
        "quiet": [],
        "packages": [
            "install the toolkit",
            "It is held.",
            "no disruption: running containers keep their runtime",
        ],
        "engines": [
            "containerd: add the runtime nvidia in /etc/containerd/x.toml, and restart it; running containers continue, pods of these containers: team-a/pod",
            "Docker: add the runtime nvidia in /etc/docker/daemon.json, and reload it; running containers continue",
        ],
        "owed": [
            "containerd: add the runtime nvidia in its unchanged files, and restart it; running containers continue, no pod runs on the node"
        ],
        "leaves": [
            "Docker: remove the runtime nvidia in /etc/docker/daemon.json, and reload it; running containers continue",
            "kept, because this role did not install it: nvidia-container-toolkit 1.18",
        ],
    }


class Proxy(ThreadingHTTPServer):
    """An HTTP proxy that answers each request with a key, and records the URLs."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.urls.append(self.path)
                self.send_response(200)
                self.send_header("Content-Length", "7")
                self.end_headers()
                self.wfile.write(b"the-key")

            def log_message(self, *_words: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.mark.parametrize("role", ["nvidia_driver", "nvidia_container_toolkit"])
def test_the_key_is_downloaded_through_the_proxy_and_the_error_names_its_variable(role: str, tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROLES / role / "tasks/apply.yml").read_text("utf-8"))
    defaults = yaml.safe_load((ROLES / role / "defaults/main.yml").read_text("utf-8"))
    (download,) = [task for task in tasks if task["name"] == "Download the key of the repository"]
    answer = {
        "ansible.builtin.debug": {"msg": f"{{{{ {{'key': __{role}_fetched_key.content}} | to_json | b64encode }}}}"}
    }
    common = {f"{role}_proxy": defaults[f"{role}_proxy"], f"__{role}_key_url": "http://repository.invalid/key"}
    common |= {
        "nvidia_driver_source": "nvidia",
        "nvidia_driver_state": "present",
        f"{role}_repository_key": "",
        "__nvidia_driver_bundle": [],
        "__nvidia_container_toolkit_from_repository": True,
    }
    with Proxy() as proxy:
        thread = Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        through = {"accelerator_proxy": {"http_proxy": f"http://127.0.0.1:{proxy.server_port}"}}
        closed = {"accelerator_proxy": {"http_proxy": "http://127.0.0.1:9"}}
        hosts = {"through": common | through, "closed": common | closed, "without": common}
        played = play(tmp_path, [download, answer], hosts)
        proxy.shutdown()
        thread.join()
    assert proxy.urls == ["http://repository.invalid/key"], played.output
    assert played.messages == {"through": {"key": "the-key"}}
    assert set(played.failed) == {"closed", "without"}
    assert "proxy of accelerator_proxy (http_proxy)" in played.failed["closed"]["msg"]
    assert "Set accelerator_proxy" in played.failed["without"]["msg"]
    assert all(f"{role}_repository_key" in each["msg"] for each in played.failed.values())


def test_a_reboot_over_a_local_connection_is_rejected(tmp_path: Path) -> None:
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.machine_restart", "tasks_from": "local"}}]
    reported = {"machine_restart_variable": "nvidia_driver_reboot"}
    hosts = {name: reported | {"machine_restart_consent": name == "yes"} for name in ("yes", "no")}
    hosts["empty"] = reported | {"machine_restart_consent": ""}
    hosts["full-name"] = hosts["yes"] | {"ansible_connection": "ansible.builtin.local"}
    played = play(tmp_path, tasks, hosts)
    assert set(played.failed) == {"yes", "full-name"}, played.output
    assert "nvidia_driver_reboot is true" in played.failed["yes"]["msg"]


@pytest.mark.parametrize(
    ("role", "tasks", "change"),
    [
        ("nvidia_driver", "apply.yml", "Copy the packages and replace the driver"),
        ("nvidia_fabric_manager", "apply.yml", "Copy the packages to the node"),
        ("ascend_driver", "apply.yml", "Install the requirements and copy the packages"),
        ("nvidia_settings", "present.yml", "Apply the settings"),
    ],
)
def test_each_role_that_reboots_asks_before_it_changes_anything(role: str, tasks: str, change: str) -> None:
    (block,) = [
        task["block"]
        for task in yaml.safe_load((ROLES / role / "tasks" / tasks).read_text("utf-8"))
        if change in [each["name"] for each in task.get("block", [])]
    ]
    names = [each["name"] for each in block]
    check = block[names.index("Reject a reboot that is not possible")]
    assert names.index(check["name"]) < names.index(change)
    assert check["vars"]["machine_restart_variable"] == f"{role}_reboot"
