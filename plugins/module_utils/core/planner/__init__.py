# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""From claims that are wanted to a layout for each device of a fleet, with the fewest moves from today. Pure.

``fleet`` says what there is, ``demands`` what is wanted, ``problem`` what each device could be and what that costs, ``search`` finds a plan,
``bounds`` says what no plan can exceed, ``plan`` turns what was found into layout rules and words.
"""
