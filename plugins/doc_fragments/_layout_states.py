# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """What modules that bring devices to a layout do beside that."""

    DOCUMENTATION = r"""
options:
  state:
    description:
      - V(present) brings the devices to the layout.
      - V(asserted) says in RV(differences) how the devices differ from the layout, and changes nothing. A device that could not be read
        differs. One that no rule matches is not judged.
      - V(exported) returns in RV(exported) the present layout as rules, and changes nothing.
      - V(checkpointed) writes what the devices are to O(checkpoint_file). It fails, and writes nothing, if a device cannot be read.
      - V(restored) brings back what O(checkpoint_file) says, mode and places, whatever has become of the devices meanwhile. Devices that are
        not in it are not touched. It refuses and undoes as V(present) does.
      - V(valid) reads the layout and says what is wrong with it. No device and no driver is needed.
    type: str
    choices:
      - present
      - asserted
      - exported
      - checkpointed
      - restored
      - valid
    default: present
  on_difference:
    description:
      - With O(state=asserted), whether a difference is a failure, or is only told.
    type: str
    choices:
      - fail
      - report
    default: fail
  checkpoint_file:
    description:
      - A file on the node for O(state=checkpointed) and O(state=restored), which need it. Its content depends on the layout alone, so that a second
        checkpoint of the same layout changes nothing.
      - Devices are known in it by their UUIDs, partitions by profile and place. It says of each partition whose it is, as RV(checkpoint)
        does.
      - What the node driver had made for a claim comes back while that claim is prepared, and is named in RV(left_out) where it is not.
    type: path
  on_foreign:
    description:
      - For O(state=restored), what to do if a partition is gone that was made by hand in a form that no profile has, such as one with several
        compute instances. Only who made it can make it again. One that is still there stays.
      - V(fail) changes nothing and names it; V(leave_out) brings back all others, and names it in RV(left_out).
    type: str
    choices:
      - fail
      - leave_out
    default: fail
"""
