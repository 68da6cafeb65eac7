# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role driver_image asks for an image before it builds or pushes one; who does not answer has not said that there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from playing import Played, play

ROOT = Path(__file__).resolve().parents[3]
ROLE = "dra.accelerators.driver_image"
#: What the programs say, as they were seen to: docker 28.2 and older, podman 4.3.
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
#: docker, as far as the role asks it: what it is asked is written down; "image" and "manifest" say what they are told to.
DOCKER = """#!/bin/sh
echo "$*" >> {folder}/asked
case $1 in
image | manifest)
    [ -e {folder}/$1 ] || exit 0
    cat {folder}/$1 >&2
    exit 1
    ;;
push) cat {folder}/pushing ;;
esac
"""
CTR = """#!/bin/sh
echo "$*" >> {folder}/asked
[ "$1" != ls ] || cat {folder}/listed
"""


def run(
    folder: Path, image: str, manifest: str, *, delivery: str = "push", pushing: str = "", **more: object
) -> Played:
    """Run the role with a docker that says this of the image, and of the registry's; "" is that it has it."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("image", image), ("manifest", manifest)):
        if text:
            (folder / name).write_text(text)
    (folder / "pushing").write_text(pushing)
    docker = programs / "docker"
    docker.write_text(DOCKER.format(folder=folder))
    docker.chmod(0o755)
    # A pip that collects nothing: building has tests of its own on the cluster.
    pip = programs / "pip"
    pip.write_text('#!/bin/sh\nwhile [ "$1" != --target ]; do shift; done; mkdir "$2"\n')
    pip.chmod(0o755)
    variables = {
        "driver_image_delivery": delivery,
        "driver_image_repository": "registry.example/driver",
        "driver_image_interpreter": str(pip),
        "driver_image_base": f"registry.example/python:3.12@sha256:{'a' * 64}",
        **more,
    }
    return play(folder, [{"ansible.builtin.include_role": {"name": ROLE}}], {"node": variables}, path=programs)


def asked(folder: Path) -> list[str]:
    """The commands that docker was given, without their arguments."""
    lines = (folder / "asked").read_text().splitlines()
    return [" ".join(line.split()[: 2 if line.startswith(("image", "manifest")) else 1]) for line in lines]


def test_what_the_registry_has_is_neither_built_nor_pushed(tmp_path: Path) -> None:
    played = run(tmp_path, NO_DAEMON, "")
    assert played.status == 0 and "changed=0" in played.output, played.output
    assert asked(tmp_path) == ["manifest inspect"]


def test_what_is_not_there_is_told_from_who_does_not_answer() -> None:
    known = yaml.safe_load((ROOT / "roles/driver_image/vars/main.yml").read_text("utf-8"))
    for pattern, texts in (
        (known["__driver_image_not_built"], NOT_BUILT),
        (known["__driver_image_not_in_registry"], NOT_PUSHED),
    ):
        assert [text for text in texts if not re.search(pattern, text)] == []
        assert [text for text in NO_ANSWER if re.search(pattern, text)] == []


def test_what_is_not_there_is_built_and_pushed(tmp_path: Path) -> None:
    played = run(tmp_path, NOT_BUILT[0], NOT_PUSHED[0])
    assert played.status == 0, played.output
    assert asked(tmp_path) == ["manifest inspect", "image inspect", "build", "push"]


@pytest.mark.parametrize("base", ["", "registry.example/python:3.12", "registry.example/python@sha256:12"])
def test_base_image_without_a_digest_is_rejected(tmp_path: Path, base: str) -> None:
    played = run(tmp_path, NOT_BUILT[0], NOT_PUSHED[0], driver_image_base=base)
    assert "expected an image with its digest" in str(played.failed["node"]["msg"])
    assert "build" not in asked(tmp_path)


@pytest.mark.parametrize(
    ("image", "manifest", "said", "commands"),
    [
        ("", NO_REGISTRY, "connection refused", ["manifest inspect"]),
        (NO_DAEMON, NOT_PUSHED[0], "Cannot connect to the Docker daemon", ["manifest inspect", "image inspect"]),
    ],
)
def test_who_does_not_answer_has_not_said_that_there_is_none(
    tmp_path: Path, image: str, manifest: str, said: str, commands: list[str]
) -> None:
    played = run(tmp_path, image, manifest)
    assert said in played.failed["node"]["stderr"], played.output
    assert asked(tmp_path) == commands


@pytest.mark.prove
@pytest.mark.parametrize(
    ("pushing", "changed"), [("1: Layer already exists\n", "changed=0"), ("1: Pushed\n", "changed=1")]
)
def test_a_registry_that_is_not_asked_says_so_when_it_is_pushed_to(tmp_path: Path, pushing: str, changed: str) -> None:
    played = run(tmp_path, "", DENIED, pushing=pushing, driver_image_ask_registry=False)
    assert played.status == 0 and changed in played.output, played.output
    assert asked(tmp_path) == ["image inspect", "push"]


@pytest.mark.prove
@pytest.mark.parametrize("delivery", ["push", "import"])
def test_who_only_builds_it_gives_it_to_nobody(tmp_path: Path, delivery: str) -> None:
    """Whatever the fleet file says of the delivery, which may have come as an extra variable."""
    played = run(tmp_path, NOT_BUILT[0], NO_REGISTRY, delivery=delivery, driver_image_state="built")
    assert played.status == 0, played.output
    assert asked(tmp_path) == ["image inspect", "build"]


def test_the_driver_s_images_are_taken_off_a_node_and_no_others(tmp_path: Path) -> None:
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
    ctr.write_text(CTR.format(folder=tmp_path))
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
