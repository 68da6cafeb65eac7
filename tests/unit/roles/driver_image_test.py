# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role driver_image checks for an image before it builds or pushes it. No answer does not mean that the image is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from playing import Played, play

ROOT = Path(__file__).resolve().parents[3]
ROLE = "dra.accelerators.driver_image"
#: Recorded outputs of the programs: docker 28.2 and earlier, podman 4.3.
NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
NO_RIGHT = "Got permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
NO_REGISTRY = (
    'failed to configure transport: error pinging v2 registry: Get "https://127.0.0.1:1/v2/": dial tcp 127.0.0.1:1: '
    "connect: connection refused"
)
NO_REGISTRY_FOR_PODMAN = (
    'Error: reading image "docker://127.0.0.1:1/no/x:1": pinging container registry 127.0.0.1:1: '
    'Get "http://127.0.0.1:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused'
)
NO_CONMON = "Error: could not find a working conmon binary (configured options: [/usr/bin/conmon]: invalid argument)"
DENIED = "unauthorized: access to the requested resource is not authorized"
NOT_BUILT = (
    "Error: No such image: localhost/no:1",
    "Error response from daemon: No such image: localhost/no:1",
    "Error: inspecting object: localhost/no:1: image not known",
)
NOT_PUSHED = (
    "no such manifest: 127.0.0.1:5999/no/x:1",
    'Error: reading image "docker://127.0.0.1:1/no/x:1": reading manifest 1 in 127.0.0.1:1/no/x: manifest unknown: manifest unknown',
    (
        'Error: reading image "docker://registry.example/no:1": reading manifest 1 in registry.example/no: name unknown: repository name '
        "not known to registry"
    ),
)
NO_ANSWER = (NO_DAEMON, NO_RIGHT, NO_REGISTRY, NO_REGISTRY_FOR_PODMAN, NO_CONMON, DENIED)
#: A docker that records its commands. "image" and "manifest" print the configured answer.
DOCKER = """#!/bin/sh
echo "$*" >> {directory}/asked
case $1 in
image | manifest)
    [ -e {directory}/$1 ] || exit 0
    cat {directory}/$1 >&2
    exit 1
    ;;
push) cat {directory}/pushing ;;
esac
"""
CTR = """#!/bin/sh
case "$*" in *plugins*) printf 'Exports:\\n    root    {directory}\\n    root    {directory}/none\\n'; exit 0 ;; esac
[ "$1" != images ] || shift
echo "$*" >> {directory}/asked
[ "$1" != ls ] || cat {directory}/listed
"""
SYNC = """#!/bin/sh
echo "sync $*" >> {directory}/asked
[ ! -e {directory}/power-cut ]
"""
IMPORTING = CTR + '[ "$1" != import ] || cat "$2" >> {directory}/imported\n'
#: A pip that collects nothing. Cluster tests cover the build.
PIP = '#!/bin/sh\nwhile [ "$1" != --target ]; do shift; done; mkdir "$2"\n'


def run(
    directory: Path, image: str, manifest: str, *, delivery: str = "push", pushing: str = "", **more: object
) -> Played:
    """Run the role with a docker that gives these answers for the local image and the registry. "" means that the image exists."""
    programs = directory / "programs"
    programs.mkdir()
    for name, text in (("image", image), ("manifest", manifest)):
        if text:
            (directory / name).write_text(text)
    (directory / "pushing").write_text(pushing)
    docker = programs / "docker"
    docker.write_text(DOCKER.format(directory=directory))
    docker.chmod(0o755)
    pip = programs / "pip"
    pip.write_text(PIP)
    pip.chmod(0o755)
    variables = {
        "driver_image_delivery": delivery,
        "driver_image_repository": "registry.example/driver",
        "driver_image_interpreter": str(pip),
        "driver_image_base": f"registry.example/python:3.12@sha256:{'a' * 64}",
        **more,
    }
    return play(directory, [{"ansible.builtin.include_role": {"name": ROLE}}], {"node": variables}, path=programs)


def docker_commands(directory: Path) -> list[str]:
    """Return docker's recorded commands without their arguments."""
    lines = (directory / "asked").read_text().splitlines()
    return [" ".join(line.split()[: 2 if line.startswith(("image", "manifest")) else 1]) for line in lines]


def test_image_in_the_registry_is_neither_built_nor_pushed(tmp_path: Path) -> None:
    played = run(tmp_path, NO_DAEMON, "")
    assert played.status == 0 and "changed=0" in played.output, played.output
    assert docker_commands(tmp_path) == ["manifest inspect"]


def test_patterns_match_missing_images_and_no_failed_queries() -> None:
    known = yaml.safe_load((ROOT / "roles/driver_image/vars/main.yml").read_text("utf-8"))
    for pattern, texts in (
        (known["__driver_image_not_built"], NOT_BUILT),
        (known["__driver_image_not_in_registry"], NOT_PUSHED),
    ):
        assert [text for text in texts if not re.search(pattern, text)] == []
        assert [text for text in NO_ANSWER if re.search(pattern, text)] == []


def test_image_missing_is_built_and_pushed(tmp_path: Path) -> None:
    played = run(tmp_path, NOT_BUILT[0], NOT_PUSHED[0])
    assert played.status == 0, played.output
    assert docker_commands(tmp_path) == ["manifest inspect", "image inspect", "build", "push"]


@pytest.mark.parametrize("base", ["", "registry.example/python:3.12", "registry.example/python@sha256:12"])
def test_base_image_without_a_digest_is_rejected(tmp_path: Path, base: str) -> None:
    played = run(tmp_path, NOT_BUILT[0], NOT_PUSHED[0], driver_image_base=base)
    assert "expected an image with its digest" in str(played.failed["node"]["msg"])
    assert "build" not in docker_commands(tmp_path)


@pytest.mark.parametrize(
    ("image", "manifest", "output", "commands"),
    [
        ("", NO_REGISTRY, "connection refused", ["manifest inspect"]),
        (NO_DAEMON, NOT_PUSHED[0], "Cannot connect to the Docker daemon", ["manifest inspect", "image inspect"]),
    ],
)
def test_image_query_without_an_answer_fails(
    tmp_path: Path, image: str, manifest: str, output: str, commands: list[str]
) -> None:
    played = run(tmp_path, image, manifest)
    assert output in played.failed["node"]["stderr"], played.output
    assert docker_commands(tmp_path) == commands


@pytest.mark.prove
@pytest.mark.parametrize(
    ("pushing", "changed"), [("1: Layer already exists\n", "changed=0"), ("1: Pushed\n", "changed=1")]
)
def test_image_pushed_without_a_registry_query_reports_the_change(tmp_path: Path, pushing: str, changed: str) -> None:
    played = run(tmp_path, "", DENIED, pushing=pushing, driver_image_ask_registry=False)
    assert played.status == 0 and changed in played.output, played.output
    assert docker_commands(tmp_path) == ["image inspect", "push"]


@pytest.mark.prove
@pytest.mark.parametrize("delivery", ["push", "import"])
def test_image_state_built_is_not_delivered(tmp_path: Path, delivery: str) -> None:
    """With ``built`` the image is only built, independent of the delivery in the fleet file or an extra variable."""
    played = run(tmp_path, NOT_BUILT[0], NO_REGISTRY, delivery=delivery, driver_image_state="built")
    assert played.status == 0, played.output
    assert docker_commands(tmp_path) == ["image inspect", "build"]


def test_image_removal_removes_only_images_of_the_driver(tmp_path: Path) -> None:
    ours, theirs = "registry.example/driver:0.1.0-1a2b3c4d-0a1b2c3d", "registry.example/driver:mine"
    rows = [
        ("REF", "TYPE", "DIGEST", "SIZE", "PLATFORMS", "LABELS"),
        (ours, "t", "sha256:aa", "9.0", "MiB", "linux/amd64", "-"),
        ("registry.example/driver@sha256:aa", "t", "sha256:aa", "9.0", "MiB", "linux/amd64", "-"),
        ("sha256:cc", "t", "sha256:aa", "9.0", "MiB", "linux/amd64", "-"),
        ("other.example/copy:1", "t", "sha256:aa", "9.0", "MiB", "linux/amd64", "-"),
        (theirs, "t", "sha256:bb", "9.0", "MiB", "linux/amd64", "-"),
        ("sha256:dd", "t", "sha256:bb", "9.0", "MiB", "linux/amd64", "-"),
    ]
    (tmp_path / "listed").write_text("".join(" ".join(row) + "\n" for row in rows))
    ctr = tmp_path / "ctr"
    ctr.write_text(CTR.format(directory=tmp_path))
    ctr.chmod(0o755)
    variables = {
        "driver_image_state": "absent",
        "driver_image_repository": "registry.example/driver",
        "driver_image_import_command": [str(ctr)],
    }
    played = play(tmp_path, [{"ansible.builtin.include_role": {"name": ROLE}}], {"node": variables})
    assert played.status == 0, played.output
    listed, removed = (tmp_path / "asked").read_text().splitlines()
    assert listed == "ls" and removed.split() == [
        "rm",
        "--sync",
        ours,
        "registry.example/driver@sha256:aa",
        "sha256:cc",
    ]


#: docker with an image store and registries in a directory, and a failing registry for references with "broken".
STORE = """#!/bin/sh
echo "$*" >> {directory}/asked
for reference; do :; done
file=$(echo "$reference" | tr / %)
case $1 in
image) [ -e {directory}/store/"$file" ] || { echo "Error: No such image: $reference" >&2; exit 1; } ;;
manifest) [ -e {directory}/registry/"$file" ] || { echo "no such manifest: $reference" >&2; exit 1; } ;;
build) sleep 0.2; file=$(echo "$3" | tr / %); [ ! -e {directory}/store/"$file" ] && touch {directory}/store/"$file" ;;
push) case $reference in *broken*) echo denied >&2; exit 1 ;; esac; mv {directory}/store/"$file" {directory}/registry/ ;;
save) [ -e {directory}/store/"$file" ] && echo "$reference" > "$3" ;;
esac
"""


def run_batch(
    directory: Path,
    hosts: dict[str, dict[str, object]],
    *arguments: str,
    serial: int | None = None,
    replaced: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Played, list[str]]:
    """Run the role on hosts with one image store and one registry. Return also the commands of docker and ctr."""
    texts = {"docker": STORE, "ctr": IMPORTING, "pip": PIP, "sync": SYNC, **replaced}
    programs = directory / "programs"
    for each in (programs, directory / "store", directory / "registry"):
        each.mkdir(exist_ok=True)
    for name, text in texts.items():
        (programs / name).write_text(text.replace("{directory}", str(directory)))
        (programs / name).chmod(0o755)
    for name in ("listed", "imported"):
        (directory / name).touch()
    (directory / "asked").write_text("")
    common = {
        "driver_image_interpreter": str(programs / "pip"),
        "driver_image_base": f"r/python:3.12@sha256:{'a' * 64}",
        "driver_image_import_command": [str(programs / "ctr"), "images"],
    }
    tasks = [
        {"ansible.builtin.include_role": {"name": ROLE}, "when": "skipped | default(false) is false"},
        {"ansible.builtin.debug": {"msg": "{{ driver_image_reference | to_json | b64encode }}"}},
    ]
    own = {name: {**common, **each} for name, each in hosts.items()}
    played = play(directory, tasks, own, *arguments, path=programs, serial=serial)
    return played, (directory / "asked").read_text().splitlines()


def repositories(lines: list[str], word: str) -> list[str]:
    """Return the repositories of the images in the commands with this word."""
    found = [line.split() for line in lines if line.split()[0] == word]
    return sorted((words[2] if word == "build" else words[-1]).rpartition(":")[0] for words in found)


@pytest.mark.prove
def test_each_image_of_a_batch_is_built_and_pushed_once(tmp_path: Path) -> None:
    """Each image is built and pushed once, with the values of a host that needs it. The registry already has the third image."""
    hosts: dict[str, dict[str, object]] = {
        f"n{number}": {"driver_image_repository": repository, "driver_image_push_arguments": [f"--for={repository}"]}
        for number, repository in enumerate(["one/driver", "two/driver", "one/driver", "two/driver"])
    }
    played, lines = run_batch(tmp_path, hosts, "--check")
    assert played.status == 0 and not repositories(lines, "build") + repositories(lines, "push"), played.output
    assert played.output.count("would be built") == played.output.count("would be pushed") == 2, played.output
    played, lines = run_batch(tmp_path, hosts)
    assert played.status == 0, played.output
    assert repositories(lines, "build") == repositories(lines, "push") == ["one/driver", "two/driver"]
    assert {line.rpartition(":")[0] for line in lines if line.startswith("push")} == {
        "push --for=one/driver one/driver",
        "push --for=two/driver two/driver",
    }
    assert {name: reported.rpartition(":")[0] for name, reported in played.messages.items()} == {
        name: each["driver_image_repository"] for name, each in hosts.items()
    }
    played, lines = run_batch(tmp_path, hosts)
    assert [line.split()[0] for line in lines] == ["manifest", "manifest"] and "changed=1" not in played.output


@pytest.mark.prove
def test_hosts_of_an_image_that_cannot_be_pushed_fail_and_others_do_not(tmp_path: Path) -> None:
    hosts = {
        name: {"driver_image_repository": repository}
        for name, repository in (("n0", "broken/driver"), ("n1", "broken/driver"), ("n2", "two/driver"))
    }
    played, lines = run_batch(tmp_path, dict(hosts))
    assert repositories(lines, "push") == ["broken/driver", "two/driver"] and set(played.messages) == {"n2"}, (
        played.output
    )
    assert played.failed["n0"]["stderr"] == "denied"
    assert "n1 needs the image broken/driver:" in played.failed["n1"]["msg"]
    assert "which n0 could not build or push" in played.failed["n1"]["msg"]


@pytest.mark.prove
def test_image_with_two_ways_of_delivery_is_built_once(tmp_path: Path) -> None:
    """One node imports the image, another one pulls it: it is built once."""
    hosts: dict[str, dict[str, object]] = {
        "n0": {"driver_image_delivery": "import"},
        "n1": {"driver_image_delivery": "none"},
        "n2": {"driver_image_delivery": "import", "driver_image_repository": "other"},
        "n3": {"driver_image_delivery": "import"},
    }
    played, lines = run_batch(tmp_path, hosts)
    own = "localhost/dra-accelerators-driver"
    assert played.status == 0, played.output
    assert repositories(lines, "build") == repositories(lines, "save") == [own, "other"]
    imported = [line.rpartition(":")[0] for line in (tmp_path / "imported").read_text().splitlines()]
    assert sorted(imported) == [own, own, "other"]


@pytest.mark.prove
def test_each_batch_saves_the_images_that_it_imports(tmp_path: Path) -> None:
    """The hosts of the first batch remain hosts of the play, but their files are removed: each batch saves its images."""
    hosts: dict[str, dict[str, object]] = {
        f"n{number}": {"driver_image_delivery": "import", "driver_image_repository": repository}
        for number, repository in enumerate(["own", "other", "other", "own"])
    }
    played, lines = run_batch(tmp_path, hosts, serial=2)
    assert played.status == 0, played.output
    assert repositories(lines, "build") == ["other", "own"]
    assert repositories(lines, "save") == ["other", "other", "own", "own"]
    imported = [line.rpartition(":")[0] for line in (tmp_path / "imported").read_text().splitlines()]
    assert sorted(imported) == ["other", "other", "own", "own"]


#: containerd with images in a directory: a file per reference with the labels. With the file "damaged" next to it
#: ``check`` fails, as for a missing blob.
CONTAINERD = """#!/bin/sh
case "$*" in *plugins*) printf 'Exports:\\n    root    {directory}\\n    root    {directory}/none\\n'; exit 0 ;; esac
[ "$1" != images ] || shift
echo "$*" >> {directory}/asked
for last; do :; done
mkdir -p {directory}/images
case $1 in
ls)
    [ "$2" = --quiet ] || echo REF TYPE DIGEST SIZE LABELS
    for file in {directory}/images/*; do
        [ -e "$file" ] || continue
        reference=$(basename "$file" | tr % /)
        case $2 in --quiet) echo "$reference" ;; *) echo "$reference t sha256:aa 1 -" ;; esac
    done
    ;;
check)
    [ ! -e {directory}/damaged ] || { echo "ctr: unable to check unpack: unexpected EOF" >&2; exit 1; }
    for file in {directory}/images/*; do
        grep -q '^dra.accelerators/complete=true$' "$file" && basename "$file" | tr % /
    done
    exit 0
    ;;
rm) shift 2; for each; do rm {directory}/images/"$(echo "$each" | tr / %)"; done; rm -f {directory}/damaged ;;
import)
    [ ! -e {directory}/damaged ] || { echo "ctr: unable to resolve platform: unexpected EOF" >&2; exit 1; }
    touch {directory}/images/"$(tr / % < "$2")"
    ;;
label) [ ! -e {directory}/no-label ] || exit 1; echo "$3" > {directory}/images/"$(echo "$2" | tr / %)" ;;
esac
"""


def run_import(directory: Path, *arguments: str) -> tuple[Played, list[str]]:
    """Import the image into the containerd of one node. Return also the commands of ctr and sync."""
    hosts: dict[str, dict[str, object]] = {"node": {"driver_image_delivery": "import"}}
    played, lines = run_batch(directory, hosts, *arguments, replaced={"ctr": CONTAINERD})
    words = ("ls", "check", "rm", "import", "sync", "label")
    return played, [line.split()[0] for line in lines if line.split()[0] in words]


@pytest.mark.prove
def test_imported_image_counts_once_it_is_synced(tmp_path: Path) -> None:
    """The node loses power between the import and the sync: the next run removes the image with its layers and imports it again."""
    (tmp_path / "power-cut").touch()
    played, lines = run_import(tmp_path)
    assert "node" in played.failed and lines == ["ls", "ls", "import", "sync"], played.output
    assert f"sync --file-system {tmp_path}" in (tmp_path / "asked").read_text().splitlines()
    assert len(list((tmp_path / "images").iterdir())) == 1
    (tmp_path / "power-cut").unlink()
    played, lines = run_import(tmp_path, "--check")
    assert played.status == 0 and "would be imported" in played.output and lines == ["ls", "check"], played.output
    played, lines = run_import(tmp_path)
    assert played.status == 0 and lines == ["ls", "check", "ls", "rm", "import", "sync", "label"], played.output
    played, lines = run_import(tmp_path)
    assert "changed=0" in played.output and lines == ["ls", "check"], played.output


@pytest.mark.prove
def test_imported_image_counts_once_it_is_labeled(tmp_path: Path) -> None:
    """The run ends between the sync and the label: the next run imports the image again."""
    (tmp_path / "no-label").touch()
    played, lines = run_import(tmp_path)
    assert "node" in played.failed and lines == ["ls", "ls", "import", "sync", "label"], played.output
    (tmp_path / "no-label").unlink()
    played, lines = run_import(tmp_path)
    assert played.status == 0 and lines == ["ls", "check", "ls", "rm", "import", "sync", "label"], played.output


@pytest.mark.prove
def test_damaged_image_is_removed_and_imported_again(tmp_path: Path) -> None:
    played, lines = run_import(tmp_path)
    assert played.status == 0 and lines == ["ls", "ls", "import", "sync", "label"], played.output
    (tmp_path / "damaged").touch()
    played, lines = run_import(tmp_path)
    assert played.status == 0 and lines == ["ls", "check", "ls", "rm", "import", "sync", "label"], played.output


FLAKY = """
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local
DOCUMENTATION = "{name: flaky, short_description: x, description: x, author: x, version_added: '1', options: {}}"
class Connection(Local):
    transport = "flaky"
    def put_file(self, in_path, out_path):
        if str(in_path).endswith(".tar"):
            raise AnsibleConnectionFailure("gone")
        return super().put_file(in_path, out_path)
"""


@pytest.mark.prove
def test_imported_image_is_saved_once_for_all_hosts_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host becomes unreachable during the copy, and the last two hosts have a different image: each image is saved once."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "connection_plugins").mkdir()
    (tmp_path / "connection_plugins/flaky.py").write_text(FLAKY)
    programs = tmp_path / "programs"
    programs.mkdir()
    save = "[ $1 != save ] || echo image > $3\n"
    for name, text in (("docker", DOCKER + save), ("ctr", CTR), ("sync", SYNC)):
        (programs / name).write_text(text.format(directory=tmp_path))
        (programs / name).chmod(0o755)
    (tmp_path / "listed").touch()
    common = {"driver_image_delivery": "import", "driver_image_base": f"r/python:3.12@sha256:{'a' * 64}"}
    hosts = {f"n{number}": dict(common) for number in range(5)}
    hosts["n0"]["ansible_connection"] = "flaky"
    for name in ("n3", "n4"):
        hosts[name]["driver_image_repository"] = "localhost/other"
    played = play(tmp_path, [{"ansible.builtin.include_role": {"name": ROLE}}], hosts, path=programs)
    lines = (tmp_path / "asked").read_text().splitlines()
    saved = [line.split()[-1].partition(":")[0] for line in lines if line.startswith("save")]
    assert sorted(saved) == ["localhost/dra-accelerators-driver", "localhost/other"], played.output
    assert len([line for line in lines if " import " in line]) == 4, played.output
    assert "n0                         : ok=" in played.output and "unreachable=1" in played.output
    assert not list((tmp_path / "temporary").glob("**/*.tar"))
