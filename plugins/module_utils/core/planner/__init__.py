# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan a layout for each device of a fleet that serves the most demanded claims with the fewest moves. No side effects.

``fleet`` reads the devices, ``demands`` the demands. ``problem`` finds the possible configurations and their costs, and
``plan`` converts a solution to layout rules and messages. HiGHS finds the solution for a fleet, outside the core.
``one_claim`` finds the solution for one claim on one node, for ``cuts``.
"""
