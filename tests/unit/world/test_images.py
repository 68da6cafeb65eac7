# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Images and certificates are reproducible from their inputs."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from world_cli import archive, binaries, certificates, pods, state
from world_cli.archive import Entry, Image
from world_cli.errors import WorldError
from world_cli.pins import (
    COMPONENTS,
    LINTERS,
    LONG_ORACLES,
    NODE_PROGRAMS,
    OLDEST_KUBERNETES,
    ORACLES,
    PEERS,
    Component,
)
from world_cli.state import World

WORLD = World("w", 215, state.plan_nodes("w", 1, []))


def test_image_is_complete_and_reproducible() -> None:
    entries = (Entry("bin", directory=True, mode=0o755), Entry("bin/x", b"x", 0o755), Entry("y", link="bin/x"))
    image = Image("localhost/a:1", entries, ("/bin/x",), {"A": "1"})
    written = archive.write_images([image])
    assert written == archive.write_images([image])
    with tarfile.open(fileobj=io.BytesIO(written)) as tar:
        files = {name: tar.extractfile(name) for name in tar.getnames()}
        contents = {name: stream.read() for name, stream in files.items() if stream}
    (manifest,) = json.loads(contents["manifest.json"])
    assert manifest["RepoTags"] == ["localhost/a:1"]
    configuration = json.loads(contents[manifest["Config"]])
    assert configuration["config"]["Cmd"] == ["/bin/x"]
    assert "A=1" in configuration["config"]["Env"]
    layer = contents[manifest["Layers"][0]]
    assert configuration["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        assert [(member.name, member.mode, member.uid, member.mtime) for member in tar] == [
            ("bin", 0o755, 0, 0),
            ("bin/x", 0o755, 0, 0),
            ("y", 0o777, 0, 0),
        ]
        assert tar.getmember("y").linkname == "bin/x"


STATUS = """Package: python3
Depends: python3.11 (>= 3.11.2-1~), libpython3-stdlib (= 3)
Pre-Depends: python3-minimal

Package: python3.11
Depends: libc6, missing | mawk

Package: python3-minimal

Package: libpython3-stdlib
Depends: awk, media-types:any

Package: mawk
Provides: awk (= 1), other
Depends: python3

Package: media-types

Package: libc6

Package: unrelated
"""


def test_package_includes_its_dependencies() -> None:
    packages = pods.read_status(STATUS)
    assert pods.with_dependencies(packages, ["libc6"]) == ["libc6"]
    assert pods.with_dependencies(packages, ["python3"]) == sorted(set(packages) - {"unrelated"})


def test_missing_package_is_named() -> None:
    with pytest.raises(WorldError, match="lacks the package perl"):
        pods.with_dependencies(pods.read_status(STATUS), ["perl"])


def root_with_a_package(root: Path) -> Path:
    for directory in ("usr/lib/x86_64-linux-gnu", "usr/share/doc/p", "var/lib/dpkg/info"):
        (root / directory).mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "usr/lib/x86_64-linux-gnu/libp.so.1.0").write_bytes(b"library")
    (root / "usr/lib/x86_64-linux-gnu/libp.so.1").symlink_to("libp.so.1.0")
    (root / "usr/share/doc/p/copyright").write_text("text")
    names = ["/.", "/lib", "/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu/libp.so.1.0", "/usr/share/doc/p/copyright"]
    names += ["/lib/x86_64-linux-gnu/libp.so.1", "/usr/lib/gone"]
    (root / "var/lib/dpkg/info/p:amd64.list").write_text("\n".join(names) + "\n")
    return root


def test_files_of_a_package_lie_where_they_are_and_documents_stay_away(tmp_path: Path) -> None:
    entries = {entry.path: entry for entry in pods.collect(root_with_a_package(tmp_path), ["p"])}
    assert entries["lib"].link == "usr/lib"
    assert entries["usr/lib/x86_64-linux-gnu/libp.so.1.0"].data == b"library"
    assert entries["usr/lib/x86_64-linux-gnu/libp.so.1"].link == "libp.so.1.0"
    assert not any("doc" in path or "gone" in path for path in entries)


def test_earlier_files_win() -> None:
    merged = pods.merge([Entry("a", b"1")], [Entry("a", b"2"), Entry("b", b"2")])
    assert [(entry.path, entry.data) for entry in merged] == [("a", b"1"), ("b", b"2")]


def openssl(*arguments: object) -> str:
    words = ["openssl", *map(str, arguments)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def test_certificates_are_what_the_cluster_expects() -> None:
    state.save(WORLD)
    certificates.ensure(WORLD)
    authority = certificates.authority_folder(WORLD)
    node = certificates.node_folder(WORLD, WORLD.nodes[0])
    kubelet = openssl("x509", "-in", node / "kubelet.crt", "-noout", "-subject", "-ext", "extendedKeyUsage")
    assert "O = system:nodes, CN = system:node:w-node1" in kubelet
    assert "TLS Web Client Authentication" in kubelet
    assert "Server" not in kubelet
    server = openssl("x509", "-in", authority / "apiserver.crt", "-noout", "-ext", "subjectAltName")
    for name in ("DNS:kubernetes.default.svc", "IP Address:10.215.0.2", "IP Address:10.215.240.1"):
        assert name in server
    for path in (*authority.glob("*.crt"), node / "kubelet.crt"):
        openssl("verify", "-CAfile", authority / "ca.crt", path)


def test_certificates_are_kept_and_a_new_authority_renews_the_nodes() -> None:
    certificates.ensure(WORLD)
    node = certificates.node_folder(WORLD, WORLD.nodes[0]) / "kubelet.crt"
    first = node.read_bytes()
    certificates.ensure(WORLD)
    assert node.read_bytes() == first
    (certificates.authority_folder(WORLD) / "ca.key").unlink()
    certificates.ensure(WORLD)
    assert node.read_bytes() != first
    openssl("verify", "-CAfile", certificates.authority_folder(WORLD) / "ca.crt", node)


ALL = (*COMPONENTS, *ORACLES, *LONG_ORACLES, *PEERS, *LINTERS, OLDEST_KUBERNETES)


@pytest.mark.parametrize("component", ALL, ids=lambda component: component.name)
def test_pins_and_module_files_say_the_same(component: Component) -> None:
    text = (component.module_folder / f"{component.module}.mod").read_text()
    own = re.findall(r"^module (\S+)$", text, re.MULTILINE)[0]
    sources = [path.read_text() for path in component.module_folder.glob("*.go")]
    tools = {package for package in component.programs.values() if package != own}
    assert all(f"{package}\n" in text for package in tools)
    tools |= {name for source in sources for name in re.findall(r'"(k8s.io/kubernetes/\S+)"', source)}
    required = dict(re.findall(r"^(?:require )?\s*(\S+) v(\S+)(?: // indirect)?$", text, re.MULTILINE))
    modules = {module for module in required for package in tools if f"{package}/".startswith(f"{module}/")}
    # Go marks a version from before modules as incompatible.
    assert {required[module].removesuffix("+incompatible") for module in modules} == {component.version}
    assert (component.module_folder / f"{component.module}.sum").read_text()


def test_the_services_of_kubernetes_are_one_program_that_knows_all_its_names() -> None:
    source = (OLDEST_KUBERNETES.module_folder / "main.go").read_text()
    for component in (each for each in ALL if each.name.startswith("kubernetes")):
        services = set(component.programs) - {"kubectl"}
        assert len({component.programs[name] for name in services}) == 1
        assert set(re.findall(r'^\t"([a-z-]+)": ', source, re.MULTILINE)) == services


def test_names_that_share_a_package_are_one_file(tmp_path: Path) -> None:
    component = Component("a", "1", {"one": "x/v2/all", "two": "x/v2/all", "other": "x/other"}, {})
    built = tmp_path / "built"
    built.mkdir()
    for name in ("all", "other"):
        (built / name).write_text(name)
    binaries.link_programs(component, built, tmp_path)
    assert {name: (tmp_path / name).read_text() for name in component.programs} == {
        "one": "all",
        "two": "all",
        "other": "other",
    }
    assert (tmp_path / "one").samefile(tmp_path / "two")


def test_every_program_of_a_node_is_built() -> None:
    built = {name for component in COMPONENTS for name in component.programs}
    assert {name for names in NODE_PROGRAMS.values() for name in names} <= built


def test_component_key_changes_with_the_source(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("module a\n")
    (tmp_path / "go.sum").write_text("")
    plain = Component("a", "1", {"a": "x/a"}, {})
    keys = [binaries.component_key(each, tmp_path) for each in (plain, Component("a", "1", {"a": "x/a"}, {"v": "1"}))]
    (tmp_path / "go.sum").write_text("x")
    keys.append(binaries.component_key(plain, tmp_path))
    (tmp_path / "main.go").write_text("package main")
    keys.append(binaries.component_key(plain, tmp_path))
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26, 8)),
        ("go version go1.27rc1 linux/amd64", (1, 27, 0)),
        ("nothing", None),
    ],
)
def test_the_version_of_go(text: str, expected: tuple[int, int, int] | None) -> None:
    assert binaries.parse_go_version(text) == expected


@pytest.mark.parametrize(
    ("package", "expected"), [("a/cmd/ctr", "ctr"), ("go.etcd.io/etcd/server/v3", "server"), ("a/v2/cmd/x", "x")]
)
def test_the_name_that_go_gives_a_program(package: str, expected: str) -> None:
    assert binaries.executable_name(package) == expected
