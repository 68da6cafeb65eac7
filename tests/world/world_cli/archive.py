# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write tar archives and container images without an image tool. The same input gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: Architecture names of images, by the kernel's machine name.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Entry:
    """One file, symbolic link (``link`` is its target), or directory of an archive. ``path`` is relative to the root."""

    path: str
    data: bytes = b""
    mode: int = 0o644
    link: str | None = None
    directory: bool = False


@dataclass(frozen=True)
class Image:
    """A container image with a single layer. ``name`` is its full name with a tag."""

    name: str
    entries: tuple[Entry, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def write_tar(entries: Iterable[Entry]) -> bytes:
    """Return a tar archive of the entries in this order. Its files belong to root, and all times are zero."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            header = tarfile.TarInfo(entry.path)
            header.mode = entry.mode
            if entry.directory:
                header.type, header.mode = tarfile.DIRTYPE, entry.mode | 0o111
                archive.addfile(header)
            elif entry.link is not None:
                header.type, header.linkname, header.mode = tarfile.SYMTYPE, entry.link, 0o777
                archive.addfile(header)
            else:
                header.size = len(entry.data)
                archive.addfile(header, io.BytesIO(entry.data))
    return buffer.getvalue()


def write_images(images: Iterable[Image]) -> bytes:
    """Return an archive of all images for ``docker load`` and ``ctr images import``."""
    files: dict[str, bytes] = {}
    manifest = []
    for image in images:
        layer = write_tar(image.entries)
        layer_digest = hashlib.sha256(layer).hexdigest()
        variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **image.environment}
        configuration = json.dumps(
            {
                "architecture": ARCHITECTURES.get(os.uname().machine, os.uname().machine),
                "os": "linux",
                "created": "1970-01-01T00:00:00Z",
                "config": {"Cmd": list(image.command), "Env": [f"{name}={value}" for name, value in variables.items()]},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
                "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "tests/world"}],
            },
            sort_keys=True,
        ).encode()
        configuration_name = f"{hashlib.sha256(configuration).hexdigest()}.json"
        layer_name = f"{layer_digest}/layer.tar"
        files[configuration_name] = configuration
        files[layer_name] = layer
        manifest.append({"Config": configuration_name, "RepoTags": [image.name], "Layers": [layer_name]})
    entries = [Entry(name, data) for name, data in files.items()]
    return write_tar([*entries, Entry("manifest.json", json.dumps(manifest).encode())])
