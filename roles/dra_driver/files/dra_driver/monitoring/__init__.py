# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What is so at this moment, for whoever watches: read when it is asked for, off the way of claims."""
