#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_extract
version_added: 0.1.0
short_description: Verify an offline bundle against its manifest and extract it to a directory
description:
  - Compares every file of an archive of M(dra.accelerators.bundle_create) with the manifest, before it extracts any file. If a file is changed,
    missing, or not in the manifest, the module fails, and the error names the file.
  - Fails if the bundle does not contain all O(needs), and lists the missing items.
  - Extracts the files to a directory for the roles. If the directory already contains all files undamaged, the module does not change it.
  - Returns the paths of the files for the roles.
notes:
  - The module runs on the Ansible controller. It does not access the network.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
    details:
      - The module compares the archive with its manifest and with O(needs), and writes nothing.
  diff_mode:
    support: full
    details:
      - The diff lists the files of the directory before and after the change, with their versions.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  archive:
    description: The path of the archive.
    type: path
    required: true
  dest:
    description:
      - The directory for the extracted files.
      - If the directory contains another bundle or is damaged, the module replaces it completely. If it contains other files and
        no bundle, the module fails.
    type: path
    required: true
  checksum:
    description:
      - The SHA-256 digest of the manifest, which M(dra.accelerators.bundle_create) returns as RV(dra.accelerators.bundle_create#module:manifest_checksum).
      - A bundle is not signed. Without this digest, the module rejects the bundle, unless O(allow_unpinned=true).
    type: str
    default: ""
  allow_unpinned:
    description: Whether to accept a bundle without O(checksum). Anyone with write access to the archive can then choose the software that is installed.
    type: bool
    default: false
  needs:
    description: The needs of the hosts, as in O(dra.accelerators.bundle_create#module:needs).
    type: list
    elements: dict
    default: []
  requested_by:
    description: The names of the hosts with these needs, for error messages.
    type: str
    default: the fleet
seealso:
  - module: dra.accelerators.bundle_create
"""

EXAMPLES = r"""
- name: Extract a bundle if it contains all needed files
  dra.accelerators.bundle_extract:
    archive: /srv/fleet.bundle
    dest: /srv/fleet.bundle.d
    checksum: 5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9
    needs:
      - kind: file
        of: ascend_driver
        path: Ascend-hdk-910b-npu-driver_25.2.0_linux-x86-64.run
  delegate_to: localhost
"""

RETURN = r"""
steps:
  description: Descriptions of the steps that the module has run, or would run in check mode.
  returned: success
  type: list
  elements: str
  sample: ["extract 34 files of /srv/fleet.bundle to /srv/fleet.bundle.d"]
manifest_checksum:
  description: The SHA-256 digest of the manifest.
  returned: success
  type: str
  sample: 5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9
collection:
  description: The release of this collection that created the bundle.
  returned: success
  type: str
  sample: 0.1.0-4f53cda18c2b
packages:
  description: The package directories, by platform, for example C(debian_13_x86_64).
  returned: success
  type: dict
  contains:
    path:
      description: The path of the directory.
      returned: success
      type: str
      sample: /srv/fleet.bundle.d/packages/debian_13_x86_64
    files:
      description: The file of each package in this directory, by C(name=version).
      returned: success
      type: dict
      sample: {python3-venv=3.13.5-1: python3-venv_3.13.5-1_amd64.deb}
    index:
      description: The files of the package index, as paths relative to the directory.
      returned: success
      type: list
      elements: str
      sample: [Packages]
wheelhouses:
  description: The directories of the wheels, by Python version and architecture, for example C(cp313-x86_64).
  returned: success
  type: dict
  sample: {cp313-x86_64: /srv/fleet.bundle.d/wheelhouses/cp313-x86_64}
images:
  description: The files of the images, by image name.
  returned: success
  type: dict
  sample: {"localhost/dra-accelerators-driver:1": /srv/fleet.bundle.d/images/localhost%dra-accelerators-driver:1.tar}
files:
  description: The directory with the vendors' files. It is empty if the bundle contains no such files.
  returned: success
  type: str
  sample: /srv/fleet.bundle.d/files
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: bundle-differs
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.archive import (
    WHEELHOUSES,
    extract,
    is_extracted,
    read_manifest,
    verify,
)
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.bundle_manifest import (
    FILE,
    IMAGE,
    INDEX,
    NAME,
    PACKAGE,
    BundleError,
    Manifest,
    check_pin,
    digest_of_text,
    listed,
    read,
)
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.requirements import refuse_missing
from ansible_collections.dra.accelerators.plugins.module_utils._module import run


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "archive": {"type": "path", "required": True},
        "dest": {"type": "path", "required": True},
        "checksum": {"type": "str", "default": ""},
        "allow_unpinned": {"type": "bool", "default": False},
        "needs": {"type": "list", "elements": "dict", "default": []},
        "requested_by": {"type": "str", "default": "the fleet"},
    }


def previous_manifest(dest: Path) -> Manifest | None:
    """Return the manifest of the bundle that a directory contains, or None."""
    try:
        return read((dest / NAME).read_text(encoding="utf-8"), str(dest))
    except (BundleError, OSError):
        return None


def paths_of_content(dest: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the paths of the extracted files for the roles."""
    platforms = dict.fromkeys(place for kind in (PACKAGE, INDEX) for item in manifest.of(kind) for place in item.places)
    packages: dict[str, dict[str, Any]] = {
        platform: {"path": f"{dest}/packages/{platform}", "files": {}, "index": []} for platform in platforms
    }
    for item in manifest.of(PACKAGE):
        for platform in item.places:
            packages[platform]["files"][f"{item.name}={item.version}"] = item.path.rpartition("/")[2]
    for item in manifest.of(INDEX):
        for platform in item.places:
            packages[platform]["index"].append(item.path.removeprefix(f"packages/{platform}/"))
    return {
        "packages": packages,
        "wheelhouses": {key: f"{dest}/{WHEELHOUSES}/{key}" for key in manifest.wheelhouses},
        "images": {item.name: f"{dest}/{item.path}" for item in manifest.of(IMAGE)},
        "files": f"{dest}/files" if manifest.of(FILE) else "",
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    """Verify and extract the archive, and return the module's result. Raises BundleError, OSError."""
    params = module.params
    archive, dest = Path(params["archive"]), Path(params["dest"])
    text, manifest = read_manifest(archive)
    check_pin(text, params["checksum"], str(archive), is_required=not params["allow_unpinned"])
    refuse_missing(params["needs"], manifest, str(archive), params["requested_by"])
    before = previous_manifest(dest)
    changed = not is_extracted(dest, text, manifest)
    if changed and module.check_mode:
        verify(archive, manifest)
    elif changed:
        extract(archive, text, manifest, dest)
    shown = [listed(each.items) if each else "" for each in (before, manifest)]
    return {
        "changed": changed,
        "steps": [f"extract {len(manifest.items)} files of {archive} to {dest}"] if changed else [],
        "manifest_checksum": digest_of_text(text),
        "collection": manifest.collection,
        **paths_of_content(dest, manifest),
        "diff": {
            "before_header": str(dest),
            "after_header": str(dest),
            "before": shown[0],
            "after": shown[1],
        },
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
