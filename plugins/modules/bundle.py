#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle
version_added: 0.1.0
short_description: Gather all that a fleet needs from outside into one archive
description:
  - Fetches the packages, wheels, files and the image that O(needs) names, and writes them as one archive, with a manifest that says of each file
    what it is, which version, where it comes from, its SHA-256 digest, by whose keys it was signed, and what was verified.
  - Packages for Debian and Ubuntu come by apt, from sources whose signatures apt verifies; a vendor's source counts by a key with a pinned
    fingerprint alone.
  - RPM packages come by dnf, for hosts with dnf and with zypper alike, from repositories that are named in O(mirrors) and the vendors'. Each counts by
    a key with a pinned fingerprint alone; the signature of its index, that of each package, or both, as the repository has them, are verified.
  - What was gathered by an earlier run is kept in O(folder), and is not fetched again.
  - Where the archive has what is needed already, nothing is gathered, and nobody is asked.
notes:
  - Runs on a machine with a way out, which is none of the fleet's. Packages of apt's need an apt there, of any release of Debian or Ubuntu, RPM packages
    a dnf 4 with createrepo_c and rpm, which Debian and Ubuntu have too, and wheels a pip.
  - The playbook C(dra.accelerators.bundle) finds out what a fleet needs, and calls this module.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - Says what would be gathered, and asks nobody. Versions are therefore not told.
  diff_mode:
    support: full
    details:
      - The files of the archive before and after, with their versions. In check mode those from before alone.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  archive:
    description: The archive that is written.
    type: path
    required: true
  folder:
    description: Where files are gathered, and kept for the next time. It may be removed.
    type: path
    required: true
  needs:
    description: What is needed, as the roles of this collection say it.
    type: list
    elements: dict
    required: true
    suboptions:
      kind:
        description: What is needed.
        type: str
        choices: [packages, driver, group, wheels, image, file]
        required: true
      of:
        description: The role that needs it.
        type: str
        required: true
      platform:
        description: For V(packages), V(driver) and V(group), a distribution, its release and the kind of machine.
        type: dict
      names:
        description: For V(packages), names of packages that are installed together.
        type: list
        elements: str
      wanted:
        description: For V(driver), which version, kernel modules, build and components, as O(dra.accelerators.nvidia_driver#module:version) and so on.
        type: dict
      catalog:
        description: For V(driver), the ways to have it, as O(dra.accelerators.nvidia_driver#module:catalog).
        type: list
        elements: dict
      parts:
        description: For V(group), packages that have one version, each by the names that it may have. C({branch}) in them is the version's.
        type: list
        elements: list
      version:
        description: For V(group), the version, or the beginning of one. Empty is the newest.
        type: str
      follows:
        description: For V(group), whether it has the version of the platform's drivers.
        type: bool
      also:
        description: For V(group), packages with versions of their own, which a source need not have.
        type: list
        elements: str
      headers:
        description: For V(driver), packages with a kernel's headers.
        type: list
        elements: str
      kernel:
        description: For V(driver), the release of the kernel.
        type: str
      source:
        description:
          - A package source besides the distribution's. C(uris), C(suites) and C(components), with C(key), or C(key_url) from which the key is
            fetched, and its C(fingerprints).
          - C(more_components) are further components of the distribution's sources, C(mirrors) further addresses of it.
        type: dict
      status:
        description: The path of a copy of a node's C(/var/lib/dpkg/status) on this machine. If it is set, only packages that this node lacks are included.
        type: str
      python:
        description: For V(wheels), the version of Python.
        type: str
      machine:
        description: For V(wheels), the kind of machine.
        type: str
      requirements:
        description: For V(wheels), a list of requirements, as pip reads it.
        type: str
      reference:
        description: For V(image), its name with its tag.
        type: str
      path:
        description: For V(file), where it is on this machine.
        type: str
      sha256:
        description: For V(file), its digest. A file with another one is refused.
        type: str
  image:
    description: The file that an image was saved to, where one is needed.
    type: path
    default: ""
  mirrors:
    description:
      - Package sources in place of a distribution's own, by platforms such as C(debian_13). Each has C(uris), C(suites), C(components) and, where it
        is not the distribution's own, the C(keyring) that vouches for it. With C(fingerprints), one of these keys has to have signed it.
      - For RPM distributions, whose repositories are a subscription's or the site's, an entry such as C(rocky_9) is required where packages are. Each
        has C(uris), the C(key) as a file in ASCII armour and its C(fingerprints). C(packages_signed) and C(index_signed) say what the vendor signs,
        both by default. An empty list is for hosts that have all that the vendors' packages need.
    type: dict
    default: {}
  interpreter:
    description: The Python whose pip fetches wheels, also for other Pythons. Empty is the one that runs this module.
    type: path
    default: ""
  pip_environment:
    description: Environment variables for pip, such as E(PIP_INDEX_URL) and E(HTTPS_PROXY). They appear in no process list and not in the manifest.
    type: dict
    default: {}
  collection:
    description: The release of this collection that the bundle is for, which the manifest notes.
    type: str
    default: ""
  refresh:
    description: Whether newer versions are looked for where the archive has all that is needed.
    type: bool
    default: false
  timeout:
    description: How many seconds one call of apt, dnf or pip may take.
    type: int
    default: 3600
seealso:
  - module: dra.accelerators.bundle_folder
"""

EXAMPLES = r"""
- name: Gather the wheels of the node driver for Debian 13
  dra.accelerators.bundle:
    archive: /srv/fleet.bundle
    folder: /srv/fleet.bundle.parts
    needs:
      - kind: wheels
        of: python_environment
        python: "3.13"
        machine: x86_64
        requirements: "{{ lookup('ansible.builtin.file', 'requirements.txt') }}"
"""

RETURN = r"""
steps:
  description: What was gathered, or would be in check mode, in words.
  returned: success
  type: list
  elements: str
  sample: ["gather wheels for Python 3.13 (x86_64)"]
archive:
  description: The archive.
  returned: success
  type: str
  sample: /srv/fleet.bundle
manifest_checksum:
  description: The SHA-256 digest of the manifest, which the other side can be told to expect. Empty in check mode where there is no archive yet.
  returned: success
  type: str
  sample: 5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9
added:
  description: Files that the archive did not have before.
  returned: success
  type: list
  elements: str
  sample: [wheels/grpcio-1.85.1-cp313-cp313-manylinux2014_x86_64.whl]
removed:
  description: Files that it no longer has.
  returned: success
  type: list
  elements: str
  sample: []
files:
  description: How many files it has.
  returned: success
  type: int
  sample: 34
size:
  description: How large they are, in bytes.
  returned: success
  type: int
  sample: 41943040
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: repository-key
"""

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_archive import read_manifest, verify, write
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_gather import Gatherer
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_manifest import (
    FILE,
    BundleError,
    Manifest,
    digest_of_text,
    listed,
)
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_needs import Plan, plan
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_platform import Means
from ansible_collections.dra.accelerators.plugins.module_utils._bundle_rpm import check_mirrors
from ansible_collections.dra.accelerators.plugins.module_utils._driver_install import digest_of
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._package_options import hide_passwords
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

KEY_SECONDS = 60


def needs_spec() -> dict[str, dict[str, Any]]:
    """Return the options of a need."""
    texts = ("version", "status", "kernel", "python", "machine", "requirements", "reference", "path", "sha256")
    return {
        "kind": {
            "type": "str",
            "choices": ["packages", "driver", "group", "wheels", "image", "file"],
            "required": True,
        },
        "of": {"type": "str", "required": True},
        "platform": {"type": "dict"},
        "names": {"type": "list", "elements": "str"},
        "wanted": {"type": "dict"},
        "catalog": {"type": "list", "elements": "dict"},
        "headers": {"type": "list", "elements": "str"},
        "source": {"type": "dict"},
        "parts": {"type": "list", "elements": "list"},
        "follows": {"type": "bool"},
        "also": {"type": "list", "elements": "str"},
        **{name: {"type": "str"} for name in texts},
    }


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "archive": {"type": "path", "required": True},
        "folder": {"type": "path", "required": True},
        "needs": {"type": "list", "elements": "dict", "required": True, "options": needs_spec()},
        "image": {"type": "path", "default": ""},
        "mirrors": {"type": "dict", "default": {}},
        "interpreter": {"type": "path", "default": ""},
        "pip_environment": {"type": "dict", "default": {}},
        "collection": {"type": "str", "default": ""},
        "refresh": {"type": "bool", "default": False},
        "timeout": {"type": "int", "default": 3600},
    }


def needs_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the needs without the options that were not given."""
    return [{key: value for key, value in need.items() if value is not None} for need in params["needs"]]


def fetch(url: str) -> str:
    """Fetch a key. Raises BundleError."""
    try:
        with open_url(url, timeout=KEY_SECONDS) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise BundleError(
            f"The key {url} cannot be fetched: {error}",
            hint="Name a file with the key, or look at the way there.",
            code="repository-key",
        ) from error


def there(system: System, archive: Path, wanted: Plan) -> tuple[Manifest | None, bool]:
    """Return the manifest of the archive that is there, and whether it has all that is wanted, undamaged."""
    if not archive.exists():
        return None, False
    try:
        _text, manifest = read_manifest(archive)
        if list(manifest.needs) != list(wanted.needs):
            return manifest, False
        digests = {item.name: item.sha256 for item in manifest.of(FILE)}
        for path, _checksum in wanted.files:
            if not system.exists(path) or digest_of(system, path) != digests.get(path.rpartition("/")[2]):
                return manifest, False
        verify(archive, manifest)
    except BundleError:
        # What is damaged, or none of ours by its form, is made anew.
        return None, False
    return manifest, True


def work(module: AnsibleModule, system: System | None = None) -> dict[str, Any]:
    """Gather what is needed; returns the module's result. Raises BundleError, KeyProblem, OSError."""
    hide_passwords(module)
    params = module.params
    system = system or System()
    archive, folder = Path(params["archive"]), Path(params["folder"])
    wanted = plan(needs_of(params))
    before, is_whole = there(system, archive, wanted)
    steps = [] if is_whole and not params["refresh"] else [*wanted.describe(), f"write {archive}"]
    after = before
    if steps:
        check_mirrors(wanted.platforms, params["mirrors"])
    if steps and not module.check_mode:
        folder.mkdir(parents=True, exist_ok=True)
        means = Means(
            interpreter=params["interpreter"] or sys.executable,
            fetch=fetch,
            mirrors=params["mirrors"],
            image=params["image"],
            pip_environment={key: str(value) for key, value in params["pip_environment"].items()},
            timeout=float(params["timeout"]),
        )
        gathered = Gatherer(system, str(folder), means).gather(wanted)
        after = Manifest(gathered.items, wanted.needs, gathered.wheelhouses, params["collection"])
        if is_whole and before is not None and set(before.items) == set(after.items):
            # Nothing newer was found.
            steps, after = [], before
        else:
            archive.parent.mkdir(parents=True, exist_ok=True)
            write(folder, after, archive)
    return answer(archive, steps, before, after)


def answer(archive: Path, steps: list[str], before: Manifest | None, after: Manifest | None) -> dict[str, Any]:
    """Return the module's result."""
    old, new = ({item.path: item for item in each.items} if each else {} for each in (before, after))
    shown = [listed(each.values()) for each in (old, new)]
    return {
        "changed": bool(steps),
        "steps": steps,
        "archive": str(archive),
        "manifest_checksum": digest_of_text(after.to_text()) if after else "",
        "added": sorted(path for path in new if path not in old),
        "removed": sorted(path for path in old if path not in new),
        "files": len(new),
        "size": sum(item.size for item in new.values()),
        "diff": {"before_header": str(archive), "after_header": str(archive), "before": shown[0], "after": shown[1]},
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
