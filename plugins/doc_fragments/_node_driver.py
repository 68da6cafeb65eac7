# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """Options of the modules that use the indices of the node driver."""

    DOCUMENTATION = r"""
options:
  kubelet_root:
    description: The kubelet's root directory, its option C(--root-dir). It contains the state directory of the node driver.
    type: path
    default: /var/lib/kubelet
  state_directory:
    description:
      - The state directory of the node driver. The module reads the indices of the devices from it, so that it uses the same indices as the driver.
      - The default is C(plugins/DRIVER) in O(kubelet_root), with the name of the driver. Set this option if the configuration of the driver
        sets C(state_directory). It applies to the devices of one vendor.
    type: path
"""
