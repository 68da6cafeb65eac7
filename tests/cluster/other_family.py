# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build an image of a different distribution family than the nodes. Its loader searches /lib64 and /usr/lib64, without a
directory for each architecture, like in images of Red Hat and SUSE.

Debian also builds such a C library, for 32-bit systems that run 64-bit programs (package libc6-amd64), so the tests need
no other registry. The image contains only this library and busybox.
"""

from __future__ import annotations

from tests.cluster.cluster import Cluster, execute

IMAGE = "localhost/other-family:latest"
FOLDER = "/tmp/other-family"
MAKE = f"""
set -eu
mkdir -p {FOLDER}/lists/partial {FOLDER}/cache/archives/partial {FOLDER}/root/usr/bin {FOLDER}/root/etc {FOLDER}/root/tmp
cd {FOLDER}
printf '%s\\n' 'APT::Architecture "i386";' 'APT::Sandbox::User "root";' 'Dir::State::lists "{FOLDER}/lists";' \\
    'Dir::Cache "{FOLDER}/cache";' 'Dir::State::status "/dev/null";' \\
    'Dir::Etc::sourcelist "{FOLDER}/sources.list";' 'Dir::Etc::sourceparts "/dev/null";' >apt.conf
# Only the main suite of the release: it has the package, and newer suites of a mirror can lack an architecture.
. /etc/os-release
grep -hE "^deb .* $VERSION_CODENAME main" /etc/apt/sources.list >sources.list
export APT_CONFIG={FOLDER}/apt.conf
apt-get -qq update
apt-get -qq download libc6-amd64:i386
dpkg-deb --extract libc6-amd64_*.deb deb
mv deb/lib64 root/usr/
cp "$(command -v busybox)" root/usr/bin/busybox
for program in $(busybox --list); do test -e root/usr/bin/$program || ln -s busybox root/usr/bin/$program; done
ln -s usr/lib64 root/lib64
ln -s usr/bin root/bin
"""


def load_image(cluster: Cluster, node: str) -> None:
    """Build the image with a node's package manager in a temporary directory, and load it into all nodes."""
    try:
        cluster.shell(node, MAKE, timeout=600)
        pack = f"docker exec {node} tar -C {FOLDER}/root -cf - . | docker import - {IMAGE}"
        execute(["bash", "-o", "pipefail", "-c", pack])
        cluster.world("load", IMAGE)
    finally:
        cluster.run(node, "rm", "-rf", FOLDER)
        execute(["docker", "image", "rm", "--force", IMAGE], check=False)
