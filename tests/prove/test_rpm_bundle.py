# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test an offline bundle for hosts with RPM packages: created by the real dnf from signed repositories, used by the
real dnf and zypper.

See tests/oracles/rpm_machine.py for the simulated parts. The required packages come from the roles' variables, and a
host's repository is the role's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/packages"), str(ROOT / "tests/oracles")]

import rpm_parts as parts  # noqa: E402
from rpm_machine import Key, RpmMachine, served  # noqa: E402

BRANCH, TOOLKIT = "580.95.05", "1.18.1"
PLACE = "/var/lib/dra-accelerators/offline"
DISTRIBUTIONS = {"dnf": ("rocky", "9", "redhat"), "zypper": ("sles", "15", "suse")}
OFFLINE = yaml.safe_load((ROOT / "roles/offline/vars/main.yml").read_text("utf-8"))
FABRIC = [["nvidia-fabricmanager", "nvidia-fabric-manager"]]
OURS = "find /etc /run /usr /var/cache /var/lib -xdev -path /var/lib/docker -prune -o -name '*dra-accelerators*' -print 2>/dev/null"
CTK = ["nvidia-container-toolkit-base", "nvidia-container-toolkit", "libnvidia-container-tools", "libnvidia-container1"]


def platform_of(tool: str) -> dict[str, str]:
    distribution, release, _family = DISTRIBUTIONS[tool]
    return {"distribution": distribution, "release": release, "machine": os.uname().machine}


def family_of(tool: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (ROOT / f"roles/nvidia_driver/vars/{DISTRIBUTIONS[tool][2]}.yml").read_text("utf-8")
    )
    return found


@dataclass
class Maker:
    """The connected machine: dnf, repositories of simulated packages, and the address at which they are served."""

    machine: RpmMachine
    key: Key
    other: Key
    address: str

    @property
    def archive(self) -> Path:
        return self.machine.work / "bundles/fleet.bundle"

    def source(self, name: str, **more: Any) -> dict[str, Any]:
        source = {"uris": [f"{self.address}/{name}"], "suites": ["/"], "key": self.key.text}
        return {**source, "fingerprints": [self.key.fingerprint], **more}

    def needs(self, tool: str, **of_driver: Any) -> list[dict[str, Any]]:
        """Return the requirements of all host roles: driver, fabric manager with its subnet manager, and toolkit."""
        platform, catalog = platform_of(tool), family_of(tool)["__nvidia_driver_catalogs"]["nvidia"]
        source = self.source(f"driver-{tool}", **of_driver)
        return [
            {
                "kind": "driver",
                "of": "nvidia_driver",
                "platform": platform,
                "wanted": {"version": "580", "kernel_modules": "open"},
                "catalog": catalog,
                "source": source,
            },
            {
                "kind": "group",
                "of": "nvidia_fabric_manager",
                "platform": platform,
                "parts": FABRIC,
                "follows": True,
                "also": ["nvlsm"],
            },
            {
                "kind": "group",
                "of": "nvidia_container_toolkit",
                "platform": platform,
                "parts": [[name] for name in CTK],
                "version": "1.18",
                "source": self.source("toolkit", packages_signed=False),
            },
        ]

    def mirrors(self, **more: Any) -> dict[str, Any]:
        """Return the distributions' repositories, in which only the packages are signed."""
        path = self.machine.work / "distribution.asc"
        path.write_text(self.key.text)
        entry = {"uris": [f"{self.address}/distribution"], "key": str(path), "fingerprints": [self.key.fingerprint]}
        entry = {**entry, "index_signed": False, **more}
        return {"rocky_9": [entry], "sles_15": [entry]}

    def gather(
        self, needs: list[dict[str, Any]], *, name: str = "fleet", check: bool = False, **options: Any
    ) -> dict[str, Any]:
        folder = self.machine.work / "bundles"
        given = {
            "archive": f"{folder}/{name}.bundle",
            "cache_path": f"{folder}/{name}.parts",
            "mirrors": self.mirrors(),
        }
        return self.machine.module("bundle_create", check=check, needs=needs, **{**given, **options})


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Maker]:
    machine = RpmMachine("dnf", tmp_path_factory.mktemp("maker"))
    key, other = machine.key("vendor@example.com"), machine.key("other@example.com")
    machine.repository("distribution", [parts.base(), parts.needs()], key)
    (machine.web / "distribution/repodata/repomd.xml.asc").unlink()
    machine.repository("toolkit", [parts.toolkit(each) for each in ("1.17.8", TOOLKIT)], key)
    for tool, driver in (("dnf", parts.driver_redhat), ("zypper", parts.driver_suse)):
        machine.repository(f"driver-{tool}", [parts.subnet_manager(), driver(BRANCH), driver("595.45.04")], key)
    with served(machine.web) as address:
        yield Maker(machine, key, other, address)
    machine.end()


@pytest.fixture(scope="module")
def gathered(maker: Maker) -> dict[str, Any]:
    """Create the bundle for hosts with dnf and with zypper; return the result. A check mode run before writes nothing."""
    needs = [*maker.needs("dnf"), *maker.needs("zypper")]
    answer = maker.gather(needs, check=True)
    assert answer.get("changed") and not maker.archive.exists(), answer
    done = maker.gather(needs)
    assert done.get("changed"), done.get("msg", done)
    return done


def test_bundle_has_all_packages_of_the_roles_and_is_verified(maker: Maker, gathered: dict[str, Any]) -> None:
    needs = [*maker.needs("dnf"), *maker.needs("zypper")]
    again = maker.gather(needs)
    assert again.get("changed") is False, again
    refreshed = maker.gather(needs, refresh=True)
    assert refreshed.get("changed") is False, (refreshed["added"], refreshed["removed"])
    packages = [path for path in gathered["added"] if path.endswith(".rpm")]
    assert any("dkms-" in path for path in packages) and any("nvlsm" in path for path in packages)
    assert not any("595.45" in path or "1.17.8" in path for path in packages), packages
    with tarfile.open(maker.archive) as file:
        manifest = json.load(file.extractfile("manifest.json"))  # type: ignore[arg-type]
    by_name = {(item["name"], item["for"][0]): item for item in manifest["items"] if item["kind"] == "package"}
    verified = {name: by_name[name, f"rocky_9_{os.uname().machine}"]["verified"] for name in ("dkms", "nvlsm", CTK[0])}
    assert verified["dkms"].startswith("rpm:") and verified[CTK[0]].startswith("dnf:")
    assert "dnf:" in verified["nvlsm"] and "rpm:" in verified["nvlsm"]
    assert {tuple(item["signed_by"]) for item in by_name.values()} == {(maker.key.fingerprint,)}
    assert all(item["from"].startswith(maker.address) for item in by_name.values())


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"fingerprints": "other"}, "repository-key", "has the fingerprint"),
        ({"key": "other", "fingerprints": "other"}, "packages", "A repository cannot be used"),
        ({"packages_signed": False, "index_signed": False}, "repository-key", "neither its index nor its packages"),
    ],
)
def test_package_not_signed_by_the_pinned_key_is_rejected(
    maker: Maker, change: dict[str, Any], code: str, words: str
) -> None:
    folder = maker.machine.work
    (folder / "other.asc").write_text(maker.other.text)
    texts = {"fingerprints": [maker.other.fingerprint], "key": str(folder / "other.asc")}
    entry = {"index_signed": True, "uris": [f"{maker.address}/toolkit"]}
    given = {key: texts[key] if value == "other" else value for key, value in change.items()}
    needs = [{"kind": "packages", "of": "x", "platform": platform_of("dnf"), "names": [CTK[0]]}]
    refused = maker.gather(needs, name="refused", mirrors=maker.mirrors(**{**entry, **given}))
    assert refused.get("error_code") == code and words in refused["msg"], refused
    assert not (folder / "bundles/refused.bundle").exists()


def test_package_signed_by_another_key_is_named(maker: Maker) -> None:
    (maker.machine.work / "other.asc").write_text(maker.other.text)
    mirrors = maker.mirrors(key=str(maker.machine.work / "other.asc"), fingerprints=[maker.other.fingerprint])
    needs = [{"kind": "packages", "of": "x", "platform": platform_of("dnf"), "names": ["dkms"]}]
    refused = maker.gather(needs, name="refused", mirrors=mirrors)
    assert refused.get("error_code") == "signature" and "has no valid signature" in refused["msg"], refused
    assert not list((maker.machine.work / "bundles").rglob("refused.parts/packages/*/dkms*.rpm"))


def test_error_for_unnamed_repositories_contains_the_setting(maker: Maker) -> None:
    for check in (True, False):
        refused = maker.gather(maker.needs("dnf"), name="refused", mirrors={"sles_15": []}, check=check)
        assert refused.get("error_code") == "mirror", refused
        assert "accelerator_bundle_mirrors has no entry rocky_9" in refused["msg"], refused
    bare = maker.gather(maker.needs("dnf"), name="refused", mirrors={"rocky_9": []})
    assert "dkms" in bare.get("msg", "") and "accelerator_bundle_mirrors" in bare["msg"], bare


@dataclass
class Host:
    """A host with the bundle's index from the role offline, and its own repository, which does not answer."""

    machine: RpmMachine
    tool: str
    packages: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        given = OFFLINE["__offline_environments"]["rpm"]
        return {key: value.replace("{{ __offline_directory }}", PLACE) for key, value in given.items()}

    def module(self, name: str, **options: Any) -> dict[str, Any]:
        return self.machine.module(name, environment=self.environment, **options)

    def done(self, name: str, **options: Any) -> dict[str, Any]:
        """Run a module like the roles: read the packages from its check mode, copy only these files, install them, and
        delete the files.
        """
        foreseen = self.module(name, check=True, **options)
        assert foreseen.get("changed"), foreseen
        words = [each.split() for each in foreseen.get("changes", foreseen["steps"]) if each.startswith("install ")]
        for word in words:
            self.bring(f"{word[1]}={word[2]}")
        found = self.module(name, **options)
        assert found.get("changed"), found.get("msg", found)
        self.machine.did("sh", "-c", f"rm -f {PLACE}/packages/*.rpm")
        return found

    def bring(self, word: str) -> None:
        """Copy a package's file to the host."""
        assert word in self.packages["files"], (word, sorted(self.packages["files"]))
        self.machine.did("cp", f"{self.packages['path']}/{self.packages['files'][word]}", f"{PLACE}/packages/")

    def names(self) -> set[str]:
        return {line.split()[0] for line in self.machine.packages()}


@pytest.fixture(params=["dnf", "zypper"])
def host(request: pytest.FixtureRequest, maker: Maker, gathered: dict[str, Any], tmp_path: Path) -> Iterator[Host]:
    machine = RpmMachine(request.param, tmp_path)
    machine.has(parts.base(), machine.key("host@example.com"))
    shutil.copyfile(gathered["archive"], tmp_path / "fleet.bundle")
    taken = machine.module(
        "bundle_extract",
        archive=f"{tmp_path}/fleet.bundle",
        dest=f"{tmp_path}/fleet.bundle.d",
        checksum=gathered["manifest_checksum"],
    )
    packages = taken["packages"]["{distribution}_{release}_{machine}".format(**platform_of(request.param))]
    folder = "/etc/yum.repos.d" if request.param == "dnf" else "/etc/zypp/repos.d"
    machine.write(f"{folder}/own.repo", "[own]\nname=own\nbaseurl=http://127.0.0.1:9/\nenabled=1\ngpgcheck=1\n")
    for name in packages["index"]:
        machine.did(
            "sh", "-c", f"mkdir -p {PLACE}/packages/repodata && cp {packages['path']}/{name} {PLACE}/packages/{name}"
        )
    text = OFFLINE["__offline_repository"].replace("{{ __offline_directory }}", PLACE)
    machine.write(f"{PLACE}/repositories/dra-accelerators-bundle.repo", text)
    found = Host(machine, request.param, packages)
    read = found.module("bundle_packages", refresh=True)
    assert read.get("changed") is False, read
    yield found
    machine.end()


def test_host_installs_everything_from_the_bundle_without_its_repositories(host: Host) -> None:
    machine, before = host.machine, host.machine.packages()
    dkms = host.done("bundle_packages", names=["dkms"])
    assert [each.partition("=")[0] for each in dkms["installs"]] == ["dkms"]
    assert host.module("bundle_packages", names=["dkms"]).get("changed") is False
    family = family_of(host.tool)
    driver = {
        "version": "580",
        "kernel_modules": "open",
        "catalog": family["__nvidia_driver_catalogs"]["nvidia"],
        "load": False,
        "state_path": "",
        "persistence": False,
    }
    done = host.done("nvidia_driver", **driver)
    assert done["after"]["version"] == BRANCH, done
    assert host.module("nvidia_driver", **driver).get("changed") is False
    fabric = {"manager": "always", "subnet_manager": "always", "imex": "none", "state_path": ""}
    assert host.done("nvidia_fabric_manager", **fabric)["driver_version"] == BRANCH
    assert host.done("nvidia_container_toolkit", version="1.18")["after"]["version"] == TOOLKIT
    assert {"nvidia-fabricmanager", "nvlsm", *CTK} <= host.names()
    missing = host.module("nvidia_driver", **{**driver, "version": "595"})
    assert missing.get("error_code") == "not-offered", missing
    for name in ("nvidia_container_toolkit", "nvidia_fabric_manager"):
        assert host.module(name, state="absent").get("changed")
    assert host.module("nvidia_driver", **{**driver, "state": "absent"}).get("changed")
    machine.did("rpm", "-e", "dkms")
    assert machine.packages() == before
    # The role removes the directory. No other file remains.
    machine.did("rm", "-r", "/var/lib/dra-accelerators")
    assert not machine.run("sh", "-c", OURS).stdout
