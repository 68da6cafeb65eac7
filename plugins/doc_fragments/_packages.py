# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """What every module says that brings a group of packages to one version."""

    DOCUMENTATION = r"""
options:
  state:
    description:
      - V(present) has the packages be what the other options say.
      - V(previous) goes back to the version that was there before the last change. Once more goes forward again.
      - V(absent) removes what this module has installed and what came along with it. Where somebody else had installed a version before, that
        one comes back, with its units and holds as they were. What this module has never touched stays, unless O(foreign) is true.
    type: str
    choices: [present, previous, absent]
    default: present
  source:
    description: The package source to set up. By default, the existing package sources of the node are used.
    type: dict
    suboptions:
      uris:
        description:
          - Addresses. None takes the mirror that the node has for the same suite.
          - A user name and password in an address, C(https://USER:PASSWORD@HOST/PATH), is written to a file that only root can read. All addresses
            need the same ones.
        type: list
        elements: str
        default: []
      suites:
        description: Suites, which apt alone has; V(/) for a source without any.
        type: list
        elements: str
        default: [/]
      components:
        description: Components.
        type: list
        elements: str
        default: []
      key:
        description: The key that signs it, in ASCII armour. Empty takes the keys that apt trusts for the same source; dnf and
          zypper refuse a source without one.
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
          - Whether each package has a signature by O(source.key) of its own, besides the index, which has one in any case. dnf and zypper ask for
            both then.
        type: bool
        default: true
  files:
    description: Packages on the node that are installed in place of a source's, under the names that they have in a repository.
    type: list
    elements: path
    default: []
  checksums:
    description: SHA-256 digests of O(files), by their names.
    type: dict
    default: {}
  hold:
    description: Whether the packages are held at their version. dnf does it by its plugin C(versionlock), which has to be there.
    type: bool
    default: true
  keep:
    description: Whether packages are kept on the node, for the way back.
    type: bool
    default: true
  foreign:
    description: Whether O(state=absent) also removes what somebody else has installed.
    type: bool
    default: false
  timeout:
    description: How many seconds one call of the package manager may take.
    type: int
    default: 1200
"""
