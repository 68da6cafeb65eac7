# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the node image and the pod images from a distribution bootstrap, each cached under a key of its inputs."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from typing import IO

from . import binaries, cache, engine, host, pods
from .commands import execute
from .errors import WorldError
from .parallel import in_parallel
from .pins import (
    BUILD_LABEL,
    DEBIAN_SUITE,
    LINTERS,
    LONG_ORACLES,
    NODE_IMAGE,
    NODE_PACKAGES,
    NODE_PROGRAMS,
    ORACLES,
    PEERS,
    PINNED,
    RELEASES,
    WORLD_FOLDER,
)
from .progress import step

NODE_FILES = WORLD_FOLDER / "node"
ROOT_ARCHIVE = "root.tar"
UNIT_FOLDER = "etc/systemd/system"
_NODE_CHANGES = ("ENV container=docker", 'CMD ["/usr/local/lib/world/init"]', f"LABEL {BUILD_LABEL}=")


def bootstrap_folder() -> Path:
    """Return the directory of the bootstrapped root file system's archive."""
    return cache.world_cache() / f"bootstrap-{DEBIAN_SUITE}-{cache.digest(DEBIAN_SUITE, *NODE_PACKAGES)}"


def pods_folder() -> Path:
    """Return the directory of the pod images' archive."""
    key = cache.digest(
        bootstrap_folder().name,
        pods.PAUSE_SOURCE,
        WORLD_FOLDER / "world_cli/pods.py",
        WORLD_FOLDER / "world_cli/archive.py",
        *pods.IMAGE_NAMES,
    )
    return cache.world_cache() / f"pods-{key}"


def pod_images() -> Path:
    """Return the archive of all pod images."""
    return pods_folder() / pods.IMAGES_ARCHIVE


def node_image(release: str = PINNED) -> str:
    """Return the full name of the node image for the current pins."""
    files = sorted(NODE_FILES.iterdir())
    key = cache.digest(
        bootstrap_folder().name,
        binaries.all_keys(release),
        repr(NODE_PROGRAMS),
        repr(node_links()),
        repr(_NODE_CHANGES),
        *(path.name for path in files),
        *files,
    )
    return f"{NODE_IMAGE}:{key}"


def bootstrap(target: Path) -> None:
    """Create the root file system of an ordinary Debian server and write it to ``target`` as one archive."""
    program = host.find_program("debootstrap")
    if program is None:
        raise WorldError("debootstrap was not found: install it and try again.")
    root = target / "root"
    include = f"--include={','.join(NODE_PACKAGES)}"
    source = host.mirror(host.debian_sources())
    execute([program, "--variant=minbase", include, DEBIAN_SUITE, str(root), *([source] if source else [])])
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        for path in (root / folder).iterdir():
            if path.is_file():
                path.unlink()
    (root / "etc/machine-id").write_text("")
    (root / "etc/hostname").unlink(missing_ok=True)
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    execute(["tar", "--numeric-owner", "--xattrs", "-C", str(root), "-cf", str(target / ROOT_ARCHIVE), "."])
    shutil.rmtree(root)


def make_pod_images(target: Path) -> None:
    """Unpack the bootstrap temporarily and build the pod images from it."""
    with tempfile.TemporaryDirectory(prefix=".root-", dir=target.parent) as temporary:
        execute(["tar", "-C", temporary, "-xf", str(bootstrap_folder() / ROOT_ARCHIVE), "--exclude=./dev/*"])
        pods.make_images(Path(temporary), target)


def node_links() -> dict[str, str]:
    """Return the symbolic links of the node image: units to mask in a container, and the certificate bundle."""
    masked = (
        "console-getty.service",
        "getty.target",
        "dev-hugepages.mount",
        "apt-daily.timer",
        "apt-daily-upgrade.timer",
    )
    links = {f"{UNIT_FOLDER}/{unit}": "/dev/null" for unit in masked}
    # Debian's OpenSSL reads a directory of hashed links. This link makes it read the world's certificate bundle.
    links["usr/lib/ssl/cert.pem"] = host.NODE_CERTIFICATE_BUNDLE
    return links


def _write_node_layer(stream: IO[bytes], release: str) -> None:
    with tarfile.open(fileobj=stream, mode="w|") as archive:

        def add(path: Path, name: str, mode: int) -> None:
            header = archive.gettarinfo(str(path), name)
            header.uid = header.gid = 0
            header.uname = header.gname = "root"
            header.mode = mode
            with path.open("rb") as source:
                archive.addfile(header, source)

        for folder, programs in NODE_PROGRAMS.items():
            for name in programs:
                add(binaries.program(name, release), f"{folder}/{name}", 0o755)
        for path in sorted(NODE_FILES.iterdir()):
            if path.suffix == ".service":
                add(path, f"{UNIT_FOLDER}/{path.name}", 0o644)
            else:
                add(path, f"usr/local/lib/world/{path.name}", 0o755)
        for name, destination in node_links().items():
            header = tarfile.TarInfo(name)
            header.type, header.linkname = tarfile.SYMTYPE, destination
            archive.addfile(header)
        journal = tarfile.TarInfo("var/log/journal")
        journal.type, journal.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(journal)


def leftover_containers() -> list[str]:
    """Return the names of containers that interrupted builds created. They were filled but never started."""
    filters = (f"label={BUILD_LABEL}=node", "status=created")
    options = [word for each in filters for word in ("--filter", each)]
    return engine.docker("ps", "--all", "--format", "{{.Names}}", *options).stdout.split()


def make_node_image(name: str, release: str) -> None:
    """Import the bootstrap, add the cluster's programs and units, and tag the result."""
    changes = [word for change in _NODE_CHANGES for word in ("--change", change)]
    leftovers = leftover_containers()
    if leftovers:
        engine.docker("rm", *leftovers)
    labels = ("--change", f"LABEL {BUILD_LABEL}=base")
    base = engine.docker("import", *labels, str(bootstrap_folder() / ROOT_ARCHIVE)).stdout.strip()
    container = engine.docker("create", "--label", f"{BUILD_LABEL}=node", base, "/bin/true").stdout.strip()
    try:
        with subprocess.Popen(
            ["docker", "cp", "-", f"{container}:/"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as copy:
            if copy.stdin is None or copy.stderr is None:
                raise WorldError("docker cp was started without pipes.")
            try:
                _write_node_layer(copy.stdin, release)
                copy.stdin.close()
            except BrokenPipeError:
                pass  # docker's error message follows
            output = copy.stderr.read().decode(errors="replace").strip()
        if copy.returncode != 0:
            raise WorldError(f"filling the node image failed: {output}")
        engine.docker("commit", *changes, container, name)
    finally:
        engine.docker("rm", "--force", container)


def ensure_root_and_pods(thorough: bool = False) -> None:
    """Create the bootstrapped root file system and the pod images if they are missing."""
    for kind, folder, make in (
        ("bootstrap", bootstrap_folder(), bootstrap),
        ("pod images", pods_folder(), make_pod_images),
    ):
        if cache.damage(folder, thorough) is not None:
            with step(kind):
                cache.ensure(folder, make, thorough)


def build(thorough: bool = False, release: str = PINNED) -> None:
    """Build all parts that a world needs: programs, bootstrap, pod images, node image."""
    jobs = binaries.builds(RELEASES[release], thorough)
    # The second job is the one that waits for downloads, next to the longest build.
    jobs.insert(1, partial(ensure_root_and_pods, thorough))
    in_parallel(jobs, binaries.BUILD_JOBS)
    name = node_image(release)
    with cache.locked(cache.world_cache() / ".node-image.lock"):
        if engine.inspect("image", name) is None:
            with step("node image", name):
                make_node_image(name, release)


def prune() -> list[str]:
    """Remove finished builds and images that the current pins do not use; return the removed ones.

    An image with containers stays.
    """
    components = [
        *ORACLES,
        *LONG_ORACLES,
        *PEERS,
        *LINTERS,
        *(component for release in RELEASES.values() for component in release),
    ]
    kept = {bootstrap_folder().name, pods_folder().name, *(binaries.component_folder(each).name for each in components)}
    images = {node_image(release) for release in RELEASES}
    folders = [*cache.world_cache().glob("*/" + cache.STAMP), *cache.world_cache().glob("binaries/*/" + cache.STAMP)]
    removed: list[str] = []
    for folder in sorted(path.parent for path in folders):
        # A directory without this pattern belongs to something else, such as a Go toolchain.
        if folder.name not in kept and not folder.name.startswith("go-"):
            with cache.locked(folder.parent / f".{folder.name}.lock"):
                shutil.rmtree(folder)
            removed.append(str(folder))
    listed = engine.docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", NODE_IMAGE).stdout.split()
    for name in listed:
        if name not in images and engine.docker("image", "rm", name, check=False).returncode == 0:
            removed.append(name)
    engine.docker("image", "prune", "--force", "--filter", f"label={BUILD_LABEL}=base")
    return removed
