#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_folder
version_added: 0.1.0
short_description: Check a bundle against its manifest and take it apart into a folder
description:
  - Compares every file of an archive of M(dra.accelerators.bundle) with the manifest before anything of it is used. A file that is changed, missing
    or not in the manifest is refused by its name.
  - Refuses a bundle that does not have what O(needs) names, with the words of what is missing.
  - Then puts the files into a folder, from which the roles take them. A folder that has all of them, undamaged, stays as it is.
  - Returns where each role finds what it takes.
notes:
  - Runs on the machine that runs Ansible. No network is asked.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - Compares the archive with its manifest and with the needs, and writes nothing.
  diff_mode:
    support: full
    details:
      - The files of the folder before and after, with their versions.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  archive:
    description: The archive.
    type: path
    required: true
  folder:
    description: The folder. It is made anew, whole, where it is another bundle's or damaged; one that is no bundle's is refused.
    type: path
    required: true
  checksum:
    description:
      - The SHA-256 digest of the manifest, which the module M(dra.accelerators.bundle) has returned as RV(dra.accelerators.bundle#module:manifest_checksum).
      - A bundle is not signed, so a bundle without this digest is rejected, unless O(allow_unpinned=true).
    type: str
    default: ""
  allow_unpinned:
    description: Whether a bundle is accepted without O(checksum). Anyone who can write the archive then decides what is installed.
    type: bool
    default: false
  needs:
    description: What hosts need, as O(dra.accelerators.bundle#module:needs).
    type: list
    elements: dict
    default: []
  whose:
    description: Whose needs these are, for the words of a refusal.
    type: str
    default: the fleet
seealso:
  - module: dra.accelerators.bundle
"""

EXAMPLES = r"""
- name: Take a bundle apart, if it has what is needed
  dra.accelerators.bundle_folder:
    archive: /srv/fleet.bundle
    folder: /srv/fleet.bundle.d
    checksum: 5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9
    needs:
      - kind: file
        of: ascend_driver
        path: Ascend-hdk-910b-npu-driver_25.2.0_linux-x86-64.run
  delegate_to: localhost
"""

RETURN = r"""
steps:
  description: What was done, or would be in check mode, in words.
  returned: success
  type: list
  elements: str
  sample: ["take 34 files of /srv/fleet.bundle into /srv/fleet.bundle.d"]
manifest_checksum:
  description: The SHA-256 digest of the manifest.
  returned: success
  type: str
  sample: 5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9
collection:
  description: The release of this collection that the bundle was made with.
  returned: success
  type: str
  sample: 0.1.0-4f53cda18c2b
packages:
  description: By platforms such as C(debian_13_x86_64), where its packages are.
  returned: success
  type: dict
  contains:
    folder:
      description: The folder.
      returned: success
      type: str
      sample: /srv/fleet.bundle.d/packages/debian_13_x86_64
    files:
      description: By C(name=version), a package's file in that folder.
      returned: success
      type: dict
      sample: {python3-venv=3.13.5-1: python3-venv_3.13.5-1_amd64.deb}
    index:
      description: The files of the index, by their paths below the folder.
      returned: success
      type: list
      elements: str
      sample: [Packages]
wheelhouses:
  description: By Python and machine, such as C(cp313-x86_64), the folder with its wheels.
  returned: success
  type: dict
  sample: {cp313-x86_64: /srv/fleet.bundle.d/wheelhouses/cp313-x86_64}
images:
  description: By their names, the files of images.
  returned: success
  type: dict
  sample: {"localhost/dra-accelerators-driver:1": /srv/fleet.bundle.d/images/image.tar}
files:
  description: The folder with files of vendors; empty where there are none.
  returned: success
  type: str
  sample: /srv/fleet.bundle.d/files
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: bundle-differs
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_archive import (
    WHEELHOUSES,
    is_taken,
    read_manifest,
    take,
    verify,
)
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_manifest import (
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
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_needs import refuse_missing
from ansible_collections.dra.accelerators.plugins.module_utils._module import run


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "archive": {"type": "path", "required": True},
        "folder": {"type": "path", "required": True},
        "checksum": {"type": "str", "default": ""},
        "allow_unpinned": {"type": "bool", "default": False},
        "needs": {"type": "list", "elements": "dict", "default": []},
        "whose": {"type": "str", "default": "the fleet"},
    }


def former(folder: Path) -> Manifest | None:
    """Return the manifest of what a folder has by now, or None."""
    try:
        return read((folder / NAME).read_text(encoding="utf-8"), str(folder))
    except (BundleError, OSError):
        return None


def places(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return where roles find things."""
    packages: dict[str, dict[str, Any]] = {}
    for item in manifest.of(PACKAGE):
        for platform in item.places:
            found = packages.setdefault(platform, {"folder": f"{folder}/packages/{platform}", "files": {}, "index": []})
            found["files"][f"{item.name}={item.version}"] = item.path.rpartition("/")[2]
    for item in manifest.of(INDEX):
        for platform in item.places:
            top = f"packages/{platform}"
            found = packages.setdefault(platform, {"folder": f"{folder}/{top}", "files": {}, "index": []})
            found["index"].append(item.path[len(top) + 1 :])
    return {
        "packages": packages,
        "wheelhouses": {key: f"{folder}/{WHEELHOUSES}/{key}" for key in manifest.wheelhouses},
        "images": {item.name: f"{folder}/{item.path}" for item in manifest.of(IMAGE)},
        "files": f"{folder}/files" if manifest.of(FILE) else "",
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    """Check the archive and take it apart; returns the module's result. Raises BundleError, OSError."""
    params = module.params
    archive, folder = Path(params["archive"]), Path(params["folder"])
    text, manifest = read_manifest(archive)
    check_pin(text, params["checksum"], str(archive), is_required=not params["allow_unpinned"])
    refuse_missing(params["needs"], manifest, str(archive), params["whose"])
    before = former(folder)
    changed = not is_taken(folder, text, manifest)
    if changed and module.check_mode:
        verify(archive, manifest)
    elif changed:
        take(archive, text, manifest, folder)
    shown = [listed(each.items) if each else "" for each in (before, manifest)]
    return {
        "changed": changed,
        "steps": [f"take {len(manifest.items)} files of {archive} into {folder}"] if changed else [],
        "manifest_checksum": digest_of_text(text),
        "collection": manifest.collection,
        **places(folder, manifest),
        "diff": {"before_header": str(folder), "after_header": str(folder), "before": shown[0], "after": shown[1]},
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
