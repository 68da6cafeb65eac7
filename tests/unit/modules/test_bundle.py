# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An offline bundle: the needs of a fleet, the manifest and its verification, and the extraction of the archive."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._bundle import archive as archives
from ansible_collections.dra.accelerators.plugins.module_utils._bundle import bundle_manifest as manifests
from ansible_collections.dra.accelerators.plugins.module_utils._bundle import requirements as needs
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.bundle_manifest import (
    BundleError,
    Found,
    Item,
    Manifest,
)
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.gather import Gatherer
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.platform import Means
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from hypothesis import example, given
from hypothesis import strategies as st

Result = dict[str, Any]
DEBIAN = {"distribution": "debian", "release": "13", "machine": "x86_64"}
PLACE = "debian_13_x86_64"
CATALOG = [
    {"modules": kind, "build": "dkms", "components": "compute", "packages": ["nvidia-driver-cuda", name]}
    for kind, name in (("open", "nvidia-kernel-open-dkms"), ("proprietary", "nvidia-kernel-dkms"))
]
PYTHON = {"kind": "packages", "of": "python_environment", "platform": DEBIAN, "names": ["python3-venv"]}
DRIVER = {
    "kind": "driver",
    "of": "nvidia_driver",
    "platform": DEBIAN,
    "wanted": {"version": "580", "kernel_modules": "auto", "persistence": False},
    "catalog": CATALOG,
    "headers": ["linux-headers-{kernel}"],
    "kernel": "6.12.48-amd64",
}
WHEELS = {"kind": "wheels", "of": "python_environment", "python": "3.13.5", "machine": "x86_64", "requirements": "a\n"}
IMAGE = {"kind": "image", "of": "driver_image", "reference": "localhost/driver:1"}
FILE = {"kind": "file", "of": "ascend_driver", "path": "/srv/x/driver.run", "sha256": "ab" * 32}
TOOLKIT = {"kind": "group", "of": "nvidia_container_toolkit", "platform": DEBIAN, "parts": [["toolkit"], ["base"]]}
FABRIC = {
    "kind": "group",
    "of": "nvidia_fabric_manager",
    "platform": DEBIAN,
    "parts": [["nvidia-fabricmanager", "nvidia-fabricmanager-{branch}"]],
    "follows": True,
    "also": ["nvlsm"],
}
ALL = [PYTHON, DRIVER, TOOLKIT, FABRIC, WHEELS, IMAGE, FILE]


def item(path: str, kind: str = "file", name: str = "", version: str = "", content: bytes = b"x", **more: Any) -> Item:
    digest = hashlib.sha256(content).hexdigest()
    return Item(path, kind, name or path.rpartition("/")[2], version, len(content), digest, **more)


def package(name: str, version: str) -> Item:
    return item(f"packages/{PLACE}/{name}_{version}_amd64.deb", "package", name, version, places=(PLACE,))


def whole() -> Manifest:
    """Return a manifest with all of the needs above."""
    names = ["nvidia-driver-cuda", "nvidia-kernel-open-dkms"]
    return Manifest(
        (
            package("python3-venv", "3.13.5-1"),
            *(package(name, "580.95.05-1") for name in names),
            package("linux-headers-6.12.48-amd64", "6.12.48-1"),
            *(package(name, "1.18.1-1") for name in ("toolkit", "base")),
            package("nvidia-fabricmanager-580", "580.95.05-1"),
            item("wheels/a-1-py3-none-any.whl", "wheel", "a", "1", places=("cp313-x86_64",)),
            item("images/image.tar", "image", "localhost/driver:1"),
            Item("files/driver.run", "file", "driver.run", "", 1, "ab" * 32),
        ),
        wheelhouses={"cp313-x86_64": (manifests.digest_of_text("a\n"),)},
    )


def without(path: str) -> Manifest:
    found = whole()
    kept = tuple(each for each in found.items if path not in each.path)
    assert len(kept) == len(found.items) - 1
    return Manifest(kept, wheelhouses=found.wheelhouses)


# The plan


def test_plan_merges_equal_needs_of_hosts() -> None:
    plan = needs.plan([*ALL, *ALL])
    assert [each.platform.key for each in plan.platforms] == [PLACE]
    assert plan.platforms[0].groups == [("python3-venv",)]
    assert len(plan.platforms[0].drivers) == 1
    assert [(each.key, each.requirements) for each in plan.wheels] == [("cp313-x86_64", ("a\n",))]
    assert plan.images == ("localhost/driver:1",)
    assert plan.files == (("/srv/x/driver.run", "ab" * 32),)
    assert plan.describe()[0].startswith("gather packages for debian 13 (x86_64): python3-venv, the driver 580")


@given(st.permutations(ALL), st.lists(st.sampled_from(ALL), max_size=4))
def test_plan_is_independent_of_host_order(order: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    assert needs.plan([*order, *more]) == needs.plan(ALL)


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ({"kind": "rpm"}, "is no need"),
        ({"kind": "wheels", "of": "x", "machine": "x86_64"}, "no python and no requirements"),
        ({**PYTHON, "platform": {}}, "the platform of python_environment|expected a distribution"),
        ({**PYTHON, "platform": {**DEBIAN, "distribution": "fedora"}}, "no packages can be gathered for fedora 13"),
        ({**PYTHON, "platform": {**DEBIAN, "machine": "riscv64"}}, "riscv64 is known by no package name"),
        ({**WHEELS, "python": "three"}, "'three' is no version of python"),
    ],
)
def test_plan_invalid_need_is_rejected(need: dict[str, Any], words: str) -> None:
    with pytest.raises(BundleError, match=f"(?i){words}"):
        needs.plan([need])


def test_plan_images_are_separate_files_with_their_names(tmp_path: Path) -> None:
    """Each image is a separate file, also if the names differ only in characters that a file name cannot contain."""
    names = ["localhost/driver:1", "localhost-driver:1", "reg.example:5000/a/driver:1"]
    plan = needs.plan([{**IMAGE, "reference": name} for name in names])
    assert sorted(plan.images) == sorted(names)
    assert [line for line in plan.describe() if "image" in line] == [f"save the image {name}" for name in plan.images]
    sources = {name: str(tmp_path / f"{number}.saved") for number, name in enumerate(names)}
    for name, source in sources.items():
        Path(source).write_text(name)
    directory = tmp_path / "parts"
    means = Means(interpreter=sys.executable, fetch=str, images=sources)
    gathered = Gatherer(System(), str(directory), means).gather(plan)
    manifest = Manifest(gathered.items, plan.needs, gathered.wheelhouses, "")
    read = manifests.read(manifest.to_text(), "x")
    assert {item.name: (directory / item.path).read_text() for item in read.items} == {name: name for name in names}
    with pytest.raises(BundleError, match="The image localhost/driver:1 is required, but has no file"):
        Gatherer(System(), str(directory), Means(interpreter="", fetch=str)).gather(needs.plan([IMAGE]))


def test_plan_two_files_with_one_name_are_rejected() -> None:
    with pytest.raises(BundleError, match=r"Two files are called driver\.run"):
        needs.plan([FILE, {**FILE, "path": "/other/driver.run"}])
    with pytest.raises(BundleError, match="has two expected digests"):
        needs.plan([FILE, {**FILE, "sha256": ""}])


def test_manifest_has_no_passwords_of_addresses() -> None:
    source = {"uris": ["https://me:secret@mirror.example/x"], "suites": ["/"], "fingerprints": ["A"], "key": "k"}
    plan = needs.plan([{**DRIVER, "source": source}])
    assert "secret" not in json.dumps(plan.needs)
    assert plan.platforms[0].sources[0].uris == ("https://me:secret@mirror.example/x",)


# Missing items


def test_missing_complete_bundle_has_none() -> None:
    assert needs.missing(ALL, whole()) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("python3-venv", "the package python3-venv for debian 13 (x86_64) (python_environment)"),
        ("nvidia-driver-cuda", "the driver 580 with auto kernel modules (dkms, compute) for debian 13 (x86_64)"),
        ("nvidia-kernel-open", "the driver 580 with auto kernel modules (dkms, compute) for debian 13 (x86_64)"),
        ("/toolkit", "toolkit, base for debian 13 (x86_64) (nvidia_container_toolkit)"),
        ("/base", "toolkit, base for debian 13 (x86_64) (nvidia_container_toolkit)"),
        ("fabricmanager", "nvidia-fabricmanager of the driver's version for debian 13 (x86_64)"),
        ("linux-headers", "the package linux-headers-6.12.48-amd64 for debian 13 (x86_64) (nvidia_driver)"),
        ("image.tar", "the image localhost/driver:1 (driver_image), it has none"),
        ("driver.run", "the file driver.run (ascend_driver)"),
    ],
)
def test_missing_item_is_named(path: str, words: str) -> None:
    found = needs.missing(ALL, without(path))
    assert len(found) == 1
    assert found[0].startswith(words)


def test_missing_wheels_of_other_python_or_requirements() -> None:
    other = {**WHEELS, "python": "3.12"}
    assert needs.missing([other], whole()) == [
        "the wheels of cp312-x86_64 (python_environment), it has those of cp313-x86_64"
    ]
    other = {**WHEELS, "requirements": "b\n"}
    assert "of another list" in needs.missing([other], whole())[0]


def test_missing_file_with_other_digest() -> None:
    assert "it has abab" in needs.missing([{**FILE, "sha256": "cd" * 32}], whole())[0]
    assert needs.missing([{**FILE, "sha256": ""}], whole()) == []


def test_missing_driver_of_other_branch() -> None:
    assert needs.missing([{**DRIVER, "wanted": {"version": "570", "persistence": False}}], whole())
    assert not needs.missing([{**DRIVER, "wanted": {"persistence": False}}], whole())


def test_missing_packages_are_matched_by_version() -> None:
    for version, fits in (("1.18", True), ("1.18.1", True), ("1.18.1-1", True), ("1.17", False), ("1.1", False)):
        assert (needs.missing([{**TOOLKIT, "version": version}], whole()) == []) == fits, version
    assert needs.missing([{**FABRIC, "version": "580.95.05", "follows": False}], whole()) == []
    assert needs.missing([{**FABRIC, "version": "570.1", "follows": False}], whole())


def test_refuse_missing_names_bundle_and_remedy() -> None:
    with pytest.raises(BundleError, match=r"/x does not have what gpu-1 needs: the image .*docs/offline"):
        needs.refuse_missing(ALL, without("image.tar"), "/x", "gpu-1")


@given(st.sets(st.integers(0, len(whole().items) - 1)))
def test_missing_is_reported_exactly_for_removed_items(gone: set[int]) -> None:
    found = whole()
    kept = tuple(each for number, each in enumerate(found.items) if number not in gone)
    # The check of the files detects a wheelhouse without its wheels.
    wanted = [need for need in ALL if need is not WHEELS]
    relevant = {number for number in gone if found.items[number].kind != "wheel"}
    assert bool(needs.missing(wanted, Manifest(kept, wheelhouses=found.wheelhouses))) == bool(relevant)


# The manifest

FILE_NAMES = st.from_regex(r"[A-Za-z0-9][a-z0-9._+~%=@-]{0,8}", fullmatch=True)
PLACES = st.sampled_from([PLACE, "ubuntu_24_aarch64"])
HOUSES = st.sampled_from(["cp312-x86_64", "cp313-x86_64"])
PATHS = st.builds("{}/{}".format, st.sampled_from(["files", "images", f"packages/{PLACE}"]), FILE_NAMES)
VERSIONS = st.from_regex(r"([A-Za-z0-9][a-z0-9._+~^!:=@/-]{0,8})?", fullmatch=True)
LINES = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)
DIGESTS = st.binary(max_size=8).map(lambda content: hashlib.sha256(content).hexdigest())


@st.composite
def items(draw: st.DrawFn) -> Item:
    """Draw a valid item of any kind."""
    kind, name = draw(st.sampled_from(manifests.KINDS)), draw(FILE_NAMES)
    place = draw(PLACES)
    path = {
        "package": f"packages/{place}/{name}",
        "index": draw(st.sampled_from([f"packages/{place}/{name}", f"packages/{place}/repodata/{name}"])),
        "wheel": f"wheels/{name}.whl",
        "image": f"images/{name}",
        "file": f"files/{name}",
    }[kind]
    houses = tuple(draw(st.lists(HOUSES, max_size=2, unique=True)))
    places = houses if kind == "wheel" else (place,) if kind in ("package", "index") else ()
    signers = tuple(draw(st.lists(st.from_regex(r"[0-9A-F]{8,64}", fullmatch=True), max_size=2)))
    texts = draw(FILE_NAMES), draw(VERSIONS), draw(st.integers(0, 1 << 40)), draw(DIGESTS)
    return Item(path, kind, *texts, places, draw(LINES), signers, draw(LINES))


def is_tree(found: list[Item]) -> bool:
    """Return whether no file is also a directory."""
    return not any(one.path.startswith(f"{other.path}/") for one in found for other in found)


MANIFESTS = st.builds(
    Manifest,
    st.lists(items(), max_size=5, unique_by=lambda each: each.path)
    .filter(is_tree)
    .map(lambda each: tuple(sorted(each, key=lambda one: one.path))),
    st.lists(st.dictionaries(LINES, LINES, max_size=2), max_size=2).map(tuple),
    st.fixed_dictionaries(
        dict.fromkeys(["cp312-x86_64", "cp313-x86_64"], st.lists(DIGESTS, max_size=2).map(tuple)),
    ),
    LINES,
)


@given(MANIFESTS)
def test_manifest_round_trips(manifest: Manifest) -> None:
    text = manifest.to_text()
    assert manifests.read(text, "/x") == manifest
    assert manifests.read(text, "/x").to_text() == text


@given(MANIFESTS, st.dictionaries(PATHS, st.builds(Found, st.integers(0, 9), st.just("a" * 64)), max_size=4))
def test_compare_finds_every_difference(manifest: Manifest, others: Mapping[str, Found]) -> None:
    same = {each.path: Found(each.size, each.sha256) for each in manifest.items}
    assert not manifests.compare(manifest, same)
    found = manifests.compare(manifest, others)
    named = {*found.missing, *found.changed, *found.unexpected}
    assert named == {path for path in {*same, *others} if same.get(path) != others.get(path)}


OUTSIDE = [
    "../x",
    "/etc/passwd",
    "files/../b",
    "files//b",
    "files/.hidden",
    "manifest.json",
    "",
    "files/a\nb",
    "wheelhouses/x/y",
    "x",
]


@pytest.mark.parametrize("kind", manifests.KINDS)
@pytest.mark.parametrize("path", OUTSIDE)
def test_manifest_path_outside_the_bundle_is_rejected(kind: str, path: str) -> None:
    content = json.loads(whole().to_text())
    content["items"][0].update(path=path, kind=kind)
    with pytest.raises(BundleError, match="is not a path for the kind"):
        manifests.read(json.dumps(content), "/x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"for": ["../../../tmp/evil"]}, "is not valid as entry of for"),
        ({"for": ["/tmp/evil"]}, "is not valid as entry of for"),
        ({"for": [".."]}, "is not valid as entry of for"),
        ({"for": "cp313-x86_64"}, "expected a list"),
        ({"for": ["cp399-x86_64"]}, "expected keys of wheelhouses"),
        ({"name": "--config=/tmp/evil"}, "is not valid as name"),
        ({"version": "-oDir=/tmp/evil"}, "is not valid as version"),
        ({"from": "a\nb"}, "is not valid as from"),
        ({"verified": "a\x1b[2J"}, "is not valid as verified"),
        ({"signed_by": ["../x"]}, "is not valid as signed_by"),
        ({"size": -1}, "has the size -1"),
        ({"size": True}, "has the size True"),
        ({"size": "1"}, "has the size '1'"),
        ({"sha256": "X" * 64}, "is not valid as SHA-256 digest"),
        ({"path": "wheels/a-1-py3-none-any.whl/b.whl"}, "is not a path"),
    ],
)
def test_manifest_wheel_with_a_wrong_value_is_rejected(change: dict[str, Any], words: str) -> None:
    content = json.loads(whole().to_text())
    (wheel,) = (each for each in content["items"] if each["kind"] == "wheel")
    wheel.update(change)
    with pytest.raises(BundleError, match=words):
        manifests.read(json.dumps(content), "/x")


@pytest.mark.parametrize("key", ["../../tmp", "/tmp", "..", "", "A", "a/b"])
def test_manifest_wheelhouse_outside_the_bundle_is_rejected(key: str) -> None:
    content = json.loads(whole().to_text())
    content["wheelhouses"][key] = []
    with pytest.raises(BundleError, match="is not valid as key of wheelhouses"):
        manifests.read(json.dumps(content), "/x")


def test_manifest_package_of_another_platform_is_rejected() -> None:
    content = json.loads(whole().to_text())
    (package_,) = (each for each in content["items"] if each["name"] == "python3-venv")
    package_["for"] = ["debian_12_x86_64"]
    with pytest.raises(BundleError, match="expected only the platform in its path"):
        manifests.read(json.dumps(content), "/x")


def test_manifest_file_that_is_a_directory_is_rejected() -> None:
    top = f"packages/{PLACE}/repodata"
    both = Manifest((item(top, "package", places=(PLACE,)), item(f"{top}/x", "index", places=(PLACE,))))
    with pytest.raises(BundleError, match="is a file and the directory of"):
        manifests.read(both.to_text(), "/x")


EVIL = st.sampled_from(
    [
        "../evil", "../../evil", "/tmp/evil", "..", ".", "", "a/../../evil", "wheelhouses/../../evil", "cp313-x86_64", PLACE, "link",
        f"packages/{PLACE}/a.deb", "wheels/a-1.whl", "files/x", "images/x", f"packages/{PLACE}/repodata/x", "manifest.json",
        f"packages/{PLACE}/../../../evil", "wheels/../../evil.whl", "wheels//evil.whl", "files/..", "packages/../evil/x", "\\evil", "-evil",
    ]
)  # fmt: skip
VALID = {
    "path": "wheels/a-1.whl",
    "kind": "wheel",
    "name": "a",
    "version": "1",
    "size": 1,
    "sha256": hashlib.sha256(b"x").hexdigest(),
    "for": ["cp313-x86_64"],
    "from": "",
    "signed_by": [],
    "verified": "",
}
#: A valid wheel with some of its values replaced.
RANDOM = st.fixed_dictionaries(
    {},
    optional={
        "path": EVIL | st.text(max_size=20),
        "kind": st.sampled_from(manifests.KINDS),
        "name": EVIL,
        "version": EVIL,
        "for": st.lists(EVIL, max_size=3),
        "from": EVIL,
        "verified": EVIL,
    },
).map(lambda changes: {**VALID, **changes})


@given(st.lists(RANDOM, max_size=3), st.dictionaries(EVIL, st.just([]), max_size=3))
@example([{**VALID, "for": ["../../evil"]}], {"cp313-x86_64": []})
@example([{**VALID, "for": ["../../evil"]}], {"../../evil": []})
@example([{**VALID, "for": ["/tmp/evil"]}], {"/tmp/evil": []})
@example([{**VALID, "path": "wheels/../../evil.whl"}], {"cp313-x86_64": []})
def test_random_manifest_writes_only_below_its_directory(listed: list[dict[str, Any]], houses: dict[str, Any]) -> None:
    """A manifest is rejected, or all its files are below the directory. Check mode creates no file."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        archive, directory = top / "in/fleet.bundle", top / "a/b/c/folder"
        archive.parent.mkdir()
        directory.parent.mkdir(parents=True)
        content = {"format": 1, "collection": "", "wheelhouses": houses, "items": listed, "needs": []}
        with tarfile.open(archive, "w") as file:
            for path, data in (
                ("manifest.json", json.dumps(content).encode()),
                *((each["path"], b"x") for each in listed),
            ):
                member = tarfile.TarInfo(path)
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
        before = {*top.rglob("*"), *Path("/tmp").glob("evil*")}
        with contextlib.suppress(BundleError):
            text, manifest = archives.read_manifest(archive)
            archives.verify(archive, manifest)
            assert {*top.rglob("*"), *Path("/tmp").glob("evil*")} == before
            archives.extract(archive, text, manifest, directory)
        after = {*top.rglob("*"), *Path("/tmp").glob("evil*")}
        assert all(path == directory or directory in path.parents for path in after - before), after - before


@given(MANIFESTS)
def test_random_valid_manifest_is_accepted(manifest: Manifest) -> None:
    small = Manifest(
        tuple(replace(each, size=1, sha256=hashlib.sha256(b"x").hexdigest()) for each in manifest.items),
        manifest.needs,
        manifest.wheelhouses,
    )
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for each in small.items:
            (top / "parts" / each.path).parent.mkdir(parents=True, exist_ok=True)
            (top / "parts" / each.path).write_bytes(b"x")
        archives.write(top / "parts", small, top / "fleet.bundle")
        text, found = archives.read_manifest(top / "fleet.bundle")
        archives.extract(top / "fleet.bundle", text, found, top / "folder")
        assert archives.is_extracted(top / "folder", text, found)


def test_unpacked_bundle_with_outside_link_is_unpacked_again(run_here: Callable[..., Result], bundle: Path) -> None:
    taken(run_here, bundle)
    path = Path(f"{bundle}.d/files/driver.run")
    path.unlink()
    (bundle.parent / "other").write_bytes(b"driver")
    path.symlink_to(bundle.parent / "other")
    assert taken(run_here, bundle)["changed"] is True and not path.is_symlink()
    assert (bundle.parent / "other").read_bytes() == b"driver"


def test_bundle_without_a_checksum_is_rejected(run_here: Callable[..., Result], bundle: Path) -> None:
    for check in (True, False):
        refused = taken(run_here, bundle, check=check, allow_unpinned=False)
        assert refused["error_code"] == "bundle-pin" and "allow_unpinned" in refused["msg"]
        assert not Path(f"{bundle}.d").exists()
    text, _manifest = archives.read_manifest(bundle)
    pinned = taken(run_here, bundle, allow_unpinned=False, checksum=manifests.digest_of_text(text))
    assert pinned["changed"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[]", "no format"),
        ('{"format": 2}', "the format 2, and this collection reads 1"),
        ('{"format": 1}', "no 'wheelhouses'"),
        ('{"format": 1, "wheelhouses": {}, "items": [{"path": "a", "kind": "b", "size": 1}]}', "of the kind 'b'"),
        ('{"format": 1, "wheelhouses": {}, "items": {}}', "expected a list"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_manifest_invalid_text_is_rejected(text: str, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        manifests.read(text, "/x")


def test_check_pin_compares_digest() -> None:
    text = whole().to_text()
    manifests.check_pin(text, "", "/x", is_required=False)
    manifests.check_pin(text, f"sha256:{manifests.digest_of_text(text).upper()} ", "/x")
    with pytest.raises(BundleError, match="expected " + "0" * 64):
        manifests.check_pin(text, "0" * 64, "/x")


# The archive


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return an archive with two wheels, one of them for two Python versions, and a file."""
    contents = {"wheels/a-1.whl": b"wheel a", "wheels/b-1.whl": b"wheel b", "files/driver.run": b"driver"}
    places = {"wheels/a-1.whl": ("cp312-x86_64", "cp313-x86_64"), "wheels/b-1.whl": ("cp313-x86_64",)}
    items = []
    for path, content in contents.items():
        (tmp_path / "parts" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "parts" / path).write_bytes(content)
        kind = "wheel" if "wheels" in path else "file"
        items.append(item(path, kind, content=content, places=places.get(path, ())))
    digest = manifests.digest_of_text("a\n")
    houses = {"cp312-x86_64": (digest,), "cp313-x86_64": (digest,)}
    archives.write(tmp_path / "parts", Manifest(tuple(items), wheelhouses=houses), tmp_path / "fleet.bundle")
    return tmp_path / "fleet.bundle"


def again(bundle: Path, change: Callable[[str, bytes], list[tuple[str, bytes]]]) -> None:
    """Write the archive again, with the members that ``change`` returns for each member."""
    with tarfile.open(bundle) as old:
        contents = [(member.name, old.extractfile(member).read()) for member in old]  # type: ignore[union-attr]
    source = bundle.with_name("source")
    with tarfile.open(bundle, "w") as new:
        for name, content in contents:
            for path, each in change(name, content):
                source.write_bytes(each)
                new.add(source, path)


def taken(run_here: Callable[..., Result], bundle: Path, **options: Any) -> Result:
    check = options.pop("check", False)
    arguments = {"archive": str(bundle), "dest": f"{bundle}.d", "allow_unpinned": True, **options}
    return run_here("bundle_extract", arguments, check=check, diff=True)


def test_bundle_is_unpacked_once(run_here: Callable[..., Result], bundle: Path) -> None:
    foreseen = taken(run_here, bundle, check=True)
    assert foreseen["changed"] is True
    assert not Path(f"{bundle}.d").exists()
    first = taken(run_here, bundle, needs=[WHEELS])
    assert {key: foreseen[key] for key in foreseen if key != "invocation"} == {
        key: first[key] for key in first if key != "invocation"
    }
    houses = {key: sorted(each.name for each in Path(path).iterdir()) for key, path in first["wheelhouses"].items()}
    assert houses == {"cp312-x86_64": ["a-1.whl"], "cp313-x86_64": ["a-1.whl", "b-1.whl"]}
    assert Path(first["files"], "driver.run").read_bytes() == b"driver"
    again_taken = taken(run_here, bundle)
    assert again_taken["changed"] is False
    assert again_taken["steps"] == []
    assert not list(bundle.parent.glob("*.partial"))


def test_archive_is_reproducible(bundle: Path) -> None:
    before = bundle.read_bytes()
    _text, manifest = archives.read_manifest(bundle)
    archives.write(bundle.parent / "parts", manifest, bundle)
    assert bundle.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n, c: [(n, c + b"!")] if "b-1" in n else [(n, c)], "changed: wheels/b-1.whl"),
        (lambda n, c: [(n, c[::-1])] if "b-1" in n else [(n, c)], "changed: wheels/b-1.whl"),
        (lambda n, c: [] if "driver" in n else [(n, c)], "missing: files/driver.run"),
        (
            lambda n, c: [(n, c), ("wheels/evil.whl", b"x")] if "b-1" in n else [(n, c)],
            "not in the manifest: wheels/evil",
        ),
        (lambda n, c: [(n, c), (n, b"other")] if "b-1" in n else [(n, c)], "not in the manifest: wheels/b-1.whl"),
        (lambda n, c: [(n, c), ("../../evil", b"x")] if "b-1" in n else [(n, c)], r"not in the manifest: ../../evil"),
        (lambda n, c: [] if "manifest" in n else [(n, c)], "does not begin with manifest.json"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_changed_archive_is_rejected_with_names(
    run_here: Callable[..., Result], bundle: Path, change: Any, words: str, *, check: bool
) -> None:
    again(bundle, change)
    found = taken(run_here, bundle, check=check)
    assert found["failed"] is True
    assert words in found["msg"]
    assert not Path(f"{bundle}.d").exists()
    assert sorted(each.name for each in bundle.parent.iterdir()) == ["fleet.bundle", "parts", "source"]


def test_truncated_archive_is_rejected(run_here: Callable[..., Result], bundle: Path) -> None:
    content = bundle.read_bytes()
    for size in (0, 100, 700, content.rindex(b"wheel b")):
        bundle.write_bytes(content[:size])
        found = taken(run_here, bundle)
        assert found["failed"] is True, size
        assert found["error_code"] in ("bundle-differs", "manifest"), found


def test_modified_directory_is_unpacked_again(run_here: Callable[..., Result], bundle: Path) -> None:
    taken(run_here, bundle)
    directory = Path(f"{bundle}.d")
    for path, what in (("files/driver.run", "changed"), ("wheelhouses/cp312-x86_64/a-1.whl", "replaced")):
        (directory / path).unlink()
        (directory / path).write_bytes(b"other")
        assert taken(run_here, bundle)["changed"] is True, what
        assert b"other" not in (directory / path).read_bytes()
    (directory / "wheelhouses/cp312-x86_64/evil.whl").write_bytes(b"x")
    assert taken(run_here, bundle)["changed"] is True
    assert not (directory / "wheelhouses/cp312-x86_64/evil.whl").exists()


def test_foreign_directory_is_not_changed(run_here: Callable[..., Result], bundle: Path) -> None:
    directory = Path(f"{bundle}.d")
    directory.mkdir()
    (directory / "own").write_text("mine")
    found = taken(run_here, bundle)
    assert "is not an extracted bundle" in found["msg"]
    assert (directory / "own").read_text() == "mine"


def test_missing_bundle_wrong_pin_and_missing_item_are_reported(run_here: Callable[..., Result], bundle: Path) -> None:
    assert "There is no bundle" in taken(run_here, bundle.with_name("other"))["msg"]
    assert taken(run_here, bundle, checksum="0" * 64)["error_code"] == "bundle-pin"
    found = taken(run_here, bundle, needs=[IMAGE], requested_by="gpu-1")
    assert found["error_code"] == "bundle-lacks"
    assert "gpu-1 needs: the image localhost/driver:1" in found["msg"]
    assert not Path(f"{bundle}.d").exists()
