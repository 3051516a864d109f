# Every target does its own set-up: a fresh clone needs Python >= 3.11 and `make`, nothing else.
#   make demo                                   the product's main job, from nothing to tables and plots
#   make test PYTHON=python3.13                 another interpreter
#   make venv PIP_ARGS="--extra-index-url ..."  another source of torch (say, its CPU wheels)

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
# Test workers. One thread each: BLAS and OpenMP pools of several workers would fight over the same cores.
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow lint format types docs bench wheel-check clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP)  ## make .venv and install the project into it

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "mmpe needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable '.[demo,dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable '.[docs]'
	@touch $@

demo: $(STAMP)  ## train five encodings on real digits, evaluate beyond the training size (<= 10 minutes)
	$(BIN)/mmpe demo

test: $(STAMP)  ## the test suite without the slow tests
	$(PYTEST) -n $(WORKERS) $(PYTEST_ARGS)

test-slow: $(STAMP)  ## the slow tests: trainings, command-line runs, the built wheel
	$(PYTEST) -m slow $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff: style, import order, import direction
	$(BIN)/ruff check .

format: $(STAMP)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .

types: $(STAMP)  ## mypy
	$(BIN)/mypy -p mmpe

docs: $(DOCS_STAMP)  ## build the documentation into site/
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

bench: $(STAMP)  ## time and memory of every encoding
	$(BIN)/mmpe bench --encodings all --size 14 14

wheel-check: $(STAMP)  ## build sdist and wheel, use the wheel away from the repository
	$(PYTEST) -m slow tests/test_packaging.py $(PYTEST_ARGS)

clean:  ## remove what make made
	rm -rf $(VENV) build dist site docs/encodings.md *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
