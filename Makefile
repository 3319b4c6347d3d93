# `make demo` and `make test` set everything up by themselves. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
# More overrides for the demo, such as DEMO="training.total_tokens=131072".
DEMO ?=
SETUP := .venv/.set-up

.PHONY: help setup demo test test-fast lint clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(SETUP)  ## make .venv and install the project with its development tools

# torch first and pinned: an unpinned one may bring gigabytes of another build.
$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llama_c4 needs Python 3.11 or newer; set PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(SETUP)  ## prepare, train, evaluate and draw: the whole way on two CPU cores, offline, in minutes
	$(BIN)/llama-c4 prepare experiment=demo
	$(BIN)/python train.py experiment=demo run.on_finished=restart $(DEMO)
	$(BIN)/llama-c4 evaluate outputs/demo
	$(BIN)/llama-c4 report outputs/demo --out outputs/demo/report.html
	$(BIN)/llama-c4 runs outputs

test: $(SETUP)  ## all tests, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-fast: $(SETUP)  ## all but the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'not slow'

lint: $(SETUP)  ## format, style, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove the environment and what tools left; run folders stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
