# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: npu_claim
version_added: 0.1.0
short_description: Create the spec of a claim for several adjacent NPUs
description:
  - Returns the C(spec) of a ResourceClaim for a number of NPUs that prefers adjacent NPUs. One request has the alternatives C(same-card),
    C(same-ring), and C(any). On each node, the scheduler uses the first alternative that fits. It prefers the node with the earliest alternative.
  - With O(whole), each alternative is preceded by alternatives for NPUs of cards and rings that are already partly in use. So unused cards and
    rings stay completely available.
  - The result can also be used as C(spec.spec) of a ResourceClaimTemplate.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: The number of NPUs, from 1 to 32.
    type: int
    required: true
  device_class:
    description: The DeviceClass of the NPUs.
    type: str
    default: npu.huawei.com
  prefer:
    description:
      - The alternatives in their order, of V(same-card), V(same-ring), and V(any).
      - Without V(any), the claim stays pending until adjacent NPUs are free.
    type: list
    elements: str
    default: [same-card, same-ring, any]
  whole:
    description:
      - Whether to prefer NPUs of cards and rings that are already partly in use. A card or ring with exactly enough free NPUs has priority over one
        with more free NPUs.
      - The alternatives use the attributes C(cardFree) and C(ringFree). The option has no effect on NPUs of drivers that do not publish them.
    type: bool
    default: true
  selectors:
    description: CEL expressions that must be true for all NPUs.
    type: list
    elements: str
    default: []
  request:
    description: The name of the request.
    type: str
    default: npus
seealso:
  - module: dra.accelerators.claim_config_info
"""

EXAMPLES = r"""
- name: Create a template for four NPUs of one ring, or any four NPUs
  kubernetes.core.k8s:
    definition:
      apiVersion: resource.k8s.io/v1
      kind: ResourceClaimTemplate
      metadata:
        name: four-near
        namespace: default
      spec:
        spec: "{{ 4 | dra.accelerators.npu_claim(prefer=['same-ring', 'any'], whole=false) }}"
"""

RETURN = r"""
_value:
  description: The C(spec) of a ResourceClaim.
  type: dict
  sample:
    devices:
      requests:
        - name: npus
          firstAvailable:
            - {name: same-ring, deviceClassName: npu.huawei.com, allocationMode: ExactCount, count: 4}
            - {name: any, deviceClassName: npu.huawei.com, allocationMode: ExactCount, count: 4}
      constraints:
        - {requests: [npus/same-ring], matchAttribute: npu.huawei.com/hccsRing}
"""

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.preference import (
    NEAREST_FIRST,
    REQUEST,
    claim_spec,
)


def claim(
    chips: Any,
    device_class: str = "npu.huawei.com",
    prefer: Sequence[str] = NEAREST_FIRST,
    selectors: Sequence[str] = (),
    request: str = REQUEST,
    whole: bool = True,
) -> dict[str, Any]:
    """Return the spec of a claim for this number of NPUs. Raises AnsibleFilterError."""
    try:
        # A template can have converted the integer to a string.
        number = int(chips) if not isinstance(chips, bool) else None
        if number is None or isinstance(prefer, str) or isinstance(selectors, str):
            raise TypeError
        return claim_spec(
            number, device_class, prefer=prefer, selectors=selectors, request=request, whole=boolean(whole)
        )
    except TypeError as error:
        raise AnsibleFilterError(
            f"npu_claim: found {chips!r}, prefer {prefer!r} and selectors {selectors!r}, expected a number of NPUs and two lists"
        ) from error
    except ValueError as error:
        raise AnsibleFilterError(f"npu_claim: {error}") from error


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"npu_claim": claim}
