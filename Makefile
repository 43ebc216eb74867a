# PYTHON: the interpreter to start from. VENV: the environment made from it; with VENV= (empty) PYTHON
# is used as it is and nothing is installed. A PYTHON that has a CUDA torch lends it to the environment.
PYTHON ?= python3
VENV ?= .venv
# Installed where PYTHON has no torch to lend.
TORCH ?= torch==2.13.0
# Processes that the tests are spread over, of one thread each: their tensors are small.
WORKERS ?= 2
# Further arguments of the command behind a target, such as ARGS="--hidden 7".
ARGS ?=

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
export PYTHONPATH := kernel:.$(if $(PYTHONPATH),:$(PYTHONPATH))

HAS_CUDA_TORCH := import sys, torch; sys.exit(torch.version.cuda is None)

.PHONY: help setup run test lint score bench baseline profile-nsys profile-ncu plots clean

help: ## print these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(firstword $(MAKEFILE_LIST)) | \
	  while IFS='|' read -r target text; do printf '  make %-13s %s\n' "$$target" "$$text"; done

setup: $(READY) ## create the environment .venv and install the package into it

$(VENV)/.ready: pyproject.toml
	@echo "Setting up $(VENV): this takes a few minutes once." >&2
	@if $(PYTHON) -c '$(HAS_CUDA_TORCH)' 2>/dev/null; then lend=--system-site-packages; fi; \
	  $(PYTHON) -m venv $$lend $(VENV)
	@$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install -q "$(TORCH)"
	@$(RUN) -m pip install -q -e '.[dev]'
	@touch $@

run: CASE ?= short_tail_state
run: $(READY) ## check and time one public case (CASE=short_tail_state)
	@$(RUN) run.py --case $(CASE) $(ARGS)

test: $(READY) ## run the tests; those that need a Hopper GPU skip without one
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) $(ARGS)

lint: $(READY) ## run ruff over everything
	@$(RUN) -m ruff check . $(ARGS)

score: $(READY) ## score the public and hidden cases against this device's baselines
	@$(RUN) -m harness.score $(ARGS)

bench: $(READY) ## time every public case beside the other implementations
	@$(RUN) -m harness.bench $(ARGS)

baseline: $(READY) ## measure this device's t60 and t100 and write them to cases/baselines/
	@$(RUN) -m harness.baseline $(ARGS)

profile-nsys: CASE ?= long_low_gva
profile-nsys: $(READY) ## profile one case with Nsight Systems (CASE=long_low_gva)
	@$(RUN) -m harness.profile nsys --case $(CASE) $(ARGS)

profile-ncu: CASE ?= long_low_gva
profile-ncu: $(READY) ## profile one case with Nsight Compute (CASE=long_low_gva)
	@$(RUN) -m harness.profile ncu --case $(CASE) $(ARGS)

plots: $(READY) ## draw every figure from results/ into plots/figures/
	@$(RUN) -m plots $(ARGS)

clean: ## remove caches and build output; the environment stays
	@rm -rf build dist kernel/*.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
