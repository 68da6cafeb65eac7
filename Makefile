# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
#
# `make` or `make help` lists the targets. All built and downloaded files are in the cache, outside the checkout:
# $DRA_ACCELERATORS_CACHE, or dra-accelerators in $XDG_CACHE_HOME or ~/.cache.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:
# Without the messages of a nested make, the summary is the last line on the screen.
MAKEFLAGS += --no-print-directory

CACHE := $(shell tests/tools/cache)
PYTHON := $(CACHE)/venv/bin/python

# The tools store their caches outside the checkout.
export PYTHONPYCACHEPREFIX := $(CACHE)/pycache
export RUFF_CACHE_DIR := $(CACHE)/ruff
export MYPY_CACHE_DIR := $(CACHE)/mypy
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis

.PHONY: help demo demo-ascend test prove chaos test-unit test-simulator test-cluster test-molecule molecule lint lock audit format bench rings layouts profile clean clean-cache venv tree packages

help: ## list the targets
	@printf 'usage: make TARGET\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nThe cache is %s\n' '$(CACHE)'

demo: venv tree ## run the site playbook on a cluster with a GPU node and an NPU node, and start pods with claims (15 minutes with an empty cache)
	@$(PYTHON) tests/tools/demo.py mixed

demo-ascend: venv tree ## the same with three nodes of Ascend NPUs: whole NPUs, vNPUs, two NPUs of one card, four NPUs of one ring
	@$(PYTHON) tests/tools/demo.py ascend

test: venv tree ## run the suites that every change must pass: lint, unit, simulator, cluster, molecule
	@$(PYTHON) tests/tools/suites.py lint unit simulator cluster molecule

prove: venv tree ## run all suites with their long tests; RESUME=1 skips steps that passed with the same files, PART=2/3 runs one of three parts
	@$(PYTHON) tests/tools/suites.py $(if $(filter-out 0 no false,$(RESUME)),--resume) $(if $(PART),--part '$(PART)') lint release unit simulator cluster molecule prove

chaos: venv tree ## kill the driver, damage its store, fill its disk, and make its hardware fail; CHAOS='--help' lists the options
	@$(PYTHON) -m tests.chaos $(CHAOS)

test-unit: venv tree ## test the core, parts of the daemons, and the modules without a cluster
	@$(PYTHON) tests/tools/suites.py unit

test-simulator: venv tree ## test the simulated libraries under sanitizers, and the programs and the NVIDIA backend on them
	@$(PYTHON) tests/tools/suites.py simulator

test-cluster: venv tree ## test behavior on the real cluster
	@$(PYTHON) tests/tools/suites.py cluster

test-molecule: venv tree ## run the short molecule scenarios
	@$(PYTHON) tests/tools/suites.py molecule

molecule: venv tree ## run one molecule scenario, short or long, and the builds that it needs; SCENARIO=nvidia_driver
	@$(PYTHON) tests/tools/suites.py 'molecule=$(SCENARIO)'

lint: venv tree ## run all checks that need no cluster
	@$(PYTHON) tests/tools/suites.py lint release

lock: venv ## write the locked requirements of the nodes, and their SBOM; LOCK=--upgrade selects the newest versions
	@$(PYTHON) tests/tools/lock_requirements.py $(LOCK)

audit: venv ## compare the locked requirements with known vulnerabilities; AUDIT=file.json reads a local file of advisories
	@$(PYTHON) tests/tools/audit_requirements.py $(AUDIT)

format: venv ## format the Python files and sort their imports with ruff
	@$(CACHE)/venv/bin/ruff check --quiet --select I --fix . && $(CACHE)/venv/bin/ruff format .

profile: venv tree ## show the node driver's processor time for a claim, by function; PROFILE='--kind dynamic --claims 300'
	@$(PYTHON) -m tests.bench.profile $(PROFILE)

bench: venv tree ## measure the node driver on the cluster
	@$(PYTHON) tests/tools/suites.py bench

rings: venv tree ## compare the fragmentation of cards and rings of NPUs between claims and Volcano's plugin; RINGS='--help' lists the options
	@PYTHONPATH="$$(tests/tools/tree)/python" $(PYTHON) -m tests.bench.rings $(RINGS)

layouts: venv tree ## compare the interruption by layout changes between this collection and nvidia-mig-parted; LAYOUTS='--help' lists the options
	@PYTHONPATH="$$(tests/tools/tree)/python" $(PYTHON) -m tests.bench.layouts $(LAYOUTS)

clean: ## remove the test worlds, and the files that tools have written to the checkout
	@tests/tools/clean

clean-cache: clean ## also remove the whole cache: tools, binaries, images
	rm -rf -- '$(CACHE)'

packages:
	@tests/tools/packages

venv: packages
	@tests/tools/venv dev >/dev/null

tree:
	@tests/tools/tree >/dev/null
