# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """The attributes of all modules: check mode, diff mode, idempotence, and platforms."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description:
      - Can run in C(check_mode) and return changed status prediction without modifying anything.
  diff_mode:
    description:
      - Returns details on what has changed, or would change in C(check_mode), when in C(diff) mode.
  idempotent:
    description:
      - When run twice in a row outside check mode with the same arguments, the second run reports no change.
      - This assumes that no other program or user changed the managed objects between the runs.
  platform:
    description:
      - Target operating systems that the module runs on.
"""

    ACTIONGROUP_K8S = r"""
options: {}
attributes:
  action_group:
    description:
      - Use C(group/dra.accelerators.k8s) in C(module_defaults) to set the options for access to the Kubernetes API, such as O(kubeconfig).
    support: full
    membership:
      - dra.accelerators.k8s
"""

    INFO_MODULE = r"""
options: {}
attributes:
  check_mode:
    support: full
    details:
      - This module never changes anything.
  diff_mode:
    support: N/A
    details:
      - This module never changes anything.
  idempotent:
    support: full
    details:
      - This module never changes anything.
"""

    FACTS = r"""
options: {}
attributes:
  facts:
    description:
      - Returns an C(ansible_facts) dictionary that later plays can use.
    support: full
"""
