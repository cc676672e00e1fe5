# A bare `make` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
PYTHON := $(PYTHON)
VENV := $(CURDIR)/.venv/bin

# What users import; the framework is in the name.
API := hvd_compress !hvd_compress.methods hvd_compress.torch hvd_compress.distributed hvd_compress.tensorflow hvd_compress.keras hvd_compress.mpi \
       hvd_compress.lab !hvd_compress.pipeline hvd_compress.pipeline.torch hvd_compress.pipeline.tensorflow

PAGES := build/api

# horovodrun finds mpirun, and the build its cmake, on PATH.
export PATH := $(VENV):$(PATH)
# Python keeps what it has compiled, whatever the shell says: collecting the tests takes half the time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Two processes; files whose tests start jobs come first, as they take longest.
PYTEST := $(VENV)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup dev python demo quick test commands soak mutants keras3 torchtitan horovod-tests pytorch-tests check docs fresh clean
# Each target uses every core by itself, and a run of several should print one after the other.
.NOTPARALLEL:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: python ## Make .venv with what the demo and the examples need, Horovod included (nothing to do the second time)
	@$(PYTHON) tools/setup_env.py

demo: setup ## Show what the package does, on this machine
	$(VENV)/python examples/demo.py

dev: python ## Make .venv with what tests and checks need, too (the targets below do so by themselves)
	@$(PYTHON) tools/setup_env.py dev

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
	{ echo "setup: $(PYTHON) is not Python 3.11: apt-get install python3.11-venv, or make PYTHON=..." >&2; exit 1; }

quick: dev ## Run the tests that start no job and load no TensorFlow (a minute)
	$(PYTEST) --quick

test: dev ## Run all tests: under horovodrun with 2 and 3 ranks, then all others (20 minutes)
	$(VENV)/python tests/parallel/run.py
	$(PYTEST)

commands: dev ## Run all commands of the documents, on little data (20 minutes, as root for emulated hosts)
	$(VENV)/python -m pytest -n 2 tests/commands

soak: dev ## Run long jobs with faults, 300 random schedules of faults, thousands of random programs, and the longest tests (an hour)
	$(PYTEST) --long
	$(VENV)/python tests/soak/run.py
	$(VENV)/python tests/parallel/run.py soak

mutants: dev ## Break the package in 100 places, one at a time, and list what the tests do not notice (an hour)
	$(VENV)/python tools/mutants.py

keras3: python ## Run the tests of hvd_compress.keras on Keras 3, in .venv-keras3, which it makes
	@$(PYTHON) tools/setup_env.py keras3
	$(CURDIR)/.venv-keras3/bin/python tests/keras3/run.py

torchtitan: python ## Train by torchtitan's own trainer, in .venv-torchtitan, which it makes
	@$(PYTHON) tools/setup_env.py torchtitan
	$(CURDIR)/.venv-torchtitan/bin/python -m pytest -q tests/torchtitan

horovod-tests: dev ## Run Horovod's own tests with our compression (HOROVOD=path/to/a/checkout)
	@test -n "$(HOROVOD)" || { echo "horovod-tests: name a checkout of Horovod: make $@ HOROVOD=path" >&2; exit 2; }
	$(VENV)/python tools/horovod_tests.py $(HOROVOD)

pytorch-tests: dev ## Run PyTorch's own tests of DistributedDataParallel with our hook (PYTORCH=path adds those of a checkout, and of FSDP2)
	$(VENV)/python tools/pytorch_tests.py $(PYTORCH)

check: dev ## Lint, check the types, and build the wheel and the sdist
	$(VENV)/ruff check
	$(VENV)/ruff format --check
	$(VENV)/mypy --strict hvd_compress tests examples tools
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && $(VENV)/python -m build --no-isolation --outdir "$$dir"

docs: dev ## Write the pages of the API, from its docstrings, into build/api
	$(VENV)/python -m pdoc --docformat google --no-show-source --output-directory $(PAGES) $(API)

fresh: ## Do demo, test and check in a clean clone with an empty cache, as a stranger would
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && git clone --quiet . "$$dir/clone" && \
	XDG_CACHE_HOME="$$dir/cache" PATH="$${PATH#$(VENV):}" $(MAKE) -C "$$dir/clone" demo test check

clean: ## Remove .venv and what builds leave behind (not the cache with the Horovod wheel)
	rm -rf .venv .venv.lock .venv.log .venv-*
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
