# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""External needs of a fleet, as its roles report them without connecting to the hosts, and a host that uses a bundle only."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import Played, play

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = (ROOT / "roles/python_environment/files/requirements.lock").read_text("utf-8").rstrip("\n")
TELL = {"ansible.builtin.debug": {"msg": "{{ offline_needs | to_json | b64encode }}"}}
RUN_FILE = "/srv/Ascend-hdk-910b-npu-driver_25.2.0_linux-x86-64.run"
DEBIAN = {"distribution": "debian", "release": "13", "machine": "x86_64", "kernel": "6.12.48+deb13-amd64"}
HOSTS: dict[str, dict[str, Any]] = {
    "plain": {"accelerator_platform": DEBIAN},
    "vendor": {
        "accelerator_platform": {**DEBIAN, "release": 13},
        "accelerator_nvidia_driver_enabled": True,
        "nvidia_driver_version": "580",
        "accelerator_nvidia_container_toolkit_enabled": True,
        "nvidia_container_toolkit_version": "1.18",
        "accelerator_nvidia_fabric_manager_enabled": True,
    },
    "ubuntu": {
        "accelerator_platform": {"distribution": "ubuntu", "release": "24.04", "machine": "x86_64", "status": "/x"},
        "accelerator_nvidia_driver_enabled": True,
        "nvidia_driver_source": "distribution",
        "nvidia_driver_version": 580,
        "accelerator_bundle_packages": ["tmux"],
    },
    "files": {
        "accelerator_platform": DEBIAN,
        "accelerator_nvidia_driver_enabled": True,
        "nvidia_driver_source": "files",
        "nvidia_driver_files": ["/srv/nvidia-driver-cuda_580.95.05-1_amd64.deb"],
        "nvidia_driver_checksums": {"nvidia-driver-cuda_580.95.05-1_amd64.deb": "ab" * 32},
    },
    "rocky": {
        "accelerator_platform": {
            "distribution": "rocky",
            "release": "9.6",
            "machine": "x86_64",
            "kernel": "5.14.0-570.el9.x86_64",
            "python": "3.12",
        },
        "accelerator_nvidia_driver_enabled": True,
        "nvidia_driver_version": "580",
        "accelerator_nvidia_container_toolkit_enabled": True,
        "accelerator_nvidia_fabric_manager_enabled": True,
        "accelerator_bundle_mirrors": {"rocky_9": []},
    },
    "sles": {
        "accelerator_platform": {"distribution": "sles", "release": "15.7", "machine": "x86_64", "python": "3.11"},
        "python_environment_interpreter": "/usr/bin/python3.11",
        "accelerator_bundle_mirrors": {"sles_15": []},
        "accelerator_bundle_packages": ["tmux"],
    },
    "ascend": {
        "accelerator_platform": {"distribution": "openEuler", "release": "24.03", "machine": "aarch64", "python": 3.11},
        "accelerator_ascend_driver_enabled": True,
        "accelerator_ascend_runtime_enabled": True,
        "ascend_driver_package": RUN_FILE,
        "ascend_runtime_package": "/srv/runtime.run",
    },
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the needs of all these hosts from one run without connections."""
    tasks = next(
        each["tasks"] for each in yaml.safe_load((ROOT / "playbooks/bundle.yml").read_text("utf-8")) if "tasks" in each
    )
    find = next(task for task in tasks if task["name"] == "Determine the needs of each host")
    played = play(tmp_path_factory.mktemp("needs"), [find, TELL], HOSTS)
    assert set(played.messages) == set(HOSTS), played.output
    return played.messages


def of(needs: list[dict[str, Any]], role: str, kind: str) -> list[dict[str, Any]]:
    return [need for need in needs if (need["of"], need["kind"]) == (role, kind)]


def test_every_host_needs_wheels_of_its_python(said: dict[str, list[dict[str, Any]]]) -> None:
    for host, python, machine in (
        ("plain", "3.13", "x86_64"),
        ("ubuntu", "3.12", "x86_64"),
        ("ascend", "3.11", "aarch64"),
    ):
        (wheels,) = of(said[host], "python_environment", "wheels")
        assert (wheels["python"], wheels["machine"]) == (python, machine)
        assert wheels["requirements"].rstrip("\n") == REQUIREMENTS


def test_an_rpm_host_without_a_mirror_has_wheels_and_files_alone(said: dict[str, list[dict[str, Any]]]) -> None:
    assert {need["kind"] for need in said["ascend"]} == {"wheels", "file"}
    assert [need["path"] for need in said["ascend"] if need["kind"] == "file"] == [RUN_FILE, "/srv/runtime.run"]
    (packages,) = of(said["plain"], "python_environment", "packages")
    assert packages["names"] == ["python3-venv", "ca-certificates"]
    assert packages["platform"] == {"distribution": "debian", "release": "13", "machine": "x86_64"}


def test_hosts_with_rpm_need_their_own_packages(said: dict[str, list[dict[str, Any]]]) -> None:
    platform = {"distribution": "rocky", "release": "9", "machine": "x86_64"}
    (python,) = of(said["rocky"], "python_environment", "packages")
    assert (python["names"][0], python["platform"]) == ("python3", platform)
    (driver,) = of(said["rocky"], "nvidia_driver", "driver")
    assert driver["headers"] == ["kernel-devel={kernel_release}"]
    assert driver["source"]["uris"] == ["https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64"]
    (toolkit,) = of(said["rocky"], "nvidia_container_toolkit", "group")
    assert toolkit["source"]["uris"] == ["https://nvidia.github.io/libnvidia-container/stable/rpm/x86_64"]
    assert toolkit["source"]["packages_signed"] is False
    (fabric,) = of(said["rocky"], "nvidia_fabric_manager", "group")
    assert fabric["parts"] == [["nvidia-fabricmanager", "nvidia-fabric-manager"]]
    (python,) = of(said["sles"], "python_environment", "packages")
    assert python["names"] == ["python311", "python311-pip", "ca-certificates"]
    (more,) = of(said["sles"], "accelerator_bundle_packages", "packages")
    assert more["platform"]["distribution"] == "sles"


def test_the_driver_is_needed_by_its_own_plan(said: dict[str, list[dict[str, Any]]]) -> None:
    (driver,) = of(said["vendor"], "nvidia_driver", "driver")
    assert driver["wanted"]["version"] == "580"
    assert driver["platform"] == {"distribution": "debian", "release": "13", "machine": "x86_64"}
    assert (driver["headers"], driver["kernel"]) == (["linux-headers-{kernel}"], DEBIAN["kernel"])
    source = driver["source"]
    assert source["uris"] == ["https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64"]
    assert source["key_url"].endswith("/debian13/x86_64/8793F200.pub")
    assert source["fingerprints"] == ["02182E60104FCDC26EAE1B8597A5D4CB8793F200"]
    assert ["nvidia-driver-cuda", "nvidia-kernel-open-dkms"] in [each["packages"] for each in driver["catalog"]]


def test_requirements_include_driver_packages_in_the_driver_version(said: dict[str, list[dict[str, Any]]]) -> None:
    (toolkit,) = of(said["vendor"], "nvidia_container_toolkit", "group")
    assert (toolkit["version"], len(toolkit["parts"])) == ("1.18", 4)
    assert toolkit["source"]["uris"] == ["https://nvidia.github.io/libnvidia-container/stable/deb/amd64"]
    assert toolkit["source"]["key_url"] == "https://nvidia.github.io/libnvidia-container/gpgkey"
    (fabric,) = of(said["vendor"], "nvidia_fabric_manager", "group")
    assert (fabric["follows"], fabric["also"], fabric["source"]) == (True, ["nvlsm"], {})
    assert fabric["parts"] == [["nvidia-fabricmanager", "nvidia-fabricmanager-{branch}"]]


def test_a_distribution_s_driver_comes_from_its_further_components(said: dict[str, list[dict[str, Any]]]) -> None:
    (driver,) = of(said["ubuntu"], "nvidia_driver", "driver")
    assert driver["source"] == {"more_components": ["restricted"], "mirrors": []}
    assert (driver["status"], driver["wanted"]["version"]) == ("/x", "580")
    (more,) = of(said["ubuntu"], "accelerator_bundle_packages", "packages")
    assert more["names"] == ["tmux"]


def test_files_are_taken_with_their_digests(said: dict[str, list[dict[str, Any]]]) -> None:
    (file,) = of(said["files"], "nvidia_driver", "file")
    assert (file["path"], file["sha256"]) == ("/srv/nvidia-driver-cuda_580.95.05-1_amd64.deb", "ab" * 32)
    (packages,) = of(said["files"], "nvidia_driver", "packages")
    assert packages["names"] == ["dkms", f"linux-headers-{DEBIAN['kernel']}"]


DOCKER = """#!/bin/sh
echo "$*" >> {directory}/asked
case $1 in
image) echo 'Error: No such image: x' >&2; exit 1 ;;
save) touch "$3" ;;
esac
"""
PIP = """#!/bin/sh
while [ "$1" != --target ]; do shift; done
mkdir "$2"
"""


@pytest.mark.prove
def test_bundle_image_is_built_with_the_variables_of_a_host_that_needs_it(tmp_path: Path) -> None:
    """The first host of the inventory runs the driver as a service and needs no image: the image has the variables of another host."""
    (tmp_path / "programs").mkdir()
    for name, text in (("docker", DOCKER), ("pip", PIP)):
        (tmp_path / "programs" / name).write_text(text.format(directory=tmp_path), encoding="utf-8")
        (tmp_path / "programs" / name).chmod(0o755)
    (made,) = (each for each in yaml.safe_load((ROOT / "playbooks/bundle.yml").read_text("utf-8")) if "tasks" in each)
    find, make = made["tasks"][-2:]
    names = [task["name"] for task in make["block"]]
    make["block"] = make["block"][: names.index("Download the files and write the bundle")]
    here = {"accelerator_platform": DEBIAN, "accelerator_container_runtime_enabled": False}
    own = {
        "dra_driver_deploy_as": "daemonset",
        "driver_image_repository": "reg/own",
        "driver_image_base": f"reg/python:3.12@sha256:{'a' * 64}",
        "driver_image_interpreter": str(tmp_path / "programs/pip"),
    }
    variables = {**made["vars"], "accelerator_parts": str(tmp_path / "parts")}
    other = {**own, "driver_image_repository": "reg/other"}
    hosts = {"a": here, "b": {**here, **own}, "c": {**here, **own}, "d": {**here, **other}}
    played = play(tmp_path, [{"vars": variables, "block": [find, make]}], hosts, path=tmp_path / "programs")
    assert played.status == 0, played.output
    requested = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    built = sorted(words[2] for words in requested if words[0] == "build")
    assert [name.partition(":")[0] for name in built] == ["reg/other", "reg/own"], requested
    assert sorted(words[3] for words in requested if words[0] == "save") == built
    assert sorted(path.name for path in (tmp_path / "parts/saved").iterdir()) == [
        f"{name.replace('/', '%')}.tar" for name in built
    ]


# A host uses a bundle


def bundle(directory: Path, *, requirements: str = REQUIREMENTS) -> Path:
    """Return a bundle with one wheel for this machine's Python, as the module writes it."""
    major, minor, _patch = platform.python_version_tuple()
    key = f"cp{major}{minor}-{platform.machine()}"
    content = b"wheel"
    item = {
        "path": "wheels/a-1-py3-none-any.whl",
        "kind": "wheel",
        "name": "a",
        "version": "1",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "for": [key],
        "from": "",
        "signed_by": [],
        "verified": "",
    }
    digest = hashlib.sha256(requirements.encode()).hexdigest()
    manifest = {"format": 1, "collection": "x", "wheelhouses": {key: [digest]}, "items": [item], "needs": []}
    archive = directory / "fleet.bundle"
    source = directory / "source"
    with tarfile.open(archive, "w") as file:
        for name, each in (("manifest.json", json.dumps(manifest).encode()), (item["path"], content)):
            source.write_bytes(each)
            file.add(source, str(name))
    return archive


def take(
    directory: Path,
    archive: Path,
    *arguments: str,
    more: Sequence[dict[str, Any]] = (),
    hosts: Sequence[str] | dict[str, dict[str, Any]] = ("node",),
    **variables: Any,
) -> Played:
    tell = {
        "ansible.builtin.debug": {
            "msg": "{{ [offline_content, python_environment_wheelhouse] | to_json | b64encode }}",
        },
        "vars": {"python_environment_wheelhouse": defaults("python_environment")["python_environment_wheelhouse"]},
    }
    role = {"ansible.builtin.include_role": {"name": "dra.accelerators.offline"}}
    with tarfile.open(archive) as file:
        manifest = file.extractfile("manifest.json")
        assert manifest is not None
        checksum = hashlib.sha256(manifest.read()).hexdigest()
    options = {
        "accelerator_offline_bundle": str(archive),
        "accelerator_offline_checksum": checksum,
        "python_environment_interpreter": sys.executable,
        **variables,
    }
    own: dict[str, dict[str, Any]] = hosts if isinstance(hosts, dict) else {name: {} for name in hosts}
    return play(directory, [role, tell, *more], {name: {**options, **each} for name, each in own.items()}, *arguments)


def defaults(role: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f"roles/{role}/defaults/main.yml").read_text("utf-8"))
    return found


@pytest.fixture
def as_venv() -> None:
    """Assert that the interpreter of the tests can create environments. Otherwise the bundle would need packages."""
    done = subprocess.run([sys.executable, "-c", "import venv, ensurepip"], check=False, env=dict(os.environ))
    assert done.returncode == 0


@pytest.mark.usefixtures("as_venv")
def test_host_gets_the_path_of_its_wheels(tmp_path: Path) -> None:
    archive = bundle(tmp_path)
    played = take(tmp_path, archive)
    assert played.status == 0 and "changed=0" in played.output, played.output
    content, wheelhouse = played.messages["node"]
    assert wheelhouse.startswith(f"{archive}.d/")
    assert wheelhouse == content["wheels"]
    assert [path.name for path in Path(wheelhouse).iterdir()] == ["a-1-py3-none-any.whl"]
    assert (content["packages"], content["environment"], content["files"]) == ({}, {}, "")


@pytest.mark.prove
@pytest.mark.usefixtures("as_venv")
def test_check_mode_leaves_nothing_of_a_bundle(tmp_path: Path) -> None:
    """Check mode does not write the bundle's directory. The temporary one exists until the last host of the batch is finished."""
    archive = bundle(tmp_path)
    before = {*tmp_path.iterdir()}
    absent = {"ansible.builtin.include_role": {"name": "dra.accelerators.offline", "tasks_from": "absent"}}
    place = {"__offline_directory": str(tmp_path / "place")}
    list_files = {"ansible.builtin.command": {"argv": ["ls", "{{ offline_content.wheels }}"]}, "check_mode": False}
    early = {**absent, "vars": place, "when": "inventory_hostname == 'node-1'"}
    end = {"ansible.builtin.meta": "end_host", "when": "inventory_hostname == 'node-1'"}
    more = [early, end, list_files, {**absent, "vars": place}]
    played = take(tmp_path, archive, "--check", more=more, hosts=["node-1", "node-2"])
    assert played.status == 0, played.output
    wheelhouse = Path(played.messages["node-2"][1])
    assert wheelhouse.parents[2].name.startswith(".dra-accelerators-check-") and not wheelhouse.parents[2].exists()
    assert not Path(f"{archive}.d").exists()
    assert not [path for path in {*tmp_path.iterdir()} - before if path.name.startswith((".", "fleet"))]


@pytest.mark.prove
@pytest.mark.usefixtures("as_venv")
@pytest.mark.parametrize("mode", [(), ("--check",)])
def test_hosts_of_a_batch_take_their_own_bundles(tmp_path: Path, mode: tuple[str, ...]) -> None:
    """A wrong checksum of the first host rejects its bundle only. The temporary directories are removed."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = bundle(tmp_path / "one"), bundle(tmp_path / "two")
    hosts: dict[str, dict[str, Any]] = {
        "n0": {"accelerator_offline_checksum": "0" * 64, "accelerator_offline_bundle": str(one)},
        "n1": {"accelerator_offline_bundle": str(one)},
        "n2": {"accelerator_offline_bundle": str(two)},
        "n3": {"accelerator_offline_bundle": str(one)},
    }
    absent = {"ansible.builtin.include_role": {"name": "dra.accelerators.offline", "tasks_from": "absent"}}
    end = {**absent, "vars": {"__offline_directory": str(tmp_path / "place")}}
    played = take(tmp_path, one, *mode, more=[end], hosts=hosts)
    assert played.failed.keys() == {"n0"}, played.output
    assert played.messages.keys() == {"n1", "n2", "n3"}, played.output
    assert [name for name, (_content, wheels) in played.messages.items() if str(tmp_path / "two") in wheels] == ["n2"]
    assert not list(tmp_path.rglob(".dra-accelerators-check-*"))
    assert [Path(f"{each}.d").exists() for each in (one, two)] == [not mode] * 2


@pytest.mark.usefixtures("as_venv")
def test_one_directory_for_two_bundles_is_rejected(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    archives = {name: str(bundle(tmp_path / name)) for name in ("one", "two")}
    hosts = {name: {"accelerator_offline_bundle": archive} for name, archive in archives.items()}
    played = take(tmp_path, Path(archives["one"]), hosts=hosts, accelerator_offline_directory=str(tmp_path / "same"))
    assert played.failed.keys() == set(archives) and not (tmp_path / "same").exists(), played.output
    assert f"{archives['one']}, {archives['two']}" in played.failed["one"]["msg"]


@pytest.mark.prove
@pytest.mark.usefixtures("as_venv")
def test_check_mode_removes_directories_of_failed_runs(tmp_path: Path) -> None:
    """A failed run in check mode leaves a directory with the size of the bundle: an old one is removed, a recent one can be in use."""
    archive = bundle(tmp_path)
    old, new = (tmp_path / f".dra-accelerators-check-{name}" for name in ("old", "new"))
    for path in (old, new):
        (path / "bundle").mkdir(parents=True)
    two_days_ago = old.stat().st_mtime - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    played = take(tmp_path, archive, "--check")
    assert played.status == 0 and "changed=0" in played.output, played.output
    assert new.exists() and not old.exists()


@pytest.mark.prove
def test_bundle_without_a_checksum_is_rejected(tmp_path: Path) -> None:
    archive = bundle(tmp_path)
    refused = take(tmp_path, archive, accelerator_offline_checksum="")
    assert "accelerator_offline_allow_unpinned" in refused.failed["node"]["msg"], refused.output
    assert not Path(f"{archive}.d").exists()
    assert (
        take(tmp_path, archive, accelerator_offline_checksum="", accelerator_offline_allow_unpinned="true").status == 0
    )


@pytest.mark.usefixtures("as_venv")
def test_bundle_without_a_requirement_is_rejected_before_any_change(tmp_path: Path) -> None:
    archive = bundle(tmp_path, requirements="another list")
    played = take(tmp_path, archive)
    assert "does not have what node needs: the wheels of cp" in played.failed["node"]["msg"], played.output
    assert not Path(f"{archive}.d").exists()


def test_host_that_ends_early_removes_the_index() -> None:
    """In check mode a host without a driver ends early and skips the task at the end of the play: its index is removed before."""
    plays = yaml.safe_load((ROOT / "playbooks/site.yml").read_text("utf-8"))
    (tasks,) = (each["tasks"] for each in plays if each["name"] == "Prepare the nodes")
    away = {"name": "dra.accelerators.offline", "tasks_from": "absent", "apply": {"tags": ["always"]}}
    taken = [number for number, task in enumerate(tasks) if task.get("ansible.builtin.include_role") == away]
    (ended,) = (number for number, task in enumerate(tasks) if task.get("ansible.builtin.meta") == "end_host")
    assert len(taken) == 2 and taken[0] < ended < taken[1]
    early = tasks[taken[0]]["when"]
    assert set(early) == {tasks[ended]["when"], tasks[taken[1]]["when"]}
