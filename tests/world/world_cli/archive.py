# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Tar archives and container images written without an image tool: the same input gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: Names that images have for what the kernel calls its machine.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Entry:
    """One file, link or folder of an archive. ``path`` is relative to the root; ``link`` makes it a symbolic link."""

    path: str
    data: bytes = b""
    mode: int = 0o644
    link: str | None = None
    folder: bool = False


@dataclass(frozen=True)
class Image:
    """A container image of a single layer, by its full name with a tag."""

    name: str
    entries: tuple[Entry, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def write_tar(entries: Iterable[Entry]) -> bytes:
    """A tar archive owned by root with all times at zero, in the order given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            header = tarfile.TarInfo(entry.path)
            header.mode = entry.mode
            if entry.folder:
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
    """A ``docker load`` archive (which ``ctr images import`` reads too) with all the images."""
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
