# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """The options of the modules that install a group of packages at one version."""

    DOCUMENTATION = r"""
options:
  state:
    description:
      - V(present) installs the packages as the other options specify.
      - V(previous) rolls back to the version before the last change. A second run returns to the newer version.
      - V(absent) removes the packages that this module has installed, and their dependencies. If another program or user had installed a version
        before, the module restores that version with its units and holds. It keeps packages that it has never changed, unless O(remove_unmanaged=true).
    type: str
    choices: [present, previous, absent]
    default: present
  source:
    description: The package source to configure. By default, the module uses the existing package sources of the node.
    type: dict
    suboptions:
      uris:
        description:
          - The URLs of the source. If empty, the module uses the mirror that the node has for the same suite.
          - The module writes a user name and password in a URL, C(https://USER:PASSWORD@HOST/PATH), to a file that only root can read. They must be
            the same in all URLs.
        type: list
        elements: str
        default: []
      suites:
        description: The suites of the source. Only apt uses them. Use V(/) for a source without suites.
        type: list
        elements: str
        default: [/]
      components:
        description: The components of the source.
        type: list
        elements: str
        default: []
      key:
        description:
          - The key that signs the source, in ASCII armor.
          - If empty, apt uses the keys that it trusts for the same source. dnf and zypper reject a source without a key.
        type: str
        default: ""
      fingerprints:
        description:
          - The pinned fingerprints of O(source.key), which is one block in ASCII armor with nothing around it. A key file with any other primary key
            is rejected.
          - The installed key file contains only the pinned keys. A subkey is installed only if its fingerprint is listed too.
        type: list
        elements: str
        default: []
      packages_signed:
        description:
          - Whether O(source.key) signs each package in addition to the index. The index is always signed. If V(true), dnf and zypper require both
            signatures.
        type: bool
        default: true
  files:
    description:
      - The paths of packages on the node. The module installs them instead of packages from a source. The files must have the same names as in a
        repository.
    type: list
    elements: path
    default: []
  checksums:
    description: The SHA-256 digests of O(files), by file name.
    type: dict
    default: {}
  hold:
    description: Whether to hold the packages at their version. On hosts with dnf, this requires the dnf plugin C(versionlock).
    type: bool
    default: true
  keep:
    description: Whether to keep the packages on the node for a rollback.
    type: bool
    default: true
  remove_unmanaged:
    description: Whether O(state=absent) also removes packages that another program or user has installed.
    type: bool
    default: false
  timeout:
    description: The timeout in seconds for each call of the package manager.
    type: int
    default: 1200
"""
