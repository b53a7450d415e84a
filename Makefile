# Everything a newcomer needs: `make demo` and `make test`. Both set up what they need in .venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SLOW := 'torch or ray or server'
FAST := 'not torch and not ray and not server'

.PHONY: setup demo test test-fast check fmt clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $(STAMP)

demo: setup
	$(BIN)/phalanx demo

test: check
	$(BIN)/python -m pytest -n 2 -m $(FAST); fast=$$?; \
	$(BIN)/python -m pytest -m $(SLOW) --durations=20 && exit $$fast

test-fast: setup
	$(BIN)/python -m pytest -n 2 -m $(FAST)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m service.core.diagram --check README.md

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
