# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A Debian root file system with the distribution's packages of NVIDIA's user space, built once and cached."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from world_cli import cache, host, image
from world_cli.pins import DEBIAN_SUITE

#: Packages of a compute node.
COMPUTE = (
    "libcuda1",
    "libcudadebugger1",
    "libnvidia-cfg1",
    "libnvidia-encode1",
    "libnvidia-ml1",
    "libnvidia-nvvm4",
    "libnvidia-ptxjitcompiler1",
    "nvidia-cuda-mps",
    "nvidia-opencl-icd",
    "nvidia-persistenced",
    "nvidia-smi",
)
#: Packages of a node with graphics: 300 MB more.
GRAPHICS = (
    *COMPUTE,
    "firmware-nvidia-gsp",
    "libnvidia-fbc1",
    "libnvidia-opticalflow1",
    "libnvoptix1",
    "nvidia-egl-icd",
    "nvidia-vdpau-driver",
    "nvidia-vulkan-icd",
)
INSTALL = """
set -eu
mount --make-rprivate /
mount -t proc proc {root}/proc
mount -t tmpfs tmpfs {root}/dev
for node in "null 3" "zero 5" "random 8" "urandom 9"; do mknod -m 666 {root}/dev/${{node% *}} c 1 ${{node#* }}; done
printf 'exit 101\\n' > {root}/usr/sbin/policy-rc.d; chmod 755 {root}/usr/sbin/policy-rc.d
export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
chroot {root} apt-get update -q
chroot {root} apt-get install -q -y --no-install-recommends {packages}
chroot {root} apt-get clean
"""


def driver_root(packages: tuple[str, ...]) -> tuple[Path, str]:
    """Return the root and the version of its driver, and build it if needed."""
    key = hashlib.sha256(repr((image.bootstrap_folder().name, packages, INSTALL)).encode()).hexdigest()[:12]
    folder = cache.world_cache().parent / "oracles" / f"driver-{key}"
    with cache.locked(folder.with_suffix(".lock")):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder / "root", packages)
            (folder / "complete").touch()
    (library,) = (folder / "root/usr/lib/x86_64-linux-gnu/nvidia/current").glob("libcuda.so.*.*")
    return folder / "root", library.name.removeprefix("libcuda.so.")


def make(root: Path, packages: tuple[str, ...]) -> None:
    """Unpack the world's bootstrap and install the packages in it with this host's mirror settings.

    The mirror is that of this host's apt for the release, else the one that debootstrap used and recorded.
    """
    root.mkdir(parents=True)
    archive = image.bootstrap_folder() / image.ROOT_ARCHIVE
    subprocess.run(["tar", "-C", root, "-xf", archive, "--exclude=./dev/*"], check=True)
    sources = root / "etc/apt/sources.list"
    mirror = host.mirror(host.debian_sources()) or host.mirror(sources.read_text() if sources.is_file() else "")
    assert mirror is not None, (
        f"Neither this machine's apt nor the bootstrap that debootstrap made names a mirror of {DEBIAN_SUITE}: add a source of "
        f"that release to /etc/apt/sources.list or /etc/apt/sources.list.d/debian.sources."
    )
    sources.write_text(f"deb {mirror} {DEBIAN_SUITE} main contrib non-free non-free-firmware\n")
    shutil.rmtree(root / "etc/apt/sources.list.d", ignore_errors=True)
    (root / "etc/apt/apt.conf.d/99-machine").write_text(host.apt_settings())
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    bundle = host.certificate_bundle()
    if bundle is not None:
        shutil.copyfile(bundle, root / host.NODE_CERTIFICATE_BUNDLE.lstrip("/"))
    script = INSTALL.format(root=root, packages=" ".join(packages))
    run = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}"
