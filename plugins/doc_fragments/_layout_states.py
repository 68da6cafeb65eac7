# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """The states of the modules that apply a layout to devices, and their options."""

    DOCUMENTATION = r"""
options:
  state:
    description:
      - V(present) applies the layout to the devices.
      - V(checkpointed) saves the current layout of the devices to O(checkpoint_file). It fails, and writes nothing, if a device cannot be read.
      - V(restored) restores the modes and placements from O(checkpoint_file), also if the devices have changed since. It does not change
        devices that are not in this file. It rejects and rolls back changes in the same way as V(present).
    type: str
    choices:
      - present
      - checkpointed
      - restored
    default: present
  checkpoint_file:
    description:
      - The checkpoint file on the node. It is required for O(state=checkpointed) and O(state=restored). Its content depends only on the layout, so
        that a second checkpoint of the same layout changes nothing.
      - The file identifies devices by UUID, and partitions by profile and placement. It contains the owner of each partition, as in RV(checkpoint).
      - The module restores a partition that the node driver created for a claim only while this claim is prepared. Otherwise, it lists the
        partition in RV(left_out).
    type: path
  on_foreign:
    description:
      - For O(state=restored), the action if a partition no longer exists that was created manually in a form that no profile has, for example
        with several compute instances. The module cannot create such a partition. It keeps existing ones.
      - V(fail) changes nothing, and the error names the partition. V(leave_out) restores all other partitions, and lists this one in RV(left_out).
    type: str
    choices:
      - fail
      - leave_out
    default: fail
"""
