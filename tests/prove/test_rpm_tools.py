# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the modules that install a vendor's packages with the real dnf, zypper, and rpm, and signed repositories of
simulated packages.

The catalogs are the roles' own. The host has none of these distributions: see tests/oracles/rpm_machine.py for the
simulated parts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/packages"), str(ROOT / "tests/oracles")]

import rpm_parts as parts  # noqa: E402
from ansible_collections.dra.accelerators.plugins.module_utils._packages.rpm_output import compare  # noqa: E402
from rpm_machine import Key, RpmMachine, served  # noqa: E402

OLDER, NEWER, BROKEN = "1.17.8", "1.18.1", "1.19.0"
OLD_BRANCH, BRANCH, NEXT_BRANCH = "535.183.06", "580.95.05", "595.45.04"
FAMILY = {"dnf": "redhat", "zypper": "suse"}
#: Commands of each tool that install all updates.
BRING_ALL = {"dnf": ["dnf", "-y", "upgrade"], "zypper": ["zypper", "--non-interactive", "update"]}
#: Finds remaining files of this collection. The result must be empty.
OURS = "find /etc /run /usr /var/cache /var/lib -xdev -path /var/lib/docker -prune -o -name '*dra-accelerators*' -print 2>/dev/null"


@dataclass
class Node:
    """A machine with repositories, and the address at which they are served."""

    machine: RpmMachine
    key: Key
    other: Key
    address: str
    family: dict[str, Any]

    def source(self, name: str, key: Key | None = None, **more: Any) -> dict[str, Any]:
        """Return a repository with its expected key."""
        key = key or self.key
        return {"uris": [f"{self.address}/{name}"], "key": key.text, "fingerprints": [key.fingerprint], **more}

    def toolkit(self, **options: Any) -> dict[str, Any]:
        return self.machine.module("nvidia_container_toolkit", **options)

    def driver(self, **options: Any) -> dict[str, Any]:
        """Run the module without loading kernel modules: no GPU and no matching kernel is here."""
        catalog = self.family["__nvidia_driver_catalogs"]["nvidia"]
        headers = self.family["__nvidia_driver_headers"]
        given = {"load": False, "state_path": "", "persistence": False}
        return self.machine.module("nvidia_driver", catalog=catalog, headers=headers, **given, **options)

    def fabric(self, **options: Any) -> dict[str, Any]:
        """Run the module with the manager requested explicitly, because no NVSwitch is here."""
        given = {"manager": "always", "subnet_manager": "always", "imex": self.imex, "state_path": ""}
        return self.machine.module("nvidia_fabric_manager", **{**given, **options})

    @property
    def imex(self) -> str:
        """Return the IMEX option for the vendor's repository: SUSE's has no IMEX package."""
        return "installed" if self.machine.tool == "dnf" else "none"

    def installed(self, *names: str) -> dict[str, str]:
        """Return versions of packages without epochs and releases; empty for a package that is not installed."""
        found = {line.split()[0]: line.split()[1] for line in self.machine.packages()}
        return {name: found.get(name, "").partition(":")[2] or found.get(name, "") for name in names}


@pytest.fixture(scope="module", params=["dnf", "zypper"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    machine = RpmMachine(request.param, tmp_path_factory.mktemp(request.param))
    key, other = machine.key("vendor@example.com"), machine.key("other@example.com")
    machine.has(parts.base(), key)
    machine.repository("toolkit", [parts.toolkit(each) for each in (OLDER, NEWER, BROKEN)], key)
    driver = parts.driver_suse if request.param == "zypper" else parts.driver_redhat
    machine.repository(
        "driver", [parts.needs(), parts.subnet_manager(), *(driver(each) for each in (BRANCH, NEXT_BRANCH))], key
    )
    machine.repository("older", [parts.fabric(OLD_BRANCH)], key)
    family = yaml.safe_load((ROOT / f"roles/nvidia_driver/vars/{FAMILY[request.param]}.yml").read_text("utf-8"))
    with served(machine.web) as address:
        yield Node(machine, key, other, address, family)
    machine.end()


def test_toolkit_is_installed_replaced_and_removed_completely(node: Node) -> None:
    machine, before = node.machine, node.machine.packages()
    wanted = {"version": OLDER, "source": node.source("toolkit")}
    foreseen = node.toolkit(check=True, **wanted)
    assert foreseen.get("changed"), foreseen
    assert machine.packages() == before and not machine.run("sh", "-c", OURS).stdout

    done = node.toolkit(**wanted)
    assert done.get("changes") == foreseen["changes"], done
    assert done["after"]["version"] == OLDER and len(done["after"]["packages"]) == 4
    again = node.toolkit(**wanted)
    assert again.get("changed") is False and not again["steps"], again

    there = machine.packages()
    machine.run(*BRING_ALL[machine.tool])
    assert machine.packages() == there, "it was not held"

    newer = node.toolkit(version=NEWER, source=node.source("toolkit"))
    assert newer.get("after", {}).get("version") == NEWER and newer["previous_available"], newer
    there = machine.packages()
    broken = node.toolkit(version=BROKEN, source=node.source("toolkit"))
    assert broken.get("failed") and f"has {NEWER} again" in broken["msg"], broken
    assert machine.packages() == there

    back = node.toolkit(state="previous")
    assert back.get("after", {}).get("version") == OLDER, back
    there = machine.packages()
    wrong = node.toolkit(version=NEWER, source=node.source("toolkit", node.other))
    assert wrong.get("error_code") == "source", wrong
    pinned = node.toolkit(version=NEWER, source={**node.source("toolkit"), "fingerprints": [node.other.fingerprint]})
    assert pinned.get("error_code") == "repository-key", pinned
    assert machine.packages() == there

    gone = node.toolkit(state="absent")
    assert gone.get("changed"), gone
    assert machine.packages() == before
    assert not machine.run("sh", "-c", OURS).stdout
    assert not machine.read(parts.CTK_CONFIG)


def test_repository_with_a_password_is_used_and_leaves_no_password(node: Node) -> None:
    """dnf and zypper read user name and password from files that belong to root. rpm has the key only where the tool
    needs it.
    """
    machine, before = node.machine, node.machine.packages()
    with served(machine.web, "me:s3cr3t/W0rd") as address:
        refused = node.toolkit(version=OLDER, source={**node.source("toolkit"), "uris": [f"{address}/toolkit"]})
        assert refused.get("failed"), refused
        uri = f"{address}/toolkit".replace("://", "://me:s3cr3t%2FW0rd@")
        source = {**node.source("toolkit"), "uris": [uri], "packages_signed": False}
        for check in (True, False):
            done = node.toolkit(version=OLDER, source=source, check=check)
            assert done.get("changed") and "s3cr3t" not in json.dumps(done), done
        newer = node.toolkit(version=NEWER, source=source)
        assert newer.get("after", {}).get("version") == NEWER and newer["previous_available"], newer
    found = machine.run("sh", "-c", "grep -rl s3cr3t /etc /var/cache /var/lib/dra-accelerators").stdout.split()
    assert len(found) == 1, found
    assert machine.did("stat", "-c", "%a", found[0]).strip() == "600"
    keys = {line for line in machine.packages() if line.startswith("gpg-pubkey")} - {*before}
    assert bool(keys) is (machine.tool == "zypper"), keys
    assert node.toolkit(state="absent").get("changed")
    assert machine.packages() == before and not machine.run("sh", "-c", OURS).stdout


def test_driver_is_installed_replaced_by_other_modules_restored_and_removed(node: Node) -> None:
    machine, before = node.machine, node.machine.packages()
    source = node.source("driver")
    opened = node.driver(version=BRANCH.partition(".")[0], kernel_modules="open", source=source)
    assert opened.get("after", {}).get("version") == BRANCH, opened
    assert opened["after"]["kernel_modules"] == "open"
    again = node.driver(version=BRANCH.partition(".")[0], kernel_modules="open", source=source)
    assert again.get("changed") is False, again

    newer = node.driver(version=NEXT_BRANCH, kernel_modules="proprietary", source=source)
    assert newer.get("after", {}).get("version") == NEXT_BRANCH and newer["previous_available"], newer
    assert newer["after"]["kernel_modules"] == "proprietary"
    versions = {line.split()[1] for line in machine.packages() if "nvidia" in line}
    assert all(NEXT_BRANCH in version for version in versions), versions

    back = node.driver(state="previous")
    assert back.get("after", {}).get("version") == BRANCH and back["after"]["kernel_modules"] == "open", back
    versions = {line.split()[1] for line in machine.packages() if "nvidia" in line}
    assert all(BRANCH in version for version in versions), versions

    gone = node.driver(state="absent")
    assert gone.get("changed"), gone
    assert machine.packages() == before and not machine.run("sh", "-c", OURS).stdout


def test_prebuilt_kernel_modules_are_installed_replaced_and_removed(node: Node) -> None:
    """NVIDIA's prebuilt modules for Red Hat kernels: their names contain the driver version, which must be exact, and
    the kernel.
    """
    if node.machine.tool == "zypper":
        assert not any(
            "{version}" in name
            for each in node.family["__nvidia_driver_catalogs"]["nvidia"]
            for name in each["packages"]
        )
        return
    machine, before, source = node.machine, node.machine.packages(), node.source("driver")
    kernel, other = parts.KERNELS
    wanted = {"build": "precompiled", "source": source}
    refused = node.driver(version=BRANCH, **wanted)
    assert refused.get("error_code") == "not-offered", "the kernel of this machine is not from Red Hat"
    for offer in node.family["__nvidia_driver_catalogs"]["nvidia"]:
        offer["packages"] = [name.replace("{kernel_version}", kernel) for name in offer["packages"]]
        offer.pop("kernels", None)

    def modules() -> list[str]:
        return [line.split()[0] for line in machine.packages() if line.startswith("kmod-nvidia-")]

    branch = node.driver(version=BRANCH.partition(".")[0], **wanted)
    assert branch.get("error_code") == "not-offered" and "exact version" in branch["hint"], branch
    opened = node.driver(version=BRANCH, kernel_modules="open", **wanted)
    assert opened.get("error_code") == "not-offered", opened
    lacking = node.driver(version="580.999.99", **wanted)
    assert lacking.get("error_code") == "not-offered", lacking
    assert machine.packages() == before

    built = node.driver(version=BRANCH, kernel_modules="open", source=source)
    assert built.get("changed") and modules() == ["kmod-nvidia-open-dkms"], built
    ready = node.driver(version=BRANCH, **wanted)
    assert ready.get("after", {}).get("kernel_modules") == "proprietary", ready
    assert modules() == [f"kmod-nvidia-{BRANCH}-{kernel}"]
    assert node.driver(version=BRANCH, **wanted).get("changed") is False
    machine.run("dnf", "-y", "install", f"kmod-nvidia-{BRANCH}-{other}")
    there = machine.packages()
    machine.run(*BRING_ALL[machine.tool])
    assert machine.packages() == there, "it was not held"

    newer = node.driver(version=NEXT_BRANCH, **wanted)
    assert newer.get("after", {}).get("version") == NEXT_BRANCH and newer["previous_available"], newer
    assert modules() == [f"kmod-nvidia-{NEXT_BRANCH}-{kernel}"]
    back = node.driver(state="previous")
    assert back.get("after", {}).get("version") == BRANCH and f"kmod-nvidia-{BRANCH}-{kernel}" in modules(), back
    assert not any(NEXT_BRANCH in name for name in modules())
    built = node.driver(version=BRANCH, kernel_modules="open", source=source)
    assert built.get("changed") and modules() == ["kmod-nvidia-open-dkms"], built
    assert node.driver(state="absent").get("changed")
    assert machine.packages() == before and not machine.run("sh", "-c", OURS).stdout


def test_modules_signed_by_suse_are_installed_with_the_vendor_programs(node: Node) -> None:
    if node.machine.tool == "dnf":
        assert not any(
            "kmp" in name for each in node.family["__nvidia_driver_catalogs"]["nvidia"] for name in each["packages"]
        )
        return
    catalog = node.family["__nvidia_driver_catalogs"]["nvidia"]
    for offer in catalog:
        # This host's kernel has no SUSE flavor.
        offer["packages"] = [name.replace("{flavour}", "default") for name in offer["packages"]]
    before = node.machine.packages()
    done = node.driver(version=BRANCH, build="precompiled", source=node.source("driver"))
    assert done.get("after", {}).get("version") == BRANCH, done
    assert any(line.startswith("nvidia-open-driver-G06-signed-cuda-kmp-default ") for line in node.machine.packages())
    assert node.driver(state="absent").get("changed")
    assert node.machine.packages() == before


def test_fabric_manager_follows_the_driver_version_and_is_removed_completely(node: Node) -> None:
    machine, before = node.machine, node.machine.packages()
    source = node.source("driver")
    names = ("nvidia-fabricmanager", "nvlsm", *(("nvidia-imex",) if node.imex == "installed" else ()))

    def versions(of_driver: str) -> dict[str, str]:
        return {name: "2025.06.5-1" if name == "nvlsm" else f"{of_driver}-1" for name in names}

    alone = node.fabric(source=source)
    assert alone.get("error_code") == "driver", alone
    assert node.driver(version=BRANCH, kernel_modules="open", source=source).get("changed")
    there = machine.packages()
    foreseen = node.fabric(check=True)
    assert foreseen.get("changed") and machine.packages() == there, foreseen

    done = node.fabric()
    assert done.get("changes") == foreseen["changes"], done
    assert node.installed(*names) == versions(BRANCH) == done["after"]["packages"]
    assert done["after"]["units"] == ["nvidia-fabricmanager.service"] and done["driver_version"] == BRANCH
    again = node.fabric()
    assert again.get("changed") is False and not again["steps"], again
    held = machine.packages()
    machine.run(*BRING_ALL[machine.tool])
    assert machine.packages() == held, "it was not held"

    newer = node.driver(version=NEXT_BRANCH, kernel_modules="open", source=source)
    assert newer.get("after", {}).get("version") == NEXT_BRANCH, newer
    assert node.installed(*names) == versions(NEXT_BRANCH)
    assert node.driver(state="previous").get("after", {}).get("version") == BRANCH
    assert node.installed(*names) == versions(BRANCH)
    settled = node.fabric()
    assert settled.get("after", {}).get("packages") == versions(BRANCH), settled
    assert node.fabric().get("changed") is False

    gone = node.fabric(state="absent")
    assert gone.get("changed") and machine.packages() == there, gone
    assert node.driver(state="absent").get("changed")
    assert machine.packages() == before and not machine.run("sh", "-c", OURS).stdout


def test_older_fabric_manager_is_installed_by_its_older_package_name(node: Node) -> None:
    machine, before = node.machine, node.machine.packages()
    wanted = {"driver_version": OLD_BRANCH, "imex": "none", "subnet_manager": "never"}
    done = node.fabric(source=node.source("older"), **wanted)
    assert done.get("after", {}).get("packages") == {"nvidia-fabric-manager": f"{OLD_BRANCH}-1"}, done
    # The package of a newer driver replaces it, with the new name.
    newer = node.fabric(source=node.source("driver"), **{**wanted, "driver_version": BRANCH})
    assert newer.get("after", {}).get("packages") == {"nvidia-fabricmanager": f"{BRANCH}-1"}, newer
    assert not node.installed("nvidia-fabric-manager")["nvidia-fabric-manager"]
    assert node.fabric(state="absent").get("changed")
    assert machine.packages() == before and not machine.run("sh", "-c", OURS).stdout


def test_versions_are_ordered_like_rpm(node: Node) -> None:
    """Each version part is compared like rpm does, a thousand pairs in one call."""
    pairs: list[tuple[str, str]] = []
    plain = st.from_regex(r"[0-9a-c.~^_]{1,7}", fullmatch=True)

    @settings(max_examples=400, deadline=None, database=None)
    @given(plain, plain)
    def gather(one: str, other: str) -> None:
        pairs.append((one, other))

    gather()
    script = "".join(f'print(rpm.vercmp("{one}", "{other}"))\n' for one, other in pairs)
    node.machine.write("/tmp/compare.lua", script)
    said = [int(line) for line in node.machine.did("rpmlua", "/tmp/compare.lua").split()]
    wrong = [(pair, found) for pair, found in zip(pairs, said) if (compare(*pair) > 0) - (compare(*pair) < 0) != found]
    assert len(said) == len(pairs) and not wrong, wrong[:5]
