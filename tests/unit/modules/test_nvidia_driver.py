# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA driver: package selection, blocked upgrades, and the node's state after failed packages and interrupted runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_catalog import (
    DriverError,
    Offer,
    Wanted,
    choose,
    kinds,
    modules_text,
    read_offers,
    refuse_removals,
    secure_boot_problem,
)
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_record import Record, read_record
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import Change
from ansible_collections.dra.accelerators.plugins.module_utils._packages.kept_packages import Kept
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.generations import BusGpu
from driver_node import CATALOG, FAILING, NEWER, OLDER, RECORD, UNLOADABLE, Node
from driver_store import claim
from hypothesis import given
from hypothesis import strategies as st
from nvidia_machine import B200, H100, OPEN, PROPRIETARY, V100


@pytest.fixture
def node(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, run_here, monkeypatch)


def test_install_loads_driver_and_is_idempotent(node: Node) -> None:
    dry_run = node.run("580", check=True)
    assert dry_run["changed"] and not node.versions() and node.apt.updates == [] and not node.record()
    done = node.run("580")
    assert done["steps"] == dry_run["steps"], done
    assert (
        node.versions() == {f"{NEWER}-1"} and PROPRIETARY not in node.apt.installed and node.machine.loaded() == NEWER
    )
    assert done["after"] == dry_run["after"] == {"version": NEWER, "kernel_modules": "open", "loaded": NEWER}
    assert {OPEN, "libcuda1"} <= node.apt.held and "nvidia-persistenced.service" in node.machine.running
    assert "blacklist nouveau" in node.machine.read_text("/etc/modprobe.d/dra-accelerators-nvidia.conf")
    assert "initramfs" in node.machine.log
    again = node.run("580")
    assert not again["changed"] and again["steps"] == [] and not again["reboot_required"], again
    node.apt.versions = []
    assert not node.run("580")["changed"], "the installed version is kept, even if the source has a newer one"


def test_upgrade_stops_users_unloads_installs_and_loads(node: Node) -> None:
    node.machine.enabled.add("dra-accelerators-driver.service")
    node.run(OLDER)
    assert not node.run("580")["changed"]
    node.machine.running.add("dra-accelerators-driver.service")
    node.machine.log.clear()
    done = node.run("580", latest=True)
    assert done["after"]["version"] == NEWER and done["previous_available"] and node.versions() == {f"{NEWER}-1"}
    order = [line for line in node.machine.log if line != "initramfs"]
    assert order == [
        "stop dra-accelerators-driver.service",
        "stop nvidia-persistenced.service",
        "unload nvidia_uvm",
        "unload nvidia",
        f"load nvidia {NEWER}",
        f"load nvidia_uvm {NEWER}",
        "start nvidia-persistenced.service",
        "start dra-accelerators-driver.service",
    ]
    assert {OPEN, "libcuda1"} <= node.apt.held
    node.apt.versions = []
    assert (
        node.run(state="previous")["changed"] and node.machine.loaded() == OLDER and node.versions() == {f"{OLDER}-1"}
    )
    assert node.run(state="previous")["changed"] and node.machine.loaded() == NEWER, "and forward again"


@pytest.mark.parametrize(
    ("version", "code", "words"),
    [(FAILING, "no-module", "no member named foo"), (UNLOADABLE, "not-loaded", "does not load")],
)
def test_failing_driver_is_rolled_back(node: Node, version: str, code: str, words: str) -> None:
    first = node.run(version)
    assert first["failed"] and first["error_code"] == code and words in first["msg"] and "removed again" in first["msg"]
    assert not node.versions() and not node.apt.broken and not node.apt.held, "as before"
    node.run(NEWER)
    before = (dict(node.apt.installed), set(node.apt.held), node.record()["now"])
    failed = node.run(version)
    assert failed["failed"] and failed["error_code"] == code and f"has the driver {NEWER} again" in failed["msg"]
    assert (dict(node.apt.installed), set(node.apt.held), node.record()["now"]) == before and not node.apt.broken
    assert node.machine.loaded() == NEWER and not node.run(NEWER)["changed"]
    assert not [path for path in (node.machine.path(f"/{RECORD}/packages")).iterdir() if version in path.name]


@pytest.mark.parametrize("place", ["libcuda1", OPEN, "nvidia-persistenced"])
@pytest.mark.parametrize("before", ["", OLDER])
def test_killed_run_is_resumed(node: Node, place: str, before: str) -> None:
    if before:
        node.run(before)
    node.apt.killed_at = place
    with pytest.raises(KeyboardInterrupt):
        node.run(NEWER)
    assert node.record()["doing"] == "install"
    assert node.run(NEWER)["changed"] and node.versions() == {f"{NEWER}-1"} and node.machine.loaded() == NEWER
    assert not node.run(NEWER)["changed"]
    if before:
        assert node.run(state="previous")["after"]["version"] == before
    removed = node.run(state="absent")
    assert removed["changed"] and node.apt.installed == {"bash": "5.2-1"}, (
        "what a killed run had installed goes as well"
    )


def test_absent_removes_own_packages_and_files(node: Node) -> None:
    before = {path.relative_to(node.machine.root) for path in node.machine.path("/etc").rglob("*")}
    node.run("580")
    done = node.run(state="absent")
    assert (
        done["changed"] and node.apt.installed == {"bash": "5.2-1"} and not node.machine.loaded() and not node.record()
    )
    files = {path.relative_to(node.machine.root) for path in node.machine.path("/etc").rglob("*") if path.is_file()}
    assert files == before
    assert not node.run(state="absent")["changed"]
    for name in ("nvidia-driver-cuda", OPEN):
        node.apt.installed[name] = f"{OLDER}-1"
    refused = node.run(state="absent")
    assert refused["error_code"] == "foreign" and OPEN in refused["msg"]
    assert node.run(state="absent", remove_unmanaged=True)["changed"] and node.apt.installed == {"bash": "5.2-1"}


def test_foreign_driver_is_replaced_and_can_be_restored(node: Node) -> None:
    for name in ("nvidia-driver-cuda", "libcuda1", "libnvidia-ml1", OPEN, "nvidia-persistenced"):
        node.apt.installed[name] = f"{OLDER}-1"
    done = node.run(NEWER)
    assert done["before"]["version"] == OLDER and done["previous_available"] and node.versions() == {f"{NEWER}-1"}
    assert node.run(state="previous")["after"]["version"] == OLDER


def test_gpu_users_are_named_and_not_stopped(node: Node, tmp_path: Path) -> None:
    node.run(OLDER)
    store = tmp_path / "state.db"
    claim(store, "GPU-1")
    dry_run = node.run(NEWER, check=True, state_path=str(store))
    assert dry_run["blocked_by"]["claims"] and not dry_run.get("failed"), "check mode reports it"
    for options in ({}, {"in_use": "restart"}, {"state": "absent"}):
        refused = node.run(NEWER, state_path=str(store), **options)
        assert refused["error_code"] == "in-use" and "team-a/training" in refused["msg"]
    node.use()
    refused = node.run(NEWER)
    assert refused["error_code"] == "in-use" and refused["pids"] == [4711] and node.machine.loaded() == OLDER
    assert node.versions() == {f"{OLDER}-1"} and "doing" in node.record() and not node.record()["doing"]

    done = node.run(NEWER, in_use="restart")
    assert done["reboot_required"] and node.versions() == {f"{NEWER}-1"} and node.machine.loaded() == OLDER
    again = node.run(NEWER, in_use="restart")
    assert not again["changed"] and again["reboot_required"], "the service is still stopped"
    node.machine.boot = "boot-2"
    node.machine.remove_tree("/sys/module/nvidia")
    node.machine.remove_tree("/sys/module/nvidia_uvm")
    done = node.run(NEWER)
    assert not done["reboot_required"] and node.machine.loaded() == NEWER


def test_module_that_cannot_be_unloaded_is_named_or_deferred(node: Node) -> None:
    node.run(OLDER)
    node.machine.held_modules.add("nvidia")
    refused = node.run(NEWER)
    assert (
        refused["error_code"] == "in-use" and "module nvidia " in refused["msg"] and node.versions() == {f"{OLDER}-1"}
    )
    assert node.machine.loaded() == OLDER and node.machine.exists("/sys/module/nvidia_uvm"), (
        "the unloaded modules are loaded again"
    )
    assert not node.run(OLDER)["changed"], "nothing was begun"
    assert node.run(NEWER, in_use="restart")["reboot_required"] and node.versions() == {f"{NEWER}-1"}


def test_missing_persistence_daemon_is_reported(node: Node) -> None:
    bare = [{**entry, "persistence": []} for entry in CATALOG]
    refused = node.run("580", catalog=bare)
    assert (
        refused["error_code"] == "no-persistence"
        and node.versions() == {f"{NEWER}-1"}
        and node.machine.loaded() == NEWER
    )
    assert not node.run("580", catalog=bare, persistence=False)["changed"]


def test_nouveau_is_unloaded_or_deferred_to_reboot(node: Node) -> None:
    node.machine.put_file("/sys/module/nouveau/refcnt", "0")
    assert not node.run("580")["reboot_required"] and not node.machine.exists("/sys/module/nouveau")
    node.run(state="absent")
    node.machine.put_file("/sys/module/nouveau/refcnt", "1")
    node.machine.held_modules.add("nouveau")
    done = node.run("580")
    assert done["reboot_required"] and node.versions() and not node.machine.loaded()


def test_other_kernel_module_kind_replaces_installed_one(node: Node) -> None:
    node.run(NEWER)
    done = node.run(
        NEWER, kernel_modules="proprietary", parameters={"nvidia": {"NVreg_RestrictProfilingToAdminUsers": False}}
    )
    assert f"remove {OPEN}" in done["steps"] and done["after"]["kernel_modules"] == "proprietary"
    assert OPEN not in node.apt.installed and PROPRIETARY in node.apt.installed
    text = node.machine.read_text("/etc/modprobe.d/dra-accelerators-nvidia.conf")
    assert "options nvidia NVreg_RestrictProfilingToAdminUsers=0\n" in text
    assert not node.run(NEWER, parameters={"nvidia": {"NVreg_RestrictProfilingToAdminUsers": False}})["changed"], (
        "auto leaves what fits"
    )


@pytest.mark.parametrize(
    ("gpus", "version", "options", "code"),
    [
        ([V100], "590", {}, "gpus"),
        ([B200], "580", {"kernel_modules": "proprietary"}, "gpus"),
        ([V100], "580", {"kernel_modules": "open"}, "gpus"),
        ([V100, B200], "580", {}, "gpus"),
        ([H100], "525", {}, "not-offered"),
        ([H100], "580", {"build": "precompiled"}, "not-offered"),
    ],
)
def test_impossible_request_is_rejected_with_reason(
    node: Node, gpus: list[str], version: str, options: dict[str, Any], code: str
) -> None:
    node.machine.remove_tree("/sys/bus/pci/devices/0000:3b:00.0")
    for place, device in enumerate(gpus):
        node.machine.gpu(f"0000:{place:02x}:00.0", device)
    for check in (True, False):
        refused = node.run(version, check=check, **options)
        assert refused["failed"] and refused["error_code"] == code, refused
    assert not node.versions()


def test_old_and_new_gpus_get_supported_kernel_modules(node: Node) -> None:
    node.machine.gpu("0000:3b:00.0", V100)
    assert node.run("580")["after"]["kernel_modules"] == "proprietary"
    node.run(state="absent")
    node.machine.gpu("0000:3b:00.0", B200)
    assert node.run("580")["after"]["kernel_modules"] == "open"


def test_missing_headers_are_rejected_before_any_change(node: Node) -> None:
    node.machine.remove_tree("/lib/modules")
    dry_run = node.run("580", check=True, headers=["linux-headers-{kernel}"])
    assert "linux-headers-" in dry_run["missing_requirements"]["headers"] and not dry_run.get("failed")
    source = {"uris": ["http://vendor/debian12"], "suites": ["/"]}
    refused = node.run("580", headers=["linux-headers-{kernel}"], source=source)
    assert refused["error_code"] == "headers" and not node.versions() and not node.machine.exists("/etc/apt"), (
        "nothing is left behind"
    )
    done = node.run("580", headers=["linux-headers-{kernel}"], load=False)
    assert done["changed"] and done["after"]["loaded"] == "" and node.versions()


def test_secure_boot_requires_enrolled_key(node: Node) -> None:
    efi = "/sys/firmware/efi/efivars"
    node.machine.put_file(f"{efi}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", "\x06\x00\x00\x00\x01")
    node.machine.put_file(f"{efi}/MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23", "\x06\x00\x00\x00other")
    assert node.run("580")["error_code"] == "secure-boot" and not node.versions()
    keys = {"signing_key": "/keys/mok.key", "signing_certificate": "/keys/mok.der"}
    assert "not on the node" in node.run("580", **keys)["msg"]
    node.machine.put_file("/keys/mok.key", "key")
    node.machine.put_file("/keys/mok.der", "certificate")
    refused = node.run("580", **keys)
    assert refused["error_code"] == "secure-boot" and "mokutil --import /keys/mok.der" in refused["msg"]
    node.machine.put_file(f"{efi}/MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23", "\x06\x00\x00\x00 certificate ")
    assert node.run("580", **keys)["changed"]
    assert 'mok_certificate="/keys/mok.der"' in node.machine.read_text(
        "/etc/dkms/framework.conf.d/dra-accelerators.conf"
    )


def test_package_files_are_verified_before_installation(node: Node) -> None:
    node.apt.versions = []
    names = ("nvidia-driver-cuda", "libcuda1", "libnvidia-ml1", OPEN, "nvidia-persistenced")
    files = [f"/packages/{name}_{NEWER}-1_amd64.deb" for name in names]
    assert node.run("580", files=files, check=True)["changed"], "a missing package is checked by its name"
    assert node.run("580", files=files)["error_code"] == "package-missing"
    for path in files:
        node.machine.put_file(path, path)
    refused = node.run("580", files=files, checksums={f"libcuda1_{NEWER}-1_amd64.deb": "0" * 64})
    assert refused["error_code"] == "checksum" and not node.versions()


def test_removal_reads_no_package_files(node: Node) -> None:
    """A removal ignores the option ``files``, and deletes the copy that a killed installation left."""
    node.run("580")
    node.machine.put_file("/var/lib/dra-accelerators/packages-verified/7/left.deb", "left")
    removed = node.run(state="absent", files=["/packages/gone.deb"])
    assert "error_code" not in removed and removed["changed"], removed
    assert not node.machine.exists("/var/lib/dra-accelerators/packages-verified")


def test_programs_with_driver_version_are_upgraded_or_block(node: Node) -> None:
    node.run(OLDER)
    node.apt.installed["nvidia-fabricmanager"] = f"{OLDER}-1"
    refused = node.run(NEWER)
    assert (
        refused["error_code"] == "companion"
        and "nvidia-fabricmanager" in refused["msg"]
        and node.versions() == {f"{OLDER}-1"}
    )


def test_run_file_installation_is_rejected(node: Node) -> None:
    node.machine.put_file("/usr/bin/nvidia-uninstall", "")
    assert node.run("580")["error_code"] == "run-file" and not node.versions()


# Pure functions


@pytest.mark.parametrize("version", ["latest", "v580", ">=580", "580.x", "580 ", "5 8 0"])
def test_invalid_version_is_rejected_with_the_accepted_forms(node: Node, version: str) -> None:
    refused = node.run(version)
    assert refused["error_code"] == "version" and repr(version) in refused["msg"]
    assert "580.95.05" in refused["msg"] and not node.versions()


@pytest.mark.parametrize("version", ["580", "580.95", "580.95.05", "3:580.95.05-1.el9", "580.95.05-0ubuntu0.24.04.1"])
def test_version_forms_are_accepted(version: str) -> None:
    assert Wanted(version).matches(version)


@given(
    st.sampled_from(["", "580", "580.95.05", "580.95.05-1"]),
    st.lists(st.sampled_from(["570.1-1", "580.65.06-1", "580.95.05-1", "590.1-1"]), unique=True),
)
def test_choose_selects_complete_requested_version(version: str, offered: list[str]) -> None:
    offers = [Offer("open", "dkms", "compute", ("a", "b"))]
    available = {"a": offered, "b": offered[1:]}
    choice = choose(offers, Wanted(version, persistence=False), [], {}, available)
    fitting = [each for each in offered[1:] if Wanted(version).matches(each)]
    if not fitting:
        assert choice is None
    else:
        assert choice is not None and choice.packages == dict.fromkeys(("a", "b"), fitting[0])
        kept = choose(offers, Wanted(version, persistence=False), [], dict(choice.packages), {})
        assert kept == choice, "an installed version needs no source"


def test_read_offers_fills_in_branch() -> None:
    catalog = [
        {
            "modules": "open",
            "build": "dkms",
            "components": "full",
            "packages": ["nvidia-driver-{branch}-open"],
            "to": 589,
        },
        {
            "modules": "open",
            "build": "precompiled",
            "components": "compute",
            "packages": ["nvidia-utils"],
            "also": ["linux-modules-{flavour}"],
            "from": 590,
        },
    ]
    (old,) = read_offers(catalog, branch="580", kernel="6.8.0-45-generic")
    assert old.packages == ("nvidia-driver-580-open",)
    (new,) = read_offers(catalog, branch="", kernel="6.8.0-45-generic")
    assert new.also == ("linux-modules-generic",)


ROLE = Path(__file__).resolve().parents[3] / "roles/nvidia_driver"


@pytest.mark.parametrize("distribution", ["debian", "ubuntu"])
@pytest.mark.parametrize("source", ["nvidia", "distribution"])
@pytest.mark.parametrize("branch", ["535", "580", "595"])
def test_role_catalogs_have_one_offer_per_driver(distribution: str, source: str, branch: str) -> None:
    values = yaml.safe_load((ROLE / f"vars/{distribution}.yml").read_text())
    offers = read_offers(values["__nvidia_driver_catalogs"][source], branch=branch, kernel="6.8.0-45-generic")
    ways = [(offer.modules, offer.build, offer.components) for offer in offers]
    assert len(ways) == len(set(ways))
    assert {(kind, "dkms", what) for kind in ("open", "proprietary") for what in ("compute", "full")} <= set(ways)
    # The module knows the installed driver by the packages of the kernel modules.
    known = kinds(values["__nvidia_driver_catalogs"][source], "6.8.0-45-generic", [branch])
    assert {kind for name, kind in known.items() if name in {each for offer in offers for each in offer.packages}} == {
        "open",
        "proprietary",
    }


def test_role_platforms_have_keys() -> None:
    promised = yaml.safe_load((ROLE / "vars/main.yml").read_text())["__nvidia_driver_platforms"]
    for platform in promised:
        values: dict[str, Any] = {}
        family = platform.partition("_")[0]
        for layer in (family, platform) if family != "openeuler" else (family,):
            values.update(yaml.safe_load((ROLE / f"vars/{layer}.yml").read_text()))
        # A key without a known fingerprint needs a configured one.
        for fingerprint in values["__nvidia_driver_fingerprints"]:
            assert len(fingerprint) == 40 and fingerprint.lower().endswith(
                values["__nvidia_driver_key_file"].lower()[:-4]
            )
        assert values["__nvidia_driver_fingerprints"] or platform == "redhat_10"
        vendors = {"redhat": "rhel", "openeuler": "", "suse": ("suse", "{{ 'sles15'")}
        assert values["__nvidia_driver_name_at_vendor"].startswith(vendors.get(family, family))
        assert all(offer["packages"] for offers in values["__nvidia_driver_catalogs"].values() for offer in offers)
    layers = {path.stem for path in (ROLE / "vars").glob("*.yml")} - {"main"}
    families = {platform.partition("_")[0] for platform in promised}
    assert layers == {platform for platform in promised if "openeuler" not in platform} | families


def test_refuse_removals_of_foreign_packages() -> None:
    refuse_removals([Change("remove", "nvidia-kernel-dkms", "1"), Change("install", "bash", "", "1")])
    with pytest.raises(DriverError) as caught:
        refuse_removals([Change("remove", "postgresql", "15")])
    assert caught.value.code == "would-remove" and "postgresql" in str(caught.value)


def test_modules_text_has_parameters_for_each_module_name() -> None:
    text = modules_text({"nvidia_drm": {"modeset": False}, "nvidia": {"b": 2, "a": "x"}}, keep_rivals=True)
    assert (
        "options nvidia a=x b=2\n" in text
        and "options nvidia-drm modeset=0\n" in text
        and "options nvidia-current-drm modeset=0\n" in text
    )
    assert "nouveau" not in text and modules_text({}, keep_rivals=True) == ""


def test_secure_boot_problem_only_for_unsigned_modules() -> None:
    values = {"key": "", "enrolled": False, "certificate": ""}
    assert secure_boot_problem(is_on=True, build="dkms", **values)
    assert not secure_boot_problem(is_on=True, build="precompiled", **values)
    assert not secure_boot_problem(is_on=False, build="dkms", **values)


KEPT = st.builds(
    Kept,
    st.text(min_size=1),
    st.sampled_from(["open", ""]),
    st.dictionaries(st.text(), st.fixed_dictionaries({"version": st.text(), "path": st.text(), "checksum": st.text()})),
)


@given(st.none() | KEPT, st.none() | KEPT, st.lists(st.text()), st.text(), st.text())
def test_record_round_trips(now: Kept | None, former: Kept | None, added: list[str], boot: str, doing: str) -> None:
    record = Record(now, former, tuple(added), doing, boot=boot)
    assert read_record(record.to_text() or None) == record


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "now": {"version": 3}}'])
def test_damaged_record_is_rejected(text: str) -> None:
    with pytest.raises(AcceleratorError) as caught:
        read_record(text)
    assert caught.value.code == "damaged-record"


def test_gpus_are_named_with_generation() -> None:
    assert BusGpu("0000:3b:00.0", 0x2330).describe() == "0000:3b:00.0 (Hopper, 10de:2330)"
