# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build a signed package source with replacements for the packages in NVIDIA's repository for Debian. They have the vendor's names
and dependencies, and contain no files of the vendor.

    python3 nvidia.py [--files FILES] DIRECTORY VERSION ...

Needs only dpkg-deb, so that it runs on a node. Writes into DIRECTORY the packages, Packages, Release, Release.gpg, the public key
3bf863cc.pub, and its fingerprint in FINGERPRINT. An existing key is used again.

The dkms build of a version that ends in .66 fails and leaves a log. A version that ends in .99 is built, but cannot be loaded. A kernel
module is a text file. The replacements of modprobe and modinfo in this directory (kmod) read it. If FILES has a directory with the name
of a version, its packages contain the libraries and programs from there, which the simulator's Makefile builds.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import secrets
import shutil
import subprocess
import time
from pathlib import Path

ARCHITECTURE = "amd64"
LINK = "-> "
PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
LIBRARIES = "usr/lib/x86_64-linux-gnu"
UNIT = """[Unit]
Description=NVIDIA Persistence Daemon, a stand-in
[Service]
ExecStart=/bin/sh -c 'while sleep 1; do :; done' nvidia-persistenced --no-persistence-mode
[Install]
WantedBy=multi-user.target
"""
UNIT_SCRIPT = "systemctl daemon-reload; systemctl enable nvidia-persistenced.service; systemctl start nvidia-persistenced.service || true"
BUILD = """
version={version}; kind={kind}; kernel=$(uname -r)
log=/var/lib/dkms/nvidia/$version/build
mkdir -p $log
case $version in *.66)
    echo "error: implicit declaration of function drm_fbdev_stand_in" > $log/make.log
    echo "Error! Bad return status for module build on kernel: $kernel" >&2
    exit 10;;
esac
mkdir -p /lib/modules/$kernel/updates/dkms
loads=yes; case $version in *.99) loads=no;; esac
printf 'version=%s\\nkind=%s\\nloads=%s\\n' $version $kind $loads > /lib/modules/$kernel/updates/dkms/nvidia.ko
"""
UNBUILD = """
rm -rf /var/lib/dkms/nvidia/{version} /lib/modules/$(uname -r)/updates/dkms/nvidia.ko
rmdir -p --ignore-fail-on-non-empty /var/lib/dkms/nvidia /lib/modules/$(uname -r)/updates/dkms 2>/dev/null || true
"""


def package(
    directory: Path,
    name: str,
    version: str,
    *,
    fields: str = "",
    files: dict[str, str | Path] | None = None,
    scripts: dict[str, str] | None = None,
) -> None:
    """Build one package.

    ``files``: by path the text of a file, the path of a file to copy, or ``-> `` and the target of a link.
    """
    root = directory / "root"
    shutil.rmtree(root, ignore_errors=True)
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN").chmod(0o755)
    for where, what in (files or {}).items():
        target = root / where
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(what, Path):
            shutil.copy2(what, target)
        elif what.startswith(LINK):
            target.symlink_to(what.removeprefix(LINK))
        else:
            target.write_text(what)
            target.chmod(0o755 if where.startswith("usr/bin/") else 0o644)
    for script, text in (scripts or {}).items():
        (root / "DEBIAN" / script).write_text(f"#!/bin/sh\nset -e\n{text}\n")
        (root / "DEBIAN" / script).chmod(0o755)
    (root / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: {ARCHITECTURE}\nMaintainer: tests of dra.accelerators <tests@example.com>\n"
        f"{fields}Description: A stand-in for {name}; holds nothing of the vendor's\n"
    )
    path = directory / f"{name}_{version}_{ARCHITECTURE}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", root, path], check=True, capture_output=True)
    shutil.rmtree(root)


def driver(directory: Path, version: str, built: Path | None = None) -> None:
    """Build the packages of one version. ``built`` is the directory with its libraries and programs."""
    full = f"{version}-1"
    for name, library in (("libnvidia-ml1", "libnvidia-ml"), ("libcuda1", "libcuda")):
        files: dict[str, str | Path] = {f"{LIBRARIES}/{library}.so.{version}": "a stand-in\n"}
        scripts = {}
        if built is not None:
            files = {
                f"{LIBRARIES}/{library}.so.{version}": built / f"{library}.so.{version}",
                f"{LIBRARIES}/{library}.so.1": f"{LINK}{library}.so.{version}",
            }
            # The state of the boards is in a file of the library's directory.
            state = f"rm -f /{LIBRARIES}/libnvidia-gpusim.so.{version}" if name == "libnvidia-ml1" else ""
            scripts = {"postinst": "ldconfig", "postrm": f"{state}\nldconfig"}
        package(directory, name, full, files=files, scripts=scripts)
    kernel = f"nvidia-kernel-open-dkms (= {full}) | nvidia-kernel-dkms (= {full})"
    package(
        directory,
        "nvidia-driver-cuda",
        full,
        fields=f"Depends: libcuda1 (= {full}), libnvidia-ml1 (= {full}), {kernel}\n",
        files={f"usr/bin/{program}": built / program for program in PROGRAMS} if built is not None else {},
    )
    for name, kind, other in (
        ("nvidia-kernel-open-dkms", "open", "nvidia-kernel-dkms"),
        ("nvidia-kernel-dkms", "proprietary", "nvidia-kernel-open-dkms"),
    ):
        package(
            directory,
            name,
            full,
            fields=f"Depends: nvidia-kernel-support (= {full})\nConflicts: {other}\n",
            files={f"usr/src/nvidia-{version}/dkms.conf": f"PACKAGE_VERSION={version}\n"},
            scripts={"postinst": BUILD.format(version=version, kind=kind), "prerm": UNBUILD.format(version=version)},
        )
    package(directory, "nvidia-kernel-support", full, files={"etc/modprobe.d/nvidia.conf": "# a stand-in\n"})
    scripts = {
        "postinst": UNIT_SCRIPT,
        "prerm": "systemctl stop nvidia-persistenced.service || true",
        "postrm": "systemctl daemon-reload",
    }
    package(
        directory,
        "nvidia-persistenced",
        full,
        files={"lib/systemd/system/nvidia-persistenced.service": UNIT},
        scripts={**scripts, "prerm": "systemctl disable --now nvidia-persistenced.service || true"},
    )


# A key and a signature (RFC 9580, version 4, RSA), because not every node has gpg


def _prime(bits: int) -> int:
    small = [number for number in range(3, 2000, 2) if all(number % each for each in range(3, int(number**0.5) + 1, 2))]
    while True:
        found = secrets.randbits(bits) | (3 << (bits - 2)) | 1
        if all(found % each for each in small) and all(pow(base, found - 1, found) == 1 for base in (2, 3, 5, 7, 11)):
            return found


def _key(path: Path) -> dict[str, int]:
    if not path.exists():
        first, second = _prime(1024), _prime(1024)
        private = pow(65537, -1, (first - 1) * (second - 1))
        path.write_text(json.dumps({"n": first * second, "e": 65537, "d": private, "made": int(time.time())}))
    known: dict[str, int] = json.loads(path.read_text())
    return known


def _number(value: int) -> bytes:
    return value.bit_length().to_bytes(2, "big") + value.to_bytes((value.bit_length() + 7) // 8, "big")


def _packet(tag: int, body: bytes) -> bytes:
    return bytes([0xC0 | tag, 0xFF]) + len(body).to_bytes(4, "big") + body


def _public(key: dict[str, int]) -> bytes:
    return b"\x04" + key["made"].to_bytes(4, "big") + b"\x01" + _number(key["n"]) + _number(key["e"])


def _fingerprint(key: dict[str, int]) -> bytes:
    body = _public(key)
    return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).digest()


def _signature(key: dict[str, int], kind: int, data: bytes) -> bytes:
    finger = _fingerprint(key)
    hashed = b"\x05\x02" + int(time.time()).to_bytes(4, "big") + bytes([22, 33, 4]) + finger
    head = bytes([4, kind, 1, 8]) + len(hashed).to_bytes(2, "big") + hashed
    digest = hashlib.sha256(data + head + b"\x04\xff" + len(head).to_bytes(4, "big")).digest()
    size = (key["n"].bit_length() + 7) // 8
    asn1 = bytes.fromhex("3031300d060960864801650304020105000420") + digest
    padded = b"\x00\x01" + b"\xff" * (size - len(asn1) - 3) + b"\x00" + asn1
    signed = pow(int.from_bytes(padded, "big"), key["d"], key["n"])
    issuer = bytes([9, 16]) + finger[-8:]
    return _packet(2, head + len(issuer).to_bytes(2, "big") + issuer + digest[:2] + _number(signed))


def _armour(what: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    lines = "\n".join(text[at : at + 64] for at in range(0, len(text), 64))
    return f"-----BEGIN PGP {what}-----\n\n{lines}\n-----END PGP {what}-----\n"


def public_key(key: dict[str, int]) -> str:
    """Return the public key in the format that a vendor publishes."""
    body, name = _public(key), b"Stand-in <tests@example.com>"
    certified = b"\x99" + len(body).to_bytes(2, "big") + body + b"\xb4" + len(name).to_bytes(4, "big") + name
    packets = _packet(6, body) + _packet(13, name) + _signature(key, 0x13, certified)
    return _armour("PUBLIC KEY BLOCK", packets)


def index(directory: Path) -> None:
    """Write and sign the index that apt reads."""
    key = _key(directory.parent / "signing-key.json")
    stanzas = []
    for path in sorted(directory.glob("*.deb")):
        control = subprocess.run(["dpkg-deb", "-f", path], check=True, capture_output=True, text=True).stdout
        data = path.read_bytes()
        stanzas.append(
            f"{control.rstrip()}\nFilename: ./{path.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
        )
    packages = "\n".join(stanzas).encode()
    files = {"Packages": packages, "Packages.gz": gzip.compress(packages, mtime=0)}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    now = time.strftime("%a, %d %b %Y %H:%M:%S UTC", time.gmtime())
    lines = [f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}" for name, data in files.items()]
    release = f"Origin: NVIDIA\nLabel: NVIDIA CUDA, a stand-in\nDate: {now}\nSHA256:\n" + "\n".join(lines) + "\n"
    (directory / "Release").write_text(release)
    (directory / "Release.gpg").write_text(_armour("SIGNATURE", _signature(key, 0, release.encode())))
    (directory / "3bf863cc.pub").write_text(public_key(key))
    (directory / "FINGERPRINT").write_text(_fingerprint(key).hex().upper())


def main() -> None:
    """Build the packages of the versions on the command line, and the index of all packages in the directory."""
    parser = argparse.ArgumentParser(description="Build replacements for NVIDIA's packages, and their index.")
    parser.add_argument(
        "--files", type=Path, help="directory with a subdirectory of libraries and programs for each version"
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("versions", nargs="+")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    for version in given.versions:
        built = given.files / version if given.files is not None else None
        driver(given.directory, version, built if built is not None and built.is_dir() else None)
    index(given.directory)


if __name__ == "__main__":
    main()
