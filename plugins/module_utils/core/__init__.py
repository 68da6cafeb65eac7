# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The core: models, rules, and plans for the accelerators of a node, and the backends that read and change them.

Standard library only at import time, relative imports only, Python 3.9. The same files run inside Ansible modules and
inside the node driver, where this package is called ``dra_driver.core``.
"""

from __future__ import annotations

__version__ = "0.1.0"
