# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gather a bundle: commands for apt and pip, rejected downloads, and no file fetched twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._bundle import apt_repository as packages
from ansible_collections.dra.accelerators.plugins.module_utils._bundle import wheels
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.bundle_manifest import BundleError, Item
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.gather import Gatherer
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.platform import Means
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.requirements import plan
from ansible_collections.dra.accelerators.plugins.module_utils._packages.openpgp import (
    KeyProblem,
    checked_key,
    signers,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, System
from ansible_collections.dra.accelerators.plugins.modules import bundle_create as module
from test_bundle import DEBIAN, DRIVER, FABRIC, FILE, PLACE, PYTHON, WHEELS
from test_openpgp import FOURTH, FOURTH_PRINT

MIRROR = "http://mirror.example/debian"
VENDOR = "https://vendor.example/repo"
KEYRING = "/keys/debian.gpg"
MIRRORS = {"debian_13": [{"uris": [MIRROR], "suites": ["trixie"], "components": ["main"], "keyring": KEYRING}]}
SOURCE = {"uris": [VENDOR], "suites": ["/"], "key_url": f"{VENDOR}/key.pub", "fingerprints": [FOURTH_PRINT]}
#: A version 4 signature with the issuer's fingerprint in its hashed part, and one with a key id in its other part.
SIGNER = "0123456789ABCDEF0123456789ABCDEF01234567"
VERSIONS = {
    "python3-venv": "3.13.5-1",
    "python3.13-venv": "3.13.5-2",
    "nvidia-driver-cuda": "580.95.05-1",
    "nvidia-kernel-open-dkms": "580.95.05-1",
    "nvidia-kernel-dkms": "580.95.05-1",
    "linux-headers-6.12.48-amd64": "6.12.48-1",
    "dkms": "1:3.2.2-1",
    "nvidia-fabricmanager-580": "580.95.05-1",
    "nvlsm": "2025.10.1-1",
}
BRINGS = {"python3-venv": ["python3.13-venv"], "nvidia-kernel-open-dkms": ["dkms"], "nvidia-kernel-dkms": ["dkms"]}


def armoured(*subpackets: bytes, hashed: bool = True) -> str:
    import base64

    parts = b"".join(bytes([len(each)]) + each for each in subpackets)
    nothing = (0).to_bytes(2, "big")
    size = len(parts).to_bytes(2, "big")
    body = b"\x04\x00\x01\x08" + (size + parts + nothing if hashed else nothing + size + parts) + b"\x00\x00"
    data = base64.b64encode(bytes([0xC2, len(body)]) + body).decode()
    return f"-----BEGIN PGP SIGNATURE-----\n\n{data}\n-----END PGP SIGNATURE-----\n"


SIGNED = "Origin: x\n" + armoured(b"\x21\x04" + bytes.fromhex(SIGNER))


def content_of(name: str) -> bytes:
    return f"content of {name}".encode()


def stanza(name: str, digest: str = "") -> str:
    version, place = VERSIONS[name], MIRROR if "nvidia" not in name else VENDOR
    digest = digest or hashlib.sha256(content_of(name)).hexdigest()
    return (
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nDescription: x\n more\n"
        f"Filename: pool/{place.rpartition('/')[2]}/{name}.deb\nSHA256: {digest}\n"
    )


class Machine(System):
    """A system whose apt and pip serve the tables above. It records their commands."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.apt = True
        self.wrong = ""
        self.left_out: Sequence[str] = ("typing-extensions",)
        self.keyring = directory / "debian.gpg"
        self.keyring.write_text("keys")

    def finds(self, program: str) -> bool:
        return self.apt or program != "apt-get"

    def fetches(self) -> list[list[str]]:
        """Return the calls that fetch a file."""
        return [call for call in self.calls if "download" in call[:5] or any("-q download" in word for word in call)]

    def run(
        self,
        argv: Sequence[str],
        timeout: float,
        input: str | None = None,  # noqa: A002
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        words = list(argv)
        self.calls.append(words)
        self.environments.append(dict(environment or {}))
        assert timeout > 0
        return Completed(0, self._pip(words) if "pip" in words else self._apt(words, environment or {}), "")

    def _apt(self, words: list[str], environment: Mapping[str, str]) -> str:
        root = Path(environment["APT_CONFIG"]).parent
        named = [word.partition("=")[0] for word in words if word.partition("=")[0] in VERSIONS]
        if "update" in words:
            for uri in (MIRROR, VENDOR):
                name = f"{packages.list_prefix(uri)}InRelease"
                (root / "var/lib/apt/lists" / name).write_text(SIGNED)
            return ""
        if "madison" in words:
            return "".join(f"{name} | {VERSIONS[name]} | {MIRROR} trixie/main amd64 Packages\n" for name in named)
        if "-s" in words:
            brought = [each for name in named for each in (*BRINGS.get(name, ()), name)]
            return "".join(f"Inst {name} ({VERSIONS[name]} Debian:13 [amd64])\n" for name in dict.fromkeys(brought))
        if words[:2] == ["apt-cache", "show"]:
            return "\n".join(stanza(name) for name in named)
        if "--print-uris" in words:
            found = [(name, packages.parse_stanzas(stanza(name))[0]) for name in named]
            return "".join(
                f"'{VENDOR if 'nvidia' in name else MIRROR}/pool/{name}.deb' {packages.file_name(each)} 9 SHA512:x\n"
                for name, each in found
            )
        assert words[0] == "sh"
        for name in named:
            path = Path(words[4], packages.file_name(packages.parse_stanzas(stanza(name))[0]))
            path.write_bytes(b"bad" if name == self.wrong else content_of(name))
        return ""

    def _pip(self, words: list[str]) -> str:
        names = {"a": ["typing-extensions; python_version < '3.14'"], "typing-extensions": []}
        if "download" in words:
            directory = next(word for word in words if word.startswith("--dest=")).partition("=")[2]
            for name in names:
                if f"{name}==1" in words:
                    Path(directory, f"{name}-1-py3-none-any.whl").write_bytes(content_of(name))
            return ""
        report = next(word for word in words if word.startswith("--report=")).partition("=")[2]
        requested = {word for word in words if word in names}
        installed = [name for name in names if name in requested or name not in self.left_out]
        Path(report).write_text(
            json.dumps(
                {
                    "install": [
                        {
                            "metadata": {"name": name, "version": "1", "requires_dist": names[name]},
                            "download_info": {
                                "url": f"https://me:secret@index.example/{name}-1-py3-none-any.whl",
                                "archive_info": {"hashes": {"sha256": hashlib.sha256(content_of(name)).hexdigest()}},
                            },
                        }
                        for name in installed
                    ]
                }
            )
        )
        return ""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def gathered(machine: Machine, directory: Path, needs: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Item]:
    mirrors = {"debian_13": [{**MIRRORS["debian_13"][0], "keyring": str(machine.keyring), **more.pop("mirror", {})}]}
    means = Means(interpreter="/python", fetch=lambda _url: FOURTH, mirrors=mirrors, **more)
    return {item.path: item for item in Gatherer(machine, str(directory / "parts"), means).gather(plan(needs)).items}


# Packages


def test_gather_packages_with_dependencies_and_signers(machine: Machine, tmp_path: Path) -> None:
    found = gathered(machine, tmp_path, [PYTHON, {**DRIVER, "source": SOURCE}, FABRIC])
    names = {item.name for item in found.values() if item.kind == "package"}
    assert names == set(VERSIONS)
    driver = found[f"packages/{PLACE}/nvidia-driver-cuda_580.95.05-1_amd64.deb"]
    assert (driver.source, driver.signed_by) == (f"{VENDOR}/pool/nvidia-driver-cuda.deb", (SIGNER,))
    assert driver.sha256 == hashlib.sha256(content_of("nvidia-driver-cuda")).hexdigest()
    assert found[f"packages/{PLACE}/dkms_1%3a3.2.2-1_amd64.deb"].version == "1:3.2.2-1"
    index = packages.parse_stanzas((tmp_path / f"parts/packages/{PLACE}/Packages").read_text())
    assert {each.name: each.fields["Filename"] for each in index}["dkms"] == "./dkms_1%3a3.2.2-1_amd64.deb"
    assert {each.fields["Description"] for each in index} == {"x\n more"}


def test_gather_requests_both_module_kinds_separately(machine: Machine, tmp_path: Path) -> None:
    gathered(machine, tmp_path, [{**DRIVER, "source": SOURCE}])
    requested = [call[4:] for call in machine.calls if "-s" in call]
    assert [[word.partition("=")[0] for word in each][:2] for each in requested] == [
        ["nvidia-driver-cuda", "nvidia-kernel-open-dkms"],
        ["nvidia-driver-cuda", "nvidia-kernel-dkms"],
    ]
    assert all("linux-headers-6.12.48-amd64" in each for each in requested)


def test_gather_matches_packages_by_driver_version(machine: Machine, tmp_path: Path) -> None:
    gathered(machine, tmp_path, [FABRIC, {**DRIVER, "source": SOURCE}])
    assert ["nvidia-fabricmanager", "nvidia-fabricmanager-580", "nvlsm"] in [call[2:] for call in machine.calls]
    other = {**FABRIC, "follows": False, "version": "570.86"}
    with pytest.raises(BundleError, match=r"has nvidia-fabricmanager 570\.86.*there is nvlsm: 2025"):
        gathered(machine, tmp_path, [other])


def test_gather_apt_uses_separate_root(machine: Machine, tmp_path: Path) -> None:
    gathered(machine, tmp_path, [{**DRIVER, "source": SOURCE}])
    root = tmp_path / "parts/apt" / PLACE
    assert {each["APT_CONFIG"] for each in machine.environments} == {f"{root}/apt.conf"}
    settings = (root / "apt.conf").read_text()
    assert f'Dir "{root}/";' in settings
    assert 'APT::Architectures { "amd64"; };' in settings
    sources = root / "etc/apt/sources.list.d"
    assert f"Signed-By: {machine.keyring}" in (sources / "0.sources").read_text()
    assert f"Signed-By: {root}/etc/apt/keyrings/1.asc" in (sources / "1.sources").read_text()
    assert (root / "etc/apt/keyrings/1.asc").read_text() == checked_key(FOURTH, [FOURTH_PRINT], VENDOR)


def test_gather_second_run_fetches_no_file(machine: Machine, tmp_path: Path) -> None:
    first = gathered(machine, tmp_path, [PYTHON, WHEELS])
    assert len(machine.fetches()) == 3  # packages, wheels, and the addresses
    machine.calls.clear()
    assert gathered(machine, tmp_path, [PYTHON, WHEELS]) == first
    assert len(machine.fetches()) == 1


def test_gather_key_with_other_fingerprint_is_rejected(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(KeyProblem, match=FOURTH_PRINT):
        gathered(machine, tmp_path, [{**DRIVER, "source": {**SOURCE, "fingerprints": ["AB" * 20]}}])
    assert not machine.calls
    with pytest.raises(BundleError, match="No fingerprint is pinned"):
        gathered(machine, tmp_path, [{**DRIVER, "source": {**SOURCE, "fingerprints": []}}])


def test_gather_mirror_signed_by_other_key_is_rejected(machine: Machine, tmp_path: Path) -> None:
    gathered(machine, tmp_path, [PYTHON], mirror={"fingerprints": [SIGNER]})
    with pytest.raises(BundleError, match=f"is signed by {SIGNER}, expected {'CD' * 20}"):
        gathered(machine, tmp_path, [PYTHON], mirror={"fingerprints": ["CD" * 20]})


def test_gather_package_differing_from_index_is_rejected(machine: Machine, tmp_path: Path) -> None:
    machine.wrong = "python3-venv"
    with pytest.raises(BundleError, match=r"python3-venv_3\.13\.5-1_amd64\.deb is not the file"):
        gathered(machine, tmp_path, [PYTHON])


def test_gather_unavailable_package_is_named(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"debian 13 \(x86_64\) has nothing-such"):
        gathered(machine, tmp_path, [{**PYTHON, "names": ["python3-venv", "nothing-such"]}])
    machine.apt = False
    with pytest.raises(BundleError, match="has no apt"):
        gathered(machine, tmp_path, [PYTHON])
    machine.apt = True
    machine.keyring.unlink()
    with pytest.raises(BundleError, match="debian-archive-keyring"):
        gathered(machine, tmp_path, [PYTHON])


def test_archives_default_sources_depend_on_platform() -> None:
    def usual(distribution: str, release: str, machine: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        platform = {"distribution": distribution, "release": release, "machine": machine}
        found = packages.archives(plan([{**PYTHON, "platform": platform}]).platforms[0], {})
        return [(each.uris, each.suites) for each in found]

    assert usual("debian", "12", "x86_64")[0] == (
        ("http://deb.debian.org/debian",),
        ("bookworm", "bookworm-updates"),
    )
    assert usual("ubuntu", "24.04", "x86_64")[1] == (("http://security.ubuntu.com/ubuntu",), ("noble-security",))
    assert usual("ubuntu", "22", "aarch64") == [
        (("http://ports.ubuntu.com/ubuntu-ports",), ("jammy", "jammy-updates", "jammy-security"))
    ]


@pytest.mark.parametrize(
    ("uri", "prefix"),
    [
        ("http://deb.debian.org/debian", "deb.debian.org_debian_"),
        ("https://me:secret@mirror.example/x_y/", "mirror.example_x%5fy_"),
        ("file:/srv/x", "_srv_x_"),
        ("file:///srv/x", "_srv_x_"),
    ],
)
def test_list_prefix_of_source_address(uri: str, prefix: str) -> None:
    assert packages.list_prefix(uri) == prefix
    assert not "deb.debian.org_debian-security_dists_x_InRelease".startswith(prefix)


def test_signers_reads_both_signature_formats() -> None:
    assert signers(SIGNED) == (SIGNER,)
    key_id = bytes.fromhex("0123456789ABCDEF")
    assert signers(armoured(b"\x10" + key_id, hashed=False)) == ("0123456789ABCDEF",)
    assert signers("nothing is signed") == ()
    with pytest.raises(KeyProblem, match="contains no issuer"):
        signers(armoured(b"\x02abcd"))


# Wheels


def test_gather_wheels_excluded_by_local_python_are_requested_by_name(machine: Machine, tmp_path: Path) -> None:
    found = gathered(machine, tmp_path, [{**WHEELS, "requirements": "a  # a comment\n# none\n"}])
    assert sorted(found) == ["wheels/a-1-py3-none-any.whl", "wheels/typing-extensions-1-py3-none-any.whl"]
    assert {item.places for item in found.values()} == {("cp313-x86_64",)}
    assert found["wheels/a-1-py3-none-any.whl"].source == "https://index.example/a-1-py3-none-any.whl"
    reports = [call for call in machine.calls if "--dry-run" in call]
    assert len(reports) == 2
    assert "typing-extensions" in reports[1]


def test_gather_wheel_without_index_digest_is_rejected() -> None:
    wheel = wheels.Wheel("a", "1", "https://index.example/a-1-py3-none-any.whl", "")
    with pytest.raises(BundleError, match=r"Cannot verify a-1-py3-none-any\.whl"):
        wheels.check_digests([wheel], "a\n")


def test_gather_wheel_outside_lock_is_rejected() -> None:
    lock = f"A.b==1 ; python_full_version >= '3.11' \\\n    --hash=sha256:{'1' * 64} \\\n    --hash=sha256:{'2' * 64}\n"
    file = "https://index.example/a_b-1-py3-none-any.whl"
    wheels.check_digests([wheels.Wheel("a-b", "1", file, "2" * 64)], lock)
    with pytest.raises(BundleError, match="is not in the lock file: "):
        wheels.check_digests([wheels.Wheel("a-b", "1", file, "3" * 64)], lock)
    with pytest.raises(BundleError, match="is not in the lock file"):
        wheels.check_digests([wheels.Wheel("other", "1", file, "2" * 64)], lock)
    assert wheels.requirement_lines(lock) == ["A.b==1 ; python_full_version >= '3.11'"]
    marker_environment = wheels.environment("3.12", "x86_64")
    assert wheels.lock_for(lock, marker_environment) == f"A.b==1 --hash=sha256:{'1' * 64} --hash=sha256:{'2' * 64}\n"
    assert wheels.lock_for(lock, wheels.environment("3.10", "x86_64")) == ""


def test_gather_wheel_for_two_pythons_is_stored_once(machine: Machine, tmp_path: Path) -> None:
    found = gathered(machine, tmp_path, [WHEELS, {**WHEELS, "python": "3.12"}])
    assert {item.places for item in found.values()} == {("cp312-x86_64", "cp313-x86_64")}


def test_target_options_select_other_python() -> None:
    words = wheels.target_options("3.10", "aarch64")
    assert "--only-binary=:all:" in words
    assert "--python-version=3.10" in words
    assert "--abi=cp310" in words
    assert words.index("--platform=manylinux_2_28_aarch64") < words.index("--platform=manylinux_2_17_aarch64")
    assert not any("x86_64" in word for word in words)


def test_select_requirements_evaluates_markers_for_other_python() -> None:
    lines = ['tomli>=2.0,<3; python_version < "3.11"', "b[x]>=1", 'c; extra == "x"', 'd; platform_machine == "aarch64"']
    assert wheels.select_requirements(lines, wheels.environment("3.10", "x86_64")) == ["tomli<3,>=2.0", "b[x]>=1"]
    assert wheels.select_requirements(lines, wheels.environment("3.13", "aarch64")) == ["b[x]>=1", "d"]
    with pytest.raises(BundleError, match="is not a valid requirement"):
        wheels.select_requirements(["-r other.txt"], wheels.environment("3.13", "x86_64"))


def test_read_report_not_a_wheel_is_rejected() -> None:
    entry = {"metadata": {"name": "a", "version": "1"}, "download_info": {"url": "https://x/a-1.tar.gz"}}
    with pytest.raises(BundleError, match="which is no wheel"):
        wheels.read_report(json.dumps({"install": [entry]}))
    with pytest.raises(BundleError, match="report cannot be read"):
        wheels.read_report("{}")


# The module


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch, run_here: Callable[..., Any], tmp_path: Path, machine: Machine) -> Any:
    monkeypatch.setattr(module, "System", lambda: machine)
    run_file = tmp_path / "driver.run"
    run_file.write_bytes(b"driver")
    digest = hashlib.sha256(b"driver").hexdigest()
    own = {"python": "3.13", "machine": "x86_64", "requirements": "a\n"}
    needs = [
        {"kind": "wheels", "of": "python_environment", **own},
        {**FILE, "path": str(run_file), "sha256": digest},
        PYTHON,
    ]
    mirrors = {"debian_13": [{**MIRRORS["debian_13"][0], "keyring": str(machine.keyring)}]}

    def run(**options: Any) -> Any:
        check = options.pop("check", False)
        given = {"archive": str(tmp_path / "x.bundle"), "cache_path": str(tmp_path / "parts"), "needs": needs}
        return run_here("bundle_create", {**given, "mirrors": mirrors, **options}, check=check, diff=True)

    return run


def test_module_gathers_bundle_once(gather: Any, machine: Machine, tmp_path: Path, run_here: Any) -> None:
    foreseen = gather(check=True)
    assert foreseen["changed"] is True
    assert not machine.calls
    assert not (tmp_path / "parts").exists()
    first = gather(collection="0.1.0-x")
    assert first["changed"] is True
    assert first["steps"] == foreseen["steps"]
    assert "wheels/a-1-py3-none-any.whl" in first["added"]
    machine.calls.clear()
    second = gather()
    assert second["changed"] is False
    assert not machine.calls
    assert second["manifest_checksum"] == first["manifest_checksum"]
    taken = run_here(
        "bundle_extract",
        {"archive": first["archive"], "dest": str(tmp_path / "d"), "checksum": first["manifest_checksum"]},
    )
    assert taken["changed"] is True
    assert taken["collection"] == "0.1.0-x"
    assert taken["packages"][PLACE]["files"]["python3-venv=3.13.5-1"] == "python3-venv_3.13.5-1_amd64.deb"


def test_module_refresh_finds_newer_versions(gather: Any, machine: Machine) -> None:
    gather()
    assert gather(refresh=True)["changed"] is False
    VERSIONS["python3.13-venv"] = "3.13.6-1"
    try:
        found = gather(refresh=True)
    finally:
        VERSIONS["python3.13-venv"] = "3.13.5-2"
    assert found["added"] == [f"packages/{PLACE}/python3.13-venv_3.13.6-1_amd64.deb"]
    assert found["removed"] == [f"packages/{PLACE}/python3.13-venv_3.13.5-2_amd64.deb"]


def test_module_changed_local_files_are_gathered_again(gather: Any, tmp_path: Path) -> None:
    gather()
    archive = tmp_path / "x.bundle"
    archive.write_bytes(archive.read_bytes()[:2000])
    assert gather()["changed"] is True
    (tmp_path / "driver.run").write_bytes(b"other")
    found = gather()
    assert found["failed"] is True
    assert "differs from the expected one" in found["msg"]


def test_platform_number_release_is_read() -> None:
    found = plan([{**PYTHON, "platform": {**DEBIAN, "release": 13}}]).platforms[0].platform
    assert (found.key, found.suite, found.architecture) == (PLACE, "trixie", "amd64")
