#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_create
version_added: 0.1.0
short_description: Create an offline bundle with all files that a fleet needs
description:
  - Downloads the packages and wheels in O(needs), and writes them with the files and images in O(needs) to one archive. For each file, the manifest
    of the archive contains its kind, version, origin, SHA-256 digest, signing keys, and how the module verified it.
  - The module downloads packages for Debian and Ubuntu with apt, from sources whose signatures apt verifies. It accepts a vendor's source only with a
    key with a pinned fingerprint.
  - The module downloads RPM packages with dnf, for hosts with dnf and hosts with zypper, from the repositories in O(mirrors) and those of the vendors. It
    accepts each repository only with a key with a pinned fingerprint. It verifies the signature of the index, of each package, or of both, depending
    on the repository.
  - The module keeps downloaded files in O(cache_path), and does not download them again.
  - If the archive already contains all needs, the module downloads nothing and does not access the network.
notes:
  - The module runs on a host with internet access that is not part of the fleet. For apt packages, this host needs apt (any release of Debian or
    Ubuntu). For RPM packages, it needs dnf 4, createrepo_c, and rpm, which are also available in Debian and Ubuntu. For wheels, it needs pip.
  - The playbook C(dra.accelerators.bundle) determines the needs of a fleet, and calls this module.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
    details:
      - The module lists the needs that it would download, and does not access the network. The list therefore contains no versions.
  diff_mode:
    support: full
    details:
      - The diff lists the files of the archive before and after the change, with their versions. In check mode, it lists only the files before.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  archive:
    description: The path of the archive to write.
    type: path
    required: true
  cache_path:
    description: The directory for downloaded files. The module keeps them for the next run. You can delete this directory.
    type: path
    required: true
  needs:
    description: The needs, in the format of the roles of this collection.
    type: list
    elements: dict
    required: true
    suboptions:
      kind:
        description: The kind of need.
        type: str
        choices: [packages, driver, group, wheels, image, file]
        required: true
      of:
        description: The role that needs it.
        type: str
        required: true
      platform:
        description: For V(packages), V(driver), and V(group), the distribution, its release, and the architecture.
        type: dict
      names:
        description: For V(packages), the names of packages that are installed together.
        type: list
        elements: str
      wanted:
        description: For V(driver), the version, kernel modules, build, and components, as in the options of M(dra.accelerators.nvidia_driver).
        type: dict
      catalog:
        description: For V(driver), the available driver packages, as in O(dra.accelerators.nvidia_driver#module:catalog).
        type: list
        elements: dict
      parts:
        description: For V(group), the packages with a common version, each as a list of possible names. C({branch}) stands for the branch of the version.
        type: list
        elements: list
      version:
        description: For V(group), the version, or a version prefix. An empty string selects the newest version.
        type: str
      follows:
        description: For V(group), whether the group has the same version as the drivers of the platform.
        type: bool
      also:
        description: For V(group), optional packages with independent versions. The module does not fail if the source does not contain them.
        type: list
        elements: str
      headers:
        description: For V(driver), the packages with the kernel headers.
        type: list
        elements: str
      kernel:
        description: For V(driver), the kernel release.
        type: str
      source:
        description:
          - A package source in addition to those of the distribution, with C(uris), C(suites), and C(components). C(key) is the signing key, or
            C(key_url) the URL of the key. C(fingerprints) are the pinned fingerprints of the key.
          - C(more_components) are additional components of the distribution's sources. C(mirrors) are additional URLs of the distribution.
        type: dict
      status:
        description: The path on this host of a copy of a node's C(/var/lib/dpkg/status). If set, the bundle contains only packages that this node lacks.
        type: str
      python:
        description: For V(wheels), the Python version.
        type: str
      machine:
        description: For V(wheels), the architecture.
        type: str
      requirements:
        description: For V(wheels), the requirements in the format of a pip requirements file.
        type: str
      reference:
        description: For V(image), the name of the image with its tag.
        type: str
      path:
        description: For V(file), the path of the file on this host.
        type: str
      sha256:
        description: For V(file), the SHA-256 digest of the file. The module rejects a file with another digest.
        type: str
  images:
    description: The path of the file of each image in O(needs), by image name.
    type: dict
    default: {}
  mirrors:
    description:
      - Package sources that replace those of a distribution, by platform, for example C(debian_13). Each source has C(uris), C(suites), and
        C(components), and the C(keyring) with its keys, if it does not use the keyring of the distribution. With C(fingerprints), one of these keys
        must have signed the source.
      - For RPM distributions, an entry such as C(rocky_9) is required for hosts that need packages, because their repositories belong to a
        subscription or a site. Each source has C(uris), the C(key) as a file in ASCII armor, and its C(fingerprints).
      - C(packages_signed) and C(index_signed) set whether the vendor signs the packages and the index. By default, both are signed. Use an empty list
        for hosts that already have all dependencies of the vendors' packages.
    type: dict
    default: {}
  interpreter:
    description:
      - The Python interpreter whose pip downloads the wheels, also for other Python versions.
      - If empty, the module uses the interpreter that runs it.
    type: path
    default: ""
  pip_environment:
    description:
      - Environment variables for pip, such as E(PIP_INDEX_URL) and E(HTTPS_PROXY). They do not appear in the process list and in the manifest.
    type: dict
    default: {}
  collection:
    description: The release of this collection for which the bundle is created. The module writes it to the manifest.
    type: str
    default: ""
  refresh:
    description: Whether to check for newer versions if the archive already contains all needs.
    type: bool
    default: false
  timeout:
    description: The timeout in seconds for each call of apt, dnf, or pip.
    type: int
    default: 3600
seealso:
  - module: dra.accelerators.bundle_extract
"""

EXAMPLES = r"""
- name: Create a bundle with the wheels of the node driver for Debian 13
  dra.accelerators.bundle_create:
    archive: /srv/fleet.bundle
    cache_path: /srv/fleet.bundle.parts
    needs:
      - kind: wheels
        of: python_environment
        python: "3.13"
        machine: x86_64
        requirements: "{{ lookup('ansible.builtin.file', 'requirements.txt') }}"
"""

RETURN = r"""
steps:
  description: Descriptions of the steps that the module has run, or would run in check mode.
  returned: success
  type: list
  elements: str
  sample: ["gather wheels for Python 3.13 (x86_64)"]
archive:
  description: The path of the archive.
  returned: success
  type: str
  sample: /srv/fleet.bundle
manifest_checksum:
  description:
    - The SHA-256 digest of the manifest. Pass it to O(dra.accelerators.bundle_extract#module:checksum) on the offline site.
    - It is empty in check mode if the archive does not exist yet.
  returned: success
  type: str
  sample: 5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9
added:
  description: The files that were added to the archive.
  returned: success
  type: list
  elements: str
  sample: [wheels/grpcio-1.85.1-cp313-cp313-manylinux2014_x86_64.whl]
removed:
  description: The files that were removed from the archive.
  returned: success
  type: list
  elements: str
  sample: []
files:
  description: The number of files in the archive.
  returned: success
  type: int
  sample: 34
size:
  description: The total size of the files in bytes.
  returned: success
  type: int
  sample: 41943040
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: repository-key
"""

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.archive import read_manifest, verify, write
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.bundle_manifest import (
    FILE,
    BundleError,
    Manifest,
    digest_of_text,
    listed,
)
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.gather import Gatherer
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.platform import Means
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.requirements import Plan, plan
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.rpm_repository import check_mirrors
from ansible_collections.dra.accelerators.plugins.module_utils._host.driver_installation import digest_of
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._packages.argspec import hide_passwords
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

#: The timeout of the download of a key.
KEY_SECONDS = 60


def needs_spec() -> dict[str, dict[str, Any]]:
    """Return the options of a need."""
    string_options = ("version", "status", "kernel", "python", "machine", "requirements", "reference", "path", "sha256")
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
        **{name: {"type": "str"} for name in string_options},
    }


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "archive": {"type": "path", "required": True},
        "cache_path": {"type": "path", "required": True},
        "needs": {"type": "list", "elements": "dict", "required": True, "options": needs_spec()},
        "images": {"type": "dict", "default": {}},
        "mirrors": {"type": "dict", "default": {}},
        "interpreter": {"type": "path", "default": ""},
        "pip_environment": {"type": "dict", "default": {}},
        "collection": {"type": "str", "default": ""},
        "refresh": {"type": "bool", "default": False},
        "timeout": {"type": "int", "default": 3600},
    }


def needs_without_unset(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the needs without unset options."""
    return [{key: value for key, value in need.items() if value is not None} for need in params["needs"]]


def fetch(url: str) -> str:
    """Download a key. Raises BundleError."""
    try:
        with open_url(url, timeout=KEY_SECONDS) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise BundleError(
            f"The key {url} cannot be downloaded: {error}",
            hint="Set a file with the key, or check the network connection.",
            code="repository-key",
        ) from error


def read_archive(system: System, archive: Path, wanted: Plan) -> tuple[Manifest | None, bool]:
    """Return the manifest of the existing archive, and whether the archive has all needs and is undamaged."""
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
        # A damaged or foreign archive is written again.
        return None, False
    return manifest, True


def work(module: AnsibleModule, system: System | None = None) -> dict[str, Any]:
    """Gather the needed files into the archive, and return the module's result. Raises BundleError, KeyProblem, OSError."""
    hide_passwords(module)
    params = module.params
    system = system or System()
    archive, cache = Path(params["archive"]), Path(params["cache_path"])
    wanted = plan(needs_without_unset(params))
    before, is_complete = read_archive(system, archive, wanted)
    steps = [] if is_complete and not params["refresh"] else [*wanted.describe(), f"write {archive}"]
    after = before
    if steps:
        check_mirrors(wanted.platforms, params["mirrors"])
    if steps and not module.check_mode:
        cache.mkdir(parents=True, exist_ok=True)
        means = Means(
            interpreter=params["interpreter"] or sys.executable,
            fetch=fetch,
            mirrors=params["mirrors"],
            images={str(name): str(path) for name, path in params["images"].items()},
            pip_environment={key: str(value) for key, value in params["pip_environment"].items()},
            timeout=float(params["timeout"]),
        )
        gathered = Gatherer(system, str(cache), means).gather(wanted)
        after = Manifest(gathered.items, wanted.needs, gathered.wheelhouses, params["collection"])
        if is_complete and before is not None and set(before.items) == set(after.items):
            # There are no newer files.
            steps, after = [], before
        else:
            archive.parent.mkdir(parents=True, exist_ok=True)
            write(cache, after, archive)
    return result_of(archive, steps, before, after)


def result_of(archive: Path, steps: list[str], before: Manifest | None, after: Manifest | None) -> dict[str, Any]:
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
