# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
#
# `make` or `make help` lists what there is to do. Everything built or downloaded lives in the cache, outside the
# checkout: $DRA_ACCELERATORS_CACHE, or dra-accelerators under $XDG_CACHE_HOME or ~/.cache.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:
# The summary is the last thing on the screen, also where make was called by make.
MAKEFLAGS += --no-print-directory

CACHE := $(shell tests/tools/cache)
PYTHON := $(CACHE)/venv/bin/python

# What tools remember between runs stays out of the checkout.
export PYTHONPYCACHEPREFIX := $(CACHE)/pycache
export RUFF_CACHE_DIR := $(CACHE)/ruff
export MYPY_CACHE_DIR := $(CACHE)/mypy
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis

.PHONY: help demo demo-ascend test prove chaos test-unit test-simulator test-cluster test-molecule molecule lint lock audit format bench rings layouts profile clean clean-cache venv tree packages

help: ## say what the targets are
	@printf 'usage: make TARGET\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nThe cache is %s\n' '$(CACHE)'

demo: venv tree ## a cluster with a node of GPUs and a node of NPUs, the site playbook, pods that claim (cold: about 15 minutes)
	@$(PYTHON) tests/tools/demo.py mixed

demo-ascend: venv tree ## the same with three nodes of Ascend NPUs: whole, cut into slices, pairs of a card, four of a ring
	@$(PYTHON) tests/tools/demo.py ascend

test: venv tree ## what every change passes: gates, unit, simulator, cluster, molecule
	@$(PYTHON) tests/tools/suites.py lint unit simulator cluster molecule

prove: venv tree ## the same and all that is long: before anything is called done; GO_ON=1 leaves out what has passed with the same files, PART=2/3 is for one machine of three
	@$(PYTHON) tests/tools/suites.py $(if $(filter-out 0 no false,$(GO_ON)),--go-on) $(if $(PART),--part '$(PART)') lint release unit simulator cluster molecule prove

chaos: venv tree ## the driver killed, its store damaged, its disk full, its hardware failing; CHAOS='--help' says what there is
	@$(PYTHON) -m tests.chaos $(CHAOS)

test-unit: venv tree ## the core, the daemons' parts and the modules; no cluster
	@$(PYTHON) tests/tools/suites.py unit

test-simulator: venv tree ## the simulated libraries, under sanitizers, and what runs on them: programs, the NVIDIA backend
	@$(PYTHON) tests/tools/suites.py simulator

test-cluster: venv tree ## what is seen on the real cluster
	@$(PYTHON) tests/tools/suites.py cluster

test-molecule: venv tree ## the molecule scenarios
	@$(PYTHON) tests/tools/suites.py molecule

molecule: venv tree ## one molecule scenario alone, long ones too, with all that it needs; SCENARIO=nvidia_driver
	@$(PYTHON) tests/tools/suites.py 'molecule=$(SCENARIO)'

lint: venv tree ## every gate that needs no cluster
	@$(PYTHON) tests/tools/suites.py lint release

lock: venv ## write the locked requirements of the nodes and their SBOM; LOCK=--upgrade takes the newest versions
	@$(PYTHON) tests/tools/lock_requirements.py $(LOCK)

audit: venv ## compare the locked requirements with known vulnerabilities; AUDIT=file.json for a local file of advisories
	@$(PYTHON) tests/tools/audit_requirements.py $(AUDIT)

format: venv ## let ruff format and sort the Python files
	@$(CACHE)/venv/bin/ruff check --quiet --select I --fix . && $(CACHE)/venv/bin/ruff format .

profile: venv tree ## where the node driver's processor time goes, claim by claim; PROFILE='--kind dynamic --claims 300'
	@$(PYTHON) -m tests.bench.profile $(PROFILE)

bench: venv tree ## figures of the node driver on the cluster
	@$(PYTHON) tests/tools/suites.py bench

rings: venv tree ## how whole cards and rings of NPUs stay, with our claims and with Volcano's plugin; RINGS='--help' says what there is
	@PYTHONPATH="$$(tests/tools/tree)/python" $(PYTHON) -m tests.bench.rings $(RINGS)

layouts: venv tree ## what new layouts disturb, with this collection and by nvidia-mig-parted's steps; LAYOUTS='--help' says what there is
	@PYTHONPATH="$$(tests/tools/tree)/python" $(PYTHON) -m tests.bench.layouts $(LAYOUTS)

clean: ## take the test worlds down and remove what tools left in the checkout
	@tests/tools/clean

clean-cache: clean ## remove the whole cache as well: tools, binaries, images
	rm -rf -- '$(CACHE)'

packages:
	@tests/tools/packages

venv: packages
	@tests/tools/venv dev >/dev/null

tree:
	@tests/tools/tree >/dev/null
