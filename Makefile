# Everything a checkout needs: git, make and Python 3.11 or newer. `make demo` and `make test` each do all set-up.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
PYTEST := $(BIN)/python -m pytest

# Three processes on two cores: tests wait for servers and engines as much as they compute.
JOBS ?= 3
BENCHMARKS ?= $(sort $(basename $(notdir $(shell grep -l __main__ benchmarks/*.py))))
UV ?= uv
LOCK := $(UV) pip compile --quiet --generate-hashes --no-emit-index-url --python-version 3.11 \
	--custom-compile-command 'make lock'

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test chaos check bench peers test-engines lock clean

help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(READY) ## a fleet of simulated engines, a batch, and what became of it
	$(BIN)/python -m forebay.demo

test: $(READY) ## all tests but those that need real engines
	$(PYTEST) -m 'not engines' -n $(JOBS) --dist worksteal

chaos: $(READY) ## ten minutes of kills, stops, storms and a Redis that loses; CHAOS_S, CHAOS_SEED, ... say otherwise
	$(BIN)/python -m tests.chaos

check: $(READY) ## style, types, import rules, and that documents, metadata and compose file are true
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(PYTEST) -q tests/architecture

bench: $(READY) ## the benchmarks, each a table; one alone: make bench BENCHMARKS=decision
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done

# What is measured stays in .cache/peers/runs.jsonl; a run that is there is not repeated.
peers: $(READY) ## Forebay beside other routers, into docs/benchmarks.md; hours; PEERS='--scenario killed --seeds 1'
	$(BIN)/python -m benchmarks.peers --page docs/benchmarks.md $(PEERS)

test-engines: $(READY) ## the tests against real vLLM and llama.cpp on the CPU, or why they cannot be run here
	$(BIN)/python tests/engines/environment.py
	$(PYTEST) -m engines tests/engines

lock: ## resolve requirements/ anew from pyproject.toml; needs uv
	@command -v $(UV) >/dev/null || { echo 'make lock needs uv: pip install uv, or UV=/path/to/uv' >&2; exit 1; }
	$(LOCK) pyproject.toml --extra embedded --extra s3 -o requirements/run.txt
	$(LOCK) pyproject.toml --extra embedded --extra s3 --group dev --constraint requirements/run.txt -o requirements/dev.txt
	$(LOCK) --group build --constraint requirements/dev.txt -o requirements/build.txt
	@set -e; for pins in benchmarks/peers/requirements/*.in; do $(LOCK) $$pins -o $${pins%.in}.txt; done

clean: ## remove what was made here
	rm -rf $(VENV) .cache build dist demo-output chaos-output .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is touched last, so that an interrupted set-up is done again.
$(READY): requirements/dev.txt pyproject.toml
	@test -n '$(PYTHON)' || { echo 'Forebay needs Python 3.11 or newer; name one: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@
